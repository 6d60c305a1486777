"""One engine under random traffic and faults, as a list of actions: drawn, carried out, replayed, shrunk.

An action is a tuple of plain values, so that a list of them can be printed and pasted:

    ("add", {name, prompt: (family, length, tail), max_tokens, stops, priority, arrival_time, cache_key, n})
    ("abort", name, line)         line: Ctrl-C at that line of the core; 0: none
    ("step", line)                likewise
    ("fault", where, k, error)    steps, up to the one that passes swap, forward, sampler or allocate for the k-th time
                                  and raises there
    ("draft", name, right, wrong) guesses for its next step: so many right ones, then wrong ones
    ("reset",)                    reset_prefix_cache
"""

import random
from collections import Counter
from dataclasses import dataclass, field

from engine.milestones.faults import Faults, Interrupt
from engine.milestones.tagged import VOCAB, alone, tagged_core
from engine.serve.queue import QueueFullError
from engine.serve.request import SamplingParams, Status

ERRORS = ("MemoryError", "RuntimeError", "KeyboardInterrupt")
PATIENCE = 20  # steps that a fault waits for its place
POINTS = ("swap", "forward", "sampler", "allocate")


class Broken(AssertionError):
    """Something that must hold between two calls does not."""


def require(condition, message: str) -> None:
    if not condition:
        raise Broken(message)


@dataclass
class Asked:
    """One request as its caller sees it."""

    expected: list[int]
    got: list[int] = field(default_factory=list)
    reason: str | None = None


