"""Chapter 8, from logits to text. Oracles: sets and probabilities worked out in plain Python, and exact tail bounds.

A draw is judged by its distribution, never by which token a certain seed gives: any sampler with the right
probabilities passes, whatever it does with its generator.
"""

import math
import random as python_random

import pytest
import torch

from engine.sampling import generate, sample
from tests.grading import expect, expect_equal, expect_raises, grades, rng

CHOICE = "08: From logits to a token"
FILTERS = "08: Two filters and their order"
RANDOM = "08: Where the randomness comes from"
LOOP = "08: The loop that everything later must equal"

DRAWS = 20_000
EDGE = 1e-9  # a right sampler fails one statistical test of this file at most once in this many seeds


def softmax(logits, temperature=1.0):
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    return [w / sum(weights) for w in weights]


def distinct_logits(salt, V):
    """V logits between -1.5 and 1.5, at least 1.5 / V apart, in random order."""
    random = rng(salt)
    logits = [3 * (i + random.uniform(0.25, 0.75)) / V - 1.5 for i in range(V)]
    random.shuffle(logits)
    return logits


def draw(logits, *args, n=DRAWS, salt="draws", **kwargs):
    """The tokens of n rows with the same logits, as a list."""
    rows = torch.tensor([logits]).expand(n, -1)
    kwargs.setdefault("generator", rng.torch(salt))
    return sample(rows, *args, **kwargs).tolist()


def expect_distribution(tokens, probs, what, hint=None, see=None):
    """Support exactly as given, and every share within the Chernoff bound.

    For a token of probability p, P(share s or further out on that side) <= exp(-n KL(s, p)); so n KL(s, p) stays
    below ln(2 * cells / EDGE). All probabilities here are 0 or so large that a share of 0 breaks that bound, too.
    """
    n, limit = len(tokens), math.log(2 * len(probs) / EDGE)
    for token, p in enumerate(probs):
        share = tokens.count(token) / n
        if p == 0 or p == 1:
            fits = share == p
        else:
            assert -n * math.log1p(-p) > limit
            fits = n * sum(a * math.log(a / b) for a, b in ((share, p), (1 - share, 1 - p)) if a > 0) <= limit
        expect(fits, f"{what}: token {token} is {share:.4f} of {n} draws, expected about {p:.4f}", hint, see)


def top(logits, k):
    """The ids of the k largest, lower ids first among equals."""
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:k]


def renormalised(probs, kept):
    total = sum(probs[i] for i in kept)
    return [p / total if i in kept else 0 for i, p in enumerate(probs)]


# sample: greedy


@grades(sample)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_temperature_zero_takes_the_largest(dtype):
    logits = torch.randn(7, 33, generator=rng.torch("greedy")).to(dtype)
    expected = [max(range(33), key=row.__getitem__) for row in logits.tolist()]  # max: the first of equals
    for args in ((0.0,), (0, 5), (0.0, 0, 0.1)):
        got = sample(logits, *args)
        expect(got.dtype == torch.int64 and got.shape == (7,), see=CHOICE,
               message=f"sample of [7, 33] logits returned {got.dtype} {list(got.shape)}, expected int64 [7]")
        expect_equal(got, expected, what="token of row {i} at temperature 0", see=CHOICE)


@grades(sample)
def test_temperature_zero_takes_the_lowest_id_of_equals():
    random = rng("equals")
    rows, expected = [], []
    for _ in range(20):
        best = sorted(random.sample(range(50), random.randint(2, 6)))
        rows.append([2.5 if i in best else random.uniform(-1, 2) for i in range(50)])
        expected.append(best[0])
    expect_equal(sample(torch.tensor(rows), 0.0), expected, what="token of row {i}, where several logits are largest",
                 hint="the lowest id wins", see=CHOICE)


