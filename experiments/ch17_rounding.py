"""How far short number types move logits on real text, against the bound that the milestone of chapter 31 allows.

    python -m experiments.ch17_rounding tiny smollm2

For the two best tokens of every position: computed in float32 and in the shorter type, from the same weights.
"""

import argparse
import copy
import os

import torch

os.environ.setdefault("IMPL", "solution")

from engine.milestones.precision import margins_and_bounds, stream_lengths
from engine.milestones.workload import shared_text
from engine.models.loading import load


@torch.inference_mode()
def rounding_shares(low, prompts: list[list[int]]) -> dict[str, float]:
    """Column -> number. low: a model in a short type."""
    exact, dtype = copy.deepcopy(low).float(), next(low.parameters()).dtype
    leads, bounds, errors = [], [], []
    for token_ids in prompts:
        hidden, lengths = stream_lengths(exact, token_ids)
        best, other = exact.lm_head(hidden).topk(2).indices.T
        lead, bound = margins_and_bounds(exact, hidden, lengths, best, other, dtype)
        logits, rows = low(torch.tensor([token_ids]))[0], torch.arange(len(token_ids))
        errors.append((logits[rows, best] - logits[rows, other] - lead).abs())
        leads.append(lead)
        bounds.append(bound)
    leads, bounds, errors = torch.cat(leads), torch.cat(bounds), torch.cat(errors)
    return {
        "positions": len(leads),
        "mean bound": bounds.mean().item(),
        "largest error": errors.max().item(),
        "largest share": (errors / bounds).max().item(),
        "leads below": (leads < bounds).float().mean().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["tiny"])
    parser.add_argument("--requests", type=int, default=2)
    args = parser.parse_args()
    for name in args.models:
        for dtype in ("bfloat16", "float16"):
            low, tokenizer = load(name, dtype=dtype)
            shares = rounding_shares(low, [w.prompt for w in shared_text(args.requests, tokenizer, seed=0)])
            print(f"{name:10} {dtype:9}", *(f"{key} {value:.3g}" for key, value in shares.items()), sep="  ")


if __name__ == "__main__":
    main()
