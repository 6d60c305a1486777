"""The loop of the core on a virtual clock: the real scheduler and block manager, and no model."""

import heapq
from array import array
from dataclasses import dataclass, field

from engine.serve.blocks import BlockManager
from engine.serve.config import EngineConfig
from engine.serve.request import Request, SamplingParams, Status
from engine.serve.scheduler import Scheduler
from engine.simulate.arrivals import Arrival
from engine.simulate.cost import CostModel, StepWork


@dataclass
class Finished:
    """One answered request; times are seconds of the virtual clock."""

    arrival: Arrival
    arrived_at: float
    first_token_at: float
    finished_at: float
    num_preemptions: int
    num_cached_tokens: int


def _floats():
    return field(default_factory=lambda: array("d"))


@dataclass
class Timeline:
    """One entry a step: when it began, how long it took, and the state in which it ran."""

    begin: array = _floats()
    seconds: array = _floats()
    waiting: array = _floats()
    running: array = _floats()
    used_blocks: array = _floats()
    sampled: array = _floats()  # tokens it delivered


class Simulator:
    """Plays a trace.  `run` to the end, then read finished, refused, timeline and counters.

    A request that the core would refuse (too long for max_model_len or for the pool, or for the budget with chunked
    prefill off; max_waiting in the queue already) is refused here, and so are the turns of a chat that would have
    followed.
    RuntimeError if the scheduler plans nothing although requests wait: it would stand still for ever.
    """

    def __init__(self, arrivals: list[Arrival], config: EngineConfig, cost: CostModel):
        self.max_model_len = cost.max_model_len(config)
        self.max_waiting = config.max_waiting
        num_blocks = cost.num_blocks(config)
        num_host_blocks = 0
        if config.preemption_mode == "swap":
            num_host_blocks = min(config.swap_space_bytes // cost.block_bytes, config.max_num_seqs * num_blocks)
        self.blocks = BlockManager(num_blocks, config.block_size, config.enable_prefix_caching)
        self.scheduler = Scheduler(config, self.blocks, num_host_blocks)
        self.cost, self.arrivals = cost, arrivals

        self.clock = 0.0
        self._coming = [(a.at, i) for i, a in enumerate(arrivals) if a.after is None]
        heapq.heapify(self._coming)
        self._next_turn: dict[int, list[int]] = {}
        for i, arrival in enumerate(arrivals):
            if arrival.after is not None:
                self._next_turn.setdefault(arrival.after, []).append(i)
        self._index: dict[Request, int] = {}
        self.finished: list[Finished] = []
        self.refused: list[tuple[Arrival, str]] = []
        self.timeline = Timeline()
        self.num_computed_tokens = self.num_preemptions = self.num_swapped_blocks = 0

    def run(self, every: int = 0, report=None) -> "Simulator":
        """Until all is answered; calls report(self) every so many steps."""
        steps = 0
        while True:
            self.receive()
            if self.scheduler.has_unfinished:
                self.step()
                steps += 1
                if every and steps % every == 0:
                    report(self)
            elif self._coming:
                self.clock = self._coming[0][0]  # nothing to do until then
            else:
                return self

    def receive(self) -> None:
        """Queue what has arrived by now."""
        while self._coming and self._coming[0][0] <= self.clock:
            at, i = heapq.heappop(self._coming)
            arrival = self.arrivals[i]
            total = arrival.num_prefill_tokens + arrival.num_decode_tokens
            if total > self.max_model_len:
                self.refuse(i, f"{total} tokens exceed max_model_len {self.max_model_len}")
                continue
            if self.max_waiting is not None and self.scheduler.num_waiting >= self.max_waiting:
                self.refuse(i, f"{self.max_waiting} requests wait already, max_waiting allows no more")
                continue
            params = SamplingParams(max_tokens=arrival.num_decode_tokens)
            prompt = arrival.prompt_token_ids()
            request = Request(str(i), prompt, params, priority=arrival.priority, arrival_time=at)
            try:
                self.scheduler.add(request)
            except ValueError as error:
                self.refuse(i, str(error))
            else:
                self._index[request] = i

    def refuse(self, i: int, why: str) -> None:
        self.refused.append((self.arrivals[i], why))
        for turn in self._next_turn.get(i, ()):
            self.refuse(turn, "the turn before it was refused")

    def step(self) -> None:
        """What EngineCore.step does, with made-up tokens and computed time."""
        scheduler, line = self.scheduler, self.timeline
        out = scheduler.schedule()
        if out.empty:
            raise RuntimeError(
                f"the scheduler plans nothing although {scheduler.num_running} requests run and "
                f"{scheduler.num_waiting} wait"
            )
        work = StepWork.of(out)
        seconds = self.cost.seconds(work)
        line.begin.append(self.clock)
        line.seconds.append(seconds)
        line.waiting.append(scheduler.num_waiting)
        line.running.append(scheduler.num_running)
        line.used_blocks.append(self.blocks.num_blocks - self.blocks.num_free)
        line.sampled.append(work.sampled)
        self.clock += seconds

        for request, n in out.scheduled:
            request.num_computed_tokens += n
            if request.num_computed_tokens == request.num_tokens:
                self.deliver(request)
        for request, _, _ in out.admitted:
            scheduler.drop_swap(request)
        self.num_computed_tokens += work.tokens
        self.num_preemptions += len(out.preempted)
        self.num_swapped_blocks += work.swapped_blocks

    def deliver(self, request: Request) -> None:
        """Append a token at the present time; the last one ends the request."""
        i = self._index[request]
        request.append(i)
        if request.first_token_time is None:
            request.first_token_time = self.clock
        if request.num_output_tokens < request.params.max_tokens:
            return
        self.scheduler.finish(request, Status.FINISHED_LENGTH)
        del self._index[request]
        self.finished.append(
            Finished(
                self.arrivals[i], request.arrival_time, request.first_token_time, self.clock,
                request.num_preemptions, request.num_cached_tokens or 0,
            )  # fmt: skip
        )
        for turn in self._next_turn.get(i, ()):
            heapq.heappush(self._coming, (self.clock + self.arrivals[turn].at, turn))
