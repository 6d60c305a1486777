"""What a caller may ask for: parameters, configurations, requests; what is refused leaves the engine untouched."""

import math

import pytest

from engine.serve.config import EngineConfig
from engine.serve.engine import EngineCore
from engine.serve.request import SamplingParams, derive_seed
from tests.ch31.fake_pool import LOOP, VOCAB, FakeModel, fake_core
from tests.ch31.harness import Harness
from tests.grading import expect, expect_equal, expect_raises, rng


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -1),
        ("n", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("seed", 0.5),
        ("logprobs", -1),
        ("prompt_logprobs", -1),
    ],
)
def test_impossible_sampling_parameters_are_refused(name, value):
    error = expect_raises(ValueError, SamplingParams, match=name, **{name: value})
    expect(repr(value) in str(error), f"SamplingParams({name}={value!r}): the message does not say the value: {error}")


def test_sampling_parameters_of_a_child():
    params = SamplingParams(n=3, seed=rng("child").getrandbits(40), temperature=1.0, stop_token_ids=[5])
    children = [params.child(i) for i in range(3)]
    expect_equal([c.n for c in children], [1, 1, 1], "n of child {i}")
    expect(len({c.seed for c in children}) == 3, "two children have the same seed")
    expect(params.child(1) == params.child(1), "a child's seed changes from call to call")
    expect_equal(SamplingParams(n=2).child(1).seed, None, "seed of the child of parameters without one")
    expect_equal(children[0].stop_token_ids, (5,), "stop_token_ids of a child")
    expect(
        derive_seed(1, 2) != derive_seed(12) and derive_seed(1, 2) != derive_seed(2, 1), "seeds of parts run together"
    )


@pytest.mark.parametrize(
    "settings, word",
    [
        ({"block_size": 0}, "block_size"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": 2.0}, "max_num_seqs"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold"),
        ({"policy": "lifo"}, "'lifo'"),
        ({"preemption_mode": "drop"}, "'drop'"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization"),
        ({"swap_space_bytes": -1}, "swap_space_bytes"),
        ({"long_prefill_token_threshold": 8, "enable_chunked_prefill": False}, "enable_chunked_prefill"),
        ({"num_blocks": 8, "kv_cache_bytes": 1 << 20}, "kv_cache_bytes"),
    ],
)
def test_impossible_configurations_are_refused(settings, word):
    expect_raises(ValueError, EngineConfig, match=word, **settings)


def test_a_configuration_that_does_not_suit_the_model_is_refused():
    expect_raises(ValueError, EngineCore, FakeModel(100), EngineConfig(max_model_len=101, num_blocks=9), match="101")
    config = EngineConfig(num_blocks=9, attention_backend="quantum")
    expect_raises(ValueError, EngineCore, FakeModel(100), config, match="quantum")


def test_the_pool_is_sized_from_the_bytes_that_are_set_aside():
    """A block of the fake model takes 8 bytes a token: K and V of one float32."""
    core = EngineCore(FakeModel(100), EngineConfig(block_size=4, kv_cache_bytes=7 * 32 + 31))
    expect_equal(core.blocks.num_blocks, 7, "blocks of 32 bytes in 255 bytes")
    few = EngineCore(FakeModel(10), EngineConfig(block_size=4, max_num_seqs=2))
    expect_equal(few.blocks.num_blocks, 6, "blocks that two requests of 10 tokens can fill")
    expect_raises(ValueError, EngineCore, FakeModel(100), EngineConfig(block_size=4, kv_cache_bytes=31), match="32")


BAD_REQUESTS = {
    "an empty prompt": ("new", [], {}),
    "a negative token": ("new", [1, -1], {}),
    "a token past the vocabulary": ("new", [VOCAB], {}),
    "a token that is no integer": ("new", [1.0], {}),
    "a live id": ("live", [1], {}),
    "a live id, several samples": ("live", [1], {"n": 2}),
    "the id of live samples": ("many", [1], {}),
    "the id of one live sample": ("many#1", [1], {}),
    "an id whose samples' ids are taken": ("taken", [1], {"n": 3}),
    "more than max_model_len": ("new", [1] * 30, {"max_tokens": 21}),
    "more than the pool": ("new", [1] * 30, {"max_tokens": 11}),
    "a stop id past the vocabulary": ("new", [1], {"stop_token_ids": (VOCAB,)}),
    "more logprobs than tokens": ("new", [1], {"logprobs": VOCAB + 1}),
}


@pytest.mark.parametrize("kind", BAD_REQUESTS)
def test_a_refused_request_leaves_the_engine_untouched(kind):
    name, prompt, params = BAD_REQUESTS[kind]
    settings = {"num_blocks": 10, "max_num_batched_tokens": 16, "max_model_len": 50}
    harness, twin = Harness(**settings), Harness(**settings)
    for h in (harness, twin):
        h.core.add_request("many", [4, 5, 6], SamplingParams(n=2, max_tokens=3))
        h.add("live", [1, 2, 3, 4, 5], max_tokens=9)
        h.add("taken#2", [1, 2, 3], max_tokens=9)
    core = harness.core
    error = expect_raises(
        ValueError, core.add_request, name, prompt, SamplingParams(**params), call=f"add_request: {kind}"
    )
    expect(name in str(error), f"add_request, {kind}: the message does not name the request: {error}")
    for h in (harness, twin):  # unseeded requests take seeds from the engine in order: none may be lost
        h.add("after", [7, 8], max_tokens=2)
    expect_equal(list(core.scheduler.requests), list(twin.scheduler.requests), "live request {i} afterwards", see=LOOP)
    seeds = [[r.params.seed for r in h.scheduler.requests.values()] for h in (harness, twin)]
    expect_equal(*seeds, "seed of live request {i} afterwards", see=LOOP)
    for name in ("many", "live", "taken#2"):
        expect(core.abort_request(name), f"{name!r} can no longer be aborted after {kind} was refused", see=LOOP)


def test_parameters_of_another_type_are_refused():
    core = fake_core()
    expect_raises(ValueError, core.add_request, "r", [1], {"max_tokens": 3}, match="max_tokens", see=LOOP)
    expect(not core.has_unfinished, "a refused request is in the queue", see=LOOP)


def test_what_was_refused_holds_nobody_up():
    harness = Harness(num_blocks=10)
    expect_raises(ValueError, harness.core.add_request, "big", [1] * 39, SamplingParams(max_tokens=2), match="40")
    harness.add("small", [1, 2, 3])
    expect_equal(harness.step(), [("small", 3)], "plan {i} of the step after a refusal", see=LOOP)
    harness.drain()


def test_chunked_prefill_off_a_prompt_over_the_budget_is_refused():
    core = fake_core(enable_chunked_prefill=False, max_num_batched_tokens=8)
    expect_raises(ValueError, core.add_request, "r", [1] * 9, match="max_num_batched_tokens 8", see=LOOP)
    core.add_request("fits", [1] * 8)


def test_an_id_is_free_again_once_its_request_is_finished():
    harness = Harness()
    harness.add("r", [1, 2], max_tokens=1)
    harness.drain()
    harness.add("r", [1, 2], max_tokens=2)
    harness.drain()
