"""Triton kernels over the block pool, one a file.

A kernel is written as a plain function and becomes a Triton kernel by `jit`, after `fill` has decided whose code it is.
Under TRITON_INTERPRET=1 the same kernels run on CPU tensors: slow, and exact in float32 and float16 only.
"""

import inspect

import triton

CHANGING = {"num_reqs", "table_stride"}  # from step to step: not worth a compilation each for 1 and multiples of 16


def jit(function):
    """triton.jit that keeps the exercise's mark."""
    names = inspect.signature(function).parameters
    kernel = triton.jit(function, do_not_specialize=sorted(CHANGING & set(names)))
    kernel.__exercise__ = function.__exercise__
    return kernel
