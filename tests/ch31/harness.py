"""Drives a core without a model, and checks after every step all that is promised between two steps."""

from dataclasses import dataclass, field

from engine.serve.blocks import BrokenInvariant
from engine.serve.request import SamplingParams, Status
from tests.ch31.fake_pool import LOOP, SCHEDULER, SWAP, continuation, fake_core
from tests.grading import expect, expect_equal, expect_raises, wrong


@dataclass
class Asked:
    """One request as its caller sees it."""

    prompt: list[int]
    params: SamplingParams
    expected: list[int]  # all that it would get without an abort
    got: list[int] = field(default_factory=list)
    reason: str | None = None


def stops_of(eos_token_id, params) -> set[int]:
    eos = () if eos_token_id is None else (eos_token_id,) if isinstance(eos_token_id, int) else eos_token_id
    return {*params.stop_token_ids, *(() if params.ignore_eos else eos)}


def cropped(tokens, params, eos_token_id=None) -> list[int]:
    """An endless greedy continuation, cut where the request has to end."""
    stops = stops_of(eos_token_id, params)
    for i, token in enumerate(tokens[: params.max_tokens], start=1):
        if i >= params.min_tokens and token in stops:
            return tokens[:i]
    return tokens[: params.max_tokens]


class Harness:
    """`add`, `step`, `abort`, `drain`; asked: what each request wants and has got, by id."""

    def __init__(self, **settings):
        self.core = fake_core(**settings)
        self.scheduler, self.blocks, self.runner = self.core.scheduler, self.core.blocks, self.core.runner
        self.asked: dict[str, Asked] = {}
        self.num_host_blocks = len(self.scheduler.free_host_blocks)
        self.broken = False  # a check failed: what follows would tell nothing

    # -- actions

    def add(self, name, prompt, max_tokens=4, *, priority=0, cache_key=(), arrival_time=None, **params):
        params = SamplingParams(max_tokens=max_tokens, **params)
        self.core.add_request(name, prompt, params, priority, cache_key, arrival_time)
        endless = continuation(prompt, max_tokens, cache_key)
        self.asked[name] = Asked(list(prompt), params, cropped(endless, params, self.core.eos_token_id))
        return self.scheduler.requests[name]

    def abort(self, name) -> None:
        for output in self.core.abort_request(name):
            self.asked[output.request_id].reason = output.finish_reason
        self.check()

    def step(self) -> list[tuple[str, int]]:
        """One step; returns its plan as (request id, n)."""
        unfinished, plans = self.core.has_unfinished, len(self.runner.plans)
        self.broken, self.runner.calls = True, 0
        try:
            outputs = self.core.step()
        except Exception:
            if self.runner.fault is not None:
                raise self.runner.fault from None
            raise
        for output in outputs or ():
            self._deliver(output)
        self.check()
        plan = self.runner.plans[plans] if len(self.runner.plans) > plans else []
        text = "requests are unfinished, but a step planned nothing: they would wait for ever"
        expect(plan or not unfinished, text, "alone, every request fits the pool", SCHEDULER)
        self.broken = False
        return plan

    def failing_step(self, where, error=MemoryError) -> None:
        """A step that raises in "swap", "forward" or "sampler"; nothing to run: it does not."""
        if not self.core.has_unfinished:
            return
        before, self.broken = self.progress(), True
        self.runner.fail_at, self.runner.error, self.runner.calls = where, error, 0
        try:
            expect_raises(error, self.core.step, see=LOOP, call=f"step() whose {where} raises {error.__name__}")
        finally:
            if self.runner.fault is not None:
                raise self.runner.fault
        self.runner.fail_at, self.runner.error = None, MemoryError
        expect_equal(self.progress(), before, "progress {i} after a failed step", "it has not happened", LOOP)
        self.check()
        self.broken = False

    def drain(self, each_step=None) -> None:
        """Steps until nothing is left, then checks what everybody got."""
        live = [a for a in self.asked.values() if a.reason is None]
        limit = 20 + sum(len(a.prompt) + a.params.max_tokens for a in live) * (1 + len(live))
        for _ in range(limit):
            if not self.core.has_unfinished:
                break
            self.step()
            if each_step:
                each_step()
        expect(not self.core.has_unfinished, f"requests are still unfinished after {limit} steps", see=SCHEDULER)
        self.check_idle()

    # -- checks

    def progress(self) -> list[tuple]:
        """What a caller could see of every unfinished request, and the counters."""
        core = self.core
        counters = (core.num_steps, core.num_scheduled_tokens, core.num_preemptions)
        return [counters, *((name, len(r.token_ids)) for name, r in sorted(self.scheduler.requests.items()))]

    def _deliver(self, output) -> None:
        name, asked = output.request_id, self.asked[output.request_id]
        expect(asked.reason is None, f"{name!r} got tokens after its end", see=LOOP)
        asked.got += output.new_token_ids
        about = {"hint": "every token is delivered once, in the step that sampled it", "see": LOOP}
        expect_equal(output.output_token_ids, asked.got, f"output of {name!r} so far, token {{i}}", **about)
        expect_equal(asked.got, asked.expected[: len(asked.got)], f"output of {name!r}, token {{i}}", see=LOOP)
        if output.finished:
            asked.reason = output.finish_reason

    def check(self) -> None:
        """What holds between any two steps."""
        scheduler, blocks = self.scheduler, self.blocks
        check_blocks(blocks)
        running, waiting = set(scheduler.running), set(scheduler.waiting)
        expect(len(running) == len(scheduler.running), "a request is among the running ones twice", see=SCHEDULER)
        for request in running & waiting:
            raise wrong(f"{request.request_id!r} is running and waiting at once", see=SCHEDULER)
        for request in scheduler.requests.values():
            known, computed = request.num_tokens, request.num_computed_tokens
            name = f"{request.request_id!r} ({computed} of {known} tokens computed)"
            expect(request in running | waiting, f"{name} is neither running nor waiting", see=SCHEDULER)
            idle = Status.PREEMPTED if request.num_preemptions else Status.WAITING
            status = Status.RUNNING if request in running else idle
            expect_equal(request.status.name, status.name, f"status of {name}", see=SCHEDULER)
            expect(0 <= computed < known, f"{name}: between steps at least its newest token is not", see=LOOP)
            if request in waiting:
                expect(request not in blocks.block_tables, f"{name} waits, but owns blocks", "`blocks.free`", SWAP)
                kept = len(request.swapped_out or ())
                text = f"{name} waits with {kept} blocks on the host, room for {kept * blocks.block_size} tokens"
                expect(kept == blocks.blocks_for(computed), text, "nothing kept, nothing computed", SWAP)
            else:
                fits = len(blocks.block_tables.get(request, ())) >= blocks.blocks_for(computed)
                expect(fits, f"{name} runs on too few blocks", see=SCHEDULER)
                expect(request.swapped_out is None, f"{name} runs and still holds host blocks", "`drop_swap`", LOOP)
        stray = [r.request_id for r in blocks.block_tables if r not in running]
        expect(not stray, f"{stray} own blocks without running", "whoever leaves gives everything back", LOOP)
        self.check_host()

    def check_host(self) -> None:
        held = [b for r in self.scheduler.requests.values() for b in r.swapped_out or ()]
        found = sorted(self.scheduler.free_host_blocks + held)
        expect_equal(found, list(range(self.num_host_blocks)), "host block, free or held, number {i}", see=SWAP)

    def check_idle(self) -> None:
        blocks, names = self.blocks, list(self.asked)
        expect_equal(blocks.num_free, blocks.num_blocks, "free blocks of an idle engine", "who kept theirs?", LOOP)
        expect_equal(len(self.scheduler.free_host_blocks), self.num_host_blocks, "free host blocks of an idle engine")
        for name in names:
            asked = self.asked[name]
            if asked.reason == "abort":
                continue
            expect_equal(asked.got, asked.expected, f"output of {name!r}, token {{i}}", see=LOOP)
            stopped = asked.expected[-1] in stops_of(self.core.eos_token_id, asked.params)
            stopped = stopped and len(asked.expected) >= asked.params.min_tokens
            expect_equal(asked.reason, "stop" if stopped else "length", f"finish_reason of {name!r}", see=LOOP)


def check_blocks(blocks) -> None:
    try:
        blocks.check()
    except BrokenInvariant as broken:
        raise wrong(f"after this step: {broken}", "`BlockManager.check()` found it", SCHEDULER) from None


def tokens(random, length, vocab=61) -> list[int]:
    return [random.randrange(vocab) for _ in range(length)]
