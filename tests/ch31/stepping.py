"""Plan, run, commit. EngineCore.step over the fake pool."""

import pytest

from engine.serve.engine import EngineCore
from tests.ch31.fake_pool import LOOP, VOCAB, continuation, fake_core, next_token
from tests.ch31.harness import Harness, tokens
from tests.grading import expect, expect_equal, grades, rng

step = EngineCore.step


def counters(core):
    return {
        "num_steps": core.num_steps,
        "num_scheduled_tokens": core.num_scheduled_tokens,
        "num_preemptions": core.num_preemptions,
    }


@grades(step)
def test_nothing_to_do_is_no_step():
    core = fake_core()
    expect_equal(core.step(), [], "outputs of an idle engine, entry {i}", see=LOOP)
    expect_equal(counters(core), dict.fromkeys(counters(core), 0), "counters", "nothing ran", LOOP)


@grades(step)
def test_a_chunk_in_mid_prompt_gives_no_output():
    harness = Harness(max_num_batched_tokens=8)
    core, random = harness.core, rng("mid prompt")
    harness.add("long", tokens(random, 20), max_tokens=2)
    got = [[output.request_id for output in core.step()] for _ in range(4)]
    about = {"see": LOOP, "call": "prompt of 20 tokens, budget 8"}
    hint = "a row samples only if it is the last known token or later"
    expect_equal(got, [[], [], ["long"], ["long"]], "requests with output in step {i}", hint, **about)
    harness.check()


@grades(step)
def test_outputs_come_in_the_order_of_the_batch():
    harness, random = Harness(max_num_batched_tokens=14), rng("order")
    for name, length in (("c", 3), ("a", 4), ("b", 30)):
        harness.add(name, tokens(random, length), max_tokens=3)
    outputs = harness.core.step()
    got = [(o.request_id, len(o.new_token_ids), o.finished) for o in outputs]
    what = "output {r}: (request, new tokens, finished)"
    expect_equal(got, [("c", 1, False), ("a", 1, False)], what, '"b" is in mid-prompt', LOOP)


@grades(step)
def test_a_step_counts_what_it_computed():
    harness, random = Harness(max_num_batched_tokens=8), rng("counted")
    request = harness.add("r", tokens(random, 13), max_tokens=4)
    for number, computed in enumerate([8, 13, 14, 15]):
        harness.step()
        expect_equal(
            request.num_computed_tokens, computed, f"num_computed_tokens after step {number}", "`accept`", LOOP
        )


@grades(step)
def test_counters_add_up():
    harness, random = Harness(num_blocks=6, max_num_batched_tokens=16, enable_prefix_caching=False), rng("add up")
    for i in range(3):
        harness.add(str(i), tokens(random, 6), max_tokens=12)
    plans, preemptions = harness.runner.plans, 0
    schedule = harness.scheduler.schedule

    def watched():
        nonlocal preemptions
        out = schedule()
        preemptions += len(out.preempted)
        return out

    harness.scheduler.schedule = watched
    harness.drain()
    expected = [len(plans), sum(n for plan in plans for _, n in plan), preemptions]
    expect_equal(
        list(counters(harness.core).values()), expected, "num_steps, num_scheduled_tokens, num_preemptions: {i}"
    )


@grades(step)
def test_one_token_is_asked_for_and_one_comes():
    harness = Harness()
    harness.add("one", [1, 2, 3], max_tokens=1)
    (output,) = harness.core.step()
    about = {"see": LOOP, "call": "step() with max_tokens=1"}
    expect_equal(len(output.new_token_ids), 1, "new tokens", **about)
    expect_equal((output.finished, output.finish_reason), (True, "length"), "(finished, finish_reason)", **about)
    harness.check()


@grades(step)
def test_a_finished_request_leaves_at_once():
    harness, random = Harness(max_num_batched_tokens=64), rng("leaves")
    prompt = tokens(random, 9)
    first = next_token(prompt)
    harness.add("stops", prompt, stop_token_ids=(first,))
    harness.add("goes on", tokens(random, 9), max_tokens=8)
    outputs = {output.request_id: output for output in harness.core.step()}
    got = outputs["stops"]
    about = {"see": LOOP, "call": "step() whose token is a stop id of its request"}
    expect_equal(got.new_token_ids, [first], "new token {i}", "the stop id belongs to the output", **about)
    expect_equal((got.finish_reason, got.stop_reason), ("stop", first), "(finish_reason, stop_reason)[{i}]", **about)
    expect_equal([r.request_id for r in harness.scheduler.running], ["goes on"], "running request {i}", **about)
    expect_equal(harness.blocks.num_free, harness.blocks.num_blocks - 3, "free blocks", "`scheduler.finish`", **about)


