import triton.language as tl


def rope_write_kernel(
    qkv, cos, sin, q_weight, k_weight, q, k_cache, v_cache, slot_mapping, eps,
    NORM: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    n, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HALF: tl.constexpr = WIDTH // 2
    i = tl.arange(0, COLS)
    used = i < HALF
    source = (n * (HEADS + 2 * KV_HEADS) + h) * WIDTH + i
    x1, x2 = tl.load(qkv + source, used, other=0.0), tl.load(qkv + source + HALF, used, other=0.0)
    if h < HEADS + KV_HEADS:
        y1, y2 = x1.to(tl.float32), x2.to(tl.float32)
        if NORM:
            factor = tl.rsqrt((tl.sum(y1 * y1, 0) + tl.sum(y2 * y2, 0)) / WIDTH + eps)
            weight = k_weight
            if h < HEADS:
                weight = q_weight
            y1, y2 = (y1 * factor).to(x1.dtype).to(tl.float32), (y2 * factor).to(x1.dtype).to(tl.float32)
            y1 = (y1 * tl.load(weight + i, used, other=0.0).to(tl.float32)).to(x1.dtype).to(tl.float32)
            y2 = (y2 * tl.load(weight + i + HALF, used, other=0.0).to(tl.float32)).to(x1.dtype).to(tl.float32)
        c, s = tl.load(cos + n * WIDTH + i, used), tl.load(sin + n * WIDTH + i, used)
        x1, x2 = (y1 * c - y2 * s).to(x1.dtype), (y2 * c + y1 * s).to(x1.dtype)
    if h < HEADS:
        place = q + (n * HEADS + h) * WIDTH + i
        tl.store(place, x1, used)
        tl.store(place + HALF, x2, used)
    else:
        slot, kv_head = tl.load(slot_mapping + n), (h - HEADS) % KV_HEADS
        pool = v_cache
        if h < HEADS + KV_HEADS:
            pool = k_cache
        target = pool + (slot * KV_HEADS + kv_head) * WIDTH + i
        tl.store(target, x1.to(pool.dtype.element_ty), used & (slot >= 0))
        tl.store(target + HALF, x2.to(pool.dtype.element_ty), used & (slot >= 0))
