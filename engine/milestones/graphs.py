"""The milestone of chapter 33: a decode step from plain to asynchronous, beside what the device allows.

Weights and K/V are random numbers in the shapes of Qwen3. Times are of whole `step` calls of the core, host work and
all, medians; the floor is that of the device's memory and arithmetic.
"""

import gc
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from engine.exercises import registry
from engine.milestones import throughput, timeline
from engine.milestones.ceilings import Ceilings
from engine.milestones.workload import choose_device
from engine.models.config import Qwen3Config
from engine.models.qwen3 import Qwen3, random_model
from engine.serve.config import EngineConfig
from engine.serve.device_sampler import DeviceSampler
from engine.serve.engine import EngineCore
from engine.serve.flight import Flight
from engine.serve.overlap import OverlappedCore
from engine.serve.request import SamplingParams

SHAPES = {  # hidden, MLP, layers, heads, KV heads, vocabulary, tied
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 151_936, True),
    "qwen3-8b": (4096, 12_288, 36, 32, 8, 151_936, False),
    "small": (256, 512, 2, 4, 2, 2048, True),
}
VARIANTS = {
    "plain": {"fuse": False, "cuda_graphs": "off"},
    "fused": {"fuse": True, "cuda_graphs": "off"},
    "persistent": {"fuse": True, "cuda_graphs": "static"},
    "graphs": {"fuse": True, "cuda_graphs": "on"},
    "ahead": {"fuse": True, "cuda_graphs": "on", "async_scheduling": True},  # with the exercises of chapter 33
    "async": {"fuse": True, "cuda_graphs": "on", "async_scheduling": True},  # with steady steps
}
WARM_UP = 4  # steps before the clock runs


def shape_of(name: str, max_len: int) -> Qwen3Config:
    if name not in SHAPES:
        raise ValueError(f"unknown model shape {name!r}; known: {', '.join(SHAPES)}")
    hidden, mlp, layers, heads, kv_heads, vocab, tied = SHAPES[name]
    return Qwen3Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=128 if hidden > 256 else 64,
        max_position_embeddings=max_len, rope_theta=1e6, tie_word_embeddings=tied,
    )  # fmt: skip


def random_weights(cfg: Qwen3Config, dtype, device) -> Qwen3:
    """A model of that shape, drawn where it is to stay."""
    if device == "cpu":
        return random_model(cfg).to(dtype)
    with torch.device("meta"):
        model = Qwen3(cfg).to(dtype)
    model = model.to_empty(device=device).requires_grad_(False).eval()
    model.tie_weights()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1)
        else:
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model


def synchronize(device) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def start_decoding(core: EngineCore, batch: int, context: int, max_tokens: int, temperature: float = 0.0) -> None:
    """Requests past their prefill, which is not computed: the pool is filled with random numbers instead."""
    rng = random.Random(0)
    torch.manual_seed(0)
    for cache in core.runner.kv_caches:
        for pool in cache:
            pool.normal_()
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=temperature)
    for i in range(batch):
        core.add_request(f"r{i}", [rng.randrange(core.vocab_size) for _ in range(context - 1)], params)
    runner, core.runner = core.runner, Skipping(core.runner)
    while core.scheduler.num_waiting or any(r.num_output_tokens == 0 for r in core.scheduler.running):
        core.step()
    while getattr(core, "flights", None):
        core.collect()
    core.runner = runner


class Skipping:
    """A runner that computes nothing, and always samples token 1."""

    def __init__(self, runner):
        self.seconds = runner.seconds

    def swap(self, out) -> None:
        pass

    def execute(self, out, block_tables) -> list[list[int]]:
        return [[1] * (r.num_computed_tokens + n == r.num_tokens) for r, n in out.scheduled]

    def launch(self, out, block_tables) -> Flight:
        counts = [len(tokens) for tokens in self.execute(out, block_tables)]
        ids = torch.ones(sum(counts), dtype=torch.int64)
        return Flight(out.scheduled, counts, ids, ids, vocab=2)


@dataclass
class Steps:
    """Decode steps of one variant."""

    tokens: list[list[int]]
    step_ms: float  # median
    host_ms: float  # of it not spent waiting for the device, median


