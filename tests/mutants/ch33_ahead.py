"""Wrong answers of chapter 33's second half: the persistent batch, static buffers, one step ahead."""

from tests.mutants import mutant, scaffold_mutant


def wrong(exercise, name, old, new, caught_by, believes):
    mutant(exercise, old, new, caught_by=caught_by, believes=believes, name=name)


COLUMN, GREW = "test_a_column_for_each_request", "test_a_table_that_grew_is_updated_cell_by_cell"
STALE, LIFE = "test_nothing_of_a_larger_batch_remains", "test_a_long_life"
wrong("Rows.fill", "stale-columns", "packed[:] = 0", "packed[:, :count] = 0", STALE, "padding is nobody's business")
wrong("Rows.fill", "stale-updates", "packed[Field.CELL] = self.unused", "packed[Field.CELL, :count] = self.unused",
      STALE, "only real columns have cells")  # fmt: skip
wrong("Rows.fill", "padding-is-position-0", "packed[Field.POSITION] = packed[Field.SOURCE] = -1",
      "packed[Field.SOURCE] = -1", STALE, "position 0 stands for padding")  # fmt: skip
wrong("Rows.fill", "same-length-same-table", "if row is None or self.table_of[row] is not table:", "if row is None:",
      "test_a_request_with_another_block_table_is_entered_anew", "a request keeps its blocks for life")  # fmt: skip
wrong("Rows.fill", "equal-table", "self.table_of[row] is not table", "self.known[row] > len(table)",
      "test_a_request_with_another_block_table_is_entered_anew", "only a shorter table is a new one")  # fmt: skip
wrong("Rows.fill", "newest-block-only", "cells += range(row * self.width + known, row * self.width + len(table))\n"
      "                    blocks += table[known:]", "cells += [row * self.width + len(table) - 1]\n"
      "                    blocks += table[-1:]", GREW, "a table grows by one block a step")  # fmt: skip
wrong("Rows.fill", "known-stays", "                    self.known[row] = len(table)\n", "", GREW,
      "the tables remember what they know")  # fmt: skip
wrong("Rows.fill", "more-than-fit", "if len(cells) + len(table) - known > size:", "if False:",
      "test_more_updates_than_columns", "there are always columns enough")  # fmt: skip
wrong("Rows.fill", "place-off-by-one", "real[Field.POSITION] + 1 - self.prompts[chosen]",
      "real[Field.POSITION] - self.prompts[chosen]", COLUMN, "the place sampled is the place computed")  # fmt: skip
wrong("Rows.fill", "heat-as-a-number", "self.heats[chosen].view(np.int64)", "self.heats[chosen]",
      "test_temperatures_travel_as_the_bits_of_a_float64", "an integer array takes a float as it is")  # fmt: skip
wrong("Rows.fill", "heat-in-float32", "self.heats[chosen].view(np.int64)",
      "self.heats[chosen].astype(np.float32).view(np.int32)", "test_temperatures_travel_as_the_bits_of_a_float64",
      "float32 bits will do")  # fmt: skip
wrong("Rows.fill", "rows-in-order", "real[Field.ROW], real[Field.TOKEN] = chosen, tokens",
      "real[Field.ROW], real[Field.TOKEN] = range(count), tokens", "test_columns_follow_the_batch_and_not_the_rows",
      "column i is row i")  # fmt: skip
wrong("Rows.fill", "no-sources", "positions, sources", "positions, -1",
      "test_sources_say_where_a_placeholder_gets_its_value", "the host knows every token")  # fmt: skip
wrong("Rows.fill", "own-temperature", "row = self.enter(request, table, heat_of(request), block_tables)",
      "row = self.enter(request, table, heat_of(request) and request.params.temperature, block_tables)",
      "test_temperatures_travel_as_the_bits_of_a_float64", "the request's own temperature is the device's")  # fmt: skip

SLOT, TOKENS = "test_a_token_goes_to_the_slot_of_its_position", "test_tokens_come_from_the_host_or_from_the_step_before"
PADDING = "test_padding_is_stored_nowhere_and_attends_to_nothing"
OPERATIONS = "test_the_same_operations_whatever_the_numbers_are"
wrong("decode_inputs", "no-updates", "tables[packed[Field.CELL]] = packed[Field.BLOCK].int()\n",
      "tables = tables.clone()\n    tables[packed[Field.CELL]] = packed[Field.BLOCK].int()\n",
      "test_updates_come_before_anything_is_read", "updates are for this step only")  # fmt: skip
