"""What preempting one request does to it, to the queue, to the blocks and to the plan. Scheduler.preempt."""

import pytest

from engine.serve.scheduler import Scheduler, SchedulerOutput
from tests.ch31.fake_pool import SCHEDULER, SWAP
from tests.ch31.harness import Harness, check_blocks, tokens
from tests.ch31.resuming import decoding
from tests.grading import expect, expect_equal, grades, rng

preempt = Scheduler.preempt


def preempted(harness, request):
    out = SchedulerOutput()
    harness.scheduler.preempt(request, out)
    check_blocks(harness.blocks)
    return out


@grades(preempt)
@pytest.mark.parametrize("host_blocks", [None, 10])
def test_a_preempted_request_gives_everything_back_and_waits(host_blocks):
    harness, a = decoding(11, host_blocks=host_blocks)
    out = preempted(harness, a)
    about = {"see": SWAP, "call": f"preempt({a.request_id!r}), mode {harness.core.config.preemption_mode}"}
    expect_equal(harness.blocks.num_free, harness.blocks.num_blocks, "free blocks afterwards", "`blocks.free`", **about)
    expect_equal(a.status.name, "PREEMPTED", "status", **about)
    expect_equal(
        [r.request_id for r in harness.scheduler.running], [], "running request {i}", "`stop_running`", **about
    )
    expect_equal([r.request_id for r in harness.scheduler.waiting], ["a"], "waiting request {i}", **about)
    expect_equal(a.num_preemptions, 1, "num_preemptions", **about)
    expect_equal([r.request_id for r in out.preempted], ["a"], "out.preempted[{i}]", **about)
    harness.runner.swap(out)
    harness.drain()


@grades(preempt)
def test_recompute_forgets_that_anything_was_computed():
    harness, a = decoding(11)
    known = list(a.token_ids)
    out = preempted(harness, a)
    about = {"see": SWAP, "call": "preempt() in mode recompute"}
    expect_equal(a.num_computed_tokens, 0, "num_computed_tokens", "its K/V is gone with its blocks", **about)
    expect_equal(a.token_ids, known, "token {i}", "prompt and output stay known; only their K/V is forgotten", **about)
    expect(a.swapped_out is None and not out.swap_out, "preempt() in mode recompute left something to copy", see=SWAP)
    harness.drain()


@grades(preempt)
@pytest.mark.parametrize("length", [9, 10, 12])
def test_swap_copies_the_blocks_of_the_computed_tokens_in_order(length):
    harness, a = decoding(length, host_blocks=10)
    harness.blocks.allocate_slots(a, 9)  # room for drafts, which hold nothing yet
    table = list(harness.blocks.block_tables[a])
    count = harness.blocks.blocks_for(length - 1)
    out = preempted(harness, a)
    about = {"see": SWAP, "call": f"preempt() in mode swap, {length - 1} of {length} tokens computed, blocks of 4"}
    expect_equal(len(out.swap_out), 1, "number of entries in swap_out", **about)
    request, device, host = out.swap_out[0]
    expect(request is a, "the entry in swap_out is not for the preempted request", see=SWAP)
    expect_equal(
        device, table[:count], "device block {i} of swap_out", "those that hold computed tokens, no others", **about
    )
    expect_equal(len(set(host)), count, "number of host blocks", "as many, from take_host_blocks", **about)
    expect_equal(a.swapped_out, host, "swapped_out[{i}]", "the host blocks, in the same order", **about)
    expect_equal(a.num_computed_tokens, length - 1, "num_computed_tokens", "the K/V is kept, so the count is", **about)
    harness.runner.swap(out)
    harness.drain()


@grades(preempt)
def test_swap_space_that_is_too_small_falls_back_to_recompute():
    harness, a = decoding(11, host_blocks=2)
    out = preempted(harness, a)
    about = {"see": SWAP, "call": "preempt() in mode swap with 2 host blocks, 3 needed"}
    expect_equal(a.num_computed_tokens, 0, "num_computed_tokens", "what is not copied is lost", **about)
    expect_equal(len(out.swap_out), 0, "number of entries in swap_out", **about)
    expect_equal(
        len(harness.scheduler.free_host_blocks), 2, "free host blocks", "all that are needed, or none", **about
    )
    harness.drain()


