"""What a token costs in `sample`: greedy, a plain draw, and the two filters, over a vocabulary of Qwen3's size.

    python -m experiments.ch08 [--vocab 151936] [--repeat 20] [--impl solution]

One thread and its CPU time, so that a busy machine does not count.
"""

import argparse
import os
import statistics
import time

SETTINGS = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8": {"temperature": 0.8},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--impl", choices=("engine", "solution"), default="solution")
    args = parser.parse_args()
    os.environ["IMPL"] = args.impl

    import torch

    from engine.sampling import sample  # after IMPL is set, which decides whose code is imported

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    rows = (1, 16)
    print(f"{'ms per call':18}" + "".join(f"{f'{b} rows':>12}" for b in rows))
    for name, setting in SETTINGS.items():
        medians = []
        for b in rows:
            logits = 3 * torch.randn(b, args.vocab, generator=generator)
            times = []
            for _ in range(args.repeat + 1):
                start = time.process_time()
                sample(logits, generator=generator, **setting)
                times.append(time.process_time() - start)
            medians.append(1e3 * statistics.median(times[1:]))
        print(f"{name:18}" + "".join(f"{m:12.2f}" for m in medians))


if __name__ == "__main__":
    main()
