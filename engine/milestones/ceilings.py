"""What a device can do, measured: bytes and FLOP a second, and the least time of a decode step that follows."""

import statistics
import time
from dataclasses import dataclass

import torch

from engine.models.config import Qwen3Config


@dataclass
class Ceilings:
    """Bytes and FLOP a second, measured in this run."""

    copy: float
    matmul: float

    @classmethod
    def measure(cls, dtype, device: torch.device, repeat: int = 9) -> "Ceilings":
        side = 8192 if device.type == "cuda" else 1024
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in "ab")
        c = torch.empty_like(a)
        ms = median_ms(lambda: torch.matmul(a, b, out=c), device, repeat)
        return cls(copy_speed(device, repeat), 2 * side**3 / ms * 1e3)

    def floor(self, cfg: Qwen3Config, batch: int, context: int, itemsize: int) -> float:
        """Seconds of a decode step: of each operation's bytes and FLOP the slower; activations are left out."""
        heads, kv = cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim
        hidden, mlp = cfg.hidden_size, cfg.intermediate_size
        layer = [hidden * (heads + 2 * kv), heads * hidden, hidden * 2 * mlp, mlp * hidden]
        matrices = layer * cfg.num_hidden_layers + [hidden * cfg.vocab_size]
        seconds = sum(max(m * itemsize / self.copy, 2 * m * batch / self.matmul) for m in matrices)
        kv_bytes = 2 * kv * itemsize * batch * context
        flops = 4 * heads * batch * context
        return seconds + cfg.num_hidden_layers * max(kv_bytes / self.copy, flops / self.matmul)


def copy_speed(device: torch.device, repeat: int) -> float:
    """Bytes a second that a copy reads and writes: what any kernel's traffic is measured against."""
    source = torch.ones((1 << 28) if device.type == "cuda" else (1 << 25), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    # The first is a copy engine's work in a CUDA graph, and slower there than a kernel's.
    ways = [lambda: target.copy_(source), lambda: torch.bitwise_or(source, 0, out=target)]
    return 2 * source.nbytes / min(median_ms(way, device, repeat) for way in ways) * 1e3


def median_ms(call, device, repeat: int) -> float:
    """Of a call, after a warm-up."""
    call()
    if device.type != "cuda":
        times = []
        for _ in range(repeat):
            begin = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(times)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            call()
        replay = graph.replay
    except RuntimeError:  # the call waits for the device, as the reference backend does
        torch.cuda.synchronize()
        replay = call
    return statistics.median(event_ms(replay) for _ in range(repeat))


def event_ms(call) -> float:
    """Of a call, by the device's clock."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
