"""Ctrl-C at any line of a call of the core: the call has not happened. EngineCore.step, and the given `Atomic`."""

import pytest

from engine.milestones.faults import Interrupt
from engine.serve.engine import EngineCore
from engine.serve.request import SamplingParams
from tests.ch31.fake_pool import LOOP
from tests.ch31.harness import Harness, tokens
from tests.grading import expect, expect_equal, grades, rng


def interrupted_step(harness, at) -> bool:
    """A step with Ctrl-C at that line: True if it was reached, and then nothing has happened."""
    before, interrupt = harness.progress(), Interrupt(at)
    harness.runner.calls = 0
    outputs = interrupt(harness.core.step)
    if harness.runner.fault is not None:
        raise harness.runner.fault
    if interrupt.place is None:
        for output in outputs:
            harness._deliver(output)
    else:
        expect(interrupt.raised, f"KeyboardInterrupt at {interrupt.place} did not reach the caller", see=LOOP)
        untouched(harness, before, f"Ctrl-C at {interrupt.place}")
    harness.check()
    return interrupt.place is not None


def untouched(harness, before, what) -> None:
    harness.core.abort_request("nobody")  # if the repair was interrupted too, any call makes up for it
    hint = "all of `step` stands inside `with self.atomic:`"
    expect_equal(harness.progress(), before, f"{what}: (request, tokens known) number {{i}}", hint, LOOP)
    harness.check()


@grades(EngineCore.step)
@pytest.mark.parametrize("settings", [{}, {"host_blocks": 20}, {"policy": "priority"}], ids=str)
def test_an_interrupt_at_any_line_of_a_step_has_not_happened(settings):
    random, reached = rng(f"interrupts {settings}"), 0
    for _ in range(8):
        harness, shared = Harness(num_blocks=9, max_num_batched_tokens=12, **settings), tokens(random, 6)
        for i in range(5):
            text, stops = [*shared, *tokens(random, i)], tokens(random, 3)
            harness.add(str(i), text, max_tokens=random.randint(3, 14), priority=i % 2, stop_token_ids=stops)
        while harness.core.has_unfinished:
            if random.random() < 0.4:
                reached += interrupted_step(harness, random.randrange(1, 400))
            else:
                harness.step()
        harness.check_idle()
    expect(reached > 20, f"only {reached} interrupts hit a step", see=LOOP)


def samples(harness):
    return sorted((parent, name) for parent, names in harness.core.children.items() for name in names)


def test_an_interrupt_while_adding_or_aborting_has_not_happened():
    for call in ("add", "abort"):
        for at in range(1, 400):
            harness = Harness(num_blocks=20, max_num_batched_tokens=30)
            harness.add("other", [1, 2, 3], max_tokens=5)
            if call == "abort":
                harness.core.add_request("r", [4] * 9, SamplingParams(max_tokens=6, n=2))
            harness.core.step()
            before, children, interrupt = harness.progress(), samples(harness), Interrupt(at)
            if call == "add":
                interrupt(lambda h=harness: h.core.add_request("r", [4] * 9, SamplingParams(max_tokens=6, n=2)))
            else:
                interrupt(lambda h=harness: h.core.abort_request("r"))
            if interrupt.place is None:
                break
            expect(interrupt.raised, f"KeyboardInterrupt at {interrupt.place} did not reach the caller", see=LOOP)
            untouched(harness, before, f"{call}, Ctrl-C at {interrupt.place}")
            expect_equal(samples(harness), children, "samples, by parent", see=LOOP)
        expect(30 < at < 399, f"{call} has {at} lines?", see=LOOP)
