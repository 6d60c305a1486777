"""Chapter 16: the contiguous KV cache, and generation that feeds every token once."""

import re

import pytest
import torch
from torch import nn

from engine.kv_cache import KVCache, generate
from engine.models.qwen3 import test_model as build_model
from engine.sampling import sample
from tests.grading import expect, expect_close, expect_equal, expect_raises, grades, rng

CACHE = "16: The contiguous cache"
LOOP = "16: Prefill once, then one token at a time"
L, B, HKV, MAX_LEN, D = 3, 2, 4, 24, 5  # no two sizes alike


def random_kv(salt, T, batch=B, heads=HKV, width=D):
    g = rng.torch(salt)
    return tuple(torch.randn(batch, heads, T, width, generator=g) for _ in range(2))


def positions_from(start, T, batch=B):
    return torch.arange(start, start + T).expand(batch, T)


def append(cache, layer, k, v, start):
    got = cache.append(layer, k, v, positions_from(start, k.shape[2], k.shape[0]))
    expect(
        isinstance(got, tuple) and len(got) == 4,
        f"KVCache.append returned {type(got).__name__}, expected a tuple of four: k_all, v_all, k_pos, allowed",
        see=CACHE,
    )
    return got


def filled(cache):
    """Every layer of the cache with 7 positions."""
    for layer in range(L):
        append(cache, layer, *random_kv(f"filled {layer}", 7), start=0)
    return cache


def state(cache):
    return cache.k_cache.clone(), cache.v_cache.clone(), list(cache.lengths)


def expect_untouched(cache, before, after_what):
    expect_equal(cache.lengths, before[2], what=f"length of layer {{i}} after {after_what}", see=CACHE)
    for name, old in zip(("k_cache", "v_cache"), before, strict=False):
        same = torch.equal(getattr(cache, name), old)
        expect(same, f"{after_what} changed {name}", hint="check everything before the first write", see=CACHE)


def numbers_in(error):
    return {int(number) for number in re.findall(r"\d+", str(error))}


@grades(KVCache.append)
@pytest.mark.parametrize("seed", range(3))
def test_append_returns_old_and_new(seed):
    cache = KVCache(L, B, HKV, MAX_LEN, D)
    random, length = rng(f"chunks {seed}"), 0
    past = [(torch.empty(B, HKV, 0, D), torch.empty(B, HKV, 0, D))] * L
    while length < MAX_LEN:
        T = random.randint(1, min(6, MAX_LEN - length))
        for layer in range(L):
            new = random_kv(f"{seed} {length} {layer}", T)
            past[layer] = tuple(torch.cat(pair, dim=2) for pair in zip(past[layer], new, strict=True))
            k, v, k_pos, allowed = append(cache, layer, *new, start=length)
            call = f"append of {T} to layer {layer} with {length} held"
            for name, got, expected in (("k_all", k, past[layer][0]), ("v_all", v, past[layer][1])):
                hint = "the result is everything held so far, [B, Hkv, old + new, D], with the new at the end"
                expect_close(got, expected, atol=0, what=f"{name} [b, h, s, d]", call=call, hint=hint, see=CACHE)
            expect_equal(k_pos, list(range(length + T)), what="position of key {i}", call=call, see=CACHE)
            expect(allowed is None, f"{call}: allowed is {allowed!r}, expected None", see=CACHE)
        length += T
        expect_equal(cache.length, length, what="length once all layers have it", see=CACHE)


@grades(KVCache.append)
def test_layers_are_apart():
    cache = KVCache(L, B, HKV, MAX_LEN, D)
    layer = rng("layer").randrange(L)
    new = random_kv("apart", 3)
    append(cache, layer, *new, start=0)
    expected = [3 if i == layer else 0 for i in range(L)]
    hint = "in a forward pass each layer appends the same positions for itself"
    expect_equal(
        cache.lengths, expected, what=f"length of layer {{i}} after 3 into layer {layer}", hint=hint, see=CACHE
    )
    for name, x in zip(("k_cache", "v_cache"), new, strict=True):
        whole = torch.zeros(L, B, HKV, MAX_LEN, D)
        whole[layer, :, :, :3] = x
        expect_close(getattr(cache, name), whole, atol=0, what=f"{name} [layer, b, h, s, d]", see=CACHE)


