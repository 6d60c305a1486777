"""Everybody gets on: no starvation, no waiting for each other, no ping-pong. Scheduler.schedule over many steps."""

import pytest

from engine.serve.scheduler import Scheduler, SchedulerOutput
from tests.ch31.fake_pool import SCHEDULER, SWAP
from tests.ch31.harness import Harness, tokens
from tests.grading import expect, expect_equal, grades, rng

schedule = Scheduler.schedule


@grades(schedule)
@pytest.mark.parametrize("host_blocks", [None, 3, 20])
def test_two_long_requests_that_do_not_fit_together_both_finish(host_blocks):
    harness, random = Harness(num_blocks=15, max_num_batched_tokens=16, host_blocks=host_blocks), rng("two long")
    harness.add("a", tokens(random, 30), max_tokens=20)
    harness.add("b", tokens(random, 28), max_tokens=20)
    harness.drain()


@grades(schedule)
def test_a_request_that_fills_the_pool_alone_ends_and_others_go_on():
    harness, random = Harness(num_blocks=6, max_num_batched_tokens=16), rng("alone")
    harness.add("small", tokens(random, 3), max_tokens=3)
    harness.add("whole", tokens(random, 14), max_tokens=10)
    harness.add("next", tokens(random, 3), max_tokens=3)
    harness.drain()
    reasons = {name: asked.reason for name, asked in harness.asked.items()}
    expect_equal(reasons, dict.fromkeys(reasons, "length"), "finish_reason", see=SCHEDULER)


@grades(schedule)
def test_a_prompt_of_ten_chunks_in_a_tight_pool():
    harness, random = Harness(num_blocks=12, max_num_batched_tokens=4), rng("ten chunks")
    harness.add("long", tokens(random, 40), max_tokens=6)
    harness.add("other", tokens(random, 10), max_tokens=6)
    harness.drain()


@grades(schedule)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_new_arrival_every_step_does_not_hold_up_the_first(policy):
    harness, random = Harness(num_blocks=200, max_num_batched_tokens=8, policy=policy), rng("arrivals")
    harness.add("first", tokens(random, 4), max_tokens=60, arrival_time=0.0)
    for number in range(50):
        harness.add(f"r{number}", tokens(random, 9), max_tokens=2, arrival_time=1.0 + number)
        before = len(harness.asked["first"].got)
        harness.step()
        got = len(harness.asked["first"].got) - before
        fact = f'"first" got {got} tokens in step {number}, with a new prompt every step'
        expect(got == 1, fact, "running requests come before admissions", SCHEDULER)


@grades(schedule)
@pytest.mark.parametrize("host_blocks", [None, 30])
def test_growing_requests_in_a_tight_pool_do_not_push_each_other_out_for_ever(host_blocks):
    """A preemption needs an older request that grows by a block: there are no more than blocks ever needed."""
    harness, random = Harness(num_blocks=9, max_num_batched_tokens=32, host_blocks=host_blocks), rng("growing")
    needed = 0
    for i in range(5):
        prompt = tokens(random, random.randint(2, 6))
        harness.add(str(i), prompt, max_tokens=24)
        needed += harness.blocks.blocks_for(len(prompt) + 24)
    preemptions = sum(len(p) for p in preempted_by_step(harness))
    expect(preemptions > 0, "nobody was preempted, although five requests that need 35 blocks share 9", see=SWAP)
    fact = f"{preemptions} preemptions for requests that need {needed} blocks in all"
    expect(preemptions <= needed, fact, "do not admit in a step that preempted; the victim is the youngest", SCHEDULER)


def preempted_by_step(harness):
    """Drains; for each step the requests that it preempted."""
    inner, found = harness.scheduler.schedule, []

    def watched():
        out = inner()
        found.append(list(out.preempted))
        return out

    harness.scheduler.schedule = watched
    harness.drain()
    return found


