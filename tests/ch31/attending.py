"""ReferenceBackend.forward against float64 attention, one row at a time; SdpaBackend and get_backend with it."""

import pytest
import torch

from engine.serve.attention import ReferenceBackend, get_backend
from engine.serve.sdpa import SdpaBackend
from tests.ch31.ragged import meta_of, plain_attention, rounding, scattered_tables
from tests.grading import expect, expect_close, expect_equal, expect_raises, grades, rng

POOL = "31: Attention over the pool"
HEADS, KV_HEADS, WIDTH = 6, 2, 5
RAGGED = [(1, 1), (7, 7), (13, 1), (12, 4), (20, 9), (3, 1), (16, 16)]  # (context, rows): decodes, prompts, chunks


class Step:
    """One step over a pool in which every slot that no request has filled is NaN."""

    def __init__(self, salt, shapes, size, tables=None, padding=0, dtype=torch.float32):
        random, generator = rng(salt), rng.torch(salt)
        self.shapes, self.size, self.padding = shapes, size, padding
        scattered, num_blocks = scattered_tables(random, shapes, size)
        self.tables = tables or scattered
        shape = (num_blocks + 1, size, KV_HEADS, WIDTH)
        self.cache = tuple(torch.full(shape, torch.nan) for _ in "kv")
        for (s, _), table in zip(shapes, self.tables, strict=True):
            for p in range(s):
                for pool in self.cache:
                    if pool[table[p // size], p % size].isnan().all():  # a shared slot is filled once
                        pool[table[p // size], p % size] = torch.randn(KV_HEADS, WIDTH, generator=generator)
        self.cache = tuple(pool.to(dtype) for pool in self.cache)
        rows = sum(t for _, t in shapes) + padding
        self.q = 2 * torch.randn(rows, HEADS, WIDTH, generator=generator).to(dtype)
        self.meta = meta_of(shapes, size, self.tables, padding)

    def check(self, backend, scale=None, window=0, hint=None):
        got = backend.forward(self.q, self.cache, self.meta, **self.options(scale, window))
        real = self.q.shape[0] - self.padding
        expected = plain_attention(self.q, *self.cache, self.shapes, self.tables, self.size, scale, window)
        atol = self.atol(scale)
        rtol = 0.0 if self.q.dtype == torch.float32 else torch.finfo(self.q.dtype).eps
        rows = [f"{i} of request {r}, position {s - t + i}" for r, (s, t) in enumerate(self.shapes) for i in range(t)]
        expect_equal(list(got.shape), list(self.q.shape), what="shape at {i}", hint=hint, see=POOL)
        expect_equal(str(got.dtype), str(self.q.dtype), what="dtype of the result", hint="q's dtype", see=POOL)
        for row in range(real):
            what = f"row {rows[row]} (block size {self.size}), [head, d] {{i}}"
            expect_close(got[row], expected[row], atol, rtol, what=what, hint=hint, see=POOL)
        hint = "a request of length 0 is padding"
        expect_close(got[real:], torch.zeros_like(got[real:]), 0.0, what="padding rows, {i}", hint=hint, see=POOL)
        return got

    def atol(self, scale=None):
        k, v = (pool[~pool.isnan()].view(-1, WIDTH) for pool in self.cache)
        return rounding(self.q, k, v, max(s for s, _ in self.shapes), scale)

    @staticmethod
    def options(scale, window):
        """Only what is not the default is handed over."""
        return {**({} if scale is None else {"scale": scale}), **({"window": window} if window else {})}


@grades(ReferenceBackend.forward)
@pytest.mark.parametrize("size", [1, 3, 16])
def test_every_row_attends_to_its_own_context(size):
    """Decodes, whole prompts and later chunks side by side, in scattered blocks, everything else in the pool NaN."""
    hint = "queries are the last t positions of the s; nothing past the s-th slot may have any influence"
    Step(f"ragged {size}", RAGGED, size).check(ReferenceBackend(), hint=hint)
    random = rng(f"more ragged {size}")
    for i in range(4):
        shapes = [(s, random.randint(1, s)) for s in (random.randint(1, 2 * size + 5) for _ in range(4))]
        Step(f"ragged {size} {i}", shapes, size, padding=random.randint(0, 2)).check(ReferenceBackend(), hint=hint)


@grades(ReferenceBackend.forward)
def test_queries_of_a_later_chunk_stand_at_the_end_of_the_context():
    for s, t in ((9, 1), (9, 3), (9, 9), (16, 5)):
        hint = f"with {t} rows and a context of {s} the first row stands at position {s - t}"
        Step(f"chunk {s} {t}", [(s, t)], 4).check(ReferenceBackend(), hint=hint)


@grades(ReferenceBackend.forward)
def test_physical_blocks_may_be_in_any_order():
    """The same contexts in blocks in order, reversed and shuffled: the same result each time (case 26)."""
    steps, random = [], rng("orders")
    for order in (range(9), range(8, -1, -1), *(random.sample(range(9), 9) for _ in range(3))):
        step = Step("order", [(14, 3), (9, 9)], 3, tables=[list(order[:5]), list(order[5:8])])
        steps.append((step, step.check(ReferenceBackend(), hint="read keys through block_table, in logical order")))
    first, expected = steps[0]
    for step, got in steps[1:]:
        for pool, original in zip(step.cache, first.cache, strict=True):  # the same contexts, in the order of drawing
            for mine, others in zip(step.tables, first.tables, strict=True):
                assert torch.equal(pool[mine].nan_to_num(), original[others].nan_to_num())
        expect_close(got, expected, 2 * step.atol(), what="result with other physical blocks, {i}", see=POOL)


@grades(ReferenceBackend.forward)
def test_requests_may_share_blocks():
    """Two prompts with one prefix of two blocks, and a third that is that prefix's first five tokens."""
    Step("shared", [(8, 8), (9, 3), (11, 5)], 4, tables=[[4, 1], [4, 1, 3], [4, 1, 0]]).check(ReferenceBackend())


@grades(ReferenceBackend.forward)
def test_padding_rows_are_zero():
    step = Step("padding", [(6, 2), (9, 1)], 4, padding=3)
    step.check(ReferenceBackend())
    Step("only padding", [(1, 1)], 4, padding=1).check(ReferenceBackend())


@grades(ReferenceBackend.forward)
@pytest.mark.parametrize("scale", [None, 0.1, 1.0])
def test_the_scale_is_the_callers(scale):
    Step("scale", [(9, 4), (14, 1)], 4).check(ReferenceBackend(), scale=scale, hint="None means D ** -0.5")


@grades(ReferenceBackend.forward)
@pytest.mark.parametrize("window", [1, 2, 4, 5, 13, 100])
def test_a_window_shows_a_query_the_last_keys_only(window):
    hint = f"a query at p sees keys at positions above p - {window}, itself among them: {window} keys at most"
    Step("window", RAGGED, 4).check(ReferenceBackend(), window=window, hint=hint)


@grades(ReferenceBackend.forward)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_result_has_the_dtype_of_q(dtype):
    Step("dtype", RAGGED[:4], 4, dtype=dtype).check(ReferenceBackend())


@grades(ReferenceBackend.forward)
def test_attending_changes_nothing():
    step = Step("unchanged", [(9, 4), (14, 1)], 4, padding=1)
    before = [t.clone() for t in (step.q, *step.cache, step.meta.block_table)]
    ReferenceBackend().forward(step.q, step.cache, step.meta)
    names = ("q", "k_cache", "v_cache", "meta.block_table")
    for name, old, new in zip(names, before, (step.q, *step.cache, step.meta.block_table), strict=True):
        same = torch.equal(old.nan_to_num(0.5), new.nan_to_num(0.5))
        expect(same, f"ReferenceBackend.forward changed {name}", see=POOL)


# Given: the batched backend, and the list of backends.


@pytest.mark.parametrize("size", [1, 3, 16])
@pytest.mark.parametrize("window", [0, 1, 5])
def test_sdpa_gives_what_the_reference_gives(size, window):
    for i, shapes in enumerate([RAGGED, [(s, 1) for s in (1, 9, 30, 2)], [(40, 2), (3, 3), (5, 3), (64, 17)]]):
        for padding in (0, 2):
            step = Step(f"sdpa {size} {i}", shapes, size, padding=padding)
            step.check(SdpaBackend(), window=window)
            step.check(SdpaBackend(), scale=0.3, window=window)


def test_sdpa_serves_the_layers_of_many_steps():
    """Its plans are made once a step: another step, or another window in it, needs its own."""
    backend = SdpaBackend()
    for i in range(3):
        step = Step(f"steps {i}", [(9 + i, 4), (14, 1 + i)], 4)
        for window in (0, 3, 0):
            step.check(backend, window=window)


def test_backends_are_known_by_name():
    for name, kind in (("reference", ReferenceBackend), ("sdpa", SdpaBackend)):
        expect_equal(type(get_backend(name)).__name__, kind.__name__, what=f"get_backend({name!r})")
    error = expect_raises(ValueError, get_backend, "flash", match="'flash'")
    for name in ("auto", "reference", "sdpa"):
        expect(name in str(error), f"get_backend('flash'): the error does not list {name}")


def test_a_backend_allocates_zeros():
    for name in ("reference", "sdpa"):
        for pool in get_backend(name).allocate((5, 3, 2, 4), torch.float16, torch.device("cpu")):
            expect_equal((list(pool.shape), str(pool.dtype)), ([5, 3, 2, 4], "torch.float16"), what="pool {i}")
            expect(not pool.any(), "a new pool is not zero")
