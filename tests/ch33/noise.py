"""Gumbel noise once more: Philox in plain integers, scores in float64, and which tokens a correct float32 may draw."""

import math
from functools import cache

import torch

from engine.serve.device_sampler import philox
from tests.ch32.paged import UNIT
from tests.grading import expect, expect_close, expect_equal, rng

DEVICE_TOKENS = "33: Tokens stay on the device"
M0, M1, W0, W1, WORD = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85, 0xFFFFFFFF


def philox4x32(counter, key, rounds=10):
    """Salmon et al., SC 2011: four numbers of 32 bits from a counter of four and a key of two."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(rounds):
        low, high = a * M0, c * M1
        a, b, c, d = (high >> 32) ^ b ^ k, high & WORD, (low >> 32) ^ d ^ m, low & WORD
        k, m = (k + W0) & WORD, (m + W1) & WORD
    return a, b, c, d


@cache
def gumbel(seed, token, place):
    key = seed & WORD, (seed >> 32) & WORD  # two's complement: a negative seed has ones on top
    bits = philox4x32((token, place, 0, 0), key)[0]
    return -math.log(-math.log(((bits >> 9) + 0.5) * 2.0**-23))


class Scored:
    """A row of logits [V], scored in float64 from what the float32 computation starts with."""

    def __init__(self, logits, temperature, seed, place):
        heat = torch.tensor(temperature, dtype=torch.float32).item()
        self.logits, self.heat = logits.double(), heat
        noise = torch.tensor([gumbel(seed, t, place) for t in range(len(logits))] if heat else 0.0).double()
        self.scores = self.logits + heat * noise
        # the logs: 2 units, of which the inner one moves g by 2 more, and the outer 2 of g; product and sum round
        parts = self.logits.abs() + heat * (3 * noise.abs() + 4)
        self.off = torch.where(self.logits.isfinite(), 2 * UNIT * parts, 0.0) if heat else torch.zeros(len(logits))

    def best(self, begin=0, end=None):
        """(lowest score that may win, highest, set of tokens that may) of a run of tokens; None if nothing can."""
        scores, off = self.scores[begin:end], self.off[begin:end]
        if scores.isnan().any():
            return math.inf, math.inf, {len(self.logits)}
        if not len(scores) or scores.max() == -math.inf:
            return None
        low = (scores - off).max()
        may = ((scores + off >= low) & (scores > -math.inf)).nonzero().flatten() + begin
        exact = not self.heat
        return low.item(), (scores + off).max().item(), {may.tolist()[0]} if exact else set(may.tolist())


def tokens_of(logits, temperatures, seeds, places):
    """For each row the set of tokens that may come; V alone for a row without a number above -inf, or with a NaN."""
    rows = zip(logits.cpu(), temperatures, seeds, places, strict=True)
    found = [Scored(*row).best() for row in rows]
    return [best[2] if best else {logits.shape[1]} for best in found]


def expect_drawn(got, logits, temperatures, seeds, places, name, hint=None):
    """got: [N] tokens."""
    __tracebackhide__ = True
    expect_equal(list(got.shape), [len(logits)], f"{name}: shape", see=DEVICE_TOKENS)
    expect_equal(str(got.dtype), "torch.int64", f"{name}: dtype", see=DEVICE_TOKENS)
    sets = tokens_of(logits, temperatures, seeds, places)
    for n, (token, right) in enumerate(zip(got.tolist(), sets, strict=True)):
        what = f"{name}, row {n} (temperature {temperatures[n]:g}, seed {seeds[n]}, place {places[n]})"
        if token not in right:
            expect_equal(token, min(right), what, hint, DEVICE_TOKENS)


SEEDS = [0, 1, -1, 1 << 32, (1 << 63) - 1, -(1 << 63), -(1 << 40) + 12345]


def rows_of(salt, n, vocab, dtype=torch.float32, spread=2.0):
    """Logits [n, vocab] and what else a row has: temperatures of all sizes, seeds of either sign, places."""
    random, generator = rng(salt), rng.torch(salt)
    logits = (spread * torch.randn(n, vocab, generator=generator)).to(dtype)
    temperatures = [(0.0, 1.0, 0.7, 2.5)[i % 4] for i in range(n)]
    seeds = [SEEDS[i % 7] if i % 3 else random.randrange(-(1 << 63), 1 << 63) for i in range(n)]
    places = [random.randrange(0, (5, 4000, 1 << 31)[i % 3]) for i in range(n)]
    return logits, temperatures, seeds, places


def tensors(temperatures, seeds, places, device="cpu"):
    return (torch.tensor(temperatures, dtype=torch.float32, device=device),
            *(torch.tensor(x, dtype=torch.int64, device=device) for x in (seeds, places)))  # fmt: skip


# Given: the counter-based generator.

KNOWN = {  # Random123, kat_vectors: philox4x32 with 10 rounds
    (0, 0, 0, 0, 0, 0): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    (WORD,) * 6: (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0): (
        0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1,
    ),
}  # fmt: skip


def test_philox_gives_the_known_answers():
    for (*counter, k, m), expected in KNOWN.items():
        expect_equal(philox4x32(counter, (k, m)), expected, "philox4x32 of the tests, number {i}")
    expect_equal(int(philox([0], [0], [0])[0, 0]), 0x6627E8D5, "philox(0, 0, 0)")


def test_philox_of_any_seed_token_and_place():
    random = rng("philox")
    seeds = [*SEEDS, *(random.randrange(-(1 << 63), 1 << 63) for _ in range(3))]
    places = [random.randrange(1 << 31) for _ in seeds]
    tokens = [0, 1, 2, 151935, random.randrange(1 << 31)]
    right = [[philox4x32((t, p, 0, 0), (s & WORD, (s >> 32) & WORD))[0] for t in tokens]
             for s, p in zip(seeds, places, strict=True)]  # fmt: skip
    expect_equal(philox(seeds, tokens, places).tolist(), right, "philox of (row, token) {i}")


def test_noise_is_finite_whatever_the_bits():
    """0.5 beside 2^24 - 1 would be rounded away in float32: u = 1, and g infinite."""
    for bits in (0, (1 << 32) - 1):
        u = (torch.tensor(bits >> 9).float() + 0.5) * 2.0**-23
        expect(0 < u < 1, f"u of the bits {bits} is {u}")
        g = -(-u.log()).log()
        expect_close(g, -math.log(-math.log(((bits >> 9) + 0.5) * 2.0**-23)), 1e-5, what="g of those bits")
