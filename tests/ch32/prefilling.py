"""prefill_kernel: tiles of rows of chunks that begin anywhere, against float64."""

import pytest
import torch

from engine.serve.kernels.prefill import prefill_kernel
from tests.ch32.device import CUDA, DTYPES
from tests.ch32.paged import SENTINEL, PagedStep, guarded, two
from tests.grading import expect, expect_close, grades, rng

PREFILL = "32: Prefill tiles"


def launch(step, queries, window=0, tile=32, scale=None, programs=None):
    """out [N, H, D] on the CPU; programs: how many of the first axis run."""
    group = step.heads // step.kv_heads
    out, intact = guarded(tuple(step.q.shape), step.q.dtype)
    meta, table = step.meta, step.meta.block_table
    programs = programs or len(step.q) // queries + len(step.shapes)
    prefill_kernel[(programs, step.kv_heads)](
        step.q, *step.cache, out, meta.query_start_loc, meta.seq_lens, table, len(step.shapes), table.stride(0),
        step.scale(scale),
        WINDOW=window, KV_HEADS=step.kv_heads, GROUP=group, PADDED=two(group), WIDTH=step.width, BLOCK=step.size,
        TILE=tile, QUERIES=queries, COLS=max(16, two(step.width)),
    )  # fmt: skip
    intact("prefill_kernel", PREFILL)
    return out.cpu()


def check(step, queries, window=0, tile=32, scale=None, hint=None, rows=None):
    """rows: only these rows of the step are compared."""
    out = launch(step, queries, window, tile, scale)
    atol, rtol, _ = step.bounds(scale)
    for r, (_, t) in enumerate(step.shapes):
        if t == 1:
            same = bool((out[step.starts[r]] == SENTINEL).all())
            why = "a single row is a decode, or padding: the decode kernel's"
            expect(same, f"prefill_kernel stores something for request {r}, which has one row", why, PREFILL)
            continue
        expected = step.attend(r, scale, window)[0]
        for j, row in enumerate(range(step.starts[r], step.starts[r + 1])):
            if rows is None or row in rows:
                where = f"{step.where(row)}, tiles of {queries} rows" + (f", window {window}" if window else "")
                expect_close(out[row], expected[j], atol, rtol, f"{where}: out [head, d] {{i}}", hint, PREFILL)


CASES = {  # heads, KV heads, width, block size, QUERIES, TILE
    "one head each": (2, 2, 24, 8, 16, 16),
    "groups of 3": (6, 2, 24, 16, 4, 32),
    "groups of 8": (8, 1, 80, 32, 4, 64),
    "groups of 16, large blocks": (16, 1, 16, 128, 2, 32),
}


@grades(prefill_kernel)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_each_row_of_a_chunk(name, dtype):
    """Whole prompts, later chunks and decodes, with numbers of rows around a tile's."""
    heads, kv_heads, width, size, queries, tile = CASES[name]
    counts = [max(2, queries + i) for i in (-1, 0, 1)]
    shapes = [(t, t) for t in counts] + [(9, 1), (0, 1)] + [(t + 5, t) for t in counts] + [(tile + 9, queries + 2)]
    step = PagedStep(f"chunk {name}", shapes, size, heads, kv_heads, width, dtype, wild=True)
    hint = "with t rows and length s, row j stands at s - t + j and sees keys up to there"
    check(step, queries, tile=tile, hint=hint)


@grades(prefill_kernel)
def test_a_chunk_at_the_end_of_a_long_context():
    """8,192 tokens and one block less or more; in the interpreter in large tiles, which it does fast."""
    step = PagedStep("long chunk", [(8192, 5), (8176, 3), (8208, 2)], 16, 2, 1, 16, wild=True)
    check(step, 4, tile=64 if CUDA else 1024, hint="each tile's sums are scaled to the largest score so far")


@grades(prefill_kernel)
def test_a_chunk_may_begin_anywhere():
    for i, begin in enumerate((0, 1, 14, 15, 16, 17, 31, 32, 33)):
        step = PagedStep(f"begin {i}", [(begin + 6, 6)], 16, 4, 2, 16, wild=True)
        check(step, 4, tile=16, hint=f"the first of 6 rows of a context of {begin + 6} stands at {begin}")


@grades(prefill_kernel)
def test_the_tiles_of_a_request_are_found():
    """Requests of all numbers of rows, more of them than tiles, in any order."""
    random, hint = rng("search"), "tiles of request r begin at number query_start_loc[r] // QUERIES + r"
    fixed = [[(2, 2)] * 5, [(9, 9), (3, 1), (3, 1), (3, 1), (10, 3)], [(1, 1), (0, 1), (13, 13)], [(40, 18)]]
    drawn = [[(s, random.randint(1, s)) for s in random.choices(range(1, 15), k=7)] for _ in range(3)]
    for i, shapes in enumerate(fixed + drawn):
        check(PagedStep(f"search {i}", shapes, 8, 2, 1, 16, wild=True), 8, tile=16, hint=hint)


@grades(prefill_kernel)
@pytest.mark.parametrize("window", [1, 3, 15, 16, 17, 100])
def test_a_chunk_sees_its_window(window):
    step = PagedStep("prefill window", [(20, 20), (40, 7), (0, 1), (50, 2)], 8, 2, 1, 16, wild=True)
    hint = f"a row at p sees positions above p - {window}, {window} at most; begin with the first row's oldest key"
    check(step, 8, window, tile=16, hint=hint)


@grades(prefill_kernel)
def test_tiles_that_no_row_sees_are_not_loaded():
    """Their keys and values are NaN here: past the last row of a program, and before the window of its first."""
    queries, tile, window = 8, 16, 10
    for first, last in ((0, 8), (32, 40), (40, 48)):
        for is_key in (True, False):
            step = PagedStep("tiles", [(48, 48)], 8, 2, 1, 16, wild=True)
            sees = range(max(0, first - window + 1) // tile * tile, -(-last // tile) * tile)
            for p in range(48):
                if p not in sees:
                    step.cache[0 if is_key else 1][step.tables[0][p // 8], p % 8] = torch.nan
            hint = "tiles end with the last row of the program and begin with the oldest key of its first"
            check(step, queries, window, tile, hint=hint, rows=range(first, last))


@grades(prefill_kernel)
@pytest.mark.parametrize("scale", [0.05, 40.0])
def test_a_chunk_takes_the_callers_scale(scale):
    """With 40 the scores reach thousands, either sign: exp of one would overflow."""
    step = PagedStep("prefill scale", [(40, 9), (5, 5)], 16, 4, 2, 24, wild=True)
    check(step, 8, tile=16, scale=scale, hint="scores are scale * q @ k; the largest so far comes off before exp")


@grades(prefill_kernel)
def test_a_program_has_the_rows_of_its_tile():
    """The first programs alone: the rows of the others are not theirs, even to be stored over later."""
    step = PagedStep("programs", [(12, 10)], 8, wild=True)
    atol, expected = step.bounds()[0], step.attend(0)[0]
    for programs in (1, 2):
        out, rows = launch(step, 4, tile=16, programs=programs), 4 * programs
        what = f"the first {programs} programs of QUERIES = 4 rows: out [row, head, d] {{i}}"
        expect_close(out[:rows], expected[:rows], atol, what=what, hint="program i has tile i", see=PREFILL)
        hint = "pair m is row m // PADDED of its tile, head m % PADDED of the group: GROUP may be less than PADDED"
        expect((out[rows:] == SENTINEL).all(), f"program 0 to {programs - 1} stores rows from {rows} on", hint, PREFILL)