@grades(sample)
def test_temperature_zero_draws_nothing():
    generator = rng.torch("untouched")
    before = generator.get_state()
    sample(torch.randn(3, 9, generator=rng.torch("logits")), 0.0, generator=generator)
    expect(torch.equal(before, generator.get_state()), "temperature 0 advanced the generator",
           hint="greedy requests must not disturb the draws of others", see=RANDOM)


# sample: the distribution


@grades(sample)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.9, 1e30])
def test_shares_follow_the_softmax(temperature):
    logits = distinct_logits(f"softmax {temperature}", 7)
    expect_distribution(draw(logits, temperature), softmax(logits, temperature), f"temperature {temperature}",
                        "logits are divided by the temperature: above 1 is flatter, below 1 sharper", CHOICE)


@grades(sample)
def test_a_tiny_temperature_is_greedy_without_nan():
    for temperature in (1e-4, 1e-30, 1e-45):
        logits = [40 * x for x in distinct_logits(f"tiny {temperature}", 12)]
        expect_equal(sorted(set(draw(logits, temperature, n=50))), top(logits, 1),
                     what=f"tokens drawn at temperature {temperature}", see=CHOICE,
                     hint="the quotient overflows float32: bound the divisor, or subtract the largest logit first")


@grades(sample)
def test_rows_of_a_batch_are_drawn_independently():
    logits = distinct_logits("pairs", 3)
    tokens, probs = draw(logits, n=2 * DRAWS), softmax(logits)
    pairs = [3 * a + b for a, b in zip(tokens[::2], tokens[1::2], strict=True)]
    expect_distribution(pairs, [p * q for p in probs for q in probs], "pairs (3 * first + second) of neighbouring rows",
                        "one draw for each row, not one for the batch", RANDOM)


@grades(sample)
@pytest.mark.parametrize("args", [(1.0,), (1.0, 3), (1.0, 0, 0.9), (0.0,)], ids=str)
def test_each_row_has_its_own_logits(args):
    best = [rng(f"row {i}").randrange(40) for i in range(30)]
    logits = torch.full((30, 40), -20.0).scatter_(1, torch.tensor(best)[:, None], 20.0)  # e^-40: never seen
    got = sample(logits, *args, generator=rng.torch("rows"))
    expect_equal(got, best, what="token of row {i}, which has one likely token", see=CHOICE,
                 hint="a filter that sorts must translate the rank back with the ids of the same row")


@grades(sample)
@pytest.mark.parametrize("args", [(5.0,), (1e6,), (1.0, 6), (1.0, 0, 0.999), (2.0, 30, 0.99)], ids=str)
def test_minus_infinity_is_never_drawn(args):
    logits = distinct_logits("minus infinity", 10)
    allowed = rng("allowed").sample(range(10), 4)
    logits = [x if i in allowed else -math.inf for i, x in enumerate(logits)]
    expect_equal(sorted(set(draw(logits, *args, n=2000))), sorted(allowed),
                 what=f"tokens drawn with temperature, top_k, top_p = {args} where four are finite", see=CHOICE)


@grades(sample)
def test_bfloat16_logits_are_computed_with_in_float32():
    logits = torch.tensor([distinct_logits("bf16", 6)]).bfloat16()
    tokens = sample(logits.expand(DRAWS, -1), 1.3, generator=rng.torch("bf16")).tolist()
    expect_distribution(tokens, softmax(logits[0].tolist(), 1.3), "bfloat16 logits", see=CHOICE)


# sample: filters


@grades(sample)
@pytest.mark.parametrize("k", [1, 2, 5, 8, 9, 100])
def test_top_k_keeps_the_k_largest(k):
    logits = distinct_logits(f"top-k {k}", 8)
    expect_distribution(draw(logits, 1.0, k), renormalised(softmax(logits), top(logits, k)), f"top_k={k} of 8 tokens",
                        "exactly the k largest stay, in the proportions they had", FILTERS)


