"""Chapter 17: every module of Qwen3 against float64, the whole model against transformers.

Tolerances: a float32 operation is off by at most u = 2^-24 of its result. A value at the end of n operations is off by
about sqrt(n) u of the numbers that went in, if the errors are as good as random (Higham and Mary, 2019); four times
that is allowed, see `rounding`. The longest chain counts: a dot product of length K is K operations.
"""

import math

import pytest
import torch
from torch import nn

from engine.kv_cache import KVCache
from engine.models.qwen3 import (
    Qwen3,
    Qwen3Attention,
    Qwen3Config,
    Qwen3DecoderLayer,
    Qwen3MLP,
    RMSNorm,
    apply_rope,
    rope_cos_sin,
)
from engine.models.qwen3 import test_model as build_model
from tests.grading import expect, expect_close, expect_equal, expect_raises, grades, rng

NORM, ROPE, ATTENTION, MLP, BLOCK = (
    f"17: {title}"
    for title in ("RMSNorm", "Rotary positions", "Grouped attention with q/k norm", "The gated MLP", "The block")
)
U = 2.0**-24  # float32
UB = 2.0**-8  # bfloat16


def rounding(chain, magnitude):
    """What `chain` float32 operations on numbers of that magnitude may be off."""
    return 4 * math.sqrt(chain) * U * float(magnitude)


def draw(salt, *shape, scale=1.0):
    return scale * torch.randn(*shape, generator=rng.torch(salt))


def randomised(module, salt):
    """Every weight random: norms around 1, matrices so that they keep the variance, biases not zero."""
    generator = rng.torch(salt)
    for name, p in module.requires_grad_(False).named_parameters():
        if name.endswith("norm.weight") or p.ndim == 1 and "bias" not in name:
            p.uniform_(0.4, 1.6, generator=generator)
        else:
            p.normal_(0, 1.2 * p.shape[-1] ** -0.5, generator=generator)
    return module


def rms64(x, weight, eps):
    x = x.double()
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


def rotate64(x, positions, theta):
    """x [..., D], positions broadcastable to [...]: the pairs (i, i + D/2) as complex numbers, turned."""
    half = x.shape[-1] // 2
    turn = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = positions[..., None].double() * turn
    z = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((z.real, z.imag), dim=-1)


# RMSNorm


@grades(RMSNorm.forward)
@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 64), (2, 3, 4, 16)])
@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_rms_norm(shape, eps):
    norm = randomised(RMSNorm(shape[-1], eps), f"norm {shape}")
    x = draw(f"x {shape}", *shape, scale=0.5) + 0.25
    given = x.clone()
    got, expected = norm(x), rms64(x, norm.weight, eps)
    hint = "mean of the squares, plus eps, all of it under the root; the mean of x itself is not subtracted"
    atol = rounding(shape[-1] + 4, expected.abs().max())
    expect_close(
        got, expected, atol, what="normed value", call=f"RMSNorm(eps={eps})({list(shape)})", hint=hint, see=NORM
    )
    expect(torch.equal(x, given), "RMSNorm changed its input in place", see=NORM)


@grades(RMSNorm.forward)
def test_rms_norm_of_zeros_is_finite():
    norm = randomised(RMSNorm(12, 1e-5), "zeros")
    expect_close(norm(torch.zeros(2, 12)), torch.zeros(2, 12), atol=0, what="normed zero", see=NORM)


@grades(RMSNorm.forward)
def test_rms_norm_is_float32_inside():
    norm = randomised(RMSNorm(48, 1e-6), "half").half()
    x = (draw("half", 4, 48, scale=900.0)).half()  # squares of 256 and more are beyond float16
    got = norm(x)
    expect(got.dtype == torch.float16, f"RMSNorm of float16 returned {got.dtype}", see=NORM)
    expected = rms64(x, norm.weight, 1e-6)
    hint = "the squares of float16 numbers overflow; square and mean in float32"
    # Two roundings to float16: of the normed vector, of the product.
    expect_close(got, expected, atol=1e-6, rtol=2.1 * 2**-11, what="float16 normed value", hint=hint, see=NORM)


