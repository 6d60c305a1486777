"""Residual sum and RMS norm in one pass: one program a row."""

import torch
import triton
import triton.language as tl

from engine.exercises import exercise, fill
from engine.serve.kernels import jit
from engine.serve.kernels.early import goes_early, inputs_ready, launched


@exercise(33, "One pass over the residual stream")
def add_norm_kernel(x, residual, weight, normed, eps, ADD: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr):
    """Program n: residual += x, normed = RMSNorm(residual), for row n.  (Your engine: Chapter 33)

    x, residual, normed: [N, WIDTH] without gaps, of the model's type.  weight: [WIDTH].  eps: of the norm.
    The sum is rounded to the model's type and stored in residual, row by row in place; the norm is computed from what
    was stored, as chapter 17's RMSNorm does it: y = s / sqrt(mean(s * s) + eps) in float32, rounded to the model's
    type, then times weight, and rounded again. Nothing else is read or stored.
    ADD False: there is no x yet (it is not read), and residual is only read.
    COLS >= WIDTH is a power of two.  Grid: (N,).
    """
    raise NotImplementedError


def add_norm(x, residual, norm) -> torch.Tensor:
    """residual [N, width] += x, in place, unless x is None -> norm(residual), for an RMSNorm `norm`."""
    normed = torch.empty_like(residual)
    width = residual.shape[1]
    if len(residual):
        early = goes_early(len(residual), residual.device)
        kernel = early_add_norm if early else add_norm_kernel
        kernel[(len(residual),)](
            residual if x is None else x.contiguous(), residual, norm.weight, normed, norm.eps, x is not None, width,
            triton.next_power_of_2(width), num_warps=4 if width <= 2048 else 8, **launched(early),
        )  # fmt: skip
    return normed


@triton.jit
def early_add_norm(x, residual, weight, normed, eps, ADD: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr):
    inputs_ready(True)
    add_norm_kernel(x, residual, weight, normed, eps, ADD, WIDTH, COLS)


fill(__name__)
add_norm_kernel = jit(add_norm_kernel)
