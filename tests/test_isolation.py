"""Tenants who share an engine: no block in common, and nobody can exhaust the host."""

import pytest

from engine.serve.config import EngineConfig
from engine.serve.engine import EngineCore
from engine.serve.queue import QueueFullError
from engine.serve.request import SamplingParams
from engine.serve.sizing import block_bytes
from tests.ch31.equality import decided, endless, model
from tests.ch31.harness import Harness, tokens
from tests.grading import rng

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


def new_core(**settings):
    return EngineCore(model(), EngineConfig(**{"num_blocks": 64, "block_size": 4, **settings}))


def run(core):
    final = {}
    while core.has_unfinished:
        final.update((output.request_id, output) for output in core.step())
        core.blocks.check()
    return final


# -- the cache key


@pytest.mark.parametrize("together", [True, False], ids=["in one step", "one after the other"])
def test_two_tenants_with_equal_prompts_never_share_a_block(together):
    core, prompt, owners = new_core(max_num_batched_tokens=11), decided(rng("salt"), [], 14), {}
    for who in ("a", "b"):
        for i in range(2):
            core.add_request(f"{who}{i}", prompt, PARAMS, cache_key=(who,))
        if not together:
            run(core)
    shared = 0
    while core.has_unfinished:
        core.step()
        for request, table in core.blocks.block_tables.items():
            for block in table:
                owners.setdefault(block, set()).add(request.cache_key)
        tables = core.blocks.block_tables.values()
        shared += sum(map(len, tables)) - len({block for table in tables for block in table})
        assert all(len(who) == 1 for who in owners.values()), "a block was owned by both tenants, and no room was short"
    assert shared or not together, "within a tenant the prefix is shared, or this test shows nothing"


@pytest.mark.parametrize("keys", [[("a",), ("b",)], [(), ("",)], [(1,), (True,)], [("a", "b"), ("ab",)]], ids=str)
def test_a_prompt_known_to_one_tenant_is_new_to_another(keys):
    """What the timing would tell: the same prompt again is a hit for its owner only."""
    core, prompt = new_core(), decided(rng("known"), [], 14)
    adopted = []
    for name, key in enumerate([keys[0], keys[1], keys[0], keys[1]]):
        core.add_request(name, prompt, PARAMS, cache_key=key)
        output = run(core)[name]
        assert output.output_token_ids == endless(prompt)[:4]
        adopted.append(output.num_cached_tokens)
    assert adopted == [0, 0, 12, 12]


def test_tokens_that_another_tenant_was_given_are_no_hit_either():
    """Output is published as well: a prompt that continues somebody's answer must not find it."""
    core, prompt = new_core(), decided(rng("answer"), [], 7)
    core.add_request("a", prompt, SamplingParams(max_tokens=12, ignore_eos=True), cache_key=("a",))
    text = [*prompt, *run(core)["a"].output_token_ids]
    for key, hits in ((("b",), 0), (("a",), 16)):
        core.add_request("next", text, PARAMS, cache_key=key)
        assert run(core)["next"].num_cached_tokens == hits


# -- the queue


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_beyond_max_waiting_a_request_is_refused_and_the_engine_untouched(policy):
    harness = Harness(max_waiting=3, policy=policy)
    for i in range(3):
        harness.add(f"r{i}", [1, 2, i])
    before, seeds = harness.progress(), harness.core._seeds.getstate()
    with pytest.raises(QueueFullError, match="'more': 3 requests are waiting, and 1 more would exceed max_waiting 3"):
        harness.add("more", [1, 2, 9])
    assert issubclass(QueueFullError, ValueError)
    assert harness.progress() == before and harness.core._seeds.getstate() == seeds and "more" not in harness.asked
    harness.check()
    harness.step()  # all three run: there is room again
    harness.add("more", [1, 2, 9])
    harness.drain()


def test_n_samples_are_added_all_or_none():
    harness = Harness(max_waiting=4)
    harness.add("a", [1, 2])
    harness.add("b", [1, 3])
    with pytest.raises(QueueFullError, match="2 requests are waiting, and 3 more"):
        harness.core.add_request("n", [1, 4], SamplingParams(n=3))
    assert list(harness.scheduler.requests) == ["a", "b"] and not harness.core.children
    harness.core.add_request("n", [1, 4], SamplingParams(n=2))
    assert harness.scheduler.num_waiting == 4


