"""One scheduler for prefill, decode and resume: every step it deals out a budget of tokens."""

from bisect import bisect, bisect_left
from dataclasses import dataclass, field

from engine.exercises import exercise, fill
from engine.serve.blocks import BlockManager
from engine.serve.config import EngineConfig
from engine.serve.queue import FCFSQueue, PriorityQueue, rank
from engine.serve.request import Request, Status


@dataclass
class SchedulerOutput:
    """The plan of one step.

    scheduled: (request, n) in the order of the batch.  preempted: who lost its blocks to make room.
    swap_out, swap_in: (request, its device blocks, host blocks), block by block; copied in this order before the
    forward pass.  admitted: (request, blocks adopted, num_computed_tokens before) in order, so that it can be undone.
    """

    scheduled: list[tuple[Request, int]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    swap_out: list[tuple[Request, list[int], list[int]]] = field(default_factory=list)
    swap_in: list[tuple[Request, list[int], list[int]]] = field(default_factory=list)
    admitted: list[tuple[Request, int, int]] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Nothing to compute and nothing to copy."""
        return not self.scheduled and not self.preempted

    @property
    def num_tokens(self) -> int:
        return sum(n for _, n in self.scheduled)


class Scheduler:
    """Decides who computes how many tokens; knows no model, only counts and blocks.

    State that `__init__` sets up: config; blocks: BlockManager; running: list of Requests in scheduling order;
    waiting: a queue with first, add, put_back, remove, len and in; free_host_blocks: ids of free swap blocks.
    Scheduling order is the order of admission (fcfs) or (priority, arrival, order of adding); `start_running` keeps it.
    """

    def __init__(self, config: EngineConfig, blocks: BlockManager, num_host_blocks: int = 0):
        self.config, self.blocks = config, blocks
        self.running: list[Request] = []
        self.waiting = PriorityQueue() if config.policy == "priority" else FCFSQueue()
        self.num_host_blocks, self.free_host_blocks = num_host_blocks, list(range(num_host_blocks))
        self.requests: dict[str, Request] = {}  # all unfinished ones
        self.retired: set[Request] = set()  # neither running nor waiting: only their last tokens are to come
        self.half_done = False  # a call of the core has begun, and neither ended nor been taken back
        self._num_added = 0

    # -- for the exercises to use

    def start_running(self, request: Request) -> None:
        """Waiting -> running, at its place in the scheduling order."""
        self.waiting.remove(request)
        request.status = Status.RUNNING
        place = len(self.running) if self.config.policy == "fcfs" else bisect(self.running, rank(request), key=rank)
        self.running.insert(place, request)

    def stop_running(self, request: Request) -> None:
        """Running -> waiting again, as preempted: at the front (fcfs) or at its place (priority)."""
        self._leave_running(request)
        request.status = Status.PREEMPTED
        self.waiting.put_back(request)

    def _leave_running(self, request: Request) -> None:
        """O(log n) comparisons: `running` is sorted, under fcfs by the order of adding, which preemption keeps."""
        key = rank if self.config.policy == "priority" else _order
        place = bisect_left(self.running, key(request), key=key)
        if place < len(self.running) and self.running[place] is request:
            del self.running[place]
        else:
            self.running.remove(request)  # another scheduler's order

    def take_host_blocks(self, count: int) -> list[int] | None:
        """Ids of that many free host blocks, None if there are fewer."""
        if count > len(self.free_host_blocks):
            return None
        return [self.free_host_blocks.pop() for _ in range(count)]

    # -- exercises

    @exercise(31, "The scheduler")
    def schedule(self) -> SchedulerOutput:
        """Plan one step.  (Your engine: Chapter 31)

        There is no prefill phase and no decode phase: a request wants its uncomputed tokens, one for a decode, many for
        a prefill or a resume. At most config.max_num_batched_tokens tokens in all.

        1. Running requests, in order, while budget lasts. A request's n is num_tokens_with_spec - num_computed_tokens,
           cut to config.long_prefill_token_threshold (if > 0) and to the budget left (that cut is chunked prefill).
           If `blocks.allocate_slots(request, n)` fails, `preempt` the last of self.running and try again, until it fits
           or the request has preempted itself.  Thus a victim is never in the plan.
        2. Only if this step preempted nobody: admit `waiting.first()` while budget, sequence slots
           (config.max_num_seqs) and blocks last; stop at the first that does not fit, nobody jumps the queue. Its
           blocks found by `blocks.find_cached_prefix` need not be computed: num_computed_tokens becomes the larger of
           what it is and the adopted tokens, but only once `allocate_slots` has succeeded. Admission never preempts.
           n is as above, from num_tokens. With enable_chunked_prefill False a new request (num_preemptions 0) whose n
           exceeds the budget left waits; a resumed one may be cut, or it could wait for ever.
           Append (request, adopted blocks, num_computed_tokens as it was) to `admitted`; `start_running`; at its first
           admission set num_cached_tokens to the adopted tokens.
           A swapped-out request (swapped_out not None) gets (request, device, host) in swap_in for those blocks of
           its computed tokens that it did not adopt: the blocks adopted..blocks_for(computed) - 1 of its table, and
           the same places of swapped_out. num_computed_tokens before the adoption counts here. Nothing left to restore:
           no entry.
        3. Everything planned goes to `scheduled` in order, and its full blocks are published at once
           (`blocks.cache_full_blocks(request, computed + n)`), so that requests that arrive together can share.

        num_computed_tokens of a planned request does not move here beyond adoption: the step does that when it
        succeeds.
        Source: the unified scheduler of vLLM V1; chunked prefill: Sarathi-Serve (OSDI 2024).
        """
        raise NotImplementedError

    @exercise(31, "Recompute or swap")
    def preempt(self, request, out) -> None:
        """Take all blocks of a running request away and let it wait.  (Your engine: Chapter 31)

        request: the last of self.running, not in out.scheduled.  out: the SchedulerOutput of this step.
        Recompute: its K/V is forgotten, num_computed_tokens becomes 0, so prompt *and* output are computed again.
        Swap (config.preemption_mode "swap"): num_computed_tokens stays; append (request, device, host) to out.swap_out,
        where device are the blocks that hold its computed tokens and host as many from `take_host_blocks`;
        request.swapped_out is that host list. With no computed tokens or not enough host blocks, this preemption
        recomputes.
        In both: its drafts die (spec_token_ids becomes []), `blocks.free`, num_preemptions + 1, `stop_running`, and the
        request joins out.preempted.
        Source: PagedAttention (SOSP 2023), section 4.5.
        """
        raise NotImplementedError

    # -- the rest

    def add(self, request: Request) -> None:
        """Queue a new request; ValueError as in `check_addable`."""
        self.check_addable(request)
        request.order = self._num_added
        self._num_added += 1
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def check_addable(self, request: Request) -> None:
        """ValueError for an id in use, or a request that could never run: it would hold up everything behind it."""
        config, prompt, output = self.config, request.num_prompt_tokens, request.params.max_tokens
        pool = self.blocks.num_blocks * self.blocks.block_size
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use")
        if prompt + output > pool:
            raise ValueError(
                f"request {request.request_id!r}: prompt {prompt} + max_tokens {output} = {prompt + output} tokens, "
                f"but the whole pool holds {pool}"
            )
        if not config.enable_chunked_prefill and prompt > config.max_num_batched_tokens:
            raise ValueError(
                f"request {request.request_id!r}: prompt of {prompt} tokens exceeds "
                f"max_num_batched_tokens {config.max_num_batched_tokens}, and chunked prefill is off"
            )

    def retire(self, request: Request) -> None:
        """Running -> planned no more, though it has not finished."""
        self._leave_running(request)
        self.retired.add(request)

    def finish(self, request: Request, status: Status, free: bool = True) -> None:
        """Unfinished -> finished with that status; all it held is free again, with free=False all but its blocks."""
        if request in self.retired:
            self.retired.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            self._leave_running(request)
        request.status = status
        if free:
            self.blocks.free(request)
        self.drop_swap(request)
        del self.requests[request.request_id]

    def abort(self, request_id: str) -> Request | None:
        """Finish a request early; None if there is no such unfinished request."""
        request = self.requests.get(request_id)
        if request is not None:
            self.finish(request, Status.FINISHED_ABORTED)
        return request

    def drop_swap(self, request: Request) -> None:
        """Free the host blocks of a request, if it has any."""
        self.free_host_blocks += request.swapped_out or []
        request.swapped_out = None

    def undo(self, out: SchedulerOutput, swapped_out: bool = True) -> None:
        """Take back a plan whose step failed: nothing it published or adopted may be trusted.

        swapped_out: False if the copies to the host failed too; those requests then recompute.
        """
        for request, num_adopted, num_computed in reversed(out.admitted):
            self.blocks.trim(request, num_adopted * self.blocks.block_size)  # withdraws what it published
            self.blocks.free(request)
            self.blocks.stats.tokens_known -= request.num_tokens
            self.blocks.stats.tokens_adopted -= num_adopted * self.blocks.block_size
            request.num_computed_tokens = num_computed
            self.stop_running(request)
            if request.num_preemptions == 0:
                request.status, request.num_cached_tokens = Status.WAITING, None
        for request, _ in out.scheduled:
            if request.status is Status.RUNNING:
                self.blocks.trim(request, request.num_computed_tokens)
        if not swapped_out:
            for request, _, _ in out.swap_out:
                self.drop_swap(request)
                request.num_computed_tokens = 0
        self.half_done = False

    def start_over(self) -> None:
        """Nothing is known but the unfinished requests and their tokens: all wait, in order, for an empty pool.

        Whoever ran counts as preempted. May be called in any state, again also if it was itself interrupted.
        """
        self.blocks.start_over()
        self.free_host_blocks = list(range(self.num_host_blocks))
        self.running, self.waiting, self.retired = [], type(self.waiting)(), set()
        for request in sorted(self.requests.values(), key=rank if self.config.policy == "priority" else _order):
            request.num_preemptions += request.status is Status.RUNNING
            request.status = Status.PREEMPTED if request.num_preemptions else Status.WAITING
            request.num_computed_tokens, request.swapped_out, request.spec_token_ids = 0, None, []
            while request.token_ids[-1] < 0:  # placeholders: an interrupt may have hit before they were counted
                request.token_ids.pop()
            request.num_placeholders = 0
            if not request.num_output_tokens:
                request.num_cached_tokens = None
            self.waiting.add(request)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)


def _order(request: Request) -> int:
    return request.order


fill(__name__)
