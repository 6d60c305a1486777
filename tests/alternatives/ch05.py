"""Other right answers of chapter 5."""

from tests.alternatives import alternative

CHECKS = """
def causal_attention(q, k, v, q_pos, k_pos, allowed=None, scale=None):
    import itertools

    def check(condition, message):
        if not condition:
            raise ValueError(message)

    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    check(q.ndim == k.ndim == v.ndim == 4 and k.shape == v.shape, shapes)
    B, H, T, D = q.shape
    Hkv, S = k.shape[1:3]
    check(k.shape == (B, Hkv, S, D) and Hkv and H % Hkv == 0, shapes)
    check(q_pos.shape == (T,) or q_pos.shape == (B, T), f"q_pos {tuple(q_pos.shape)}")
    check(k_pos.shape == (S,) or k_pos.shape == (B, S), f"k_pos {tuple(k_pos.shape)}")
    scale = 1 / D**0.5 if scale is None else scale
    if allowed is None:
        allowed = torch.ones(1, dtype=torch.bool)
    check(allowed.dtype == torch.bool, f"allowed is {allowed.dtype}")
    try:
        allowed = allowed.expand(B, H, T, S)
    except RuntimeError:
        raise ValueError(f"allowed {tuple(allowed.shape)}") from None
    q_pos, k_pos = q_pos.expand(B, T), k_pos.expand(B, S)
"""

alternative("causal_attention", name="one-query-at-a-time", source=CHECKS + """
    out = torch.zeros_like(q)
    for b, h, t in itertools.product(range(B), range(H), range(T)):
        seen = (k_pos[b] <= q_pos[b, t]) & allowed[b, h, t]
        if seen.any():
            keys, values = k[b, h // (H // Hkv), seen].float(), v[b, h // (H // Hkv), seen].float()
            scores = keys @ q[b, h, t].float() * scale
            out[b, h, t] = (torch.softmax(scores, 0) @ values).to(q.dtype)
    return out
""")

alternative("causal_attention", name="scaled-dot-product-attention", source=CHECKS + """
    visible = ((k_pos[:, None, None] <= q_pos[:, None, :, None]) & allowed).reshape(B, Hkv, H // Hkv * T, S)
    rows = q.reshape(B, Hkv, H // Hkv * T, D)
    out = torch.nn.functional.scaled_dot_product_attention(
        rows.float(), k.float(), v.float(), attn_mask=visible, scale=scale
    )
    return out.masked_fill(~visible.any(-1, keepdim=True), 0).reshape(q.shape).to(q.dtype)
""")

alternative("causal_attention", name="five-axes-and-minus-infinity", source=CHECKS + """
    visible = (k_pos[:, None, None] <= q_pos[:, None, :, None]) & allowed
    grouped = q.float().unflatten(1, (Hkv, H // Hkv))
    scores = torch.einsum("bjgtd,bjsd->bjgts", grouped, k.float()).flatten(1, 2) * scale
    probs = torch.softmax(scores.where(visible, -torch.inf), dim=-1).nan_to_num()
    return torch.einsum("bjgts,bjsd->bjgtd", probs.unflatten(1, (Hkv, -1)), v.float()).flatten(1, 2).to(q.dtype)
""")

alternative("causal_attention", name="keys-one-at-a-time-online-softmax", source=CHECKS + """
    best = torch.full((B, H, T, 1), LOWEST)
    total, out = torch.zeros(B, H, T, 1), torch.zeros(B, H, T, D)
    rows = q.float().reshape(B, Hkv, H // Hkv, T, D)
    for s in range(S):
        score = (rows * k[:, :, s, None, None].float()).sum(-1, keepdim=True).reshape(B, H, T, 1) * scale
        seen = (k_pos[:, s, None, None, None] <= q_pos[:, None, :, None]) & allowed[..., s, None]
        highest = torch.where(seen, torch.maximum(best, score), best)
        weight = torch.where(seen, (score - highest).exp(), 0.0)
        old = (best - highest).exp()
        value = v[:, :, s].float()[:, :, None].expand(B, Hkv, H // Hkv, D).reshape(B, H, 1, D)
        total, out, best = total * old + weight, out * old + weight * value, highest
    return torch.where(total > 0, out / total, 0.0).to(q.dtype)
""")
