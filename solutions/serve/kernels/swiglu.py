import triton.language as tl


def swiglu_kernel(gate_up, out, WIDTH: tl.constexpr, COLS: tl.constexpr):
    n, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLS + tl.arange(0, COLS)
    used = i < WIDTH
    gate = tl.load(gate_up + n * 2 * WIDTH + i, mask=used, other=0.0)
    up = tl.load(gate_up + n * 2 * WIDTH + WIDTH + i, mask=used, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + n * WIDTH + i, (silu * up.to(tl.float32)).to(gate.dtype), mask=used)
