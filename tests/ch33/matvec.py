"""matvec_kernel: rows times a matrix, gated or not, and weights that are loaded before x is there."""

import pytest
import torch
import torch.nn.functional as F

import engine.serve.kernels.matvec as module
from engine.serve.kernels import early
from engine.serve.kernels.matvec import matvec, matvec_kernel
from engine.serve.ops import KernelOps, PlainOps
from tests.ch32.device import CUDA, DEVICE, DTYPES
from tests.ch32.paged import UNIT, guarded, two
from tests.ch33.gates import LEAST
from tests.ch33.rounding import Span, among_nan, expect_within
from tests.grading import expect, expect_equal, grades, rng

ONE = "33: One row at a time"


def product(x, weight, bias):
    """Span of F.linear: a sum of products in any order is off by a unit for each of its steps, bias included."""
    x, weight = x.double(), weight.double()
    exact, size = x @ weight.T, x.abs() @ weight.abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    return Span(exact).off(0.0, (x.shape[1] + 2) * UNIT * size)


def times(a, b):
    ends = torch.stack([a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high])
    return Span(ends.amin(0), ends.amax(0))


def swish(gate, dtype):
    """silu of either end, as in tests/ch33/gates.py; between ends so near to each other it has no turning point."""
    ends = torch.stack([x / (1 + (-x).exp()) for x in (gate.low, gate.high)])
    units = 2 * gate.largest().clamp(max=100) + 8
    return Span(ends.amin(0), ends.amax(0)).off(units * UNIT, LEAST).to(dtype)


class Case:
    """x [N, WIDTH], weight and perhaps bias, drawn from the seed; what must come of them."""

    def __init__(self, salt, n, outputs, width, dtype=torch.float32, bias=False, gated=False):
        generator = rng.torch(f"{salt} {n} {outputs} {width}")
        self.n, self.outputs, self.width, self.dtype, self.gated = n, outputs, width, dtype, gated

        def draw(*shape):
            return torch.randn(*shape, generator=generator).to(dtype)

        self.x, self.weight = draw(n, width), draw(outputs * (1 + gated), width)
        self.bias = draw(outputs * (1 + gated)) if bias else None

    def want(self):
        whole = product(self.x, self.weight, self.bias).to(self.dtype)
        if not self.gated:
            return whole
        gate, up = (Span(*parts) for parts in zip(*(t.chunk(2, dim=1) for t in (whole.low, whole.high)), strict=True))
        exact = times(swish(gate, self.dtype), up)
        return exact.off(UNIT if self.dtype == torch.float32 else 0.0).to(self.dtype)

    def launch(self, rows, hint=None, x=None):
        out, intact = guarded((self.n, self.outputs), self.dtype)
        x = among_nan(self.x) if x is None else x
        weight = among_nan(self.weight)
        bias = weight if self.bias is None else among_nan(self.bias)
        matvec_kernel[(self.n, -(-self.outputs // rows))](
            x, weight, bias, out, self.outputs, self.width, two(self.width), rows, self.bias is not None, self.gated,
            False,
        )  # fmt: skip
        intact("matvec_kernel", ONE)
        self.check(out, f"matvec_kernel, {rows} outputs a program", hint)
        expect(torch.equal(weight.cpu(), self.weight), "matvec_kernel changed weight", see=ONE)

    def check(self, out, name, hint=None):
        kind = ", gated" * self.gated + ", with bias" * (self.bias is not None)
        what = f"{name}: [{self.n}, {self.width}] times [{len(self.weight)}, {self.width}]{kind}: [row, output] {{i}}"
        expect_within(out, self.want(), what, hint, ONE)


SHAPES = [(1, 8, 64, 4), (3, 7, 40, 4), (2, 9, 33, 1), (1, 3, 130, 8), (2, 1, 1, 2)]
PLACES = "row o of weight begins at o * WIDTH; columns from WIDTH on and outputs from `outputs` on are masked"


@grades(matvec_kernel)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "outputs", "width", "rows"), SHAPES)
def test_rows_times_a_matrix(n, outputs, width, rows, dtype):
    Case("plain", n, outputs, width, dtype).launch(rows, PLACES)


@grades(matvec_kernel)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "outputs", "width", "rows"), SHAPES)
def test_rows_times_two_matrices_gated(n, outputs, width, rows, dtype):
    hint = "row o of up is row outputs + o of weight; gate and up are rounded, then silu(gate), then the product"
    Case("gated", n, outputs, width, dtype, gated=True).launch(rows, hint)


