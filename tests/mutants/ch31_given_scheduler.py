"""Faults in the given code of chapter 31: queues, refusals, undo."""

from functools import partial

from tests.mutants import scaffold_mutant

scheduler = partial(scaffold_mutant, "engine/serve/scheduler.py")
queue = partial(scaffold_mutant, "engine/serve/queue.py")
recovery = partial(scaffold_mutant, "engine/serve/recovery.py")

scheduler(
    "            self.blocks.trim(request, num_adopted * self.blocks.block_size)  # withdraws what it published\n",
    "",
    caught_by="test_a_failed_step_leaves_nothing_cached_that_was_not_computed",
    believes="freeing the blocks is enough",
    name="undo-leaves-hashes",
)
scheduler(
    "            request.num_computed_tokens = num_computed\n",
    "",
    caught_by="test_requests_admitted_in_a_failed_step_return_to_the_front_in_order",
    believes="adopted tokens stay computed",
    name="undo-keeps-adopted-tokens",
)
scheduler(
    "in reversed(out.admitted):",
    "in out.admitted:",
    caught_by="test_requests_admitted_in_a_failed_step_return_to_the_front_in_order",
    believes="each goes back to the front, one after the other",
    name="undo-turns-the-queue-round",
)
scheduler(
    "            self.blocks.stats.tokens_known -= request.num_tokens\n",
    "",
    caught_by="test_requests_admitted_in_a_failed_step_return_to_the_front_in_order",
    believes="a failed admission is an admission",
    name="undo-keeps-statistics",
)
scheduler(
    "            if request.status is Status.RUNNING:\n"
    "                self.blocks.trim(request, request.num_computed_tokens)\n",
    "            pass\n",
    caught_by="test_a_failed_chunk_of_a_running_request_is_withdrawn",
    believes="what a running request published will be computed in the next step",
    name="undo-forgets-running-requests",
)
scheduler(
    "        if not swapped_out:\n",
    "        if False:\n",
    caught_by="test_a_step_that_fails_while_swapping_out",
    believes="the copies to the host cannot fail",
    name="undo-trusts-copies",
)
scheduler(
    "                self.drop_swap(request)\n                request.num_computed_tokens = 0\n",
    "                self.drop_swap(request)\n",
    caught_by="test_a_step_that_fails_while_swapping_out",
    believes="dropping the copies says it all",
    name="undo-keeps-the-count",
)
scheduler(
    "        self.drop_swap(request)\n        del self",
    "        del self",
    caught_by="test_an_abort_gives_back_all_that_was_held",
    believes="whoever is swapped out holds no blocks",
    name="abort-leaks-host-blocks",
)
scheduler(
    "        self.blocks.free(request)\n        self.drop_swap",
    "        self.drop_swap",
    caught_by="test_an_abort_gives_back_all_that_was_held",
    believes="a finished request frees its blocks by itself",
    name="finish-leaks",
)
scheduler(
    "        request.order = self._num_added\n",
    "        request.order = -self._num_added\n",
    caught_by="test_priority_ties_go_by_arrival_and_then_by_order_of_adding",
    believes="between equals the newest comes first",
    name="last-added-first",
)
scheduler(
    "        if prompt + output > pool:",
    "        if False:",
    caught_by="test_what_was_refused_holds_nobody_up",
    believes="what does not fit can wait",
    name="accepts-more-than-the-pool",
)
scheduler(
    "        if not config.enable_chunked_prefill and prompt",
    "        if False and prompt",
    caught_by="test_chunked_prefill_off_a_prompt_over_the_budget_is_refused",
    believes="a prompt over the budget can wait",
    name="accepts-a-prompt-over-the-budget",
)

queue(
    "        self._requests.move_to_end(request, last=False)\n",
    "",
    caught_by="test_first_come_first_served_and_the_preempted_before_all",
    believes="a preempted request queues up again",
    name="no-front",
)
queue(
    "        self._requests: OrderedDict[Request, None] = OrderedDict()\n",
    "        from collections import UserDict\n\n"
    "        class Slow(UserDict):\n"
    "            def move_to_end(self, request, last):\n"
    "                self.data = {request: None, **self.data}\n\n"
    "            def __delitem__(self, request):\n"
    "                self.data = {r: None for r in self.data if r is not request}\n\n"
    "        self._requests = Slow()\n",
    caught_by="test_joining_and_leaving_a_long_queue_costs_little",
    believes="a queue is short",
    name="copies-the-queue",
)
queue(
    "        heapq.heappush(self._heap, entry)\n",
    "        self._heap.append(entry)\n        self._heap.sort()\n",
    caught_by="test_joining_and_leaving_a_long_queue_costs_little",
    believes="sorting a sorted list costs nothing",
    name="sorts-at-every-add",
)
queue(
    "        if len(self._heap) > 2 * len(self._live) + 16:",
    "        if False:",
    caught_by="test_a_priority_queue_forgets_who_left",
    believes="those that left are skipped when they come up",
    name="never-forgets",
)
queue(
    "        while self._live.get(self._heap[0][-1]) is not self._heap[0]:\n",
    "        while False:\n",
    caught_by="test_a_priority_queue_is_sorted_whatever_comes_and_goes",
    believes="the first of the heap is still there",
    name="serves-who-left",
)
queue(
    "    return request.priority, request.arrival_time, request.order",
    "    return request.priority, request.order",
    caught_by="test_priority_ties_go_by_arrival_and_then_by_order_of_adding",
    believes="the order of adding is the order of arrival",
    name="rank-without-arrival",
)

recovery(
    "        del request.token_ids[num_tokens:]\n",
    "",
    caught_by="test_an_interrupt_at_any_line_of_a_step_has_not_happened",
    believes="a token that was sampled is a token",
    name="keeps-tokens-nobody-got",
)
recovery(
    "            core.scheduler.requests[request.request_id] = request\n",
    "",
    caught_by="test_an_interrupt_at_any_line_of_a_step_has_not_happened",
    believes="who has ended has ended",
    name="forgets-who-ended",
)
recovery(
    "        self.core.scheduler.half_done, self.before = False, []\n",
    "        self.core.scheduler.half_done = False\n        self.before = []\n",
    caught_by="test_an_interrupt_while_adding_or_aborting_has_not_happened",
    believes="one line more makes no difference",
    name="two-lines-to-commit",
)
recovery(
    "            if num_tokens is None:\n                core.scheduler.requests.pop(request.request_id, None)\n",
    "            if num_tokens is None:\n",
    caught_by="test_an_interrupt_while_adding_or_aborting_has_not_happened",
    believes="half of the samples are better than none",
    name="keeps-what-was-half-added",
)
scheduler(
    "            request.num_computed_tokens, request.swapped_out, request.spec_token_ids = 0, None, []\n",
    "            request.swapped_out, request.spec_token_ids = None, []\n",
    caught_by="test_an_interrupt_at_any_line_of_a_step_has_not_happened",
    believes="what was computed stays computed",
    name="start-over-keeps-counts",
)
