"""Time per new token, with and without a KV cache, as the text grows.  python experiments/ch16.py [--impl engine]

Random weights: the time does not depend on what the model says. CPU time of one thread, the best of a few tries, so
that other programs on the machine matter little.
"""

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impl", choices=("engine", "solution"), default="solution")
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--repeat", type=int, default=9)
    args = parser.parse_args()
    os.environ["IMPL"] = args.impl

    import torch

    from engine.kv_cache import KVCache
    from engine.models.qwen3 import Qwen3, Qwen3Config

    torch.set_num_threads(1)
    cfg = Qwen3Config(
        vocab_size=4096, hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3(cfg).eval()
    parameters = sum(p.numel() for p in model.parameters())
    per_token = 2 * cfg.num_hidden_layers * cfg.num_key_value_heads * cfg.head_dim * 4
    print(f"{parameters / 1e6:.1f} M parameters in float32, {per_token} bytes of K and V per token")
    print(f"{'tokens so far':>13} {'uncached':>12} {'cached':>10} {'ratio':>7} {'cache holds':>12}")
    with torch.inference_mode():
        for length in args.lengths:
            ids = torch.randint(0, cfg.vocab_size, (1, length), generator=torch.Generator().manual_seed(length))
            cache = KVCache.for_model(model, 1, length + args.repeat + 1)
            model(ids[:, :-1], cache)
            cached, uncached = [], []
            for i in range(args.repeat + 1):
                start = time.process_time()
                model(ids[:, -1:], cache)
                middle = time.process_time()
                model(ids)
                end = time.process_time()
                if i:  # the first round warms up
                    cached.append(middle - start)
                    uncached.append(end - middle)
            slow, fast = min(uncached), min(cached)
            size = f"{per_token * length / 2**20:.1f} MiB"
            print(f"{length:13} {slow * 1e3:9.1f} ms {fast * 1e3:7.1f} ms {slow / fast:7.1f} {size:>12}", flush=True)


if __name__ == "__main__":
    main()
