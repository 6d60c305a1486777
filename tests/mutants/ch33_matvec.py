"""Wrong answers to matvec_kernel."""

from tests.mutants.ch33_kernels import wrong

PLAIN, GATED = "test_rows_times_a_matrix", "test_rows_times_two_matrices_gated"
BIASED, LONG = "test_the_bias_is_part_of_the_sum", "test_sums_are_float32"
LATE, BEFORE = "test_x_is_loaded_once_inputs_are_ready", "test_weights_are_loaded_before_inputs_are_ready"
MATVEC, READY = "matvec_kernel", "    inputs_ready(EARLY)\n"
X = "row = tl.load(x + n * WIDTH + i, mask=used, other=0.0)"
wrong(MATVEC, "x-too-early", READY + "    " + X,
      "    " + X.replace("row =", "early =") + "\n" + READY + "    row = early", LATE,
      "all loads come first")  # fmt: skip
wrong(MATVEC, "weights-too-late", READY, "    gate = tl.load(weight + place, mask=loaded, other=0.0)\n", BEFORE,
      "wait first, then load")  # fmt: skip
wrong(MATVEC, "wait-in-the-first-program", READY, "    if tl.program_id(1) == 0:\n        inputs_ready(EARLY)\n", LATE,
      "once is once for the launch")  # fmt: skip
wrong(MATVEC, "out-cleared-early", READY, "    tl.store(out + n * outputs + o, o.to(out.dtype.element_ty), mask=real)\n"
      + READY, LATE, "nobody needs out yet")  # fmt: skip
wrong(MATVEC, "never-asks", READY, "", LATE, "x is there when the kernel runs")
wrong(MATVEC, "asks-always", READY, "    inputs_ready(True)\n", "test_without_early_nobody_waits",
      "a wait does no harm")  # fmt: skip
wrong(MATVEC, "first-row", X, X.replace("n * WIDTH + i", "i"), PLAIN, "there is one row")
wrong(MATVEC, "first-outputs", "tl.program_id(1) * ROWS + tl.arange(0, ROWS)", "tl.arange(0, ROWS)", PLAIN,
      "a program does all outputs")  # fmt: skip
wrong(MATVEC, "padded-rows", "[:, None] * WIDTH + i[None, :], real", "[:, None] * COLS + i[None, :], real", PLAIN,
      "rows lie COLS apart")  # fmt: skip
wrong(MATVEC, "outputs-unmasked", "real, used = o < outputs, i < WIDTH", "real, used = o >= 0, i < WIDTH", PLAIN,
      "outputs are a multiple of ROWS")  # fmt: skip
wrong(MATVEC, "columns-unmasked", "real, used = o < outputs, i < WIDTH", "real, used = o < outputs, i < COLS", PLAIN,
      "WIDTH is a power of two")  # fmt: skip
wrong(MATVEC, "narrow-sum", "tl.sum(gate.to(tl.float32) * row, 1)",
      "tl.sum((gate.to(tl.float32) * row).to(out.dtype.element_ty), 1).to(tl.float32)", LONG,
      "products may be rounded")  # fmt: skip
wrong(MATVEC, "bias-after-rounding", "        y += gate_bias\n    y = y.to(out.dtype.element_ty)\n",
      "        y = y.to(out.dtype.element_ty).to(tl.float32) + gate_bias\n    y = y.to(out.dtype.element_ty)\n", BIASED,
      "F.linear rounds, then adds")  # fmt: skip
wrong(MATVEC, "up-without-bias", "            z += up_bias\n", "            z += 0\n", BIASED,
      "only the gate has a bias")  # fmt: skip
wrong(MATVEC, "bias-of-the-gate", "bias + outputs + o", "bias + o", BIASED, "gate and up share a bias")
wrong(MATVEC, "up-is-next", "tl.cast(outputs, tl.int64) * WIDTH + place", "WIDTH + place", GATED,
      "gate and up take turns, row by row")  # fmt: skip
wrong(MATVEC, "silu-of-up", "wide = y.to(tl.float32)", "y, z = z.to(out.dtype.element_ty), y.to(tl.float32)\n"
      "        wide = y.to(tl.float32)", GATED, "up comes first")  # fmt: skip
wrong(MATVEC, "one-rounding", "silu = (wide / (1 + tl.exp(-wide))).to(y.dtype).to(tl.float32)",
      "silu = wide / (1 + tl.exp(-wide))", GATED, "one rounding at the end is more exact")  # fmt: skip
wrong(MATVEC, "overflow", "silu = (wide / (1 + tl.exp(-wide)))", "silu = (wide * tl.exp(wide) / (1 + tl.exp(wide)))",
      "test_gated_sums_of_any_size", "a e^a / (1 + e^a) is the same number")  # fmt: skip
FAR, OUTSIDE = "test_offsets_have_64_bits", "test_nothing_outside_is_loaded"
wrong(MATVEC, "rows-in-32-bits", "o.to(tl.int64)[:, None] * WIDTH", "o[:, None] * WIDTH", FAR, "offsets are small")
wrong(MATVEC, "up-in-32-bits", "tl.cast(outputs, tl.int64) * WIDTH", "outputs * WIDTH", FAR, "offsets are small")
wrong(MATVEC, "up-behind-the-matrix", "* WIDTH + place, mask=loaded", "* WIDTH + place, mask=used[None, :]", OUTSIDE,
      "what is not stored may be loaded")  # fmt: skip
wrong(MATVEC, "bias-behind-its-end", "        gate_bias = tl.load(bias + o, mask=real, other=0.0)",
      "        gate_bias = tl.load(bias + o)", OUTSIDE, "what is not stored may be loaded")  # fmt: skip