@grades(sample)
@pytest.mark.parametrize("m", [1, 2, 4, 6, 7, 8])
def test_top_p_keeps_the_token_that_reaches_it(m):
    logits = distinct_logits(f"top-p {m}", 8)
    probs = softmax(logits)
    sums = [sum(probs[i] for i in top(logits, n)) for n in range(9)]
    top_p = 0.3 * sums[m - 1] + 0.7 * sums[m]  # reached by the m-th token and by none before
    expect_distribution(draw(logits, 1.0, 0, top_p), renormalised(probs, top(logits, m)),
                        f"top_p={top_p:.4f}, which the {m} most probable tokens reach", see=FILTERS,
                        hint="drop a token only if those before it have reached top_p already")


@grades(sample)
def test_equal_logits_are_ranked_by_id():
    for kept in (1, 3, 6):
        expect_equal(sorted(set(draw([0.7] * 8, 1.5, kept, n=1000))), list(range(kept)), see=FILTERS,
                     what=f"token {{i}} of those drawn from 8 equal logits with top_k={kept}",
                     hint="k tokens stay, also when the k-th has equals: the lower ids")
        top_p = (kept - 0.3) / 8
        expect_equal(sorted(set(draw([0.7] * 8, 1.5, 0, top_p, n=1000))), list(range(kept)), see=FILTERS,
                     what=f"token {{i}} of those drawn from 8 equal logits with top_p={top_p:.4f}",
                     hint="among equals lower ids come first: sort with stable=True")


@grades(sample)
def test_equals_at_the_edge_of_top_k_in_a_large_vocabulary():
    random = rng("edge")
    best, *equal = random.sample(range(1000), 41)
    logits = [2.5 if i == best else 2.0 if i in equal else random.uniform(-5, 1) for i in range(1000)]
    for k in (7, 20):
        expected = set(top(logits, k))
        strange = sorted(set(draw(logits, 1.0, k, n=600)) ^ expected)
        expect_equal(strange, [], what=f"tokens wrongly in or out with top_k={k}", see=FILTERS,
                     hint="an unstable sort or torch.topk may keep any of the equals")


@grades(sample)
def test_temperature_comes_before_the_filters():
    logits = distinct_logits("order", 8)
    for temperature in (0.3, 3.0):
        probs = softmax(logits, temperature)
        sums = [sum(probs[i] for i in top(logits, n)) for n in range(9)]
        kept = next(n for n in range(9) if sums[n] >= 0.7)
        top_p = (sums[kept - 1] + sums[kept]) / 2
        expect_distribution(draw(logits, temperature, 0, top_p), renormalised(probs, top(logits, kept)), see=FILTERS,
                            what=f"temperature={temperature}, top_p={top_p:.4f}",
                            hint="divide first; top_p then counts in what the temperature left")


@grades(sample)
def test_top_p_counts_within_what_top_k_left():
    logits = distinct_logits("both", 9)
    probs = renormalised(softmax(logits), top(logits, 4))
    best = [probs[i] for i in top(logits, 4)]
    top_p = best[0] + best[1] / 2  # two of the four; of all nine it would take three
    assert sum(softmax(logits)[i] for i in top(logits, 2)) < top_p
    expect_distribution(draw(logits, 1.0, 4, top_p), renormalised(probs, top(logits, 2)), see=FILTERS,
                        what=f"top_k=4, top_p={top_p:.4f}", hint="top-k first, then top-p of the renormalised rest")


# sample: randomness and refusals


@grades(sample)
@pytest.mark.parametrize("args", [(1.0,), (1.0, 50), (1.0, 0, 0.9)], ids=str)
def test_the_generator_is_the_only_source_of_randomness(args):
    logits = torch.randn(20, 400, generator=rng.torch("logits"))
    runs, states = [], []
    for seed in (1, 2):
        torch.manual_seed(seed)
        python_random.seed(seed)
        generator, before = rng.torch("same"), torch.get_rng_state()
        runs.append([sample(logits, *args, generator=generator).tolist() for _ in range(2)])
        states.append(torch.equal(before, torch.get_rng_state()))
    expect(all(states), "torch's global generator moved although a generator was given",
           hint="pass `generator` on to whatever draws", see=RANDOM)
    expect_equal(runs[1], runs[0], what="token (call, row) {i} of a second run with the same generator", see=RANDOM)
    expect(runs[0][0] != runs[0][1], "two calls in a row with one generator gave the same 20 tokens out of 400 each",
           hint="use the generator as it is: never re-seed or copy it", see=RANDOM)


