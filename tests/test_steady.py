"""SteadyCore: whatever happens in between, the tokens, the blocks and the packed numbers of OverlappedCore."""

import sys
from dataclasses import fields
from functools import wraps
from types import FunctionType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.milestones import graphs, overhead
from engine.milestones.faults import CODE, Faults, Interrupt
from engine.serve.config import EngineConfig
from engine.serve.device_sampler import DeviceSampler
from engine.serve.engine import EngineCore
from engine.serve.overlap import OverlappedCore
from engine.serve.request import SamplingParams
from engine.serve.steady import SteadyCore
from tests.ch31.equality import CONFIGS, VOCAB, model
from tests.ch31.harness import check_blocks, tokens
from tests.ch33 import ahead, failing, matrix
from tests.ch33.late import LateHarness
from tests.ch33.machine import Ahead
from tests.grading import rng

STOPS = tuple(range(0, VOCAB, 9))


class Counting(SteadyCore):
    """fast: how many steps were taken in streaks."""

    fast = 0

    def _commit(self, streak, tokens):
        self.fast += 1
        return super()._commit(streak, tokens)


def new_core(kind, eos=None, **asked):
    given = {"num_blocks": 64, "block_size": 4, "async_scheduling": kind is not EngineCore, "cuda_graphs": "static"}
    return kind(model(), EngineConfig(**given | asked), eos, DeviceSampler())


# -- beside OverlappedCore, step by step


def named(requests):
    return [request.request_id for request in requests]


def facts(request):
    values = {field.name: getattr(request, field.name) for field in fields(request)}
    return {name: value is None if name.endswith("_time") else value for name, value in values.items()}


def state(core):
    """All that the next step could depend on."""
    blocks, scheduler, runner = core.blocks, core.scheduler, core.runner
    rows, newest = runner.rows, runner._newest[1]
    return {
        "tables": {r.request_id: table for r, table in blocks.block_tables.items()},
        "published": {r.request_id: count for r, count in blocks.num_published.items()},
        "pool": (blocks.ref_counts, blocks.hashes, blocks.cached, list(blocks.free_blocks), blocks.stats),
        "requests": {name: {**facts(r), "params": 0} for name, r in scheduler.requests.items()},
        "queues": (named(scheduler.running), named(scheduler.waiting), sorted(named(scheduler.retired))),
        "flights": [(named(r for r, _ in f.scheduled), f.counts, f.size, named(f.held)) for f in core.flights],
        "core": (core.num_steps, core.num_scheduled_tokens, core.num_preemptions, core._chunks, scheduler.half_done),
        "rows": ({r.request_id: row for r, row in rows.row_of.items()}, rows.known, rows.tables[:-1].tolist()),
        "mirrored": [table is not None and table is blocks.block_tables.get(r) for r, table in mirrored(rows)],
        "runner": (runner._turn, runner._newest[0], runner._launching, [r and r.request_id for r in runner._order]),
        "packed": newest.size and runner._numbers[runner._turn][:, : newest.size].tolist() if newest else None,
        "previous": runner.previous.tolist(),
        "before": core.atomic.before,
    }


def mirrored(rows):
    return [(request, rows.table_of[row]) for request, row in rows.row_of.items()]


def said(output):
    names = ("request_id", "new_token_ids", "output_token_ids", "finished", "finish_reason", "stop_reason",
             "num_output_tokens", "num_preemptions", "num_cached_tokens", "parent_id", "index")  # fmt: skip
    return {name: getattr(output, name) for name in names}


class Pair:
    """The same calls to a SteadyCore and to an OverlappedCore, whose states and outputs must be equal after each."""

    def __init__(self, eos=None, **asked):
        self.steady, self.plain = (new_core(kind, eos, **asked) for kind in (Counting, OverlappedCore))
        self.eos, self.prompts, self.got, self.gone, self.kept = eos, {}, {}, set(), []

    def both(self, call):
        mine, theirs = ([said(output) for output in self.keep(call(core)) or ()] for core in (self.steady, self.plain))
        assert mine == theirs
        first, second = state(self.steady), state(self.plain)
        for name in first:
            assert first[name] == second[name], name
        check_blocks(self.steady.blocks)
        return mine

    def keep(self, outputs):
        self.kept += [(output, said(output)) for output in outputs or ()]
        return outputs

    def add(self, prompt, params, priority=0):
        name = str(len(self.prompts))
        self.both(lambda core: core.add_request(name, prompt, params, priority, arrival_time=0.0))
        self.prompts[name] = prompt, params

    def abort(self, which):
        live = list(self.plain.scheduler.requests) or ["nobody"]
        name = live[which % len(live)]
        self.gone.add(name)
        self.both(lambda core: core.abort_request(name))

    def step(self, count=1):
        for _ in range(count):
            for output in self.both(lambda core: core.step()):
                self.got.setdefault(output["request_id"], []).extend(output["new_token_ids"])

    def finish(self):
        while self.plain.has_unfinished:
            self.step()
        assert self.steady.blocks.num_free == self.steady.blocks.num_blocks
        left = [name for name in self.prompts if name not in self.gone]
        prompts, params = ([self.prompts[name][part] for name in left] for part in (0, 1))
        right = new_core(EngineCore, self.eos, num_blocks=400).generate(prompts, params)
        assert [self.got[name] for name in left] == [output.output_token_ids for output in right]
        for output, before in self.kept:
            assert said(output) == before, "an output has changed"


