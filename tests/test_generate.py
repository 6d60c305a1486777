"""run.py generate: text that is whole at every moment, and the same as decoding all at once."""

import io
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import run
from engine import kv_cache
from engine.milestones import generate
from engine.milestones.generate import Sample, Writer
from engine.models.known import resolve
from engine.models.loading import load
from engine.serve.detokenize import CONTEXT, Detokenizer
from tests.sections import ROOT
from tests.toy import one_line

TINY = Tokenizer.from_file(str(resolve("tiny") / "tokenizer.json"))
VOCAB = TINY.get_vocab_size()
SHARP = "naïve café: 日本語, 👩‍👩‍👧 and «Ωmega» — \N{COMBINING ACUTE ACCENT}e\r\n\tno  double   spaces lost "


def spaced() -> Tokenizer:
    """As Llama 2's: words begin with ▁, other bytes are tokens of their own, a text's first space is dropped."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(["the cat sat on the mat and the dog ate the hat"] * 5, trainer)
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.add_special_tokens(["</s>"])
    return plain


SPACED = spaced()
pieces = st.lists(st.integers(1, 5), min_size=1)


def stream(tokenizer, prompt, output, sizes) -> list[str]:
    """Output through a Detokenizer, in groups of these sizes over and over; the last piece is that of `finish`."""
    detokenizer, parts, at = Detokenizer(tokenizer, prompt), [], 0
    while at < len(output):
        size = sizes[len(parts) % len(sizes)]
        parts.append(detokenizer.add(output[at : at + size]))
        at += size
    return [*parts, detokenizer.finish()]


@given(st.lists(st.integers(0, VOCAB - 1), max_size=200), pieces)
@settings(max_examples=150)
def test_any_tokens_of_bytes_give_the_full_decoding(output, sizes):
    """Random tokens hold broken characters at every place, and <|endoftext|>, which is no text."""
    assert "".join(stream(TINY, [], output, sizes)) == TINY.decode(output)


@given(st.lists(st.sampled_from([TINY.token_to_id(c) for c in "âĤ¬ðŁĳ©a"] + [0]), max_size=80), pieces)
@settings(max_examples=150)
def test_single_bytes_of_characters_in_any_order(output, sizes):
    parts = stream(TINY, [], output, sizes)
    assert "".join(parts) == TINY.decode(output)


@pytest.mark.parametrize("tokenizer", [TINY, SPACED], ids=["bytes", "spaces"])
@given(st.text(max_size=60), st.text(max_size=200), pieces)
@settings(max_examples=100)
def test_text_goes_on_where_the_prompt_ends(tokenizer, before, after, sizes):
    prompt, output = tokenizer.encode(before).ids, tokenizer.encode(SHARP + after).ids
    whole, start = tokenizer.decode(prompt + output), tokenizer.decode(prompt)
    assert whole.startswith(start)
    parts = stream(tokenizer, prompt, output, sizes)
    assert "".join(parts) == whole[len(start) :]
    assert not any("\ufffd" in part for part in parts[:-1]) or "\ufffd" in whole, "a broken character went out"


@pytest.mark.parametrize("tokenizer", [TINY, SPACED], ids=["bytes", "spaces"])
def test_text_is_not_held_back_for_long(tokenizer):
    """A piece is due as soon as its characters are whole; only a character's first tokens give nothing."""
    output = tokenizer.encode("the cat sat on the mat " * 20).ids
    detokenizer, sent = Detokenizer(tokenizer, tokenizer.encode("and").ids), 0
    for i, token in enumerate(output):
        sent += len(detokenizer.add([token]))
        assert sent >= len(tokenizer.decode(output[: i + 1])), f"token {i}"


def test_the_window_does_not_grow():
    class Counting:
        longest = 0

        def decode(self, token_ids, skip_special_tokens):
            self.longest = max(self.longest, len(token_ids))
            return TINY.decode(token_ids, skip_special_tokens=skip_special_tokens)

    counting = Counting()
    detokenizer = Detokenizer(counting, TINY.encode("short").ids)
    for token in TINY.encode(SHARP * 60).ids:
        detokenizer.add([token])
    assert counting.longest <= 6 * CONTEXT  # it is cut between characters, so not always at once


def test_the_first_sample_streams_and_the_others_follow_in_order():
    out = io.StringIO()
    a, b = Sample("[1]\n", None), Sample("[2]\n", None)
    writer = Writer({("0", 0): a, ("1", 0): b}, stream=True, out=out)
    seen = []
    for first, second, done in (("one", "uno", None), (" two", " due", b), ("", "", a)):
        a.pending, b.pending = a.pending + first, b.pending + second
        if done:
            done.finished = True
        writer.flush()
        seen.append(out.getvalue())
    assert seen == ["[1]\none", "[1]\none two", "[1]\none two\n[2]\nuno due\n"]


