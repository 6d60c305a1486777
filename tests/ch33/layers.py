"""FusedModel.attention and FusedModel.forward by themselves: what they call, in what order, and with what."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.serve.fused import FusedModel
from engine.serve.ops import PlainOps
from tests.ch31.flat_layers import KINDS
from tests.ch31.flat_model import atol
from tests.ch31.plain_model import angles, linear, model_of, rms_norm
from tests.ch31.ragged import UNIT, meta_of, positions_of
from tests.grading import expect, expect_close, expect_equal, grades, rng

FEWER = "33: One launch for several"


class Noted(PlainOps):
    """Operations that note their calls; rope_write answers with a given q."""

    def __init__(self, calls, q=None):
        self.calls, self.q, self.weights = calls, q, []

    def rope_write(self, qkv, *rest):
        self.calls.append(("rope_write", qkv.clone(), *rest))
        return self.q

    def linear(self, x, weight, bias=None):
        self.weights.append(weight)
        return super().linear(x, weight, bias)

    def add_norm(self, x, residual, norm):
        where = (residual.data_ptr(), None if x is None else x.data_ptr(), list(residual.shape))
        self.calls.append(("add_norm", where, norm))
        return super().add_norm(x, residual, norm)


class Backend:
    def __init__(self, calls, out):
        self.calls, self.out = calls, out

    def write(self, *_):
        self.calls.append(("write",))

    def forward(self, q, cache, meta, scale=None, window=0):
        self.calls.append(("forward", q.clone(), cache, meta, scale))
        return self.out


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        names = ("mm", "addmm", "bmm", "baddbmm", "linear", "addmv", "mv", "dot", "_addmm_activation")
        self.count += function.overloadpacket.__name__ in names
        return function(*args, **(kwargs or {}))


class Call:
    """One call of `attention` on six rows of three requests."""

    def __init__(self, salt, scale=None, **changes):
        generator = rng.torch(salt)

        def random(*shape):
            return torch.randn(*shape, generator=generator)

        model, self.calls = model_of(salt, **changes), []
        cfg, self.attn = model.cfg, model.model.layers[1].self_attn
        self.attn.scale = scale or self.attn.scale
        shape = (6, self.attn.num_heads, cfg.head_dim)
        self.q, self.out = random(*shape), random(*shape)
        self.x, cos, sin = random(6, cfg.hidden_size), random(6, cfg.head_dim), random(6, cfg.head_dim)
        self.backend = Backend(self.calls, self.out)
        self.cache, self.meta = object(), meta_of([(9, 3), (5, 1), (2, 2)], 4, [[0, 1, 2], [3, 4], [5]])
        self.fused = fused = FusedModel(model, Noted(self.calls, self.q))
        self.rest = cos, sin, self.attn, self.cache, self.meta, self.backend
        before = [t.clone() for t in (self.x, cos, sin)]
        with torch.no_grad(), Products() as products:
            self.got = fused.attention(self.attn, self.x, cos, sin, self.cache, self.meta, self.backend)
        self.products = products.count
        for name, old, new in zip(("hidden_states", "cos", "sin"), before, (self.x, cos, sin), strict=True):
            expect(torch.equal(old, new), f"FusedModel.attention changed {name} in place", see=FEWER)

    def one(self, name):
        found = [call for call in self.calls if call[0] == name]
        expect_equal(len(found), 1, f"calls of {name} in one layer", see=FEWER)
        return found[0]


def bound(x, weight):
    """Of a product that sums as many terms as x has columns."""
    return (x.abs() @ weight.abs().T).max().item() * (x.shape[1] + 2) * UNIT


@grades(FusedModel.attention)
@pytest.mark.parametrize("kind", KINDS)
def test_one_projection_goes_to_rope_write(kind):
    call = Call(f"projection {kind}", **KINDS[kind])
    _, qkv, *rest = call.one("rope_write")
    attn, x = call.attn, call.x.double()
    projections = attn.q_proj, attn.k_proj, attn.v_proj
    allowed = max(bound(x, p.weight.double()) for p in projections)
    expected = torch.cat([linear(p, x) for p in projections], dim=1)
    hint = "F.linear(hidden_states, *self.merged[attn]): weight and bias"
    what = "qkv [N, (H + 2 Hkv) * D] {i} that rope_write gets"
    expect_close(qkv, expected, 2 * allowed, what=what, hint=hint, see=FEWER)
    names = "cos", "sin", "attn", "cache", "meta", "backend"
    for name, got, expected in zip(names, rest, call.rest, strict=True):
        expect(got is expected, f"rope_write gets another {name} than attention got", see=FEWER)


@grades(FusedModel.attention)
def test_two_matrix_products_are_enough():
    hint = "q, k and v come from one merged matrix, o_proj is the other"
    expect_equal(Call("products").products, 2, "matrix products in FusedModel.attention", hint, FEWER)


@grades(FusedModel.attention)
def test_queries_attend_after_the_write():
    call = Call("order")
    hint = "rope_write stores K and V, so it comes first; nothing else writes"
    expect_equal([name for name, *_ in call.calls], ["rope_write", "forward"], "call {i}", hint, FEWER)
    _, q, cache, meta, _ = call.one("forward")
    expect_close(q, call.q, 0.0, what="q [N, H, D] {i} of backend.forward", hint="what rope_write gave", see=FEWER)
    expect(cache is call.cache and meta is call.meta, "backend.forward gets another cache or meta", see=FEWER)


@grades(FusedModel.attention)
def test_fused_attention_has_the_scale_of_the_layer():
    for scale in (None, 0.7):
        call = Call(f"scale {scale}", scale)
        got = call.one("forward")[4]
        got = call.q.shape[-1] ** -0.5 if got is None else float(got)
        expect_close(got, call.attn.scale, 1e-12, what="scale in backend.forward", hint="attn.scale", see=FEWER)


@grades(FusedModel.attention)
def test_both_products_are_operations():
    call = Call("products")
    want = [call.fused.merged[call.attn][0], call.attn.o_proj.weight]
    got = [next((i for i, known in enumerate(want) if known is weight), "another") for weight in call.fused.ops.weights]
    hint = "self.ops.linear knows a quicker way for few rows: the merged projection (0), then o_proj (1)"
    expect_equal(got, [0, 1], "weight {i} given to self.ops.linear", hint, FEWER)


@grades(FusedModel.attention)
@pytest.mark.parametrize("kind", KINDS)
def test_heads_go_through_o_proj(kind):
    call = Call(f"output {kind}", **KINDS[kind])
    heads, o_proj = call.out.double().flatten(1), call.attn.o_proj
    allowed, hint = bound(heads, o_proj.weight.double()), "no residual: add_norm adds it"
    expect_close(call.got, linear(o_proj, heads), 2 * allowed, what="result [N, hidden] {i}", hint=hint, see=FEWER)


class Probe(FusedModel):
    """A fused model with other halves of a layer: they note their input and answer with what nothing else makes."""

    def attention(self, attn, hidden_states, *rest):
        return self.answer("attention", attn, hidden_states, *rest)

    def mlp(self, mlp, hidden_states):
        return self.answer("mlp", mlp, hidden_states)

    def answer(self, name, module, hidden_states, *rest):
        self.halves.append((name, module, hidden_states.clone(), *rest))
        return self.answers[len(self.halves) - 1]


class Pass:
    """One call of `forward`: a later chunk, a decode, a prompt, and a padding row."""

    def __init__(self, salt, **changes):
        random, generator = rng(salt), rng.torch(salt)
        shapes, tables = [(9, 3), (70, 1), (4, 4)], [[0, 1, 2], [*range(3, 21)], [21]]
        self.model = model_of(salt, **changes)
        cfg, self.layers, self.calls = self.model.cfg, self.model.model.layers, []
        self.positions = positions_of(shapes, padding=1)
        self.ids = torch.tensor([random.randrange(cfg.vocab_size) for _ in self.positions])
        self.meta, self.backend = meta_of(shapes, 4, tables, padding=1), object()
        self.caches, count = [object() for _ in self.layers], 2 * len(self.layers)
        probe = Probe(self.model, Noted(self.calls))
        probe.halves = self.halves = []
        probe.answers = torch.randn(count + 9, len(self.ids), cfg.hidden_size, generator=generator)
        self.answers, table = probe.answers.double(), self.model.model.embed_tokens.weight.clone()
        with torch.no_grad():
            self.got = probe.forward(self.ids, self.positions, self.caches, self.meta, self.backend)
        names = [name for name, *_ in self.halves]
        hint = "self.attention and self.mlp, once in each layer"
        expect_equal(names, ["attention", "mlp"] * len(self.layers), "half {i} of a layer", hint, FEWER)
        same = torch.equal(table, self.model.model.embed_tokens.weight)
        expect(same, "FusedModel.forward changed the table of embeddings", "the residual is a copy of rows", FEWER)
        same = torch.equal(probe.answers.double(), self.answers)
        expect(same, "FusedModel.forward changed what a half of a layer gave", see=FEWER)

    def norms(self):
        for layer in self.layers:
            yield from (layer.input_layernorm, layer.post_attention_layernorm)
        yield self.model.model.norm


@grades(FusedModel.forward)
@pytest.mark.parametrize("kind", KINDS)
def test_each_half_gets_the_normed_sum(kind):
    run = Pass(f"halves {kind}", **KINDS[kind])
    hidden = run.model.model.embed_tokens.weight[run.ids].double()
    hint = "x, what the last half gave, is added by the add_norm before the next half"
    for i, (half, norm) in enumerate(zip(run.halves, run.norms(), strict=False)):
        exact = rms_norm(norm, hidden)
        what = f"what {half[0]} of layer {i // 2} gets, {{i}}"
        expect_close(half[2], exact, atol(exact), what=what, hint=hint, see=FEWER)
        hidden = hidden + run.answers[i]
    exact = rms_norm(run.model.model.norm, hidden)
    hint = "the last add_norm adds what the last MLP gave, under the model's final norm"
    expect_close(run.got, exact, atol(exact), what="result [N, hidden] {i}", hint=hint, see=FEWER)


@grades(FusedModel.forward)
def test_every_sum_is_part_of_a_norm():
    run = Pass("add_norm")
    expect_equal(len(run.calls), 2 * len(run.layers) + 1, "calls of add_norm", "one for each norm", FEWER)
    streams = [where[0] for _, where, _ in run.calls]
    hint = "the residual stream is one tensor that add_norm changes in place"
    expect(len(set(streams)) == 1, "add_norm gets different tensors as the residual", hint, FEWER)
    missing = [i for i, (_, where, _) in enumerate(run.calls) if where[1] is None]
    expect_equal(missing, [0], "numbers of add_norm calls without x", "only before the first layer", FEWER)
    for i, ((_, _, norm), expected) in enumerate(zip(run.calls, run.norms(), strict=True)):
        hint = "input_layernorm, post_attention_layernorm in each layer, model.norm at the end"
        expect(norm is expected, f"add_norm call {i} has another norm than the one that follows", hint, FEWER)


@grades(FusedModel.forward)
def test_each_half_has_its_own_modules_and_cache():
    run = Pass("modules")
    for i, half in enumerate(run.halves):
        layer = run.layers[i // 2]
        expect(half[1] is (layer.mlp if i % 2 else layer.self_attn), f"half {i} gets another layer's module", see=FEWER)
        if i % 2 == 0:
            _, _, _, _, _, cache, meta, backend = half
            expect(cache is run.caches[i // 2], f"layer {i // 2} got a cache other than its own", see=FEWER)
            expect(meta is run.meta and backend is run.backend, f"layer {i // 2}: another meta or backend", see=FEWER)


@grades(FusedModel.forward)
@pytest.mark.parametrize("changes", [{}, {"rope_theta": 30.0, "head_dim": 6}], ids=str)
def test_fused_angles_come_from_positions(changes):
    run = Pass("angles", **changes)
    cfg = run.model.cfg
    angle = angles(run.positions, cfg.head_dim, cfg.rope_theta).repeat(1, 2)
    allowed = (8 * run.positions.max().item() + 8) * UNIT  # the angle, and so its cosine, is off by some units
    first = run.halves[0][3:5]
    for name, got, exact in zip(("cos", "sin"), first, (angle.cos(), angle.sin()), strict=True):
        hint = "rope_cos_sin(positions, cfg.head_dim, cfg.rope_theta)"
        expect_close(got, exact, allowed, what=f"{name} [N, D] {{i}}", hint=hint, see=FEWER)
    for half in run.halves[2::2]:
        same = half[3] is first[0] and half[4] is first[1]
        expect(same, "a layer gets other tables than the first", "make cos and sin once a step", FEWER)
