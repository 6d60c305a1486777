"""The milestone of chapter 31: the new core against chapter 24's slots, on the same work and the same tokens."""

import copy
import json
import statistics
import sys
import time
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from engine import kv_cache, sampling
from engine.exercises import registry
from engine.milestones.precision import Gate, choose_dtype
from engine.milestones.workload import (
    Work,
    choose_device,
    get_model,
    launch_options,
    prompts_from,
    shared_opening,
    shared_text,
)
from engine.serve.attention import get_backend
from engine.serve.config import EngineConfig
from engine.serve.engine import EngineCore
from engine.serve.request import SamplingParams
from engine.slots import ContinuousBatchingEngine

BLOCK_SIZE = 16
LARGE = 2_000_000  # parameters from which on the oracle uses chapter 16's cache


@dataclass
class Run:
    """One pass of one engine over the work."""

    outputs: list[list[int]]
    seconds: float
    steps: int
    kv_slots: int
    host_seconds: float | None = None
    counters: dict = field(default_factory=dict)

    @property
    def tok_s(self) -> float:
        return sum(map(len, self.outputs)) / self.seconds


def run_slots(model, work: list[Work], args) -> Run:
    slot_len = max(320, *(len(w.prompt) + w.max_tokens for w in work))
    engine = ContinuousBatchingEngine(model, num_slots=8, slot_len=slot_len, eos_token_id=model.cfg.eos_token_id)
    begin = time.perf_counter()
    outputs = engine.generate([w.prompt for w in work], [w.max_tokens for w in work])
    return Run(outputs, time.perf_counter() - begin, engine.num_steps, engine.kv_slots)


def run_core(model, work: list[Work], args, num_blocks: int) -> Run:
    config = EngineConfig(
        block_size=BLOCK_SIZE, num_blocks=num_blocks, attention_backend=args.backend or "auto", seed=args.seed,
        **launch_options(args),
    )
    core = EngineCore(model, config, eos_token_id=model.cfg.eos_token_id)
    begin = time.perf_counter()
    outputs = core.generate([w.prompt for w in work], [SamplingParams(max_tokens=w.max_tokens) for w in work])
    seconds = time.perf_counter() - begin
    stats = core.stats()
    device_seconds = sum(stats["seconds"][part] for part in ("swap", "forward", "sample"))
    counters = {"prefix_hit_rate": round(stats["prefix_hit_rate"], 3), "preemptions": stats["preemptions"]}
    return Run(
        [o.output_token_ids for o in outputs],
        seconds,
        stats["steps"],
        stats["kv_slots"],
        seconds - device_seconds,
        counters,
    )


