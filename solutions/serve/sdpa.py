import torch
import torch.nn.functional as F

from engine.serve.sdpa import gather


class SdpaBackend:
    def forward(self, q, cache, meta, scale=None, window=0):
        heads, width = q.shape[1:]
        kv_heads = cache[0].shape[2]
        group = heads // kv_heads
        out = torch.zeros_like(q)
        for rows, blocks, unused, mask in self.plans(meta, window, group):
            k, v = (gather(pool, blocks, unused) for pool in cache)  # [R, Hkv, S, D]
            grouped = q[rows].unflatten(2, (kv_heads, group)).transpose(1, 2).flatten(2, 3)  # [R, Hkv, T * G, D]
            result = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
            out[rows] = result.unflatten(2, (-1, group)).transpose(1, 2).reshape(*rows.shape, heads, width)
        return out
