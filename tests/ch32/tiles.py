"""attend_tiles and merge_splits: softmax over keys that come in parts, against float64 over all of them."""

import math

import pytest
import torch

from engine.serve.online import attend_tiles, merge_splits
from tests.ch32.paged import UNIT, bounds
from tests.grading import expect_close, expect_equal, grades, rng

ONLINE, SPLITTING = "32: Online softmax", "32: Splitting a long context"


class Keys:
    """Queries, keys, values, and who sees what; cut(…) hands them out in tiles that do not outlive their turn."""

    def __init__(self, salt, count, queries=3, width=6, dtype=torch.float32, scores=None, hidden=0.2):
        generator = rng.torch(salt)
        self.q = torch.randn(queries, width, generator=generator).to(dtype)
        self.k, self.v = (torch.randn(count, width, generator=generator).to(dtype) for _ in "kv")
        self.seen = torch.rand(queries, count, generator=generator) >= hidden
        self.scale, self.exact = width**-0.5, scores is not None
        if self.exact:  # one product, of whole numbers: nothing is rounded
            self.q, self.k, self.scale = torch.zeros(queries, width), torch.zeros(count, width), 1.0
            self.q[:, 0], self.k[:, 0] = 1, torch.tensor(scores, dtype=torch.float32)

    def blind(self, query, keys=slice(None)):
        self.seen[query, keys] = False
        return self

    def cut(self, sizes):
        """One tile after the other, all in the same memory; what nobody sees is NaN, or infinite."""
        begin, most = 0, max(sizes, default=0)
        k, v = (torch.empty(most, x.shape[1], dtype=x.dtype) for x in (self.k, self.v))
        seen = torch.empty(len(self.q), most, dtype=torch.bool)
        for size in sizes:
            part = slice(begin, begin + size)
            k[:size], v[:size], seen[:, :size] = self.k[part], self.v[part], self.seen[:, part]
            nobody = ~seen[:, :size].any(dim=0)
            k[:size][nobody], v[:size][nobody] = torch.nan, torch.inf if begin % 2 else torch.nan
            yield k[:size], v[:size], seen[:, :size]
            k.fill_(torch.nan), v.fill_(torch.nan), seen.fill_(True)
            begin += size

    def expected(self):
        scores = (self.q.double() @ self.k.double().T * self.scale).masked_fill(~self.seen, -torch.inf)
        lse = scores.logsumexp(1)
        return (scores - lse.nan_to_num(neginf=0.0)[:, None]).exp() @ self.v.double(), lse

    def check(self, sizes, hint=None):
        got = attend_tiles(self.q, self.cut(sizes), self.scale)
        expect_equal(len(got), 2, what="attend_tiles: number of results", hint="(out, lse)", see=ONLINE)
        product = self.q.norm(dim=1).max() * self.k.norm(dim=1).max() if len(self.k) else 0.0
        value = self.v.abs().max().item() if len(self.v) else 0.0
        products = 0 if self.exact else self.q.shape[1]
        atol, _, lse_atol = bounds(self.scale * float(product), value, len(self.k), products, tile=1)
        out, lse = self.expected()
        what = f"attend_tiles, tiles of {sizes} keys"
        rows = f"{what}: query, d {{i}} of out"
        expect_close(got[0], out, atol, what=rows, hint=hint, see=ONLINE)
        expect_close(got[1], lse, lse_atol, 2 * UNIT, f"{what}: query {{i}} of lse", hint, ONLINE)
        for name, x in zip(("out", "lse"), got, strict=True):
            expect_equal(str(x.dtype), "torch.float32", what=f"attend_tiles: dtype of {name}", see=ONLINE)
        return got


@grades(attend_tiles)
def test_tiles_give_what_a_softmax_over_all_keys_gives():
    for i, sizes in enumerate([[1], [8], [3, 5], [5, 1, 1, 9, 2], [16, 16, 16, 7], [1] * 12]):
        hint = "when a tile brings a larger score, both sums made so far shrink by exp(old largest - new largest)"
        Keys(f"tiles {i}", sum(sizes), hidden=0.0).check(sizes, hint)


@grades(attend_tiles)
def test_any_cut_gives_the_same():
    keys, random = Keys("cuts", 30), rng("cuts")
    for _ in range(6):
        cuts = sorted(random.sample(range(1, 30), random.randrange(0, 6)))
        keys.check([b - a for a, b in zip([0, *cuts], [*cuts, 30], strict=True)], "no tile is special")


@grades(attend_tiles)
def test_unseen_keys_have_no_influence():
    """Some keys are seen by some queries, some by none: those hold NaN, or infinity."""
    for i in range(3):
        keys = Keys(f"unseen {i}", 20, hidden=0.5).blind(slice(None), slice(3, 7))
        keys.check([4, 4, 8, 4], "mask the scores with -inf; 0 * NaN is NaN, so NaN values need replacing as well")
        hint = "nothing seen so far: the largest score is -inf, and -inf - -inf is NaN"
        Keys(f"late {i}", 12).blind(slice(None), slice(0, 6)).check([3, 3, 6], hint)
        Keys(f"early {i}", 12).blind(slice(None), slice(5, 12)).check([5, 4, 3], "a tile that nobody sees adds nothing")


