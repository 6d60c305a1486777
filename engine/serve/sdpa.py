"""The batched backend: requests with similar numbers of queries share one gather and one attention call."""

import torch
import torch.nn.functional as F  # noqa: F401  (what the exercise calls)

from engine.exercises import exercise, fill
from engine.serve.attention import PoolBackend

GATHERED = 4096, 65536  # slots of one gather, on a CPU and on a GPU


class SdpaBackend(PoolBackend):
    """Decode rows of like contexts in one `scaled_dot_product_attention`, padded to the longest; prefill chunks
    likewise, in groups whose numbers of rows differ by less than a factor of two."""

    name = "sdpa"

    def __init__(self):
        self._meta, self._plans = None, {}

    @exercise(32, "Padded gathers")
    def forward(self, q, cache, meta, scale=None, window=0):
        """As ReferenceBackend.forward, with one attention call for each group of requests.  (Your engine: Chapter 32)

        q: [N, H, D], cache: (k_cache, v_cache), each [num_blocks + 1, block_size, Hkv, D], meta: BatchMeta, scale and
        window: as in ReferenceBackend.forward, and so is the result, [N, H, D]: rows of padding requests are zero,
        and what lies in the pool past a context has no influence, NaN included.
        For each group of `self.plans(meta, window, H // Hkv)`: rows [R, T], blocks [R, W], unused, mask
        [R, 1, T * G, S], with S = W * block_size and G = H // Hkv. `gather(pool, blocks, unused)` is the group's
        context [R, Hkv, S, D], zero where nothing was written. One `F.scaled_dot_product_attention` for the group: the
        G query heads of a KV head become more queries of it, [R, Hkv, T * G, D], row by row (query t of head g at
        t * G + g), as the mask has it; nothing is repeated. A row number that stands twice in `rows` gets the same
        result twice.
        Source: grouped-query attention (EMNLP 2023); padding by groups of like length is ours.
        """
        raise NotImplementedError

    def plans(self, meta, window, group):
        """The groups of a step, made for its first layer and kept for the others."""
        if self._meta is not meta:
            self._meta, self._plans = meta, {}
        if window not in self._plans:
            most = GATHERED[meta.seq_lens.device.type == "cuda"]
            self._plans[window] = [_plan(meta, requests, window, group) for requests in _groups(meta, most)]
        return self._plans[window]


def _groups(meta, most):
    """Requests by the bit length of their number of rows (decodes together, then 2-3 rows, 4-7, and so on) and, sorted
    by context, as many of these at once as `most` gathered slots hold: fresh memory costs more than a second call."""
    starts, seq_lens = meta.query_start_loc_cpu.tolist(), meta.seq_lens_cpu.tolist()
    groups = {}
    for r, seq_len in enumerate(seq_lens):
        if seq_len:  # 0 is padding
            groups.setdefault((starts[r + 1] - starts[r]).bit_length(), []).append(r)
    for requests in groups.values():
        part = []
        for r in sorted(requests, key=seq_lens.__getitem__):
            if part and (len(part) + 1) * seq_lens[r] > most:
                yield part
                part = []
            part.append(r)
        yield part


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


def gather(pool, blocks, unused):
    """Context of every request of a group: [R, Hkv, S, D], zero past its end, where the pool may hold anything."""
    context = pool.index_select(0, blocks.flatten()).flatten(0, 1)  # [R * S, Hkv, D], a copy
    context.index_fill_(0, unused, 0)
    return context.unflatten(0, (len(blocks), -1)).transpose(1, 2)


fill(__name__)
