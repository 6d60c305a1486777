"""Steps for the graders of attention and of the flat model, laid out by hand, and attention over them in float64."""

import torch

from engine.serve.batch import BatchMeta

UNIT = 2.0**-24  # of float32: the largest relative error of one rounding


def meta_of(shapes, size, tables, padding=0, width=None):
    """shapes: (context s, rows t) of each request; tables: its blocks, at least as many as s needs."""
    counts, lengths = [t for _, t in shapes] + [1] * padding, [s for s, _ in shapes] + [0] * padding
    starts = torch.tensor([sum(counts[:r]) for r in range(len(counts) + 1)], dtype=torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    width = width or max([len(table) for table in tables] + [1])
    rows = [[*table, *[0] * (width - len(table))] for table in tables] + [[0] * width] * padding
    pairs = zip(shapes, tables, strict=True)
    slots = [table[p // size] * size + p % size for (s, t), table in pairs for p in range(s - t, s)]
    return BatchMeta(
        query_start_loc=starts, seq_lens=seq_lens, block_table=torch.tensor(rows, dtype=torch.int32),
        slot_mapping=torch.tensor(slots + [-1] * padding, dtype=torch.int64), block_size=size,
        query_start_loc_cpu=starts.clone(), seq_lens_cpu=seq_lens.clone(), max_query_len=max(counts),
        max_seq_len=max(lengths),
    )  # fmt: skip


def positions_of(shapes, padding=0):
    return torch.tensor([p for s, t in shapes for p in range(s - t, s)] + [0] * padding)


def scattered_tables(random, shapes, size):
    """(tables, num_blocks): blocks from all over a pool that has some more; each table has one block to spare."""
    counts = [-(-s // size) + 1 for s, _ in shapes]
    num_blocks = sum(counts) + 3
    ids = random.sample(range(num_blocks), sum(counts))
    return [[ids.pop() for _ in range(count)] for count in counts], num_blocks


def plain_attention(q, k_cache, v_cache, shapes, tables, size, scale=None, window=0):
    """[N, H, D] in float64: a row and a head at a time, its keys fetched one by one from their slots."""
    rows, heads, width = q.shape
    scale = width**-0.5 if scale is None else scale
    out, row = torch.zeros(rows, heads, width, dtype=torch.float64), 0
    for (s, t), table in zip(shapes, tables, strict=True):
        slots = [(table[p // size], p % size) for p in range(s)]
        keys, values = (torch.stack([pool[slot] for slot in slots]).double() for pool in (k_cache, v_cache))
        for position in range(s - t, s):
            first = max(0, position - window + 1) if window > 0 else 0
            for head in range(heads):
                kv_head = head // (heads // keys.shape[1])
                seen = slice(first, position + 1)
                weights = (keys[seen, kv_head] @ q[row, head].double() * scale).softmax(dim=0)
                out[row, head] = weights @ values[seen, kv_head]
            row += 1
    return out


def rounding(q, k, v, context, scale=None):
    """Bound on the float32 error of attention: of the scores, which softmax doubles, and of sums over the context.

    A score is a sum of D products, so it is off by at most (D + 2) units of scale * |q| * |k|; a weight then by twice
    that and by (S + 4) units, and the result, an average of values, by as much of the largest one plus (S + 1) units.
    """
    width = q.shape[-1]
    scale = width**-0.5 if scale is None else scale
    largest = scale * q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max()
    return (UNIT * v.double().abs().max() * (2 * (width + 2) * largest + 2 * context + 5)).item()