@grades(KVCache.append)
def test_the_result_is_a_view_and_the_cache_a_copy():
    cache = KVCache(L, B, HKV, MAX_LEN, D)
    k, v = random_kv("view", 4)
    expected = k.clone()
    k_all, v_all, *_ = append(cache, 1, k, v, start=0)
    for name, got, store in (("k_all", k_all, cache.k_cache), ("v_all", v_all, cache.v_cache)):
        same = got.untyped_storage().data_ptr() == store.untyped_storage().data_ptr()
        hint = "a slice costs nothing; a copy costs the whole cache, each layer, each token"
        expect(same, f"{name} is a copy, not a view of {name[0]}_cache", hint=hint, see=CACHE)
    k.zero_()
    expect_close(k_all, expected, atol=0, what="k_all after the caller reused its own k", see=CACHE)


@grades(KVCache.append)
def test_a_full_cache_says_so():
    cache = filled(KVCache(L, B, HKV, MAX_LEN, D))
    room = MAX_LEN - 7
    T = room + rng("too many").randint(1, 4)
    before = state(cache)
    k, v = random_kv("too many", T)
    error = expect_raises(
        ValueError, cache.append, 0, k, v, positions_from(7, T), match=str(MAX_LEN),
        call=f"append of {T} with 7 of {MAX_LEN} positions held", see=CACHE,
    )  # fmt: skip
    for number, what in ((7, "the length"), (T, "the number of new positions")):
        expect(number in numbers_in(error), f"the message does not name {what}, {number}: {error}", see=CACHE)
    expect_untouched(cache, before, "an append that did not fit")
    try:
        append(cache, 0, *random_kv("last", room), start=7)
    except ValueError as error:
        fact = f"append of {room} with 7 of {MAX_LEN} held fills the cache exactly, but raised: {error}"
        expect(False, fact, see=CACHE)
    expect_equal(cache.lengths[0], MAX_LEN, what="length of a cache filled to the last position", see=CACHE)


@grades(KVCache.append)
@pytest.mark.parametrize("case", ["gap", "again", "from zero", "other row", "jump inside", "backwards"])
def test_positions_must_continue(case):
    cache = filled(KVCache(L, B, HKV, MAX_LEN, D))
    positions = positions_from(7, 3).clone()
    if case == "gap":
        positions += 1
    elif case == "again":
        positions -= 3
    elif case == "from zero":
        positions -= 7
    elif case == "other row":
        positions[1] += rng("row").randint(1, 5)
    elif case == "jump inside":
        positions[:, 2] += 1
    else:
        positions = positions.flip(1)
    before = state(cache)
    error = expect_raises(
        ValueError, cache.append, 1, *random_kv("gap", 3), positions,
        call=f"append at positions {positions.tolist()} with 7 held",
        hint="index p of the cache is position p: anything else would be read as another position", see=CACHE,
    )  # fmt: skip
    wrong = set(positions[positions != positions_from(7, 3)].tolist())
    expect(wrong & numbers_in(error), f"the message names none of the wrong positions {wrong}: {error}", see=CACHE)
    expect_untouched(cache, before, f"an append that was refused ({case})")


@grades(KVCache.append)
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("axis", ["batch", "heads", "T", "width"])
def test_shapes_are_not_stretched(axis, which):
    cache = filled(KVCache(L, B, HKV, MAX_LEN, D))
    sizes = {"batch": B, "heads": HKV, "T": 3, "width": D}
    good, bad = random_kv("good", 3)[0], torch.randn(tuple((sizes | {axis: 1}).values()), generator=rng.torch("bad"))
    k, v = (bad, good) if which == "k" else (good, bad)
    before = state(cache)
    expect_raises(
        ValueError, cache.append, 1, k, v, positions_from(7, 3),
        call=f"append of {which} {list(bad.shape)} into a cache of B {B}, Hkv {HKV}, D {D} at 3 positions",
        hint="size 1 would be broadcast without a word", see=CACHE,
    )  # fmt: skip
    expect_untouched(cache, before, f"an append of a {which} of the wrong shape")


