"""gumbel_argmax on the CPU, and DeviceSampler, which is built on it."""

import math

import pytest
import torch

from engine.models.qwen3 import test_model as small_model
from engine.serve.config import EngineConfig
from engine.serve.device_sampler import DeviceSampler, gumbel_argmax
from engine.serve.engine import EngineCore
from engine.serve.request import Request, SamplingParams
from engine.serve.sampler import SimpleSampler
from tests.ch33.noise import DEVICE_TOKENS, expect_drawn, rows_of, tensors
from tests.grading import expect, expect_equal, expect_raises, grades, rng

NAME = "gumbel_argmax"


def check(logits, temperatures, seeds, places, hint=None):
    before = logits.clone()
    got = gumbel_argmax(logits, *tensors(temperatures, seeds, places))
    expect_drawn(got, before, temperatures, seeds, places, NAME, hint)
    same = torch.equal(logits.nan_to_num(0.5), before.nan_to_num(0.5))
    expect(same, f"{NAME} changed the logits", "copy them before adding noise", DEVICE_TOKENS)


@grades(gumbel_argmax)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [1, 50, 333])
def test_the_best_of_logit_and_noise(vocab, dtype):
    hint = "largest of logit + temperature * g, g = -log(-log(u)), u = ((b >> 9) + 0.5) * 2^-23 in float32"
    for i in range(3):
        check(*rows_of(f"best {vocab} {i}", 9, vocab, dtype), hint=hint)


@grades(gumbel_argmax)
def test_temperature_zero_takes_the_largest():
    logits, _, seeds, places = rows_of("greedy", 6, 70)
    logits[1], logits[2, 40:60] = 0.5, logits[2].max()
    logits[3, ::3] = logits[3, 1::3] = -torch.inf
    hint = "no noise at temperature 0; of equal logits the lowest token"
    check(logits, [0.0] * 6, seeds, places, hint)


@grades(gumbel_argmax)
def test_equal_logits_in_narrow_types():
    """Many ties, whatever order amax or argmax would look at them in."""
    logits = rows_of("ties", 40, 300, torch.bfloat16, spread=0.1)[0].round(decimals=1)
    check(logits, [0.0] * 40, [0] * 40, [0] * 40, "of equal scores the lowest token")


@grades(gumbel_argmax)
def test_a_row_with_nothing_to_draw_from_gives_v():
    for heat in (0.0, 0.8):
        logits, _, seeds, places = rows_of(f"nothing {heat}", 6, 30)
        logits[0] = -torch.inf
        logits[1] = torch.nan
        logits[2, 17] = torch.nan
        logits[3, :29] = -torch.inf
        logits[4, :15] = -torch.inf
        check(logits, [heat] * 6, seeds, places, "V for a row that is -inf throughout, or has a NaN anywhere")


@grades(gumbel_argmax)
@pytest.mark.parametrize("heat", [1e-38, 1e-6, 1e4, 1e30])
def test_temperatures_of_any_size(heat):
    logits, _, seeds, places = rows_of(f"heat {heat}", 5, 60)
    hint = "logit / temperature overflows where logit + temperature * g does not"
    check(logits - 20, [heat] * 5, seeds, places, hint)


@grades(gumbel_argmax)
def test_a_draw_depends_on_its_own_row_alone():
    logits, temperatures, seeds, places = rows_of("alone", 8, 90)
    whole = gumbel_argmax(logits, *tensors(temperatures, seeds, places)).tolist()
    for n, token in enumerate(whole):
        alone = gumbel_argmax(logits[n : n + 1], *tensors(*([x[n]] for x in (temperatures, seeds, places))))
        what = f"{NAME}: row {n} alone, against the same row among eight"
        expect_equal(alone.tolist(), [token], what, see=DEVICE_TOKENS)


@grades(gumbel_argmax)
@pytest.mark.parametrize("heat", [0.7, 2.0])
def test_draws_follow_the_softmax(heat):
    """Chi-square of 4,000 draws of 7 tokens, one seed, places 0 to 3,999.

    Laurent and Massart (2000): with k = 6 degrees of freedom the statistic exceeds k + 2 sqrt(k x) + 2 x with
    probability e^-x at most; x = 20 gives 67.9 and 2e-9.
    """
    count, logits = 4_000, torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -0.5, 1.5])
    seed = rng.number("distribution") % (1 << 62)
    drawn = gumbel_argmax(logits.expand(count, 7), *tensors([heat] * count, [seed] * count, range(count)))
    expected = count * (logits.double() / heat).softmax(0)
    outside = ((drawn < 0) | (drawn > 6)).sum().item()
    expect_equal(outside, 0, f"{NAME}: draws that are no token", see=DEVICE_TOKENS)
    found = torch.bincount(drawn, minlength=7)
    chi = ((found - expected) ** 2 / expected).sum().item()
    message = f"{NAME}: {count} draws at temperature {heat} are not those of the softmax: chi-square {chi:.0f}"
    expect(chi < 6 + 2 * math.sqrt(6 * 20) + 40, message, "each token needs noise of its own", DEVICE_TOKENS)


