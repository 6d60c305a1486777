"""Chapter 5's formula as it stands against torch's fused attention: time, and the memory of the score matrix.

    python -m experiments.ch05 [--repeat 20] [--impl solution]

Fused (`scaled_dot_product_attention`) works through the keys in tiles and never stores the scores. Both get the same
boolean mask and the same grouped heads, and must agree. One thread and its CPU time, so that a busy machine does not
count.
"""

import argparse
import os
import statistics
import time

SHAPES = {  # B, H, Hkv, T, S, D
    "prefill of 256": (1, 9, 3, 256, 256, 64),
    "prefill of 1,024": (1, 16, 8, 1024, 1024, 64),
    "prefill of 2,048": (1, 16, 8, 2048, 2048, 64),
    "decode, 8 rows of 320": (8, 16, 8, 1, 320, 64),
    "decode, 1 row of 8,192": (1, 16, 8, 1, 8192, 64),
}


def median_ms(function, repeat):
    function()
    times = []
    for _ in range(repeat):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return 1e3 * statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--impl", choices=("engine", "solution"), default="solution")
    args = parser.parse_args()
    os.environ["IMPL"] = args.impl

    import torch

    from engine.attention import causal_attention  # after IMPL is set, which decides whose code is imported

    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{'':24}{'scores':>10}{'explicit':>12}{'fused':>12}")
    for name, (B, H, Hkv, T, S, D) in SHAPES.items():
        q, k, v = torch.randn(B, H, T, D), torch.randn(B, Hkv, S, D), torch.randn(B, Hkv, S, D)
        q_pos, k_pos = torch.arange(S - T, S), torch.arange(S)

        def explicit(q=q, k=k, v=v, q_pos=q_pos, k_pos=k_pos):
            return causal_attention(q, k, v, q_pos, k_pos)

        def fused(q=q, k=k, v=v, q_pos=q_pos, k_pos=k_pos):
            visible = k_pos <= q_pos[:, None]
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)

        with torch.inference_mode():
            if not torch.allclose(explicit(), fused(), atol=1e-4):
                raise SystemExit(f"{name}: the two disagree")
            times = [median_ms(f, args.repeat) for f in (explicit, fused)]
        print(f"{name:24}{B * H * T * S * 4 / 1e6:8.1f}MB" + "".join(f"{t:10.2f}ms" for t in times))


if __name__ == "__main__":
    main()