@grades(sample)
def test_without_a_generator_the_global_one_is_used():
    logits = torch.randn(20, 400, generator=rng.torch("logits"))
    saved = torch.get_rng_state()
    runs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        runs.append(sample(logits, 1.5).tolist())
    torch.set_rng_state(saved)
    expect_equal(runs[1], runs[0], what="token of row {i} after the same torch.manual_seed", see=RANDOM)
    expect(runs[2] != runs[0], "torch.manual_seed(5) and (6) gave the same 20 tokens out of 400 each", see=RANDOM)


@grades(sample)
def test_logits_are_left_unchanged():
    logits = torch.randn(4, 30, generator=rng.torch("unchanged"))
    before = logits.clone()
    for args in ((0.0,), (0.7,), (1.0, 3), (0.7, 0, 0.5), (2.0, 5, 0.5)):
        sample(logits, *args, generator=rng.torch("draw"))
        expect(torch.equal(logits, before), f"temperature, top_k, top_p = {args} changed the caller's logits",
               hint="for float32, logits.float() is the same tensor: no operation in place on it", see=CHOICE)


REFUSED = {
    "temperature below 0": ({"temperature": -0.5}, "-0.5"),
    "temperature NaN": ({"temperature": math.nan}, "nan"),
    "temperature infinite": ({"temperature": math.inf}, "inf"),
    "top_k below 0": ({"top_k": -3}, "-3"),
    "top_k no integer": ({"top_k": 2.5}, "2.5"),
    "top_p 0": ({"top_p": 0.0}, "0.0"),
    "top_p below 0": ({"top_p": -0.25}, "-0.25"),
    "top_p above 1": ({"top_p": 1.25}, "1.25"),
    "top_p NaN": ({"top_p": math.nan}, "nan"),
    "logits of one axis": ({"logits": torch.zeros(7)}, "7"),
    "logits of three axes": ({"logits": torch.zeros(2, 3, 7)}, "2, 3, 7"),
    "an empty vocabulary": ({"logits": torch.zeros(2, 0)}, "2, 0"),
    "a logit NaN": ({"logits": torch.tensor([[0.0, 1.0], [1.0, math.nan]])}, "nan"),
    "a logit NaN, greedy": ({"logits": torch.tensor([[0.0, 1.0], [math.nan, 1.0]]), "temperature": 0.0}, "nan"),
    "a logit +inf": ({"logits": torch.tensor([[0.0, 1.0], [1.0, math.inf]])}, "inf"),
    "a row of -inf": ({"logits": torch.tensor([[0.0, 1.0], [-math.inf, -math.inf]])}, "inf"),
}


@grades(sample)
@pytest.mark.parametrize("fault", REFUSED)
def test_sample_refuses(fault):
    change, names = REFUSED[fault]
    expect_raises(ValueError, sample, **{"logits": torch.zeros(2, 5), **change}, match=names, see=CHOICE,
                  hint=f"{fault}: say so with the value")


# generate


class FakeModel:
    """Logits that depend on all tokens up to their row, and a log of how it was called."""

    def __init__(self, V=29, salt="fake", spread=1.0):
        self.V, self.key, self.spread, self.calls = V, rng(salt).randrange(1, 10**6), spread, []

    def row(self, prefix):
        random = python_random.Random(f"{self.key} {prefix}")
        return [self.spread * random.uniform(-2, 2) for _ in range(self.V)]

    def __call__(self, input_ids, *args, **kwargs):
        self.calls.append((input_ids.clone(), torch.is_grad_enabled()))
        rows = [[self.row(ids[: t + 1]) for t in range(len(ids))] for ids in input_ids.tolist()]
        return torch.tensor(rows)

    def greedy(self, prompt, n):
        tokens = list(prompt)
        for _ in range(n):
            row = self.row(tokens)
            tokens.append(max(range(self.V), key=row.__getitem__))
        return tokens[len(prompt) :]


