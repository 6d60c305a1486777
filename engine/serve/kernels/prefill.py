"""Attention of prefill chunks over the pool: one program for a tile of a request's rows and a KV head."""

import triton
import triton.language as tl

from engine.exercises import exercise, fill
from engine.serve.kernels import jit
from engine.serve.kernels.decode import DOT, stages

TILE = 64  # keys that a program looks at together
ROWS = 128  # (row, head) pairs of a program: ROWS / group rows of one request, all heads of a group


@exercise(32, "Prefill tiles")
def prefill_kernel(
    q, k_cache, v_cache, out, query_start_loc, seq_lens, block_table, num_reqs, table_stride, scale,
    WINDOW: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, QUERIES: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Program (i, kv_head): the i-th tile of QUERIES rows of some request.  (Your engine: Chapter 32)

    It does the GROUP query heads that share kv_head together.
    q, out: [N, KV_HEADS * GROUP, WIDTH]; the pools, query_start_loc, seq_lens, block_table and scale as in
    decode_kernel; num_reqs is R.
    Whose tile: the tiles of request r begin at number query_start_loc[r] // QUERIES + r. So r is the last request whose
    tiles begin at or before i; find it by halving. A request may have fewer tiles than numbers: such a program, and
    one whose request has a single row (a decode, or padding), does nothing. In which order the numbers 0 to n - 1 are
    dealt to the n programs of the first axis, n = tl.num_programs(0), is free.
    With t rows and length s, row j of the request stands at position s - t + j and sees keys at positions up to its
    own and, if WINDOW > 0, above its own - WINDOW. Keys are looked at in tiles of TILE positions; tiles that no row of
    the program sees are not loaded. Positions from s on have no influence, whatever their slots hold: NaN as well.
    The QUERIES * PADDED pairs (row, head) are the rows of one tl.dot: pair m is row m // PADDED, head m % PADDED of the
    group; PADDED >= GROUP and COLS >= WIDTH are powers of two.
    Every row of a request with more than one row is stored, in out's type. Numbers as in decode_kernel.
    Grid: (N // QUERIES + R, KV_HEADS).  Source: FlashAttention-2 (2023); the tile search is that of vLLM's unified
    attention kernel.
    """
    raise NotImplementedError


def prefill(q, cache, meta, out, scale, window) -> None:
    """Rows of requests with more than one row: q [N, H, D] -> out [N, H, D], other rows untouched."""
    k_cache, v_cache = cache
    heads, width = q.shape[1:]
    kv_heads = k_cache.shape[2]
    padded = triton.next_power_of_2(heads // kv_heads)
    cols = max(DOT, triton.next_power_of_2(width))
    rows = ROWS if cols * q.element_size() <= 256 else ROWS // 2  # registers hold queries and sums
    queries = max(1, rows // padded)
    prefill_kernel[(len(q) // queries + meta.num_reqs, kv_heads)](
        q, k_cache, v_cache, out, meta.query_start_loc, meta.seq_lens, meta.block_table, meta.num_reqs,
        meta.block_table.stride(0), scale,
        WINDOW=window, KV_HEADS=kv_heads, GROUP=heads // kv_heads, PADDED=padded, WIDTH=width, BLOCK=meta.block_size,
        TILE=TILE, QUERIES=queries, COLS=cols, num_warps=4, num_stages=min(3, stages(cols, q.dtype)),
    )  # fmt: skip


fill(__name__)
prefill_kernel = jit(prefill_kernel)