PARAMS = st.builds(
    SamplingParams, max_tokens=st.integers(1, 24) | st.just(24), seed=st.integers(0, 99),
    temperature=st.sampled_from([0.0, 0.0, 0.8]), stop_token_ids=st.sampled_from([(), (), STOPS]),
    ignore_eos=st.booleans(), logprobs=st.sampled_from([None] * 7 + [0]), min_tokens=st.sampled_from([0, 0, 1]),
)  # fmt: skip
ADD = st.tuples(
    st.just("add"), st.tuples(st.integers(0, 1), st.integers(1, 15), st.none() | st.integers(0, VOCAB - 1)), PARAMS,
    st.integers(0, 2),
)  # fmt: skip
STEP, ABORT = st.tuples(st.just("step"), st.integers(1, 9)), st.tuples(st.just("abort"), st.integers(0, 9))
SETTINGS = st.fixed_dictionaries({
    "block_size": st.sampled_from([1, 3, 4, 8]), "num_blocks": st.sampled_from([40, 42, 60, 200]),
    "max_num_seqs": st.sampled_from([2, 4, 8]), "enable_prefix_caching": st.booleans(),
    "max_model_len": st.just(40), "policy": st.sampled_from(["fcfs", "priority"]),
    "max_num_batched_tokens": st.sampled_from([4, 64, 64]), "long_prefill_token_threshold": st.sampled_from([0, 0, 3]),
})  # fmt: skip
EOS = st.sampled_from([None, 7, (3, 50, 111, 180)])
taken = []


@settings(max_examples=30, deadline=None)
@given(SETTINGS, EOS, st.lists(ADD | STEP | STEP | ABORT, min_size=12, max_size=25))
def any_interleaving(asked, eos, actions):
    pair = Pair(eos, **asked)
    for kind, *rest in actions:
        if kind == "add":
            (family, length, tail), params, priority = rest
            pair.add(tokens(rng(f"steady {family}"), length, VOCAB) + [tail] * (tail is not None), params, priority)
        else:
            getattr(pair, kind)(*rest)
    pair.finish()
    taken.append(pair.steady.fast)


@pytest.mark.timeout(240)
def test_whatever_happens_in_between():
    taken.clear()
    any_interleaving()
    assert sum(taken) > 2 * len(taken), "hardly a step was taken in a streak"


def test_arrivals_and_aborts_in_mid_streak():
    pair = Pair(num_blocks=200, max_num_seqs=4, eos=5)
    for i in range(5):
        pair.add(tokens(rng(f"arrival {i}"), 1 + 3 * i, VOCAB), SamplingParams(24, ignore_eos=i % 2 == 0))
        fast = pair.steady.fast
        pair.step(4)
        assert pair.steady.fast > fast
    pair.abort(2)
    pair.step(4)
    pair.abort(0)
    pair.finish()


def test_an_end_of_sequence_in_mid_streak():
    prompts = [tokens(rng(f"end {i}"), 4 + i, VOCAB) for i in range(5)]
    texts = [o.output_token_ids for o in new_core(EngineCore).generate(prompts, SamplingParams(24))]
    for eos in (texts[1][9], (texts[2][11], texts[4][13])):
        pair = Pair(num_blocks=200, eos=eos)
        for i, prompt in enumerate(prompts):
            pair.add(prompt, SamplingParams(24, ignore_eos=i == 3, min_tokens=6))
        pair.finish()
        assert pair.steady.fast > 5


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_blocks_that_begin_in_different_steps(block_size, caching):
    pair = Pair(block_size=block_size, num_blocks=400, enable_prefix_caching=caching)
    for i in range(7):
        pair.add(tokens(rng("phases"), 3 + i, VOCAB), SamplingParams(24, ignore_eos=True))
    pair.step(24)
    assert pair.steady.fast == 21, "all but the prompts, the first decodes and the last launch"
    pair.finish()


