"""Chapter 5, attention with explicit positions. The oracle is a Python loop over queries and keys in float64."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.attention import causal_attention
from tests.grading import expect, expect_close, expect_equal, expect_raises, grades, rng

POSITIONS = "05: Positions decide who sees whom"
HEADS = "05: Grouped heads without a copy"
NUMBERS = "05: Three places where numbers go wrong"


def plain_attention(q, k, v, q_pos, k_pos, allowed=None, scale=None):
    """One query at a time, over the keys it sees and nothing else."""
    B, H, T, D = q.shape
    S = k.shape[2]
    q_pos, k_pos = q_pos.expand(B, T).tolist(), k_pos.expand(B, S).tolist()
    allowed = torch.ones(B, H, T, S, dtype=torch.bool) if allowed is None else allowed.expand(B, H, T, S)
    scale = 1 / D**0.5 if scale is None else scale
    out = torch.zeros(B, H, T, D, dtype=torch.float64)
    for b, h, t in ((b, h, t) for b in range(B) for h in range(H) for t in range(T)):
        seen = [s for s in range(S) if k_pos[b][s] <= q_pos[b][t] and allowed[b, h, t, s]]
        if seen:
            keys, values = (x[b, h * k.shape[1] // H, seen].double() for x in (k, v))
            weights = (keys @ q[b, h, t].double() * scale).softmax(dim=0)
            out[b, h, t] = weights @ values
    return out


def tolerance(q, k, v, scale=None):
    """What float32 arithmetic and one rounding of weights and output to q's dtype can cost at most.

    A score of D products is off by (D + 2) units of 2^-24 of the sum of their magnitudes; twice that is the relative
    error of a weight; sums over S keys add S + 8 units; each relative error moves the output by at most max |v|.
    """
    D, S = k.shape[3], k.shape[2]
    scale = 1 / D**0.5 if scale is None else abs(scale)
    if S == 0:
        return 0.0
    norms = (x.double().norm(dim=-1).max().item() for x in (q, k))
    score_error = (D + 2) * 2.0**-24 * scale * next(norms) * next(norms)
    half = 0.0 if q.dtype == torch.float32 else 3 * torch.finfo(q.dtype).eps / 2
    return (4 * score_error + 2 * (S + 8) * 2.0**-24 + half) * v.abs().max().item()


def inputs(salt, B, H, Hkv, T, S, D):
    g = rng.torch(salt)
    return torch.randn(B, H, T, D, generator=g), *(torch.randn(B, Hkv, S, D, generator=g) for _ in range(2))


def positions(salt, *shape):
    """Different positions in a random order, with gaps, from 0 to about twice their number."""
    rows = [torch.randperm(2 * shape[-1] + 1, generator=rng.torch(f"{salt} {b}"))[: shape[-1]] for b in range(shape[0])]
    return torch.stack(rows) if len(shape) == 2 else rows[0]


def compare(call, q, k, v, q_pos, k_pos, allowed=None, scale=None, *, hint, see):
    got = causal_attention(q, k, v, q_pos, k_pos, allowed, scale)
    wanted = plain_attention(q, k, v, q_pos, k_pos, allowed, scale)
    expect_close(got, wanted, atol=tolerance(q, k, v, scale), what="output [B, H, T, D]", hint=hint, see=see, call=call)


def weights(q, k, q_pos, k_pos, *args):
    """The weights themselves [B, H, T, S]: with S == D and the unit vectors as values, they are the output."""
    B, Hkv, S, D = k.shape
    assert S == D
    return causal_attention(q, k, torch.eye(S).expand(B, Hkv, S, D), q_pos, k_pos, *args)


SHAPES = [(2, 6, 2, 5, 7, 8), (1, 4, 4, 3, 9, 5), (3, 16, 1, 2, 6, 24), (2, 3, 3, 1, 4, 64), (1, 10, 2, 7, 7, 3)]


@grades(causal_attention)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_last_queries_of_a_sequence(shape):
    T, S = shape[3:5]
    compare(
        f"B, H, Hkv, T, S, D = {shape}; queries are the last {T} of {S} positions",
        *inputs(f"last {shape}", *shape), torch.arange(S - T, S), torch.arange(S),
        hint="scores q·k times the scale, softmax over the keys, sum of values", see="05: One formula, two matmuls",
    )  # fmt: skip


@grades(causal_attention)
def test_a_query_sees_keys_up_to_its_own_position():
    q, k, _ = inputs("who sees", 1, 2, 1, 6, 6, 6)
    w = weights(q, k, torch.arange(6), torch.arange(6))
    for t in range(6):
        seen = [s for s in range(6) if w[0, 1, t, s] > 0]
        expect_equal(
            seen, list(range(t + 1)), what=f"entry {{i}} of the key positions that the query at position {t} sees",
            hint="k_pos <= q_pos: its own position too, no later one", see=POSITIONS,
        )  # fmt: skip


@grades(causal_attention)
def test_weights_of_a_query_sum_to_one():
    q, k, _ = inputs("sum", 2, 4, 2, 5, 9, 7)
    got = causal_attention(q, k, torch.ones_like(k), torch.arange(4, 9), torch.arange(9))
    expect_close(
        got, torch.ones(2, 4, 5, 7, dtype=torch.float64), atol=17 * 2.0**-24 * 2,
        what="output for values that are all 1", see="05: One formula, two matmuls",
        hint="hide keys before the softmax, and take it over the keys, not over the queries or heads",
    )  # fmt: skip


@grades(causal_attention)
def test_scale():
    random = rng("scale")
    for scale in (None, random.uniform(0.05, 0.1), random.uniform(1.5, 2.5), 0.0):
        compare(
            f"D = 20, scale={scale}", *inputs(f"scale {scale}", 2, 4, 2, 3, 8, 20), torch.arange(5, 8), torch.arange(8),
            None, scale, hint="one factor on the scores: `scale` if it is given, else D ** -0.5", see=POSITIONS,
        )  # fmt: skip


@grades(causal_attention)
@pytest.mark.parametrize("H, Hkv", [(6, 6), (6, 2), (6, 3), (4, 1), (32, 2)])
def test_query_head_reads_the_kv_head_of_its_group(H, Hkv):
    q, k, _ = inputs("groups", 1, H, Hkv, 2, 5, 4)
    v = torch.arange(float(Hkv)).view(1, Hkv, 1, 1).expand_as(k)  # every value of KV head j is j
    got = causal_attention(q, k, v, torch.arange(3, 5), torch.arange(5))
    expect_equal(
        [round(x) for x in got[0, :, 0, 0].tolist()], [h // (H // Hkv) for h in range(H)],
        what="KV head that query head {i} read", call=f"H = {H}, Hkv = {Hkv}",
        hint="neighbouring query heads share a KV head: h // (H // Hkv)", see=HEADS,
    )  # fmt: skip


@grades(causal_attention)
@pytest.mark.parametrize("q_shape", ["[T]", "[B, T]"])
@pytest.mark.parametrize("k_shape", ["[S]", "[B, S]"])
def test_positions_in_any_order_shared_or_per_batch(q_shape, k_shape):
    B, T, S = 3, 5, 8
    q_pos = positions("q", T) if q_shape == "[T]" else positions("q", B, T)
    k_pos = positions("k", S) if k_shape == "[S]" else positions("k", B, S)
    for H in (3, 6):  # with as many heads as sequences, a mask on the wrong axis still has a fitting shape
        compare(
            f"B = {B}, H = {H}, q_pos {q_shape}, k_pos {k_shape}, both in random order",
            *inputs(f"order {H}", B, H, 3, T, S, 6), q_pos, k_pos, see=POSITIONS,
            hint="only the positions count, not the index of a key; sequence b has row b of q_pos and k_pos",
        )  # fmt: skip


@grades(causal_attention)
def test_order_of_the_keys_does_not_matter():
    q, k, v = inputs("permuted", 2, 4, 2, 5, 9, 6)
    q_pos, k_pos, order = torch.arange(4, 9), torch.arange(9), torch.randperm(9, generator=rng.torch("order"))
    expect_close(
        causal_attention(q, k[:, :, order], v[:, :, order], q_pos, k_pos[order]),
        plain_attention(q, k, v, q_pos, k_pos), atol=tolerance(q, k, v), see=POSITIONS,
        what="output after keys, values and k_pos were shuffled together",
        hint="a key is where k_pos says it is, wherever it is stored",
    )  # fmt: skip


@grades(causal_attention)
@pytest.mark.parametrize("axes", ["BHTS", "B11S", "11TS", "1H1S", "TS", "S", "1H11"])
def test_allowed_hides_what_positions_would_show(axes):
    size = {"1": 1, "B": 2, "H": 6, "T": 4, "S": 9}
    shape = [size[a] for a in axes]
    allowed = torch.rand(shape, generator=rng.torch(f"allowed {axes}")) < 0.6
    compare(
        f"allowed of shape {shape}, B = 2, H = 6, T = 4, S = 9", *inputs("allowed", 2, 6, 2, 4, 9, 5),
        torch.arange(5, 9), torch.arange(9), allowed, see=POSITIONS,
        hint="visible means k_pos <= q_pos *and* allowed; `allowed` broadcasts like any tensor",
    )  # fmt: skip


@grades(causal_attention)
def test_a_query_that_sees_nothing_gives_zeros():
    q, k, v = inputs("blind", 2, 4, 2, 5, 6, 8)
    v = v + 3.0  # so that an average of hidden values is not small by chance
    q_pos, k_pos = torch.tensor([[2, 9, 1, 5, 3], [7, 0, 8, 2, 6]]), torch.arange(3, 9)
    hint = "hidden scores of such a row are all alike, so its softmax is no answer: set the output of the row to zero"
    compare("some positions before the first key", q, k, v, q_pos, k_pos, hint=hint, see=NUMBERS)
    allowed = torch.ones(2, 1, 5, 1, dtype=torch.bool)
    allowed[1, 0, 2] = False
    compare("allowed is all False for one query", q, k, v, q_pos + 9, k_pos, allowed, hint=hint, see=NUMBERS)
    compare("no keys at all, S = 0", q, k[:, :, :0], v[:, :, :0], q_pos, k_pos[:0], hint=hint, see=NUMBERS)


@grades(causal_attention)
def test_hidden_keys_have_no_influence():
    q, k, v = inputs("hidden", 2, 4, 2, 3, 8, 5)
    q_pos, k_pos = torch.tensor([2, 4, 3]), torch.arange(8)
    wanted, atol = plain_attention(q, k, v, q_pos, k_pos), tolerance(q, k, v)
    k[:, :, 5:] = 1e6 * q[:, ::2, :1]  # hidden from all queries, and the best match for the first one by far
    v[:, :, 5:] = 1e6
    expect_close(
        causal_attention(q, k, v, q_pos, k_pos), wanted, atol=atol, see=NUMBERS,
        what="output after all hidden keys and values were made huge",
        hint="the weight of a hidden key is exactly 0, whatever its score",
    )  # fmt: skip


@grades(causal_attention)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_softmax_in_float32_output_in_the_dtype_of_q(dtype):
    q, k, v = (x.to(dtype) for x in inputs(f"dtype {dtype}", 2, 4, 2, 5, 30, 16))
    q[..., 0] = k[..., 0] = 24.0  # adds 576 / 4 to every score: no change in the exact result, but coarse score steps
    q_pos, k_pos = torch.arange(25, 30), torch.arange(30)
    got = causal_attention(q, k, v, q_pos, k_pos)
    expect(got.dtype == dtype, f"q is {dtype}, but the output is {got.dtype}", see=NUMBERS)
    compare(
        f"{dtype}, all scores near 144", q, k, v, q_pos, k_pos, see=NUMBERS,
        hint=f"compute scores and softmax in float32, round only the result to {dtype}",
    )  # fmt: skip


@grades(causal_attention)
def test_any_strides_and_arguments_unchanged():
    g = rng.torch("strides")
    q = torch.randn(2, 5, 6, 8, generator=g).transpose(1, 2)  # as a projection gives it: [B, T, H, D]
    k = torch.randn(2, 3, 40, 8, generator=g)[:, :, 4:13]  # the used part of a longer cache
    v = torch.randn(2, 8, 3, 9, generator=g).permute(0, 2, 3, 1)
    q_pos, k_pos, allowed = torch.arange(4, 9), torch.arange(9), torch.ones(9, 1, dtype=torch.bool).expand(9, 5).T
    arguments = {"q": q, "k": k, "v": v, "q_pos": q_pos, "k_pos": k_pos, "allowed": allowed}
    before = {name: x.clone() for name, x in arguments.items()}
    causal_attention(**arguments)
    for name, x in arguments.items():
        expect(
            torch.equal(x, before[name]), f"causal_attention changed its argument {name}", see=NUMBERS,
            hint="for a float32 tensor .float() is the tensor itself: an in-place operation reaches the caller",
        )  # fmt: skip
    compare("q, k, v not contiguous", **before, hint="strides must not matter", see=NUMBERS)
    compare("q, k, v not contiguous", **arguments, hint="strides must not matter: prefer reshape to view", see=NUMBERS)


class NewMemory:
    """Remembers the most elements that any operation inside wrote into new memory."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out


