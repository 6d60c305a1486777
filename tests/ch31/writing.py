"""write_kv: one scatter into the pool."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from engine.serve.attention import write_kv
from tests.grading import expect, expect_close, expect_equal, grades, rng

POOL = "31: Attention over the pool"
SENTINEL = 777.0
WAITS = {"item", "tolist", "nonzero", "masked_select", "unique", "cpu", "numpy", "__bool__", "__int__", "__index__"}


def pools(num_blocks, size, heads, width, dtype=torch.float32):
    return tuple(torch.full((num_blocks + 1, size, heads, width), SENTINEL, dtype=dtype) for _ in "kv")


def fresh(salt, n, heads, width):
    generator = rng.torch(salt)
    return tuple(torch.randn(n, heads, width, generator=generator) for _ in "kv")


def check(caches, k, v, slots, hint=None):
    """Write, and compare every slot of the pool except scratch, one slot at a time."""
    write_kv(*caches, k, v, torch.tensor(slots))
    for name, cache, new in (("k_cache", caches[0], k), ("v_cache", caches[1], v)):
        size = cache.shape[1]
        row_of = {slot: row for row, slot in enumerate(slots) if slot >= 0}
        for slot in range((cache.shape[0] - 1) * size):
            got, row = cache[slot // size, slot % size], row_of.get(slot)
            where = f"{name}, slot {slot} (block {slot // size}, offset {slot % size})"
            if row is None:
                expect((got == SENTINEL).all(), f"write_kv changed {where}, which is no row's", hint, POOL)
            else:
                what = f"{where}, written by row {row}, at {{i}}"
                expect_close(got, new[row].to(cache.dtype), atol=0.0, what=what, hint=hint, see=POOL)


@grades(write_kv)
@pytest.mark.parametrize("size", [1, 3, 16])
def test_each_row_lands_in_its_slot(size):
    random = rng(f"slots {size}")
    for n in (1, 7, 2 * size):
        slots = random.sample(range(7 * size), min(n, 7 * size))
        check(pools(7, size, 2, 5), *fresh(f"rows {size} {n}", len(slots), 2, 5), slots)


@grades(write_kv)
def test_padding_lands_in_scratch_and_nowhere_else():
    """Several padding rows among others; the last real slot and the first hold somebody's K/V (case 24)."""
    hint = "slot -1 belongs in the extra last block, not in the last slot that requests use, nor in slot 0"
    check(pools(4, 3, 2, 5), *fresh("padding", 6, 2, 5), [-1, 7, -1, 3, -1, -1], hint)
    check(pools(4, 3, 2, 5), *fresh("only padding", 3, 2, 5), [-1, -1, -1], hint)
    check(pools(4, 3, 2, 5), *fresh("beside", 4, 2, 5), [11, -1, 0, -1], hint)
    check(pools(1, 1, 2, 5), *fresh("tiny", 2, 2, 5), [-1, 0], hint)


@grades(write_kv)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_values_are_cast_to_the_dtype_of_the_pool(dtype):
    check(pools(4, 3, 2, 5, dtype), *fresh("cast", 4, 2, 5), [5, -1, 9, 0])


@grades(write_kv)
def test_rows_may_be_views_of_a_fused_projection():
    fused = torch.randn(5, 2 * 2 * 6, generator=rng.torch("fused"))
    k, v = (part.unflatten(1, (2, 6)) for part in fused.chunk(2, dim=1))
    check(pools(4, 3, 2, 6), k, v, [5, 11, -1, 0, 8])
    k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in fresh("strided", 5, 2, 6))
    check(pools(4, 3, 2, 6), k, v, [5, 11, -1, 0, 8])


@grades(write_kv)
def test_the_arguments_stay_as_they_are():
    caches, (k, v), slots = pools(4, 3, 2, 5), fresh("arguments", 3, 2, 5), torch.tensor([5, -1, 2])
    before = [t.clone() for t in (k, v, slots)]
    write_kv(*caches, k, v, slots)
    for name, old, new in zip(("k", "v", "slot_mapping"), before, (k, v, slots), strict=True):
        expect(torch.equal(old, new), f"write_kv changed its argument {name}", "other layers use it too", POOL)


class Operations(TorchFunctionMode):
    """Counts the torch calls of a block, and notes those that look at values or have a result of unknown size."""

    def __init__(self):
        super().__init__()
        self.count, self.waits = 0, set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in WAITS:
            self.waits.add(name)
        if name in ("__getitem__", "__setitem__", "index_put_", "index_put"):
            indices = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
            if any(getattr(index, "dtype", None) == torch.bool for index in indices):
                self.waits.add("a boolean mask as index")
        self.count += 1
        return function(*args, **(kwargs or {}))


@grades(write_kv)
def test_one_scatter_whatever_the_number_of_rows():
    counts = []
    for n in (4, 32):
        args = (*pools(40, 3, 2, 5), *fresh(f"ops {n}", n, 2, 5), torch.arange(n) * 3 + 1)
        with Operations() as operations:
            write_kv(*args)
        counts.append(operations.count)
    what = f"write_kv makes {counts[0]} torch calls for 4 rows and {counts[1]} for 32"
    expect_equal(counts[1], counts[0], what=what, hint="one scatter for all rows, no loop over them", see=POOL)


@grades(write_kv)
def test_nothing_waits_for_the_device():
    args = (*pools(7, 3, 2, 5), *fresh("sync", 4, 2, 5), torch.tensor([5, -1, 2, 0]))
    with Operations() as operations:
        write_kv(*args)
    hint = "no .item(), .tolist(), `if` on a tensor or boolean mask: each makes the CPU wait for the GPU"
    expect(not operations.waits, f"write_kv uses {', '.join(sorted(operations.waits))}", hint, POOL)
