"""What a GPU does and what a model asks of it: the two tables that a cost model multiplies."""

import json
from dataclasses import dataclass
from pathlib import Path

from engine.models.config import Qwen3Config


@dataclass(frozen=True)
class GPU:
    """memory: bytes.  bandwidth: bytes/s.  flops: bf16 operations/s.  pcie: bytes/s in one direction."""

    memory: float
    bandwidth: float
    flops: float
    pcie: float


# Measured on an H200: a copy moves 4.2 TB/s and a large matrix product in bf16 does 777 TFLOP/s. NVIDIA's datasheet
# says 4.8 TB/s and 989 TFLOP/s (dense). So this share of a datasheet can be had, and other cards are taken to allow it.
REAL_BANDWIDTH, REAL_FLOPS = 4.2 / 4.8, 777 / 989
PCIE_5, PCIE_4 = 50e9, 25e9  # 16 lanes: 50 of 64 GB/s with pinned memory, and half of that a generation earlier


def datasheet(memory_gb: float, tb_s: float, tflop_s: float, pcie: float) -> GPU:
    """From a datasheet's memory (GB), bandwidth (TB/s) and dense bf16 (TFLOP/s)."""
    return GPU(memory_gb * 1e9, tb_s * 1e12 * REAL_BANDWIDTH, tflop_s * 1e12 * REAL_FLOPS, pcie)


GPUS = {
    "h200": datasheet(141, 4.8, 989, PCIE_5),  # H200 SXM datasheet; comes out at the measured figures
    "h100": datasheet(80, 3.35, 989, PCIE_5),  # H100 SXM5 80 GB datasheet
    "a100": datasheet(80, 2.039, 312, PCIE_4),  # A100 SXM4 80 GB datasheet
    "l40s": datasheet(48, 0.864, 362, PCIE_4),  # L40S datasheet, without sparsity
    "l4": datasheet(24, 0.300, 121, PCIE_4),  # L4 datasheet, 242 with sparsity; x16 lanes
}


def _qwen3(hidden, intermediate, layers, heads, tied) -> Qwen3Config:
    """From the config.json of the checkpoints: 8 KV heads of 128, 151,936 tokens, 40,960 positions in all of them."""
    return Qwen3Config(
        vocab_size=151_936, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960,
        tie_word_embeddings=tied,
    )  # fmt: skip


MODELS = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, False),
    "smollm2-135m": Qwen3Config(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True, qk_norm=False,
    ),
}  # fmt: skip


def find_gpu(name: str) -> GPU:
    if name not in GPUS:
        raise ValueError(f"gpu must be one of {', '.join(GPUS)}, got {name!r}")
    return GPUS[name]


def find_model(name: str) -> Qwen3Config:
    """A model of the table, or a folder with a config.json (Qwen3, Llama); no weights are needed."""
    if name in MODELS:
        return MODELS[name]
    file = Path(name) / "config.json"
    if not file.is_file():
        raise ValueError(f"model must be one of {', '.join(MODELS)}, or a folder with a config.json, got {name!r}")
    try:
        return Qwen3Config.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
