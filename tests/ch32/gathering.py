"""SdpaBackend.forward: padded gathers, one attention call a group, against float64."""

import pytest
import torch

from engine.serve.sdpa import SdpaBackend
from tests.ch32.device import DEVICE
from tests.ch32.paged import PagedStep
from tests.grading import expect, expect_close, expect_equal, grades, rng

GATHERS = "32: Padded gathers"
MIXED = [(1, 1), (7, 7), (13, 1), (0, 1), (12, 4), (20, 9), (3, 1), (16, 16), (0, 1)]  # (context, rows)


def check(step, backend=None, scale=None, window=0, hint=None):
    options = {**({} if scale is None else {"scale": scale}), **({"window": window} if window else {})}
    got = (backend or SdpaBackend()).forward(step.q, step.cache, step.meta, **options)
    expect_equal(list(got.shape), list(step.q.shape), what="SdpaBackend.forward: shape", hint="[N, H, D]", see=GATHERS)
    expect_equal(str(got.dtype), str(step.q.dtype), what="SdpaBackend.forward: dtype", hint="q's dtype", see=GATHERS)
    atol, rtol, _ = step.bounds(scale)
    for r in range(len(step.shapes)):
        expected = step.attend(r, scale, window)[0]
        for j, row in enumerate(range(step.starts[r], step.starts[r + 1])):
            what = f"SdpaBackend.forward: {step.where(row)}, [head, d] {{i}}"
            padding = "a request of length 0 is padding: zeros"
            expect_close(got[row], expected[j], atol, rtol, what, hint if step.shapes[r][0] else padding, GATHERS)


@grades(SdpaBackend.forward)
@pytest.mark.parametrize("size", [1, 3, 16])
def test_padded_gathers_give_every_row_its_own_context(size):
    hint = "queries of a group stand row by row, the G heads of a row side by side, in the order of the mask"
    check(PagedStep(f"gathers {size}", MIXED, size), hint=hint)
    random = rng(f"more gathers {size}")
    for i in range(3):
        shapes = [(s, random.randint(1, s)) for s in (random.randint(1, 2 * size + 5) for _ in range(5))]
        check(PagedStep(f"gathers {size} {i}", shapes, size), hint=hint)


@grades(SdpaBackend.forward)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (8, 1), (12, 4)])
def test_padded_gathers_of_grouped_heads(heads, kv_heads):
    group = heads // kv_heads
    hint = f"query head h has KV head h // {group}: heads {group} * i and on are the group of KV head i"
    check(PagedStep(f"groups {heads}", MIXED, 4, heads, kv_heads), hint=hint)


@grades(SdpaBackend.forward)
@pytest.mark.parametrize("window", [1, 2, 5, 13, 100])
def test_padded_gathers_in_a_window(window):
    hint = "the plans know the window"
    check(PagedStep("gathers in a window", MIXED, 4), window=window, hint=hint)


@grades(SdpaBackend.forward)
def test_one_backend_serves_many_steps():
    backend = SdpaBackend()
    for i in range(2):
        step = PagedStep(f"steps {i}", [(9 + i, 4), (14, 1 + i)], 4)
        for window in (0, 3, 0):
            check(step, backend, window=window, hint="another step, or another window in it, has plans of its own")


@grades(SdpaBackend.forward)
@pytest.mark.parametrize("scale", [None, 0.1, 1.0])
def test_padded_gathers_take_the_callers_scale(scale):
    check(PagedStep("gathers and scale", MIXED, 4), scale=scale, hint="scale=None means D ** -0.5")


@grades(SdpaBackend.forward)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_padded_gathers_keep_the_dtype(dtype):
    """PyTorch may round scores, weights and sums to the type as well, which the bound for kernels does not allow."""
    step = PagedStep("half", MIXED[:5], 4, dtype=dtype)
    got = SdpaBackend().forward(step.q, step.cache, step.meta)
    expect_equal(str(got.dtype), str(dtype), what="SdpaBackend.forward: dtype", hint="q's dtype", see=GATHERS)
    for r in range(len(step.shapes)):
        mine, expected = got[step.starts[r] : step.starts[r + 1]], step.attend(r)[0]
        largest = max([x.abs().max().item() for x in step.contexts[r][1:] if x.numel()], default=0.0)
        atol = 32 * torch.finfo(dtype).eps * largest  # scores here stay below 16: off by 8 eps, weights by twice that
        expect_close(mine, expected, atol, what=f"rows of request {r} in {dtype}, {{i}}", see=GATHERS)


@grades(SdpaBackend.forward)
def test_one_attention_call_for_a_group(monkeypatch):
    step, backend, calls = PagedStep("calls", MIXED, 4), SdpaBackend(), []
    original = torch.nn.functional.scaled_dot_product_attention

    def counted(query, key, value, *args, **kwargs):
        calls.append((list(query.shape), list(key.shape), list(value.shape), kwargs.get("enable_gqa", False)))
        return original(query, key, value, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    backend.forward(step.q, step.cache, step.meta)
    groups = backend.plans(step.meta, 0, 3)
    what = "calls of F.scaled_dot_product_attention"
    expect_equal(len(calls), len(groups), what=what, hint="one for each entry of self.plans(…)", see=GATHERS)
    shapes = []
    for rows, blocks, _, _ in groups:
        (requests, t), s = rows.shape, blocks.shape[1] * step.size
        shapes.append(([requests, 2, t * 3, step.width], *[[requests, 2, s, step.width]] * 2, False))
    hint = "[R, Hkv, T * G, D] against [R, Hkv, S, D]: the heads of a group become queries, nothing is repeated"
    expect_equal(sorted(calls), sorted(shapes), what="shapes of q, k, v in call {r}", hint=hint, see=GATHERS)


@grades(SdpaBackend.forward)
def test_padded_gathers_change_nothing():
    step = PagedStep("gathers unchanged", MIXED, 4)
    before = [x.clone() for x in (step.q, *step.cache)]
    SdpaBackend().forward(step.q, step.cache, step.meta)
    for name, old, new in zip(("q", "k_cache", "v_cache"), before, (step.q, *step.cache), strict=True):
        same = torch.equal(old.nan_to_num(0.5), new.nan_to_num(0.5))
        expect(same, f"SdpaBackend.forward changed {name}", see=GATHERS)
    only = PagedStep("only padding", [(0, 1), (0, 1)], 4)
    got = SdpaBackend().forward(only.q, only.cache, only.meta)
    expect_close(got, torch.zeros(only.q.shape, device=DEVICE), 0.0, what="padding alone, {i}", see=GATHERS)
