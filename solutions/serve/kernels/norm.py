import triton.language as tl


def add_norm_kernel(x, residual, weight, normed, eps, ADD: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr):
    n, d = tl.program_id(0).to(tl.int64), tl.arange(0, COLS)
    place, used = n * WIDTH + d, d < WIDTH
    total = tl.load(residual + place, mask=used, other=0.0)
    if ADD:
        total = (total.to(tl.float32) + tl.load(x + place, mask=used, other=0.0).to(tl.float32)).to(total.dtype)
        tl.store(residual + place, total, mask=used)
    wide = total.to(tl.float32)
    scaled = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)).to(total.dtype).to(tl.float32)
    factor = tl.load(weight + d, mask=used, other=0.0).to(tl.float32)
    tl.store(normed + place, (scaled * factor).to(total.dtype), mask=used)
