"""choose_splits, which is given: enough programs for a GPU, no share of less than a tile, few kernels to compile."""

from engine.serve.kernels.decode import TILE, choose_splits
from tests.grading import expect_equal

PROCESSORS = 132


def test_shares_fill_the_processors_and_are_no_smaller_than_a_tile():
    powers = [1 << i for i in range(20)]
    for num_reqs in (1, 2, 7, 33, 256):
        for kv_heads in (1, 2, 8):
            for keys in (1, TILE - 1, TILE, 2 * TILE - 1, 2 * TILE, 5000, 32768, 1 << 20):
                fit = [n for n in powers if n * num_reqs * kv_heads <= 4 * PROCESSORS and n * TILE <= keys]
                splits = choose_splits(num_reqs, kv_heads, keys, PROCESSORS)
                call = f"choose_splits({num_reqs}, {kv_heads}, {keys}, {PROCESSORS})"
                expect_equal(splits, max(fit, default=1), call)
