"""The core without a model: a pool that holds tags instead of K and V, and a next token that is plain arithmetic.

A slot remembers the prefix for which it was written. A step that would read a slot written for any other prefix, or not
written at all, fails with a message that says which. Where a token goes is computed here, from the block tables alone.
"""

import zlib
from itertools import accumulate
from types import SimpleNamespace
from typing import NamedTuple

import torch

from engine.serve.config import EngineConfig
from engine.serve.engine import EngineCore
from engine.serve.request import Status
from engine.serve.sizing import block_bytes
from tests.grading import wrong

VOCAB = 61
MAX_CALLS = 10_000  # of allocate_slots in one step; more is an endless loop
SCHEDULER, SWAP, LOOP = "31: The scheduler", "31: Recompute or swap", "31: The loop"


def next_token(tokens, cache_key=()) -> int:
    """A function of the whole prefix, and of nothing else."""
    return zlib.crc32(repr((list(tokens), cache_key)).encode()) % VOCAB


def continuation(prompt, max_tokens, cache_key=(), stop=()) -> list[int]:
    """What a request alone would get; the first token of `stop` ends it."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens, cache_key))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


class FakeModel:
    """As much of a model as an EngineCore looks at."""

    def __init__(self, max_position_embeddings=4096):
        self.cfg = SimpleNamespace(
            vocab_size=VOCAB, max_position_embeddings=max_position_embeddings,
            num_hidden_layers=1, num_key_value_heads=1, head_dim=1,
        )  # fmt: skip

    def parameters(self):
        yield torch.zeros(1)


def fake_core(host_blocks=None, eos_token_id=None, max_positions=4096, kind=EngineCore, **settings) -> EngineCore:
    """A core over a FakeRunner. host_blocks: preempt by swapping, with so many blocks on the host."""
    settings = {"block_size": 4, "num_blocks": 64, **settings}
    model = FakeModel(max_positions)
    if host_blocks is not None:
        one = block_bytes(model.cfg, settings["block_size"], torch.float32)
        settings |= {"preemption_mode": "swap", "swap_space_bytes": host_blocks * one}
    core = kind(model, EngineConfig(**settings), eos_token_id)
    core.runner = FakeRunner(core)
    return core


class Tag(NamedTuple):
    prefix: int  # name of the tokens up to here, and of the cache key
    position: int
    writer: str


def prefix_names(tokens, cache_key) -> list[int]:
    """For each position a name of all tokens up to it."""
    return list(accumulate(tokens, lambda name, token: hash((name, token)), initial=hash(repr(cache_key))))[1:]


class FakeRunner:
    """Takes ModelRunner's place in a core, and judges the plans that it is given.

    plans: one list of (request id, n) a step.  fail_at: "swap", "forward" or "sampler": the next step raises there.
    fault: the first thing found wrong; it is kept, because a step that fails is undone and that may fail in turn.
    """

    def __init__(self, core):
        self.core, self.size = core, core.config.block_size
        self.slots: dict[int, Tag] = {}
        self.host: dict[int, list[Tag | None]] = {}
        self.plans: list[list[tuple[str, int]]] = []
        self.fail_at, self.error, self.fault, self.swapped = None, MemoryError, None, None
        self.calls, self.seconds = 0, {}
        self._guard(core.blocks)

    def _guard(self, blocks) -> None:
        allocate_slots = blocks.allocate_slots

        def counted(*args, **kwargs):
            self.calls += 1
            if self.calls > MAX_CALLS:
                raise self._wrong(f"schedule asked for blocks {MAX_CALLS} times in one step: an endless loop?")
            return allocate_slots(*args, **kwargs)

        blocks.allocate_slots = counted

    def _wrong(self, fact, hint=None, see=SCHEDULER):
        self.fault = self.fault or wrong(fact, hint, see)
        return self.fault

    def _fail(self, where) -> None:
        if self.fail_at == where:
            self.fail_at = None
            raise self.error(f"the test makes this step fail in the {where}")

    # -- what a step calls

    def swap(self, out) -> None:
        self._fail("swap")
        for request, device, host in out.swap_out:
            self._check_copy(request, device, host, "out")
            for d, h in zip(device, host, strict=True):
                self.host[h] = [self.slots.get(slot) for slot in range(d * self.size, (d + 1) * self.size)]
        for request, device, host in out.swap_in:
            self._check_copy(request, device, host, "in")
            for d, h in zip(device, host, strict=True):
                if h not in self.host:
                    raise self._wrong(f"{_name(request)} is restored from host block {h}, which nothing was copied to")
                for offset, tag in enumerate(self.host[h]):
                    self.slots[d * self.size + offset] = tag
        self.swapped = out

    def execute(self, out, block_tables) -> list[list[int]]:
        if (out.swap_in or out.swap_out) and self.swapped is not out:
            raise self._wrong("step ran the forward pass before the swap copies of its plan were made", see=LOOP)
        self.check_plan(out, block_tables)
        self.plans.append([(request.request_id, n) for request, n in out.scheduled])
        self._fail("forward")
        sampled, reads = [], []
        for request, n in out.scheduled:  # as in a layer: all rows write, then all rows read
            tokens = request.token_ids + request.spec_token_ids
            names = prefix_names(tokens, request.cache_key)
            start, end = request.num_computed_tokens, request.num_computed_tokens + n
            table = block_tables[request]
            slots = [table[p // self.size] * self.size + p % self.size for p in range(end)]
            for p in range(start, end):
                self.slots[slots[p]] = Tag(names[p], p, request.request_id)
            reads.append((request, slots, names))
            first = max(start, request.num_tokens - 1)
            sampled.append([next_token(tokens[: p + 1], request.cache_key) for p in range(first, end)])
        for request, slots, names in reads:
            self._check_reads(request, slots, names)
        self._fail("sampler")
        return sampled

    # -- what it checks

    def check_plan(self, out, block_tables) -> None:
        core, config = self.core, self.core.config
        running = core.scheduler.running
        if out.num_tokens > config.max_num_batched_tokens:
            fact = f"a step has {out.num_tokens} tokens, its budget is {config.max_num_batched_tokens}"
            raise self._wrong(fact, "the budget is shared by running and admitted requests")
        if len(running) > config.max_num_seqs:
            raise self._wrong(f"{len(running)} requests run, max_num_seqs is {config.max_num_seqs}")
        if out.preempted and out.admitted:
            fact = f"{_name(out.admitted[0][0])} was admitted in a step that preempted {_name(out.preempted[0])}"
            raise self._wrong(fact, "what was freed is for those who run; the next step may admit")
        planned = [request for request, _ in out.scheduled]
        for i, (request, n) in enumerate(out.scheduled):
            left = request.num_tokens_with_spec - request.num_computed_tokens
            cap = config.long_prefill_token_threshold
            table = block_tables.get(request, [])
            end = request.num_computed_tokens + n
            if request in planned[:i]:
                raise self._wrong(f"{_name(request)} is in the plan twice")
            if request in out.preempted:
                raise self._wrong(f"{_name(request)} is in the plan and was preempted in the same step", see=SWAP)
            if request.status is not Status.RUNNING or request not in running:
                raise self._wrong(f"{_name(request)} is in the plan but not among the running requests")
            if not 1 <= n <= left:
                raise self._wrong(f"{_name(request)} has {left} uncomputed tokens, and n = {n} are in the plan")
            if cap and n > cap:
                raise self._wrong(f"{_name(request)} gets {n} tokens, long_prefill_token_threshold is {cap}")
            if end > len(table) * self.size:
                fact = f"{_name(request)} will hold {end} tokens in {len(table)} blocks of {self.size}"
                raise self._wrong(fact, "allocate_slots has to succeed first")

    def _check_reads(self, request, slots, names) -> None:
        for position, (slot, name) in enumerate(zip(slots, names, strict=False)):
            tag = self.slots.get(slot)
            if tag is None or tag.prefix != name:
                held = "was never written" if tag is None else f"{tag.writer!r} wrote its position {tag.position} to"
                computed = request.num_computed_tokens
                fact = f"{_name(request)} reads its position {position} in slot {slot}, which {held}"
                hint = f"{computed} of its tokens counted as computed before this step"
                hint += "" if tag is None else ", or a block of another prefix was adopted"
                raise self._wrong(fact, hint)

    def _check_copy(self, request, device, host, way) -> None:
        if len(device) != len(host) or not device:
            fact = f"swap_{way} of {_name(request)} names {len(device)} device and {len(host)} host blocks"
            raise self._wrong(fact, "block by block, and no entry where there is nothing to copy", SWAP)
        for block, count, kind in ((device, self.core.blocks.num_blocks, "device"), (host, None, "host")):
            bad = [b for b in block if b < 0 or count is not None and b >= count]
            if bad or len(set(block)) < len(block):
                raise self._wrong(f"swap_{way} of {_name(request)} names impossible {kind} blocks: {block}", see=SWAP)


def _name(request) -> str:
    return f"request {request.request_id!r}"
