"""What makes a call of the core atomic wherever it stops: tokens are the truth, and all else can be made anew."""

from dataclasses import replace

from engine.serve.request import Status


class Atomic:
    """A context: what raises inside it has not happened, whether it failed, or Ctrl-C hit it at whichever line.

    Two ways back. `Scheduler.undo` takes a plan back that was complete, and nothing else is lost. In the middle of
    planning or of commit there is no telling what is half done. Then every unfinished request goes back to the tokens
    it had before, which `before` notes, and `Scheduler.start_over` lets all of them wait in order for an empty pool:
    K/V and prefix cache are lost, which costs time and no token. It can be repeated: if it is interrupted too, the next
    call of the core begins with it.
    What remains: a Ctrl-C between the end of a call and the caller's next line hits the caller, who then lacks what the
    call returned. No function can help that; the tokens are in the next output's output_token_ids, if there is one.

    before: (request, its number of tokens) as it was, for each that a call is about to change; None: it is new.
    """

    def __init__(self, core):
        self.core = core
        self.before: list[tuple] = []

    def __enter__(self):
        self._repair()
        core, self.before = self.core, []
        self.counters = core.num_steps, core.num_scheduled_tokens, core.num_preemptions, replace(core.blocks.stats)
        core.scheduler.half_done = True

    def __exit__(self, kind, error, traceback):
        if kind is not None:
            self.core.scheduler.half_done |= bool(self.before)
            self._repair()
        # One line: before it nothing has happened, after it everything. And the next call does not pay for `before`.
        self.core.scheduler.half_done, self.before = False, []

    def _repair(self) -> None:
        core = self.core
        if not core.scheduler.half_done:
            return
        for request, num_tokens in self.before:
            parent, _ = request.extra.get("parent", (None, 0))
            if num_tokens is None:
                core.scheduler.requests.pop(request.request_id, None)
                core.children.pop(parent, None)
                continue
            core.scheduler.requests[request.request_id] = request
            if parent is not None:
                core.children.setdefault(parent, {})[request.request_id] = None
            self._take_back(request, num_tokens)
        core.forget_flights()
        core.scheduler.start_over()
        core.num_steps, core.num_scheduled_tokens, core.num_preemptions, core.blocks.stats = self.counters
        core.scheduler.half_done = False

    def _take_back(self, request, num_tokens: int) -> None:
        del request.token_ids[num_tokens:]
        del request.block_hashes[num_tokens // self.core.config.block_size :]
        request.stop_reason = request.finish_time = None
        if not request.num_output_tokens:
            request.first_token_time = None
        if request.status.finished:
            request.status = Status.RUNNING
