"""decode_kernel: every share of every row's context, against float64 over exactly its positions."""

import pytest
import torch

from engine.serve.kernels.decode import decode_kernel
from tests.ch32.device import CUDA, DTYPES
from tests.ch32.paged import SENTINEL, PagedStep, guarded, two
from tests.grading import expect, expect_close, grades

WALKING = "32: Walking the block table"


def shares(length, window, splits, tile):
    """The range of positions of each share."""
    first = max(0, length - window) if window > 0 else 0
    first_tile, end_tile = first // tile, -(-length // tile)
    share = -(-(end_tile - first_tile) // splits)
    for j in range(splits):
        begin = first_tile + j * share
        end = max(begin, min(begin + share, end_tile))
        yield range(max(first, begin * tile), min(length, end * tile)) if begin < end else range(0, 0)


def launch(step, splits, window=0, tile=64, scale=None):
    """(outs [N, H, SPLITS, D], lses [N, H, SPLITS]) on the CPU."""
    group = step.heads // step.kv_heads
    outs, around_outs = guarded((len(step.q), step.heads, splits, step.width))
    lses, around_lses = guarded((len(step.q), step.heads, splits))
    meta, table = step.meta, step.meta.block_table
    decode_kernel[(len(step.shapes), step.kv_heads, splits)](
        step.q, *step.cache, outs, lses, meta.query_start_loc, meta.seq_lens, table, table.stride(0), step.scale(scale),
        WINDOW=window, SPLITS=splits, KV_HEADS=step.kv_heads, GROUP=group, WIDTH=step.width, BLOCK=step.size, TILE=tile,
        ROWS=max(16, two(group)), COLS=max(16, two(step.width)),
    )  # fmt: skip
    around_outs("decode_kernel", WALKING)
    around_lses("decode_kernel", WALKING)
    return outs.cpu(), lses.cpu()


def check(step, splits, window=0, tile=64, scale=None, hint=None):
    outs, lses = launch(step, splits, window, tile, scale)
    atol, _, lse_atol = step.bounds(scale)
    for r, (s, t) in enumerate(step.shapes):
        row = step.starts[r]
        if t > 1:
            mine = slice(row, row + t)
            same = (outs[mine] == SENTINEL).all() and (lses[mine] == SENTINEL).all()
            why = "its rows are the prefill kernel's"
            expect(same, f"decode_kernel stores something for request {r}, which has {t} rows", why, WALKING)
            continue
        for j, keys in enumerate(shares(s, window, splits, tile)):
            where = f"share {j} of {splits} of {step.where(row)}" + (f", window {window}" if window else "")
            if not keys:
                why = "a share without keys: lse -inf"
                expected = torch.full((step.heads,), -torch.inf)
                expect_close(lses[row, :, j], expected, 0.0, 0.0, f"lse of head {{i}}, {where}", why, WALKING)
                zeros = torch.zeros(step.heads, step.width)
                why = "a share without keys: zeros, not 0 / 0"
                expect_close(outs[row, :, j], zeros, 0.0, 0.0, f"outs [head, d] {{i}}, {where}", why, WALKING)
                continue
            where += f" (positions {keys.start} to {keys.stop - 1})"
            out, lse = step.attend(r, scale, within=keys)
            expect_close(lses[row, :, j], lse[0], lse_atol, 0.0, f"lse of head {{i}}, {where}", hint, WALKING)
            expect_close(outs[row, :, j], out[0], atol, 0.0, f"outs [head, d] {{i}}, {where}", hint, WALKING)


CASES = {  # heads, KV heads, width, block size, tile, splits
    "one head each": (2, 2, 64, 16, 64, 1),
    "groups of 3": (6, 2, 24, 8, 32, 2),
    "groups of 8": (8, 1, 80, 32, 64, 5),
    "groups of 16, large blocks": (16, 1, 64, 128, 64, 8),
    "groups of 17": (34, 2, 16, 12, 32, 3),
}


@grades(decode_kernel)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_each_share_of_a_decode(name, dtype):
    """Contexts around a block, around a tile, and long ones, in scattered blocks; NaN wherever nobody wrote."""
    heads, kv_heads, width, size, tile, splits = CASES[name]
    contexts = [1, size - 1, size, size + 1, tile - 1, tile, tile + 1, 200]
    step = PagedStep(name, [(s, 1) for s in contexts], size, heads, kv_heads, width, dtype, wild=True)
    hint = "position p lies in block block_table[r, p // BLOCK], at p % BLOCK; GROUP query heads share a KV head"
    check(step, splits, tile=tile, hint=hint)


@grades(decode_kernel)
def test_shares_are_disjoint_and_cover_the_context():
    step = PagedStep("shares", [(s, 1) for s in (97, 160, 161, 300)], 16, 2, 1, 16, wild=True)
    for splits in (1, 2, 3, 8):
        hint = "tiles from split * share to (split + 1) * share, share = tiles / SPLITS rounded up"
        check(step, splits, tile=32, hint=hint)


@grades(decode_kernel)
def test_a_long_decode():
    """8,192 tokens and one block less or more; in the interpreter in large tiles, which it does fast."""
    step = PagedStep("long", [(s, 1) for s in (8192, 8176, 8208, 3)], 16, 2, 1, 16, wild=True)
    check(step, 4, tile=64 if CUDA else 1024, hint="each tile's sums are scaled to the largest score so far")


@grades(decode_kernel)
def test_shares_without_keys():
    """More shares than tiles, and a padding request."""
    step = PagedStep("few tiles", [(1, 1), (0, 1), (40, 1), (64, 1)], 16, 4, 2, 16, wild=True)
    for splits in (3, 8):
        check(step, splits, tile=32, hint="the shares that come first are as large as the others")


@grades(decode_kernel)
@pytest.mark.parametrize("window", [1, 31, 32, 33, 100, 1000])
def test_a_decode_sees_its_window(window):
    step = PagedStep("decode window", [(s, 1) for s in (1, 32, 33, 130)], 16, 2, 1, 16, wild=True)
    hint = f"a row at s - 1 sees positions above s - 1 - {window}; only tiles that hold one of them are shared out"
    for splits in (1, 3):
        check(step, splits, window, tile=32, hint=hint)


@grades(decode_kernel)
def test_a_window_hides_even_nan():
    step = PagedStep("nan before the window", [(100, 1), (70, 1)], 16, 4, 2, 16, wild=True)
    for (s, _), table in zip(step.shapes, step.tables, strict=True):
        for p in range(s - 20):
            for pool in step.cache:
                pool[table[p // 16], p % 16] = torch.nan
    check(step, 2, 20, tile=32, hint="load only what is in sight: 0 * NaN is NaN")


@grades(decode_kernel)
def test_a_decode_leaves_other_requests_alone():
    step = PagedStep("others", [(9, 3), (40, 1), (5, 2), (33, 1), (0, 1), (33, 33)], 16, 4, 2, 24, wild=True)
    check(step, 2, tile=32, hint="the row of request r is query_start_loc[r], which is not r")


@grades(decode_kernel)
@pytest.mark.parametrize("scale", [0.05, 1.0, 40.0])
def test_a_decode_takes_the_callers_scale(scale):
    """With 40 the scores reach thousands, either sign: exp of one would overflow."""
    step = PagedStep("decode scale", [(1, 1), (100, 1)], 16, 4, 2, 24, wild=True)
    check(step, 2, tile=32, scale=scale, hint="scores are scale * q @ k; the largest so far comes off before exp")
