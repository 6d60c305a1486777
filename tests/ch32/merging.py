"""merge_kernel: the shares of a row put together, against float64."""

import pytest
import torch

from engine.serve.kernels.decode import merge_kernel
from tests.ch32.device import DEVICE, DTYPES
from tests.ch32.paged import SENTINEL, guarded, two
from tests.ch32.tiles import merge_atol, merged
from tests.grading import expect, expect_close, grades, rng

MERGING = "32: Splitting a long context"


def check(salt, counts, splits, heads=3, width=24, dtype=torch.float32, change=None, hint=None):
    """counts: rows of each request. change(outs, lses): sets some of [N, H, SPLITS, D] and [N, H, SPLITS]."""
    generator, rows = rng.torch(salt), sum(counts)
    outs = torch.randn(rows, heads, splits, width, generator=generator)
    lses = 3 * torch.randn(rows, heads, splits, generator=generator)
    if change:
        change(outs, lses)
    outs[lses == -torch.inf] = torch.nan
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    whole = []
    for x in (outs, lses):  # beside them lies what has to be masked
        flat = torch.full((x.numel() + 4096,), torch.inf if x is lses else torch.nan)
        flat[: x.numel()] = x.flatten()
        whole.append(flat.to(DEVICE)[: x.numel()].view(x.shape))
    out, intact = guarded((rows, heads, width), dtype)
    merge_kernel[(len(counts), heads)](
        *whole, out, starts.to(DEVICE), heads, splits, two(splits), width, two(width)
    )  # fmt: skip
    intact("merge_kernel", MERGING)
    out = out.cpu()
    expected, _ = merged(outs.movedim(2, 0), lses.movedim(2, 0))
    info = torch.finfo(dtype)
    atol = merge_atol(outs, lses.movedim(2, 0))
    atol, rtol = (atol, 0.0) if dtype == torch.float32 else (atol + info.tiny * info.eps, info.eps / 2)
    for r, (row, count) in enumerate(zip(starts.tolist(), counts, strict=False)):
        if count > 1:
            same = bool((out[row : row + count] == SENTINEL).all())
            why = "the prefill kernel has its results"
            expect(same, f"merge_kernel stores something for request {r}, which has {count} rows", why, MERGING)
        else:
            what = f"merge_kernel, {splits} shares: row {row}, that of request {r}, [head, d] {{i}}"
            expect_close(out[row], expected[row], atol, rtol, what, hint, MERGING)


@grades(merge_kernel)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 2, 5, 8])
def test_shares_count_by_what_they_saw(splits, dtype):
    hint = "the weight of a share is exp(its lse - largest lse), and all weights are divided by their sum"
    check(f"shares {splits}", [1] * 3, splits, dtype=dtype, hint=hint)


@grades(merge_kernel)
@pytest.mark.parametrize("width", [16, 80])
def test_shares_of_any_width(width):
    check(f"width {width}", [1, 1], 3, heads=5, width=width, hint="COLS is more than WIDTH: mask the rest")


@grades(merge_kernel)
def test_an_empty_share_has_no_weight():
    def change(outs, lses):
        lses[0, :, 4] = lses[1, 0, 0] = lses[1, 1, :4] = -torch.inf

    hint = "a share with lse -inf has weight 0, and NaN in its outs: 0 * NaN is NaN, so replace them"
    check("empty", [1, 1, 1], 5, change=change, hint=hint)


@grades(merge_kernel)
def test_a_row_without_any_key_becomes_zero():
    def change(outs, lses):
        lses[1] = lses[2, 1] = -torch.inf

    check("padding", [1, 1, 1], 3, change=change, hint="no share has a key: zeros, not NaN from -inf - -inf or 0 / 0")


@grades(merge_kernel)
@pytest.mark.parametrize("level", [1e4, -1e4])
def test_large_lses_do_not_overflow(level):
    def change(outs, lses):
        lses += level
        lses[0, 0, 1] = -level

    check("level", [1, 1], 3, change=change, hint="take the largest lse off before exp")


@grades(merge_kernel)
def test_merging_leaves_other_requests_alone():
    check("others", [3, 1, 2, 1, 1, 5], 2, hint="the row of request r is query_start_loc[r], which is not r")
