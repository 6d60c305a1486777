"""Randomness belongs to a request and a position; log-probabilities are the model's. On the small real model."""

from functools import cache

import pytest
import torch

from engine.models.qwen3 import test_model
from engine.serve.config import EngineConfig
from engine.serve.engine import EngineCore
from engine.serve.request import Request, SamplingParams, derive_seed
from engine.serve.sampler import SimpleSampler
from tests.ch31.fake_pool import LOOP
from tests.ch31.harness import tokens
from tests.ch31.lifetime import run
from tests.grading import expect, expect_close, expect_equal, rng

VOCAB = 199
PLACES = {
    "alone": {},
    "in small chunks": {"max_num_batched_tokens": 5},
    "with the cap of long prefills": {"long_prefill_token_threshold": 3},
    "preempted, recomputed": {"num_blocks": 12, "block_size": 4},
    "preempted, swapped": {
        "num_blocks": 12,
        "block_size": 4,
        "preemption_mode": "swap",
        "enable_prefix_caching": False,
    },  # fmt: skip
    "without a prefix cache": {"enable_prefix_caching": False, "max_num_seqs": 2},
}


@cache
def model():
    return test_model(rng.number("sampling model"))


def new_core(**settings):
    return EngineCore(model(), EngineConfig(**{"num_blocks": 64, "block_size": 8, **settings}))


def prompts(count):
    random = rng("sampled prompts")
    shared = tokens(random, 9, VOCAB)
    return [[*shared, *tokens(random, random.randint(1, 8), VOCAB)] for _ in range(count)]


def texts(core, requests):
    """Final output tokens by id, of (id, prompt, params) added at once."""
    for name, prompt, params in requests:
        core.add_request(name, prompt, params)
    return {o.request_id: o.output_token_ids for o in run(core) if o.finished}


def hot(seed, **params):
    return SamplingParams(**{"max_tokens": 12, "temperature": 1.5, "seed": seed, **params})


@cache
def alone():
    return [texts(new_core(), [("r", p, hot(i))])["r"] for i, p in enumerate(prompts(4))]


@pytest.mark.parametrize("place", PLACES)
def test_a_seeded_text_does_not_depend_on_company_chunks_or_preemption(place):
    core = new_core(**PLACES[place])
    requests = [(str(i), p, hot(i)) for i, p in enumerate(prompts(4))]
    requests += [(f"greedy {i}", p, SamplingParams(max_tokens=9)) for i, p in enumerate(prompts(3))]
    order = rng(f"order {place}")
    order.shuffle(requests)
    got = texts(core, requests)
    about = {"hint": "a generator of its own for each row, from (the request's seed, the output position)", "see": LOOP}
    for i, expected in enumerate(alone()):
        expect_equal(got[str(i)], expected, f"{place}: token {{i}} of seeded request {i}", **about)
    if "preempted" in place:
        expect(core.num_preemptions > 0, f"{place}: nobody was preempted", see=LOOP)


def test_a_seeded_request_repeats_beside_an_unseeded_one():
    core, prompt = new_core(), prompts(1)[0]
    pairs = [texts(core, [("seeded", prompt, hot(7)), ("free", prompt, hot(None))]) for _ in range(2)]
    expect_equal(pairs[1]["seeded"], pairs[0]["seeded"], "token {i} of the seeded request, second time", see=LOOP)
    expect(pairs[0]["free"] != pairs[1]["free"], "a request without a seed gave the same text twice", see=LOOP)


def test_seeds_of_unseeded_requests_come_from_the_engine():
    prompt = prompts(1)[0]
    runs = [texts(new_core(seed=s), [("a", prompt, hot(None)), ("b", prompt, hot(None))]) for s in (3, 3, 4)]
    expect_equal(runs[0], runs[1], "text of two engines with the same seed", see=LOOP)
    expect(runs[0] != runs[2], "engines with different seeds gave the same texts", see=LOOP)
    expect(runs[0]["a"] != runs[0]["b"], "two requests without a seed gave the same text", see=LOOP)


