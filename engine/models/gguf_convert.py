"""A Llama in a GGUF file as a Hugging Face folder: weights dequantised, rows and names put back, tokenizer rebuilt."""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.models.config import Qwen3Config
from engine.models.gguf_file import GGUFFile
from engine.models.qwen3 import Qwen3

VERSION = 1  # of what is written; a folder of another version is converted again
STAMP = "converted.json"
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL, USER_DEFINED = 3, 4  # token types of GGUF


def converted(file: Path, folder: Path, sha256: str) -> Path:
    """The folder with `file` converted; converts it unless that was done before. ValueError if the file is another."""
    stamp = json.dumps({"version": VERSION, "sha256": sha256})
    if not _has_stamp(folder, stamp):
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != sha256:
            raise ValueError(f"{file}: sha256 is {found}, expected {sha256}; install it again")
        print(f"converting {file.name}, once, into {folder}", file=sys.stderr)
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
        try:
            convert(file, part)
            (part / STAMP).write_text(stamp)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(part, folder)
        except OSError:
            if not _has_stamp(folder, stamp):  # else another process was first
                raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def _has_stamp(folder: Path, stamp: str) -> bool:
    return (folder / STAMP).is_file() and (folder / STAMP).read_text() == stamp


def convert(file: Path, folder: Path) -> None:
    """Write config, weights (float32), tokenizer and chat template of a GGUF file into an existing folder.

    ValueError, which names the file, if it is damaged, or holds no Llama that `engine.models` computes.
    """
    source = GGUFFile(file)
    try:
        config = read_config(source)
        weights = read_weights(source, config)
        tokenizer, tokenizer_config = read_tokenizer(source)
    except ValueError as error:
        raise ValueError(error if str(file) in str(error) else f"{file}: {error}") from None
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id") if name in config}
    for name, content in (
        ("config.json", config),
        ("generation_config.json", ends),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_config(source: GGUFFile) -> dict:
    """The config.json; only what these modules compute is accepted."""
    fields = source.fields
    if (architecture := fields.get("general.architecture")) != "llama":
        raise ValueError(f"general.architecture is {architecture!r}; only 'llama' is read")
    for key, value in fields.items():
        if key.startswith(("llama.rope.scaling", "llama.expert")) and value not in (0, "none"):
            raise ValueError(f"{key} is {value!r}, which is not supported")

    def need(key, kind=int):
        value = fields.get(f"llama.{key}")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"llama.{key} is {value!r}")
        return value

    heads = need("attention.head_count")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": source.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in source.tensors else 0,
        "hidden_size": need("embedding_length"),
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon", float),
        "rope_theta": fields.get("llama.rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "dtype": "float32",
    }
    for name in ("bos", "eos"):
        if (token := fields.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[f"{name}_token_id"] = token
    config["head_dim"] = fields.get("llama.rope.dimension_count", config["hidden_size"] // max(heads, 1))
    if config["num_hidden_layers"] > len(source.tensors):
        raise ValueError(f"{config['num_hidden_layers']} layers, but only {len(source.tensors)} tensors")
    Qwen3Config.from_dict(config)  # raises for values that contradict each other
    return config


def read_weights(source: GGUFFile, config: dict) -> dict[str, torch.Tensor]:
    """Name -> float32 tensor, under Hugging Face's names; names and shapes are checked before any is read."""
    expected = _expected_shapes(config)
    ours = {_rename(name): name for name in source.tensors}
    for kind, names in (("missing", expected.keys() - ours.keys()), ("unexpected", ours.keys() - expected.keys())):
        if names:
            raise ValueError(f"{kind} tensors {', '.join(sorted(names)[:3])}")
    for name, theirs in ours.items():
        if (shape := source.tensors[theirs].shape) != expected[name]:
            raise ValueError(f"{theirs} has shape {list(shape)}; the sizes in the file ask for {list(expected[name])}")
    weights = {}
    for name, theirs in ours.items():
        values = torch.from_numpy(source.array(theirs))
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = neighbours_to_halves(values, config["head_dim"])
        weights[name] = values.contiguous()
    return weights


def _expected_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    try:
        with torch.device("meta"):
            model = Qwen3(Qwen3Config.from_dict(config))
    except (RuntimeError, TypeError, OverflowError) as error:
        raise ValueError(f"no model of such sizes can be built ({str(error).splitlines()[0]})") from None
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}  # a tied head once


def _rename(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; an unknown name stays as it is."""
    parts = name.split(".")
    layer = f"model.layers.{parts[1]}." if parts[0] == "blk" and len(parts) == 4 else ""
    middle = parts[-2] if len(parts) > 1 else ""
    return f"{layer}{NAMES[middle]}.{parts[-1]}" if middle in NAMES else name


def neighbours_to_halves(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of q_proj or k_proj [heads * D, in] from GGUF's order, in which entries 2i and 2i + 1 of a head turn
    together, to Hugging Face's, in which i and i + D/2 do."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def read_tokenizer(source: GGUFFile) -> tuple[Tokenizer, dict]:
    """The byte-level BPE tokenizer and its tokenizer_config.json."""
    fields = source.fields
    family = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if family != ("gpt2", "smollm"):
        raise ValueError(f"tokenizer {family[0]!r} with pre-tokenizer {family[1]!r}; only 'gpt2' with 'smollm' is read")
    tokens, merges = (fields.get(f"tokenizer.ggml.{name}") for name in ("tokens", "merges"))
    kinds = fields.get("tokenizer.ggml.token_type", [])
    if not _strings(tokens) or not _strings(merges):
        raise ValueError("tokenizer.ggml.tokens or tokenizer.ggml.merges is no list of strings")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if len(vocabulary) < len(tokens) or any(len(pair) != 2 for pair in pairs):
        raise ValueError("a token twice, or a merge that is no pair")
    if len(tokens) != source.tensors["token_embd.weight"].shape[0]:
        raise ValueError(f"{len(tokens)} tokens, but {source.tensors['token_embd.weight'].shape[0]} embeddings")
    try:
        tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(f"no tokenizer can be made of its tokens ({error})") from None
    # What llama.cpp calls smollm: each digit alone, then GPT-2's rule for cutting text into words.
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    for kind in (CONTROL, USER_DEFINED):
        added = [token for token, its_kind in zip(tokens, kinds, strict=False) if its_kind == kind]
        special = kind == CONTROL
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in added])
    return tokenizer, _tokenizer_config(fields, tokens)


def _strings(value) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _tokenizer_config(fields: dict, tokens: list[str]) -> dict:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        index = fields.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and not (isinstance(index, int) and 0 <= index < len(tokens)):
            raise ValueError(f"tokenizer.ggml.{key}_token_id is {index!r}")
        config[f"{name}_token"] = None if index is None else tokens[index]
    if isinstance(template := fields.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    return config
