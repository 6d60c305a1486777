"""Attention with explicit positions: the one formula that every engine of this book computes."""

import torch

from engine.exercises import exercise, fill

LOWEST = torch.finfo(torch.float32).min  # finite, so that a row without any key has no NaN, forwards or backwards


@exercise(5, "Positions decide who sees whom")
def causal_attention(q, k, v, q_pos, k_pos, allowed=None, scale=None):
    """Causal attention of grouped query heads over keys at explicit positions.  (Your engine: Chapter 5)

    q: queries [B, H, T, D]; k, v: keys and values [B, Hkv, S, D], H a multiple of Hkv, S may be 0. Any strides.
    q_pos: absolute positions of the queries, [T] or [B, T]; k_pos: of the keys, [S] or [B, S]; integers, in any order.
    allowed: None, or bool broadcastable to [B, H, T, S]; False hides a key although its position would be visible.
    scale: factor of the scores q·k, default D ** -0.5.

    A query sees a key iff k_pos <= q_pos and `allowed` (where given) is True. Query head h reads KV head
    h // (H // Hkv). Inputs are float32, float16 or bfloat16; scores and softmax are float32 for all of them. A query
    that sees no key gives zeros. Hidden keys have no influence while their scores and values are finite.
    Returns [B, H, T, D] in q's dtype; the arguments stay unchanged. K and V are never copied once per query head, which
    would take B * H * S * D elements each.

    Raises ValueError, naming the shape at fault: q, k or v not of four axes; k and v of different shapes; q and k of
    different B or D; H not a multiple of Hkv; q_pos, k_pos or allowed of another shape; `allowed` not bool.

    Source: Vaswani et al., "Attention Is All You Need" (2017); grouped heads: Ainslie et al., "GQA" (2023).
    """
    raise NotImplementedError


fill(__name__)
