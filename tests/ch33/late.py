"""A fake device that delivers late: steps are launched in order and run only when somebody asks for their tokens.

Over the tagged pool of chapter 31: a launch notes where its tokens will go, and writes the tags when it runs. So who is
given a block too early meets the tags of another, and a placeholder has the value that the launch before computes.
"""

from engine.serve.overlap import OverlappedCore
from engine.serve.scheduler import SchedulerOutput
from tests.ch31.fake_pool import FakeRunner, Tag, _name, fake_core, next_token, prefix_names
from tests.ch31.harness import Harness, check_blocks
from tests.grading import expect, expect_equal, wrong

AHEAD = "33: One step ahead"


class LateFlight:
    """What `launch` gives back: its tokens, which may be asked for once, in the order of launching."""

    def __init__(self, runner, scheduled, work):
        self.runner, self.scheduled, self.work = runner, scheduled, work
        self.held, self.sampled = [], None
        decode = all(n == 1 for _, n in scheduled) and all(samples for *_, samples in work)
        self.size = len(scheduled) if decode else 0
        self.void = False  # the launch raised after the device had got the work: it writes K/V, its tokens are nobody's

    def drawn(self):
        return [token for [token] in self.tokens()]

    def tokens(self):
        runner = self.runner
        runner._fail("tokens")
        older = [f for f in runner.core.flights if f.sampled is None and f in runner.queue]
        if any(runner.queue.index(f) < runner.queue.index(self) for f in older if self in runner.queue):
            raise runner._wrong("a flight was read before an older one", "the oldest comes first", AHEAD)
        if self.sampled is not None and self not in runner.queue and self in runner.delivered:
            raise runner._wrong("the tokens of a flight were read twice", see=AHEAD)
        runner.run_until(self)
        runner.delivered.append(self)
        return [list(tokens) for tokens in self.sampled]