@grades(schedule)
def test_chunked_prefill_off_nobody_passes_a_prompt_that_waits():
    harness, random = Harness(max_num_batched_tokens=10, enable_chunked_prefill=False), rng("whole")
    for name, length in (("a", 6), ("b", 5), ("c", 2)):
        harness.add(name, tokens(random, length))
    plans = [harness.step() for _ in range(2)]
    hint = '"b" needs 5 of the 4 tokens left, so it waits whole; "c" would fit, but comes after it'
    expect_equal(plans[0], [("a", 6)], "budget 10, prompts of 6, 5 and 2: (request, n) {i}", hint, SCHEDULER)
    expect_equal(plans[1], [("a", 1), ("b", 5), ("c", 2)], "the step after it: (request, n) {i}", see=SCHEDULER)
    harness.drain()


@grades(schedule)
def test_chunked_prefill_off_only_what_is_not_cached_has_to_fit():
    harness = Harness(block_size=4, num_blocks=32, max_num_batched_tokens=16, enable_chunked_prefill=False)
    shared = tokens(rng("shared opening"), 12)
    for name, last in (("a", 50), ("b", 60)):
        harness.add(name, [*shared, last])
    hint = '"b" adopts the 12 tokens that "a" publishes in this very step, so n is 1, and 3 are left of the budget'
    expect_equal(harness.step(), [("a", 13), ("b", 1)], "budget 16, prompts of 13: (request, n) {i}", hint, SCHEDULER)
    harness.drain()


@grades(schedule)
def test_chunked_prefill_off_a_resumed_request_may_be_cut():
    """It has to compute 13 tokens again. The budget is 10, and others always take some of it."""
    settings = {"max_num_batched_tokens": 10, "enable_chunked_prefill": False, "enable_prefix_caching": False}
    harness, random = Harness(**settings), rng("cut")
    for name in ("a", "b"):
        harness.add(name, tokens(random, 8), max_tokens=30)
    b = harness.scheduler.requests["b"]
    for _ in range(20):
        if b.num_tokens < 13:
            harness.step()
    harness.scheduler.preempt(b, SchedulerOutput())
    hint = "only a new prompt has to fit whole; this one would wait as long as anybody else runs"
    expect_equal(harness.step(), [("a", 1), ("b", 9)], "(request, n) {i}", hint, SCHEDULER)
    harness.drain()


@grades(schedule)
def test_resuming_computes_prompt_and_output_again():
    harness = Harness(num_blocks=4, max_num_batched_tokens=64, enable_prefix_caching=False)
    for name, length in (("a", 7), ("b", 6)):
        harness.add(name, tokens(rng(name), length), max_tokens=6)
    plans = []
    for _ in range(20):
        if not harness.core.has_unfinished:
            break
        b = harness.scheduler.requests.get("b")
        known, resumes = (b.num_tokens, b.num_preemptions and not b.num_computed_tokens) if b else (0, False)
        plan = dict(harness.step())
        if resumes and "b" in plan:
            plans.append((plan["b"], known))
    expect(plans, '"b" was never preempted and resumed, although 7 blocks are needed and there are 4', see=SWAP)
    for n, known in plans:
        fact = f'"b" resumed with n = {n}; it knows {known} tokens (prompt and output), none of which is computed'
        expect(n == known, fact, "num_tokens - num_computed_tokens", SWAP)
    harness.drain()


@grades(schedule)
def test_priority_ties_go_by_arrival_and_then_by_order_of_adding():
    harness, random = Harness(policy="priority", max_num_seqs=1, max_num_batched_tokens=64), rng("ties")
    entries = [(p, float(t)) for p in (0, 1) for t in (1, 2) for _ in range(2)]
    random.shuffle(entries)
    for i, (priority, arrival) in enumerate(entries):
        harness.add(f"r{i}", tokens(random, 3), max_tokens=2, priority=priority, arrival_time=arrival)
    served = []
    harness.drain(lambda: served.extend(n for n, _ in harness.runner.plans[-1] if n not in served))
    expected = [f"r{i}" for i in sorted(range(len(entries)), key=lambda i: (*entries[i], i))]
    hint = "by priority, then arrival, then order of adding"
    expect_equal(served, expected, "request that runs at place {i}", hint, SCHEDULER)