def decoding_core(model, variant: str, batch: int, context: int, steps: int) -> EngineCore:
    """A core with so many requests past their prefill, and room for so many steps."""
    config = EngineConfig(
        num_blocks=batch * -(-(context + steps + 48) // 16) + 8192 // 16, max_num_seqs=batch, max_model_len=2 * context,
        max_num_batched_tokens=max(8192, 2 * batch), enable_prefix_caching=False, **VARIANTS[variant],
    )  # fmt: skip
    core = (OverlappedCore if variant == "ahead" else EngineCore)(model, config, sampler=DeviceSampler())
    start_decoding(core, batch, context, steps + 24)
    return core


def run_steps(model, variant: str, batch: int, context: int, steps: int, device: str) -> Steps:
    core = decoding_core(model, variant, batch, context, steps)
    outputs = {f"r{i}": [] for i in range(batch)}
    times, waits = [], []
    with Waiting() as waiting:
        for turn in range(WARM_UP + steps):
            waiting.seconds = 0.0
            begin = time.perf_counter()
            for output in core.step():
                outputs[output.request_id] += output.new_token_ids
            if turn >= WARM_UP:
                times.append(time.perf_counter() - begin)
                waits.append(times[-1] - waiting.seconds)
        synchronize(device)
    del core, output
    gc.collect()  # a core and its parts know each other, and its pool should be free for the next
    return Steps(list(outputs.values()), 1e3 * statistics.median(times), 1e3 * statistics.median(waits))


class Waiting:
    """Counts the seconds spent in `Flight.wait`, before the device is done."""

    def __enter__(self):
        self.seconds, self._original = 0.0, Flight.wait

        def timed(flight):
            begin = time.perf_counter()
            self._original(flight)
            self.seconds += time.perf_counter() - begin

        Flight.wait = timed
        return self

    def __exit__(self, *error):
        Flight.wait = self._original


def steps_table(args, model, cfg, name, ceilings, device, emit) -> Table:
    """All variants at each batch size; ValueError if two that run the same kernels give different tokens."""
    table = Table("model", "requests", "variant", "step, ms", "host, ms", "floor, ms", "of floor", "tok/s")
    itemsize = next(model.parameters()).element_size()
    for batch in args.batch:
        floor = 1e3 * ceilings.floor(cfg, batch, args.context, itemsize)
        same = {}
        for variant in args.variant or (VARIANTS if device == "cuda" else ("plain", "fused", "persistent")):
            run = run_steps(model, variant, batch, args.context, args.steps, device)
            if variant in ("persistent", "graphs", "ahead", "async"):
                same[variant], first = run.tokens, next(iter(same), variant)
                pairs = zip(run.tokens, same[first], strict=True)  # one ahead, the last token is still in the air
                if any(a[: len(b)] != b[: len(a)] for a, b in pairs):
                    raise ValueError(f"{name}, {batch} requests: {variant} gives other tokens than {first}")
            line = {"model": name, "requests": batch, "context": args.context, "variant": variant}
            line |= {"step_ms": round(run.step_ms, 4), "host_ms": round(run.host_ms, 4), "floor_ms": round(floor, 4)}
            line |= {"of_floor": round(floor / run.step_ms, 3), "tok_s": round(1e3 * batch / run.step_ms)}
            emit(line)
            table.add_row(
                name, str(batch), variant, f"{run.step_ms:.3f}", f"{run.host_ms:.3f}", f"{floor:.3f}",
                f"{floor / run.step_ms:.0%}", f"{1e3 * batch / run.step_ms:,.0f}",
            )  # fmt: skip
    return table


def timelines(model, name: str, batch: int, context: int, folder: Path, emit) -> None:
    """Profile some steps, plain and asynchronous; the device's idle share, and a picture."""
    lines = {}
    for variant in ("plain", "async"):
        core = decoding_core(model, variant, batch, context, 20)
        for _ in range(WARM_UP):
            core.step()
        lines[variant] = line = timeline.record(core.step, 8)
        emit({
            "timeline": name, "requests": batch, "variant": variant, "waits_for_host": round(line.idle, 4),
            "all_pauses": round(line.paused, 4),
        })  # fmt: skip
        lines[variant] = timeline.Timeline(line.steps[:3], [k for k in line.kernels if k[0] < line.steps[2][1]])
        del core
        gc.collect()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"timeline-{name}-{batch}.svg").write_text(timeline.draw(lines), encoding="utf-8")


def main(args) -> int:
    for name in ("steps", "context", "requests"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    for variant in args.variant or ():
        if variant not in VARIANTS:
            raise ValueError(f"unknown variant {variant!r}; known: {', '.join(VARIANTS)}")
    if args.beside:
        throughput.check_beside(args.beside, args.no_workload)
    device = choose_device(args.device)
    if args.timeline and device != "cuda":
        raise ValueError("--timeline needs a CUDA device")
    names = args.model or (["qwen3-0.6b", "qwen3-8b"] if device == "cuda" else ["small"])
    shapes = {name: shape_of(name, 4 * args.context) for name in names}
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 110)
    console.print(registry.who_wrote(), highlight=False)
    registry.require_all_exercises()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def emit(line):
        print(json.dumps(line), flush=True)

    torch.manual_seed(0)
    with torch.no_grad():
        ceilings = Ceilings.measure(dtype, torch.device(device))
        emit({"copy_gb_s": round(ceilings.copy / 1e9, 1), "matmul_tflop_s": round(ceilings.matmul / 1e12, 2)})
        for name, cfg in shapes.items():
            model = random_weights(cfg, dtype, device)
            console.print(steps_table(args, model, cfg, name, ceilings, device, emit))
            if args.timeline:
                for batch in args.batch:
                    timelines(model, name, batch, args.context, args.timeline, emit)
            if name == names[0] and not args.no_workload:
                variants = [v for v in ("fused", "graphs", "async") if not args.variant or v in args.variant]
                high = min(1024, args.context)
                if device != "cuda":
                    variants, high = ["fused"], min(64, args.context)
                load = throughput.draw_load(cfg.vocab_size, args.requests, max(1, high // 10), high)
                for variant in variants:
                    emit(throughput.line_of(load, variant, throughput.run_core(model, load, VARIANTS[variant])))
                if args.beside:
                    emit(throughput.line_of(load, throughput.PEER, throughput.run_peer(model, load, args.beside)))
            del model
    return 0
