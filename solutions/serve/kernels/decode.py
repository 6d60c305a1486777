import triton.language as tl


def decode_kernel(
    q, k_cache, v_cache, outs, lses, query_start_loc, seq_lens, block_table, table_stride, scale,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    r, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, length = tl.load(query_start_loc + r).to(tl.int64), tl.load(seq_lens + r)
    if tl.load(query_start_loc + r + 1) - row != 1:
        return
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    first_tile, end_tile = first // TILE, tl.cdiv(length, TILE)
    share = tl.cdiv(end_tile - first_tile, SPLITS)
    begin = first_tile + split * share
    end = tl.minimum(begin + share, end_tile)

    g, d, t = tl.arange(0, ROWS), tl.arange(0, COLS), tl.arange(0, TILE)
    heads = row * KV_HEADS * GROUP + kv_head * GROUP + g  # [ROWS], counted over all rows of q
    real = (g[:, None] < GROUP) & (d[None, :] < WIDTH)
    queries = tl.load(q + heads[:, None] * WIDTH + d[None, :], mask=real, other=0.0)  # [ROWS, COLS]

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for tile in range(begin, end):
        position = tile * TILE + t
        seen = (position >= first) & (position < length)
        block = tl.load(block_table + r * table_stride + position // BLOCK, mask=seen, other=0).to(tl.int64)
        offset = ((block * BLOCK + position % BLOCK) * KV_HEADS + kv_head) * WIDTH  # [TILE]
        loaded = seen[:, None] & (d[None, :] < WIDTH)
        k = tl.load(k_cache + offset[:, None] + d[None, :], mask=loaded, other=0.0).to(queries.dtype)  # [TILE, COLS]
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))  # [ROWS, TILE]; a tile has at least one seen
        new = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp(largest - new)
        weights = tl.exp(scores - new[:, None])
        v = tl.load(v_cache + offset[:, None] + d[None, :], mask=loaded, other=0.0).to(queries.dtype)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = new

    divisor = tl.where(total > 0, total, 1.0)  # a share without keys: zeros, and lse stays -inf
    acc = acc / divisor[:, None]
    place = heads * SPLITS + split
    tl.store(lses + place, largest + tl.log(divisor), mask=g < GROUP)
    tl.store(outs + place[:, None] * WIDTH + d[None, :], acc, mask=real)


def merge_kernel(outs, lses, out, query_start_loc, HEADS: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr,
                 WIDTH: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    r, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(query_start_loc + r).to(tl.int64)
    if tl.load(query_start_loc + r + 1) - row != 1:
        return
    place = row * HEADS + head
    s, d = tl.arange(0, PADDED), tl.arange(0, COLS)
    lse = tl.load(lses + place * SPLITS + s, mask=s < SPLITS, other=float("-inf"))
    largest = tl.max(lse, 0)
    weights = tl.exp(lse - tl.where(largest > float("-inf"), largest, 0.0))
    stored = (s < SPLITS)[:, None] & (d[None, :] < WIDTH)
    parts = tl.load(outs + (place * SPLITS + s)[:, None] * WIDTH + d[None, :], mask=stored, other=0.0)
    parts = tl.where(weights[:, None] > 0, parts, 0.0)
    total = tl.sum(weights, 0)
    merged = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + place * WIDTH + d, merged.to(out.dtype.element_ty), mask=d < WIDTH)
