"""Attention of decode rows over the pool: one program for a request, a KV head and a share of the context."""

from functools import partial

import torch
import triton
import triton.language as tl

from engine.exercises import exercise, fill
from engine.serve.kernels import jit
from engine.serve.kernels.early import goes_early, inputs_ready, launched

TILE = 64  # keys that a program looks at together
DOT = 16  # tl.dot wants at least so many rows


@exercise(32, "Walking the block table")
def decode_kernel(
    q, k_cache, v_cache, outs, lses, query_start_loc, seq_lens, block_table, table_stride, scale,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Program (r, kv_head, split): one decode row over one share of its context.  (Your engine: Chapter 32)

    The row is the only one of request r; the program does the GROUP query heads that share kv_head together.
    q: [N, KV_HEADS * GROUP, WIDTH].  k_cache, v_cache: [blocks, BLOCK, KV_HEADS, WIDTH].  All without gaps.
    outs: [N, KV_HEADS * GROUP, SPLITS, WIDTH], f32, and lses: [N, KV_HEADS * GROUP, SPLITS], f32: what `attend_tiles`
    returns for that share; for a share without keys zeros and lse -inf are stored. If SPLITS is 1, outs is the result
    of the step and may have the model's type: what is stored is cast to it.
    query_start_loc: [R + 1] i32, seq_lens: [R] i32, block_table: [R, ...] i32 with table_stride from row to row.
    A request whose number of rows is not 1 is left alone. A request of length 0 sees nothing.
    The keys are looked at in tiles of TILE positions, tile i being positions i * TILE and on; a tile may span several
    blocks. Split j of the S = SPLITS takes the j-th of S equal shares (rounded up) of the tiles that hold a key in
    sight: positions below seq_lens[r] and, if WINDOW > 0, above seq_lens[r] - 1 - WINDOW. Positions outside have no
    influence, whatever their slots hold: NaN as well; the block table is not read past the context.
    scale: factor of the scores.  ROWS >= GROUP and COLS >= WIDTH are powers of two for tl.arange, at least 16 for
    tl.dot. Scores, softmax and sums in float32; a product of float32 tiles with input_precision="ieee".
    Slots can exceed what 32-bit offsets reach: compute offsets into the pool in 64 bits.
    Grid: (R, KV_HEADS, SPLITS).  Source: PagedAttention (SOSP 2023); Flash-Decoding (2023).
    """
    raise NotImplementedError


@exercise(32, "Splitting a long context")
def merge_kernel(outs, lses, out, query_start_loc, HEADS: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr,
                 WIDTH: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Program (r, head): `merge_splits` for the only row of request r.  (Your engine: Chapter 32)

    outs: [N, HEADS, SPLITS, WIDTH], lses: [N, HEADS, SPLITS], float32, from decode_kernel.  out: [N, HEADS, WIDTH], of
    the model's type: the result.  query_start_loc: [R + 1] i32; a request whose number of rows is not 1 is left alone.
    PADDED >= SPLITS and COLS >= WIDTH are powers of two. A share with lse -inf has no weight, whatever its outs hold;
    a row without any key becomes zero.
    Grid: (R, HEADS).
    """
    raise NotImplementedError


def stages(cols: int, dtype) -> int:
    """Turns of the loop whose loads are under way together: as many as shared memory holds K and V tiles of."""
    row_bytes = cols * dtype.itemsize
    return 4 if row_bytes <= 256 else 3 if row_bytes <= 512 else 2


def decode(q, cache, meta, out, scale, window, splits) -> None:
    """Rows of requests with one row each: q [N, H, D] -> out [N, H, D], other rows untouched."""
    k_cache, v_cache = cache
    heads, width = q.shape[1:]
    kv_heads = k_cache.shape[2]
    group, cols = heads // kv_heads, max(DOT, triton.next_power_of_2(width))
    outs = torch.empty(len(q), heads, splits, width, device=q.device) if splits > 1 else out  # one share is the result
    lses = torch.empty(len(q), heads, splits, device=q.device)
    early = goes_early(len(q), q.device)
    attend, merge = (early_decode, early_merge) if early else (decode_kernel, merge_kernel)
    attend[(meta.num_reqs, kv_heads, splits)](
        q, k_cache, v_cache, outs, lses, meta.query_start_loc, meta.seq_lens, meta.block_table,
        meta.block_table.stride(0), scale,
        WINDOW=window, SPLITS=splits, KV_HEADS=kv_heads, GROUP=group, WIDTH=width, BLOCK=meta.block_size, TILE=TILE,
        ROWS=max(DOT, triton.next_power_of_2(group)), COLS=cols, num_warps=2, num_stages=stages(cols, q.dtype),
        **launched(early),
    )  # fmt: skip
    if splits > 1:
        merge[(meta.num_reqs, heads)](
            outs, lses, out, meta.query_start_loc, heads, splits, triton.next_power_of_2(splits), width, cols,
            **launched(early),
        )  # fmt: skip


def choose_splits(num_reqs: int, kv_heads: int, keys: int, processors: int) -> int:
    """Shares of `keys` keys in sight: enough that few requests, too, keep every multiprocessor busy.

    Up to four programs for each multiprocessor, no share of less than a tile, and a power of two: each number is
    compiled once.
    """
    most = min(4 * processors // max(1, num_reqs * kv_heads), keys // TILE)
    return 1 << max(0, most.bit_length() - 1)


@partial(triton.jit, do_not_specialize=["table_stride"])
def early_decode(
    q, k_cache, v_cache, outs, lses, query_start_loc, seq_lens, block_table, table_stride, scale,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    inputs_ready(True)
    decode_kernel(
        q, k_cache, v_cache, outs, lses, query_start_loc, seq_lens, block_table, table_stride, scale,
        WINDOW, SPLITS, KV_HEADS, GROUP, WIDTH, BLOCK, TILE, ROWS, COLS,
    )  # fmt: skip


@triton.jit
def early_merge(outs, lses, out, query_start_loc, HEADS: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr,
                WIDTH: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    inputs_ready(True)
    merge_kernel(outs, lses, out, query_start_loc, HEADS, SPLITS, PADDED, WIDTH, COLS)


fill(__name__)
decode_kernel, merge_kernel = jit(decode_kernel), jit(merge_kernel)
