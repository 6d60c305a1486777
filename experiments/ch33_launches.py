"""Where the time of one request's decode step goes, and what each idea of chapter 33 takes away. Needs a CUDA device.

    python -m experiments.ch33_launches [--model qwen3-0.6b] [--context 1024] [--repeat 7]

One CUDA graph is captured for each of: cuBLAS for all products; `matvec_kernel` in their place; kernels that start
early; and attention that may cut the context into shares of one tile, not four. Its replay is timed by itself: the
median of so many times ten. Then gate and up alone, torch against `matvec`, on the weights of every layer in turn, and
a trace of the last replay, part by part. JSON lines.
"""

import argparse
import gc
import json
import os
import statistics
import sys
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("IMPL", "solution")

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from engine.milestones.ceilings import event_ms, median_ms
from engine.milestones.graphs import decoding_core, random_weights, shape_of
from engine.serve import paged
from engine.serve.kernels import early, matvec

CUBLAS = patch.object(matvec, "fits", lambda *_, **__: False)
LATE = patch.object(early, "_can_wait", lambda device: False)
WHOLE = paged.choose_splits
FOUR = patch.object(paged, "choose_splits", lambda reqs, heads, keys, count: WHOLE(reqs, heads, keys // 4, count))
VARIANTS = {"cuBLAS": [CUBLAS, LATE, FOUR], "matvec": [LATE, FOUR], "early": [FOUR], "shares of a tile": []}


def graph_of(model, context: int, patches):
    """The recorded step of one request, and the core that owns its memory."""
    for each in patches:
        each.start()
    core = decoding_core(model, "graphs", 1, context, 24)
    for _ in range(4):
        core.step()
    for each in patches:
        each.stop()
    return core.runner._graphs[1][0], core


def microseconds(call, repeat: int) -> float:
    """Of a call, ten of which are timed together."""

    def ten():
        for _ in range(10):
            call()

    ten()
    return 100 * statistics.median(event_ms(ten) for _ in range(repeat))


def trace(graph) -> list[tuple[float, float, str]]:
    """(start, end, name) of each kernel of a replay, in microseconds."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    return [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def parts(kernels) -> dict:
    """Microseconds of a traced replay: before the first layer, in the layers, and the LM head after the last one."""
    kernels = sorted(kernels)
    norms = [(start, end) for start, end, name in kernels if "add_norm" in name]
    head = max(end - start for start, end, _ in kernels if start >= norms[-1][1])
    begin, last = kernels[0][0], max(end for _, end, _ in kernels)
    return {
        "whole": round(last - begin, 1), "before": round(norms[0][0] - begin, 1),
        "operations_before": sum(start < norms[0][0] for start, *_ in kernels),
        "layers": round(norms[-1][1] - norms[0][0], 1), "head": round(head, 1),
        "kernels": len(kernels),
    }  # fmt: skip


def products(model) -> dict:
    """Microseconds of gate and up for one row, in a graph over all layers."""
    x = torch.randn(1, model.cfg.hidden_size, dtype=torch.bfloat16, device="cuda")
    weights = [torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]) for layer in model.model.layers]
    ways = {"torch": F.linear, "matvec": matvec.matvec}
    return {
        name: round(1e3 * median_ms(lambda way=way: [way(x, w) for w in weights], x.device, 9) / len(weights), 2)
        for name, way in ways.items()
    }


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b")
    for name, default in (("context", 1024), ("repeat", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    model = random_weights(shape_of(args.model, 4 * args.context), torch.bfloat16, "cuda")
    for name, patches in VARIANTS.items():
        graph, core = graph_of(model, args.context, patches)
        print(json.dumps({"step": name, "us": round(microseconds(graph.replay, args.repeat), 1)}), flush=True)
        if not patches:
            print(json.dumps({"trace": name, **parts(trace(graph))}), flush=True)
        del graph, core
        gc.collect()
    print(json.dumps({"gate and up, us": products(model)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