def engines_for(work: list[Work]):
    """Name -> function that runs it: slots, a core with room for all, one whose pool is under constant pressure."""
    longest = max(-(-(len(w.prompt) + w.max_tokens) // BLOCK_SIZE) for w in work)
    tight = max(24, longest + longest // 4)
    return {
        "slots": run_slots,
        "core": lambda *given: run_core(*given, num_blocks=4096),
        f"core, {tight} blocks": lambda *given: run_core(*given, num_blocks=tight),
    }


def oracle(model, work: list[Work], progress) -> list[list[int]]:
    """Every prompt alone, through chapter 8's generate; through chapter 16's, which caches, for large models."""
    large = sum(p.numel() for p in model.parameters()) > LARGE
    generate = kv_cache.generate if large else sampling.generate
    track = progress.add_task("oracle: each request alone", total=len(work))
    outputs = []
    for w in work:
        outputs.append(generate(model, w.prompt, w.max_tokens, eos_token_id=model.cfg.eos_token_id))
        progress.advance(track)
    return outputs


def main(args) -> int:
    for name in ("requests", "repeat", "max_tokens", "threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    get_backend(args.backend or "auto")  # an unknown name is found now, not after the oracle has run
    device = choose_device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 110)
    console.print(registry.who_wrote(), highlight=False)
    registry.require_all_exercises()

    dtype = choose_dtype(args.dtype, lambda line: console.print(line, highlight=False), device)
    model, tokenizer = get_model(args.model, args.width, args.seed, dtype, device)
    if args.prompts:
        work = prompts_from(args.prompts, args.requests, tokenizer, args.seed, args.max_tokens)
    elif tokenizer:
        work = shared_text(args.requests, tokenizer, args.seed, args.max_tokens)
    else:
        work = shared_opening(args.requests, model.cfg.vocab_size, args.seed, args.max_tokens)
    exact = model if dtype == torch.float32 else copy.deepcopy(model).float()  # the same weights, exact in float32
    engines, ties = engines_for(work), {}
    runs = {name: [] for name in engines}
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        want = oracle(exact, work, progress)
        gate = Gate(exact, [w.prompt for w in work], want, dtype)
        track = progress.add_task("engines", total=(args.repeat + 1) * len(engines))
        for turn in range(args.repeat + 1):
            for name, run in engines.items():
                result = run(model, work if turn or device == "cuda" else work[:2], args)
                progress.advance(track)
                if turn:  # the first is the warm-up: two requests, or all where kernels are compiled on the way
                    runs[name].append(result)
                    wrong, ties[name] = gate.check(name, result.outputs)
                    if wrong:
                        print(f"WRONG OUTPUT, so no speed is printed. {wrong}", file=sys.stderr)
                        return 1
    report(runs, console)
    if dtype != torch.float32:
        report_ties(ties, dtype, len(work), console)
    if args.show:
        show(work, want, tokenizer)
    return 0


def report(runs: dict[str, list[Run]], console: Console) -> None:
    """JSON lines on stdout; table and ratios on stderr. Speeds are medians."""
    table = Table("engine", "KV slots", "tokens", "tok/s", "× slots", "steps", "hit rate", "preemptions", "host share")
    base = statistics.median(run.tok_s for run in runs["slots"])
    for name, results in runs.items():
        run, speed = results[0], statistics.median(r.tok_s for r in results)
        num_tokens = sum(map(len, run.outputs))
        line = {"engine": name, "kv_slots": run.kv_slots, "output_tokens": num_tokens, "tok_s": round(speed, 1)}
        print(json.dumps(line | {"steps": run.steps} | run.counters), flush=True)
        host = ""
        if run.host_seconds is not None:
            host = f"{statistics.median(r.host_seconds / r.seconds for r in results):.1%}"
        counters = [str(run.counters.get(key, "")) for key in ("prefix_hit_rate", "preemptions")]
        ratio = f"{speed / base:.2f}"
        table.add_row(name, str(run.kv_slots), str(num_tokens), f"{speed:.1f}", ratio, str(run.steps), *counters, host)
    console.print(table)
    speeds = {name: statistics.median(run.tok_s for run in results) for name, results in runs.items()}
    ratios = ", ".join(f"{name}: {speed / base:.2f}x" for name, speed in speeds.items() if name != "slots")
    console.print(f"speed against the slot engine: {ratios}", highlight=False)


def report_ties(ties: dict[str, dict], dtype: torch.dtype, num_requests: int, console: Console) -> None:
    """How often rounding changed a token: each engine's requests that leave the float32 oracle at a near tie."""
    for name, found in ties.items():
        kind = str(dtype).removeprefix("torch.")
        line = f"{kind}, {name}: {len(found)} of {num_requests} requests leave the float32 oracle, at a near tie"
        if found:
            margin, bound = max(found.values(), key=lambda pair: pair[0] / pair[1])
            line += f"; the widest is {margin:.2g} where rounding explains {bound:.2g}"
        console.print(line, highlight=False)


def show(work, outputs, tokenizer) -> None:
    for w, tokens in zip(work, outputs, strict=True):
        texts = (w.prompt, tokens) if tokenizer is None else (tokenizer.decode(w.prompt), tokenizer.decode(tokens))
        print("{!r} -> {!r}".format(*texts), file=sys.stderr)
