"""Triton kernels over the block pool, one a file.

A kernel is written as a plain function and becomes a Triton kernel by `jit`, after `fill` has decided whose code it is.
Under TRITON_INTERPRET=1 the same kernels run on CPU tensors: slow, and exact in float32 and float16 only.
"""

import triton


def jit(function):
    """triton.jit that keeps the exercise's mark."""
    kernel = triton.jit(function)
    kernel.__exercise__ = function.__exercise__
    return kernel
