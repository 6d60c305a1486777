"""`python run.py simulate`: from options to traces, runs and what is printed."""

import json
import sys
import time
from argparse import Namespace
from dataclasses import fields
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from engine.exercises import registry
from engine.milestones.options import SIMULATE
from engine.serve.config import EngineConfig
from engine.simulate.arrivals import Arrival
from engine.simulate.cost import CostModel
from engine.simulate.csv_trace import faster, read_trace
from engine.simulate.generators import GENERATORS, Shape
from engine.simulate.hardware import find_gpu, find_model
from engine.simulate.plots import check_plot, plot_run, plot_sweep
from engine.simulate.report import report, table
from engine.simulate.simulator import Simulator

EVERY = 2000  # steps between two reports of progress
COLUMNS = 3  # runs side by side, as many as a terminal has room for


def main(args) -> int:
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 110)
    console.print(registry.who_wrote(), highlight=False)
    registry.require_all_exercises()
    plot = Path(args.plot) if args.plot else None
    check_plot(plot)
    option, values = parse_sweep(args.sweep) if args.sweep else (None, [None])
    # All settings are read first: a bad one should not cost the runs before it.
    settings = [args if option is None else Namespace(**(vars(args) | {option: value})) for value in values]
    runs = [(value, its, *prepare(its)) for value, its in zip(values, settings, strict=True)]

    found = []
    for value, its, *parts in runs:
        sim = simulate(its, *parts, console)
        found.append((value, report(sim)))
        print(json.dumps(asked_for(its, option) | found[-1][1]), flush=True)
        if plot and option is None and sim.finished:
            plot_run(sim, plot, f"{Path(its.trace).name}, {its.model} on {its.gpu}")
    for begin in range(0, len(found), COLUMNS):
        part = found[begin : begin + COLUMNS]
        named = [(Path(args.trace).name if option is None else f"{option} {value}", each) for value, each in part]
        console.print(table(named), highlight=False)
    if plot and option is not None:
        plot_sweep(option, found, plot)
    return 0


def asked_for(args, option: str | None) -> dict:
    """What was simulated: trace, GPU, model, whatever is not at its default, and the option that is swept."""
    always = "gpu", "model", option
    names = [n for n, s in SIMULATE.items() if n in always or getattr(args, n) not in (None, s.default)]
    return {"trace": args.trace} | {name: getattr(args, name) for name in names}


def parse_sweep(text: str) -> tuple[str, list]:
    """`option=a,b,c` -> the option and its values; ValueError for an option or a value that does not exist."""
    name, equals, listed = text.partition("=")
    name = name.strip().removeprefix("--").replace("-", "_")
    if not equals or name not in SIMULATE:
        raise ValueError(f"--sweep takes OPTION=VALUE,VALUE,... with one of {', '.join(SIMULATE)}; got {text!r}")
    values = [SIMULATE[name].read(name, word.strip()) for word in listed.split(",")]
    return name, values


def prepare(args) -> tuple[EngineConfig, CostModel, Shape]:
    """Every setting checked, and nothing simulated yet; ValueError for one that cannot work."""
    if args.trace not in GENERATORS and not Path(args.trace).is_file():
        raise ValueError(f"{args.trace!r} is neither a file nor one of {', '.join(GENERATORS)}")
    for name, low in (("speed", 1e-9), ("overhead_us", 0)):
        value = getattr(args, name)
        if value is not None and not low <= value < float("inf"):
            raise ValueError(f"{name} must be {'at least 0' if low == 0 else 'positive'}, got {value}")
    given = {name: getattr(args, name) for name in SIMULATE if getattr(args, name) is not None}
    config = EngineConfig(**{f.name: given[f.name] for f in fields(EngineConfig) if f.name in given})
    shape = Shape(**{f.name: given[f.name] for f in fields(Shape) if f.name in given})
    overhead = None if args.overhead_us is None else args.overhead_us * 1e-6
    cost = CostModel(find_gpu(args.gpu), find_model(args.model), config.block_size, overhead)
    cost.num_blocks(config)
    return config, cost, shape


def get_trace(args, shape: Shape) -> tuple[list[Arrival], str | None]:
    """The trace that args.trace names, and a remark about it, if there is one."""
    if args.trace in GENERATORS:
        arrivals, remark = GENERATORS[args.trace](shape), None
    else:
        arrivals, remark = read_trace(args.trace, args.requests, shape.prefix_tokens)
    return faster(arrivals, args.speed) if args.speed != 1 else arrivals, remark


def simulate(args, config: EngineConfig, cost: CostModel, shape: Shape, console: Console) -> Simulator:
    """One run to its end, its wall time and refusals said on stderr."""
    begin = time.perf_counter()
    arrivals, remark = get_trace(args, shape)
    if remark:
        console.print(remark, highlight=False)
    sim = Simulator(arrivals, config, cost)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("requests", total=len(arrivals))
        sim.run(EVERY, lambda sim: progress.update(task, completed=len(sim.finished) + len(sim.refused)))
    sim.blocks.check()
    steps = len(sim.timeline.begin)
    console.print(
        f"{len(arrivals):,} requests, {steps:,} steps in {time.perf_counter() - begin:.1f} s of wall time",
        highlight=False,
    )
    if sim.refused:
        arrival, why = sim.refused[0]
        console.print(f"{len(sim.refused):,} requests refused; the first, {arrival.token}: {why}", highlight=False)
    return sim
