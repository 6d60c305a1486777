"""Steps that fail, anywhere and with anything: as if they had not happened. EngineCore.step and Scheduler.undo."""

import pytest

from engine.serve.engine import EngineCore
from tests.ch31.fake_pool import LOOP
from tests.ch31.harness import Harness, tokens
from tests.grading import expect, expect_equal, grades, rng

step = EngineCore.step
WHERE = ["swap", "forward", "sampler"]


@grades(step)
@pytest.mark.parametrize("error", [MemoryError, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", WHERE)
def test_a_failed_step_has_not_happened(where, error):
    harness, random = Harness(max_num_batched_tokens=16), rng("failed")
    prompt = tokens(random, 9)
    harness.add("a", prompt, max_tokens=6)
    harness.step()
    harness.add("b", [*prompt[:8], *tokens(random, 4)], max_tokens=6)
    harness.failing_step(where, error)
    harness.drain()


@grades(step)
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("where", WHERE)
def test_a_failed_step_leaves_nothing_cached_that_was_not_computed(where, error):
    """Its blocks were published when it was planned; whoever comes next must not find them."""
    harness, prompt = Harness(max_num_batched_tokens=16), tokens(rng("not computed"), 13)
    harness.add("a", prompt)
    harness.failing_step(where, error)
    hashes = len(harness.blocks.cached)
    expect_equal(
        hashes, 0, f"published blocks after {error.__name__} in the {where} of the first step", "undo the plan", LOOP
    )
    harness.abort("a")
    harness.add("b", prompt)
    harness.drain()


@grades(step)
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("where", WHERE)
def test_a_failed_step_costs_nobody_what_was_computed_before_it(where, error):
    """`undo` takes back the plan and leaves K/V and hashes of earlier steps where they are."""
    harness = Harness(max_num_batched_tokens=16)
    request = harness.add("a", tokens(rng("kept"), 10), max_tokens=6)
    harness.step()
    harness.add("b", tokens(rng("kept too"), 10), max_tokens=6)
    before = (request.status.name, request.num_computed_tokens, request.num_preemptions, len(harness.blocks.cached))
    harness.failing_step(where, error)
    after = (request.status.name, request.num_computed_tokens, request.num_preemptions, len(harness.blocks.cached))
    what = f"(status, computed tokens, preemptions, hashes)[{{i}}] after {error.__name__} in the {where}"
    expect_equal(after, before, what, "`scheduler.undo(out, …)`, whatever was raised", LOOP)
    harness.drain()


@grades(step)
@pytest.mark.parametrize("where", WHERE)
def test_a_failed_chunk_of_a_running_request_is_withdrawn(where):
    """The second of three chunks fails; the first one stays cached, the second one must not be found."""
    harness, prompt = Harness(max_num_batched_tokens=8), tokens(rng("second chunk"), 21)
    harness.add("a", prompt)
    harness.step()
    harness.failing_step(where)
    hashes = len(harness.blocks.cached)
    expect_equal(hashes, 2, "published blocks after a failed second chunk, 8 of 21 tokens computed", "undo", LOOP)
    harness.abort("a")
    harness.add("b", prompt)
    harness.drain()


@grades(step)
@pytest.mark.parametrize("where", WHERE)
def test_requests_admitted_in_a_failed_step_return_to_the_front_in_order(where):
    harness, random = Harness(max_num_batched_tokens=30, max_num_seqs=4), rng("front")
    prompt = tokens(random, 9)
    for name in ("a", "b", "c"):  # "b" and "c" adopt blocks of "a" that will never be computed
        harness.add(name, prompt)
    harness.failing_step(where)
    harness.add("d", prompt)
    waiting = [r.request_id for r in harness.scheduler.waiting]
    hint = "`scheduler.undo(out, …)` takes the plan back"
    expect_equal(waiting, ["a", "b", "c", "d"], "place {i} in the queue", hint, LOOP)
    stats = harness.blocks.stats
    expect_equal((stats.tokens_known, stats.tokens_adopted), (0, 0), "(tokens_known, tokens_adopted)[{i}]", see=LOOP)
    harness.drain()


@grades(step)
@pytest.mark.parametrize("where", WHERE)
def test_a_step_that_fails_while_swapping_out(where):
    """Copies that were not made must not be trusted; copies that were made still hold."""
    harness, random = Harness(num_blocks=7, host_blocks=20, max_num_batched_tokens=32), rng("swap out")
    for i in range(3):
        harness.add(str(i), tokens(random, 6), max_tokens=16)
    fail_when(harness, where, lambda out: out.swap_out)
    harness.drain()


@grades(step)
@pytest.mark.parametrize("where", WHERE)
def test_a_step_that_fails_while_swapping_in(where):
    """The host copies are still needed: only a step that succeeded gives them up."""
    harness, random = Harness(num_blocks=7, host_blocks=20, max_num_batched_tokens=32), rng("swap in")
    for i in range(3):
        harness.add(str(i), tokens(random, 6), max_tokens=16)
    fail_when(harness, where, lambda out: out.swap_in)
    harness.drain()


def fail_when(harness, where, wanted, limit=200):
    """Steps on; each of the first three plans for which `wanted` holds fails once."""
    schedule, seen = harness.scheduler.schedule, 0

    def watched():
        nonlocal seen
        out = schedule()
        if wanted(out) and seen < 3:
            seen += 1
            harness.runner.fail_at = where
        return out

    harness.scheduler.schedule = watched
    for _ in range(limit):
        if seen >= 3 or not harness.core.has_unfinished:
            break
        harness.runner.calls = 0
        try:
            for output in harness.core.step():
                harness._deliver(output)
        except MemoryError:
            pass
        except Exception:
            raise harness.runner.fault or AssertionError("step let another exception out") from None
        harness.check()
    harness.scheduler.schedule = schedule
    expect(seen, "no step had such copies, in a pool that is too small for three requests", see=LOOP)


@grades(step)
@pytest.mark.parametrize("where", WHERE)
def test_failures_in_every_step_still_give_the_same_text(where):
    """Each step fails once before it succeeds."""
    harness, random = Harness(num_blocks=8, host_blocks=3, max_num_batched_tokens=12), rng("every step")
    shared = tokens(random, 5)
    for i in range(4):
        harness.add(str(i), [*shared, *tokens(random, i)], max_tokens=8)
    harness.failing_step(where)
    harness.drain(lambda: harness.failing_step(where))


@grades(step)
def test_drafts_of_a_failed_step_may_be_verified_again():
    harness = Harness(max_num_batched_tokens=64)
    request = harness.add("r", tokens(rng("drafts"), 6), max_tokens=12)
    harness.step()
    request.spec_token_ids = list(harness.asked["r"].expected[1:4])
    harness.failing_step("forward")
    harness.drain()


@grades(step)
def test_counters_count_successful_steps_only():
    harness = Harness()
    harness.add("r", [1, 2, 3], max_tokens=2)
    for where in WHERE:
        harness.failing_step(where)
    harness.drain()
    core = harness.core
    expect_equal(
        (core.num_steps, core.num_scheduled_tokens), (2, 4), "(num_steps, num_scheduled_tokens)[{i}]", see=LOOP
    )
