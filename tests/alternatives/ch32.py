"""Right answers of chapter 32, built differently."""

from tests.alternatives import alternative

alternative(
    "attend_tiles",
    name="logaddexp",
    source="""
        def attend_tiles(q, tiles, scale):
            q = q.float()
            lse, out = q.new_full((len(q),), -torch.inf), torch.zeros_like(q)  # out is normalised all the time
            for k, v, seen in tiles:
                scores = torch.where(seen, q @ k.float().T * scale, -torch.inf)
                new = torch.logaddexp(lse, scores.logsumexp(1))
                safe = torch.where(new > -torch.inf, new, 0)[:, None]
                values = torch.where(seen.any(0)[:, None], v.float(), 0)
                out = out * (lse[:, None] - safe).exp() + (scores - safe).exp() @ values
                lse = new
            return out, lse
    """,
)
alternative(
    "attend_tiles",
    name="parts-merged",
    source="""
        def attend_tiles(q, tiles, scale):
            outs, lses = [torch.zeros(q.shape)], [torch.full((len(q),), -torch.inf)]
            for k, v, seen in tiles:
                blank = ~seen.any(0)[:, None]
                k, v = (x.float().masked_fill(blank, 0) for x in (k, v))
                scores = (scale * q.float() @ k.T).masked_fill(~seen, -torch.inf)
                outs.append(scores.softmax(1).nan_to_num(0) @ v)
                lses.append(scores.logsumexp(1))
            return merge_splits(torch.stack(outs), torch.stack(lses))
    """,
)
alternative(
    "merge_splits",
    name="softmax-of-lses",
    source="""
        def merge_splits(outs, lses):
            weights = lses.softmax(0).nan_to_num(0)[..., None]
            return torch.where(weights > 0, outs * weights, 0).sum(0), lses.logsumexp(0)
    """,
)
alternative(
    "merge_splits",
    name="two-at-a-time",
    source="""
        def merge_splits(outs, lses):
            out, lse = torch.zeros_like(outs[0]), torch.full_like(lses[0], -torch.inf)
            for part, more in zip(outs, lses, strict=True):
                a, b = (x.masked_fill(torch.maximum(lse, more) == -torch.inf, 0) for x in (lse, more))
                share = torch.sigmoid(b - a)[:, None]  # exp(more) / (exp(lse) + exp(more))
                mixed = out + share * (part - out)
                out = torch.where((more == -torch.inf)[:, None], out, mixed)
                lse = torch.logaddexp(lse, more)
            return out, lse
    """,
)
alternative(
    "SdpaBackend.forward",
    name="permuted",
    source="""
        def forward(self, q, cache, meta, scale=None, window=0):
            (n, heads, width), kv_heads = q.shape, cache[0].shape[2]
            group = heads // kv_heads
            by_head = q.view(n, kv_heads, group, width)
            out = by_head.new_zeros(n, kv_heads, group, width)
            for rows, blocks, unused, mask in self.plans(meta, window, group):
                requests, t = rows.shape
                k = gather(cache[0], blocks, unused)
                v = gather(cache[1], blocks, unused)
                queries = by_head[rows].permute(0, 2, 1, 3, 4).reshape(requests, kv_heads, t * group, width)
                bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -torch.inf)
                got = F.scaled_dot_product_attention(queries, k, v, attn_mask=bias, scale=scale)
                got = got.reshape(requests, kv_heads, t, group, width).permute(0, 2, 1, 3, 4)
                out.index_copy_(0, rows.flatten(), got.reshape(requests * t, kv_heads, group, width))
            return out.reshape(n, heads, width)
    """,
)
alternative(
    "write_kernel",
    name="piece-by-piece",
    source="""
        def write_kernel(k, v, k_cache, v_cache, slot_mapping, k_stride, v_stride, ROW: tl.constexpr,
                         PADDED: tl.constexpr):
            n = tl.program_id(0)
            slot = tl.load(slot_mapping + n)
            if slot < 0:
                return
            for begin in range(0, ROW, 16):
                i = begin + tl.arange(0, 16)
                x = tl.load(k + n * k_stride + i, mask=i < ROW, other=0.0)
                y = tl.load(v + n * v_stride + i, mask=i < ROW, other=0.0)
                tl.store(k_cache + slot * ROW + i, x.to(k_cache.dtype.element_ty), mask=i < ROW)
                tl.store(v_cache + slot * ROW + i, y.to(v_cache.dtype.element_ty), mask=i < ROW)
    """,
)
SIGNATURE = """q, k_cache, v_cache, outs, lses, query_start_loc, seq_lens, block_table, table_stride, scale,
            WINDOW: tl.constexpr, SPLITS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
            WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr"""