@grades(matvec_kernel)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bias_is_part_of_the_sum(gated, dtype):
    """Many outputs, so that a bias added after the rounding shows somewhere."""
    hint = "bias[o] is added in float32, before the one rounding; up has bias[outputs + o]"
    Case("bias", 2, 200, 24, dtype, bias=True, gated=gated).launch(8, hint)


@grades(matvec_kernel)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_sums_are_float32(dtype):
    """Many sums, so that one with rounded products shows somewhere."""
    Case("many", 1, 200, 300, dtype).launch(8, "widen both before the product: .to(tl.float32)")
    Case("many", 1, 200, 300, dtype, gated=True).launch(8, "gate and up are rounded once each, before silu")


@grades(matvec_kernel)
@pytest.mark.skipif(CUDA, reason="a compiled kernel cannot be watched")
@pytest.mark.parametrize("gated", [False, True])
def test_x_is_read_only_once_inputs_are_ready(gated, monkeypatch):
    """Until the kernel has asked for it x is NaN, and afterwards the weights are."""
    case = Case("early", 1, 4, 16, bias=True, gated=gated)
    x, weight, bias = (torch.full_like(t, torch.nan) for t in (case.x, case.weight, case.bias))
    asked = []

    def ready(EARLY):  # noqa: N803  the name of the parameter
        asked.append(bool(EARLY))
        x.copy_(case.x)
        weight.fill_(torch.nan)
        bias.fill_(torch.nan)

    for flag in (True, False):
        monkeypatch.setattr(module, "inputs_ready", ready)
        asked.clear()
        x.fill_(torch.nan)
        weight.copy_(case.weight)
        bias.copy_(case.bias)
        out = torch.full((1, 4), torch.nan)
        matvec_kernel[(1, 1)](x, weight, bias, out, 4, 16, 16, 4, True, gated, flag)
        hint = "weights and bias are loaded before inputs_ready(EARLY), x after it"
        expect_equal(asked, [flag], f"calls of inputs_ready(EARLY) with EARLY {flag}", hint, ONE)
        case.check(out, "matvec_kernel whose x comes late", hint)


@grades(matvec_kernel)
@pytest.mark.parametrize("gated", [False, True])
def test_the_launch_of_matvec_takes_what_the_model_has(gated):
    """Odd sizes, a bias or none, x of any strides."""
    for n, outputs, width in ((1, 5, 1030), (3, 300, 17)):
        for bias in (False, True):
            case = Case("launch", n, outputs, width, bias=bias, gated=gated)
            x = case.x.to(DEVICE).t().contiguous().t()
            weight, bias = (None if t is None else t.to(DEVICE) for t in (case.weight, case.bias))
            case.check(matvec(x, weight, bias, gated), "matvec")


# Given: which products are the kernel's, and the plain operations that it must agree with.


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("make", [PlainOps, KernelOps])
def test_operations_are_within_the_same_bounds(make, gated):
    for n in (1, 5):
        case = Case("ops", n, 12, 48, bias=True, gated=gated)
        run = make().gated if gated else make().linear
        case.check(run(*(t.to(DEVICE) for t in (case.x, case.weight, case.bias))), f"{make.__name__}")


def test_few_rows_and_small_matrices_are_the_kernels(monkeypatch):
    """One row whatever the matrix, some rows if each can read it from the cache, and none beyond the registers."""
    calls = []
    monkeypatch.setattr(module, "matvec", lambda x, w, b=None, gated=False: calls.append(len(x)) or F.linear(x, w, b))
    monkeypatch.setattr(module, "SMALL", 100)
    small, large = torch.zeros(10, 10), torch.zeros(11, 10)
    for n in (0, 1, early.FEW, early.FEW + 1):
        for weight in (small, large):
            KernelOps().linear(torch.zeros(n, 10), weight)
    assert calls == [1, 1, early.FEW]
    KernelOps().linear(torch.zeros(1, module.WIDEST + 1), torch.zeros(1, module.WIDEST + 1))
    assert calls == [1, 1, early.FEW]


@pytest.mark.skipif(not CUDA, reason="kernels are launched early on a GPU only")
def test_early_launches_change_nothing(monkeypatch):
    """The same kernels in a row, again and again, with and without a wait between them: equal to the last bit."""
    case = Case("chain", 1, 512, 512, torch.bfloat16)
    weight = (case.weight / 16).to(DEVICE)

    def chain():
        x = case.x.to(DEVICE)
        for _ in range(200):
            x = matvec(F.rms_norm(matvec(x, weight), (512,)), weight)
        return x

    got = chain()
    monkeypatch.setattr(early, "_can_wait", lambda device: False)
    assert torch.equal(got, chain()) and got.isfinite().all() and got.abs().max() > 0
