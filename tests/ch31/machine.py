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


REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "family": st.integers(0, 1),
            "length": st.integers(1, 40),
            "tail": st.none() | st.integers(0, VOCAB - 1),
            "wanted": st.integers(1, 25),
            "priority": st.integers(0, 2),
            "arrival_time": st.sampled_from([0.0, 1.0]),
            "cache_key": st.sampled_from(KEYS),
            "stops": st.sampled_from([(), (), range(0, VOCAB, 9)]),
        }
    ),
    min_size=1,
    max_size=4,
)


class Arrivals(RuleBasedStateMachine):
    """Adding, stepping and aborting; a subclass makes harness, longest (tokens of a request) and count at its start."""

    @rule(requests=REQUESTS)
    def arrive(self, requests):
        for asked in requests:
            max_tokens = min(asked.pop("wanted"), self.longest - 2)
            length = min(asked.pop("length"), self.longest - max_tokens - 1)
            prompt = prompt_of(asked.pop("family"), length, asked.pop("tail"))
            self.count += 1
            self.harness.add(f"r{self.count}", prompt, max_tokens, stop_token_ids=asked.pop("stops"), **asked)

    @precondition(lambda self: self.harness.core.has_unfinished)
    @rule(steps=st.integers(1, 8))
    def steps(self, steps):
        for _ in range(steps):
            self.harness.step()

    @precondition(lambda self: self.harness.core.has_unfinished)
    @rule(which=st.integers(0, 9))
    def abort(self, which):
        names = list(self.harness.scheduler.requests)
        self.harness.abort(names[which % len(names)])

    def teardown(self):
        if hasattr(self, "harness") and not self.harness.broken:
            self.harness.drain()


class Traffic(Arrivals):
    modes = ("recompute", "swap")
    spare = (0, 1, 2, 4, 30)  # blocks beyond those that the longest request needs

    @initialize(data=st.data())
    def start(self, data):
        def one_of(label, values):
            return data.draw(st.sampled_from(list(values)), label=label)

        size = one_of("block_size", [1, 3, 16])
        self.longest = one_of("longest", range(16, 50))
        num_blocks = -(-self.longest // size) + one_of("spare", self.spare)
        chunked = one_of("chunked", [True, True, False])
        config = {
            "block_size": size,
            "num_blocks": num_blocks,
            "max_num_batched_tokens": one_of("budget", range(1, 40) if chunked else range(self.longest, 90)),
            "max_num_seqs": one_of("seqs", [1, 2, 4, 8]),
            "enable_prefix_caching": one_of("caching", [True, True, False]),
            "enable_chunked_prefill": chunked,
            "policy": one_of("policy", ["fcfs", "priority"]),
        }
        if chunked:
            config["long_prefill_token_threshold"] = one_of("threshold", [0, 0, 1, 5])
        if one_of("mode", self.modes) == "swap":
            config["host_blocks"] = one_of("host blocks", [1, 2, 5, num_blocks, 4 * num_blocks])
        self.harness, self.count = Harness(**config), 0

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


EXAMPLES = {"max_examples": 25, "stateful_step_count": 20, "deadline": None}


@grades(Scheduler.schedule)
class TrafficForSchedule(Traffic):
    """Any pool, both ways to preempt."""


@grades(Scheduler.preempt)
class TrafficForPreempt(Traffic):
    """Pools so small that nearly every growth preempts."""

    spare = (0, 1, 2)


@grades(EngineCore.step)
class TrafficForStep(Traffic):
    """As for schedule."""


for machine in (TrafficForSchedule, TrafficForPreempt, TrafficForStep):
    machine.TestCase.settings = settings(**EXAMPLES)

TestRandomTrafficThroughSchedule = TrafficForSchedule.TestCase
TestRandomTrafficThroughPreempt = TrafficForPreempt.TestCase
TestRandomTrafficThroughStep = TrafficForStep.TestCase
