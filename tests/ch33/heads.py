"""rope_write_kernel: every head of every row, to q or into its slot and nowhere else."""

import pytest
import torch

from engine.models.qwen3 import Qwen3Attention, Qwen3Config
from engine.serve.attention import ReferenceBackend
from engine.serve.kernels.rope import rope_write, rope_write_kernel
from engine.serve.ops import PlainOps
from tests.ch31.ragged import meta_of
from tests.ch32.device import DEVICE, DTYPES
from tests.ch32.paged import SENTINEL, guarded, two
from tests.ch33.rounding import Span, among_nan, expect_within, normalised, rotated
from tests.grading import expect, expect_equal, grades, rng

POOL = "33: From the projection into the pool"
SLOTS = 30


class Heads:
    """A merged projection [N, H + 2 Hkv, D] and the tables and weights that go with it."""

    def __init__(self, salt, slots, heads, kv_heads, width, dtype=torch.float32, norm=True, eps=1e-6, loud=1.0):
        generator = rng.torch(f"{salt} {heads} {kv_heads} {width}")

        def random(*shape):
            return torch.randn(*shape, generator=generator)

        self.heads, self.kv_heads, self.width, self.norm, self.eps = heads, kv_heads, width, norm, eps
        self.slots, self.dtype, n = slots, dtype, len(slots)
        self.qkv = (loud * random(n, heads + 2 * kv_heads, width)).to(dtype)
        angle = 6 * torch.rand(n, width // 2, generator=generator)
        self.cos, self.sin = (t.repeat(1, 2) for t in (angle.cos(), angle.sin()))
        self.weights = [(random(width) / 2 + 1).to(dtype) for _ in "qk"]

    def expected(self):
        """Spans q [N, H, D], k [N, Hkv, D], v [N, Hkv, D]."""
        q, k, v = self.qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        pair = [Span(q), Span(k)]
        if self.norm:
            pair = [normalised(x, w, self.eps, self.dtype) for x, w in zip((q, k), self.weights, strict=True)]
        return *(rotated(x, self.cos, self.sin, self.dtype) for x in pair), Span(v)

    def launch(self, pool_dtype=None, hint=None):
        n, width = len(self.slots), self.width
        q, around_q = guarded((n, self.heads, width), self.dtype)
        pools = [guarded((SLOTS, self.kv_heads, width), pool_dtype or self.dtype) for _ in "kv"]
        qkv, tables = among_nan(self.qkv), [among_nan(t) for t in (self.cos, self.sin)]
        weights = [among_nan(w if self.norm else torch.full_like(w, torch.nan)) for w in self.weights]
        mapping = torch.tensor(self.slots, dtype=torch.int64, device=DEVICE)
        rope_write_kernel[(n, self.heads + 2 * self.kv_heads)](
            qkv, *tables, *weights, q, *(pool for pool, _ in pools), mapping, self.eps, self.norm, self.heads,
            self.kv_heads, width, two(width // 2), num_warps=1,
        )  # fmt: skip
        around_q("rope_write_kernel (q)", POOL)
        for name, (_, intact) in zip(("k_cache", "v_cache"), pools, strict=True):
            intact(f"rope_write_kernel ({name})", POOL)
        name = f"rope_write_kernel, heads {self.heads}/{self.kv_heads}/{width}"
        self.check(q, [pool for pool, _ in pools], name, hint)
        expect(torch.equal(qkv.cpu(), self.qkv), "rope_write_kernel changed qkv", see=POOL)

    def check(self, q, pools, name, hint=None):
        spans = self.expected()
        expect_within(q, spans[0], f"{name}: q [row, head, d] {{i}}", hint, POOL)
        row_of = {slot: n for n, slot in enumerate(self.slots) if slot >= 0}
        for which, pool, span in zip(("k_cache", "v_cache"), pools, spans[1:], strict=True):
            for slot in range(SLOTS):
                n = row_of.get(slot)
                if n is None:
                    same = bool((pool[slot] == SENTINEL).all())
                    expect(same, f"{name} changed slot {slot} of {which}, which is no row's", hint, POOL)
                else:
                    what = f"{name}: {which}, slot {slot} of row {n}, [head, d] {{i}}"
                    expect_within(pool[slot], span[n].to(pool.dtype), what, hint, POOL)


ROTATE = "x1 cos - x2 sin, x2 cos + x1 sin, x2 half a head after x1; normalise first, rotate then"
SHAPES = [(4, 2, 64), (3, 1, 80), (2, 2, 96), (6, 3, 128), (2, 1, 256), (1, 1, 10)]


@grades(rope_write_kernel)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_heads_are_normed_turned_and_stored(shape, dtype):
    slots = rng(f"slots {shape}").sample(range(SLOTS), 3)
    Heads("heads", slots, *shape, dtype).launch(hint=ROTATE)


@grades(rope_write_kernel)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_of_llama_are_only_turned(dtype):
    hint = "NORM False: no norm, and its weights are not read"
    Heads("llama", [7, 2, 11], 3, 2, 48, dtype, norm=False).launch(hint=hint)


@grades(rope_write_kernel)
def test_padding_has_queries_and_no_slot():
    """Slot -1 between others, alone, beside the first and the last slot."""
    hint = "slot -1: no key and no value is stored, neither before the pool nor in some slot of it; q as ever"
    for slots in ([-1, 5, -1, 9], [-1], [0, -1, SLOTS - 1]):
        Heads(f"padding {slots}", slots, 2, 1, 24).launch(hint=hint)


@grades(rope_write_kernel)
def test_rows_go_to_their_own_slots():
    """Downwards and apart, so that nothing that runs over is covered by a later row."""
    Heads("apart", list(range(28, 12, -2)), 1, 2, 20).launch(hint="row n goes to slot_mapping[n]; mask what is padded")


@grades(rope_write_kernel)
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_the_norm_of_a_head_has_its_eps(eps):
    Heads("eps", [3, 4], 2, 1, 24, eps=eps).launch(hint="mean over the WIDTH values of a head, eps inside the root")


@grades(rope_write_kernel)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loud_heads_fit(dtype):
    """Values of hundreds, whose squares leave float16."""
    Heads("loud", [3, 4], 2, 1, 40, dtype, loud=300.0).launch(hint="squares and their sum in float32")


@grades(rope_write_kernel)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_heads_are_rounded_where_the_model_rounds(dtype):
    """Many values, so that a rounding too few or too many shows somewhere."""
    hint = "rounded after the norm, after the weight, and once after the rotation in float32"
    Heads("rounding", list(range(6)), 4, 2, 64, dtype).launch(hint=hint)


@grades(rope_write_kernel)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_keys_and_values_are_cast_to_the_pool(dtype):
    Heads("cast", [5, -1, 8], 2, 1, 32).launch(pool_dtype=dtype, hint="values are cast to the type of the pool")


def layer_of(heads):
    """A layer's attention with these weights."""
    cfg = Qwen3Config(
        hidden_size=12, num_attention_heads=heads.heads, num_key_value_heads=heads.kv_heads, head_dim=heads.width,
        rms_norm_eps=heads.eps, qk_norm=heads.norm, vocab_size=5, intermediate_size=4, num_hidden_layers=1,
    )  # fmt: skip
    attn = Qwen3Attention(cfg).requires_grad_(False).to(DEVICE, heads.dtype)
    for norm, weight in zip((attn.q_norm, attn.k_norm), heads.weights, strict=True):
        if norm is not None:
            norm.weight.copy_(weight)
    return attn


def pools_of(heads, blocks=6):
    shape = (blocks, SLOTS // (blocks - 1), heads.kv_heads, heads.width)
    return tuple(torch.full(shape, SENTINEL, dtype=heads.dtype, device=DEVICE) for _ in "kv")


def slots_of(pools):
    return [pool.flatten(0, 1)[:SLOTS] for pool in pools]  # without the block of scratch


@grades(rope_write_kernel)
@pytest.mark.parametrize("norm", [True, False])
def test_the_launch_takes_a_layers_attention(norm):
    """rope_write: [N, (H + 2 Hkv) * D] and block pools; no rows."""
    heads = Heads("layer", [4, -1, 17], 4, 2, 24, norm=norm, eps=1e-3)
    attn, pools = layer_of(heads), pools_of(heads)
    qkv, cos, sin = (t.to(DEVICE) for t in (heads.qkv.flatten(1), heads.cos, heads.sin))
    mapping = torch.tensor(heads.slots, device=DEVICE)
    heads.check(rope_write(qkv, cos, sin, attn, pools, mapping), slots_of(pools), "rope_write")
    empty = rope_write(qkv[:0], cos[:0], sin[:0], attn, pools, mapping[:0])
    expect_equal(list(empty.shape), [0, 4, 24], "shape of q of no rows", see=POOL)


# Given: the plain operations, which the kernels must agree with.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [True, False])
def test_plain_rope_write_is_within_the_same_bounds(norm, dtype):
    meta = meta_of([(3, 3)], 6, [[1]])
    heads = Heads("plain", meta.slot_mapping.tolist(), 4, 2, 24, dtype, norm)
    meta.slot_mapping = meta.slot_mapping.to(DEVICE)
    qkv, cos, sin = (t.to(DEVICE) for t in (heads.qkv.flatten(1), heads.cos, heads.sin))
    pools = pools_of(heads)
    q = PlainOps().rope_write(qkv, cos, sin, layer_of(heads), pools, meta, ReferenceBackend())
    heads.check(q, slots_of(pools), "PlainOps.rope_write")
