"""OverlappedCore.step and collect over a fake device that delivers late: placeholders, late stops, held blocks."""

import pytest

from engine.serve.overlap import OverlappedCore
from engine.serve.request import SamplingParams
from tests.ch31.fake_pool import continuation
from tests.ch31.harness import tokens
from tests.ch33.late import AHEAD, LateHarness
from tests.grading import expect, expect_equal, grades, rng

step, collect = OverlappedCore.step, OverlappedCore.collect


@grades(step, collect)
def test_a_step_launches_before_it_reads():
    """The first call launches and returns nothing; from then on each brings the tokens of the launch before."""
    harness = LateHarness()
    harness.add("r", tokens(rng("first"), 5), max_tokens=4)
    counts = []
    while harness.core.has_unfinished:
        harness.step()
        counts.append((len(harness.runner.plans), len(harness.asked["r"].got)))
    text = "(launches, tokens delivered) after call {i}"
    hint = "launch the next step, then collect the older flight; with nothing to launch only collect"
    expect_equal(counts, [(1, 0), (2, 1), (3, 2), (4, 3), (4, 4)], text, hint, AHEAD)
    harness.check_idle()


@grades(step, collect)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9])
def test_a_known_end_costs_no_extra_token(max_tokens):
    harness = LateHarness(enable_prefix_caching=False)
    for i in range(3):
        harness.add(str(i), tokens(rng(f"length {i}"), 5 + i), max_tokens)
    harness.drain()
    right = sum(5 + i + max_tokens - 1 for i in range(3))
    expect_equal(harness.core.num_scheduled_tokens, right, "computed tokens", "prompt + max_tokens - 1 each", AHEAD)


@grades(step, collect)
def test_a_stop_is_noticed_one_step_late_and_costs_one_token():
    harness = LateHarness(enable_prefix_caching=False)
    prompt = tokens(rng("late stop"), 6)
    text = continuation(prompt, 10)
    at = next(i for i in range(2, 9) if text[i] not in text[:i])
    harness.add("r", prompt, 10, stop_token_ids=(text[at],))
    harness.drain()
    hint = "what stands behind a stop is dropped"
    expect_equal(harness.asked["r"].got, text[: at + 1], "output token {i}", hint, AHEAD)
    expect_equal(harness.core.num_scheduled_tokens, 6 + at + 1, "computed tokens", "one was computed in vain", AHEAD)


@grades(collect)
@pytest.mark.parametrize("kind", ["stop id", "EOS", "several EOS", "ignored EOS", "min_tokens"])
def test_every_way_to_stop_is_judged_by_the_very_token(kind):
    """Asked about another than the token just read, a request ends a token early or late."""
    for number in range(12):
        prompt = tokens(rng(f"{kind} {number}"), 3 + number)
        text = continuation(prompt, 12)
        end = text[number % 9]
        eos = {"stop id": None, "several EOS": (text[7], end)}.get(kind, end)
        params = {"stop id": {"stop_token_ids": (end,)}, "ignored EOS": {"ignore_eos": True},
                  "min_tokens": {"min_tokens": 1 + number}}.get(kind, {})  # fmt: skip
        harness = LateHarness(eos_token_id=eos)
        request = harness.add("r", prompt, 12, **params)
        harness.drain()
        if kind == "stop id":
            expect_equal(request.stop_reason, end, "stop_reason", see=AHEAD)
        expect_equal(request.num_placeholders, 0, "placeholders of a finished request", see=AHEAD)
        kept = request.output_token_ids
        expect_equal(kept, harness.asked["r"].got, "token {i} that a finished request keeps", see=AHEAD)


@grades(step, collect)
def test_a_stop_at_the_last_token_but_one():
    """The next and last step is in the air already, and the request has left `running`."""
    prompt = tokens(rng("last but one"), 5)
    for place in (-1, -2):
        text = continuation(prompt, 6)
        harness = LateHarness(eos_token_id=text[place])
        harness.add("r", prompt, 6)
        harness.add("other", prompt[:3], 9, ignore_eos=True)
        harness.drain()


@grades(step, collect)
def test_max_model_len_is_an_end_that_is_known():
    harness = LateHarness(max_model_len=16, enable_prefix_caching=False)
    harness.add("r", tokens(rng("full"), 10), max_tokens=6)
    harness.drain()
    expect_equal(harness.core.num_scheduled_tokens, 15, "computed tokens", see=AHEAD)


@grades(step, collect)
def test_blocks_of_a_stopped_request_wait_for_the_flight_that_writes_them():
    """The pool is full: a newcomer gets the blocks once the flight was collected, and the flight spoils nothing."""
    for number in range(8):
        prompt = tokens(rng(f"held {number}"), 7)
        text = continuation(prompt, 9)
        harness = LateHarness(num_blocks=5, enable_prefix_caching=number % 2 == 0, eos_token_id=text[number])
        harness.add("r", prompt, 9)
        harness.add("next", tokens(rng(f"next {number}"), 9), 7, ignore_eos=True)
        harness.drain()


@grades(step, collect)
@pytest.mark.parametrize("steps", range(1, 9))
def test_an_abort_while_a_flight_is_in_the_air(steps):
    harness = LateHarness(num_blocks=9)
    for name in "abc":
        harness.add(name, tokens(rng(f"abort {name}"), 6), 5)
    for _ in range(steps):
        harness.step()
    if "b" in harness.scheduler.requests:
        got = list(harness.asked["b"].got)
        harness.abort("b")
        expect_equal(harness.asked["b"].got, got, "token {i} of an aborted request", "nothing comes after it", AHEAD)
    harness.add("d", tokens(rng("abort d"), 6), 6)
    harness.drain()


