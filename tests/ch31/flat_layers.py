"""FlatModel.attention: what it hands to the backend, in what order, and what it makes of the answer."""

import pytest
import torch

from engine.serve.flat import FlatModel
from tests.ch31.plain_model import heads_of, linear, model_of
from tests.ch31.ragged import UNIT, meta_of
from tests.grading import expect, expect_close, expect_equal, grades, rng

FLAT = "31: The flat model"
KINDS = {
    "qwen3": {},
    "llama": {"qk_norm": False},
    "with biases": {"attention_bias": True},
    "one kv head": {"num_key_value_heads": 1},
}


class Recorder:
    """A backend that notes its calls and answers with a given tensor."""

    def __init__(self, out):
        self.out, self.calls = out, []

    def write(self, cache, k, v, meta):
        self.calls.append(("write", cache, k.clone(), v.clone(), meta))

    def forward(self, q, cache, meta, scale=None, window=0):
        self.calls.append(("forward", cache, q.clone(), scale, meta))
        return self.out


class Call:
    """One call of `attention` on six rows of three requests, at positions that are not their row numbers."""

    def __init__(self, salt, scale=None, **changes):
        generator = rng.torch(salt)
        self.model = model_of(salt, **changes)
        cfg, self.attn = self.model.cfg, self.model.model.layers[1].self_attn
        self.attn.scale = scale or self.attn.scale
        self.x = torch.randn(6, cfg.hidden_size, generator=generator)
        self.angle = 6 * torch.rand(6, cfg.head_dim // 2, generator=generator)
        cos, sin = (torch.cat((t, t), dim=1) for t in (self.angle.cos(), self.angle.sin()))
        out = torch.randn(6, self.attn.num_heads, cfg.head_dim, generator=generator)
        self.backend, self.cache = Recorder(out), object()
        self.meta = meta_of([(9, 3), (5, 1), (2, 2)], 4, [[0, 1, 2], [3, 4], [5]])
        arguments = (self.attn, self.x, cos, sin, self.cache, self.meta, self.backend)
        self.before = [t.clone() for t in (self.x, cos, sin)]
        self.got = FlatModel(self.model).attention(*arguments)
        self.after = [self.x, cos, sin]

    def recorded(self, name):
        found = [call for call in self.backend.calls if call[0] == name]
        expect_equal(len(found), 1, what=f"calls of backend.{name} in one layer", see=FLAT)
        return found[0]

    def atol(self, exact, projection, norm):
        """A product sums hidden_size terms; the norm divides its error by the head's root mean square."""
        weight = projection.weight.double()
        raw = (self.x.double().abs() @ weight.abs().T).max() * (weight.shape[1] + 2) * UNIT
        if norm is not None:
            heads = linear(projection, self.x.double()).unflatten(1, (-1, norm.weight.shape[0]))
            raw = 2 * raw * norm.weight.double().abs().max() / heads.pow(2).mean(-1).sqrt().min()
        return (2 * raw + (exact.shape[-1] + 8) * UNIT * exact.abs().max()).item()


@grades(FlatModel.attention)
@pytest.mark.parametrize("kind", KINDS)
def test_the_backend_gets_rotated_heads(kind):
    """q and k: projected, normalised where the model has the norms, rotated by each row's own angle; v: projected."""
    call = Call(f"heads {kind}", **KINDS[kind])
    q, k, v = heads_of(call.attn, call.x.double(), call.angle.double())
    (_, _, got_k, got_v, _), (_, _, got_q, _, _) = call.recorded("write"), call.recorded("forward")
    hint = "q and k: project, split into heads, normalise, rotate; v: project and split"
    for name, got, exact in (("q", got_q, q), ("k", got_k, k), ("v", got_v, v)):
        norm = getattr(call.attn, f"{name}_norm", None)
        atol = call.atol(exact, getattr(call.attn, f"{name}_proj"), norm)
        expect_close(got, exact, atol, what=f"{name} [N, heads, D] handed to the backend, {{i}}", hint=hint, see=FLAT)


@grades(FlatModel.attention)
def test_keys_and_values_are_written_before_anybody_attends():
    """A row attends to its own key, and to rows of other requests that share its blocks in this step."""
    call = Call("order")
    names = [name for name, *_ in call.backend.calls]
    expect_equal(names, ["write", "forward"], what="call {i} of the backend", hint="write comes first", see=FLAT)


@grades(FlatModel.attention)
def test_the_backend_gets_this_layers_cache_and_the_steps_meta():
    call = Call("cache")
    for name, cache, *_, meta in call.backend.calls:
        expect(cache is call.cache, f"backend.{name} got another cache than the layer's", see=FLAT)
        expect(meta is call.meta, f"backend.{name} got another meta than the step's", see=FLAT)


@grades(FlatModel.attention)
def test_the_scale_is_the_layers():
    """Some families scale by something else than D ** -0.5; the layer says what it is."""
    for scale in (None, 0.7):
        call = Call(f"scale {scale}", scale)
        got = call.recorded("forward")[3]
        got = call.model.cfg.head_dim**-0.5 if got is None else float(got)
        what = "scale that backend.forward applies"
        expect_close(got, call.attn.scale, 1e-12, what=what, hint="scale=attn.scale", see=FLAT)


@grades(FlatModel.attention)
@pytest.mark.parametrize("kind", KINDS)
def test_the_heads_go_side_by_side_through_the_output_projection(kind):
    call = Call(f"output {kind}", **KINDS[kind])
    heads, projection = call.backend.out.double().flatten(1), call.attn.o_proj
    atol = (heads.abs() @ projection.weight.double().abs().T).max().item() * (heads.shape[1] + 2) * UNIT
    hint = "no residual, no norm: the layer's caller adds those"
    what = "result [N, hidden] {i}"
    expect_close(call.got, linear(projection, heads), atol, what=what, hint=hint, see=FLAT)


@grades(FlatModel.attention)
def test_attention_leaves_its_arguments_alone():
    call = Call("arguments")
    for name, old, new in zip(("hidden_states", "cos", "sin"), call.before, call.after, strict=True):
        message = f"FlatModel.attention changed {name} in place"
        expect(torch.equal(old, new), message, "the residual and the next layers need it", FLAT)
