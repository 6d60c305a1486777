"""Wrong answers of chapter 31: Scheduler.preempt."""

from tests.mutants import mutant as add


def mutant(*change, **about):
    add("Scheduler.preempt", *change, **about)


mutant(
    "            request.num_computed_tokens = 0\n",
    "            pass\n",
    caught_by="test_recompute_forgets_that_anything_was_computed",
    believes="num_computed_tokens is what has been computed, and it was",
    name="stale-count",
)
mutant(
    "            request.num_computed_tokens = 0\n",
    "            request.num_computed_tokens = 0\n            del request.token_ids[request.num_prompt_tokens :]\n",
    caught_by="test_recompute_forgets_that_anything_was_computed",
    believes="recomputing starts over from the prompt",
    name="drops-the-output",
)
mutant(
    "        self.blocks.free(request)\n",
    "        if host is None:\n            self.blocks.free(request)\n",
    caught_by="test_a_preempted_request_gives_everything_back_and_waits",
    believes="a swapped request comes back to its blocks",
    name="swap-keeps-the-blocks",
)
mutant(
    "        self.blocks.free(request)\n",
    "        self.blocks.block_tables.pop(request)\n        self.blocks.num_published.pop(request)\n",
    caught_by="test_a_preempted_request_gives_everything_back_and_waits",
    believes="a block without a table is free",
    name="leaks",
)
mutant(
    "        request.spec_token_ids = []\n",
    "",
    caught_by="test_drafts_die_with_a_preemption",
    believes="drafts are about the text, and the text has not changed",
    name="drafts-survive",
)
mutant(
    "[:num_blocks], host))",
    "[-num_blocks:], host))",
    caught_by="test_swap_copies_the_blocks_of_the_computed_tokens_in_order",
    believes="the newest blocks are those worth keeping",
    name="copies-the-wrong-end",
)
mutant(
    "num_blocks = self.blocks.blocks_for(request.num_computed_tokens)",
    "num_blocks = request.num_computed_tokens // self.blocks.block_size",
    caught_by="test_swap_copies_the_blocks_of_the_computed_tokens_in_order",
    believes="only full blocks hold K/V",
    name="forgets-the-last-block",
)
mutant(
    "num_blocks = self.blocks.blocks_for(request.num_computed_tokens)",
    "num_blocks = len(self.blocks.block_tables[request])",
    caught_by="test_swap_copies_the_blocks_of_the_computed_tokens_in_order",
    believes="the whole table holds K/V",
    name="copies-the-whole-table",
)
mutant(
    "            request.swapped_out = host\n",
    "            request.swapped_out = sorted(host)\n",
    caught_by="test_swap_copies_the_blocks_of_the_computed_tokens_in_order",
    believes="which host block is which does not matter",
    name="loses-the-order",
)
mutant(
    "            host = self.take_host_blocks(num_blocks)\n",
    "            host = self.take_host_blocks(min(num_blocks, len(self.free_host_blocks)))\n",
    caught_by="test_swap_space_that_is_too_small_falls_back_to_recompute",
    believes="part of the K/V is better than none",
    name="swaps-in-part",
)
mutant(
    'if self.config.preemption_mode == "swap" and num_blocks > 0:',
    'if self.config.preemption_mode == "swap":',
    caught_by="test_nothing_computed_leaves_nothing_to_swap",
    believes="a copy of no blocks is a copy",
    name="swaps-nothing",
)
mutant(
    "        request.num_preemptions += 1\n",
    "",
    caught_by="test_a_preempted_request_gives_everything_back_and_waits",
    believes="the counter of the engine is enough",
    name="not-counted",
)
mutant(
    "        self.stop_running(request)\n",
    "        self.stop_running(request)\n        self.waiting.remove(request)\n        self.waiting.add(request)\n",
    caught_by="test_a_preempted_request_is_the_first_to_come_back",
    believes="who was preempted queues up again like everybody",
    name="to-the-back-of-the-queue",
)
mutant(
    "        out.preempted.append(request)",
    "        pass",
    caught_by="test_a_preempted_request_gives_everything_back_and_waits",
    believes="the queue says already who waits",
    name="not-in-the-plan",
)
mutant(
    "        if host is None:\n            request.num_computed_tokens = 0\n",
    "        request.num_computed_tokens = 0\n        if host is None:\n            pass\n",
    caught_by="test_swap_copies_the_blocks_of_the_computed_tokens_in_order",
    believes="a preempted request has nothing computed, wherever its K/V is",
    name="swap-forgets-the-count",
)
mutant(
    "            request.num_computed_tokens = 0\n",
    "            pass\n",
    caught_by="TestRandomTrafficThroughPreempt",
    believes="num_computed_tokens is what has been computed, and it was",
    name="stale-count-in-traffic",
)