class Watched(nn.Module):
    """The model, with an eye on what `generate` feeds it."""

    def __init__(self, model, prompt, max_tokens):
        super().__init__()
        self.inner, self.cfg, self.lm_head = model, model.cfg, model.lm_head
        self.prompt, self.max_tokens, self.calls, self.cache = list(prompt), max_tokens, 0, None

    def forward(self, input_ids, cache=None, positions=None):
        expect(cache is not None, f"model call {self.calls}: no cache was given", see=LOOP)
        expect_equal(input_ids.shape[0], 1, what="batch size of the model's input", see=LOOP)
        first = self.calls == 0
        hint = "keys and values of everything before are in the cache already"
        expected = len(self.prompt) if first else 1
        what = "tokens in the first call, the prompt" if first else f"tokens in call {self.calls}, after the prompt"
        expect_equal(input_ids.shape[1], expected, what=what, hint=hint, see=LOOP)
        if first:
            expect_equal(input_ids[0], self.prompt, what="token {i} of the first call", see=LOOP)
            room, most = cache.k_cache.shape[3], len(self.prompt) + self.max_tokens
            expect(room <= most, f"the cache has {room} positions; prompt and answer fill {most} at most", see=LOOP)
        else:
            expect(cache is self.cache, f"model call {self.calls} was given another cache than the first", see=LOOP)
        start = cache.length
        expected = 0 if first else len(self.prompt) + self.calls - 1
        expect_equal(start, expected, what=f"positions in the cache before call {self.calls}", see=LOOP)
        if positions is not None:
            expected = list(range(start, start + input_ids.shape[1]))
            expect_equal(positions.flatten(), expected, what=f"position of token {{i}} in call {self.calls}", see=LOOP)
        self.calls, self.cache = self.calls + 1, cache
        return self.inner(input_ids, cache, positions)


def plain_tokens(model, prompt, max_tokens, pick):
    """The uncached loop, and how far the best token was ahead of the second in the closest decision."""
    tokens, margin = list(prompt), float("inf")
    with torch.inference_mode():
        for _ in range(max_tokens):
            logits = model(torch.tensor([tokens]))[:, -1]
            best = logits.topk(2).values[0]
            margin = min(margin, float(best[0] - best[1]))
            tokens.append(int(pick(logits)))
    return tokens[len(prompt) :], margin


def greedy_case(salt, max_tokens, longest=20):
    """Model, prompt, and its continuation, none of which is decided by rounding."""
    for attempt in range(20):
        random = rng(f"{salt} {attempt}")
        model = build_model(random.randrange(1000))
        prompt = [random.randrange(model.cfg.vocab_size) for _ in range(random.randint(2, longest))]
        tokens, margin = plain_tokens(model, prompt, max_tokens, lambda logits: logits.argmax())
        if margin > 1e-4:
            return model, prompt, tokens
    raise AssertionError("no model with clear decisions found")


@grades(generate)
@pytest.mark.parametrize("case", range(4))
def test_same_tokens_as_uncached(case):
    model, prompt, expected = greedy_case(f"greedy {case}", 20)
    given = list(prompt)
    got = generate(Watched(model, prompt, 20), given, max_tokens=20)
    expect_equal(got, expected, what="new token {i}", call=f"generate(prompt of {len(prompt)})", see=LOOP)
    expect_equal(given, prompt, what="token {i} of the caller's prompt afterwards", see=LOOP)
    expect(all(type(t) is int for t in got), f"the tokens are {type(got[0]).__name__}, expected int", see=LOOP)


