"""Adds two vectors with a Triton kernel; `run.py doctor` runs it with TRITON_INTERPRET=1."""

import torch
import triton
import triton.language as tl


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=inside) + tl.load(y_ptr + at, mask=inside), mask=inside)


if __name__ == "__main__":
    x, y = torch.arange(100.0), torch.arange(100.0) * 3
    out = torch.empty_like(x)
    add_kernel[(2,)](x, y, out, 100, BLOCK=64)
    if not torch.equal(out, x + y):
        raise SystemExit("the kernel's sum is wrong")
