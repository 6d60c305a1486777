"""What the host does around a forward pass, measured without one: planning, layout, bookkeeping, queue, look-ups.

Every figure is a median of processor time (of the clock it would tell how busy the machine is), one JSON line each.
`ratio` is to the first size of its kind, taken right before it: per request for steps, per block for look-ups, per call
for the rest. Where a cost is flat it stays near 1.
"""

import gc
import json
import random
import statistics
import sys
import time

import torch
from rich.console import Console
from rich.table import Table

from engine.exercises import registry
from engine.milestones.tagged import NoModel
from engine.models.config import Qwen3Config
from engine.models.qwen3 import random_model
from engine.serve.batch import build_batch
from engine.serve.config import EngineConfig
from engine.serve.engine import EngineCore
from engine.serve.flight import Flight
from engine.serve.graphs import GraphRunner
from engine.serve.overlap import OverlappedCore
from engine.serve.request import Request, SamplingParams
from engine.serve.steady import SteadyCore

BLOCK, VOCAB, CONTEXT = 16, 50_000, 512
DECODES = [32, 1, 256, 1024]
AHEAD = [32, 256, 1024]
QUEUES, PROMPTS, RUNNING = [100, 10_000, 100_000], [1 << 10, 1 << 14, 1 << 17], [32, 1024]


class NoForward:
    """A runner that builds the batch and samples at once; `build` is the time that the last batch took."""

    def __init__(self):
        self.build = 0.0

    def swap(self, out) -> None:
        pass

    def execute(self, out, block_tables) -> list[list[int]]:
        begin = time.thread_time()
        batch = build_batch(out.scheduled, block_tables, BLOCK)
        self.build = time.thread_time() - begin
        return [[7] * count for count in batch.sample_counts]


def make_core(num_blocks: int, **settings) -> EngineCore:
    settings |= {"max_waiting": None, "max_num_batched_tokens": 1 << 15}
    core = EngineCore(NoModel(VOCAB), EngineConfig(block_size=BLOCK, num_blocks=num_blocks, **settings))
    core.runner = NoForward()
    return core