@grades(RMSNorm.forward)
def test_rms_norm_rounds_before_the_weight():
    norm = randomised(RMSNorm(96, 1e-6), "order").bfloat16()
    x = draw("order", 64, 96).bfloat16()
    got = norm(x)
    expect(got.dtype == torch.bfloat16, f"RMSNorm of bfloat16 returned {got.dtype}", see=NORM)
    y = rms64(x, torch.ones(96), 1e-6)
    # The float32 result is near y; where both ends of that interval round to the same bfloat16, there is one answer.
    slack = 1 + rounding(100, 1)
    low, high = (((y * s).float().bfloat16()) for s in (1 / slack, slack))
    sure = low == high
    expected = low * norm.weight
    hint = "y is rounded to x's dtype first and then multiplied by the weight, in that dtype"
    expect_close(got[sure], expected[sure], atol=0, what="bfloat16 normed value", hint=hint, see=NORM)


# Rotary positions


@grades(rope_cos_sin)
@pytest.mark.parametrize("head_dim, theta", [(8, 10_000.0), (32, 1_000_000.0), (6, 50.0)])
def test_rope_tables(head_dim, theta):
    positions = torch.randint(0, 3000, (2, 9), generator=rng.torch(f"positions {head_dim}"))
    positions[0, 0] = 0
    for p in (positions, positions[1], positions[1, 3]):
        cos, sin = rope_cos_sin(p, head_dim, theta)
        i = torch.arange(head_dim) % (head_dim // 2)
        angles = p[..., None].double() * theta ** (-2.0 * i.double() / head_dim)
        # An angle of a radians has an error of a few u * a, and cos and sin change no faster than the angle.
        atol = 8 * U * (1 + float(p.max()))
        call = f"rope_cos_sin(positions {list(p.shape)}, head_dim={head_dim}, theta={theta:g})"
        hint = "angle of pair i is position * theta^(-2i/head_dim); both halves of the table are the same"
        for name, got, expected in (("cos", cos, angles.cos()), ("sin", sin, angles.sin())):
            expect_close(got, expected, atol, what=f"{name} of position, entry", call=call, hint=hint, see=ROPE)
            expect(got.dtype == torch.float32, f"{call}: {name} is {got.dtype}, expected float32", see=ROPE)


@grades(rope_cos_sin)
def test_rope_tables_are_rounded_last():
    positions = torch.randint(500, 3000, (40,), generator=rng.torch("bf16 positions"))
    angles = positions[:, None].double() * 10_000.0 ** (-2.0 * (torch.arange(16) % 8).double() / 16)
    for name, got, expected in zip(
        ("cos", "sin"), rope_cos_sin(positions, 16, 10_000.0, torch.bfloat16), (angles.cos(), angles.sin()), strict=True
    ):
        expect(got.dtype == torch.bfloat16, f"{name} is {got.dtype}, expected bfloat16", see=ROPE)
        hint = "bfloat16 cannot even hold position 257; compute in float32 and round the finished table"
        expect_close(got, expected, atol=8 * U * 3000, rtol=UB, what=f"{name} in bfloat16", hint=hint, see=ROPE)


@grades(rope_cos_sin)
def test_rope_needs_pairs():
    odd = 2 * rng("odd").randint(2, 20) + 1
    expect_raises(ValueError, rope_cos_sin, torch.arange(3), odd, 10_000.0, match=str(odd), see=ROPE)


@grades(apply_rope)
@pytest.mark.parametrize("layout", ["[B, H, T, D]", "[N, H, D]"])
def test_apply_rope(layout):
    B, H, T, D, theta = 2, 3, 5, 12, 1000.0
    if layout == "[B, H, T, D]":
        x, positions = draw(layout, B, H, T, D), torch.randint(0, 90, (B, 1, T), generator=rng.torch("p"))
    else:
        x, positions = draw(layout, T, H, D), torch.randint(0, 90, (T, 1), generator=rng.torch("p"))
    angles = positions[..., None].double() * theta ** (-2.0 * (torch.arange(D) % (D // 2)).double() / D)
    given = x.clone()
    got = apply_rope(x, angles.cos().float(), angles.sin().float())
    hint = "entry i pairs with i + D/2: x1 cos - x2 sin, then x2 cos + x1 sin"
    atol = rounding(4, x.abs().max() * 2)
    expect_close(got, rotate64(x, positions, theta), atol, what=f"turned x {layout}", hint=hint, see=ROPE)
    expect(torch.equal(x, given), "apply_rope changed its input in place", see=ROPE)


@grades(apply_rope)
def test_apply_rope_rounds_once():
    positions = torch.randint(0, 500, (64, 1), generator=rng.torch("p16"))
    x = draw("bf16", 64, 3, 16).bfloat16()
    angles = positions[..., None].double() * 10_000.0 ** (-2.0 * (torch.arange(16) % 8).double() / 16)
    got = apply_rope(x, angles.cos().float(), angles.sin().float())
    expect(got.dtype == torch.bfloat16, f"apply_rope of bfloat16 x returned {got.dtype}, expected bfloat16", see=ROPE)
    hint = "float32 tables: multiply and add in float32, round the result"
    expected = rotate64(x, positions, 10_000.0)
    expect_close(got, expected, atol=1e-5, rtol=UB * 1.01, what="turned bfloat16 x", hint=hint, see=ROPE)


@grades(rope_cos_sin, apply_rope)
def test_scores_depend_on_distance_alone():
    D, theta = 16, 10_000.0
    q, k = draw("q", D), draw("k", D)
    random = rng("distance")
    distance = random.randint(1, 30)
    scores = []
    for start in (0, random.randint(40, 400), random.randint(500, 900)):
        p = torch.tensor([start, start + distance])
        cos, sin = rope_cos_sin(p, D, theta)
        scores.append(float(apply_rope(q, cos[1], sin[1]).double() @ apply_rope(k, cos[0], sin[0]).double()))
    atol = 8 * U * 1000 * float(q.abs() @ k.abs()) * 2  # both angles up to 1000 radians
    what = f"q·k at distance {distance}, pair {{i}} of positions"
    expect_close(torch.tensor(scores, dtype=torch.float64), torch.full((3,), scores[0]), atol, what=what, see=ROPE)


# Attention


def small_config(**changes):
    sizes = {
        "vocab_size": 61, "hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 500.0, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    return Qwen3Config(**(sizes | changes))


def project64(module, hidden, positions, theta):
    """Normed, turned q [B, H, T, D] and k, and v, in float64."""
    out = []
    for name, heads, norm, turned in (
        ("q_proj", module.num_heads, module.q_norm, True),
        ("k_proj", module.num_kv_heads, module.k_norm, True),
        ("v_proj", module.num_kv_heads, None, False),
    ):
        linear = getattr(module, name)
        x = hidden.double() @ linear.weight.double().T
        x = x if linear.bias is None else x + linear.bias.double()
        x = torch.stack(x.split(module.head_dim, dim=-1), dim=1)
        assert x.shape[1] == heads
        x = rms64(x, norm.weight, norm.eps) if norm is not None else x
        out.append(rotate64(x, positions[:, None], theta) if turned else x)
    return out


def attend64(module, q, k, v, q_pos, k_pos, allowed=None):
    """One head at a time, one query at a time; what a query may not see is cut out."""
    B, H, T, _ = q.shape
    group = H // k.shape[1]
    out = torch.zeros_like(q)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                seen = k_pos[b] <= q_pos[b, t]
                seen = seen if allowed is None else seen & allowed[b, 0, t]
                scores = k[b, h // group, seen] @ q[b, h, t] * module.scale
                out[b, h, t] = scores.softmax(0) @ v[b, h // group, seen]
    out = torch.cat(out.unbind(1), dim=-1) @ module.o_proj.weight.double().T
    return out if module.o_proj.bias is None else out + module.o_proj.bias.double()


def attention_case(salt, T=7, **changes):
    cfg = small_config(**changes)
    module = randomised(Qwen3Attention(cfg), f"attention {salt}")
    hidden = draw(f"hidden {salt}", 2, T, cfg.hidden_size)
    # Positions in no order and unlike in the two rows: they, and not the places, say who sees whom.
    positions = torch.stack([torch.randperm(40, generator=rng.torch(f"{salt} {b}"))[:T] for b in range(2)])
    tables = [t.float() for t in tables64(positions, cfg)]
    chain = cfg.hidden_size + 3 * cfg.head_dim + T + cfg.num_attention_heads * cfg.head_dim
    return cfg, module, hidden, positions, tables, chain


def tables64(positions, cfg):
    i = torch.arange(cfg.head_dim) % (cfg.head_dim // 2)
    angles = positions[..., None].double() * cfg.rope_theta ** (-2.0 * i.double() / cfg.head_dim)
    return angles.cos(), angles.sin()


SHAPES = {
    "grouped": {},
    "one kv head": {"num_key_value_heads": 1},
    "a kv head each": {"num_key_value_heads": 6},
    "biases": {"attention_bias": True},
    "llama": {"qk_norm": False},
}


@grades(Qwen3Attention.forward)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention(shape):
    cfg, module, hidden, positions, (cos, sin), chain = attention_case(shape, **SHAPES[shape])
    got = module(hidden, cos, sin, positions)
    q, k, v = project64(module, hidden, positions, cfg.rope_theta)
    expected = attend64(module, q, k, v, positions, positions)
    # A score's error becomes a relative one of its probability, so it counts as often as the score is large.
    chain *= 1 + (q.norm(dim=-1).max() * k.norm(dim=-1).max() * module.scale) ** 2
    hint = (
        "project, split into heads, norm q and k, turn q and k, attend with self.scale, put heads side by side, o_proj"
    )
    expect_close(
        got, expected, rounding(chain, expected.abs().max()), what="output [b, t, channel]",
        call=f"Qwen3Attention.forward ({shape}, hidden {list(hidden.shape)})", hint=hint, see=ATTENTION,
    )  # fmt: skip


@grades(Qwen3Attention.forward)
def test_attention_uses_its_scale():
    cfg, module, hidden, positions, (cos, sin), chain = attention_case("scale")
    module.scale = rng("scale").uniform(0.05, 0.2)
    q, k, v = project64(module, hidden, positions, cfg.rope_theta)
    expected = attend64(module, q, k, v, positions, positions)
    atol = rounding(10 * chain, expected.abs().max())
    what = f"output with self.scale = {module.scale:.3f}"
    expect_close(module(hidden, cos, sin, positions), expected, atol, what=what, see=ATTENTION)


class WatchedCache:
    """Holds random old keys and values, and checks what is appended to them."""

    def __init__(self, k, v, k_pos, allowed):
        self.old, self.k_pos, self.allowed, self.calls = (k, v), k_pos, allowed, []

    def append(self, layer, k, v, positions):
        self.calls.append((layer, k, v, positions))
        k, v = (torch.cat((old, new), dim=2) for old, new in zip(self.old, (k, v), strict=True))
        return k, v, self.k_pos, self.allowed


@grades(Qwen3Attention.forward)
def test_attention_through_a_cache():
    cfg, module, hidden, positions, (cos, sin), chain = attention_case("cache", T=3)
    held, layer = 6, rng("layer").randint(1, 2)
    old = draw("old", 2, 2, cfg.num_key_value_heads, held, cfg.head_dim)
    k_pos = torch.cat((torch.randint(0, 40, (2, held), generator=rng.torch("old positions")), positions), dim=1)
    allowed = torch.rand(2, 1, 3, held + 3, generator=rng.torch("allowed")) < 0.6
    allowed[:, :, range(3), range(held, held + 3)] = True  # each token sees at least itself
    cache = WatchedCache(*old, k_pos, allowed)
    got = module(hidden, cos, sin, positions, cache, layer)
    expect_equal(len(cache.calls), 1, what="calls of cache.append in one layer", see=ATTENTION)
    q, k, v = project64(module, hidden, positions, cfg.rope_theta)
    its_layer, its_k, its_v, its_positions = cache.calls[0]
    expect_equal(its_layer, layer, what="layer given to cache.append", see=ATTENTION)
    expect_equal(its_positions, positions, what="position {i} given to cache.append", see=ATTENTION)
    hint = "the cache holds k after its norm and its rotation, and v as projected"
    for name, mine, exact in (("k", its_k, k), ("v", its_v, v)):
        atol = rounding(chain, exact.abs().max())
        expect_close(mine, exact, atol, what=f"{name} [b, h, t, d] given to cache.append", hint=hint, see=ATTENTION)
    k, v = (torch.cat((o.double(), new), dim=2) for o, new in zip(old, (k, v), strict=True))
    expected = attend64(module, q, k, v, positions, k_pos, allowed)
    chain *= 1 + (q.norm(dim=-1).max() * k.norm(dim=-1).max() * module.scale) ** 2
    hint = "attend to what append returned: its k and v, its k_pos, its allowed"
    atol = rounding(chain, expected.abs().max())
    expect_close(got, expected, atol, what="output [b, t, channel] with a cache", hint=hint, see=ATTENTION)


# MLP and block


@grades(Qwen3MLP.forward)
@pytest.mark.parametrize("shape", [(5,), (2, 3)])
def test_mlp(shape):
    cfg = small_config()
    mlp = randomised(Qwen3MLP(cfg), f"mlp {shape}")
    x = draw(f"mlp {shape}", *shape, cfg.hidden_size, scale=2.0)
    gate, up, down = (getattr(mlp, f"{name}_proj").weight.double() for name in ("gate", "up", "down"))
    a = x.double() @ gate.T
    expected = (a / (1 + torch.exp(-a)) * (x.double() @ up.T)) @ down.T
    hint = "silu acts on the gate branch alone; then times up, then down"
    atol = rounding(2 * cfg.hidden_size + cfg.intermediate_size, expected.abs().max())
    expect_close(mlp(x), expected, atol, what="output", call=f"Qwen3MLP.forward({list(x.shape)})", hint=hint, see=MLP)


class Spy(nn.Module):
    """A stand-in for one part of the block; remembers its arguments."""

    def __init__(self, function):
        super().__init__()
        self.function, self.calls = function, []

    def forward(self, hidden, *args, **kwargs):
        self.calls.append((hidden.clone(), args, kwargs))
        return self.function(hidden)


@grades(Qwen3DecoderLayer.forward)
def test_block_wiring():
    layer = Qwen3DecoderLayer(small_config())
    parts = {
        "input_layernorm": torch.tanh, "self_attn": lambda x: 2 * x + 1,
        "post_attention_layernorm": torch.sin, "mlp": lambda x: 0.5 * x * x - 3,
    }  # fmt: skip
    for name, function in parts.items():
        setattr(layer, name, Spy(function))
    hidden = draw("block", 2, 5, 20)
    given = hidden.clone()
    cos, sin, positions, cache = (object() for _ in range(4))
    number = rng("number").randint(1, 9)
    got = layer(hidden, cos, sin, positions, cache, number)
    for name in parts:
        expect_equal(len(getattr(layer, name).calls), 1, what=f"calls of {name}", see=BLOCK)
    h = given.double()
    middle = h + 2 * torch.tanh(h) + 1
    steps = {
        "input_layernorm": h, "self_attn": torch.tanh(h), "post_attention_layernorm": middle, "mlp": torch.sin(middle),
    }  # fmt: skip
    for name, expected in steps.items():
        hint = "the norm stands in front of each half; the residual path goes around both"
        atol = rounding(50, expected.abs().max())
        expect_close(getattr(layer, name).calls[0][0], expected, atol, what=f"input of {name}", hint=hint, see=BLOCK)
    expected = middle + 0.5 * torch.sin(middle) ** 2 - 3
    hint = "each half is added to its own un-normed input"
    expect_close(got, expected, rounding(50, expected.abs().max()), what="output of the block", hint=hint, see=BLOCK)
    _, args, kwargs = layer.self_attn.calls[0]
    names = ("cos", "sin", "positions", "cache", "layer")
    got = dict(zip(names, args, strict=False)) | kwargs
    for name, value in zip(names, (cos, sin, positions, cache, number), strict=True):
        expect(got.get(name) is value, f"self_attn was not given the block's {name}", see=BLOCK)
    expect(torch.equal(hidden, given), "the block changed its input in place", hint="not +=, but a new sum", see=BLOCK)


# The model

EVERYTHING = grades(
    rope_cos_sin, apply_rope, RMSNorm.forward, Qwen3Attention.forward, Qwen3MLP.forward, Qwen3DecoderLayer.forward
)
MODELS = {
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True, "rope_theta": 1_000_000.0}),
    "qwen3 one kv head": ("qwen3", {"num_key_value_heads": 1, "head_dim": 24, "attention_bias": True}),
    "qwen3 a kv head each": ("qwen3", {"num_key_value_heads": 4, "num_attention_heads": 4, "num_hidden_layers": 1}),
    "llama": ("llama", {"rms_norm_eps": 1e-5}),
    "llama tied": ("llama", {"tie_word_embeddings": True, "head_dim": 10}),
}


def depth(cfg, T):
    """The longest chain of operations from a token to a logit."""
    layer = 3 * cfg.hidden_size + 3 * cfg.head_dim + T + cfg.num_attention_heads * cfg.head_dim + cfg.intermediate_size
    return cfg.num_hidden_layers * layer + 2 * cfg.hidden_size


def theirs(family, sizes, salt):
    """transformers' model with random weights, in the scale of a trained one, and our config of it."""
    # By name, so that a runner which forks can load all of it beforehand.
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3ForCausalLM
    from transformers import Qwen3Config as TheirQwen3Config

    config_class, model_class = {
        "qwen3": (TheirQwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[family]
    sizes = {name: sizes[name] for name in sizes if name != "rope_theta"} | {
        "rope_parameters": {"rope_type": "default", "rope_theta": sizes["rope_theta"]}
    }
    config = config_class(**sizes, attn_implementation="eager")
    with torch.random.fork_rng(devices=[]):
        model = randomised(model_class(config).eval(), salt)
    return model, Qwen3Config.from_dict(config.to_dict())


@EVERYTHING
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name):
    family, changes = MODELS[name]
    base = small_config(hidden_size=48, intermediate_size=80, num_attention_heads=6, head_dim=16)
    fields = [f for f in vars(base) if f not in ("qk_norm", "eos_token_id", "dtype")]
    reference, cfg = theirs(family, {f: getattr(base, f) for f in fields} | changes, f"weights {name}")
    ours = Qwen3(cfg).eval().requires_grad_(False)
    ours.load_state_dict(reference.state_dict())
    ids = torch.randint(0, cfg.vocab_size, (2, 23), generator=rng.torch(f"ids {name}"))
    with torch.inference_mode():
        got, expected = ours(ids), reference(ids).logits
    atol = 2 * rounding(depth(cfg, 23), expected.abs().max())  # both are off, each its own way
    hint = "the tests of the single parts are the place to look first"
    expect_close(got, expected, atol, what=f"logit [b, t, v] of {name}", hint=hint, see="17: Parity with transformers")


@EVERYTHING
@pytest.mark.parametrize("chunks", [(9, 1, 1, 1), (1, 4, 7), (5, 7)])
def test_cached_equals_uncached(chunks):
    model = build_model(rng(f"cached {chunks}").randrange(1000))
    ids = torch.randint(0, model.cfg.vocab_size, (3, 12), generator=rng.torch("cached ids"))
    cache, parts, start = KVCache.for_model(model, batch=3, max_len=12), [], 0
    with torch.inference_mode():
        expected = model(ids)
        for T in chunks:
            parts.append(model(ids[:, start : start + T], cache))
            start += T
    atol = 2 * rounding(depth(model.cfg, 12), expected.abs().max())
    hint = "positions go on where the cache ends, in RoPE and in the mask"
    what = f"logit [b, t, v] in chunks of {chunks}"
    expect_close(torch.cat(parts, dim=1), expected, atol, what=what, hint=hint, see=ATTENTION)
