"""What the milestones serve: requests that share an opening, or prompts from a file; and models to serve them."""

import random
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import torch

from engine.models.config import Qwen3Config
from engine.models.known import ASSETS
from engine.models.loading import load
from engine.models.qwen3 import random_model

SHARED, QUESTION, OUTPUT = 192, (8, 48), (8, 40)
BOOK = ASSETS / "ecclesiastes.txt"  # King James Bible, a verse a line; held out from the tiny model's training


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


def shared_text(num_requests: int, tokenizer, seed: int, max_tokens: int | None = None) -> list[Work]:
    """The same in words: a book's first 192 tokens up to the end of a verse, then for each request a verse of its own.

    A question of 8-48 tokens may stop in the middle of a verse, or go on into the next. No two begin alike until every
    verse of the book had its turn.
    """
    rng = random.Random(seed)
    lines = BOOK.read_text(encoding="utf-8").splitlines()
    verses = [tokenizer.encode(line + "\n", add_special_tokens=False).ids for line in lines]
    opening: list[int] = []
    while len(opening) < SHARED:
        opening += verses.pop(0)
    work, turns = [], []
    for _ in range(num_requests):
        turns = turns or rng.sample(range(len(verses)), len(verses))
        start = turns.pop()
        question = islice(chain(*verses[start:], *verses), rng.randint(*QUESTION))
        work.append(Work(opening[-SHARED:] + list(question), max_tokens or rng.randint(*OUTPUT)))
    return work


def prompts_from(file: str, num_requests: int, tokenizer, seed: int, max_tokens: int | None = None) -> list[Work]:
    """The first prompts of a text file, one a line; ValueError if it holds none or there is no tokenizer."""
    if tokenizer is None:
        raise ValueError(f"--prompts {file}: the model has no tokenizer.json to read text with")
    lines = [line for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()][:num_requests]
    if not lines:
        raise ValueError(f"--prompts {file}: no prompts in it")
    rng = random.Random(seed)
    return [Work(tokenizer.encode(line).ids, max_tokens or rng.randint(*OUTPUT)) for line in lines]


def launch_options(args) -> dict:
    """The fields of EngineConfig that chapter 33 adds, from the command line."""
    fuse = "auto" if args.fuse is None else args.fuse
    return {"fuse": fuse, "cuda_graphs": args.graphs, "async_scheduling": args.overlap}


def choose_device(name: str | None) -> str:
    """That device, or the GPU if there is one; ValueError for cuda where there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device here")
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


def get_model(name: str, width: int | None, seed: int, dtype=None, device=None):
    """(model, tokenizer or None): "random" in a width that keeps a CPU busy, a known name, or a checkpoint folder.

    dtype: None is that of the checkpoint, and float32 for "random".
    """
    if name != "random":
        if width is not None:
            raise ValueError(f"--width {width} is for --model random; {name} has a width of its own")
        return load(name, dtype, device)
    width = 1536 if width is None else width
    if width < 128 or width % 128:
        raise ValueError(f"--width must be a multiple of 128, got {width}")
    cfg = Qwen3Config(
        vocab_size=2048, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=2,
        num_attention_heads=width // 64, num_key_value_heads=max(1, width // 128), head_dim=64,
        max_position_embeddings=4096,
    )  # fmt: skip
    return random_model(cfg, seed).to(device, dtype), None
