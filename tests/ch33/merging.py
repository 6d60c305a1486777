"""merge_linears: one matrix, whose rows the layers share; and what that means for a state dict and for memory."""

import pytest
import torch
from torch import nn

from engine.models.layers import Linear
from engine.serve.flat import FlatModel
from engine.serve.fused import FusedModel, merge_linears, split_linears
from tests.ch31.plain_model import model_of
from tests.grading import expect, expect_close, expect_equal, expect_raises, grades, rng

MERGED = "33: One matrix for several"
SIZES = [[5], [6, 3], [12, 4, 4], [1, 7, 2]]


def layers_of(salt, sizes, bias=True, dtype=torch.float32, inputs=9):
    """Layers in memory of their own, and copies that nobody touches."""
    generator, made = rng.torch(f"{salt} {sizes}"), []
    for size in sizes:
        linear = Linear(inputs, size, bias=bias)
        for parameter in linear.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
        made.append(linear)
    return made, [[p.detach().clone() for p in linear.parameters()] for linear in made]


def names(bias):
    return ("weight", "bias") if bias else ("weight",)


@grades(merge_linears)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_layers_lie_one_below_the_other(sizes, bias, dtype):
    linears, before = layers_of("order", sizes, bias, dtype)
    whole = merge_linears(linears)
    expect(len(whole) == 2, "merge_linears returns (weight, bias)", see=MERGED)
    if not bias:
        expect(whole[1] is None, "layers without bias: the second of the pair is None", see=MERGED)
    for i, name in enumerate(names(bias)):
        expect(whole[i] is not None, f"merge_linears gives no {name} for layers that have one", see=MERGED)
        expect_equal(str(whole[i].dtype), str(dtype), f"dtype of the merged {name}", see=MERGED)
        expected = torch.cat([parameters[i] for parameters in before])
        what = f"merged {name} of {len(sizes)} layers with {sizes} outputs, {{i}}"
        expect_close(whole[i], expected, 0.0, 0.0, what, "one below the other, in order", MERGED)


@grades(merge_linears)
@pytest.mark.parametrize("sizes", SIZES[1:], ids=str)
def test_every_layer_is_a_view_of_the_whole(sizes):
    linears, before = layers_of("views", sizes)
    wholes, hint = merge_linears(linears), "w[a:b] shares the memory of w, torch.cat and clone do not"
    for name, whole in zip(names(True), wholes, strict=True):
        row = 0
        for i, linear in enumerate(linears):
            part = getattr(linear, name)
            expect(isinstance(part, nn.Parameter), f"{name} of layer {i} is no nn.Parameter any more", hint, MERGED)
            expect(not part.requires_grad, f"{name} of layer {i} has requires_grad", see=MERGED)
            expect_close(part, before[i][name == "bias"], 0.0, 0.0, f"{name} of layer {i}, {{i}}", hint, MERGED)
            same = part.data_ptr() == whole[row:].data_ptr()
            expect(same, f"{name} of layer {i} does not lie in row {row} of the merged one", hint, MERGED)
            row += len(part)
        size = whole.untyped_storage().nbytes()
        expect_equal(size, whole.nbytes, f"bytes behind the merged {name}", "nothing is stored twice", MERGED)


@grades(merge_linears)
def test_a_state_dict_loads_through_the_parts():
    linears, before = layers_of("state", [6, 3])
    wholes = merge_linears(linears)
    for linear, (weight, bias) in zip(linears, before, strict=True):
        linear.load_state_dict({"weight": 2 * weight, "bias": bias + 1})
    for i, (whole, change) in enumerate(zip(wholes, (lambda x: 2 * x, lambda x: x + 1), strict=True)):
        expected = change(torch.cat([parameters[i] for parameters in before]))
        what = f"merged {names(True)[i]} after load_state_dict of the layers, {{i}}"
        expect_close(whole, expected, 0.0, 0.0, what, "their parameters are views, so loading fills the whole", MERGED)


