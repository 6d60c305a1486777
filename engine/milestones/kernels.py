"""The milestone of chapter 32: attention backends side by side, next to what memory allows, on the same pool.

Speeds are medians. On a GPU the calls of several layers, each with its own pool, stand in one CUDA graph that is timed
by device events, so that launches do not count and no layer finds its K and V in a cache; on a CPU the clock times one
layer, and Triton has no part.
"""

import json
import math
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.exercises import registry
from engine.milestones.ceilings import copy_speed, median_ms
from engine.serve.attention import get_backend
from engine.serve.batch import BatchMeta

HEADS, KV_HEADS, WIDTH, BLOCK = 32, 8, 128, 16  # Qwen3-8B, one layer
ON_CPU = {
    "batch": [1, 16], "context": [256, 1024], "chunks": [(1, 512), (4, 256)], "mixed": (256, 16, 512), "rows": 512,
}  # fmt: skip
ON_GPU = {
    "batch": [1, 16, 64, 256], "context": [1024, 8192, 32768], "chunks": [(1, 8192), (8, 1024)],
    "mixed": (2048, 128, 8192), "rows": 8192,
}  # fmt: skip
POOL_BYTES = 64 << 30  # larger decode shapes are left out
LAYERS, LAYERS_BYTES = 8, 4 << 30  # on a GPU: layers of a step, as far as their pools are no larger together
SLOW = 4096  # context tokens in all, above which the reference backend is not timed