def test_without_streaming_nothing_is_written_before_it_is_done():
    out = io.StringIO()
    sample = Sample("", None, pending="text")
    writer = Writer({("0", 0): sample}, stream=False, out=out)
    writer.flush()
    assert out.getvalue() == ""
    sample.finished = True
    writer.flush()
    assert out.getvalue() == "text\n"


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", dtype="float32")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """run.py sets these; monkeypatch puts them back."""
    for name in ("IMPL", "BORROW", "MODEL_CACHE"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    if not os.environ["IMPL"]:
        monkeypatch.delenv("IMPL")


def text_of(capsys, *arguments) -> tuple[str, str]:
    assert generate.main(run.parser().parse_args(["generate", *arguments])) == 0
    return capsys.readouterr()


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_greedy_text_is_that_of_the_plain_loop(tiny, capsys, stream):
    model, tokenizer = tiny
    prompts = ["In the beginning", "KING. What news", "In the beginning"]
    given_prompts = [word for prompt in prompts for word in ("--prompt", prompt)]
    got = text_of(capsys, *given_prompts, "--temperature", "0", "--max-tokens", "20", stream)
    expected = ""
    for i, prompt in enumerate(prompts):
        ids = tokenizer.encode(prompt).ids
        tokens = kv_cache.generate(model, ids, 20, eos_token_id=model.cfg.eos_token_id)
        expected += f"[{i + 1}]\n{tokenizer.decode(ids + tokens)}\n"
    assert got.out == expected
    assert "60 tokens in" in got.err and "first token after" in got.err and "prefix cache" in got.err


def test_samples_depend_on_the_seed_and_on_nothing_else(capsys):
    arguments = ("--prompt", "And he said", "--n", "3", "--max-tokens", "12")
    first, again = text_of(capsys, *arguments), text_of(capsys, *arguments, "--backend", "reference")
    other = text_of(capsys, *arguments, "--seed", "1")
    assert first.out == again.out != other.out
    texts = first.out.split("[1, sample ")[1:]
    assert len(texts) == 3 and len({text.split("\n", 1)[1] for text in texts}) == 3


def test_ignoring_the_end_goes_on(tiny, capsys, monkeypatch):
    model, tokenizer = tiny
    prompt = "And he said"
    ends = kv_cache.generate(model, tokenizer.encode(prompt).ids, 4)[3]  # the fourth token shall end the text

    def load_with_end(folder, dtype, device):
        model.cfg.eos_token_id = ends
        return model, tokenizer

    monkeypatch.setattr(generate, "load", load_with_end)
    monkeypatch.setattr(model.cfg, "eos_token_id", model.cfg.eos_token_id)
    arguments = ("--prompt", prompt, "--temperature", "0", "--max-tokens", "9")
    assert "4 out (stop)" in text_of(capsys, *arguments).err
    assert "9 out (length)" in text_of(capsys, *arguments, "--ignore-eos").err


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--prompt", ""),
        ("--prompt", "a", "--model", "nobody"),
        ("--prompt", "a", "--model", "/nowhere/at/all"),
        ("--prompt", "a", "--model", str(ROOT / "engine")),
        ("--prompt", "a", "--chat"),
        ("--prompt", "a", "--max-tokens", "512"),
        ("--prompt", "a", "--max-tokens", "0"),
        ("--prompt", "a", "--temperature", "-1"),
        ("--prompt", "a", "--temperature", "nan"),
        ("--prompt", "a", "--top-p", "0"),
        ("--prompt", "a", "--top-k", "-1"),
        ("--prompt", "a", "--n", "0"),
        ("--prompt", "a", "--threads", "0"),
        ("--prompt", "a", "--backend", "nobody"),
    ],
    ids=lambda a: " ".join(a[-2:]) or "nothing",
)
def test_bad_input_is_one_line_and_status_2(arguments, capsys):
    assert run.main(["generate", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("run.py generate: ")


@pytest.mark.parametrize("arguments", [("--dtype", "int8"), ("--top-k", "many"), ("--promt", "a")])
def test_bad_options_are_one_line_and_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        run.main(["generate", *arguments])
    assert stopped.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_as_a_command():
    """Once as a reader types it: text on stdout and nothing else there, in a locale without Unicode."""
    command = [sys.executable, "run.py", "generate", "--prompt", "In the beginning", "--max-tokens", "8"]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("In the beginning"), done
    missing = subprocess.run([*command[:3], "--model", "nobody", "--prompt", "a"], cwd=ROOT, env=env,
                             capture_output=True, text=True)  # fmt: skip
    assert one_line(missing).startswith("run.py generate: nobody: no such folder")