# DeviceSampler, which is given; without a GPU it draws through gumbel_argmax.


def requests_of(all_params):
    return [Request(str(i), [1], params) for i, params in enumerate(all_params)]


@grades(gumbel_argmax)
def test_the_sampler_draws_by_seed_and_place():
    params = [SamplingParams(temperature=t, seed=s) for t in (0, 0.9, 3.0, 5.0) for s in (3, -3, 1 << 62)]
    logits, _, _, places = rows_of("sampler", len(params), 80)
    got = torch.tensor(DeviceSampler()(logits, list(zip(requests_of(params), places, strict=True))))
    expect_drawn(got, logits, [p.temperature for p in params], [p.seed for p in params], places, "DeviceSampler")


@grades(gumbel_argmax)
def test_a_token_does_not_depend_on_its_neighbours():
    kinds = [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.3, "top_p": 0.8}]
    requests = requests_of([SamplingParams(**kinds[i % 4], seed=100 + i) for i in range(12)])
    logits, _, _, places = rows_of("neighbours", 12, 60)
    rows, sampler, random = list(zip(requests, places, strict=True)), DeviceSampler(), rng("neighbours")
    whole = sampler(logits, rows)
    for _ in range(4):
        chosen = random.sample(range(12), random.randint(1, 12))
        got = sampler(logits[chosen], [rows[i] for i in chosen])
        what = f"DeviceSampler: tokens of the rows {chosen} together, against those of all twelve, row {{i}}"
        expect_equal(got, [whole[i] for i in chosen], what, see=DEVICE_TOKENS)


@grades(gumbel_argmax)
def test_filtered_rows_are_those_of_the_simple_sampler():
    filters = [{"top_k": 3}, {"top_p": 0.6}, {"top_p": 0.4}, {"top_k": 9, "top_p": 0.9}, {"top_k": 1}]
    params = [SamplingParams(temperature=4.0, seed=i, **more) for i, more in enumerate(filters)]
    greedy = [SamplingParams(top_k=3), SamplingParams(top_p=0.5)]  # at temperature 0 there is nothing to filter
    logits, _, _, places = rows_of("filtered", 7, 60)
    rows = list(zip(requests_of([*params, *greedy]), places, strict=True))
    got, right = DeviceSampler()(logits, rows), SimpleSampler()(logits, rows)
    expect_equal(got, right, "DeviceSampler: token of filtered row {i}", "as SimpleSampler has them", DEVICE_TOKENS)


@grades(gumbel_argmax)
@pytest.mark.parametrize("seed", [1 << 63, -(1 << 63) - 1, 1 << 200, None])
def test_seeds_beyond_64_bits_are_wrapped(seed):
    wrapped = (seed or 0) & ((1 << 64) - 1)
    wrapped -= (wrapped >> 63) << 64
    logits, _, _, places = rows_of("wrapped", 2, 50)
    requests = requests_of([SamplingParams(temperature=1.0, seed=seed)] * 2)
    got = torch.tensor(DeviceSampler()(logits, list(zip(requests, places, strict=True))))
    expect_drawn(got, logits, [1.0] * 2, [wrapped] * 2, places, f"DeviceSampler, seed {seed}")


@grades(gumbel_argmax)
def test_hot_rows_draw_from_everything():
    requests = requests_of([SamplingParams(temperature=1e300, seed=i) for i in range(40)])
    logits = rows_of("hot", 40, 50)[0]
    got = DeviceSampler()(logits, [(request, 3) for request in requests])
    message = f"40 rows at temperature 1e300 gave only the tokens {sorted(set(got))}"
    expect(len(set(got)) >= 15, message, see=DEVICE_TOKENS)


@grades(gumbel_argmax)
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}], ids=str)
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_row_with_nothing_to_draw_from_is_refused(value, params):
    logits = rows_of("refused", 3, 20)[0]
    logits[1] = value
    rows = [(request, 0) for request in requests_of([SamplingParams(**params, seed=1)] * 3)]
    call = f"DeviceSampler on a row of {value}"
    match = None if "top_k" in params else "row 1"
    expect_raises(ValueError, DeviceSampler(), logits, rows, match=match, call=call, see=DEVICE_TOKENS)


@grades(gumbel_argmax)
def test_samples_of_one_prompt_differ_and_come_again():
    def run():
        core = EngineCore(small_model(), EngineConfig(num_blocks=40, block_size=8), sampler=DeviceSampler())
        core.add_request("a", [1, 2, 3], SamplingParams(12, temperature=2.0, n=3, seed=7, ignore_eos=True))
        texts = {}
        while core.has_unfinished:
            for output in core.step():
                texts.setdefault(output.request_id, []).extend(output.new_token_ids)
        return texts

    texts = run()
    expect_equal(len({tuple(text) for text in texts.values()}), 3, "different texts of n=3", see=DEVICE_TOKENS)
    expect_equal(run(), texts, "the same request again, text {i}", "nothing but seed and place decides", DEVICE_TOKENS)


def test_no_rows_no_tokens():
    assert DeviceSampler()(torch.zeros(0, 5), []) == []