@dataclass
class Step:
    """Rows of a step over the pools of some layers: random numbers, the blocks in random order."""

    q: torch.Tensor
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    meta: BatchMeta
    shapes: list[tuple[int, int]]

    @property
    def cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the first layer."""
        return self.caches[0]

    @property
    def kv_bytes(self) -> int:
        """Of one layer."""
        return sum(s for s, _ in self.shapes) * 2 * KV_HEADS * WIDTH * self.q.element_size()

    @property
    def flops(self) -> int:
        """Two products; a row at position p has p + 1 keys."""
        pairs = sum(t * s - t * (t - 1) // 2 for s, t in self.shapes)
        return 4 * pairs * HEADS * WIDTH


def make_step(shapes: list[tuple[int, int]], dtype, device, seed: int = 0) -> Step:
    """shapes: (context, rows) of each request; its rows are the last of the context."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-s // BLOCK) for s, _ in shapes]
    order = torch.randperm(sum(counts), generator=generator, dtype=torch.int32)
    table = torch.zeros(len(shapes), max(counts), dtype=torch.int32)
    slots, begin = [], 0
    for r, ((s, t), count) in enumerate(zip(shapes, counts, strict=True)):
        table[r, :count] = order[begin : begin + count]
        positions = torch.arange(s - t, s)
        slots.append(table[r, positions // BLOCK].long() * BLOCK + positions % BLOCK)
        begin += count
    starts = torch.tensor([0, *[t for _, t in shapes]]).cumsum(0).int()
    lengths = torch.tensor([s for s, _ in shapes], dtype=torch.int32)
    meta = BatchMeta(
        starts.to(device), lengths.to(device), table.to(device), torch.cat(slots).to(device), BLOCK, starts, lengths,
        max(t for _, t in shapes), max(s for s, _ in shapes),
    )  # fmt: skip
    shape = sum(counts) + 1, BLOCK, KV_HEADS, WIDTH
    layer_bytes = 2 * math.prod(shape) * dtype.itemsize
    layers = max(1, min(LAYERS, LAYERS_BYTES // layer_bytes)) if device.type == "cuda" else 1
    caches = [tuple(torch.randn(shape, dtype=dtype, device=device) for _ in "kv") for _ in range(layers)]
    q = torch.randn(int(starts[-1]), HEADS, WIDTH, dtype=dtype, device=device)
    return Step(q, caches, meta, shapes)


class Bench:
    """Prints one JSON line a measurement and keeps rows for the table."""

    def __init__(self, device, dtype, repeat: int):
        self.device, self.dtype, self.repeat = device, dtype, repeat
        self.table = Table("step", "backend", "ms", "GB/s", "of copy", "TFLOP/s", "of contiguous")
        self.copy = copy_speed(device, repeat)
        print(json.dumps({"what": "copy", "gb_s": round(self.copy / 1e9, 1)}), flush=True)

    def measure(self, what: str, step: Step, name: str, call, moved=None, flops=None, beside_ms=None) -> float:
        """Milliseconds of call(cache), which runs once for each layer.

        moved, flops: bytes and FLOP of one layer, those of attention by default; flops 0: there is no arithmetic.
        """
        moved, flops = step.kv_bytes if moved is None else moved, step.flops if flops is None else flops

        def step_of_layers():
            for cache in step.caches:
                call(cache)

        ms = median_ms(step_of_layers, self.device, self.repeat) / len(step.caches)
        speed, rate = moved / ms * 1e3, flops / ms * 1e3
        line = {"what": what, "backend": name, "ms": round(ms, 4), "gb_s": round(speed / 1e9, 1)}
        line["of_copy"] = round(speed / self.copy, 3)
        if flops:
            line["tflop_s"] = round(rate / 1e12, 3)
        if beside_ms is not None:
            line["of_contiguous"] = round(beside_ms / ms, 3)
        print(json.dumps(line), flush=True)
        values = [f"{ms:.3f}", f"{speed / 1e9:.1f}", f"{speed / self.copy:.0%}", f"{rate / 1e12:.3g}" if flops else ""]
        self.table.add_row(what, name, *values, "" if beside_ms is None else f"{beside_ms / ms:.0%}")
        return ms

    def writes(self, rows: int, names) -> None:
        """K and V of a step's rows into the pools, beside a plain copy of as many bytes."""
        step, what = write_step(rows, self.dtype, self.device), f"write {rows} rows"
        k, v = (torch.randn(rows, KV_HEADS, WIDTH, dtype=self.dtype, device=self.device) for _ in "kv")
        target = torch.empty_like(step.cache[0].view(torch.int32).flatten()[: step.kv_bytes // 4])
        sources = {id(cache): target.clone() for cache in step.caches}
        calls = {"plain copy": lambda cache: torch.bitwise_or(sources[id(cache)], 0, out=target)}
        for name in names:
            write = get_backend(name).write
            calls[name] = lambda cache, write=write: write(cache, k, v, step.meta)
            for pool in step.cache:
                pool.zero_()
            calls[name](step.cache)
            written = [pool.flatten(0, 1)[step.meta.slot_mapping] for pool in step.cache]
            if not (written[0].equal(k) and written[1].equal(v)):
                raise ValueError(f"{what}: what {name} stored is not what it was given")
        for name, call in calls.items():
            self.measure(what, step, name, call, moved=2 * step.kv_bytes, flops=0)  # read and written

    def backends(self, what: str, step: Step, names, beside_ms=None) -> dict[str, float]:
        """Each backend on a step, once all agree; ValueError if they do not."""
        times, first = {}, None
        for name in names:
            if name == "reference" and sum(s for s, _ in step.shapes) > SLOW:
                continue
            backend = get_backend(name)
            result = backend.forward(step.q, step.cache, step.meta)
            first = result if first is None else first
            # Both round their weights and values to the type of q: a few units of the largest value, which is near 5.
            bound = 64 * torch.finfo(self.dtype).eps
            if (off := float((result - first).abs().max())) > bound:
                raise ValueError(f"{what}: {name} is off by {off:.2g}, rounding explains {bound:.2g}")
            call = lambda cache: backend.forward(step.q, cache, step.meta)  # noqa: B023, E731
            times[name] = self.measure(what, step, name, call, beside_ms=beside_ms)
        return times


def write_step(rows: int, dtype, device) -> Step:
    """So many new tokens, each in a block of its own: K and V of a row are written far from its neighbours'."""
    return make_step([(1, 1)] * rows, dtype, device)


def contiguous(step: Step, *kernels: SDPBackend):
    """torch's own attention on the same shapes, side by side in memory: what a prefill is measured against.

    kernels: which of its kernels it may use; none: the one that it chooses.
    """
    (s, t), requests = step.shapes[0], len(step.shapes)
    q, k, v = (torch.randn(requests, h, t, WIDTH, dtype=step.q.dtype, device=step.q.device)
               for h in (HEADS, KV_HEADS, KV_HEADS))  # fmt: skip
    assert s == t, "whole prompts"

    def call(_):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def restricted(_):
        with sdpa_kernel(list(kernels)):
            return call(_)

    return restricted if kernels else call


def main(args) -> int:
    if args.repeat < 1:
        raise ValueError(f"--repeat must be at least 1, got {args.repeat}")
    if args.threads:
        torch.set_num_threads(args.threads)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 110)
    console.print(registry.who_wrote(), highlight=False)
    registry.require_all_exercises()
    cuda = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if cuda else torch.float32
    sizes, names = (ON_GPU, ["reference", "sdpa", "triton"]) if cuda else (ON_CPU, ["reference", "sdpa"])
    if args.backend:
        names = args.backend
    for name in names:
        get_backend(name)  # an unknown name is found now
    torch.manual_seed(0)
    with torch.inference_mode():
        bench = Bench(device, dtype, args.repeat)
        bench.writes(sizes["rows"], names)
        for batch in sizes["batch"]:
            for context in sizes["context"]:
                if batch * context * 4 * KV_HEADS * WIDTH <= POOL_BYTES:
                    step = make_step([(context, 1)] * batch, dtype, device)
                    bench.backends(f"decode {batch} x {context}", step, names)
        for batch, length in sizes["chunks"]:
            step = make_step([(length, length)] * batch, dtype, device)
            what = f"prefill {batch} x {length}"
            beside = bench.measure(what, step, "torch, contiguous", contiguous(step))
            if cuda:  # there torch has several kernels; FlashAttention is the one that is like ours
                beside = bench.measure(what, step, "flash, contiguous", contiguous(step, SDPBackend.FLASH_ATTENTION))
            bench.backends(what, step, names, beside)
        chunk, decodes, context = sizes["mixed"]
        parts = {"chunk": [(chunk, chunk)], "decodes": [(context, 1)] * decodes}
        parts["mixed step"] = parts["chunk"] + parts["decodes"]
        times = {
            part: bench.backends(f"{part}: {chunk} + {decodes} x {context}", make_step(shapes, dtype, device), names)
            for part, shapes in parts.items()
        }
        for name, ms in times["mixed step"].items():
            if name in times["chunk"] and name in times["decodes"]:
                apart = times["chunk"][name] + times["decodes"][name]
                print(json.dumps({"what": "mixed / apart", "backend": name, "ratio": round(ms / apart, 3)}), flush=True)
    console.print(bench.table)
    return 0