def test_a_bad_request_is_told_what_is_wrong_with_it_also_when_the_queue_is_full():
    harness = Harness(max_waiting=1)
    harness.add("a", [1])
    with pytest.raises(ValueError, match="the prompt is empty"):
        harness.add("b", [])


@pytest.mark.parametrize("mode", [{}, {"host_blocks": 20}], ids=["recompute", "swap"])
def test_preempted_requests_return_to_a_full_queue(mode):
    harness, random, longest = Harness(num_blocks=9, max_waiting=1, max_num_batched_tokens=64, **mode), rng("full"), 0
    for i in range(4):
        harness.add(f"r{i}", tokens(random, 6), max_tokens=20)
        harness.step()
    for _ in range(200):
        if not harness.core.has_unfinished:
            break
        harness.step()
        longest = max(longest, harness.scheduler.num_waiting)
    assert longest > 1 and harness.core.num_preemptions, "nobody was preempted"
    harness.check_idle()


def test_generate_feeds_a_short_queue():
    core, prompts = new_core(max_waiting=2), [tokens(rng(f"feed {i}"), 3 + i, 199) for i in range(7)]
    wide = new_core().generate(prompts, PARAMS)
    outputs = core.generate(prompts, PARAMS)
    assert [o.output_token_ids for o in outputs] == [o.output_token_ids for o in wide]
    with pytest.raises(QueueFullError, match="0 requests are waiting, and 3 more"):
        core.generate(prompts, SamplingParams(n=3))
    assert not core.has_unfinished


def test_the_bound_is_on_by_default_and_can_be_lifted():
    assert EngineConfig().max_waiting == 10_000 and EngineConfig(max_waiting=None).max_waiting is None
    for bad in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="max_waiting"):
            EngineConfig(max_waiting=bad)
    harness = Harness(max_waiting=None)
    for i in range(10_001):
        harness.core.add_request(i, [1])


# -- swap space and tokens


@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_swapped_copies_never_exceed_swap_space_bytes(blocks):
    one = block_bytes(model().cfg, 4, next(model().parameters()).dtype)
    bound = blocks * one + one // 2
    core = new_core(num_blocks=12, preemption_mode="swap", swap_space_bytes=bound)
    assert sum(x.nbytes for cache in core.runner.host_caches for x in cache) <= bound
    prompts = [decided(rng(f"swap {i}"), [], 9 + i) for i in range(4)]
    for i, prompt in enumerate(prompts):
        core.add_request(i, prompt, SamplingParams(max_tokens=16, ignore_eos=True))
    final, most = {}, 0
    while core.has_unfinished:
        final.update((output.request_id, output.output_token_ids) for output in core.step())
        held = sum(len(request.swapped_out or ()) for request in core.scheduler.requests.values())
        assert held + len(core.scheduler.free_host_blocks) == blocks
        most = max(most, held)
    assert core.num_preemptions and (most > 0) == (blocks > 1), "who found no room for its copy recomputes"
    assert final == {i: endless(prompt)[:16] for i, prompt in enumerate(prompts)}


def test_no_request_has_more_tokens_than_max_model_len():
    core = new_core(max_model_len=20)
    with pytest.raises(ValueError, match="prompt 17 \\+ max_tokens 4 = 21 tokens exceeds max_model_len 20"):
        core.add_request("long", [1] * 17, PARAMS)
    core.add_request("fits", [1] * 16, PARAMS)
    (output,) = run(core).values()
    assert len(output.output_token_ids) == 4


def test_an_output_once_given_never_changes():
    core, prompt = new_core(), decided(rng("snapshot"), [], 6)
    core.add_request("r", prompt, SamplingParams(max_tokens=10, ignore_eos=True, logprobs=1))
    outputs = []
    while core.has_unfinished:
        outputs += core.step()
    for n, output in enumerate(outputs, start=1):
        assert output.output_token_ids == endless(prompt)[:n] and len(output.logprobs) == n
        assert output.finish_reason == (None if n < 10 else "length")
    outputs[0].output_token_ids.append(5)
    assert outputs[0].output_token_ids == endless(prompt)[:1]
