import triton.language as tl


def write_kernel(k, v, k_cache, v_cache, slot_mapping, k_stride, v_stride, ROW: tl.constexpr, PADDED: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + n)
    i = tl.arange(0, PADDED)
    used = (i < ROW) & (slot >= 0)
    tl.store(k_cache + slot * ROW + i, tl.load(k + n * k_stride + i, used), used)
    tl.store(v_cache + slot * ROW + i, tl.load(v + n * v_stride + i, used), used)