class LargestTensor(NewMemory, TorchDispatchMode):
    """In two classes: torch would import its compiler, which takes seconds, for a method defined in this one."""


@grades(causal_attention)
def test_keys_and_values_are_not_copied_per_query_head():
    B, H, Hkv, T, S, D = 2, 16, 2, 1, 48, 32
    q, k, v = inputs("copies", B, H, Hkv, T, S, D)
    with LargestTensor() as largest:
        causal_attention(q, k, v, torch.tensor([S - 1]), torch.arange(S))
    expect(
        largest.elements < B * H * S * D,
        f"one operation made a tensor of {largest.elements:,} elements; K has {B * Hkv * S * D:,}, and "
        f"{B * H * S * D:,} are one copy per query head",
        hint="make the heads of a group more rows of the same matmul instead of repeating K and V", see=HEADS,
    )  # fmt: skip


@grades(causal_attention)
def test_random_cases():
    random = rng("cases")
    for case in range(40):
        Hkv, group = random.randint(1, 3), random.choice([1, 2, 3, 5])
        B, T, S, D = (random.randint(1, n) for n in (3, 6, 9, 12))
        allowed = None
        if case % 2:
            shape = [n if random.random() < 0.6 else 1 for n in (B, Hkv * group, T, S)]
            allowed = torch.rand(shape, generator=rng.torch(f"allowed {case}")) < 0.7
        compare(
            f"case {case}: B, H, Hkv, T, S, D = {(B, Hkv * group, Hkv, T, S, D)}",
            *inputs(f"case {case}", B, Hkv * group, Hkv, T, S, D), positions(f"q {case}", B, T),
            positions(f"k {case}", S), allowed, random.choice([None, random.uniform(0.1, 1)]),
            hint="if only this test fails, note which sizes are equal or 1 in the case", see=POSITIONS,
        )  # fmt: skip