@grades(merge_linears)
@pytest.mark.parametrize("fault", ["some biases", "inputs"])
def test_layers_that_do_not_fit_are_refused_untouched(fault):
    linears, before = layers_of("first", [6, 3], inputs=9)
    other, other_before = layers_of("second", [4], fault != "some biases", inputs=9 if fault == "some biases" else 8)
    linears, before = [*linears, *other], [*before, *other_before]
    pointers = [p.data_ptr() for linear in linears for p in linear.parameters()]
    call = f"merge_linears of layers whose {fault if fault == 'inputs' else 'biases'} differ"
    expect_raises(ValueError, merge_linears, linears, call=call, see=MERGED)
    hint = "look first, merge then"
    now = [p.data_ptr() for linear in linears for p in linear.parameters()]
    expect(pointers == now, f"{call}: refused, but some layers have other memory now", hint, MERGED)
    for linear, parameters in zip(linears, before, strict=True):
        for new, old in zip(linear.parameters(), parameters, strict=True):
            expect_close(new, old, 0.0, what=f"{call}: a parameter {{i}}", hint=hint, see=MERGED)


KINDS = {
    "qwen3": {},
    "llama with biases": {"qk_norm": False, "attention_bias": True},
    "tied": {"tie_word_embeddings": True},
}


def stored(model):
    """Bytes behind the parameters, each piece of memory counted once."""
    pieces = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(pieces.values())


@grades(merge_linears)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_model_keeps_its_state_dict_and_its_size(kind):
    model = model_of(f"state {kind}", **KINDS[kind])
    before, size = {name: x.clone() for name, x in model.state_dict().items()}, stored(model)
    fused = FlatModel(model).fuse()
    expect_equal([*model.state_dict()], [*before], "name {i} in the state dict of a fused model", see=MERGED)
    for name, x in model.state_dict().items():
        expect_close(x, before[name], 0.0, what=f"{name} of a fused model, {{i}}", see=MERGED)
    expect_equal(stored(model), size, "bytes of all parameters of a fused model", "nothing is stored twice", MERGED)
    other = model_of(f"other {kind}", **KINDS[kind])
    model.load_state_dict(other.state_dict())
    for layer, mine in zip(other.model.layers, model.model.layers, strict=True):
        attn = layer.self_attn
        expected = torch.cat([p.weight for p in (attn.q_proj, attn.k_proj, attn.v_proj)])
        got = fused.merged[mine.self_attn][0]
        expect_close(got, expected, 0.0, what="merged q, k, v weights after load_state_dict, {i}", see=MERGED)
    plain = fused.unfuse()
    expect(type(plain) is FlatModel and plain.model is model, "unfuse() gives the FlatModel of the same model")
    pointers = [p.untyped_storage().data_ptr() for n, p in model.named_parameters()]
    expect_equal(len(set(pointers)), len(pointers), "pieces of memory behind the parameters after unfuse()")
    for name, x in model.state_dict().items():
        expect_close(x, other.state_dict()[name], 0.0, what=f"{name} after unfuse(), {{i}}", see=MERGED)


# Given: what surrounds the exercises.


class Router(nn.Module):
    """A feed-forward part of another kind."""

    def __init__(self, width):
        super().__init__()
        self.gate, self.experts = nn.Linear(width, 2), nn.ModuleList(nn.Linear(width, width) for _ in "ab")

    def forward(self, x):
        first = self.gate(x).softmax(-1)[:, :1]
        return first * self.experts[0](x) + (1 - first) * self.experts[1](x)


def test_another_kind_of_mlp_runs_as_it_is():
    model = model_of("router")
    model.model.layers[1].mlp = router = Router(36).requires_grad_(False)
    fused = FusedModel(model)
    expect(router not in fused.merged and model.model.layers[0].mlp in fused.merged, "what FusedModel merges")
    x = torch.randn(4, 36, generator=rng.torch("router"))
    expect_close(fused.mlp(router, x), router(x), 0.0, what="FusedModel.mlp of a mixture {i}")


def test_fused_twice_is_fused_and_split_layers_are_apart():
    model = model_of("twice", attention_bias=True)
    fused = FlatModel(model).fuse()
    expect(fused.fuse() is fused, "fuse() of a fused model is itself")
    again = FlatModel(model).fuse()
    for module, pair in fused.merged.items():
        for mine, other in zip(pair, again.merged[module], strict=True):
            same = mine is other or mine.data_ptr() == other.data_ptr() and mine.shape == other.shape
            expect(same, "a second FusedModel of the same model has other weights than the first")
    linears, before = layers_of("split", [6, 3])
    merge_linears(linears)
    split_linears(linears)
    with torch.no_grad():
        linears[0].weight.fill_(0)
    expect_close(linears[1].weight, before[1][0], 0.0, what="weight of another layer {i} after split_linears")
