"""What a simulated run amounts to: throughput, latencies, queue, pool; as one JSON object and as a table."""

import numpy as np
from rich.table import Table

from engine.simulate.simulator import Simulator

PERCENTILES = 50, 90, 99


def report(sim: Simulator) -> dict:
    """Figures of a finished simulation; nothing in it depends on the machine it ran on.

    Seconds of the virtual clock, from the first arrival to the last token. TTFT: arrival to first token. TPOT: a
    request's mean time between two tokens after the first, of answers that have two. E2E: arrival to last token.
    Queue, running and pool: means over time, an idle engine counting as empty, and maxima. None: nothing to measure.
    """
    done, line = sim.finished, sim.timeline
    arrived = [request.arrived_at for request in done]
    span = max((r.finished_at for r in done), default=0.0) - min(arrived, default=0.0)
    output = sum(r.arrival.num_decode_tokens for r in done)
    prompts = sum(r.arrival.num_prefill_tokens for r in done)
    seconds = np.asarray(line.seconds)
    return {
        "requests": len(sim.arrivals),
        "finished": len(done),
        "refused": len(sim.refused),
        "seconds": rounded(span),
        "busy": share(seconds.sum(), span),
        "steps": len(seconds),
        "prompt_tokens": prompts,
        "output_tokens": output,
        "computed_tokens": sim.num_computed_tokens,
        "output_tok_s": share(output, span),
        "requests_s": share(len(done), span),
        "ttft_s": percentiles([r.first_token_at - r.arrived_at for r in done]),
        "tpot_s": percentiles([tpot(r) for r in done if r.arrival.num_decode_tokens > 1]),
        "e2e_s": percentiles([r.finished_at - r.arrived_at for r in done]),
        "waiting": over_time(line.waiting, seconds, span),
        "running": over_time(line.running, seconds, span),
        "num_blocks": sim.blocks.num_blocks,
        "pool_usage": over_time(np.asarray(line.used_blocks) / sim.blocks.num_blocks, seconds, span),
        "hit_rate": rounded(sim.blocks.hit_rate),
        "evictions": sim.blocks.stats.evictions,
        "preemptions": sim.num_preemptions,
        "swapped_blocks": sim.num_swapped_blocks,
    }


def tpot(request) -> float:
    return (request.finished_at - request.first_token_at) / (request.arrival.num_decode_tokens - 1)


def percentiles(values: list[float]) -> dict[str, float | None]:
    """Between two values, linearly."""
    found = np.percentile(values, PERCENTILES) if values else [None] * len(PERCENTILES)
    return {f"p{p}": rounded(value) for p, value in zip(PERCENTILES, found, strict=True)}


def over_time(values, seconds, span: float) -> dict[str, float | None]:
    values = np.asarray(values)
    return {"mean": share((values * seconds).sum(), span), "max": rounded(values.max()) if len(values) else None}


def share(part: float, whole: float) -> float | None:
    return rounded(part / whole) if whole > 0 else None


def rounded(value) -> float | None:
    """To a microsecond, or six digits after the point of whatever it is."""
    return None if value is None else round(float(value), 6)


LABELS = {
    "busy": "share of time busy",
    "output_tok_s": "output tokens / s",
    "requests_s": "requests / s",
    "ttft_s": "TTFT, s",
    "tpot_s": "TPOT, ms",
    "e2e_s": "end to end, s",
    "num_blocks": "blocks in the pool",
}


def table(reports: list[tuple[str, dict]]) -> Table:
    """A column for each run, under its name."""
    made = Table("", *(name for name, _ in reports), title="simulated; seconds of the virtual clock")
    for key, first in reports[0][1].items():
        label = LABELS.get(key, key.replace("_", " "))
        if isinstance(first, dict):
            label += f"  {' / '.join(first)}"
        made.add_row(label, *(cell(key, found[key]) for _, found in reports))
    return made


def cell(key: str, value) -> str:
    if isinstance(value, dict):
        return " / ".join(cell(key, part) for part in value.values())
    if value is None:
        return "-"
    if key == "tpot_s":
        value *= 1e3
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
