import triton.language as tl


def prefill_kernel(
    q, k_cache, v_cache, out, query_start_loc, seq_lens, block_table, num_reqs, table_stride, scale,
    WINDOW: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, QUERIES: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    number, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)  # the longest contexts start first
    r, beyond = 0, num_reqs  # the tiles of r begin at or before number, those of beyond after it
    while beyond - r > 1:
        middle = (r + beyond) // 2
        if tl.load(query_start_loc + middle) // QUERIES + middle <= number:
            r = middle
        else:
            beyond = middle
    start = tl.load(query_start_loc + r)
    count = tl.load(query_start_loc + r + 1) - start
    first_row = (number - start // QUERIES - r) * QUERIES
    if (first_row >= count) | (count == 1):
        return

    m, d, t = tl.arange(0, QUERIES * PADDED), tl.arange(0, COLS), tl.arange(0, TILE)
    row, head = first_row + m // PADDED, m % PADDED  # of the request; of the group
    before = tl.load(seq_lens + r) - count  # tokens of the context before the first row
    real = ((row < count) & (head < GROUP))[:, None] & (d[None, :] < WIDTH)
    place = ((start + row).to(tl.int64) * KV_HEADS + kv_head) * GROUP + head
    queries = tl.load(q + place[:, None] * WIDTH + d[None, :], mask=real, other=0.0)  # [M, COLS]

    end = before + tl.minimum(first_row + QUERIES, count)  # no row of the program sees a key from here on
    begin_tile, edge_tile = 0, (before + first_row + 1) // TILE  # tiles below edge_tile are seen by every row
    if WINDOW > 0:
        begin_tile = tl.maximum(before + first_row - WINDOW + 1, 0) // TILE
        edge_tile = begin_tile
    largest = tl.full([QUERIES * PADDED], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES * PADDED], tl.float32)
    acc = tl.zeros([QUERIES * PADDED, COLS], tl.float32)
    for masked in tl.static_range(2):  # compiled twice: most tiles need no mask
        from_tile, to_tile = begin_tile, edge_tile
        if masked:
            from_tile, to_tile = edge_tile, tl.cdiv(end, TILE)
        for tile in range(from_tile, to_tile):
            position = tile * TILE + t
            block = tl.load(block_table + r * table_stride + position // BLOCK, position < end, other=0).to(tl.int64)
            offset = ((block * BLOCK + position % BLOCK) * KV_HEADS + kv_head) * WIDTH  # [TILE]
            loaded = d[None, :] < WIDTH
            if masked:
                loaded = loaded & (position < end)[:, None]
            k = tl.load(k_cache + offset[:, None] + d[None, :], mask=loaded, other=0.0).to(queries.dtype)
            scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
            if masked:
                seen = position[None, :] <= before + row[:, None]  # [M, TILE]
                if WINDOW > 0:
                    seen = seen & (position[None, :] > before + row[:, None] - WINDOW)
                scores = tl.where(seen, scores, float("-inf"))
            new = tl.maximum(largest, tl.max(scores, 1))
            base = tl.where(new > float("-inf"), new, 0.0)  # a row may see nothing of the first tiles
            shrink = tl.exp2(largest - base)
            weights = tl.exp2(scores - base[:, None])
            v = tl.load(v_cache + offset[:, None] + d[None, :], mask=loaded, other=0.0).to(queries.dtype)
            total = total * shrink + tl.sum(weights, 1)
            acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
            largest = new
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + place[:, None] * WIDTH + d[None, :], acc.to(out.dtype.element_ty), mask=real)