def verifying(right, wrong=0, **params):
    """A decode with drafts: `right` of them are its future, then come `wrong` others. Returns (harness, future)."""
    harness = Harness(max_num_batched_tokens=64)
    prompt = tokens(rng("verify"), 6)
    request = harness.add("r", prompt, **params)
    harness.step()
    future = continuation(request.token_ids, 9)
    request.spec_token_ids = future[:right] + [(t + 1) % VOCAB for t in future[right : right + wrong]]
    return harness, request, future


@grades(step)
@pytest.mark.parametrize("right, wrong", [(0, 0), (3, 0), (0, 2), (2, 2), (1, 3)])
def test_right_drafts_and_one_more_token_are_delivered(right, wrong):
    harness, request, future = verifying(right, wrong, max_tokens=20)
    (output,) = harness.core.step()
    about = {"see": LOOP, "call": f"step() with {right} right and {wrong} wrong drafts"}
    expect_equal(output.new_token_ids, future[: right + 1], "new token {i}", "`accept` says which hold", **about)
    expect_equal(request.num_tokens - request.num_computed_tokens, 1, "uncomputed tokens afterwards", **about)
    expect_equal(request.spec_token_ids, [], "draft {i} left over", **about)
    harness.asked["r"].got += output.new_token_ids
    harness.drain()


@grades(step)
def test_several_tokens_in_a_step_end_right_after_a_stop():
    _, _, future = verifying(0, max_tokens=20)
    stop = future[1]
    at = future.index(stop)
    harness, request, _ = verifying(4, max_tokens=20, stop_token_ids=(stop,))
    if not harness.core.has_unfinished:  # the very first token was that id
        return
    (output,) = harness.core.step()
    about = {"see": LOOP, "call": f"step() that samples 5 tokens, token {at} of them is a stop id"}
    expect_equal(output.new_token_ids, future[: at + 1], "new token {i}", "ask check_stop after every token", **about)
    expect_equal(output.output_token_ids[1:], future[: at + 1], "output token {i} after the first", **about)
    expect_equal(
        (output.finish_reason, output.stop_reason), ("stop", stop), "(finish_reason, stop_reason)[{i}]", **about
    )
    harness.check()


@grades(step)
def test_several_tokens_in_a_step_end_at_max_tokens():
    harness, request, future = verifying(4, max_tokens=3)
    (output,) = harness.core.step()
    about = {"see": LOOP, "call": "step() that samples 5 tokens where max_tokens leaves 2"}
    expect_equal(output.new_token_ids, future[:2], "new token {i}", "ask check_stop after every token", **about)
    expect_equal(output.finish_reason, "length", "finish_reason", **about)
    harness.check()


@grades(step)
def test_every_token_is_delivered_once_and_in_place():
    """Tight pool, so that requests are preempted while they wait for nothing but their next token."""
    harness, random = Harness(num_blocks=9, max_num_batched_tokens=16), rng("once")
    for i in range(6):
        harness.add(str(i), tokens(random, random.randint(1, 9)), max_tokens=16)
    harness.drain()
    expect(harness.core.num_preemptions > 0, "nobody was preempted in a pool of 9 blocks", see=LOOP)


@grades(step)
def test_the_host_copies_of_a_resumed_request_are_given_up():
    harness, random = Harness(num_blocks=9, host_blocks=9, max_num_batched_tokens=32), rng("given up")
    for i in range(4):
        harness.add(str(i), tokens(random, 7), max_tokens=14)
    harness.drain()
    expect(harness.core.num_preemptions > 0, "nobody was preempted in a pool of 9 blocks", see=LOOP)
    free = len(harness.scheduler.free_host_blocks)
    expect_equal(free, 9, "free host blocks at the end", "`scheduler.drop_swap` for each admitted request", LOOP)


@grades(step)
@pytest.mark.parametrize("host_blocks", [None, 10])
def test_a_step_that_only_preempts_is_a_step_too(host_blocks):
    """Its drafts outgrow the pool, so the only request gives way to itself; its blocks are still to be copied."""
    harness = Harness(num_blocks=4, host_blocks=host_blocks, enable_prefix_caching=False)
    request = harness.add("r", tokens(rng("only preempts"), 7), max_tokens=9)
    for _ in range(5):
        harness.step()
    before = harness.core.num_steps
    request.spec_token_ids = [1] * 12
    about = {"see": LOOP, "call": "step() whose plan has nothing but a preempted request"}
    expect_equal(harness.core.step(), [], "outputs, entry {i}", **about)
    got = (harness.core.num_steps - before, harness.core.num_preemptions)
    expect_equal(got, (1, 1), "(steps, preemptions)[{i}] counted", "`out.empty` says whether there is a step", **about)
    harness.drain()


@grades(step)
def test_a_plan_without_tokens_samples_nothing():
    """Everybody gone: the runner must not be asked for an empty batch."""
    harness = Harness()
    harness.add("r", [1, 2, 3])
    harness.abort("r")
    expect_equal(harness.core.step(), [], "outputs, entry {i}", see=LOOP)
    expect_equal(len(harness.runner.plans), 0, "forward passes", "nothing planned, nothing run", LOOP)
