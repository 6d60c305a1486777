"""write_kernel: the rows of a step into their slots and nowhere else."""

import pytest
import torch

from engine.serve.kernels.write import write_kernel, write_kv
from tests.ch32.device import DEVICE, DTYPES
from tests.ch32.paged import SENTINEL, guarded, two
from tests.grading import expect, expect_close, grades, rng

WRITING = "32: Writing the pool"


def fresh(salt, n, row):
    generator = rng.torch(salt)
    return tuple(torch.randn(n, row, generator=generator).to(DEVICE) for _ in "kv")


def check(k, v, slots, num_slots=40, dtype=torch.float32, hint=None, launch=None):
    """k, v: [N, ROW]. Every slot is compared; SENTINEL stands in all of them at first, and around the pool."""
    row = k.shape[1]
    pools = [guarded((num_slots, row), dtype) for _ in "kv"]
    caches, mapping = [pool for pool, _ in pools], torch.tensor(slots, dtype=torch.int64, device=DEVICE)
    if launch:
        launch(*caches, k, v, mapping)
    else:
        write_kernel[(len(k),)](k, v, *caches, mapping, k.stride(0), v.stride(0), row, two(row))
    row_of = {slot: n for n, slot in enumerate(slots) if slot >= 0}
    for name, cache, new, (_, intact) in zip(("k_cache", "v_cache"), caches, (k, v), pools, strict=True):
        for slot in range(num_slots):
            n = row_of.get(slot)
            if n is None:
                same = bool((cache[slot] == SENTINEL).all())
                expect(same, f"write_kernel changed slot {slot} of {name}, which is no row's", hint, WRITING)
            else:
                what = f"{name}, slot {slot}, written by row {n} of {len(slots)}, element {{i}}"
                expect_close(cache[slot], new[n].to(dtype), 0.0, what=what, hint=hint, see=WRITING)
        intact(f"write_kernel ({name})", WRITING)


@grades(write_kernel)
@pytest.mark.parametrize("row", [1, 16, 20, 48])
def test_a_program_stores_a_row_in_its_slot(row):
    random, hint = rng(f"slots {row}"), "row n goes to slot_mapping[n]; PADDED is more than ROW: mask the rest"
    for n in (1, 9):
        check(*fresh(f"rows {row} {n}", n, row), random.sample(range(40), n), hint=hint)
    slots = list(range(30, 12, -2))  # downwards and apart: nothing that runs over is covered by a later row
    check(*fresh(f"apart {row}", len(slots), row), slots, hint=hint)


@grades(write_kernel)
def test_padding_rows_are_stored_nowhere():
    hint = "slot -1: nothing is stored, neither before the pool, nor in slot 0, nor in the last one"
    check(*fresh("padding", 6, 20), [-1, 7, -1, 3, -1, -1], hint=hint)
    check(*fresh("only padding", 2, 16), [-1, -1], hint=hint)
    check(*fresh("first and last", 4, 20), [39, -1, 0, -1], hint=hint)


@grades(write_kernel)
def test_rows_may_lie_apart():
    """Views of a fused projection: rows of K and of V have other strides, and NaN between them."""
    random = rng("apart")
    for k_more, v_more in ((20, 0), (0, 7), (13, 29)):
        parts = []
        for x, more in zip(fresh(f"strides {k_more}", 5, 20), (k_more, v_more), strict=True):
            whole = torch.full((5, 20 + more), torch.nan, device=DEVICE)
            whole[:, :20] = x
            parts.append(whole[:, :20])
        check(*parts, random.sample(range(40), 5), hint="row n of K begins at n * k_stride, of V at n * v_stride")


@grades(write_kernel)
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_the_pool_may_have_another_type(dtype):
    check(*fresh("cast", 4, 20), [5, -1, 9, 0], dtype=dtype, hint="values are cast to the type of the pool")


@grades(write_kernel)
def test_the_launch_takes_what_chapter_31_wrote():
    """write_kv of chapter 32, K and V [N, Hkv, D] of any strides."""

    def launch(k_cache, v_cache, k, v, mapping):
        k, v = (x.unflatten(1, (2, 10)) for x in (k, v))
        k = k.transpose(0, 2).contiguous().transpose(0, 2)
        write_kv(*(x.view(-1, 8, 2, 10) for x in (k_cache, v_cache)), k, v, mapping)
        write_kv(*(x.view(-1, 8, 2, 10) for x in (k_cache, v_cache)), k[:0], v[:0], mapping[:0])

    check(*fresh("launch", 5, 20), [31, 2, -1, 18, 7], launch=launch)