@grades(attend_tiles)
def test_a_query_that_sees_nothing():
    hint = "zeros and lse -inf, and no NaN from 0 / 0 or -inf - -inf"
    Keys("blind", 9).blind(1).check([4, 5], hint)
    Keys("all blind", 9, hidden=1.0).check([4, 5], hint)
    Keys("no keys", 0).check([], f"no tile at all: {hint}")


@grades(attend_tiles)
@pytest.mark.parametrize("scores", [[1e4, -1e4, 9999], [-1e4, -9999, -9990, -1e4], [-1e4, 0, 1e4, 9999, 1e4], [90] * 5])
def test_scores_of_any_size(scores):
    hint = "exp of a score overflows from 89 on: take the largest so far off first"
    for sizes in ([len(scores)], [1] * len(scores), [1, len(scores) - 1]):
        Keys("large", len(scores), scores=scores, hidden=0.0).check(sizes, hint)


@grades(attend_tiles)
def test_the_scale_counts_once():
    for scale in (0.1, 1.0, 2.0):
        keys = Keys("scale", 11)
        keys.scale = scale
        keys.check([4, 7], f"scores are {scale} * q @ k")


@grades(attend_tiles)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    Keys("half", 40, dtype=dtype).check([16, 16, 8], "convert q, k and v before the products")


# merge_splits


def parts(salt, count, queries=3, width=5, lses=None):
    generator = rng.torch(salt)
    outs = torch.randn(count, queries, width, generator=generator)
    return outs, 3 * torch.randn(count, queries, generator=generator) if lses is None else torch.tensor(lses)


def check_merge(outs, lses, hint=None):
    before = outs.clone(), lses.clone()
    got = merge_splits(outs, lses)
    expect_equal(len(got), 2, what="merge_splits: number of results", hint="(out, lse)", see=SPLITTING)
    out, lse = merged(outs, lses)
    atol = merge_atol(outs, lses)
    what = f"merge_splits of {len(outs)} parts"
    expect_close(got[0], out, atol, what=f"{what}: query, d {{i}} of out", hint=hint, see=SPLITTING)
    lse_atol = UNIT * len(outs) * (12 + level(lses))
    expect_close(got[1], lse, lse_atol, 2 * UNIT, f"{what}: query {{i}} of lse", hint, SPLITTING)
    for name, old, new in zip(("outs", "lses"), before, (outs, lses), strict=True):
        same = torch.equal(old.nan_to_num(0.5), new.nan_to_num(0.5))
        expect_equal(same, True, what=f"merge_splits: {name} is unchanged", see=SPLITTING)
    return got


def merge_atol(outs, lses):
    """Of S parts: exp and its argument, which is off by units of the largest lse each time that two are merged, then
    two sums of S and their quotient."""
    largest = outs.nan_to_num(0.0).abs().max().item()
    return UNIT * largest * len(lses) * (4 * level(lses) + 24)


def level(lses):
    return lses.nan_to_num(neginf=0.0).abs().max().item()


def merged(outs, lses):
    lses = lses.double()
    lse = lses.logsumexp(0)
    weights = (lses - lse.nan_to_num(neginf=0.0)).exp()
    return (weights[..., None] * outs.double().masked_fill(lses[..., None] == -torch.inf, 0)).sum(0), lse


@grades(merge_splits)
@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_parts_count_by_what_they_saw(count):
    check_merge(*parts(f"merge {count}", count), hint="the weight of a part is exp(its lse - lse of all)")


@grades(merge_splits)
def test_a_part_that_saw_nothing_has_no_weight():
    for i, empty in enumerate(([0], [1], [0, 3], [1, 2, 3])):
        outs, lses = parts(f"empty {i}", 4)
        outs[empty], lses[empty] = torch.nan, -torch.inf
        lses[0, 2], outs[0, 2] = -torch.inf, torch.nan  # and one query elsewhere
        check_merge(outs, lses, "lse -inf: weight 0, and its out may hold NaN, which times 0 is NaN")


@grades(merge_splits)
def test_nobody_saw_anything():
    outs, lses = parts("nothing", 3)
    lses[:, 1], outs[:, 1] = -torch.inf, torch.nan
    check_merge(outs, lses, "a query that no part has seen anything of gets zeros and -inf")
    check_merge(torch.full((2, 3, 5), torch.nan), torch.full((2, 3), -torch.inf), "zeros and -inf")


@grades(merge_splits)
def test_large_lses():
    for values in ([1e4, 9999.0, 1e4], [-1e4, -9999.0, -9998.0], [1e4, -1e4, 0.0], [100.0, 99.0, -math.inf]):
        outs, lses = parts("large", 3, lses=[[x] * 2 for x in values])
        check_merge(outs[:, :2], lses, "take the largest lse off before exp: it overflows from 89 on")


@grades(attend_tiles, merge_splits)
def test_merging_shares_gives_attention_over_all():
    keys = Keys("both", 40)
    results = []
    for begin, end in ((0, 7), (7, 8), (8, 33), (33, 40)):
        part = Keys("both", 40)
        part.seen, part.k, part.v = keys.seen[:, begin:end], keys.k[begin:end], keys.v[begin:end]
        results.append(attend_tiles(part.q, part.cut([1] * (end - begin)), part.scale))
    got = merge_splits(*(torch.stack(x) for x in zip(*results, strict=True)))
    for name, x, y in zip(("out", "lse"), got, keys.expected(), strict=True):
        expect_close(x, y, 1e-5, what=f"{name} of 4 shares, {{i}}", hint="shares are disjoint", see=SPLITTING)
