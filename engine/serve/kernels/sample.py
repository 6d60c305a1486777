"""Greedy and temperature sampling where the logits are: one program for a part of a row's vocabulary."""

import torch
import triton
import triton.language as tl

from engine.exercises import exercise, fill
from engine.serve.kernels import jit

TILE = 1024  # logits that a program looks at together
PARTS = 16  # of a row


@exercise(33, "Tokens stay on the device")
def sample_kernel(
    logits, temperatures, seeds, places, values, ids, row_stride,
    VOCAB: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (n, part): the best token of a part of row n's vocabulary.  (Your engine: Chapter 33)

    logits: pointer to rows of VOCAB logits, row_stride elements apart; none is +inf.  temperatures: [N] f32, at most
    1e30.  seeds: [N] i64 and places: [N] i64, the request's seed and the output position that is sampled.
    Temperature 0: score = logit. Otherwise score = logit + temperature * g, with g = -log(-log(u)) (Gumbel noise: the
    largest of such scores is a draw from softmax(logits / temperature)) and u = ((b >> 9) + 0.5) * 2^-23, where b is
    the first of the four 32-bit numbers of philox(seed, token, place, 0, 0), as tl.philox gives them for 32-bit
    counters.
    The parts of a row are PARTS runs of VOCAB / PARTS tokens, rounded up to whole tiles of TILE; the last ones may be
    empty.
    values: [N, PARTS] f32 and ids: [N, PARTS] i64 get the part's best score and its token, the lowest of equals; an
    empty part, or one without a number above -inf, gets -inf and VOCAB; a part with a NaN gets +inf and VOCAB, so that
    nothing else of the row is taken.
    Everything in float32.  Grid: (N, PARTS).  Source: Gumbel-max (Gumbel 1954); Philox (Salmon et al., SC 2011).
    """
    raise NotImplementedError


def pick_kernel(values, ids, out, PARTS: tl.constexpr):
    """Program n: the best of a row's parts, the lowest token of equals.  Grid: (N,)."""
    n, p = tl.program_id(0), tl.arange(0, PARTS)
    value, token = tl.load(values + n * PARTS + p), tl.load(ids + n * PARTS + p)
    best = tl.max(value, 0)
    tl.store(out + n, tl.min(tl.where(value == best, token, 1 << 62), 0))


def draw(logits, temperatures, seeds, places) -> torch.Tensor:
    """logits [N, V], temperatures [N] f32, seeds and places [N] i64 -> tokens [N] i64.

    V for a row without a number above -inf, or with a NaN.
    """
    rows, vocab = logits.shape
    values = torch.empty(rows, PARTS, device=logits.device)
    ids = torch.empty(rows, PARTS, dtype=torch.int64, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        sample_kernel[(rows, PARTS)](
            logits, temperatures, seeds, places, values, ids, logits.stride(0), vocab, PARTS, TILE
        )
        pick_kernel[(rows,)](values, ids, out, PARTS, num_warps=1)
    return out


fill(__name__)
sample_kernel, pick_kernel = jit(sample_kernel), triton.jit(pick_kernel)