def draw_config(rng: random.Random) -> dict:
    """Settings of `tagged_core`: mostly tight ones.  longest: tokens that the longest request may have."""
    size, longest = rng.choice([1, 3, 4, 16]), rng.randint(16, 50)
    num_blocks = -(-longest // size) + rng.choice([0, 1, 1, 2, 4, 30])
    chunked = rng.random() < 0.7
    config = {
        "longest": longest,
        "block_size": size,
        "num_blocks": num_blocks,
        "max_num_batched_tokens": rng.randint(1, 40) if chunked else rng.randint(longest, 90),
        "max_num_seqs": rng.choice([1, 2, 4, 8, 8]),
        "max_waiting": rng.choice([1, 3, 8, None]),
        "enable_prefix_caching": rng.random() < 0.7,
        "enable_chunked_prefill": chunked,
        "long_prefill_token_threshold": rng.choice([0, 0, 1, 5]) if chunked else 0,
        "policy": rng.choice(["fcfs", "priority"]),
    }
    if rng.random() < 0.5:
        config["host_blocks"] = rng.choice([1, 2, 5, num_blocks, 4 * num_blocks])
    return config


class Episode:
    """`do` carries out an action and checks everything; `finish` serves what is left.  counts: what happened."""

    def __init__(self, config: dict):
        settings = dict(config)
        self.longest = settings.pop("longest")
        self.faults = Faults()
        self.core = tagged_core(self.faults, **settings)
        self.scheduler, self.blocks = self.core.scheduler, self.core.blocks
        self.asked: dict[str, Asked] = {}
        self.counts = Counter()
        self.idle = 0

    # -- actions

    def draw(self, rng: random.Random, number: int) -> tuple:
        """A next action; number: part of the name of a request that it adds."""
        live, kind = list(self.scheduler.requests), rng.random()
        line = rng.randrange(1, 500) if rng.random() < 0.1 else 0
        if kind < 0.25 or not live and kind < 0.9:
            max_tokens = min(rng.randint(1, 25), self.longest - 2)
            length = rng.randint(1, self.longest - max_tokens - 1)
            return ("add", {
                "name": f"r{number}", "prompt": (rng.randrange(2), length, rng.choice([None, rng.randrange(VOCAB)])),
                "max_tokens": max_tokens, "stops": rng.choice([(), (), tuple(range(0, VOCAB, 9))]),
                "priority": rng.randrange(3), "arrival_time": rng.choice([0.0, 1.0]),
                "cache_key": rng.choice([(), ("tenant",), (1,)]), "n": rng.choice([1, 1, 1, 3]),
            })  # fmt: skip
        if kind < 0.29:
            return "abort", rng.choice([*live, "nobody"]).split("#")[0], line
        if kind < 0.36:
            return "draft", rng.choice([*live, "nobody"]), rng.randrange(5), rng.randrange(3)
        if kind < 0.45:
            return "fault", rng.choice(POINTS), rng.randint(1, 6), rng.choice(ERRORS)
        return ("reset",) if kind < 0.46 else ("step", line)

    def do(self, action: tuple) -> None:
        kind, *rest = action
        getattr(self, kind)(*rest)
        self.check()

    def add(self, request: dict) -> None:
        family, length, tail = request["prompt"]
        prompt = random.Random(family).choices(range(VOCAB), k=length) + ([] if tail is None else [tail])
        name, n, stops, key = (request[k] for k in ("name", "n", "stops", "cache_key"))
        params = SamplingParams(request["max_tokens"], stop_token_ids=stops, n=n)
        full = not self.core._has_room(n)
        try:
            self.core.add_request(name, prompt, params, request["priority"], key, request["arrival_time"])
        except QueueFullError:
            require(full, f"{name} was refused, though there was room")
            self.counts["refused"] += 1
            return
        require(not full, f"{name} was added to a full queue")
        text = alone(prompt, params.max_tokens, key)
        end = next((i for i, token in enumerate(text, start=1) if token in stops), len(text))
        for each in [name] if n == 1 else [f"{name}#{i}" for i in range(n)]:
            self.asked[each] = Asked(text[:end])
        self.counts["added"] += n

    def abort(self, name: str, line: int) -> None:
        before, interrupt = self.seen(), Interrupt(line)
        outputs = interrupt(lambda: self.core.abort_request(name)) if line else self.core.abort_request(name)
        if interrupt.place is not None:
            return self.did_not_happen(before, interrupt)
        for output in outputs:
            self.deliver(output)
            self.counts["aborted"] += 1
        return None

    def step(self, line: int = 0) -> None:
        before, interrupt = self.seen(), Interrupt(line)
        scheduled, preempted = self.core.num_scheduled_tokens, self.core.num_preemptions
        self.counts["steps"] += 1
        outputs = interrupt(self.core.step) if line else self.core.step()
        if interrupt.place is not None:
            return self.did_not_happen(before, interrupt)
        for output in outputs:
            self.deliver(output)
        self.counts["tokens"] += self.core.num_scheduled_tokens - scheduled
        self.counts["preempted"] += self.core.num_preemptions - preempted
        stuck = self.core.has_unfinished and self.core.num_scheduled_tokens == scheduled
        self.idle = self.idle + 1 if stuck else 0
        require(self.idle < 3, "requests are unfinished, and three steps in a row computed nothing")
        return None

    def fault(self, where: str, countdown: int, error: str) -> None:
        self.faults.arm(where, countdown, error)
        for _ in range(PATIENCE):
            before = self.seen()
            try:
                self.step()
            except (MemoryError, RuntimeError, KeyboardInterrupt) as raised:
                if "injected" not in str(raised):
                    raise
                self.counts[f"{error} in {where}"] += 1
                require(self.seen() == before, f"a step that failed in {where} changed what callers see")
                break
            if not self.core.has_unfinished:
                break
            self.check()
        self.faults.disarm()

    def draft(self, name: str, right: int, wrong: int) -> None:
        request, asked = self.scheduler.requests.get(name), self.asked.get(name)
        if request in self.scheduler.running and request.num_tokens - request.num_computed_tokens == 1:
            ahead = asked.expected[len(asked.got) :]
            drafts = ahead[:right] + [(token + 1) % VOCAB for token in ahead[right : right + wrong]]
            request.spec_token_ids = drafts
            self.counts["drafts"] += len(drafts)

    def reset(self) -> None:
        busy = self.core.has_unfinished
        require(self.core.reset_prefix_cache() != busy, "the cache was reset under a request, or not when idle")

    def finish(self) -> None:
        """Serve what is left; then every output is complete and nothing is held."""
        live = [asked for asked in self.asked.values() if asked.reason is None]
        for _ in range(100 + 200 * len(live)):
            if not self.core.has_unfinished:
                break
            self.do(("step", 0))
        require(not self.core.has_unfinished, "requests never finish")
        for name, asked in self.asked.items():
            require(asked.reason is not None, f"{name} ended without an output that says so")
            require(asked.reason == "abort" or asked.got == asked.expected, f"{name}: {asked.got}, {asked.expected}")
        require(self.blocks.num_free == self.blocks.num_blocks, "an idle engine holds blocks")
        require(not self.core.children, "an idle engine knows samples")
        self.asked.clear()

    # -- checks

    def did_not_happen(self, before, interrupt) -> None:
        self.counts["Ctrl-C at a line"] += 1
        require(interrupt.raised, f"KeyboardInterrupt at {interrupt.place} did not reach the caller")
        self.core.abort_request("nobody")  # should the repair have been interrupted too, any call makes up for it
        require(self.seen() == before, f"a call interrupted at {interrupt.place} changed what callers see")

    def seen(self) -> tuple:
        core = self.core
        counters = core.num_steps, core.num_scheduled_tokens, core.num_preemptions
        return counters, {name: request.num_tokens for name, request in self.scheduler.requests.items()}

    def deliver(self, output) -> None:
        asked, name = self.asked[output.request_id], output.request_id
        require(asked.reason is None, f"{name} got tokens after its end")
        asked.got += output.new_token_ids
        require(asked.got == asked.expected[: len(asked.got)], f"{name}: {asked.got}, expected {asked.expected}")
        require(output.output_token_ids == asked.got, f"{name}: {output.output_token_ids}, delivered {asked.got}")
        if output.finished:
            asked.reason = output.finish_reason

    def check(self) -> None:
        """All that holds between two calls."""
        scheduler, blocks = self.scheduler, self.blocks
        blocks.check()
        running, waiting = set(scheduler.running), set(scheduler.waiting)
        require(len(running) == len(scheduler.running) and not running & waiting, "a request is in two places")
        require(running | waiting == set(scheduler.requests.values()), "queues and requests do not agree")
        require(set(blocks.block_tables) <= running, "blocks are owned by somebody who does not run")
        require(len(running) <= scheduler.config.max_num_seqs, "more requests run than may")
        for request in running | waiting:
            if what := self.wrong_of(request, request in running):  # the text is made only then: it takes its time
                raise Broken(f"{what} of {request!r}")
        held = [block for request in waiting for block in request.swapped_out or ()]
        everything = sorted(held + scheduler.free_host_blocks)
        require(everything == list(range(scheduler.num_host_blocks)), "host blocks are lost, or held twice")

    def wrong_of(self, request, running: bool) -> str | None:
        """What of an unfinished request does not fit its place, None if all does."""
        blocks, kept = self.blocks, request.swapped_out
        idle = Status.PREEMPTED if request.num_preemptions else Status.WAITING
        if request.status is not (Status.RUNNING if running else idle):
            return "status"
        if not 0 <= request.num_computed_tokens < request.num_tokens:
            return "count"
        needed = blocks.blocks_for(request.num_computed_tokens)
        if running:
            return None if kept is None and len(blocks.block_tables[request]) >= needed else "blocks"
        return None if len(kept or ()) == needed else "host blocks"
