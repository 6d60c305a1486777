"""An EngineCore without a model: slots hold the name of the prefix they were written for, tokens are arithmetic.

Whoever reads a slot that holds anything else than its own prefix is found in the step that does it.
"""

import zlib
from itertools import accumulate
from types import SimpleNamespace

import torch

from engine.milestones.faults import Faults
from engine.serve.config import EngineConfig
from engine.serve.engine import EngineCore
from engine.serve.sizing import block_bytes

VOCAB = 61


class NoModel:
    """As much of a model as an EngineCore looks at."""

    def __init__(self, vocab_size: int = VOCAB):
        self.cfg = SimpleNamespace(
            vocab_size=vocab_size, max_position_embeddings=1 << 20,
            num_hidden_layers=1, num_key_value_heads=1, head_dim=1,
        )  # fmt: skip

    def parameters(self):
        yield torch.zeros(1)


class Misread(AssertionError):
    """A request would have read K/V that are not its own."""


def names(token_ids, cache_key) -> list[int]:
    """For each position a name of all tokens up to it and of the cache key; the same in every process."""
    start = zlib.crc32(repr(cache_key).encode())
    return list(accumulate(token_ids, lambda name, token: hash((name, token)), initial=start))[1:]


def token_after(name: int) -> int:
    return name % VOCAB


def alone(prompt, max_tokens: int, cache_key=()) -> list[int]:
    """What a prompt alone would get."""
    name, output = names(prompt, cache_key)[-1], []
    for _ in range(max_tokens):
        output.append(token_after(name))
        name = hash((name, output[-1]))
    return output


class TaggedRunner:
    """Takes the place of a ModelRunner; passes the points "swap", "forward" and "sampler" of its faults."""

    def __init__(self, core: EngineCore, faults: Faults):
        self.size, self.faults, self.seconds = core.config.block_size, faults, {}
        self.slots: list[int | None] = [None] * (core.blocks.num_blocks * self.size)
        self.host: dict[int, list] = {}
        core.blocks.allocate_slots = faults.before("allocate", core.blocks.allocate_slots)

    def swap(self, out) -> None:
        for _, device, host in out.swap_out:
            for d, h in zip(device, host, strict=True):
                self.faults("swap")
                self.host[h] = self.slots[d * self.size : (d + 1) * self.size]
        for _, device, host in out.swap_in:
            for d, h in zip(device, host, strict=True):
                self.faults("swap")
                self.slots[d * self.size : (d + 1) * self.size] = self.host[h]
        if out.swap_out or out.swap_in:
            self.faults("swap")  # all copies are made, and yet it fails

    def execute(self, out, block_tables) -> list[list[int]]:
        reads, sampled = [], []
        for request, n in out.scheduled:  # as in a layer: all rows write, then all rows read
            tags = names(request.token_ids + request.spec_token_ids, request.cache_key)
            start, end, table = request.num_computed_tokens, request.num_computed_tokens + n, block_tables[request]
            slots = [table[p // self.size] * self.size + p % self.size for p in range(end)]
            self.faults("forward")
            for p in range(start, end):
                self.slots[slots[p]] = tags[p]
            reads.append((request, slots, tags))
            sampled.append([token_after(tags[p]) for p in range(max(start, request.num_tokens - 1), end)])
        for request, slots, tags in reads:
            for p, slot in enumerate(slots):
                if self.slots[slot] != tags[p]:
                    raise Misread(f"{request!r} reads position {p} in slot {slot}, written for another prefix")
        self.faults("sampler")
        return sampled


def tagged_core(faults: Faults | None = None, host_blocks: int | None = None, **settings) -> EngineCore:
    """An EngineCore over a TaggedRunner.  host_blocks: preempt by swapping, with so many blocks on the host."""
    model = NoModel()
    if host_blocks is not None:
        one = block_bytes(model.cfg, settings.get("block_size", 16), torch.float32)
        settings |= {"preemption_mode": "swap", "swap_space_bytes": host_blocks * one}
    core = EngineCore(model, EngineConfig(**settings))
    core.runner = TaggedRunner(core, faults or Faults())
    return core