def decoding(num_requests: int, max_tokens: int) -> EngineCore:
    """A core in which that many requests decode. Their contexts differ: each step, one in 16 begins a new block."""
    core = make_core(num_requests * -(-(CONTEXT + BLOCK + max_tokens) // BLOCK), max_num_seqs=num_requests)
    rng = random.Random(0)
    for i in range(num_requests):
        prompt = rng.choices(range(VOCAB), k=CONTEXT + i % BLOCK)
        core.add_request(str(i), prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    while core.scheduler.waiting or any(not request.num_output_tokens for request in core.scheduler.running):
        core.step()
    return core


def timed(call) -> float:
    begin = time.thread_time()
    call()
    return 1e6 * (time.thread_time() - begin)


class Steps:
    """Steps in which a number of requests decode; parts: what their halves took."""

    what, unit = "step of decodes", "request"

    def __init__(self, num_decodes: int, repeat: int):
        self.count = num_decodes
        self.core = decoding(num_decodes, 2 * repeat + 100)
        self.schedule, self.core.scheduler.schedule = self.core.scheduler.schedule, self.watched
        self.parts = {"schedule_us": [], "build_us": [], "update_us": []}

    def watched(self):
        begin = time.thread_time()
        out = self.schedule()
        self.planning = 1e6 * (time.thread_time() - begin)
        return out

    def __call__(self) -> float:
        us, build = timed(self.core.step), 1e6 * self.core.runner.build
        for times, part in zip(self.parts.values(), (self.planning, build, us - build - self.planning), strict=True):
            times.append(part)
        return us


class NoDevice(GraphRunner):
    """A runner whose launches do all that the host does for one, and replay graphs of nothing: every token is 7."""

    def __init__(self, model, config):
        super().__init__(model, config, 1, mode="static")
        self.mode, self.sevens = "on", torch.full((config.max_num_seqs,), 7)
        self._graphs = {size: (self, self.sevens[:size], None) for size in self.sizes}

    def replay(self) -> None:
        pass

    def _launch_any(self, scheduled, block_tables):
        counts = [int(request.num_computed_tokens + n == request.num_tokens) for request, n in scheduled]
        ids = self.sevens[: sum(counts)]
        return self._send(Flight(scheduled, counts, ids, torch.empty_like(ids), rows=scheduled, vocab=VOCAB))


class Ahead:
    """Steps one ahead in which a number of requests decode, none ends and none comes; the device's work left out."""

    unit, parts = "request", {}

    def __init__(self, kind: type, num_decodes: int, repeat: int, caching: bool = False):
        self.count, max_tokens = num_decodes, 2 * repeat + 100
        model = random_model(Qwen3Config(
            vocab_size=VOCAB, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, head_dim=4, max_position_embeddings=CONTEXT + BLOCK + max_tokens,
        ))  # fmt: skip
        config = EngineConfig(
            block_size=BLOCK, num_blocks=num_decodes * (2 + -(-(CONTEXT + max_tokens) // BLOCK)),
            max_num_seqs=num_decodes, max_num_batched_tokens=1 << 15, enable_prefix_caching=caching,
            async_scheduling=True, cuda_graphs="static",
        )  # fmt: skip
        self.core = kind(model, config, eos_token_id=VOCAB - 1)
        self.core.runner = NoDevice(model, config)
        rng = random.Random(0)
        for i in range(num_decodes):
            prompt = rng.choices(range(VOCAB), k=CONTEXT + i % BLOCK)
            self.core.add_request(str(i), prompt, SamplingParams(max_tokens=max_tokens))
        while any(request.num_output_tokens < 3 for request in self.core.scheduler.requests.values()):
            self.core.step()

    def __call__(self) -> float:
        us = timed(self.core.step)
        assert self.core.scheduler.num_running == self.count
        return us


class Queue:
    """Adding a request to a queue, or aborting one somewhere in it; its length stays."""

    unit, parts, count = "call", {}, 1

    def __init__(self, policy: str, waiting: int, add: bool):
        self.core, self.rng, self.added, self.measure_add = make_core(64, policy=policy), random.Random(0), 0, add
        self.prompt, self.params, self.names = self.rng.choices(range(VOCAB), k=32), SamplingParams(), []
        for _ in range(waiting):
            self.add()

    def add(self) -> None:
        self.added += 1
        self.names.append(self.added)
        self.core.add_request(self.added, self.prompt, self.params, priority=self.rng.randrange(100))

    def __call__(self) -> float:
        place = self.rng.randrange(len(self.names))
        self.names[place], self.names[-1] = self.names[-1], self.names[place]
        name = self.names.pop()
        aborting = timed(lambda: self.core.abort_request(name))
        adding = timed(self.add)
        return adding if self.measure_add else aborting


class Running:
    """Aborting a request among those that decode; another takes its place each time."""

    what, unit, parts, count = "abort among running", "call", {}, 1

    def __init__(self, num_running: int, repeat: int):
        self.core, self.rng, self.added = decoding(num_running, 2 * repeat + 100), random.Random(0), 0

    def __call__(self) -> float:
        request = self.rng.choice(self.core.scheduler.running)
        us = timed(lambda: self.core.abort_request(request.request_id))
        self.added += 1
        self.core.add_request(f"n{self.added}", request.prompt_token_ids, request.params)
        self.core.step()
        return us


class Lookup:
    """find_cached_prefix: of a prompt nobody had; of one that is cached; of the latter, asked again."""

    unit, parts = "block", {}

    def __init__(self, tokens: int, kind: str):
        self.kind, self.count = kind, tokens // BLOCK
        self.prompt = random.Random(tokens).choices(range(VOCAB), k=tokens + 1)
        self.blocks, self.owner = make_core(self.count + 1).blocks, Request("owner", self.prompt)
        if kind != "cold":
            self.blocks.allocate_slots(self.owner, tokens)
            self.blocks.cache_full_blocks(self.owner, tokens)

    def __call__(self) -> float:
        request, found = self.owner if self.kind == "again" else Request("r", self.prompt), []
        us = timed(lambda: found.extend(self.blocks.find_cached_prefix(request)))
        assert len(found) == (0 if self.kind == "cold" else self.count), "a published prompt was not found"
        return us


class Report:
    """Measures one kind at all its sizes in turn, so that a busy machine meets all alike; a JSON line for each."""

    def __init__(self, repeat: int):
        self.repeat = repeat
        self.table = Table("what", "size", "µs", "µs each", "ratio")

    def __call__(self, what: str, make, sizes) -> None:
        bench = {size: make(size) for size in sizes}
        times = {size: [] for size in sizes}
        gc.collect()
        for _ in range(self.repeat):
            for size in sizes:
                times[size].append(bench[size]() / bench[size].count)
        for size in sizes:
            each = statistics.median(times[size])
            ratio = statistics.median(n / first for n, first in zip(times[size], times[sizes[0]], strict=True))
            line = {"what": what, "size": size, "us": round(each * bench[size].count, 1)}
            line |= {name: round(statistics.median(part), 1) for name, part in bench[size].parts.items()}
            line |= {f"us_per_{bench[size].unit}": round(each, 3), "ratio": round(ratio, 2)}
            print(json.dumps(line), flush=True)
            self.table.add_row(what, f"{size:,}", f"{line['us']:,}", f"{each:.2f}", f"{ratio:.2f}")


def main(args) -> int:
    if args.repeat < 1:
        raise ValueError(f"--repeat must be at least 1, got {args.repeat}")
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 110)
    console.print(registry.who_wrote(), highlight=False)
    registry.require_all_exercises()
    report = Report(args.repeat)
    report(Steps.what, lambda n: Steps(n, args.repeat), DECODES)
    report("step one ahead", lambda n: Ahead(OverlappedCore, n, args.repeat), AHEAD)
    report("steady step", lambda n: Ahead(SteadyCore, n, args.repeat), AHEAD)
    report("steady step, prefix cache", lambda n: Ahead(SteadyCore, n, args.repeat, True), AHEAD)
    for policy in ("fcfs", "priority"):
        for what in ("add to", "abort in"):
            report(f"{what} a queue, {policy}", lambda n: Queue(policy, n, what == "add to"), QUEUES)  # noqa: B023
    report(Running.what, lambda n: Running(n, args.repeat), RUNNING)
    for kind in ("cold", "warm", "again"):
        report(f"prefix lookup, {kind}", lambda n: Lookup(n, kind), PROMPTS)  # noqa: B023
    console.print(report.table)
    return 0
