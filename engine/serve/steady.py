"""Steps in which nothing changes: the same requests, a token further each, at a fraction of a step's host time."""

from collections import defaultdict
from itertools import repeat

from engine.serve.output import RequestOutput
from engine.serve.overlap import PLACEHOLDER, OverlappedCore
from engine.serve.scheduler import SchedulerOutput


class Streak:
    """Steps that compute one token of each of the same requests.

    flight: the newest of them.  steps: so many were taken in the streak.  left: so many more until somebody's known
    end.  known[i]: known tokens of request i when it began, and so, with one placeholder behind them, the position that
    was computed next; num_outputs[i] of them are output.  stops: every token that may end one of the requests.
    """

    def __init__(self, flight, requests: list, block_size: int, max_model_len: int):
        self.flight, self.requests, self.block_size = flight, requests, block_size
        self.steps, self.stops = 0, set()
        self.known, self.num_outputs = [], []
        self._crossing = defaultdict(list)  # by the steps until their next block, modulo its size
        self.left = max_model_len
        for request in requests:
            params, known = request.params, request.num_tokens - 1
            output = known - request.num_prompt_tokens
            self.known.append(known)
            self.num_outputs.append(output)
            self._crossing[-known % block_size].append(request)
            # Less the token in the air and the one of the last launch, at which OverlappedCore retires a request.
            self.left = min(self.left, params.max_tokens - output - 2, max_model_len - known - 2)
            self.stops.update(params.stop_token_ids)
            eos = request.eos_token_id
            if not params.ignore_eos:
                self.stops.update(eos if isinstance(eos, (tuple, list, set, frozenset)) else (eos,))

    def crossing(self, ahead: int = 0) -> list:
        """Those whose next position, or the one so many steps later, is the first of a block."""
        return self._crossing.get((self.steps + ahead) % self.block_size, [])


class Counts:
    """For `Atomic.before`: (request, its known tokens) for each of a streak, without a pair for each."""

    def __init__(self, streak: Streak):
        self.streak, self.steps = streak, streak.steps

    def __len__(self) -> int:
        return len(self.streak.requests)

    def __iter__(self):
        for request, known in zip(self.streak.requests, self.streak.known, strict=True):
            yield request, known + self.steps


class SteadyCore(OverlappedCore):
    """OverlappedCore that notices when a step differs from the one before only by one more token each.

    Then it neither plans nor collects request by request: whoever begins a block gets one, the packed numbers of the
    step before move on by a position, and tokens go where placeholders were. `check_stop` is asked about tokens that
    may stop something, and about no others. All else, arrivals, ends, little room, is OverlappedCore's. What a call
    leaves behind is what a call of OverlappedCore would.
    """

    def __init__(self, *args, **kwargs):
        self.streak: Streak | None = None
        super().__init__(*args, **kwargs)

    def step(self):
        self.streak = streak = self._find_streak()
        if streak is None:
            return super().step()
        with self.atomic:
            blocks, grown = self.blocks, streak.crossing()
            for request in grown:
                blocks.add_block(request)  # `may_preempt` has seen that there are enough
            try:
                flight = self.runner.launch_again(streak.flight, grown, blocks.block_tables)
            except BaseException:
                self.scheduler.undo(SchedulerOutput(streak.flight.scheduled))
                raise
            self.atomic.before = Counts(streak)
            self.flights.append(flight)
            self.num_steps += 1
            self.num_scheduled_tokens += len(streak.requests)
            outputs = self._commit(streak, self.flights.popleft().drawn())
            streak.flight, streak.steps, streak.left = flight, streak.steps + 1, streak.left - 1
            if not self.has_unfinished:
                outputs += self.collect()
            return outputs

    def _find_streak(self) -> Streak | None:
        """The streak that goes on with this step, or begins; None: a step like any other.

        Asks how things stand, each time: whatever happened since the last step shows in one of these.
        """
        scheduler, running = self.scheduler, self.scheduler.running
        if scheduler.half_done or not self.flights:
            return None
        flight, streak = self.flights[0], self.streak
        may_admit = len(scheduler.waiting) > 0 and len(running) < self.config.max_num_seqs
        if may_admit or self.may_preempt() or not flight.size or not self.runner.can_repeat(flight):
            return None
        goes_on = streak is not None and streak.flight is flight
        requests = streak.requests if goes_on else [request for request, _ in flight.scheduled]
        if running != requests or [request for request in running if request.spec_token_ids]:
            return None
        if not goes_on:
            if any(request.first_token_time is None for request in requests):  # a prompt of one token
                return None
            streak = Streak(flight, requests, self.blocks.block_size, self.max_model_len)
        return streak if streak.left > 0 else None

    def _commit(self, streak: Streak, tokens: list[int]) -> list:
        """Each token to its request, and a placeholder behind it; returns the outputs.

        The one loop over all requests, and it calls nothing: a call of RequestOutput would cost more than the rest.
        """
        requests, more = streak.requests, streak.steps + 1
        outputs = list(map(object.__new__, repeat(RequestOutput, len(requests))))
        for output, request, token, known in zip(outputs, requests, tokens, streak.num_outputs, strict=True):
            token_ids = request.token_ids
            token_ids[-1] = token
            token_ids.append(PLACEHOLDER)
            request.num_computed_tokens += 1
            output.request = request
            output.num_new = 1
            output.finished = False
            output.num_output_tokens = known + more
            output.num_preemptions = request.num_preemptions
        if not streak.stops.isdisjoint(tokens):
            self._end_some(streak, tokens, outputs)
        if self.blocks.enable_prefix_caching:
            for request in streak.crossing(1):  # a block begins next, so the one before it is full
                if not request.status.finished:
                    self.blocks.cache_full_blocks(request)
        return outputs

    def _end_some(self, streak: Streak, tokens: list[int], outputs: list) -> None:
        for i, (request, token) in enumerate(zip(streak.requests, tokens, strict=True)):
            if token in streak.stops:
                status = self.check_stop(request, streak.num_outputs[i] + streak.steps)
                if status is not None:
                    self.end(request, status)
                    outputs[i] = self.output(request, [token])