@grades(preempt)
@pytest.mark.parametrize("host_blocks", [1, 4, 40])
def test_any_swap_space_gives_the_same_text(host_blocks):
    harness, random = Harness(num_blocks=10, host_blocks=host_blocks, max_num_batched_tokens=32), rng("same text")
    shared = tokens(random, 6)
    for i in range(4):
        harness.add(str(i), [*shared, *tokens(random, i)], max_tokens=20)
    harness.drain()


@grades(preempt)
def test_nothing_computed_leaves_nothing_to_swap():
    harness = Harness(host_blocks=10)
    a = harness.add("a", [1, 2, 3])
    harness.blocks.allocate_slots(a, 3)
    harness.scheduler.start_running(a)
    out = preempted(harness, a)
    about = {"see": SWAP, "call": "preempt() in mode swap of a request with no computed token"}
    expect_equal(len(out.swap_out), 0, "number of entries in swap_out", **about)
    expect_equal(a.swapped_out, None, "swapped_out", **about)
    harness.drain()


@grades(preempt)
@pytest.mark.parametrize("host_blocks", [None, 10])
def test_drafts_die_with_a_preemption(host_blocks):
    harness, a = decoding(11, host_blocks=host_blocks)
    a.spec_token_ids = [1, 2, 3]
    harness.runner.swap(preempted(harness, a))
    expect_equal(a.spec_token_ids, [], "draft {i} of a preempted request", "they would be out of date", SWAP)
    (_, n), *_ = harness.step()
    wanted = a.num_tokens - 1 - 8 if host_blocks is None else 1  # two full blocks are still cached
    expect_equal(n, wanted, "n of its first step after resuming", "no draft may be in it", SWAP)
    harness.drain()


@grades(preempt)
def test_a_preempted_request_is_the_first_to_come_back():
    harness = Harness(max_num_batched_tokens=64)
    for name in ("a", "b", "c"):
        harness.add(name, tokens(rng(name), 3))
    harness.step()
    harness.add("d", [1, 2, 3])
    for name in ("c", "b"):
        preempted(harness, harness.scheduler.requests[name])
    waiting = [r.request_id for r in harness.scheduler.waiting]
    expect_equal(waiting, ["b", "c", "d"], 'place {i} in the queue after "c", then "b" was preempted', see=SCHEDULER)
    harness.drain()


@grades(preempt)
def test_under_the_priority_policy_a_preempted_request_returns_to_its_place():
    harness = Harness(max_num_batched_tokens=64, policy="priority")
    for name, priority in (("a", 1), ("b", 3)):
        harness.add(name, tokens(rng(name), 3), priority=priority)
    harness.step()
    for name, priority in (("c", 4), ("d", 2)):
        harness.add(name, tokens(rng(name), 3), priority=priority)
    preempted(harness, harness.scheduler.requests["b"])
    waiting = [r.request_id for r in harness.scheduler.waiting]
    expect_equal(waiting, ["d", "b", "c"], "place {i} in the queue, priorities 2, 3 (preempted) and 4", see=SCHEDULER)
    harness.drain()


@grades(preempt)
@pytest.mark.parametrize("host_blocks", [None, 10])
def test_preempting_one_of_two_that_share_a_prefix_leaves_the_other_its_blocks(host_blocks):
    harness, prompt = Harness(max_num_batched_tokens=64, host_blocks=host_blocks), tokens(rng("sharing"), 11)
    harness.add("a", prompt, max_tokens=8)
    b = harness.add("b", prompt, max_tokens=8)
    harness.step()
    used = harness.blocks.num_blocks - harness.blocks.num_free
    harness.runner.swap(preempted(harness, b))
    freed = used - (harness.blocks.num_blocks - harness.blocks.num_free)
    expect_equal(freed, 1, "blocks that became free", "two of the three blocks are shared; one is its own", SWAP)
    harness.step()
    now = harness.blocks.num_blocks - harness.blocks.num_free
    expect_equal(now, used, "used blocks after it resumed", "it adopts the shared ones again", SWAP)
    harness.drain()
