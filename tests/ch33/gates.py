"""swiglu_kernel: silu(gate) * up of every column, and nothing beyond a row."""

import pytest
import torch

from engine.serve.kernels.swiglu import swiglu, swiglu_kernel
from engine.serve.ops import PlainOps
from tests.ch32.device import DEVICE, DTYPES
from tests.ch32.paged import UNIT, guarded
from tests.ch33.rounding import Span, among_nan, expect_within
from tests.grading import expect, expect_equal, grades, rng

MERGED = "33: One matrix for several"
LEAST = 1e-36  # where exp(-a) leaves float32 silu is 0, and it was less than this


def gated(gate_up):
    """Span of silu(gate) * up. exp is off by 2 |a| + 4 units (its argument rounds as well), sum and quotient by 4."""
    gate, up = gate_up.double().chunk(2, dim=1)
    units = 2 * gate.abs().clamp(max=100) + 8
    silu = Span(gate / (1 + (-gate).exp())).off(units * UNIT, LEAST).to(gate_up.dtype)
    return (silu * up).off(UNIT if gate_up.dtype == torch.float32 else 0.0).to(gate_up.dtype)


def fresh(salt, n, width, dtype, loud=3.0):
    return (loud * torch.randn(n, 2 * width, generator=rng.torch(f"{salt} {n} {width}"))).to(dtype)


def check(gate_up, cols, hint):
    n, width = len(gate_up), gate_up.shape[1] // 2
    out, intact = guarded((n, width), gate_up.dtype)
    source = among_nan(gate_up)
    swiglu_kernel[(n, -(-width // cols))](source, out, width, cols)
    intact("swiglu_kernel", MERGED)
    what = f"swiglu_kernel, {n} rows of {width} in stretches of {cols}: [row, column] {{i}}"
    expect_within(out, gated(gate_up), what, hint, MERGED)
    expect(torch.equal(source.cpu(), gate_up), "swiglu_kernel changed gate_up", see=MERGED)


@grades(swiglu_kernel)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "cols"), [(64, 64), (64, 16), (100, 32), (24, 64), (1, 4), (257, 256)])
def test_stretches_of_a_row(width, cols, dtype):
    hint = "gate is the first half of a row, up the second; row n of gate_up begins at n * 2 * WIDTH"
    check(fresh("stretches", 4, width, dtype), cols, hint)


@grades(swiglu_kernel)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_of_any_size(dtype):
    """Zero, tens and thousands of either sign: exp overflows, the quotient does not."""
    gate_up = fresh("sizes", 2, 12, dtype)
    sizes = [0.0, -0.0, 20.0, -20.0, 80.0, -80.0, 95.0, -95.0, 3000.0, -3000.0, 0.01, -0.01]
    gate_up[:, :12] = torch.tensor(sizes).to(dtype)
    check(gate_up, 16, "a / (1 + exp(-a)): for a large negative a the divisor is inf and the quotient 0")


@grades(swiglu_kernel)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_silu_is_rounded_before_it_meets_up(dtype):
    """Many values, so that a missing rounding shows somewhere."""
    check(fresh("rounding", 6, 128, dtype), 128, "in float32, rounded to the type; then times up, rounded again")


@grades(swiglu_kernel)
def test_the_launch_takes_any_width():
    for width in (1030, 7):
        gate_up = fresh("launch", 2, width, torch.float32)
        expect_within(swiglu(gate_up.to(DEVICE)), gated(gate_up), "swiglu: [row, column] {i}", None, MERGED)
    expect_equal(list(swiglu(gate_up[:0].to(DEVICE)).shape), [0, 7], "shape of swiglu of no rows", see=MERGED)


# Given: the plain operations, which the kernels must agree with.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_swiglu_is_within_the_same_bounds(dtype):
    gate_up = fresh("plain", 4, 96, dtype)
    expect_within(PlainOps().swiglu(gate_up.to(DEVICE)), gated(gate_up), "PlainOps.swiglu: {i}", None, MERGED)