class FakeModule(torch.nn.Module):
    """The same as a torch.nn.Module, with or without parameters."""

    def __init__(self, fake, parameters):
        super().__init__()
        self.fake, self.weight = fake, torch.nn.Parameter(torch.zeros(1)) if parameters else None

    def forward(self, input_ids):
        return self.fake(input_ids)


def a_prompt(salt, n):
    return [rng(f"{salt} {i}").randrange(29) for i in range(n)]


@grades(generate)
@pytest.mark.parametrize("length", [1, 2, 9])
def test_greedy_text_follows_the_last_row(length):
    model, prompt = FakeModel(), a_prompt("greedy", length)
    expect_equal(generate(model, prompt, 7), model.greedy(prompt, 7), what="new token {i}", see=LOOP,
                 call=f"generate(model, {length} tokens, 7)",
                 hint="the last row of the logits scores the next token; new tokens only, without the prompt")
    default = generate(model, prompt)
    expect_equal(len(default), 16, what="number of new tokens without max_tokens", see=LOOP)


@grades(generate)
@pytest.mark.parametrize("parameters", [True, False])
def test_modules_as_well_as_functions(parameters):
    model, prompt = FakeModel(), a_prompt("module", 3)
    got = generate(FakeModule(model, parameters), prompt, 4)
    expect_equal(got, model.greedy(prompt, 4), what="new token {i} of a torch.nn.Module", see=LOOP)


@grades(generate)
@pytest.mark.parametrize("max_tokens", [1, 2, 13])
def test_max_tokens_counts_new_tokens(max_tokens):
    prompt = a_prompt("max", 5)
    got = generate(FakeModel(), prompt, max_tokens)
    expect_equal(len(got), max_tokens, what=f"number of new tokens, max_tokens={max_tokens}, prompt of 5", see=LOOP,
                 hint="the prompt does not count")


@grades(generate)
def test_the_model_reads_prompt_and_new_tokens_each_time():
    model, prompt = FakeModel(), a_prompt("calls", 4)
    new = generate(model, prompt, 6)
    expect_equal(len(model.calls), 6, what="calls of the model for 6 tokens", see=LOOP,
                 hint="one call for each new token, none after the last")
    for i, (input_ids, gradients) in enumerate(model.calls):
        expect(input_ids.dtype == torch.int64 and input_ids.ndim == 2, see=LOOP,
               message=f"call {i}: input_ids are {input_ids.dtype} {list(input_ids.shape)}, expected int64 [1, T]")
        expect_equal(input_ids.tolist(), [prompt + new[:i]], what=f"input_ids of call {i} at {{i}}", see=LOOP)
        expect(not gradients, f"call {i} ran with gradients on", see=LOOP,
               hint="torch.inference_mode() or torch.no_grad(): no graph is kept for a backward pass")


@grades(generate)
@pytest.mark.parametrize("form", ["int", "tuple", "list of one"])
def test_end_token_is_kept_and_ends_the_text(form):
    model, prompt = FakeModel(salt=f"eos {form}"), a_prompt("eos", 4)
    text = model.greedy(prompt, 30)
    eos = text[6]
    end = text.index(eos) + 1
    others = [t for t in range(29) if t not in text]
    given = {"int": eos, "tuple": (*others[:2], eos), "list of one": [eos]}[form]
    expect_equal(generate(model, prompt, 30, eos_token_id=given), text[:end], what="new token {i}", see=LOOP,
                 call=f"generate(…, 30, eos_token_id={given})", hint="the end token is the last token of the result")


