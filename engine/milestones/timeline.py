"""What host and device did during some steps, from torch's profiler: how long the device idled, and a picture."""

from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile, record_function

GAP_US = 10  # a longer pause between two kernels is a wait for the host, not the start of the next kernel


@dataclass
class Timeline:
    """Intervals in microseconds from the begin of the first step, in order: the steps on the host, kernels, waits."""

    steps: list[tuple[float, float]]
    kernels: list[tuple[float, float]]

    @property
    def idle(self) -> float:
        """Share of the time from the first kernel to the last in which the device waited for the host."""
        gaps = [b[0] - a[1] for a, b in zip(self.kernels, self.kernels[1:], strict=False)]
        return sum(gap for gap in gaps if gap > GAP_US) / (self.kernels[-1][1] - self.kernels[0][0])

    @property
    def paused(self) -> float:
        """The same with every pause between two kernels."""
        busy = sum(end - begin for begin, end in self.kernels)
        return 1 - busy / (self.kernels[-1][1] - self.kernels[0][0])


def record(step, count: int) -> Timeline:
    """The timeline of `count` calls of step(), which launches CUDA kernels."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with profile(activities=activities) as profiler:
        for _ in range(count):
            with record_function("core step"):
                step()
        torch.cuda.synchronize()
    steps, kernels = [], []
    for event in profiler.events():
        interval = event.time_range.start, event.time_range.end
        if event.device_type == torch.autograd.DeviceType.CUDA:
            if event.name != "core step":
                kernels.append(interval)
        elif event.name == "core step":
            steps.append(interval)
    start = min(begin for begin, _ in steps)
    steps, kernels = ([(b - start, e - start) for b, e in sorted(x)] for x in (steps, kernels))
    return Timeline(steps, merge(kernels))


def merge(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sorted intervals, overlapping ones as one."""
    merged: list[tuple[float, float]] = []
    for begin, end in intervals:
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def draw(lines: dict[str, Timeline], width: int = 860) -> str:
    """An SVG with two rows for each timeline, host and device, all on one scale; the paler a bar, the more pauses."""
    span = max(max(t.steps[-1][1], t.kernels[-1][1]) for t in lines.values())
    scale, y, parts = (width - 130) / span, 20, []
    for name, line in lines.items():
        rows = (("host", line.steps, "#7aa6c2"), ("device", fuse(line.kernels, span / 400), "#c2703d"))
        for row, intervals, colour in rows:
            parts.append(f'<text x="4" y="{y + 12}">{name}, {row}</text>')
            for begin, end in intervals:
                x, w = 126 + begin * scale, max(0.5, (end - begin) * scale)
                share = 1.0 if row == "host" else busy(line.kernels, begin, end)
                paint = f'fill="{colour}" fill-opacity="{share:.2f}" stroke="white"'
                parts.append(f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="16" {paint}/>')
            y += 20
        y += 10
    parts.append(f'<text x="126" y="{y + 8}">0</text><text x="{width - 60}" y="{y + 8}">{span / 1000:.1f} ms</text>')
    style = 'font-family="sans-serif" font-size="11"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + 16}" {style} stroke-width="0.3">'
    paper = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, paper, *parts, "</svg>", ""])


def fuse(intervals: list[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """Intervals less than `gap` apart as one, so that a picture of thousands stays small."""
    return [(b, e - gap) for b, e in merge([(b, e + gap) for b, e in intervals])]


def busy(intervals: list[tuple[float, float]], begin: float, end: float) -> float:
    """Share of [begin, end] that lies in one of the intervals."""
    return sum(max(0.0, min(e, end) - max(b, begin)) for b, e in intervals) / (end - begin)
