"""Launches that fail, tokens that do not come, Ctrl-C at any line: the call has not happened, and no token is lost."""

import pytest

from engine.serve.overlap import OverlappedCore
from tests.ch31.harness import tokens
from tests.ch31.interrupting import Interrupt
from tests.ch33.late import AHEAD, LateHarness
from tests.grading import expect, expect_equal, grades, rng

step, collect = OverlappedCore.step, OverlappedCore.collect
WHERE = ["swap", "forward", "sampler"]
ERRORS = [MemoryError, KeyboardInterrupt]


@grades(step)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("where", WHERE)
def test_a_failed_launch_leaves_what_is_in_the_air(where, error):
    """The flight before it stays, and nobody loses K/V: the plan is taken back, the same plan may be tried again."""
    harness = LateHarness(max_num_batched_tokens=20)
    a = harness.add("a", tokens(rng("launch"), 9), 7)
    harness.step()
    harness.add("b", tokens(rng("launch too"), 6), 7)
    before = a.num_computed_tokens, a.num_preemptions, a.num_placeholders
    expect(harness.failing_step(where, error), f"a {where} that raises did not reach the caller", see=AHEAD)
    after = a.num_computed_tokens, a.num_preemptions, a.num_placeholders
    what = f"(computed, preemptions, placeholders)[{{i}}] of a running request after a failed {where}"
    expect_equal(after, before, what, "`self.scheduler.undo(out, …)`, whatever was raised", AHEAD)
    harness.drain()


@grades(step)
@pytest.mark.parametrize("where", WHERE)
def test_a_failed_first_launch_leaves_nothing_cached(where):
    harness, prompt = LateHarness(), tokens(rng("cached"), 13)
    harness.add("a", prompt)
    harness.failing_step(where)
    expect_equal(len(harness.blocks.cached), 0, f"published blocks after a first step whose {where} failed", see=AHEAD)
    harness.abort("a")
    harness.add("b", prompt)
    harness.drain()


@grades(step)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("host_blocks", [None, 20], ids=["recompute", "swap"])
def test_each_launch_fails_once(where, host_blocks):
    harness, random = LateHarness(num_blocks=9, host_blocks=host_blocks, max_num_batched_tokens=12), rng("each")
    shared = tokens(random, 5)
    for i in range(4):
        harness.add(str(i), [*shared, *tokens(random, i)], 9)
    harness.failing_step(where)
    harness.drain(lambda: harness.failing_step(where))


@grades(step)
@pytest.mark.parametrize("where", WHERE)
def test_a_failed_step_that_swaps(where):
    """swapped_out says whether the host copies can be trusted: only once `swap` has returned."""
    harness, random, seen = LateHarness(num_blocks=7, host_blocks=20), rng("swapping"), []
    for i in range(3):
        harness.add(str(i), tokens(random, 6), 16)
    schedule = harness.scheduler.schedule

    def watched():
        out = schedule()
        if out.swap_out and len(seen) < 3:
            seen.append(out)
            harness.runner.fail_at = where
        return out

    harness.scheduler.schedule = watched
    for _ in range(200):
        if not harness.core.has_unfinished:
            break
        count, harness.runner.calls = len(seen), 0
        try:
            outputs = harness.core.step()
        except MemoryError:
            out = seen[-1]
            trusted = [r.swapped_out is not None for r, _, _ in out.swap_out]
            what = f"request {{i}} of swap_out keeps its host copy after a failed {where}"
            expect_equal(trusted, [where != "swap"] * len(trusted), what, "swapped_out=…", AHEAD)
        except Exception:
            raise harness.runner.fault or AssertionError("step let another exception out") from None
        else:
            expect(len(seen) == count, "a step whose swap or launch raised has returned", see=AHEAD)
            harness._outputs(outputs, [])
        harness.check()
    expect(seen, "no step swapped out, in a pool too small for three requests", see=AHEAD)
    harness.check_idle()


@grades(step, collect)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("after", range(1, 7))
def test_tokens_that_do_not_come(after, error):
    """The device failed: what it was to deliver is computed anew, and nobody gets a token twice or not at all."""
    harness = LateHarness(max_num_batched_tokens=16)
    for i in range(3):
        harness.add(str(i), tokens(rng(f"tokens {i}"), 5 + 2 * i), 4 + i)
    for _ in range(after):
        harness.step()
    harness.failing_step("tokens", error)
    harness.drain()


@grades(step, collect)
def test_tokens_fail_in_every_second_call():
    harness = LateHarness(num_blocks=10)
    for i in range(3):
        harness.add(str(i), tokens(rng(f"second {i}"), 5 + 2 * i), 6)
    turn = iter(range(1 << 20))
    harness.drain(lambda: next(turn) % 7 == 3 and harness.failing_step("tokens"))


def interrupted(harness, call, at) -> bool:
    """Ctrl-C at that line of a call: True if it was reached, and then nothing has happened."""
    before, flying, interrupt = harness.progress(), list(harness.core.flights), Interrupt(at)
    harness.runner.calls = 0
    outputs = interrupt(call)
    if harness.runner.fault is not None:
        raise harness.runner.fault
    if interrupt.place is not None:
        harness.core.abort_request("nobody")  # if the repair was interrupted too, any call makes up for it
        hint = "all of `step` stands inside `with self.atomic:`; note (request, known tokens) before a change"
        what = f"Ctrl-C at {interrupt.place}: (request, tokens known) number {{i}}"
        expect_equal(harness.progress(), before, what, hint, AHEAD)
    elif call == harness.core.step:
        harness._outputs(outputs, flying)
    else:
        for output in outputs:
            harness.asked[output.request_id].reason = output.finish_reason
    harness.check()
    return interrupt.place is not None


@grades(step, collect)
@pytest.mark.parametrize("settings", [{}, {"host_blocks": 20}, {"policy": "priority"}], ids=str)
def test_an_interrupt_at_any_line_has_not_happened(settings):
    random, reached = rng(f"interrupts {settings}"), 0
    for _ in range(10):
        harness, shared = LateHarness(num_blocks=11, max_num_batched_tokens=12, **settings), tokens(random, 6)
        for i in range(5):
            text, stops = [*shared, *tokens(random, i)], tokens(random, 3)
            harness.add(str(i), text, random.randint(3, 14), priority=i % 2, stop_token_ids=stops)
        while harness.core.has_unfinished:
            if random.random() < 0.4:
                reached += interrupted(harness, harness.core.step, random.randrange(1, 300))
            elif random.random() < 0.1:
                name = random.choice(list(harness.scheduler.requests))
                interrupted(harness, lambda h=harness, n=name: h.core.abort_request(n), random.randrange(1, 80))
            else:
                harness.step()
        harness.check_idle()
    expect(reached > 20, f"only {reached} interrupts hit a step", see=AHEAD)


@grades(step, collect)
def test_an_interrupt_at_each_line_of_one_step():
    """A step that collects a stop and a full block while it launches, broken off at each of its lines in turn."""
    for at in range(1, 1000):
        harness = LateHarness(num_blocks=30)
        for i in range(3):
            request = harness.add(str(i), tokens(rng(f"lines {i}"), 6 + i), 9, stop_token_ids=range(0, 61, 4))
        for _ in range(2 + at % 3):
            harness.step()
        del request
        if not interrupted(harness, harness.core.step, 1 + at // 3):
            break
        harness.drain()
    expect(60 < at < 999, f"a step has {at // 3} lines?", see=AHEAD)