wrong("decode_inputs", "padding-writes-slot-0",
      "torch.where(padding, -1, blocks * block_size + positions % block_size)",
      "blocks * block_size + positions % block_size", PADDING, "what padding writes is harmless")  # fmt: skip
wrong("decode_inputs", "padding-sees-a-key", "(position + 1).int()", "(positions + 1).int()", PADDING,
      "padding has position 0, so length 1")  # fmt: skip
wrong("decode_inputs", "length-off-by-one", "(position + 1).int()", "positions.int()", SLOT,
      "a token does not see itself")  # fmt: skip
wrong("decode_inputs", "source-0-is-none", "torch.where(source < 0,", "torch.where(source <= 0,", TOKENS,
      "0 is no source")  # fmt: skip
wrong("decode_inputs", "own-column", "previous[source.clamp(min=0)]", "previous[:1].expand_as(source)", TOKENS,
      "the step before sampled one token")  # fmt: skip
wrong("decode_inputs", "column-for-row", "tables[:-1].view(-1, width)[packed[Field.ROW]]",
      "tables[:-1].view(-1, width)[torch.arange(len(position), device=tables.device)]", "test_rows_in_any_order",
      "column i has row i")  # fmt: skip
wrong("decode_inputs", "no-offset", "blocks * block_size + positions % block_size", "blocks * block_size", SLOT,
      "the slot is the block")  # fmt: skip
wrong("decode_inputs", "block-of-the-length", "positions // block_size)[:, None]",
      "(positions + 1) // block_size).clamp(max=width - 1)[:, None]", SLOT,
      "the block is that of the length, not of the position")  # fmt: skip
wrong("decode_inputs", "a-look-at-the-padding", "padding, positions = position < 0, position.clamp(min=0)",
      "padding, positions = position < 0, position.clamp(min=0)\n"
      "    if padding.any():\n        positions = positions + 0",
      OPERATIONS, "a condition costs nothing")  # fmt: skip
wrong("decode_inputs", "a-boolean-index",
      "tokens = torch.where(source < 0, packed[Field.TOKEN], previous[source.clamp(min=0)])",
      "tokens = packed[Field.TOKEN].clone()\n    tokens[source >= 0] = previous[source[source >= 0]]", OPERATIONS,
      "a mask as index has a shape that one can record")  # fmt: skip

STEP, COLLECT = "OverlappedCore.step", "OverlappedCore.collect"
FIRST = "test_a_step_launches_before_it_reads"
HELD = "test_blocks_of_a_stopped_request_wait_for_the_flight_that_writes_them"
IN_AIR, KNOWN = "test_a_failed_launch_leaves_what_is_in_the_air", "test_a_known_end_costs_no_extra_token"
PREEMPT = "test_nobody_is_preempted_while_a_flight_is_in_the_air"
wrong(STEP, "waits-for-each", "self.collect() if len(self.flights) > 1 else []", "self.collect()", FIRST,
      "a launch may be collected at once")  # fmt: skip
wrong(STEP, "collects-first", "out = self.scheduler.schedule()", "early = self.collect()\n            "
      "out = self.scheduler.schedule()", FIRST, "what is in the air is read before the next launch")  # fmt: skip
wrong(STEP, "preempts-in-flight", "if self.flights and self.may_preempt():", "if False:", PREEMPT,
      "a victim's blocks may be given away at once")  # fmt: skip
wrong(STEP, "always-careful", "if self.flights and self.may_preempt():", "if self.flights:",
      "test_the_core_goes_on_ahead_where_blocks_last", "waiting first is safe, and so it is best")  # fmt: skip
wrong(STEP, "empty-returns-nothing", "if out.empty:\n                return self.collect()",
      "if out.empty:\n                return []", FIRST, "nothing planned, nothing to do")  # fmt: skip
wrong(STEP, "no-undo", "self.scheduler.undo(out, swapped_out=swapped)\n", "pass\n", IN_AIR,
      "a plan that failed undoes itself")  # fmt: skip
wrong(STEP, "undo-forgets-flights", "self.scheduler.undo(out, swapped_out=swapped)\n",
      "self.scheduler.undo(out, swapped_out=swapped)\n                self.flights.clear()\n", IN_AIR,
      "a failed launch takes what is in the air with it")  # fmt: skip
wrong(STEP, "exceptions-only", "except BaseException:", "except Exception:", IN_AIR, "Ctrl-C is no failure")
wrong(STEP, "copies-trusted", "swapped_out=swapped", "swapped_out=True", "test_a_failed_step_that_swaps",
      "copies to the host cannot fail")  # fmt: skip
