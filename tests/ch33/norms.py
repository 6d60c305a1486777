"""add_norm_kernel: what it adds, what it stores, and the norm of exactly that."""

import pytest
import torch

from engine.models.layers import RMSNorm
from engine.serve.kernels.norm import add_norm, add_norm_kernel
from engine.serve.ops import PlainOps
from tests.ch32.device import DEVICE, DTYPES
from tests.ch32.paged import guarded, two
from tests.ch33.rounding import among_nan, expect_within, normalised
from tests.grading import expect, expect_close, grades, rng

RESIDUAL = "33: One pass over the residual stream"
SUM = "residual becomes the sum, rounded to the model's type, in place"
NORM = "mean over WIDTH, eps inside the root; rounded to the type before the weight and after it"


class Rows:
    """x and residual [N, WIDTH], weight [WIDTH] of one type; what must come of them."""

    def __init__(self, salt, n, width, dtype=torch.float32, eps=1e-6, loud=1.0, add=True):
        generator = rng.torch(f"{salt} {n} {width}")
        x, residual = (loud * torch.randn(n, width, generator=generator) for _ in "ab")
        if loud == 1:
            x[0] = residual[0] = 0  # a row of zeros needs eps
        weight = 2 * torch.rand(width, generator=generator) - 0.5
        self.x, self.residual, self.weight = (t.to(dtype) for t in (x, residual, weight))
        self.eps, self.add, self.dtype = eps, add, dtype

    def total(self):
        """Exact sums rounded once: float64 holds more than twice the digits of float32."""
        whole = self.residual.double() + self.x.double() * self.add
        return whole.to(torch.float32).to(self.dtype)

    def check(self, residual, normed, name):
        what = f"{name}: residual [row, column] {{i}}"
        if self.add:
            expect_close(residual, self.total(), 0.0, 0.0, what, SUM, RESIDUAL)
        else:
            expect_close(residual, self.residual, 0.0, 0.0, what, "ADD False: residual is only read", RESIDUAL)
        span = normalised(self.total(), self.weight, self.eps, self.dtype)
        expect_within(normed, span, f"{name}: normed [row, column] {{i}}", NORM, RESIDUAL)

    def launch(self):
        n, width = self.residual.shape
        residual, around_residual = guarded((n, width), self.dtype)
        residual.copy_(self.residual)
        normed, around_normed = guarded((n, width), self.dtype)
        x = among_nan(self.x if self.add else torch.full_like(self.x, torch.nan))
        before, weight = x.clone(), among_nan(self.weight)
        add_norm_kernel[(n,)](x, residual, weight, normed, self.eps, self.add, width, two(width))
        around_residual("add_norm_kernel (residual)", RESIDUAL)
        around_normed("add_norm_kernel (normed)", RESIDUAL)
        self.check(residual, normed, f"add_norm_kernel, {n} rows of {width}, {self.dtype}")
        same = torch.equal(x.nan_to_num(0.5), before.nan_to_num(0.5))
        expect(same, "add_norm_kernel changed x", "the sum goes to residual", RESIDUAL)


@grades(add_norm_kernel)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [24, 64, 80, 200, 1536])
def test_rows_are_added_and_normed(width, dtype):
    Rows("rows", 5, width, dtype).launch()


@grades(add_norm_kernel)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_x_the_residual_is_only_read(dtype):
    Rows("no x", 4, 48, dtype, add=False).launch()


@grades(add_norm_kernel)
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_eps_stands_inside_the_root(eps):
    Rows("eps", 3, 40, eps=eps).launch()


@grades(add_norm_kernel)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_squares_of_large_values_fit(dtype):
    """Values of hundreds: their squares leave float16, and bfloat16 has 8 bits for them."""
    Rows("loud", 3, 56, dtype, loud=300.0).launch()


@grades(add_norm_kernel)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_the_norm_is_that_of_what_was_stored(dtype):
    """Many rows, so that rounding before or after the norm shows somewhere."""
    Rows("stored", 24, 72, dtype).launch()


@grades(add_norm_kernel)
def test_the_launch_takes_what_the_model_has():
    """add_norm: an RMSNorm, x of any strides, no x, no rows."""
    for add in (True, False):
        rows = Rows("launch", 3, 36, eps=1e-3, add=add)
        norm = RMSNorm(36, 1e-3).requires_grad_(False).to(DEVICE)
        norm.weight.copy_(rows.weight)
        x = rows.x.to(DEVICE).t().contiguous().t() if add else None
        residual = rows.residual.clone().to(DEVICE)
        rows.check(residual, add_norm(x, residual, norm), "add_norm")
        empty = add_norm(x[:0] if add else None, residual[:0], norm)
        expect(list(empty.shape) == [0, 36], f"add_norm of no rows gives shape {list(empty.shape)}", see=RESIDUAL)


# Given: the plain operations, which the kernels must agree with.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("add", [True, False])
def test_plain_add_norm_is_within_the_same_bounds(dtype, add):
    rows = Rows("plain", 6, 80, dtype, add=add)
    norm = RMSNorm(80, rows.eps).requires_grad_(False).to(DEVICE, dtype)
    norm.weight.copy_(rows.weight)
    residual = rows.residual.clone().to(DEVICE)
    normed = PlainOps().add_norm(rows.x.to(DEVICE) if add else None, residual, norm)
    rows.check(residual, normed, "PlainOps.add_norm")