@grades(generate)
@pytest.mark.parametrize(
    "settings", [{"temperature": 1.0}, {"temperature": 1.3, "top_k": 8}, {"temperature": 0.8, "top_p": 0.9}], ids=str
)
def test_same_draws_as_uncached(settings):
    random = rng(f"sampled {settings}")
    model, seed = build_model(random.randrange(1000)), random.randrange(2**32)
    prompt = [random.randrange(model.cfg.vocab_size) for _ in range(9)]
    one, other = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
    expected, _ = plain_tokens(model, prompt, 14, lambda logits: sample(logits, generator=one, **settings))
    got = generate(Watched(model, prompt, 14), prompt, max_tokens=14, generator=other, **settings)
    expect_equal(got, expected, what="sampled token {i}", call=f"generate({settings})", see=LOOP)
    hint = "`sample` runs once a token, not once a call of the model and once more"
    same = torch.equal(one.get_state(), other.get_state())
    expect(same, "the generator was used more often, or less, than once a token", hint=hint, see=LOOP)


@grades(generate)
@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_one_call_a_token(max_tokens):
    model, prompt, expected = greedy_case(f"calls {max_tokens}", max_tokens)
    watched = Watched(model, prompt, max_tokens)
    got = generate(watched, prompt, max_tokens=max_tokens)
    expect_equal(got, expected, what="new token {i}", call=f"generate(max_tokens={max_tokens})", see=LOOP)
    hint = "the newest token is fed only when another one is wanted"
    expect_equal(watched.calls, max_tokens, what=f"model calls for {max_tokens} tokens", hint=hint, see=LOOP)


@grades(generate)
@pytest.mark.parametrize("form", ["int", "tuple"])
def test_stops_behind_the_end_token(form):
    model, prompt, tokens = greedy_case(f"end {form}", 16)
    stop = rng(f"stop {form}").randint(1, 9)
    end = tokens[stop]
    expected = tokens[: tokens.index(end) + 1]
    absent = next(t for t in range(model.cfg.vocab_size) if t not in tokens)
    eos = end if form == "int" else (absent, end)
    watched = Watched(model, prompt, 16)
    got = generate(watched, prompt, max_tokens=16, eos_token_id=eos)
    hint = "the end token belongs to the result, and nothing after it"
    expect_equal(got, expected, what="new token {i}", call=f"generate(eos_token_id={eos})", hint=hint, see=LOOP)
    expect_equal(watched.calls, len(expected), what="model calls up to the end token", see=LOOP)


@grades(generate)
def test_an_end_token_in_the_prompt_ends_nothing():
    for attempt in range(20):
        model, prompt, tokens = greedy_case(f"prompt end {attempt}", 8)
        if inside := [t for t in prompt if t not in tokens]:
            break
    got = generate(Watched(model, prompt, 8), prompt, max_tokens=8, eos_token_id=inside[-1])
    expect_equal(got, tokens, what="new token {i}", hint="only new tokens can end the text", see=LOOP)


@grades(generate)
def test_nothing_to_do_is_an_error():
    model = build_model()
    expect_raises(ValueError, generate, model, [], max_tokens=3, call="generate(an empty prompt)", see=LOOP)
    for bad in (0, -2):
        call = f"generate(max_tokens={bad})"
        expect_raises(ValueError, generate, model, [1, 2], max_tokens=bad, match=str(bad), call=call, see=LOOP)


def test_a_cache_without_room_is_refused():
    with pytest.raises(ValueError, match="no room"):
        KVCache(2, 1, 2, 0, 8)


def test_for_model_takes_the_shape_of_the_model():
    model = build_model().to(torch.bfloat16)
    cache = KVCache.for_model(model, batch=3, max_len=11)
    assert cache.k_cache.shape == cache.v_cache.shape == (2, 3, 2, 11, 32)
    assert cache.k_cache.dtype == torch.bfloat16
    assert cache.length == 0 and cache.max_len == 11
