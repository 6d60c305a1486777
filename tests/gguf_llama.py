"""A small Llama written to a GGUF file as llama.cpp's converter writes one, for tests without a package to install."""

import json

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, WIDTH = 2, 96, 160, 6, 2, 16
TEXT = "The number of the beast is 666, and 144,000 were sealed.\nIt's 7 o'clock; they've come home again. " * 3
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tokenizer() -> Tokenizer:
    """Byte-level BPE in which no merge joins two digits."""
    made = Tokenizer(models.BPE())
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([TEXT], trainer)
    return made


def weights(vocab_size: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random float32 weights under Hugging Face's names, tied."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens": (vocab_size, HIDDEN), "model.norm": (HIDDEN,)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        shapes |= {layer + "input_layernorm": (HIDDEN,), layer + "post_attention_layernorm": (HIDDEN,)}
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes[f"{layer}self_attn.{name}_proj"] = (heads * WIDTH, HIDDEN)
        shapes |= {layer + "self_attn.o_proj": (HIDDEN, HEADS * WIDTH), layer + "mlp.down_proj": (HIDDEN, FFN)}
        shapes |= {layer + "mlp.gate_proj": (FFN, HIDDEN), layer + "mlp.up_proj": (FFN, HIDDEN)}
    out = {}
    for name, shape in shapes.items():
        scale = 0.3 if len(shape) == 1 else 1.0 if "embed" in name else 1.5 * shape[1] ** -0.5
        out[f"{name}.weight"] = (len(shape) == 1) + scale * torch.randn(shape, generator=generator)
    return out


GGUF_NAMES = [
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("model.layers.", "blk."),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.o_proj", "attn_output"),
    *((f"self_attn.{x}_proj", f"attn_{x}") for x in "qkv"),
    *((f"mlp.{x}_proj", f"ffn_{x}") for x in ("gate", "up", "down")),
]


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """The converter's permutation of q_proj and k_proj, row by row: entry i and i + D/2 become neighbours."""
    out, half = np.empty_like(rows), WIDTH // 2
    for head in range(heads):
        for i in range(half):
            for part in (0, 1):
                out[head * WIDTH + 2 * i + part] = rows[head * WIDTH + part * half + i]
    return out


def write(path, kind=GGMLQuantizationType.F32, change=None) -> dict[str, torch.Tensor]:
    """Write the model with matrices of that type (embedding: Q8_0 unless F32); returns the weights before quantisation.

    change: called with the writer's fields and tensors, both dicts, to make another file of them.
    """
    made = tokenizer()
    vocabulary = sorted(made.get_vocab().items(), key=lambda item: item[1])
    merges = [" ".join(pair) for pair in json.loads(made.to_str())["model"]["merges"]]
    fields = {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": 256,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.freq_base": 10_000.0,
        "llama.rope.dimension_count": WIDTH,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": len(vocabulary),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [token for token, _ in vocabulary],
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token, _ in vocabulary],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    original = weights(len(vocabulary))
    tensors = {}
    for name, tensor in original.items():
        values, its_kind = tensor.numpy(), kind if tensor.ndim == 2 else GGMLQuantizationType.F32
        if its_kind != GGMLQuantizationType.F32 and "embed" in name:
            its_kind = GGMLQuantizationType.Q8_0
        for projection, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            if projection in name:
                values = interleaved(values, heads)
        for theirs, gguf_name in GGUF_NAMES:
            name = name.replace(theirs, gguf_name)
        tensors[name] = values if its_kind == GGMLQuantizationType.F32 else quantize(values, its_kind), its_kind
    if change:
        change(fields, tensors)
    _write(path, fields, tensors)
    return original


def _write(path, fields, tensors) -> None:
    writer = GGUFWriter(path, fields.get("general.architecture", "llama"))
    for key, value in fields.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