@grades(generate)
def test_token_zero_can_be_the_end():
    for i in range(1000):
        model, prompt = FakeModel(salt=f"zero {i}"), a_prompt("zero", 2)
        text = model.greedy(prompt, 8)
        if 0 in text[:-1]:
            break
    expect_equal(generate(model, prompt, 8, eos_token_id=0), text[: text.index(0) + 1], what="new token {i}", see=LOOP,
                 call="generate(…, 8, eos_token_id=0)", hint="0 is a token id, None is none: test for None")


@grades(generate)
def test_end_token_in_the_prompt_ends_nothing():
    for i in range(1000):
        model, prompt = FakeModel(salt=f"in prompt {i}"), a_prompt(f"in prompt {i}", 5)
        text = model.greedy(prompt, 6)
        if not set(prompt) & set(text):
            break
    got = generate(model, prompt, 6, eos_token_id=tuple(prompt))
    expect_equal(got, text, what="new token {i}", see=LOOP, call="generate(…, 6, eos_token_id=tokens of the prompt)",
                 hint="only a new token can end the text")


@grades(generate)
def test_no_end_token_runs_to_max_tokens():
    prompt = a_prompt("no eos", 3)
    expect_equal(len(generate(FakeModel(), prompt, 40, eos_token_id=None)), 40, what="number of new tokens", see=LOOP)


@grades(generate)
@pytest.mark.parametrize("setting", ["temperature", "top_k", "top_p"])
def test_settings_reach_the_sampler(setting):
    model, prompt = FakeModel(spread=1.0), a_prompt("settings", 3)
    almost_greedy = {"temperature": {"temperature": 1e-4}, "top_k": {"temperature": 9.0, "top_k": 1},
                     "top_p": {"temperature": 9.0, "top_p": 1e-3}}[setting]
    expect_equal(generate(model, prompt, 9, generator=rng.torch("g"), **almost_greedy), model.greedy(prompt, 9),
                 what=f"new token {{i}} with {almost_greedy}, which leaves one likely token", see=LOOP)
    hot = generate(model, prompt, 30, temperature=9.0, top_k=20, top_p=0.999, generator=rng.torch("hot"))
    expect(hot != model.greedy(prompt, 30), "temperature 9 over 29 tokens gave the greedy text of 30 tokens", see=LOOP)


@grades(generate)
def test_text_is_drawn_from_the_given_generator():
    model, prompt, texts = FakeModel(), a_prompt("generator", 3), []
    for seed, salt in ((1, "a"), (2, "a"), (2, "b")):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        texts.append(generate(model, prompt, 25, temperature=3.0, generator=rng.torch(salt)))
        expect(torch.equal(before, torch.get_rng_state()), "generate moved torch's global generator", see=RANDOM)
    expect_equal(texts[1], texts[0], what="new token {i} of a second run with an equal generator", see=RANDOM)
    expect(texts[2] != texts[1], "two different generators gave the same 25 tokens at temperature 3", see=RANDOM)


@grades(generate)
def test_prompt_is_left_unchanged_and_ints_come_back():
    prompt = a_prompt("kept", 4)
    before = list(prompt)
    new = generate(FakeModel(), prompt, 5)
    expect_equal(prompt, before, what="the caller's prompt, token {i}", hint="work on a copy", see=LOOP)
    expect(type(new) is list and all(type(t) is int for t in new), "the result is not a list of int", see=LOOP)
    expect_equal(generate(FakeModel(), tuple(prompt), 5), new, what="new token {i} for the prompt as a tuple", see=LOOP)


@grades(generate)
@pytest.mark.parametrize("args, names", [(([], 4), "empty"), (([1, 2], 0), "0"), (([1, 2], -3), "-3")], ids=str)
def test_generate_refuses(args, names):
    model = FakeModel()
    expect_raises(ValueError, generate, model, *args, match=names, see=LOOP,
                  hint="an empty prompt has no last row to read; at least one token is generated")
    expect_raises(ValueError, generate, model, [1, 2], 4, temperature=-1.5, match="-1.5", see=LOOP)
