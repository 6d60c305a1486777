"""Answer of chapter 5."""

import torch

from engine.attention import LOWEST


def causal_attention(q, k, v, q_pos, k_pos, allowed=None, scale=None):
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}: need four axes, k and v alike")
    B, H, T, D = q.shape
    Hkv, S = k.shape[1], k.shape[2]
    if k.shape[0] != B or k.shape[3] != D:
        raise ValueError(f"q {list(q.shape)} and k {list(k.shape)} differ in batch or head width")
    if Hkv == 0 or H % Hkv:
        raise ValueError(f"{H} query heads are not a multiple of {Hkv} KV heads")
    for name, positions, n in (("q_pos", q_pos, T), ("k_pos", k_pos, S)):
        if positions.shape not in ((n,), (B, n)):
            raise ValueError(f"{name} has shape {list(positions.shape)}, expected [{n}] or [{B}, {n}]")

    visible = k_pos[..., None, :] <= q_pos[..., :, None]  # [T, S] or [B, T, S]
    if visible.ndim == 3:
        visible = visible[:, None]  # one mask for all heads: [B, 1, T, S]
    if allowed is not None:
        full = (B, H, T, S)
        fits = allowed.ndim <= 4 and all(a in (1, n) for a, n in zip(allowed.shape[::-1], full[::-1], strict=False))
        if allowed.dtype != torch.bool or not fits:
            raise ValueError(f"allowed is {allowed.dtype} {list(allowed.shape)}, expected bool that fits {list(full)}")
        visible = visible & allowed

    # The H // Hkv query heads of a group stand side by side, so they become more rows of one matmul: K is read once.
    scale = D**-0.5 if scale is None else scale
    rows = (q.float() * scale).reshape(B, Hkv, H // Hkv * T, D)
    scores = (rows @ k.float().transpose(-1, -2)).view(B, H, T, S)
    bias = torch.zeros(visible.shape, device=q.device).masked_fill_(~visible, LOWEST)  # small; adding it is cheap
    weights = scores.add_(bias).softmax(dim=-1)
    out = (weights.view(B, Hkv, H // Hkv * T, S) @ v.float()).view(B, H, T, D)
    return out.masked_fill_(~visible.any(dim=-1, keepdim=True), 0.0).to(q.dtype)