def test_samples_of_one_prompt_differ_and_repeat():
    prompt, params = prompts(1)[0], hot(5, n=4, temperature=1.0)
    runs = [texts(new_core(), [("r", prompt, params)]) for _ in range(2)]
    expect_equal(runs[0], runs[1], "samples with the same seed, second time", see=LOOP)
    different = {tuple(text) for text in runs[0].values()}
    expect(len(different) > 1, "n=4 at temperature 1: all samples are equal", "`child(i)` has a seed of its own", LOOP)


def test_every_position_draws_anew():
    """Nearly uniform over 199 tokens: the same random number at every position would show as the same token."""
    text = texts(new_core(), [("r", prompts(1)[0], hot(1, temperature=1e6))])["r"]
    expect(len(set(text)) > 6, f"12 nearly uniform draws gave only {len(set(text))} different tokens", see=LOOP)


def test_the_sampler_draws_each_row_from_its_own_seed_and_position():
    logits = 6 * torch.randn(6, VOCAB, generator=rng.torch("logits"))
    requests = [Request(f"r{i}", [1], hot(i) if i % 2 else SamplingParams()) for i in range(6)]
    rows = [(request, i) for i, request in enumerate(requests)]
    together = SimpleSampler()(logits, rows)
    for i, row in enumerate(rows):
        (single,) = SimpleSampler()(logits[i : i + 1], [row])
        expect_equal(together[i], single, f"token of row {i} in a batch, against the row alone", see=LOOP)
    for i in range(0, 6, 2):
        expect_equal(together[i], int(logits[i].argmax()), f"greedy row {i}", see=LOOP)
    limited = Request("limited", [1], hot(3, top_k=1))
    (token,) = SimpleSampler()(logits[:1], [(limited, 0)])
    expect_equal(token, int(logits[0].argmax()), "a draw with top_k=1", see=LOOP)
    expect_equal(SimpleSampler()(logits[:0], []), [], "tokens of no rows", see=LOOP)


def test_seeds_do_not_run_together():
    seeds = {derive_seed(seed, position) for seed in range(40) for position in range(40)}
    expect_equal(len(seeds), 1600, "different seeds of 40 requests at 40 positions")


def full_logprobs(sequence):
    """[T, V]: entry t scores token t + 1."""
    with torch.inference_mode():
        return model()(torch.tensor([sequence]))[0].double().log_softmax(-1)


def expect_entries(entries, rows, chosen, k, what):
    for i, (entry, row, token) in enumerate(zip(entries, rows, chosen, strict=True)):
        best = row.topk(k).indices.tolist()
        expect_equal(
            set(entry), {token, *best}, f"tokens of {what}[{i}]: the chosen one and the {k} likeliest", see=LOOP
        )
        got, expected = torch.tensor([entry[t] for t in entry]), row[list(entry)]
        expect_close(
            got, expected, atol=2e-4, what=f"{what}[{i}]", hint="of a full forward pass at that place", see=LOOP
        )


@pytest.mark.parametrize("place", PLACES)
def test_logprobs_are_those_of_a_full_forward_pass(place):
    core, asked = new_core(**PLACES[place]), prompts(4)
    params = [SamplingParams(max_tokens=12, logprobs=i, prompt_logprobs=2 - i % 2) for i in range(4)]
    for i, prompt in enumerate(asked):
        core.add_request(str(i), prompt, params[i])
    outputs = {o.request_id: o for o in run(core) if o.finished}
    for i, prompt in enumerate(asked):
        output = outputs[str(i)]
        sequence = [*prompt, *output.output_token_ids]
        rows = full_logprobs(sequence)
        expect_entries(output.logprobs, rows[len(prompt) - 1 : -1], output.output_token_ids, i, f"{place}: logprobs")
        expect_equal(
            output.prompt_logprobs[0], None, f"{place}: prompt_logprobs[0]", "nothing predicts the first", LOOP
        )
        what = f"{place}: prompt_logprobs[1:]"
        expect_entries(output.prompt_logprobs[1:], rows[: len(prompt) - 1], prompt[1:], 2 - i % 2, what)


def test_logprobs_are_only_there_when_asked_for():
    core = new_core()
    core.add_request("r", [1, 2, 3], SamplingParams(max_tokens=2))
    for output in run(core):
        expect_equal((output.logprobs, output.prompt_logprobs), (None, None), "logprobs not asked for, {i}", see=LOOP)