def test_the_same_text_twice_is_published_once_and_by_the_first():
    pair = Pair(num_blocks=100)
    for _ in range(3):
        pair.add(tokens(rng("twins"), 6, VOCAB), SamplingParams(20))
    pair.step(15)
    assert pair.steady.fast > 10 and len(pair.steady.blocks.cached) == 5
    pair.finish()


def test_a_streak_that_somebody_went_past_is_none():
    pair = Pair(num_blocks=100)
    for i in range(3):
        pair.add(tokens(rng(f"past {i}"), 5 + i, VOCAB), SamplingParams(24))
    pair.step(8)
    pair.both(OverlappedCore.step)
    pair.step(8)
    assert pair.steady.fast > 12
    for output, _ in pair.kept:
        pair.got[output.request_id] = output.output_token_ids
    pair.finish()


def test_a_prompt_of_one_token():
    """Its first step is a decode like any other, and yet the call after it notes when the first token came."""
    pair = Pair()
    pair.add([5], SamplingParams(12))
    pair.step(3)
    pair.finish()
    assert pair.steady.fast > 5


def test_a_stop_in_mid_streak_ends_it_and_another_begins():
    pair, random, alone = Pair(num_blocks=200, max_num_seqs=8), rng("mid-streak"), new_core(EngineCore, num_blocks=200)
    prompts = [tokens(random, 5 + i, VOCAB) for i in range(6)]
    outputs = alone.generate(prompts, SamplingParams(24))
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        stops = (output.output_token_ids[8 + 3 * (i // 2)],) if i % 2 else ()  # also asked for where it means nothing
        pair.add(prompt, SamplingParams(24, stop_token_ids=stops, min_tokens=3))
    pair.finish()
    assert pair.steady.fast >= 5


def test_a_stop_token_of_another_request_stops_nobody():
    pair, prompt = Pair(), tokens(rng("others"), 5, VOCAB)
    (output,) = new_core(EngineCore).generate([prompt], SamplingParams(16))
    pair.add(prompt, SamplingParams(16))
    pair.add(prompt[:3], SamplingParams(16, stop_token_ids=output.output_token_ids, min_tokens=16))
    pair.step(16)
    assert pair.steady.fast > 10
    pair.finish()


def test_a_full_pool_and_a_queue_without_slots():
    """Too few blocks for everybody's next token: no streak. A queue that nobody can leave: a streak."""
    pair = Pair(num_blocks=13, max_num_seqs=3)
    for i in range(6):
        pair.add(tokens(rng(f"full {i}"), 6, VOCAB), SamplingParams(9))
    pair.step(6)
    assert pair.steady.fast > 0 and pair.steady.scheduler.num_waiting == 3
    pair.finish()
    pair = Pair(num_blocks=9, max_num_seqs=4)
    for i in range(3):
        pair.add(tokens(rng(f"small {i}"), 5, VOCAB), SamplingParams(20))
    pair.finish()
    assert pair.plain.num_preemptions > 0


def test_max_model_len_is_an_end_that_is_known():
    pair = Pair(max_model_len=20)
    for i in range(3):
        pair.add(tokens(rng(f"length {i}"), 8 - i, VOCAB), SamplingParams(12, ignore_eos=True))
    pair.step(4)
    pair.steady.max_model_len = pair.plain.max_model_len = 15  # a limit that comes before max_tokens
    pair.steady.streak = None
    pair.step(9)
    assert pair.steady.fast > 3 and not pair.steady.has_unfinished


def test_drafts_and_a_runner_without_packed_numbers_have_no_streaks():
    core = new_core(Counting)
    core.add_request("r", [1, 2, 3], SamplingParams(30))
    for _ in range(6):
        core.step()
    assert core._find_streak() is not None
    core.scheduler.requests["r"].spec_token_ids = [5]
    assert core._find_streak() is None
    core.scheduler.requests["r"].spec_token_ids = []
    core.runner._launching = True
    assert core._find_streak() is None
    core.runner._launching, core.scheduler.half_done = False, True  # a call was broken off, and its repair too
    assert core._find_streak() is None
    core.step()
    assert core._find_streak() is None and core.scheduler.requests["r"].num_preemptions == 1
    for asked in ({"cuda_graphs": "off"}, {}):
        core = new_core(Counting, **asked)
        core.generate([[1, 2, 3]], SamplingParams(20, logprobs=None if asked else 0))
        assert core.fast == 0


def test_a_runner_that_only_launches_will_do():
    core = new_core(Counting, max_num_batched_tokens=8)
    graphs.start_decoding(core, 2, 30, 6)  # with a runner of its own, for the prompts
    assert core.fast == 0 and core.scheduler.num_running == 2


# -- what a fast step costs, counted


def streaking(count, caching=False, spread=1):
    bench = overhead.Ahead(Counting, count, 100, caching)
    core = bench.core
    if spread == 1:
        core = new_core(Counting, num_blocks=count * 20, max_num_seqs=count, block_size=16, max_num_batched_tokens=9999)
        for i in range(count):
            core.add_request(str(i), [1 + i % 50] * 4, SamplingParams(100, ignore_eos=True))
    before = core.fast
    while core.fast < before + 2:
        core.step()
    return core


def calls_of(call) -> dict:
    """Python functions of the core that run in a call -> how often."""
    seen, before = {}, sys.getprofile()

    def event(frame, kind, _):
        if kind == "call" and frame.f_code.co_filename.startswith(CODE):
            seen[frame.f_code.co_name] = seen.get(frame.f_code.co_name, 0) + 1

    sys.setprofile(event)
    try:
        call()
    finally:
        sys.setprofile(before)
    return {name: count for name, count in seen.items() if not name.startswith("<")}


def test_a_fast_step_calls_nothing_for_each_request():
    few, many = (calls_of(streaking(count).step) for count in (4, 40))
    assert few == many and max(many.values()) <= 6, (few, many)
    assert {"schedule", "check_stop", "allocate_slots", "add_block", "fill", "output", "_end_some"}.isdisjoint(many)


@pytest.mark.parametrize("caching", [True, False])
def test_only_those_who_begin_a_block_get_one(caching):
    """Contexts of all phases: in each step one request in 16 asks for a block, and one publishes."""
    core = streaking(32, caching, spread=16)
    for _ in range(20):
        before, fast = core.blocks.num_free, core.fast
        seen = calls_of(core.step)
        assert core.fast == fast + 1 and seen["add_block"] == 2 == before - core.blocks.num_free
        assert {"check_stop", "schedule", "allocate_slots"}.isdisjoint(seen)
        assert seen.get("hash_block", 0) == (2 if caching else 0)


def test_a_stop_token_is_the_only_one_that_is_judged():
    core = streaking(8)
    coming = core.flights[0].drawn()
    core.streak.stops.add(coming[3])  # as if somebody had named it
    assert calls_of(core.step)["check_stop"] == coming.count(coming[3])


# -- broken off at any line


def served(core, got):
    while core.has_unfinished:
        deliver(core.step(), got)
        check_blocks(core.blocks)
    assert core.blocks.num_free == core.blocks.num_blocks
    return got


def deliver(outputs, got):
    for output in outputs or ():
        got.setdefault(output.request_id, []).extend(output.new_token_ids)
        assert output.output_token_ids == got[output.request_id]


class NotInTheModel(Interrupt):
    """Counts no lines of the forward pass, which are many and none of a streak's business."""

    def _enter(self, frame, event, argument):
        path = frame.f_code.co_filename
        return None if path.endswith(("flat.py", "sdpa.py", "attention.py", "paged.py", "device_sampler.py")) else (
            super()._enter(frame, event, argument)
        )  # fmt: skip


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind, stride", [(Counting, 1), (OverlappedCore, 11)])
def test_an_interrupt_at_each_line_of_a_step(kind, stride):
    """No token is lost and none comes twice; the step commits a stop or a full block, or begins a block."""
    random = rng("lines")
    prompts = [tokens(random, 4 + i, VOCAB) for i in range(4)]
    right = new_core(EngineCore).generate(prompts, SamplingParams(11))
    stop = (right[2].output_token_ids[7],)
    params = [SamplingParams(11, stop_token_ids=stop if i == 2 else (), min_tokens=6) for i in range(4)]
    right = {str(i): o.output_token_ids for i, o in enumerate(new_core(EngineCore).generate(prompts, params))}
    for at in range(1, 3000, stride):
        core, got = new_core(kind, enable_prefix_caching=at % 5 > 0), {}
        for i, prompt in enumerate(prompts):
            core.add_request(str(i), prompt, params[i])
        while len(got.get("2", ())) < 5 + at % 3:
            deliver(core.step(), got)
        known, interrupt = sizes(core), NotInTheModel(1 + at // 2)
        assert kind is OverlappedCore or core._find_streak() is not None
        deliver(interrupt(core.step), got)
        if interrupt.place is None:
            break
        core.abort_request("nobody")  # if the repair was interrupted too
        assert interrupt.raised and sizes(core) == known, interrupt.place
        check_blocks(core.blocks)
        assert served(core, got) == right, interrupt.place
    assert 150 < at < 2900, f"a step has {at // 2} lines?"


def sizes(core):
    return {name: r.num_tokens - r.num_placeholders for name, r in core.scheduler.requests.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_faults_in_every_second_step(name):
    """Launches, tokens and allocations that fail, Ctrl-C at any line: the text of the plain core."""
    random, faults, hits = rng(f"faults {name}"), Faults(), set()
    got, core = {}, new_core(Counting, **{"num_blocks": 96, "block_size": 8, **CONFIGS[name]})
    core.runner.backend.forward = faults.before("forward", core.runner.backend.forward)
    core.runner._send = faults.before("send", core.runner._send)
    core.blocks.take_free_block = faults.before("allocate", core.blocks.take_free_block)
    prompts = [tokens(random, 3 + 2 * i, VOCAB) for i in range(5)]
    plain = new_core(EngineCore, num_blocks=200).generate(prompts, SamplingParams(20))
    for i, prompt in enumerate(prompts):
        core.add_request(str(i), prompt, SamplingParams(20))
    while core.has_unfinished:
        where = random.choice([None] * 5 + ["forward", "send", "allocate", "line"])
        interrupt = Interrupt(random.randrange(1, 200) if where == "line" else 0)
        faults.arm(where, 1, random.choice(["MemoryError", "KeyboardInterrupt"]))
        try:
            deliver(interrupt(core.step), got)
        except (MemoryError, KeyboardInterrupt) as error:
            assert "injected" in str(error)
            hits.add(where)
        if interrupt.place is not None:
            core.abort_request("nobody")
        faults.disarm()
        check_blocks(core.blocks)
    assert {"forward", "send"} <= hits
    assert [got[str(i)] for i in range(5)] == [output.output_token_ids for output in plain]
    assert core.blocks.num_free == core.blocks.num_blocks


# -- OverlappedCore's own tests


class SteadyHarness(LateHarness):
    kind = SteadyCore


class SteadyMachine(Ahead):
    harness_of = SteadyHarness


SteadyMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestRandomTrafficInStreaks = SteadyMachine.TestCase


@pytest.fixture(autouse=True)
def steady_cores_only(monkeypatch):
    for module in (ahead, failing):
        monkeypatch.setattr(module, "LateHarness", SteadyHarness)
    monkeypatch.setattr(matrix, "AHEAD_CORE", SteadyCore)


def ungraded(test):
    @wraps(test)
    def same(*args, **kwargs):
        return test(*args, **kwargs)

    same.pytestmark = [mark for mark in getattr(test, "pytestmark", []) if mark.name != "grades"]
    return same


for _module in (ahead, failing):
    for _name, _test in vars(_module).items():
        if isinstance(_test, FunctionType) and _name.startswith("test_"):
            globals()[f"{_name}_steadily"] = ungraded(_test)


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_in_every_configuration(name):
    for test in (matrix.test_greedy_tokens_in_every_configuration, matrix.test_sampled_tokens_in_every_configuration):
        test(name, "static and ahead")


@pytest.mark.parametrize("name", ["ample", "12 blocks, recompute", "priorities"])
def test_arrivals_and_aborts(name):
    matrix.test_arrivals_and_aborts_in_between(name, "static and ahead")


@pytest.mark.parametrize("test", [
    matrix.test_rows_that_only_the_host_can_sample, matrix.test_a_sampler_that_raises_now_and_then,
    matrix.test_log_probabilities, matrix.test_samples_of_one_prompt_are_those_of_the_plain_core,
    matrix.test_a_large_batch_and_then_a_small_padded_one,
])  # fmt: skip
def test_whatever_else_a_core_can(test):
    test("static and ahead")


def test_the_late_device_has_streaks_too():
    harness = SteadyHarness()
    for i in range(3):
        harness.add(str(i), tokens(rng(f"late {i}"), 5 + i), 20)
    harness.drain()
    assert harness.runner.repeats > 10


def test_the_core_that_a_configuration_asks_for():
    config = EngineConfig(num_blocks=8, async_scheduling=True)
    assert type(EngineCore(model(), config)) is SteadyCore
    assert type(OverlappedCore(model(), config)) is OverlappedCore
    assert type(EngineCore(model(), EngineConfig(num_blocks=8))) is EngineCore
