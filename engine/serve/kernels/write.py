"""K and V of a step into the pools: one program a row."""

import triton
import triton.language as tl

from engine.exercises import exercise, fill
from engine.serve.kernels import jit


@exercise(32, "Writing the pool")
def write_kernel(k, v, k_cache, v_cache, slot_mapping, k_stride, v_stride, ROW: tl.constexpr, PADDED: tl.constexpr):
    """Program n copies row n of K and V into its slot.  (Your engine: Chapter 32)

    k, v: pointers to [N, ROW]; row n begins k_stride (v_stride) elements after row n - 1, its ROW = Hkv * D elements
    lie side by side.  k_cache, v_cache: pointers to [slots, ROW], without gaps.  slot_mapping: pointer to [N] i64.
    PADDED: the power of two from ROW on, for tl.arange.
    A row whose slot is -1 is padding: nothing is stored for it.  Values are cast to the type of the pool.
    A pool holds more than 2**31 elements: compute offsets into it in 64 bits.
    Grid: (N,).  Source: reshape_and_cache of vLLM.
    """
    raise NotImplementedError


def write_kv(k_cache, v_cache, k, v, slot_mapping) -> None:
    """As chapter 31's write_kv, in one launch; padding rows go nowhere.

    k_cache, v_cache: [num_blocks + 1, block_size, Hkv, D].  k, v: [N, Hkv, D], of any stride between rows.
    """
    row = k.shape[1] * k.shape[2]
    k, v = (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (k, v))
    if len(k):
        write_kernel[(len(k),)](
            k, v, k_cache, v_cache, slot_mapping, k.stride(0), v.stride(0), row, triton.next_power_of_2(row),
            num_warps=1,
        )  # fmt: skip


fill(__name__)
write_kernel = jit(write_kernel)
