"""The batched backend: requests with similar numbers of queries share one gather and one attention call."""

import torch
import torch.nn.functional as F

from engine.serve.attention import PoolBackend


class SdpaBackend(PoolBackend):
    """All decode rows in one `scaled_dot_product_attention`, padded to the longest context; prefill chunks likewise,
    in groups whose lengths differ by less than a factor of two."""

    name = "sdpa"

    def __init__(self):
        self._meta, self._plans = None, {}

    def forward(self, q, cache, meta, scale=None, window=0):
        """As ReferenceBackend.forward: q [N, H, D] -> [N, H, D]."""
        if self._meta is not meta:  # a new step; its plans serve every layer
            self._meta, self._plans = meta, {}
        heads, width = q.shape[1:]
        kv_heads = cache[0].shape[2]
        group = heads // kv_heads
        if window not in self._plans:
            self._plans[window] = [_plan(meta, requests, window, group) for requests in _groups(meta)]

        out = torch.zeros_like(q)
        for rows, blocks, unused, mask in self._plans[window]:
            k, v = (_gather(pool, blocks, unused) for pool in cache)  # [R, Hkv, S, D]
            # The query heads of a group become more queries of their KV head: [R, Hkv, T * G, D].
            grouped = q[rows].unflatten(2, (kv_heads, group)).transpose(1, 2).flatten(2, 3)
            result = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
            out[rows] = result.unflatten(2, (-1, group)).transpose(1, 2).reshape(*rows.shape, heads, width)
        return out


def _groups(meta):
    """Requests by the bit length of their number of rows: decodes together, then 2-3 rows, 4-7, and so on."""
    starts, seq_lens = meta.query_start_loc_cpu.tolist(), meta.seq_lens_cpu.tolist()
    groups = {}
    for r, seq_len in enumerate(seq_lens):
        if seq_len:  # 0 is padding
            groups.setdefault((starts[r + 1] - starts[r]).bit_length(), []).append(r)
    return groups.values()


def _plan(meta, requests, window, group):
    """rows [R, T], blocks [R, W], which of the R * S gathered slots lie past a context, mask [R, 1, T * G, S]."""
    device = meta.seq_lens.device
    chosen = torch.tensor(requests)
    starts, seq_lens = meta.query_start_loc_cpu.long(), meta.seq_lens_cpu[chosen].long()
    first, counts = starts[chosen], starts[chosen + 1] - starts[chosen]
    # A shorter request repeats its last row: computed twice, stored twice, the same both times.
    offsets = torch.minimum(torch.arange(int(counts.max()))[None], counts[:, None] - 1)
    rows, q_pos = first[:, None] + offsets, (seq_lens - counts)[:, None] + offsets  # [R, T]

    width = -(-int(seq_lens.max()) // meta.block_size)
    k_pos = torch.arange(width * meta.block_size)  # [S]
    mask = k_pos <= q_pos[..., None]
    if window > 0:
        mask &= k_pos > q_pos[..., None] - window
    mask = mask.repeat_interleave(group, dim=1)[:, None]
    unused = (k_pos >= seq_lens[:, None]).flatten().nonzero().flatten()
    blocks = meta.block_table[chosen.to(device), :width]
    return rows.to(device), blocks, unused.to(device), mask.to(device)


def _gather(pool, blocks, unused):
    """Context of every request of a group: [R, Hkv, S, D], zero past its end, where the pool may hold anything."""
    context = pool.index_select(0, blocks.flatten()).flatten(0, 1)  # [R * S, Hkv, D], a copy
    context.index_fill_(0, unused, 0)
    return context.unflatten(0, (len(blocks), -1)).transpose(1, 2)