@grades(step, collect)
def test_an_abort_of_everybody_leaves_nothing_in_the_air():
    """Nobody would call `step` again, so the last abort collects, and every block is free."""
    harness = LateHarness()
    for name in "ab":
        harness.add(name, tokens(rng(f"all {name}"), 9), 5)
    harness.step()
    harness.step()
    for name in "ab":
        harness.abort(name)
    harness.check_idle()
    expect(harness.core.reset_prefix_cache(), "an idle engine refused to reset its cache", see=AHEAD)
    expect_equal(harness.core.step(), [], "outputs after all were aborted", see=AHEAD)


@grades(step, collect)
def test_requests_that_share_a_prefix():
    """A block with a placeholder has no hash yet; once its last token is known it is found."""
    harness, prompt = LateHarness(num_blocks=40), tokens(rng("shared"), 6)
    harness.add("a", prompt, 11)
    harness.drain()
    followed = [*prompt, *harness.asked["a"].got]
    for end in (9, 12, 13, 16):
        request = harness.add(f"b{end}", [*followed[:end], 3], 3)
        harness.drain()
        what = f"adopted tokens of a prompt that goes on from {end}"
        expect_equal(request.num_cached_tokens, end // 4 * 4, what, see=AHEAD)
    harness.add("c", followed[:10], 9)
    harness.add("d", followed[:10], 9)
    harness.drain()


@grades(collect)
def test_a_block_is_published_when_its_last_token_is_known():
    harness = LateHarness()
    request = harness.add("r", tokens(rng("published"), 3), 14)
    seen = []
    while harness.core.has_unfinished:
        harness.step()  # `check` compares the number of published blocks after every step
        seen.append(harness.blocks.num_published.get(request, 0))
    expect(max(seen) >= 3, f"a request of 17 tokens in blocks of 4 had published {max(seen)} of them", see=AHEAD)


@grades(step, collect)
@pytest.mark.parametrize("host_blocks", [None, 3, 40], ids=["recompute", "little swap space", "swap"])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_nobody_is_preempted_while_a_flight_is_in_the_air(host_blocks, policy):
    harness, random = LateHarness(num_blocks=8, host_blocks=host_blocks, policy=policy), rng(f"preempt {policy}")
    for i in range(4):
        harness.add(str(i), tokens(random, 5 + i), 12 + i, priority=i % 2)
    harness.drain()
    expect(harness.core.num_preemptions > 0, "nobody was preempted", "count `out.preempted`", AHEAD)
    lost = sum(a.reason is None for a in harness.asked.values())
    expect_equal(lost, 0, "requests that never ended", see=AHEAD)


@grades(step)
def test_the_core_goes_on_ahead_where_blocks_last():
    """`may_preempt` asks how things stand; where they are fine, no call only collects."""
    harness = LateHarness(num_blocks=64)
    for i in range(3):
        harness.add(str(i), tokens(rng(f"ahead {i}"), 5), 8)
    calls = 0
    while harness.core.has_unfinished:
        harness.step()
        calls += 1
    launches = len(harness.runner.plans)
    expect_equal((calls, launches), (9, 8), "(calls, launches)[{i}]", "the last call only collects", AHEAD)


@grades(step, collect)
@pytest.mark.parametrize("settings", [{"max_num_batched_tokens": 5}, {"long_prefill_token_threshold": 3},
                                      {"max_num_seqs": 2}, {"enable_chunked_prefill": False}], ids=str)  # fmt: skip
def test_chunks_and_queues(settings):
    harness, random = LateHarness(num_blocks=20, **settings), rng(f"chunks {settings}")
    lengths = [3, 11, 17, 6, 22]
    if not settings.get("enable_chunked_prefill", True):
        harness = LateHarness(num_blocks=20, max_num_batched_tokens=24, **settings)
    for i, length in enumerate(lengths):
        harness.add(str(i), tokens(random, length), 3 + i)
    harness.drain()


@grades(step)
def test_counters():
    harness = LateHarness(num_blocks=8, enable_prefix_caching=False)
    for i in range(3):
        harness.add(str(i), tokens(rng(f"counters {i}"), 6), 12)
    preempted = 0
    schedule = harness.scheduler.schedule

    def counted():
        nonlocal preempted
        out = schedule()
        preempted += len(out.preempted)
        return out

    harness.scheduler.schedule = counted
    harness.drain()
    core, plans = harness.core, harness.runner.plans
    got = (core.num_steps, core.num_scheduled_tokens, core.num_preemptions)
    right = (len(plans), sum(n for plan in plans for _, n in plan), preempted)
    expect_equal(got, right, "(num_steps, num_scheduled_tokens, num_preemptions)[{i}]", see=AHEAD)


@grades(collect)
def test_nothing_in_the_air_is_nothing_to_collect():
    harness = LateHarness()
    expect_equal(harness.core.collect(), [], "collect() of an idle core", see=AHEAD)
    expect_equal(harness.core.step(), [], "step() of an idle core", see=AHEAD)


@grades(step, collect)
def test_samples_of_one_prompt():
    harness = LateHarness()
    prompt = tokens(rng("samples"), 9)
    harness.core.add_request("r", prompt, SamplingParams(max_tokens=7, n=3))
    got = {}
    while harness.core.has_unfinished:
        for output in harness.core.step():
            got.setdefault(output.request_id, []).extend(output.new_token_ids)
        harness.check()
    right = {f"r#{i}": continuation(prompt, 7) for i in range(3)}
    expect_equal(got, right, "tokens of sample {i}", see=AHEAD)
    expect_equal(harness.core.children, {}, "samples of a parent that is done", see=AHEAD)
