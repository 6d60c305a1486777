"""sample_kernel: the best of each part of a row, and with pick_kernel the tokens that gumbel_argmax gives."""

import math

import pytest
import torch

from engine.serve.device_sampler import DeviceSampler, gumbel_argmax
from engine.serve.kernels.sample import draw, sample_kernel
from engine.serve.request import Request, SamplingParams
from tests.ch32.device import DEVICE, DTYPES
from tests.ch32.paged import EDGE, guarded
from tests.ch33.noise import DEVICE_TOKENS, Scored, expect_drawn, rows_of, tensors
from tests.grading import expect, expect_close, expect_equal, grades


def laid_out(logits, gap):
    """The same rows with `gap` elements of +inf between them, and around."""
    n, vocab = logits.shape
    flat = torch.full((n * (vocab + gap) + 2 * EDGE,), math.inf, dtype=logits.dtype, device=DEVICE)
    rows = flat[EDGE:-EDGE].view(n, vocab + gap)[:, :vocab]
    rows.copy_(logits)
    return rows


def check(logits, temperatures, seeds, places, parts=3, tile=16, gap=0, hint=None):
    n, vocab = logits.shape
    rows = laid_out(logits, gap)
    values, around_values = guarded((n, parts))
    ids, around_ids = guarded((n, parts), torch.int64)
    rest = tensors(temperatures, seeds, places, DEVICE)
    sample_kernel[(n, parts)](rows, *rest, values, ids, rows.stride(0), vocab, parts, tile)
    around_values("sample_kernel (values)", DEVICE_TOKENS)
    around_ids("sample_kernel (ids)", DEVICE_TOKENS)
    size = -(-vocab // (parts * tile)) * tile
    for r, row in enumerate(zip(logits, temperatures, seeds, places, strict=True)):
        scored = Scored(*row)
        for part in range(parts):
            begin, end = min(part * size, vocab), min((part + 1) * size, vocab)
            where = f"row {r} (temperature {row[1]:g}), part {part} of {parts}, tokens {begin} to {end - 1} of {vocab}"
            value, token = values[r, part].item(), ids[r, part].item()
            best = scored.best(begin, end)
            if best is None:
                why = "nothing above -inf: -inf and VOCAB"
                expect_equal((value, token), (-math.inf, vocab), f"sample_kernel, {where}: (value, id), {{i}}", why,
                             DEVICE_TOKENS)  # fmt: skip
                continue
            low, high, tokens = best
            nearest = value if low <= value <= high else low if value < low or math.isnan(value) else high
            expect_close(value, nearest, 0.0, what=f"value of {where}", hint=hint, see=DEVICE_TOKENS)
            if token not in tokens:
                expect_equal(token, min(tokens), f"id of {where}", hint, DEVICE_TOKENS)


@grades(sample_kernel)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocab", "parts", "tile"), [(48, 3, 16), (100, 2, 16), (7, 1, 32), (130, 4, 8)])
def test_the_largest_logit_of_each_part(vocab, parts, tile, dtype):
    """Vocabularies that are whole parts, whole tiles, and neither; temperature 0."""
    logits, _, seeds, places = rows_of(f"parts {vocab}", 3, vocab, dtype)
    hint = "parts are runs of VOCAB / PARTS tokens, rounded up to whole tiles; mask what is not below VOCAB"
    check(logits, [0.0] * 3, seeds, places, parts, tile, hint=hint)


@grades(sample_kernel)
def test_rows_are_a_stride_apart():
    logits, _, seeds, places = rows_of("stride", 4, 41)
    hint = "row n begins at n * row_stride; what lies between is no logit"
    check(logits, [0.0] * 4, seeds, places, gap=13, hint=hint)


@grades(sample_kernel)
def test_the_lowest_of_equal_logits():
    logits, _, seeds, places = rows_of("equal", 4, 90)
    logits[0] = -3.5
    logits[1, 20:] = logits[1].max()
    logits[2] = logits[2].round()
    logits[3, 5::7] = 9.0
    hint = "a later tile wins only with a larger score, and in a tile the lowest token with the largest"
    check(logits, [0.0] * 4, seeds, places, 2, 16, hint=hint)


@grades(sample_kernel)
def test_parts_without_tokens_or_without_numbers():
    logits, _, seeds, places = rows_of("empty", 3, 33)
    logits[0] = -torch.inf
    logits[1, :16] = -torch.inf
    logits[1, 32] = -torch.inf
    logits[2] -= 1e30
    check(logits, [0.0] * 3, seeds, places, 5, 16, hint="the parts past the vocabulary are empty")
    check(logits[:2], [0.6] * 2, seeds[:2], places[:2], 3, 16, hint="-inf plus noise is -inf")


@grades(sample_kernel)
@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_a_nan_wins_its_part_as_no_token(heat):
    """First, in the middle, in the last of several tiles, and everywhere."""
    logits, _, seeds, places = rows_of("nan", 4, 40)
    logits[0, 0] = logits[1, 21] = logits[2, 39] = torch.nan
    logits[3] = torch.nan
    check(logits, [heat] * 4, seeds, places, 1, 16, hint="a part with a NaN: +inf and VOCAB")
    check(logits[:2], [heat] * 2, seeds[:2], places[:2], 2, 16, hint="a part without NaN is as ever")


@grades(sample_kernel)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_noise_comes_from_seed_token_and_place(dtype):
    """Seeds of either sign and all sizes, places up to 2^31."""
    hint = "b: the first number of tl.philox(seed, token, place, 0, 0), in uint32; u = ((b >> 9) + 0.5) * 2^-23"
    check(*rows_of("noise", 8, 45, dtype), parts=1, tile=64, hint=hint)
    logits, _, seeds, places = rows_of("more noise", 2, 60, dtype)
    check(logits, [1.0, 3.0], seeds, places, 2, 16, hint=hint)


@grades(sample_kernel)
@pytest.mark.parametrize("heat", [1e-38, 1e-3, 1e30])
def test_no_temperature_overflows(heat):
    logits, _, seeds, places = rows_of(f"heat {heat}", 2, 30)
    hint = "logit / temperature overflows where logit + temperature * g does not"
    check(logits - 20, [heat] * 2, seeds, places, 1, 32, hint=hint)


@grades(sample_kernel, gumbel_argmax)
def test_the_kernel_and_the_cpu_draw_the_same_tokens():
    """`draw`, both launches, against gumbel_argmax; no rows."""
    logits, temperatures, seeds, places = rows_of("same", 5, 1500)
    logits[4, 700] = torch.nan
    got = draw(logits.to(DEVICE), *tensors(temperatures, seeds, places, DEVICE))
    expect_drawn(got.cpu(), logits, temperatures, seeds, places, "draw")
    cpu = gumbel_argmax(logits, *tensors(temperatures, seeds, places))
    expect_drawn(cpu, logits, temperatures, seeds, places, "gumbel_argmax")
    nothing = tensors([], [], [], DEVICE)
    expect_equal(draw(logits[:0].to(DEVICE), *nothing).tolist(), [], "draw of no rows", see=DEVICE_TOKENS)


@grades(sample_kernel)
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
def test_the_sampler_draws_on_the_gpu():
    params = [SamplingParams(temperature=t, seed=s) for t in (0, 0.9) for s in (3, -3, 1 << 70)]
    logits, _, _, places = rows_of("sampler on a gpu", len(params), 151_936)
    rows = [(Request(str(i), [1], p), place) for i, (p, place) in enumerate(zip(params, places, strict=True))]
    got = torch.tensor(DeviceSampler()(logits.to(DEVICE), rows))
    seeds = [3, -3, (1 << 70) & ((1 << 64) - 1)] * 2
    expect_drawn(got, logits, [p.temperature for p in params], seeds, places, "DeviceSampler on the GPU")
    logits[2, 5] = torch.nan
    with pytest.raises(ValueError, match="row 2"):
        DeviceSampler()(logits.to(DEVICE), rows)
    expect(logits.isnan().sum() == 1, "DeviceSampler changed the logits")
