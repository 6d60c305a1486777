"""matvec_kernel: rows times a matrix, gated or not, and weights that are loaded before x is there."""

import math

import pytest
import torch
import torch.nn.functional as F

import engine.serve.kernels.matvec as module
from engine.models.layers import RMSNorm
from engine.serve.kernels import early
from engine.serve.kernels.matvec import matvec, matvec_kernel
from engine.serve.kernels.norm import add_norm
from engine.serve.ops import KernelOps, PlainOps
from tests.ch32.device import CUDA, DEVICE, DTYPES
from tests.ch32.paged import UNIT, guarded, two
from tests.ch33.gates import LEAST
from tests.ch33.loads import Loads, Program, far_program
from tests.ch33.rounding import Span, among_nan, expect_within
from tests.grading import expect, expect_close, expect_equal, grades, rng

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

    def launch(self, rows, hint=None, *given):
        """given: x, weight and perhaps bias on the device; else they lie among NaN."""
        out, intact = guarded((self.n, self.outputs), self.dtype)
        given = given or [among_nan(t) for t in (self.x, self.weight, self.bias) if t is not None]
        x, weight, bias = given if self.bias is not None else (*given, given[1])
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


class Late:
    """A launch of two programs that sees each `inputs_ready`: what has happened before it, and what after."""

    def __init__(self, monkeypatch, gated, early):
        self.case = Case("late", 1, 8, 16, bias=True, gated=gated)
        self.x, self.weight, self.bias = (t.clone() for t in (self.case.x, self.case.weight, self.case.bias))
        self.out = torch.full((1, 8), torch.nan)
        self.asked, self.stored, self.early, self.ready = [], [], early, lambda: None
        monkeypatch.setattr(module, "inputs_ready", self.inputs_ready)

    def inputs_ready(self, flag):
        self.stored.append(not self.out[0, 4 * len(self.asked) :][:4].isnan().all())
        self.ready()
        self.asked.append(bool(flag))

    def run(self, what, hint):
        args = self.x, self.weight, self.bias, self.out, 8, 16, 16, 4, True, self.case.gated, self.early
        matvec_kernel[(1, 2)](*args)
        if self.early or self.asked:
            expect_equal(self.asked, [self.early] * 2, f"EARLY {self.early}: calls of inputs_ready", COUNT, ONE)
        expect(not any(self.stored), "out was stored before inputs_ready", "an earlier kernel may still read it", ONE)
        self.case.check(self.out, what, hint)


COUNT = "every program calls inputs_ready(EARLY), once"
late = pytest.mark.skipif(CUDA, reason="a compiled kernel cannot be watched")


@grades(matvec_kernel)
@late
@pytest.mark.parametrize("gated", [False, True])
def test_x_is_loaded_once_inputs_are_ready(gated, monkeypatch):
    run = Late(monkeypatch, gated, True)
    run.x.fill_(torch.nan)
    run.ready = lambda: run.x.copy_(run.case.x)
    run.run("matvec_kernel whose x is NaN until inputs_ready", "x is loaded after inputs_ready(EARLY)")


@grades(matvec_kernel)
@late
@pytest.mark.parametrize("gated", [False, True])
def test_weights_are_loaded_before_inputs_are_ready(gated, monkeypatch):
    run = Late(monkeypatch, gated, True)

    def spoil():
        rows = [4 * len(run.asked) + i + 8 * half for half in range(1 + gated) for i in range(4)]
        run.weight[rows], run.bias[rows] = torch.nan, torch.nan

    run.ready = spoil
    hint = "weights and biases, up's as well, are loaded before inputs_ready(EARLY): that is what it is for"
    run.run("matvec_kernel whose weights and biases are NaN after inputs_ready", hint)


@grades(matvec_kernel)
@late
def test_without_early_nobody_waits(monkeypatch):
    run = Late(monkeypatch, True, False)
    run.run("matvec_kernel with EARLY False", None)


SHAPES = [(1, 8, 64, 4), (3, 7, 40, 4), (2, 9, 33, 1), (1, 3, 130, 8), (2, 1, 1, 2)]
PLACES = (
    "row o of weight begins at o * WIDTH, row n of x at n * WIDTH, row n of out at n * outputs; columns from WIDTH on "
    "and outputs from `outputs` on are masked; if it is a little off: x and weight are widened before the product"
)


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
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_sums_of_any_size(dtype):
    """Tens and thousands of either sign: exp overflows, the quotient does not."""
    case = Case("sizes", 1, 12, 8, dtype, gated=True)
    case.weight[:12] = 0
    case.x[0, 0] = 1
    case.weight[:12, 0] = torch.tensor([0.0, 20.0, -20.0, 80.0, -80.0, 95.0, -95.0, 3e3, -3e3, 2e4, -2e4, 0.5])
    case.launch(4, "a / (1 + exp(-a)): for a large negative a the divisor is inf and the quotient 0")


@grades(matvec_kernel)
@late
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_nothing_outside_is_loaded(gated, bias):
    case = Case("outside", 2, 7, 40, gated=gated, bias=bias)
    tensors = [case.x, case.weight] + ([case.bias] if bias else [])
    with Loads(tensors) as loads:
        case.launch(4, None, *tensors)
    hint = "outputs from `outputs` on and columns from WIDTH on are masked, in every load; BIAS False: bias is not read"
    expect(not loads.outside, f"matvec_kernel loads {loads.outside} numbers outside of its tensors", hint, ONE)


@grades(matvec_kernel)
@late
@pytest.mark.parametrize("gated", [False, True])
def test_offsets_have_64_bits(gated, monkeypatch):
    """A weight beyond 2^31 others, of which only the first row has memory."""
    width, outputs = 1 << 15, (1 << 16) + 8
    x, weight, out = (torch.zeros(1, n, dtype=torch.float16) for n in (width, width, outputs))
    x[0, 0], weight[0, 0] = 3.0, 1.0
    if gated:  # output 0, whose up is far away
        place, at, want = outputs * width, 0, 18 / (1 + math.exp(-3))
    else:  # output 2^16, by a program of that number
        place, at, want = width << 16, 1 << 16, 6.0
        monkeypatch.setattr(Program, "create_get_program_id", far_program(Program.create_get_program_id, at))
    with Loads([x, weight], (weight, place, 2.0)):
        matvec_kernel[(1, 1)](x, weight, weight, out, outputs, width, width, 1, False, gated, False)
    what, hint = f"output {at} of a large matrix", "o and outputs to 64 bits before they are multiplied with WIDTH"
    expect_close(out[0, at], torch.tensor(want).double(), 0.02, what=what, hint=hint, see=ONE)


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
    """A recorded chain of kernels, replayed again and again, with and without pauses: equal to the last bit."""
    case = Case("chain", 1, 512, 512, torch.bfloat16)
    weight, norm = (case.weight / 16).to(DEVICE), RMSNorm(512, 1e-6).requires_grad_(False).to(DEVICE, torch.bfloat16)

    start = case.x.to(DEVICE)

    def chain():
        x, residual = start, torch.zeros_like(start)
        for _ in range(100):
            x = matvec(add_norm(x, residual, norm), weight)
        return x

    def replayed():
        chain()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain()
        results = []
        for _ in range(20):
            graph.replay()
            results.append(out.clone())
        return torch.cat(results)

    got = replayed()
    monkeypatch.setattr(early, "_can_wait", lambda device: False)
    assert torch.equal(got, replayed()) and got.isfinite().all() and got.abs().max() > 0
