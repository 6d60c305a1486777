"""PNG plots: one run over time, or a sweep over the values of an option."""

from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

import numpy as np

from engine.simulate.simulator import Simulator

BINS = 60  # over the whole run
DPI = 72


def check_plot(file: Path | None) -> None:
    """ValueError before an hour is simulated for a plot that cannot be drawn or written."""
    if file is None:
        return
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: python -m pip install -r experiments/requirements.txt")
    if file.suffix.lower() != ".png":
        raise ValueError(f"--plot writes PNG files, got {str(file)!r}")
    if not file.resolve().parent.is_dir():
        raise ValueError(f"--plot: there is no folder {str(file.resolve().parent)!r}")


def plot_run(sim: Simulator, file: Path, title: str) -> None:
    """Requests, pool, tokens a second and time to the first token, over the virtual clock."""
    line = sim.timeline
    begin, seconds = np.asarray(line.begin), np.asarray(line.seconds)
    edges = np.linspace(begin[0], begin[-1] + seconds[-1], BINS + 1)
    middle, width = (edges[1:] + edges[:-1]) / 2, edges[1] - edges[0]

    def binned(amounts):
        """Sums by the bin in which a step began."""
        return np.histogram(begin, edges, weights=amounts)[0]

    figure, ((requests, pool), (speed, first)) = _figure(2, 2, title)
    for name in "running", "waiting":
        requests.plot(middle, binned(np.asarray(getattr(line, name)) * seconds) / width, label=name, linewidth=1)
    requests.legend()
    requests.set(title="requests")
    pool.plot(middle, binned(np.asarray(line.used_blocks) * seconds) / width / sim.blocks.num_blocks, linewidth=1)
    pool.set(title="share of the pool in use", ylim=(0, None))
    speed.plot(middle, binned(np.asarray(line.sampled)) / width, linewidth=1)
    speed.set(title="output tokens / s", xlabel="seconds", ylim=(0, None))
    for name, values in _percentiles_by_bin(sim, edges).items():
        first.plot(middle, values, label=name, linewidth=1)
    first.legend()
    first.set(title="seconds to the first token, by arrival", xlabel="seconds", yscale="log")
    _save(figure, file)


def _percentiles_by_bin(sim: Simulator, edges) -> dict[str, list[float]]:
    """Of the time to the first token, by the bin of the arrival; NaN where nobody arrived."""
    arrived = np.array([request.arrived_at for request in sim.finished])
    waited = np.array([request.first_token_at for request in sim.finished]) - arrived
    order = np.argsort(arrived)
    bins = np.split(waited[order], np.searchsorted(arrived[order], edges[1:-1]))
    return {f"p{p}": [np.percentile(one, p) if len(one) else np.nan for one in bins] for p in (50, 99)}


def plot_sweep(option: str, reports: list[tuple[object, dict]], file: Path) -> None:
    """Hit rate, throughput and two latencies against the values; evenly spaced where these are no numbers."""
    values = [value for value, _ in reports]
    plain = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    places = values if plain else range(len(values))
    figure, axes = _figure(2, 2, f"against {option}")
    curves = {
        "hit rate": [found["hit_rate"] for _, found in reports],
        "output tokens / s": [found["output_tok_s"] for _, found in reports],
        "TTFT, seconds": [found["ttft_s"] for _, found in reports],
        "TPOT, milliseconds": [{p: v and 1e3 * v for p, v in found["tpot_s"].items()} for _, found in reports],
    }
    for axis, (name, found) in zip(axes.flat, curves.items(), strict=True):
        if isinstance(found[0], dict):
            for p in found[0]:
                axis.plot(places, _numbers(one[p] for one in found), "o-", markersize=3, label=p)
            axis.legend()
        else:
            axis.plot(places, _numbers(found), "o-", markersize=3)
        axis.set(title=name)
        if name.startswith("TTFT"):  # a queue that grows makes it larger by orders of magnitude
            axis.set_yscale("log")
        else:
            axis.set_ylim(0, 1.1 * axis.dataLim.ymax or 1)
        if plain and min(values) > 0 and max(values) >= 8 * min(values):
            axis.set_xscale("log", base=2)
        if not plain:
            axis.set_xticks(places, [str(value) for value in values])
    _save(figure, file)


def _numbers(values) -> list[float]:
    """None, where nothing was measured, leaves a gap."""
    return [float("nan") if value is None else value for value in values]


def _figure(rows: int, columns: int, title: str):
    from matplotlib.figure import Figure  # without pyplot: no window, no state

    figure = Figure(figsize=(9, 5), layout="constrained")
    figure.suptitle(title)
    return figure, figure.subplots(rows, columns)


def _save(figure, file: Path) -> None:
    from PIL import Image  # comes with matplotlib

    drawn = BytesIO()
    figure.savefig(drawn, dpi=DPI, format="png")
    # 64 colours are a third of the bytes, and without matplotlib's own notes the same run writes the same file.
    Image.open(drawn).convert("RGB").quantize(64).save(file, format="png", optimize=True)
