"""Chapter 17: checkpoint folders written by transformers load by name; damaged ones are refused in one line."""

import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.config import Qwen3Config
from engine.models.loading import load
from engine.models.qwen3 import test_model as build_model

SIZES = {
    "vocab_size": 70, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 10, "eos_token_id": [3, 5], "bos_token_id": 1,
}  # fmt: skip
SAVED = {
    "single": {},
    "sharded": {"max_shard_size": "12KB"},
    "tied": {"tie_word_embeddings": True},
    "tied sharded": {"tie_word_embeddings": True, "max_shard_size": "12KB"},
    "bf16": {"dtype": torch.bfloat16},
    "f16": {"dtype": torch.float16},
    "llama": {"family": "llama"},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """name -> (folder, transformers' model) of everything in SAVED, as save_pretrained writes it."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3ForCausalLM
    from transformers import Qwen3Config as TheirQwen3Config
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    classes = {
        "qwen3": (TheirQwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }
    out = {}
    for name, options in SAVED.items():
        options = dict(options)
        config_class, model_class = classes[options.pop("family", "qwen3")]
        shards, dtype = options.pop("max_shard_size", "1GB"), options.pop("dtype", torch.float32)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = model_class(config_class(**SIZES, **options)).eval()
            for p in model.parameters():
                torch.nn.init.normal_(p, 1.0 if p.ndim == 1 else 0.0, 0.2)
        model = model.to(dtype)
        folder = tmp_path_factory.mktemp(name.replace(" ", "_"))
        model.save_pretrained(folder, max_shard_size=shards)
        out[name] = (folder, model)
    return out


@pytest.fixture
def folder(written, tmp_path):
    """A copy of a checkpoint folder to damage."""

    def copy(name):
        return shutil.copytree(written[name][0], tmp_path / "checkpoint")

    return copy


@pytest.mark.parametrize("name", SAVED)
def test_loads_what_transformers_wrote(written, name):
    path, reference = written[name]
    files = list(path.glob("*.safetensors"))
    assert len(files) > 2 if "sharded" in name else len(files) == 1
    model, tokenizer = load(path)
    assert tokenizer is None
    expected = reference.state_dict()
    got = model.state_dict()
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert got[key].dtype == value.dtype and torch.equal(got[key], value), key
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == ("tied" in name)
    assert not model.training and not any(p.requires_grad or p.is_meta for p in model.parameters())
    assert model.cfg.eos_token_id == (3, 5)
    assert model.cfg.rope_theta == (777.0 if name == "theta" else 10_000.0)
    if reference.dtype == torch.float32:
        ids = torch.arange(20)[None] * 3 % 70
        with torch.inference_mode():
            torch.testing.assert_close(model(ids), reference(ids).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("wanted", [torch.float32, "float16", torch.bfloat16])
def test_dtype_can_be_chosen(written, wanted):
    path, reference = written["bf16"]
    model, _ = load(path, dtype=wanted)
    dtype = getattr(torch, wanted) if isinstance(wanted, str) else wanted
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert torch.equal(model.model.norm.weight, reference.model.norm.weight.to(dtype))
    with torch.inference_mode():
        assert model(torch.tensor([[1, 2]])).dtype == torch.float32


def test_dtype_is_that_of_the_files_when_the_config_is_silent(written, folder):
    path = folder("bf16")
    edit(path, "config.json", dtype=None)
    assert load(path)[0].lm_head.weight.dtype == torch.bfloat16
    edit(path, "config.json", torch_dtype="float16")
    assert load(path)[0].lm_head.weight.dtype == torch.float16
    with pytest.raises(ValueError, match="int8"):
        load(path, dtype=torch.int8)


def test_loading_leaves_random_state_and_files_alone(folder):
    path = folder("single")
    before = torch.get_rng_state()
    model, _ = load(path)
    assert torch.equal(before, torch.get_rng_state())
    weight = model.lm_head.weight.clone()
    with (path / "model.safetensors").open("r+b") as file:  # the weights are a copy, not a window on the file
        file.seek(-5000, 2)
        file.write(b"\xff" * 5000)
    assert torch.equal(model.lm_head.weight, weight)


def test_end_tokens_of_the_generation_config_come_first(folder):
    path = folder("single")
    edit(path, "config.json", eos_token_id=9)
    assert load(path)[0].cfg.eos_token_id == (3, 5)
    edit(path, "generation_config.json", eos_token_id=None)
    assert load(path)[0].cfg.eos_token_id == 9
    (path / "generation_config.json").unlink()
    assert load(path)[0].cfg.eos_token_id == 9


def test_tokenizer(folder):
    from tokenizers import Tokenizer, models

    path = folder("single")
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(path / "tokenizer.json"))
    assert load(path)[1].encode("b").ids == [1]
    (path / "tokenizer.json").write_text('{"model": 3}')
    refused(path, "tokenizer.json", "not a tokenizer")


def test_older_spellings(folder):
    """rope_theta at the top level, frequencies stored in the file, a tied head stored twice."""
    path = folder("tied")
    edit(path, "config.json", rope_parameters=None, rope_theta=123.0, rope_scaling=None)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(5)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors")
    model, _ = load(path)
    assert model.cfg.rope_theta == 123.0
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tensors["lm_head.weight"][3, 4] += 1
    save_file(tensors, path / "model.safetensors")
    refused(path, "lm_head.weight is not the embedding")


# Damage: what is done to the folder of which checkpoint, and what the message must name.


def edit(path, file, **changes):
    content = json.loads((path / file).read_text())
    content = {k: v for k, v in (content | changes).items() if v is not None}
    (path / file).write_text(json.dumps(content))


def change(**tensors):
    def do(path):
        file = path / "model.safetensors"
        content = load_file(file)
        for name, value in tensors.items():
            content[name] = value
            if value is None:
                del content[name]
        save_file(content, file)

    return do


def cut(keep):
    def do(path):
        file = path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:keep])

    return do


def shard(path, i):
    return sorted(path.glob("model-*.safetensors"))[i]


def reshard(path, tensor, file):
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"][tensor] = file
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def config(**changes):
    return lambda path: edit(path, "config.json", **changes)


def text(file, content):
    return lambda path: (path / file).write_text(content)


K_PROJ = "model.layers.1.self_attn.k_proj.weight"
DAMAGE = {
    "no config": ("single", lambda p: (p / "config.json").unlink(), ["config.json"]),
    "no weights": ("single", lambda p: (p / "model.safetensors").unlink(), ["model.safetensors"]),
    "pickled weights only": (
        "single",
        lambda p: (p / "model.safetensors").rename(p / "pytorch_model.bin"),
        ["model.safetensors"],
    ),
    "no shard": ("sharded", lambda p: shard(p, 1).unlink(), ["model-00002-of-", "no such file"]),
    "tensor missing": ("single", change(**{K_PROJ: None}), ["missing", K_PROJ]),
    "tensor unexpected": ("single", change(**{"model.what": torch.ones(2)}), ["unexpected", "model.what"]),
    "shape": ("single", change(**{K_PROJ: torch.ones(24, 20)}), [K_PROJ, "[24, 20]", "[20, 24]"]),
    "integer weights": ("single", change(**{K_PROJ: torch.ones(20, 24, dtype=torch.int8)}), [K_PROJ, "I8"]),
    "head missing, untied": ("single", change(**{"lm_head.weight": None}), ["missing", "lm_head.weight"]),
    "head there, not the embedding": ("single", config(tie_word_embeddings=True), ["lm_head.weight"]),
    "no q/k norms": ("llama", config(model_type="qwen3", head_dim=10), ["missing", "k_norm"]),
    "empty file": ("single", cut(0), ["model.safetensors", "truncated"]),
    "half a header": ("single", cut(60), ["model.safetensors", "truncated"]),
    "truncated data": ("single", cut(-4000), ["model.safetensors", "truncated"]),
    "huge header": (
        "single",
        lambda p: (p / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{}" * 99),
        ["model.safetensors", str(1 << 62)],
    ),
    "header no JSON": (
        "single",
        lambda p: (p / "model.safetensors").write_bytes(struct.pack("<Q", 40) + b"x" * 400),
        ["model.safetensors"],
    ),
    "config no JSON": ("single", text("config.json", "{,}"), ["config.json", "JSON"]),
    "config nested": ("single", text("config.json", "[" * 100_000), ["config.json", "JSON"]),
    "config a list": ("single", text("config.json", "[1]"), ["config.json", "list"]),
    "generation config no JSON": ("single", text("generation_config.json", "{"), ["generation_config.json", "JSON"]),
    "index no JSON": ("sharded", text("model.safetensors.index.json", "nope"), ["index.json", "JSON"]),
    "index empty": ("sharded", text("model.safetensors.index.json", "{}"), ["index.json", "weight_map"]),
    "index leads out of the folder": (
        "sharded",
        lambda p: reshard(p, K_PROJ, "../x.safetensors"),
        ["index.json", ".."],
    ),
    "index names the wrong shard": (
        "sharded",
        lambda p: reshard(p, "model.norm.weight", shard(p, 1).name),
        ["model.norm.weight", "model-0000"],
    ),
    "architecture": ("single", config(model_type="gpt2"), ["config.json", "gpt2"]),
    "field missing": ("single", config(hidden_size=None), ["config.json", "hidden_size"]),
    "field a text": ("single", config(hidden_size="24"), ["config.json", "hidden_size", "'24'"]),
    "heads do not divide": ("single", config(num_key_value_heads=3), ["config.json", "num_key_value_heads 3"]),
    "odd head": ("single", config(head_dim=11), ["config.json", "head_dim is 11"]),
    "layers without end": ("single", config(num_hidden_layers=10**9), ["config.json", "num_hidden_layers"]),
    "width without end": ("single", config(hidden_size=10**30), ["config.json"]),
    "scaled rope": (
        "single",
        config(rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}),
        ["config.json", "yarn"],
    ),
    "older scaled rope": ("single", config(rope_scaling={"type": "linear"}, rope_parameters=None), ["linear"]),
    "sliding window": ("single", config(use_sliding_window=True), ["config.json", "use_sliding_window"]),
    "activation": ("single", config(hidden_act="gelu"), ["config.json", "gelu"]),
    "quantized": ("single", config(quantization_config={"bits": 4}), ["config.json", "quantization_config"]),
    "dtype": ("single", config(dtype="float8"), ["config.json", "float8"]),
    "end token": ("single", text("generation_config.json", '{"eos_token_id": "</s>"}'), ["eos_token_id", "</s>"]),
    "theta": ("single", config(rope_parameters={"rope_theta": -1.0}), ["config.json", "rope_theta is -1.0"]),
}


def refused(path, *named):
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    assert str(path) in message
    for text in named:
        assert text in message, message
    return caught.value


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_refused_in_one_line(folder, case):
    name, damage, named = DAMAGE[case]
    path = folder(name)
    damage(path)
    error = refused(path, *named)
    assert isinstance(error, FileNotFoundError) == (
        case in ("no config", "no weights", "pickled weights only", "no shard")
    )


def test_no_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load(tmp_path / "nowhere")


def test_defaults_of_the_families():
    bare = {k: SIZES[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    bare |= {"num_attention_heads": 4}
    llama, qwen = (Qwen3Config.from_dict(bare | {"model_type": t}) for t in ("llama", "qwen3"))
    assert (llama.head_dim, llama.num_key_value_heads, llama.qk_norm, llama.eos_token_id) == (6, 4, False, None)
    assert (qwen.head_dim, qwen.num_key_value_heads, qwen.qk_norm) == (128, 4, True)


def test_the_test_model_is_seeded_and_leaves_the_global_seed_alone():
    before = torch.get_rng_state()
    one, same, other = build_model(4), build_model(4), build_model(5)
    assert torch.equal(before, torch.get_rng_state())
    for a, b, c in zip(one.parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b) and not torch.equal(a, c)
