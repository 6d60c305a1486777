"""What a correct rounding may give: an interval from float64 arithmetic, rounded where the specification rounds.

A value that is computed in float32 by any order of operations is known up to a few units; an interval says so. Rounding
its ends to the model's type gives what may come: mostly one number, two where the float64 value lies next to the middle
between them. So a missing rounding, or one too many, shows.
"""

import math

import torch

from tests.ch32.device import DEVICE
from tests.ch32.paged import EDGE, UNIT
from tests.grading import expect_close


class Span:
    """[low, high], tensors of float64."""

    def __init__(self, low, high=None):
        self.low, self.high = low.double(), (low if high is None else high).double()

    def off(self, relative=0.0, absolute=0.0):
        """Either end further out by so many parts of itself and so much."""
        low, high = (x.abs() * relative + absolute for x in (self.low, self.high))
        return Span(self.low - low, self.high + high)

    def __mul__(self, factor):
        """factor: exact numbers of either sign."""
        ends = self.low * factor, self.high * factor
        return Span(torch.minimum(*ends), torch.maximum(*ends))

    def __add__(self, other):
        return Span(self.low + other.low, self.high + other.high)

    def largest(self):
        return torch.maximum(self.low.abs(), self.high.abs())

    def to(self, dtype):
        return Span(self.low.to(dtype), self.high.to(dtype))

    def __getitem__(self, where):
        return Span(self.low[where], self.high[where])


def cat(spans, dim):
    return Span(torch.cat([s.low for s in spans], dim), torch.cat([s.high for s in spans], dim))


def normalised(x, weight, eps, dtype):
    """RMS norm as chapter 17 has it, of exact x [..., D].

    A sum of D squares, all positive, is off by D + 1 units, division and eps add 3, the root halves that; root,
    reciprocal (each 2 units where a GPU approximates them) and product add 6. Then one rounding to the type, the exact
    product of two numbers of that type, and another rounding. In float32 both are among the units of the interval.
    """
    x = x.double()
    units = (x.shape[-1] + 4) / 2 + 6
    y = Span(x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()).off(units * UNIT)
    return (y.to(dtype) * weight.double()).off(UNIT if dtype == torch.float32 else 0.0).to(dtype)


def rotated(x, cos, sin, dtype):
    """x: Span [N, H, D], cos and sin [N, D]. Two products, one sum in float32 (3 units), then one rounding."""
    half = x.low.shape[-1] // 2
    cos, sin = (t[:, None, :half].double() for t in (cos, sin))
    one, two = x[..., :half], x[..., half:]

    def turned(a, b):
        slack = 3 * UNIT * (a.largest() + b.largest())
        return (a + b).off(0.0, slack).to(dtype)

    return cat((turned(one * cos, two * -sin), turned(two * cos, one * sin)), -1)


def expect_within(got, span, what, hint, see):
    """Fail unless every element lies in its interval; the message names the nearest allowed number."""
    __tracebackhide__ = True
    value = got.detach().cpu().double().nan_to_num(nan=0.0) if got.shape == span.low.shape else span.low
    expect_close(got, torch.clamp(value, span.low, span.high), 0.0, 0.0, what, hint, see)


def among_nan(x):
    """The same numbers on the device, with NaN before and behind them."""
    flat = torch.full((x.numel() + 2 * EDGE,), math.nan, dtype=x.dtype, device=DEVICE)
    flat[EDGE:-EDGE] = x.flatten()
    return flat[EDGE:-EDGE].view(x.shape)
