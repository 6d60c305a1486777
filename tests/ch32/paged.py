"""One step over a pool in which everything that no request has filled is NaN, and attention over it in float64."""

import math

import torch

from engine.serve.batch import BatchMeta
from tests.ch32.device import DEVICE
from tests.grading import expect, rng

UNIT = 2.0**-24  # of float32: the largest relative error of one rounding
GUARD = 8  # blocks of NaN before and after the pool
EDGE = 1 << 14  # elements around an output
SENTINEL = 777.0


class PagedStep:
    """shapes: (context s, rows t) of each request, in order; (0, 1) is a padding request.

    wild: what lies in the block table past a context are ids of no block of the pool.
    """

    def __init__(self, salt, shapes, size, heads=6, kv_heads=2, width=24, dtype=torch.float32, wild=False, loud=1.0):
        random, generator = rng(salt), rng.torch(salt)
        self.shapes, self.size, self.heads, self.kv_heads, self.width = shapes, size, heads, kv_heads, width
        self.starts = [sum(t for _, t in shapes[:r]) for r in range(len(shapes) + 1)]
        needs = [-(-s // size) for s, _ in shapes]
        num_blocks = sum(needs) + 3
        ids = random.sample(range(num_blocks), num_blocks)
        self.tables = [[ids.pop() for _ in range(need)] for need in needs]
        none = [*range(num_blocks + 1, num_blocks + GUARD), *range(1 - GUARD, 0)] if wild else ids
        columns = max(needs) + 3
        table = torch.tensor([[random.choice(none) for _ in range(columns)] for _ in shapes], dtype=torch.int32)
        for r, mine in enumerate(self.tables):
            table[r, : len(mine)] = torch.tensor(mine, dtype=torch.int32)

        def normal(*shape):
            return torch.randn(*shape, generator=generator)

        self.contexts = [[(loud * normal(s, kv_heads, width)).to(dtype), normal(s, kv_heads, width).to(dtype)]
                         for s, _ in shapes]  # fmt: skip
        whole = [torch.full((num_blocks + 1 + 2 * GUARD, size, kv_heads, width), torch.nan, dtype=dtype) for _ in "kv"]
        for (s, _), mine, context in zip(shapes, self.tables, self.contexts, strict=True):
            for buffer, values in zip(whole, context, strict=True):
                for i in range(0, s, size):
                    part = values[i : i + size]
                    buffer[GUARD + mine[i // size], : len(part)] = part
        self.cache = tuple(buffer.to(DEVICE)[GUARD:-GUARD] for buffer in whole)
        self.q = (2 * normal(self.starts[-1], heads, width)).to(dtype).to(DEVICE)
        self.meta = self._meta(table[:, : max(needs) + 1].to(DEVICE) if not wild else table.to(DEVICE)[:, :-1])

    def _meta(self, table):
        lengths = torch.tensor([s for s, _ in self.shapes], dtype=torch.int32)
        starts = torch.tensor(self.starts, dtype=torch.int32)
        slots = []
        for (s, t), mine in zip(self.shapes, self.tables, strict=True):
            rows = range(s - t, s)
            slots += [mine[p // self.size] * self.size + p % self.size if s else -1 for p in rows]
        most = max(t for _, t in self.shapes), max(s for s, _ in self.shapes)
        slots = torch.tensor(slots, dtype=torch.int64)
        device = (x.to(DEVICE) for x in (starts, lengths))
        return BatchMeta(*device, table, slots.to(DEVICE), self.size, starts, lengths, *most)

    def scale(self, scale=None):
        return self.width**-0.5 if scale is None else scale

    def attend(self, r, scale=None, window=0, within=None):
        """Float64 (out [t, H, D], lse [t, H]) of the rows of request r; within: only keys at these positions."""
        s, t = self.shapes[r]
        q = self.q[self.starts[r] : self.starts[r + 1]].cpu().double()
        k, v = (x.double().repeat_interleave(self.heads // self.kv_heads, dim=1) for x in self.contexts[r])
        p, row = torch.arange(s), torch.arange(s - t, s)[:, None]
        seen = p <= row
        if window > 0:
            seen &= p > row - window
        if within is not None:
            seen &= (p >= within.start) & (p < within.stop)
        scores = torch.einsum("thd,shd->ths", q, k) * self.scale(scale)
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp()
        return torch.einsum("ths,shd->thd", weights, v), lse

    def bounds(self, scale=None):
        values = [x for context in self.contexts for x in context]
        k, v = (torch.cat([x.flatten(0, 1) for x in values[i::2]]) for i in (0, 1))
        largest = self.scale(scale) * self.q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max()
        return bounds(largest.item(), v.double().abs().max().item(), max(s for s, _ in self.shapes), self.width,
                      self.q.dtype)  # fmt: skip

    def where(self, row):
        r = next(r for r in range(len(self.shapes)) if row < self.starts[r + 1])
        s, t = self.shapes[r]
        return f"row {row - self.starts[r]} of request {r} ({t} rows, context {s}, block size {self.size})"


def bounds(largest, value, context, width, dtype=torch.float32, tile=16):
    """(atol, rtol of outputs, atol of lse): what rounding can do to attention over tiles of at least 16 keys.

    largest: bound of a score, L. A score is a sum of D products: off by (D + 2) units of L at most. Taking off the
    largest so far (a unit of 2 L), exp (4 units; 2 L more where it is built from exp2) and the shrinking factors, whose
    exponents add up to 2 L at most (2 L units, and 5 for each tile), make a weight off by ((D + 2) L + 6 L + 5 tiles +
    4) units; the total, a sum of S, by S more. An output is a quotient of two such sums: twice that. An lse: once, and
    its own rounding, 2 units of L + log S.
    Narrower types: each weight, at most 1, is rounded to half a unit `eps / 2` of it, or to half the least number
    above zero, and the output as well; the total has no part in it.
    """
    tiles = context // tile + 8
    sums = (width + 2) * largest + 6 * largest + 5 * tiles + context + 8
    atol, rtol = value * UNIT * 2 * sums, 0.0
    if dtype != torch.float32:
        info = torch.finfo(dtype)
        least = info.tiny * info.eps / 2
        atol, rtol = atol + value * (info.eps / 2 + context * least) + least, info.eps / 2
    return atol, rtol, UNIT * (sums + 2 * (largest + math.log(max(context, 1))))


def guarded(shape, dtype=torch.float32):
    """(a tensor of SENTINEL, a function that says whether something beside it was changed)."""
    flat = torch.full((math.prod(shape) + 2 * EDGE,), SENTINEL, dtype=dtype, device=DEVICE)

    def check(name, see):
        intact = (flat[:EDGE] == SENTINEL).all() and (flat[-EDGE:] == SENTINEL).all()
        expect(intact, f"{name} stores outside of its output", "mask what is padded to a power of two", see)

    return flat[EDGE:-EDGE].view(shape), check


def two(number):
    """The power of two from there on."""
    return 1 << max(0, number - 1).bit_length()
