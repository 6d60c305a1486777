"""Random traffic over the fake pool: arrivals, aborts, drafts and failing steps in any order, on any configuration."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.serve.engine import EngineCore
from engine.serve.scheduler import Scheduler
from tests.ch31.fake_pool import VOCAB, continuation
from tests.ch31.harness import Harness, tokens
from tests.grading import grades, rng

KEYS = [(), ("tenant",), (1,)]


def prompt_of(family, length, tail):
    """Prompts of a family share their beginning; the tail sets some of them apart."""
    prefix = tokens(rng(f"family {family}"), length)
    return prefix if tail is None else [*prefix, tail]


class Traffic(RuleBasedStateMachine):
    modes = ("recompute", "swap")
    pools = (1, 2, 3, 6, 12, 40)  # blocks beyond those that the longest request needs

    @initialize(data=st.data())
    def start(self, data):
        draw = data.draw
        self.block_size = draw(st.sampled_from([1, 3, 16]), label="block_size")
        self.longest = draw(st.integers(4, 60), label="longest")
        num_blocks = -(-self.longest // self.block_size) + draw(st.sampled_from(self.pools), label="more blocks") - 1
        chunked = draw(st.booleans(), label="chunked")
        budget = draw(st.integers(1, 30) if chunked else st.integers(self.longest, 2 * self.longest), label="budget")
        config = {
            "block_size": self.block_size,
            "num_blocks": num_blocks,
            "max_num_batched_tokens": budget,
            "max_num_seqs": draw(st.integers(1, 6), label="max_num_seqs"),
            "enable_prefix_caching": draw(st.booleans(), label="prefix caching"),
            "enable_chunked_prefill": chunked,
            "policy": draw(st.sampled_from(["fcfs", "priority"]), label="policy"),
        }
        if chunked:
            config["long_prefill_token_threshold"] = draw(st.sampled_from([0, 0, 1, 5]), label="threshold")
        if draw(st.sampled_from(self.modes), label="mode") == "swap":
            config["host_blocks"] = draw(st.integers(1, num_blocks), label="host blocks")
        self.harness, self.count = Harness(**config), 0

    @rule(
        family=st.integers(0, 2), share=st.floats(0, 1), tail=st.none() | st.integers(0, VOCAB - 1),
        wanted=st.integers(1, 12), priority=st.integers(0, 2), arrival=st.integers(0, 2), key=st.sampled_from(KEYS),
        stops=st.lists(st.integers(0, VOCAB - 1), max_size=9),
    )  # fmt: skip
    def arrive(self, family, share, tail, wanted, priority, arrival, key, stops):
        max_tokens = min(wanted, self.longest - 2)
        length = 1 + int(share * (self.longest - max_tokens - 2))
        self.count += 1
        self.harness.add(
            f"r{self.count}", prompt_of(family, length, tail), max_tokens, priority=priority,
            cache_key=key, arrival_time=float(arrival), stop_token_ids=stops,
        )  # fmt: skip

    @precondition(lambda self: self.harness.core.has_unfinished)
    @rule(steps=st.integers(1, 4))
    def steps(self, steps):
        for _ in range(steps):
            self.harness.step()

    @precondition(lambda self: self.harness.core.has_unfinished)
    @rule(which=st.integers(0, 9))
    def abort(self, which):
        names = list(self.harness.scheduler.requests)
        self.harness.abort(names[which % len(names)])

    @precondition(lambda self: self.harness.scheduler.running)
    @rule(which=st.integers(0, 9), right=st.integers(0, 4), wrong=st.integers(0, 2))
    def propose(self, which, right, wrong):
        """Drafts for a request that decodes: `right` tokens of its future, then `wrong` others."""
        running = self.harness.scheduler.running
        request = running[which % len(running)]
        if request.num_tokens - request.num_computed_tokens == 1:
            future = continuation(request.token_ids, right + wrong, request.cache_key)
            drafts = future[:right] + [(token + 1) % VOCAB for token in future[right:]]
            request.spec_token_ids = drafts[: request.params.max_tokens - request.num_output_tokens]

    @precondition(lambda self: self.harness.core.has_unfinished)
    @rule(where=st.sampled_from(["swap", "forward", "sampler"]))
    def fail(self, where):
        self.harness.failing_step(where)

    def teardown(self):
        if hasattr(self, "harness") and not self.harness.broken:
            self.harness.drain()


EXAMPLES = {"max_examples": 30, "stateful_step_count": 25}


@grades(Scheduler.schedule)
class TrafficForSchedule(Traffic):
    """Any pool, both ways to preempt."""


@grades(Scheduler.preempt)
class TrafficForPreempt(Traffic):
    """Pools so small that nearly every growth preempts."""

    pools = (1, 2, 3)


@grades(EngineCore.step)
class TrafficForStep(Traffic):
    """As for schedule."""


for machine in (TrafficForSchedule, TrafficForPreempt, TrafficForStep):
    machine.TestCase.settings = settings(**EXAMPLES)

TestRandomTrafficThroughSchedule = TrafficForSchedule.TestCase
TestRandomTrafficThroughPreempt = TrafficForPreempt.TestCase
TestRandomTrafficThroughStep = TrafficForStep.TestCase