class LateRunner(FakeRunner):
    """FakeRunner with `launch`. queue: launched and not run.  latest: token by request, of the newest step that ran.

    repeats: how often `launch_again` was asked for, by a core that does.
    """

    def __init__(self, core):
        super().__init__(core)
        self.queue, self.delivered, self.latest = [], [], {}
        self.newest, self.repeats = None, 0

    def swap(self, out):
        if self.fail_at != "swap" and (out.swap_in or out.swap_out):
            self.run_until(None)  # copies are enqueued behind what was launched
        super().swap(out)

    def launch(self, out, block_tables):
        core = self.core
        if (out.swap_in or out.swap_out) and self.swapped is not out:
            raise self._wrong("step launched before the swap copies of its plan were made", see=AHEAD)
        if len(core.flights) > 1:
            raise self._wrong(f"a step is launched while {len(core.flights)} are in the air", see=AHEAD)
        if out.preempted and core.flights:
            fact = f"{_name(out.preempted[0])} was preempted while a flight was in the air"
            raise self._wrong(fact, "its blocks go to others at once: collect first (`may_preempt`)", AHEAD)
        self.check_plan(out, block_tables)
        self._fail("forward")
        work = []
        for request, n in out.scheduled:
            start, end = request.num_computed_tokens, request.num_computed_tokens + n
            known = request.num_tokens - request.num_placeholders
            flights = [f for f in core.flights if any(r is request for r, _ in f.scheduled)]
            if request.num_placeholders > len(flights):
                raise self._wrong(f"{_name(request)} has a placeholder that no flight will fill", see=AHEAD)
            if any(token < 0 for token in request.token_ids[:known]):
                raise self._wrong(f"a known token of {_name(request)} is still a placeholder", see=AHEAD)
            table = block_tables[request]
            slots = [table[p // self.size] * self.size + p % self.size for p in range(end)]
            samples = end == request.num_tokens
            work.append((request, request.token_ids[:end], known, start, slots, samples))
        self.plans.append([(request.request_id, n) for request, n in out.scheduled])
        flight = LateFlight(self, out.scheduled, work)
        self.queue.append(flight)
        flight.void = True
        self._fail("sampler")
        flight.void = False
        self.newest, self.lengths = flight, [len(block_tables[request]) for request, _ in out.scheduled]
        return flight

    def can_repeat(self, flight) -> bool:
        return flight is self.newest

    def launch_again(self, flight, grown, block_tables):
        self.repeats += 1
        requests = [request for request, _ in flight.scheduled]
        more = {r: len(block_tables[r]) - before for r, before in zip(requests, self.lengths, strict=True)}
        right = grown == [r for r in requests if more[r]] and max(more.values()) <= 1
        if not flight.size or not self.can_repeat(flight) or not right:
            raise self._wrong("a step was launched again that is not the newest, or other tables have grown", see=AHEAD)
        return self.launch(SchedulerOutput(flight.scheduled), block_tables)

    def execute(self, out, block_tables):
        raise self._wrong("an overlapped step ran `execute`, which waits", "launch, and collect the one before", AHEAD)

    def run_until(self, flight) -> None:
        """Run what was launched, in order, up to this flight; None: all of it."""
        while self.queue and (flight is None or flight.sampled is None):
            self._run(self.queue.pop(0))

    def _run(self, flight) -> None:
        flight.sampled, reads, latest = [], [], {}
        for request, tokens, known, start, slots, samples in flight.work:
            tokens = list(tokens)
            for p in range(known, len(tokens)):
                tokens[p] = self.latest.get(request, -1)
            names = prefix_names(tokens, request.cache_key)
            for p in range(start, len(tokens)):
                self.slots[slots[p]] = Tag(names[p], p, request.request_id)
            reads.append((request, slots, names))
            if samples:
                latest[request] = next_token(tokens, request.cache_key)
            flight.sampled.append([latest[request]] if samples else [])
        if not flight.void:
            self.latest = latest
        for request, slots, names in reads:
            self._check_reads(request, slots, names)


def late_core(kind, **settings):
    core = fake_core(kind=kind, async_scheduling=True, **settings)
    core.runner = LateRunner(core)
    return core


class LateHarness(Harness):
    """Harness over a core that is one step ahead, and what holds between two of its steps."""

    kind = OverlappedCore

    def __init__(self, **settings):
        self.core = late_core(self.kind, **settings)
        self.scheduler, self.blocks, self.runner = self.core.scheduler, self.core.blocks, self.core.runner
        self.asked, self.broken = {}, False
        self.num_host_blocks = len(self.scheduler.free_host_blocks)

    def step(self):
        core, runner = self.core, self.runner
        unfinished, flying, plans = core.has_unfinished, list(core.flights), len(runner.plans)
        self.broken, runner.calls = True, 0
        try:
            outputs = core.step()
        except Exception:
            if runner.fault is not None:
                raise runner.fault from None
            raise
        self._outputs(outputs, flying)
        self.check()
        plan = runner.plans[plans] if len(runner.plans) > plans else []
        progress = plan or len(core.flights) < len(flying) or not unfinished
        expect(progress, "requests are unfinished, but a step neither launched nor collected", see=AHEAD)
        self.broken = False
        return plan

    def _outputs(self, outputs, flying) -> None:
        expect(isinstance(outputs, list), f"step returned {outputs!r}, not a list of outputs", see=AHEAD)
        order = {r.request_id: i for f in flying[:1] for i, (r, _) in enumerate(f.scheduled)}
        names = [o.request_id for o in outputs]
        first = [name for name in names if name in order][: len(order)]
        if len(set(names)) == len(names) and set(names) <= set(order):
            expect_equal(first, sorted(first, key=order.get), "output number {i}", "in the order of the flight", AHEAD)
        for output in outputs:
            expect(output.new_token_ids, f"{output.request_id!r} has an output without a token", see=AHEAD)
            self._deliver(output)

    def progress(self):
        core = self.core
        counters = (core.num_steps, core.num_scheduled_tokens, core.num_preemptions)
        live = sorted(self.scheduler.requests.items())
        return [counters, *((name, r.num_tokens - r.num_placeholders) for name, r in live)]

    def failing_step(self, where, error=MemoryError) -> bool:
        """A step that raises in "swap", "forward", "sampler" (both while launching) or "tokens", if it gets there."""
        if not self.core.has_unfinished:
            return False
        before, flights, flying = self.progress(), list(self.core.flights), list(self.core.flights)
        runner, self.broken = self.runner, True
        runner.fail_at, runner.error, runner.calls = where, error, 0
        try:
            outputs = self.core.step()
        except error:
            pass
        except Exception:
            raise runner.fault or wrong(f"step let another exception out than the {where}'s", see=AHEAD) from None
        else:
            if runner.fault is not None:
                raise runner.fault
            expect(runner.fail_at, f"step() whose {where} raises {error.__name__} returned", "raise it again", AHEAD)
            runner.fail_at = None  # it did not get there
            self._outputs(outputs, flying)
            self.check()
            self.broken = False
            return False
        runner.error = MemoryError
        if runner.fault is not None:
            raise runner.fault
        hint = "it has not happened"
        expect_equal(self.progress(), before, f"progress {{i}} after a step whose {where} failed", hint, AHEAD)
        if where != "tokens" and not self.scheduler.half_done:
            same = [a is b for a, b in zip(self.core.flights, flights, strict=False)]
            text = f"after a failed {where} other flights are in the air than before"
            expect(len(self.core.flights) == len(flights) and all(same), text, "what is in the air stays there", AHEAD)
        self.check()
        self.broken = False
        return True

    # -- what holds between two steps

    def check(self) -> None:
        core, scheduler, blocks = self.core, self.scheduler, self.blocks
        check_blocks(blocks)
        flights = list(core.flights)
        expect(len(flights) <= 1, f"{len(flights)} flights are in the air between two steps", see=AHEAD)
        flying = [request for f in flights for request, _ in f.scheduled]
        running, waiting, retired = set(scheduler.running), set(scheduler.waiting), scheduler.retired
        for request in scheduler.requests.values():
            name = f"{request.request_id!r}"
            places = (request in running) + (request in waiting) + (request in retired)
            text = f"{name} is in {places} of: running, waiting, retired"
            expect(places == 1, text, see=AHEAD)
            known, computed = request.num_tokens - request.num_placeholders, request.num_computed_tokens
            total = request.num_tokens
            expect(0 <= computed < total, f"{name}: {computed} of {total} tokens computed", see=AHEAD)
            expect(all(token >= 0 for token in request.token_ids[:known]), f"{name}: a known token is -1", see=AHEAD)
            open_ones = request.token_ids[known:]
            expect(all(token < 0 for token in open_ones), f"{name}: a placeholder has a value", see=AHEAD)
            coming = sum(samples for f in flights for r, *_, samples in f.work if r is request)
            expect_equal(request.num_placeholders, coming, f"placeholders of {name}, tokens to come for it", see=AHEAD)
            if request in waiting:
                expect(request not in blocks.block_tables, f"{name} waits, but owns blocks", see=AHEAD)
                expect(request not in flying, f"{name} waits while a flight computes it", see=AHEAD)
            elif blocks.enable_prefix_caching:
                full = min(known, computed) // blocks.block_size
                hint = "a block is published once its last token is known and computed, not earlier and not later"
                expect_equal(blocks.num_published[request], full, f"published blocks of {name}", hint, AHEAD)
        held = [request for f in flights for request in f.held]
        for f in flights:
            for request, *_, slots, _ in f.work:
                written = {slot // blocks.block_size for slot in slots}
                owned = set(blocks.block_tables.get(request, ()))
                text = f"{request.request_id!r} has given back a block that a flight may still write"
                expect(written <= owned, text, "blocks stay with a request until its last flight is collected", AHEAD)
        for request in blocks.block_tables:
            alive = request in running or request in retired or request in held
            expect(alive, f"{request.request_id!r} owns blocks, is not running and no flight holds it", see=AHEAD)
        self.check_host()

    def check_idle(self) -> None:
        expect(not self.core.flights, "nobody is unfinished, but a flight is still in the air", see=AHEAD)
        expect_equal(self.scheduler.retired, set(), "retired requests of an idle engine", see=AHEAD)
        super().check_idle()


