"""Asynchronous scheduling: a step is planned and launched before the tokens of the one before it are known."""

from collections import deque

from engine.exercises import exercise, fill
from engine.serve.blocks import BlockManager
from engine.serve.engine import EngineCore
from engine.serve.request import Status

PLACEHOLDER = -1  # stands in token_ids for a token that is still on the device; known ones are never negative


class LateBlocks(BlockManager):
    """Blocks whose newest token may be a placeholder: such a block has no hash yet."""

    def cache_full_blocks(self, request, num_tokens=None):
        if num_tokens is None:
            num_tokens = request.num_computed_tokens
        super().cache_full_blocks(request, min(num_tokens, request.num_tokens - request.num_placeholders))


class OverlappedCore(EngineCore):
    """EngineCore with `EngineConfig(async_scheduling=True)`: the same tokens, a step later, and no idle device.

    flights: the launched steps whose tokens are not read yet, oldest first: between calls at most one. A request in one
    of them counts its tokens as computed, and has a PLACEHOLDER at the end of token_ids, counted in num_placeholders,
    for the token to come. Two things follow. That it stopped is noticed one step late: what the next step computed for
    it is dropped. And its blocks may still be written by that step: they stay its own until then, in `Flight.held`.
    A request whose end is known beforehand (its length) leaves `scheduler.running` at its last launch.
    `EngineCore(...)` makes a SteadyCore of it, which does the same faster where a step only repeats the one before.
    Source: asynchronous scheduling of vLLM V1; the overlap scheduler of SGLang.
    """

    block_manager = LateBlocks

    def __init__(self, *args, **kwargs):
        self.flights = deque()
        self._chunks = False  # may a running request be in mid-prompt?
        super().__init__(*args, **kwargs)

    @exercise(33, "One step ahead")
    def step(self):
        """Launch the next step, then read the tokens of the one before.  (Your engine: Chapter 33)

        All of it inside `with self.atomic:`.
        1. If a flight is in the air and `self.may_preempt()`, launch nothing: return `self.collect()`. A preempted
           request's blocks go to others at once, and the flight may still write them.
        2. out = self.scheduler.schedule(). If out.empty, return `self.collect()`.
        3. self.runner.swap(out), then flight = self.runner.launch(out, self.blocks.block_tables). If either raises
           anything: self.scheduler.undo(out, swapped_out=whether `swap` had returned), and raise it again; what is in
           the air stays there.
        4. `self.advance(out)`, and append the flight to self.flights.
        5. If there are two flights now, collect the older one. Then, if no request is unfinished, collect what is left
           too: nobody would call again.
        Returns the outputs of all that was collected, [] if nothing was.
        With 4, num_steps grows by 1, num_scheduled_tokens by out.num_tokens and num_preemptions by len(out.preempted).
        """
        raise NotImplementedError

    @exercise(33, "One step ahead")
    def collect(self):
        """Read the tokens of the oldest flight and commit them; [] if nothing is in the air.  (Your engine: Chapter 33)

        Take the flight off self.flights; tokens = flight.tokens() waits for it and has a list for each of
        flight.scheduled, empty in mid-prompt. A request without a token, or that has finished meanwhile (it stopped a
        step before, or was aborted), gets nothing.
        For each other: its oldest placeholder, at index num_tokens - num_placeholders of token_ids, becomes the token.
        Ask `self.check_stop(request, index)` about that very token (index counts output tokens: this is not the
        newest one if the next flight has the request too). If it stopped: drop what stands behind it, and
        `self.end(request, status)`. If not, and a block of known tokens has become full: publish it by
        `self.blocks.cache_full_blocks(request)`.
        Before a request is changed, append (request, number of its known tokens) to self.atomic.before.
        At the end give back the blocks of flight.held: `self.blocks.free(request)` for each.
        Returns self.output(request, [token]) for each request that got a token, in the order of the flight.
        """
        raise NotImplementedError

    # -- given

    def may_preempt(self) -> bool:
        """Could planning run out of blocks? Each running request may need one more, and chunks those of the budget."""
        wanted = len(self.scheduler.running)
        if self._chunks:
            wanted += self.blocks.blocks_for(self.config.max_num_batched_tokens)
        return self.blocks.num_free < wanted

    def advance(self, out) -> None:
        """Count a launched plan as computed; placeholders for the tokens to come."""
        self._chunks = out.num_tokens >= self.config.max_num_batched_tokens  # some may have got nothing
        for request, n in out.scheduled:
            request.num_computed_tokens += n
            if request.num_computed_tokens < request.num_tokens:
                self._chunks = True
                continue
            request.append(PLACEHOLDER)
            request.num_placeholders += 1
            full = request.num_tokens >= self.max_model_len
            if full or request.num_output_tokens >= request.params.max_tokens:
                self.scheduler.retire(request)
        for request, _, _ in out.admitted:
            self.scheduler.drop_swap(request)

    def end(self, request, status: Status) -> None:
        """A request ends; blocks that a flight may still write stay its own until that flight is collected."""
        del request.token_ids[request.num_tokens - request.num_placeholders :]
        request.num_placeholders = 0
        flights = [f for f in self.flights if any(request is r for r, _ in f.scheduled)]
        self.scheduler.finish(request, status, free=not flights)
        if flights:
            flights[-1].held.append(request)

    def _abort(self, request) -> None:
        self.end(request, Status.FINISHED_ABORTED)
        if not self.has_unfinished:  # nobody would call again, and its blocks should be free
            self.collect()

    def forget_flights(self) -> None:
        self.flights.clear()


fill(__name__)
