"""silu(gate) * up over the merged projection: one program a stretch of a row."""

import torch
import triton
import triton.language as tl

from engine.exercises import exercise, fill
from engine.serve.kernels import jit

STRETCH = 1024


@exercise(33, "One matrix for several")
def swiglu_kernel(gate_up, out, WIDTH: tl.constexpr, COLS: tl.constexpr):
    """Program (n, j): columns j * COLS and on of row n of silu(gate) * up.  (Your engine: Chapter 33)

    gate_up: [N, 2 * WIDTH] without gaps: the gate, then up.  out: [N, WIDTH], of the same type.
    silu(a) = a / (1 + exp(-a)) in float32, rounded to the type of the tensors, then times up, rounded again.
    COLS is a power of two; the last program of a row may reach beyond it.  Grid: (N, WIDTH / COLS rounded up).
    """
    raise NotImplementedError


def swiglu(gate_up) -> torch.Tensor:
    """gate_up [N, 2 * width] -> [N, width]."""
    width = gate_up.shape[1] // 2
    out = torch.empty(len(gate_up), width, dtype=gate_up.dtype, device=gate_up.device)
    if len(gate_up):
        swiglu_kernel[(len(gate_up), triton.cdiv(width, STRETCH))](gate_up, out, width, STRETCH)
    return out


fill(__name__)
swiglu_kernel = jit(swiglu_kernel)
