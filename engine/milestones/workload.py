"""What the milestones serve: requests that share an opening, or prompts from a file; and models to serve them."""

import random
from dataclasses import dataclass
from pathlib import Path

from engine.models.config import Qwen3Config
from engine.models.loading import load
from engine.models.qwen3 import random_model

SHARED, QUESTION, OUTPUT = 192, (8, 48), (8, 40)


@dataclass
class Work:
    """One prompt and how much is asked for."""

    prompt: list[int]
    max_tokens: int


def shared_opening(num_requests: int, vocab_size: int, seed: int, max_tokens: int | None = None) -> list[Work]:
    """Requests with one opening of 192 tokens, each with its own question (8-48) and output length (8-40)."""
    rng = random.Random(seed)

    def tokens(count):
        return [rng.randrange(vocab_size) for _ in range(count)]

    opening = tokens(SHARED)
    return [
        Work(opening + tokens(rng.randint(*QUESTION)), max_tokens or rng.randint(*OUTPUT)) for _ in range(num_requests)
    ]


def prompts_from(file: str, num_requests: int, tokenizer, seed: int, max_tokens: int | None = None) -> list[Work]:
    """The first prompts of a text file, one a line; ValueError if it holds none or there is no tokenizer."""
    if tokenizer is None:
        raise ValueError(f"--prompts {file}: the model has no tokenizer.json to read text with")
    lines = [line for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()][:num_requests]
    if not lines:
        raise ValueError(f"--prompts {file}: no prompts in it")
    rng = random.Random(seed)
    return [Work(tokenizer.encode(line).ids, max_tokens or rng.randint(*OUTPUT)) for line in lines]


def get_model(name: str, width: int | None, seed: int):
    """(model, tokenizer or None): "random" in a width that keeps a CPU busy, or a checkpoint folder."""
    if name != "random":
        if width is not None:
            raise ValueError(f"--width {width} is for --model random; {name} has a width of its own")
        return load(name)
    width = 1024 if width is None else width
    if width < 128 or width % 128:
        raise ValueError(f"--width must be a multiple of 128, got {width}")
    cfg = Qwen3Config(
        vocab_size=2048, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=2,
        num_attention_heads=width // 64, num_key_value_heads=max(1, width // 128), head_dim=64,
        max_position_embeddings=4096,
    )  # fmt: skip
    return random_model(cfg, seed), None
