"""GGUF files: read as the gguf package reads them, run as transformers runs them; what is not a Llama is refused."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader

from engine.models import gguf_convert, known
from engine.models.chat import chat_text
from engine.models.gguf_convert import STAMP, convert, converted
from engine.models.gguf_file import GGUFFile
from engine.models.loading import load
from engine.serve.engine import EngineCore
from engine.serve.request import SamplingParams
from tests.gguf_llama import SPECIAL, TEXT, tokenizer, write
from tests.test_ch17_qwen3 import depth, rounding

KINDS = [GGMLQuantizationType[name] for name in ("F32", "F16", "Q8_0", "Q4_1")]
pytestmark = pytest.mark.timeout(240)  # transformers takes its time to import


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """kind -> (GGUF file, weights before quantisation, folder converted from it)."""
    out = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind.name)
        original = write(folder / "model.gguf", kind)
        convert(folder / "model.gguf", folder)
        out[kind] = folder / "model.gguf", original, folder
    return out


def test_the_header_is_what_the_gguf_package_reads(files):
    file, _, _ = files[GGMLQuantizationType.Q4_1]
    ours, theirs = GGUFFile(file), GGUFReader(file)
    fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.fields == {key: field.contents() for key, field in fields.items()}
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.kind, mine.start, mine.num_bytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
        assert mine.shape == tuple(int(size) for size in tensor.shape[::-1])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_weights_come_back_under_their_names_and_in_their_order(files, kind):
    """To within the step between two values of the type: half of it for the nearest, and float16 scales."""
    _, original, folder = files[kind]
    got = load(folder)[0].state_dict()
    assert got.keys() - {"lm_head.weight"} == original.keys()
    for name, values in original.items():
        if kind == GGMLQuantizationType.F32 or values.ndim == 1:
            assert torch.equal(got[name], values), name
            continue
        if kind == GGMLQuantizationType.F16 and "embed" not in name:
            assert torch.equal(got[name], values.half().float()), name
            continue
        blocks = values.reshape(-1, 32)
        eight = kind == GGMLQuantizationType.Q8_0 or "embed" in name
        step = blocks.abs().amax(1) / 127 if eight else (blocks.amax(1) - blocks.amin(1)) / 15
        slack = blocks.abs().amax(1) * 2**-10  # scale and minimum are float16
        error = (got[name].reshape(-1, 32) - blocks).abs().amax(1)
        assert (error <= 0.5 * step + slack).all(), name


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_weights_and_logits_are_those_of_transformers(files, kind):
    """transformers reads the GGUF file itself: quantisation, order of rows and names are its own work."""
    from transformers import AutoModelForCausalLM

    file, _, folder = files[kind]
    reference = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    model, made = load(folder)
    theirs = reference.state_dict()
    for name, values in model.state_dict().items():
        assert torch.equal(values, theirs[name]), name
    ids = torch.tensor([made.encode(TEXT).ids[:60]])
    with torch.inference_mode():
        got, expected = model(ids), reference(ids).logits
    atol = 2 * rounding(depth(model.cfg, 60), expected.abs().max())
    torch.testing.assert_close(got, expected, atol=atol, rtol=0)


@pytest.mark.parametrize(
    "text", [TEXT, "12345", "a1b22 333\n4,000", " <|im_start|>x 7<|im_end|>", "naïve 日本 ½ ٣٤", ""]
)
def test_the_tokenizer_is_the_one_that_was_written(files, text):
    """Digits stand alone, special tokens are one token, and the text comes back."""
    _, made = load(files[KINDS[0]][2])
    ids = made.encode(text).ids
    assert ids == tokenizer().encode(text).ids
    assert made.decode(ids, skip_special_tokens=False) == text
    tokens = [made.id_to_token(i) for i in ids]
    assert all(len(token) == 1 for token in tokens if any(c in "0123456789" for c in token))
    assert [t for t in tokens if t in SPECIAL] == [t for t in ("<|im_start|>", "<|im_end|>") if t in text]


def test_transformers_agrees_on_tokens_and_chat(files):
    from transformers import AutoTokenizer

    folder = files[KINDS[0]][2]
    theirs, (_, ours) = AutoTokenizer.from_pretrained(folder), load(folder)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Is 144 a square?"}]
    text = chat_text(folder, messages)
    assert text == theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    wanted = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ours.encode(text, add_special_tokens=False).ids == wanted
    assert theirs.eos_token == "<|im_end|>" and load(folder)[0].cfg.eos_token_id == 2


def drop(key):
    return lambda fields, tensors: fields.pop(key)


def setting(key, value):
    return lambda fields, tensors: fields.update({key: value})


def without(name):
    return lambda fields, tensors: tensors.pop(name)


def extra(fields, tensors):
    tensors["blk.0.attn_q.bias"] = np.zeros(96, np.float32), GGMLQuantizationType.F32


def short(fields, tensors):
    tensors["blk.1.ffn_up.weight"] = np.zeros((7, 96), np.float32), GGMLQuantizationType.F32


STRANGERS = {
    "another architecture": (setting("general.architecture", "qwen2"), "qwen2"),
    "no layers": (drop("llama.block_count"), "block_count"),
    "layers as text": (setting("llama.block_count", "two"), "block_count"),
    "no hidden size": (drop("llama.embedding_length"), "embedding_length"),
    "a billion layers": (setting("llama.block_count", 10**9), "1000000000 layers"),
    "one layer more": (setting("llama.block_count", 3), "missing tensors model.layers.2"),
    "one layer less": (setting("llama.block_count", 1), "unexpected tensors model.layers.1"),
    "five heads": (setting("llama.attention.head_count", 5), "num_attention_heads 5"),
    "no heads": (setting("llama.attention.head_count", 0), "num_attention_heads"),
    "wide heads": (setting("llama.rope.dimension_count", 32), "attn_"),
    "odd heads": (setting("llama.rope.dimension_count", 15), "head_dim"),
    "a wide model": (setting("llama.embedding_length", 4_000_000_000), "shape|sizes"),
    "scaled positions": (setting("llama.rope.scaling.type", "yarn"), "scaling"),
    "experts": (setting("llama.expert_count", 8), "expert"),
    "no embedding": (without("token_embd.weight"), "vocab_size"),
    "no norm": (without("output_norm.weight"), "missing tensors model.norm"),
    "a bias": (extra, "unexpected tensors"),
    "a short matrix": (short, "blk.1.ffn_up"),
    "another tokenizer": (setting("tokenizer.ggml.model", "llama"), "tokenizer 'llama'"),
    "another pre-tokenizer": (setting("tokenizer.ggml.pre", "qwen2"), "qwen2"),
    "no merges": (drop("tokenizer.ggml.merges"), "merges"),
    "merges of three": (setting("tokenizer.ggml.merges", ["a b c"]), "no pair"),
    "merges of strangers": (setting("tokenizer.ggml.merges", ["xyz zyx"]), "tokens"),
    "tokens as numbers": (setting("tokenizer.ggml.tokens", [1, 2]), "list of strings"),
    "tokens twice": (setting("tokenizer.ggml.tokens", ["a", "a"]), "twice"),
    "two tokens": (setting("tokenizer.ggml.tokens", ["a", "b"]), "embeddings|tokens"),
    "eos out of range": (setting("tokenizer.ggml.eos_token_id", 10**6), "eos_token_id"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_are_refused_in_one_line_with_the_file(name, tmp_path):
    change, what = STRANGERS[name]
    write(tmp_path / "m.gguf", change=change)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(ValueError, match=f"(?s)m.gguf.*({what})") as raised:
        convert(tmp_path / "m.gguf", out)
    assert "\n" not in str(raised.value) and not list(out.iterdir())


def test_conversion_happens_once_and_leaves_nothing_half_done(tmp_path, capsys, monkeypatch):
    file, folder = tmp_path / "m.gguf", tmp_path / "cache" / "model"
    write(file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    with pytest.raises(ValueError, match="sha256"):
        converted(file, folder, "0" * 64)
    assert not folder.exists()

    def full_disk(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(gguf_convert, "save_file", full_disk)
        with pytest.raises(OSError, match="No space"):
            converted(file, folder, digest)
    assert not list((tmp_path / "cache").iterdir())

    capsys.readouterr()
    assert converted(file, folder, digest) == folder and "once" in capsys.readouterr().err
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert converted(file, folder, digest) == folder and capsys.readouterr().err == ""
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    (folder / STAMP).write_text(json.dumps({"version": 0, "sha256": digest}))  # an older converter's
    converted(file, folder, digest)
    assert (folder / "model.safetensors").stat().st_mtime_ns > before
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["model"]


needs_smollm2 = pytest.mark.skipif(not known.KNOWN["smollm2"].is_here(), reason="python run.py get smollm2")
PLAIN = ["Gravity is", "def fibonacci(n):\n", "In 1492, 3 ships sailed"]
CHAT = ["What is the capital of France?", "Name three primes above 100."]


@needs_smollm2
def test_smollm2_writes_what_transformers_writes():
    """Logits of the prompts, and 64 greedy tokens of each, from the same weights: plain text and chat."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    folder = known.resolve("smollm2")
    model, made = load(folder, dtype="float32")
    reference, theirs = LlamaForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    prompts = [made.encode(text).ids for text in PLAIN]
    assert prompts == [theirs(text)["input_ids"] for text in PLAIN]
    for text in CHAT:
        messages = [{"role": "user", "content": text}]
        prompts.append(made.encode(chat_text(folder, messages), add_special_tokens=False).ids)
        assert prompts[-1] == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]

    params = SamplingParams(max_tokens=64, ignore_eos=True)
    outputs = EngineCore(model, eos_token_id=model.cfg.eos_token_id).generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            got, expected = model(ids), reference(ids).logits
            atol = 2 * rounding(depth(model.cfg, len(prompt)), expected.abs().max())
            torch.testing.assert_close(got, expected, atol=atol, rtol=0)
            wanted = reference.generate(ids, max_new_tokens=64, min_new_tokens=64, do_sample=False, eos_token_id=None)
        assert output.output_token_ids == wanted[0, len(prompt) :].tolist(), made.decode(prompt)
    answer = outputs[len(PLAIN)].output_token_ids
    assert made.decode(answer[: answer.index(2)]) == "The capital of France is Paris."


@needs_smollm2
def test_smollm2_is_read_as_the_gguf_package_reads_it():
    file = Path(known._smollm2_package())
    ours, theirs = GGUFFile(file), GGUFReader(file)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.fields[key] == field.contents(), key
    assert {t.name: (t.data_offset, t.n_bytes) for t in theirs.tensors} == {
        name: (t.start, t.num_bytes) for name, t in ours.tensors.items()
    }
    assert load("smollm2")[1].encode("2024").tokens == list("2024")
