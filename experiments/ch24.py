"""Chapter 24's milestone: one request at a time, static batches and continuous batching, on the same work.

    python -m experiments.ch24 [--requests 32] [--repeat 5] [--seed 0] [--impl solution]

The three differ in one method, `admit`, or in the number of slots, and must give the same tokens before a speed is
printed. Static batching is shown at its best: rows that have finished are left out of the forward, where a padded batch
would still compute them.
"""

import argparse
import os
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=256, help="hidden size of the random model")
    parser.add_argument("--impl", choices=("engine", "solution"), default="solution")
    return parser.parse_args()


def work(count, vocab_size, seed):
    """(prompt, output length) pairs: prompts of 16-96 tokens, outputs of 4-128, short ones more often (log-uniform)."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(vocab_size) for _ in range(draw.randint(16, 96))] for _ in range(count)]
    return prompts, [round(4 * 32 ** draw.random()) for _ in range(count)]


def main():
    args = parse()
    os.environ["IMPL"] = args.impl
    from engine.exercises import registry  # after IMPL is set, which decides whose code is imported
    from engine.milestones.workload import get_model
    from engine.slots import ContinuousBatchingEngine

    class StaticBatchingEngine(ContinuousBatchingEngine):
        """Takes the next batch only when every slot is free."""

        def admit(self):
            return [] if any(self.slots) else super().admit()

    print(registry.who_wrote(), file=sys.stderr)
    model, _ = get_model("random", args.width, args.seed)
    prompts, limits = work(args.requests, model.cfg.vocab_size, args.seed)
    kinds = {
        "one at a time": (ContinuousBatchingEngine, 1),
        "static": (StaticBatchingEngine, args.slots),
        "continuous": (ContinuousBatchingEngine, args.slots),
    }
    seconds, counts, outputs = {name: [] for name in kinds}, {}, {}
    for turn in range(args.repeat + 1):
        for name, (kind, slots) in kinds.items():  # in turn, so that a slow moment of the machine meets all three
            engine = kind(model, num_slots=slots)
            begin = time.perf_counter()
            outputs[name] = engine.generate(prompts, limits)
            if turn:  # the first round warms up
                seconds[name].append(time.perf_counter() - begin)
            counts[name] = engine.num_steps, engine.num_forward
    if any(output != outputs["one at a time"] for output in outputs.values()):
        sys.exit("the outputs differ, so there is no speed to report")

    total = sum(limits)
    given = sum(map(len, prompts))
    print(f"{args.requests} requests, {given} prompt tokens, {total} output tokens, median of {args.repeat}")
    print(f"{'':14}{'slots':>6}{'steps':>7}{'forwards':>10}{'rows/decode':>13}{'tok/s':>9}{'ratio':>7}")
    base = statistics.median(seconds["static"])
    for name, (_, slots) in kinds.items():
        steps, forwards = counts[name]
        rows = (total - args.requests) / (forwards - args.requests)  # each prompt is one forward and gives one token
        median = statistics.median(seconds[name])
        print(f"{name:14}{slots:>6}{steps:>7}{forwards:>10}{rows:>13.2f}{total / median:>9.1f}{base / median:>7.2f}")


if __name__ == "__main__":
    main()
