import triton.language as tl

from engine.serve.kernels.early import inputs_ready


def matvec_kernel(
    x, weight, bias, out, outputs,
    WIDTH: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    n, o, i = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    real, used = o < outputs, i < WIDTH
    place, loaded = o.to(tl.int64)[:, None] * WIDTH + i[None, :], real[:, None] & used[None, :]
    gate = tl.load(weight + place, mask=loaded, other=0.0)  # [ROWS, COLS]
    if GATED:
        up = tl.load(weight + tl.cast(outputs, tl.int64) * WIDTH + place, mask=loaded, other=0.0)
    if BIAS:
        gate_bias = tl.load(bias + o, mask=real, other=0.0).to(tl.float32)
        if GATED:
            up_bias = tl.load(bias + outputs + o, mask=real, other=0.0).to(tl.float32)

    inputs_ready(EARLY)
    row = tl.load(x + n * WIDTH + i, mask=used, other=0.0).to(tl.float32)[None, :]
    y = tl.sum(gate.to(tl.float32) * row, 1)
    if BIAS:
        y += gate_bias
    y = y.to(out.dtype.element_ty)
    if GATED:
        z = tl.sum(up.to(tl.float32) * row, 1)
        if BIAS:
            z += up_bias
        wide = y.to(tl.float32)
        silu = (wide / (1 + tl.exp(-wide))).to(y.dtype).to(tl.float32)
        y = (silu * z.to(y.dtype).to(tl.float32)).to(y.dtype)
    tl.store(out + n * outputs + o, y, mask=real)
