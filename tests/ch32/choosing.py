"""choose_splits, which is given: enough programs for a GPU, no share too small to pay."""

from engine.serve.kernels.decode import TILE, choose_splits
from tests.grading import expect

PROCESSORS = 132


def test_shares_fill_the_processors_and_are_no_smaller_than_four_tiles():
    for num_reqs in (1, 2, 7, 33, 256):
        for kv_heads in (1, 2, 8):
            for length in (1, 63, 4 * TILE - 1, 4 * TILE, 8 * TILE - 1, 8 * TILE, 5000, 32768, 1 << 20):
                splits = choose_splits(num_reqs, kv_heads, length, PROCESSORS)
                call = f"choose_splits({num_reqs}, {kv_heads}, {length}, {PROCESSORS})"
                expect(isinstance(splits, int) and splits >= 1, f"{call} is {splits}: at least one share")
                small = splits > 1 and splits * 4 * TILE > length
                expect(not small, f"{call} is {splits}: more than one share for each four tiles")
                programs, most = num_reqs * kv_heads * splits, max(1, length // (4 * TILE))
                few = programs < 2 * PROCESSORS and splits < most
                expect(not few, f"{call} is {splits}: {programs} programs for {PROCESSORS} processors")
                many = splits > 1 and num_reqs * kv_heads * (splits - 1) >= 2 * PROCESSORS
                expect(not many, f"{call} is {splits}: one less would do, and merging costs time")
