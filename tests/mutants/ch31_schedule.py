"""Wrong answers of chapter 31: Scheduler.schedule."""

from tests.mutants import mutant as add

ADOPT = "            request.num_computed_tokens = computed\n"
ALLOCATE = "            if not blocks.allocate_slots(request, n, adopted):\n"
CACHED = "                request.num_cached_tokens = len(adopted) * blocks.block_size\n"
MISSING = "slice(len(adopted), blocks.blocks_for(before))"
PLAN = "            blocks.cache_full_blocks(request, request.num_computed_tokens + n)\n"


def mutant(*change, **about):
    add("Scheduler.schedule", *change, **about)


mutant(
    "                budget -= n\n",
    "                pass\n",
    caught_by="test_every_step_deals_out_its_budget_in_order",
    believes="the budget is for prefills; decodes are free",
    name="decodes-are-free",
)
mutant(
    "            plan(request, n)\n            budget -= n\n        return out",
    "            plan(request, n)\n        return out",
    caught_by="test_every_step_deals_out_its_budget_in_order",
    believes="the budget limits each prompt, not their sum",
    name="budget-for-each-prompt",
)
mutant(
    "num_tokens_with_spec - request.num_computed_tokens, cap, budget)",
    "num_tokens_with_spec - request.num_computed_tokens, budget)",
    caught_by="test_the_cap_of_long_prefills_leaves_room_for_others",
    believes="the cap is for the first chunk of a prompt",
    name="cap-at-admission-only",
)
mutant(
    "n = min(request.num_tokens - computed, cap)",
    "n = request.num_tokens - computed",
    caught_by="test_the_cap_of_long_prefills_leaves_room_for_others",
    believes="the cap is for requests that run",
    name="no-cap-at-admission",
)
mutant(
    "min(request.num_tokens_with_spec -",
    "min(request.num_tokens -",
    caught_by="test_drafts_are_scheduled_and_take_budget",
    believes="drafts are no tokens yet",
    name="drafts-left-out",
)
mutant(
    "len(self.running) < config.max_num_seqs",
    "len(self.running) <= config.max_num_seqs",
    caught_by="test_no_more_requests_run_than_there_are_slots",
    believes="max_num_seqs may be passed by the one that is being admitted",
    name="one-sequence-too-many",
)
mutant(
    "while not out.preempted and self.waiting",
    "while self.waiting",
    caught_by="test_a_step_that_preempted_admits_nobody",
    believes="what preemption freed is for anybody",
    name="admits-after-preempting",
)
mutant(
    "victim = self.running[-1]",
    "victim = self.running[0]",
    caught_by="test_the_last_in_order_is_preempted",
    believes="the oldest request has had its share",
    name="preempts-the-first",
)
mutant(
    "victim = self.running[-1]",
    "victim = next((r for r in reversed(self.running) if r is not request), request)",
    caught_by="test_the_last_request_gives_way_itself",
    believes="the request that needs the block goes on, somebody else gives way",
    name="never-itself",
)
mutant(
    "victim = self.running[-1]",
    "victim = max(self.running, key=lambda r: len(blocks.block_tables[r]))",
    caught_by="test_the_last_in_order_is_preempted",
    believes="the victim is whoever frees most",
    name="preempts-the-largest",
)
mutant(
    ALLOCATE + "                break\n",
    ALLOCATE
    + "                victim = self.running[-1] if self.running else None\n"
    + "                if victim is None or victim.priority <= request.priority:\n"
    + "                    break\n"
    + "                self.preempt(victim, out)\n"
    + "                continue\n",
    caught_by="test_admission_never_preempts",
    believes="a request of higher priority may push a running one out",
    name="preempts-to-admit",
)
mutant(
    "            request = self.waiting.first()\n",
    "            request = min(self.waiting, key=lambda r: r.num_tokens)\n",
    caught_by="test_nobody_jumps_the_queue",
    believes="the shortest job first is best for all",
    name="shortest-first",
)
mutant(
    " and request.num_preemptions == 0",
    "",
    caught_by="test_chunked_prefill_off_a_resumed_request_may_be_cut",
    believes="with chunked prefill off nothing is ever cut",
    name="resumed-waits-for-ever",
)
mutant(
    "            if n > budget and not config.enable_chunked_prefill and request.num_preemptions == 0:\n"
    "                break\n",
    "",
    caught_by="test_chunked_prefill_off_nobody_passes_a_prompt_that_waits",
    believes="the budget clamp alone does it",
    name="chunks-although-off",
)
mutant(
    ALLOCATE,
    ADOPT + ALLOCATE,
    caught_by="test_a_failed_admission_changes_nothing",
    believes="the prefix is there whether or not the rest fits",
    name="adopts-before-it-fits",
)
mutant(
    ALLOCATE,
    "            if request.num_cached_tokens is None:\n    " + CACHED.replace("    " * 4, "    " * 3) + ALLOCATE,
    caught_by="test_a_failed_admission_changes_nothing",
    believes="a hit is a hit, admitted or not",
    name="counts-a-hit-too-early",
)
mutant(
    "computed = max(before, len(adopted) * blocks.block_size)",
    "computed = len(adopted) * blocks.block_size",
    caught_by="test_a_swapped_request_goes_on_where_it_was",
    believes="what counts as computed is what the prefix cache holds",
    name="forgets-what-was-swapped",
)
mutant(
    ADOPT,
    "            request.num_computed_tokens = request.num_computed_tokens or computed\n",
    caught_by="test_a_swapped_request_may_adopt_more_than_it_had_computed",
    believes="a request that has computed tokens adopts none",
    name="adopts-only-when-new",
)
mutant(
    "            if request.num_cached_tokens is None:\n",
    "            if True:\n",
    caught_by="test_num_cached_tokens_stays_that_of_the_first_admission",
    believes="the last admission is the one that counts",
    name="counts-own-blocks-as-hits",
)
mutant(
    MISSING,
    "slice(0, blocks.blocks_for(before))",
    caught_by="test_only_what_was_not_adopted_comes_from_the_host",
    believes="everything that was copied out is copied in",
    name="restores-over-shared-blocks",
)
mutant(
    "request.swapped_out[missing]",
    "request.swapped_out[: len(request.swapped_out) - len(adopted)]",
    caught_by="test_only_what_was_not_adopted_comes_from_the_host",
    believes="the first host block goes to the first new block",
    name="restores-to-the-wrong-place",
)
mutant(
    "                if device:\n                    out",
    "                if True:\n                    out",
    caught_by="test_nothing_left_to_restore_leaves_no_entry",
    believes="an empty copy does no harm",
    name="empty-swap-in",
)
mutant(
    PLAN,
    "",
    caught_by="test_requests_that_arrive_together_share_their_prefix",
    believes="blocks are published when somebody has computed them",
    name="never-publishes",
)
mutant(
    PLAN,
    "            blocks.cache_full_blocks(request, request.num_computed_tokens + n)\n"
    "            request.num_computed_tokens += n\n",
    caught_by="test_a_plan_moves_no_count_beyond_adoption",
    believes="what is planned is as good as done",
    name="advances-too-early",
)
mutant(
    "            out.admitted.append((request, len(adopted), before))\n",
    "            if adopted:\n                out.admitted.append((request, len(adopted), before))\n",
    caught_by="test_an_admission_is_recorded_so_that_it_can_be_undone",
    believes="only an admission that adopted something needs undoing",
    name="records-hits-only",
)
mutant(
    "        while i < len(self.running) and budget > 0:\n",
    "        while i < len(self.running) and budget > 0 and not self.waiting:\n",
    caught_by="test_a_new_arrival_every_step_does_not_hold_up_the_first",
    believes="prefills come before decodes, as in the first engines",
    name="prefill-first",
)
mutant(
    "                i += 1\n",
    "                i += 1\n                if request.num_computed_tokens < request.num_prompt_tokens:\n"
    "                    break\n",
    caught_by="test_every_step_deals_out_its_budget_in_order",
    believes="one prefill a step is enough",
    name="one-prefill-a-step",
)
mutant(
    "n = min(request.num_tokens - computed, cap)",
    "n = min(request.num_prompt_tokens - computed, cap) or 1",
    caught_by="test_resuming_computes_prompt_and_output_again",
    believes="a resumed request has to compute its prompt again",
    name="resumes-the-prompt-only",
)
mutant(
    PLAN,
    "            table = blocks.block_tables[request]\n"
    "            blocks.cache_full_blocks(request, len(table) * blocks.block_size)\n",
    caught_by="test_a_chunk_publishes_its_own_blocks_and_no_more",
    believes="every block of the table is full",
    name="publishes-the-whole-table",
)
mutant(
    ALLOCATE,
    ADOPT + ALLOCATE,
    caught_by="TestRandomTrafficThroughSchedule",
    believes="the prefix is there whether or not the rest fits",
    name="adopts-before-it-fits-in-traffic",
)
mutant(
    "n > budget and not",
    "request.num_tokens - before > budget and not",
    caught_by="test_chunked_prefill_off_only_what_is_not_cached_has_to_fit",
    believes="with chunked prefill off the whole prompt must fit what is left of the budget, cached or not",
    name="cached-tokens-must-fit-too",
)
