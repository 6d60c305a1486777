"""Chapter 31's stretch exercises, one solution of each, on the tiny trained model: a table and a plot.

    python -m experiments.ch31 {cache,swap,order,radix,all} [--out DIR] [--seed 0] [--impl solution] [--device cuda]

cache: hit rate of chats against the size of the pool.  swap: recompute against swap, the cost of one preemption.
order: longest cached prefix first, a request that it starves, and the cure.  radix: a tree of tokens against hash
chains.  The plots are ch31_cache.png and so on.  Needs experiments/requirements.txt.
"""

import argparse
import os
import sys
import time
from importlib import import_module
from pathlib import Path

NAMES = ("cache", "swap", "order", "radix")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=(*NAMES, "all"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where the plots go")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--impl", choices=("engine", "solution"), default="solution")
    parser.add_argument("--device", default="cpu", help="of swap; the others count, and count the same anywhere")
    return parser.parse_args()


def main():
    args = parse()
    os.environ["IMPL"] = args.impl
    import matplotlib
    import torch

    from engine.exercises import registry  # after IMPL is set, which decides whose code is imported
    from engine.milestones.workload import BOOK
    from engine.models.loading import load

    matplotlib.use("Agg")
    torch.set_num_threads(1)
    print(registry.who_wrote(), file=sys.stderr)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in NAMES if args.experiment == "all" else (args.experiment,):
        model, tokenizer = load("tiny", "float32", args.device if name == "swap" else None)
        lines = BOOK.read_text(encoding="utf-8").splitlines()
        verses = [tokenizer.encode(line + "\n", add_special_tokens=False).ids for line in lines]
        module = import_module(f"experiments.ch31_{name}")
        print(f"\n{name}: {module.__doc__.splitlines()[0]}\n")
        begin = time.perf_counter()
        figure = module.main(model, verses, args.seed)
        figure.savefig(args.out / f"ch31_{name}.png", dpi=100)
        print(f"\n{args.out / f'ch31_{name}.png'}, {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