alternative(
    "decode_kernel",
    name="powers-of-two",
    source=f"""
        def decode_kernel({SIGNATURE}):
            r, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
            row, after = tl.load(query_start_loc + r), tl.load(query_start_loc + r + 1)
            length = tl.load(seq_lens + r)
            g, d, t = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :], tl.arange(0, TILE)
            factor = scale * 1.4426950408889634  # log2(e): exp(x) is exp2 of x times that
            if after - row == 1:
                first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
                tiles = (length + TILE - 1) // TILE - first // TILE
                share = (tiles + SPLITS - 1) // SPLITS
                begin = (first // TILE + split * share) * TILE
                stop = tl.minimum(begin + share * TILE, length)
                head = (row * KV_HEADS + kv_head) * GROUP + g
                x = tl.load(q + head * WIDTH + d, mask=(g < GROUP) & (d < WIDTH), other=0.0)
                top = tl.full([ROWS, 1], float("-inf"), tl.float32)
                total, acc = tl.zeros([ROWS, 1], tl.float32), tl.zeros([ROWS, COLS], tl.float32)
                for at in range(begin, stop, TILE):
                    p = at + t
                    ok = (p >= first) & (p < stop)
                    block = tl.load(block_table + r * table_stride + p // BLOCK, mask=ok, other=0)
                    slot = block.to(tl.int64) * BLOCK + p % BLOCK
                    where = slot[:, None] * (KV_HEADS * WIDTH) + kv_head * WIDTH + d
                    keys = tl.load(k_cache + where, mask=ok[:, None] & (d < WIDTH), other=0.0).to(x.dtype)
                    values = tl.load(v_cache + where, mask=ok[:, None] & (d < WIDTH), other=0.0).to(x.dtype)
                    s = tl.dot(x, tl.trans(keys), input_precision="ieee") * factor
                    s = tl.where(ok[None, :], s, float("-inf"))
                    more = tl.maximum(top, tl.max(s, 1)[:, None])
                    w = tl.exp2(s - more)
                    total = total * tl.exp2(top - more) + tl.sum(w, 1)[:, None]
                    acc = tl.dot(w.to(x.dtype), values, acc * tl.exp2(top - more), input_precision="ieee")
                    top = more
                place = head * SPLITS + split
                lse = tl.where(total > 0, (top + tl.log2(total)) / 1.4426950408889634, float("-inf"))
                tl.store(lses + place, lse, mask=g < GROUP)
                acc = tl.where(total > 0, acc / total, 0.0)
                tl.store(outs + place * WIDTH + d, acc, mask=(g < GROUP) & (d < WIDTH))
    """,
)
alternative(
    "decode_kernel",
    name="without-dot",
    source=f"""
        def decode_kernel({SIGNATURE}):
            r, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
            row = tl.load(query_start_loc + r)
            if tl.load(query_start_loc + r + 1) - row != 1:
                return
            end = tl.load(seq_lens + r)
            start = end * 0
            if WINDOW > 0:
                start = tl.maximum(end - WINDOW, 0)
            base_tile = start // TILE
            share = tl.cdiv(tl.cdiv(end, TILE) - base_tile, SPLITS)
            g, d, t = tl.arange(0, ROWS), tl.arange(0, COLS), tl.arange(0, TILE)
            head = (row * KV_HEADS + kv_head) * GROUP + g
            real = (g < GROUP)[:, None] & (d < WIDTH)[None, :]
            x = tl.load(q + head[:, None] * WIDTH + d[None, :], mask=real, other=0.0).to(tl.float32)
            top = tl.full([ROWS], -1e30, tl.float32)  # finite: no -inf - -inf
            total, acc = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, COLS], tl.float32)
            for i in range(share):
                p = (base_tile + split * share + i) * TILE + t
                ok = (p >= start) & (p < end)
                block = tl.load(block_table + r * table_stride + p // BLOCK, mask=ok, other=0).to(tl.int64)
                where = (((block * BLOCK + p % BLOCK) * KV_HEADS + kv_head) * WIDTH)[:, None] + d[None, :]
                loaded = ok[:, None] & (d < WIDTH)[None, :]
                keys = tl.load(k_cache + where, mask=loaded, other=0.0).to(tl.float32)
                s = tl.sum(x[:, None, :] * keys[None, :, :], 2) * scale
                s = tl.where(ok[None, :], s, float("-inf"))
                more = tl.maximum(top, tl.max(s, 1))
                w = tl.exp(s - more[:, None])
                values = tl.load(v_cache + where, mask=loaded, other=0.0).to(tl.float32)
                total = total * tl.exp(top - more) + tl.sum(w, 1)
                acc = acc * tl.exp(top - more)[:, None] + tl.sum(w[:, :, None] * values[None, :, :], 1)
                top = more
            place = head * SPLITS + split
            some = tl.where(total > 0, total, 1.0)
            tl.store(lses + place, tl.where(total > 0, top + tl.log(some), float("-inf")), mask=g < GROUP)
            tl.store(outs + place[:, None] * WIDTH + d[None, :], acc / some[:, None], mask=real)
    """,
)
alternative(
    "merge_kernel",
    name="share-by-share",
    source="""
        def merge_kernel(outs, lses, out, query_start_loc, HEADS: tl.constexpr, SPLITS: tl.constexpr,
                         PADDED: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr):
            r, head = tl.program_id(0), tl.program_id(1)
            row, d = tl.load(query_start_loc + r), tl.arange(0, COLS)
            if tl.load(query_start_loc + r + 1) == row + 1:
                first = (row * HEADS + head) * SPLITS
                top, total, acc = -1e30, 0.0, tl.zeros([COLS], tl.float32)
                for s in range(SPLITS):
                    lse = tl.load(lses + first + s)
                    more = tl.maximum(top, lse)
                    part = tl.load(outs + (first + s) * WIDTH + d, d < WIDTH, 0.0)
                    part = tl.where(lse > float("-inf"), part, 0.0)
                    total = total * tl.exp(top - more) + tl.exp(lse - more)
                    acc = acc * tl.exp(top - more) + part * tl.exp(lse - more)
                    top = more
                acc = tl.where(total > 0, acc / tl.maximum(total, 1e-30), 0.0)
                tl.store(out + (row * HEADS + head) * WIDTH + d, acc.to(out.dtype.element_ty), d < WIDTH)
    """,
)
alternative(
    "prefill_kernel",
    name="linear-search",
    source="""
        def prefill_kernel(
            q, k_cache, v_cache, out, query_start_loc, seq_lens, block_table, num_reqs, table_stride, scale,
            WINDOW: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr,
            WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, QUERIES: tl.constexpr, COLS: tl.constexpr,
        ):
            i, kv_head = tl.program_id(0), tl.program_id(1)
            r = -1
            for other in range(num_reqs):
                if tl.load(query_start_loc + other) // QUERIES + other <= i:
                    r += 1
            begin, after = tl.load(query_start_loc + r), tl.load(query_start_loc + r + 1)
            length = tl.load(seq_lens + r)
            m, d = tl.arange(0, QUERIES * PADDED)[:, None], tl.arange(0, COLS)[None, :]
            row = begin + (i - r - begin // QUERIES) * QUERIES + m // PADDED  # of q
            p = length - after + row  # where it stands
            mine = (row < after) & (m % PADDED < GROUP)
            oldest = tl.min(p)
            if (oldest < length) & (after - begin > 1):
                at = (row * (KV_HEADS * GROUP) + kv_head * GROUP + m % PADDED) * WIDTH + d
                x = tl.load(q + at, mask=mine & (d < WIDTH), other=0.0)
                stop = tl.minimum(oldest + QUERIES, length)
                tile = (tl.maximum(oldest - WINDOW + 1, 0) if WINDOW > 0 else 0) // TILE * TILE
                top = tl.full([QUERIES * PADDED, 1], -1e30, tl.float32)  # finite: no -inf - -inf
                total, acc = top * 0, tl.zeros([QUERIES * PADDED, COLS], tl.float32)
                while tile < stop:
                    key = tile + tl.arange(0, TILE)
                    block = tl.load(block_table + r * table_stride + key // BLOCK, mask=key < stop, other=0)
                    slot = block.to(tl.int64) * BLOCK + key % BLOCK
                    where = (slot * KV_HEADS + kv_head)[:, None] * WIDTH + d
                    ok = (key < stop)[:, None] & (d < WIDTH)
                    keys = tl.load(k_cache + where, mask=ok, other=0.0).to(x.dtype)
                    values = tl.load(v_cache + where, mask=ok, other=0.0).to(x.dtype)
                    behind = p - key[None, :]
                    seen = (behind >= 0) & (behind < WINDOW) if WINDOW > 0 else behind >= 0
                    s = tl.where(seen, tl.dot(x, tl.trans(keys), input_precision="ieee") * scale, float("-inf"))
                    more = tl.maximum(top, tl.max(s, 1)[:, None])
                    w = tl.exp(s - more)
                    total = total * tl.exp(top - more) + tl.sum(w, 1)[:, None]
                    acc = acc * tl.exp(top - more) + tl.dot(w.to(x.dtype), values, input_precision="ieee")
                    top = more
                    tile += TILE
                tl.store(out + at, (acc / tl.maximum(total, 1e-30)).to(out.dtype.element_ty), mask=mine & (d < WIDTH))
    """,
)