wrong(STEP, "counts-planned-twice", "self.num_preemptions += len(out.preempted)",
      "self.num_preemptions += len(out.admitted)", "test_counters", "whoever is admitted was preempted")  # fmt: skip
wrong(STEP, "not-atomic", "with self.atomic:", "if True:", "test_tokens_that_do_not_come",
      "nothing can break off in the middle")  # fmt: skip
wrong(STEP, "last-flight-left", "if not self.has_unfinished:", "if False:",
      "test_a_stop_is_noticed_one_step_late_and_costs_one_token", "somebody will call again")  # fmt: skip

wrong(COLLECT, "newest-judged", "self.check_stop(request, known - request.num_prompt_tokens)",
      "self.check_stop(request)", "test_every_way_to_stop_is_judged_by_the_very_token",
      "the newest token is the one that came")  # fmt: skip
wrong(COLLECT, "newest-placeholder", "request.token_ids[known] = tokens[0]", "request.token_ids[-1] = tokens[0]", FIRST,
      "the newest placeholder is filled")  # fmt: skip
wrong(COLLECT, "uncounted", "            request.num_placeholders -= 1\n", "", FIRST, "placeholders count themselves")
wrong(COLLECT, "dead-get-tokens", "if not tokens or request.status.finished:", "if not tokens:",
      "test_a_stop_is_noticed_one_step_late_and_costs_one_token", "whoever flies gets its token")  # fmt: skip
wrong(COLLECT, "held-for-ever", "for request in flight.held:\n            self.blocks.free(request)\n", "pass\n", HELD,
      "blocks come back by themselves")  # fmt: skip
wrong(COLLECT, "freed-at-once", "self.end(request, status)", "self.end(request, status)\n                "
      "self.blocks.free(request)", HELD, "whoever has stopped needs no blocks")  # fmt: skip
wrong(COLLECT, "never-published", "elif (known + 1) % self.blocks.block_size == 0:", "elif False:",
      "test_a_block_is_published_when_its_last_token_is_known", "planning publishes all blocks")  # fmt: skip
wrong(COLLECT, "published-early", "self.blocks.cache_full_blocks(request)",
      "self.blocks.cache_full_blocks(request, known - 1)", "test_a_block_is_published_when_its_last_token_is_known",
      "the token that just came is not in its block")  # fmt: skip
wrong(COLLECT, "newest-flight", "self.flights.popleft()", "self.flights.pop()", FIRST, "the newest flight is read")
wrong(COLLECT, "none-for-nothing", "return []", "return None",
      "test_nothing_in_the_air_is_nothing_to_collect", "nothing is None")  # fmt: skip
wrong(COLLECT, "not-noted", "self.atomic.before.append((request, known))", "pass",
      "test_an_interrupt_at_each_line_of_one_step", "a commit cannot be interrupted")  # fmt: skip
wrong(COLLECT, "outputs-in-mid-prompt", "if not tokens or request.status.finished:\n                continue",
      "if request.status.finished:\n                continue\n            if not tokens:\n"
      "                outputs.append(self.output(request, tokens))\n                continue",
      "test_chunks_and_queues", "everybody in the flight has an output")  # fmt: skip

GRAPHS, OVERLAP = "engine/serve/graphs.py", "engine/serve/overlap.py"
scaffold_mutant(GRAPHS, "        if self._launching:\n            self._recover()\n", "",
                "test_a_sampler_that_raises_now_and_then", "a launch that raised has changed nothing", "no-recovery")
scaffold_mutant(OVERLAP, "if not self.has_unfinished:  # nobody", "if False:  # nobody",
                "test_an_abort_of_everybody_leaves_nothing_in_the_air",
                "somebody calls step after the last abort", "abort-leaves-a-flight")  # fmt: skip
scaffold_mutant(OVERLAP, "free=not flights", "free=True", HELD,
                "blocks of the finished are free at once", "free-at-once")
scaffold_mutant(OVERLAP, "            if full or request.num_output_tokens >= request.params.max_tokens:\n"
                "                self.scheduler.retire(request)\n", "", KNOWN, "lengths end as stops do", "no-retire")
scaffold_mutant("engine/serve/scheduler.py", "            while request.token_ids[-1] < 0:",
                "            for _ in range(request.num_placeholders):", "test_an_interrupt_at_each_line_of_one_step",
                "placeholders and their count never differ", "placeholders-by-count")  # fmt: skip
