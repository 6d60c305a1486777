"""Random traffic over the late device: arrivals, aborts and failures in any order, on any configuration."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from engine.serve.overlap import OverlappedCore
from tests.ch31.machine import Arrivals
from tests.ch33.late import LateHarness
from tests.grading import grades


class Ahead(Arrivals):
    """Every token is delivered once and in place; whatever `LateHarness.check` asks holds after every step."""

    harness_of = LateHarness

    @initialize(data=st.data())
    def start(self, data):
        def one_of(label, values):
            return data.draw(st.sampled_from(list(values)), label=label)

        size = one_of("block_size", [1, 3, 4, 16])
        self.longest = one_of("longest", range(16, 50))
        chunked = one_of("chunked prefill", [True, True, False])
        num_blocks = -(-self.longest // size) + one_of("spare blocks", [0, 1, 2, 5, 40])
        config = {
            "block_size": size,
            "num_blocks": num_blocks,
            "max_num_batched_tokens": one_of("budget", [3, 8, 64] if chunked else [64]),
            "max_num_seqs": one_of("max_num_seqs", [1, 2, 5, 64]),
            "enable_prefix_caching": one_of("prefix caching", [True, True, False]),
            "enable_chunked_prefill": chunked,
            "policy": one_of("policy", ["fcfs", "priority"]),
            "eos_token_id": one_of("eos", [None, 7, (3, 11, 20, 31, 42)]),
        }
        if one_of("mode", ["recompute", "swap"]) == "swap":
            config["host_blocks"] = one_of("host blocks", [1, 2, 5, 4 * num_blocks])
        self.harness, self.count = self.harness_of(**config), 0

    @precondition(lambda self: self.harness.core.has_unfinished)
    @rule(where=st.sampled_from(["swap", "forward", "sampler", "tokens"]))
    def fail(self, where):
        self.harness.failing_step(where)


@grades(OverlappedCore.step)
class AheadForStep(Ahead):
    """Any configuration."""


@grades(OverlappedCore.collect)
class AheadForCollect(Ahead):
    """The same, graded as collect's."""


for machine in (AheadForStep, AheadForCollect):
    machine.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)

TestRandomTrafficOneStepAhead = AheadForStep.TestCase
TestRandomTrafficThroughCollect = AheadForCollect.TestCase
