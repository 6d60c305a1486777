"""One row times a matrix: all the weights are read for it, so nothing but reading them counts."""

import torch
import triton
import triton.language as tl

from engine.exercises import exercise, fill
from engine.serve.kernels import jit
from engine.serve.kernels.early import FEW, goes_early, inputs_ready, launched  # noqa: F401  (for the exercise)

SHARE = 8192  # weights that a program should hold in registers, padding included
WIDEST = 16_384  # weights beyond which they do not fit: a program holds at least one whole row, gated two
SMALL = 1 << 23  # weights that stay in the device's cache while each of a few rows reads them


@exercise(33, "One row at a time")
def matvec_kernel(
    x, weight, bias, out, outputs,
    WIDTH: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program (n, j): outputs j * ROWS and on, ROWS of them, of row n times the matrix.  (Your engine: Chapter 33)

    x: [N, WIDTH].  weight: [outputs, WIDTH].  bias: [outputs], read if BIAS.  out: [N, outputs].  All without gaps and
    of the model's type.  out[n, o] = sum over i of x[n, i] * weight[o, i], plus bias[o]: summed in float32, rounded
    once.
    GATED: weight [2 * outputs, WIDTH] and bias [2 * outputs] are those of the gate, then those of up, and out is what
    swiglu_kernel makes of the two (each rounded as above): silu(gate) in float32, rounded, times up, rounded again.
    Every program calls inputs_ready(EARLY), once. Weights and bias are loaded before it, as no kernel of a step writes
    them; x only after it, and nothing is stored before it, for an earlier kernel may still read that memory. So the
    weights are under way while the kernel before still computes x.
    outputs need not be a multiple of ROWS: nothing outside x, weight, bias and out may be loaded or stored. A matrix
    can have more than 2^31 elements.  COLS >= WIDTH and ROWS are powers of two.
    Grid: (N, outputs / ROWS rounded up).
    """
    raise NotImplementedError


def fits(x, weight, gated: bool = False) -> bool:
    """Is this product one for the kernel?"""
    few = len(x) == 1 or 1 < len(x) <= FEW and weight.numel() <= SMALL
    return few and weight.shape[1] * (1 + gated) <= WIDEST and weight.is_contiguous()


def matvec(x, weight, bias=None, gated: bool = False) -> torch.Tensor:
    """x [N, width], weight [outputs, width] -> F.linear(x, weight, bias) [N, outputs]; gated: swiglu of that."""
    width, outputs = x.shape[1], len(weight) // (1 + gated)
    out = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
    cols = triton.next_power_of_2(width)
    rows = max(1, SHARE // (1 + gated) // cols)
    early = goes_early(len(x), x.device)
    matvec_kernel[(len(x), triton.cdiv(outputs, rows))](
        x.contiguous(), weight, weight if bias is None else bias, out, outputs,
        width, cols, rows, bias is not None, gated, early, num_warps=4, **launched(early),
    )  # fmt: skip
    return out


fill(__name__)
matvec_kernel = jit(matvec_kernel)
