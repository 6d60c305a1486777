import torch

from engine.attention import causal_attention


def write_kv(k_cache, v_cache, k, v, slot_mapping):
    num_slots = k_cache.shape[0] * k_cache.shape[1]
    slots = torch.where(slot_mapping < 0, num_slots - 1, slot_mapping)
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache.view(num_slots, *cache.shape[2:]).index_copy_(0, slots, new.to(cache.dtype))


class ReferenceBackend:
    def forward(self, q, cache, meta, scale=None, window=0):
        out = torch.zeros_like(q)
        starts, seq_lens = meta.query_start_loc_cpu.tolist(), meta.seq_lens_cpu.tolist()
        for r, s in enumerate(seq_lens):
            if s == 0:
                continue
            rows = slice(starts[r], starts[r + 1])
            blocks = meta.block_table[r, : -(-s // meta.block_size)].long()
            k, v = (pool[blocks].flatten(0, 1)[None, :s].transpose(1, 2) for pool in cache)  # [1, Hkv, s, D]
            k_pos = torch.arange(s, device=q.device)
            q_pos = k_pos[s - (rows.stop - rows.start) :]
            allowed = k_pos > q_pos[:, None] - window if window > 0 else None
            queries = q[None, rows].transpose(1, 2)  # [1, H, t, D]
            out[rows] = causal_attention(queries, k, v, q_pos, k_pos, allowed, scale)[0].transpose(0, 1)
        return out
