"""From the merged projection to attention's inputs in one launch: head norms, rotation, and K and V into the pool."""

import torch
import triton
import triton.language as tl

from engine.exercises import exercise, fill
from engine.serve.kernels import jit
from engine.serve.kernels.early import goes_early, inputs_ready, launched


@exercise(33, "From the projection into the pool")
def rope_write_kernel(
    qkv, cos, sin, q_weight, k_weight, q, k_cache, v_cache, slot_mapping, eps,
    NORM: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Program (n, h): head h of row n of the merged projection.  (Your engine: Chapter 33)

    qkv: [N, HEADS + 2 * KV_HEADS, WIDTH] without gaps: the query heads, then the key heads, then the value heads.
    cos, sin: [N, WIDTH] float32 as rope_cos_sin makes them: their second half repeats the first.
    q_weight, k_weight: [WIDTH], the weights of the head norms (RMSNorm, eps), used if NORM.
    A query or key head is normalised over its WIDTH values (rounded to the model's type before the weight and after it,
    as in chapter 17), then rotated in float32: with halves x1, x2 it becomes x1 cos - x2 sin, x2 cos + x1 sin, rounded
    once. A value head stays as it is.
    A query head goes to q [N, HEADS, WIDTH], a key or value head to its place in slot slot_mapping[n] (i64) of
    k_cache or v_cache [slots, KV_HEADS, WIDTH]; slot -1 is padding: its keys and values go nowhere. Values are cast
    to the type of where they go, and offsets into the pool have 64 bits.
    COLS >= WIDTH / 2 is a power of two.  Grid: (N, HEADS + 2 * KV_HEADS).
    """
    raise NotImplementedError


def rope_write(qkv, cos, sin, attn, cache, slot_mapping) -> torch.Tensor:
    """qkv [N, (H + 2 Hkv) * D] -> q [N, H, D], with K and V stored in cache; attn: the layer's self_attn."""
    heads, kv_heads, width = attn.num_heads, attn.num_kv_heads, attn.head_dim
    q = torch.empty(len(qkv), heads, width, dtype=qkv.dtype, device=qkv.device)
    norm = attn.q_norm is not None
    weights = (attn.q_norm.weight, attn.k_norm.weight) if norm else (qkv, qkv)  # the latter are not read
    if len(qkv):
        early = goes_early(len(qkv), qkv.device)
        kernel = early_rope_write if early else rope_write_kernel
        kernel[(len(qkv), heads + 2 * kv_heads)](
            qkv, cos, sin, *weights, q, *cache, slot_mapping, attn.q_norm.eps if norm else 0.0,
            norm, heads, kv_heads, width, triton.next_power_of_2(width // 2), num_warps=1, **launched(early),
        )  # fmt: skip
    return q


@triton.jit
def early_rope_write(
    qkv, cos, sin, q_weight, k_weight, q, k_cache, v_cache, slot_mapping, eps,
    NORM: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    inputs_ready(True)
    rope_write_kernel(
        qkv, cos, sin, q_weight, k_weight, q, k_cache, v_cache, slot_mapping, eps, NORM, HEADS, KV_HEADS, WIDTH, COLS
    )


fill(__name__)
rope_write_kernel = jit(rope_write_kernel)