def refusal(change):
    """A call that is right but for one argument."""
    q, k, v = inputs("refused", 2, 6, 2, 5, 7, 8)
    call = {"q": q, "k": k, "v": v, "q_pos": torch.arange(2, 7), "k_pos": torch.arange(7)}
    return {**call, **change(call)}


REFUSALS = {
    "H not a multiple of Hkv": (lambda c: {"k": c["k"].repeat(1, 2, 1, 1), "v": c["v"].repeat(1, 2, 1, 1)}, "4"),
    "more KV heads than heads": (lambda c: {"k": c["k"].repeat(1, 6, 1, 1), "v": c["v"].repeat(1, 6, 1, 1)}, "12"),
    "q with three axes": (lambda c: {"q": c["q"][0]}, "6, 5, 8"),
    "k and v of three axes": (lambda c: {"k": c["k"][0], "v": c["v"][0]}, "2, 7, 8"),
    "v shorter than k": (lambda c: {"v": c["v"][:, :, :6]}, "2, 2, 6, 8"),
    "v with other heads": (lambda c: {"v": c["v"][:, :1]}, "2, 1, 7, 8"),
    "other head width": (lambda c: {"q": c["q"][..., :4]}, "2, 6, 5, 4"),
    "other batch": (lambda c: {"q": c["q"][:1]}, "1, 6, 5, 8"),
    "q_pos too long": (lambda c: {"q_pos": torch.arange(6)}, "6"),
    "q_pos of a single number": (lambda c: {"q_pos": torch.tensor([3])}, "1"),
    "q_pos with another batch": (lambda c: {"q_pos": torch.zeros(3, 5, dtype=torch.int64)}, "3, 5"),
    "k_pos too short": (lambda c: {"k_pos": torch.arange(6)}, "6"),
    "k_pos transposed": (lambda c: {"k_pos": torch.zeros(7, 2, dtype=torch.int64)}, "7, 2"),
    "allowed not broadcastable": (lambda c: {"allowed": torch.ones(2, 7, dtype=torch.bool)}, "2, 7"),
    "allowed with five axes": (lambda c: {"allowed": torch.ones(1, 2, 6, 5, 7, dtype=torch.bool)}, "1, 2, 6, 5, 7"),
    "allowed as numbers to add": (lambda c: {"allowed": torch.zeros(5, 7)}, "float32"),
}  # fmt: skip


@grades(causal_attention)
@pytest.mark.parametrize("fault", REFUSALS)
def test_refusals(fault):
    change, names = REFUSALS[fault]
    expect_raises(
        ValueError, causal_attention, **refusal(change), match=names, see=POSITIONS,
        hint=f"{fault}: say so with the value before computing anything",
    )  # fmt: skip
