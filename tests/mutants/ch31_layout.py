"""Wrong answers of chapter 31: build_batch."""

from tests.mutants import mutant

SLOTS = "table[p // block_size] * block_size + p % block_size"

mutant(
    "build_batch",
    SLOTS,
    "table[(p - 1) // block_size] * block_size + p % block_size",
    caught_by="test_slots_at_the_edges_of_blocks",
    believes="a block begins one position later",
    name="slot-off-by-one-at-a-block-edge",
)
mutant(
    "build_batch",
    SLOTS,
    "table[(p - start) // block_size] * block_size + p % block_size",
    caught_by="test_slots_at_the_edges_of_blocks",
    believes="a chunk begins in the first block of its table",
    name="block-of-the-row-in-the-chunk",
)
mutant(
    "build_batch",
    SLOTS,
    "table[start // block_size] * block_size + start % block_size + p - start",
    caught_by="test_slots_at_the_edges_of_blocks",
    believes="the blocks of a request lie one after the other",
    name="contiguous-blocks",
)
mutant(
    "build_batch",
    SLOTS,
    "table[p // block_size] + p % block_size",
    caught_by="test_random_batches_row_by_row",
    believes="a block id is a slot",
    name="block-id-as-slot",
)
mutant(
    "build_batch",
    "positions.append(p)",
    "positions.append(p - start)",
    caught_by="test_random_batches_row_by_row",
    believes="positions count from the start of the chunk",
    name="positions-from-zero",
)
mutant(
    "build_batch",
    "        seq_lens.append(end)\n",
    "        seq_lens.append(request.num_tokens)\n",
    caught_by="test_random_batches_row_by_row",
    believes="the length of a sequence is how many tokens are known",
    name="seq-len-of-known-tokens",
)
mutant(
    "build_batch",
    "        seq_lens.append(end)\n",
    "        seq_lens.append(start)\n",
    caught_by="test_random_batches_row_by_row",
    believes="the pool holds what was computed before the step",
    name="seq-len-without-this-step",
)
mutant(
    "build_batch",
    "first = max(start, known - 1)",
    "first = end - 1",
    caught_by="test_a_mid_prompt_chunk_needs_no_logits",
    believes="the last row of every request is sampled",
    name="logits-of-a-mid-prompt-row",
)
mutant(
    "build_batch",
    "first = max(start, known - 1)",
    "first = max(start, request.num_tokens_with_spec - 1)",
    caught_by="test_drafts_are_rows_that_all_need_logits",
    believes="only the last draft needs logits",
    name="logits-of-the-last-draft-only",
)
mutant(
    "build_batch",
    "first = max(start, known - 1)",
    "first = max(start, known)",
    caught_by="test_drafts_are_rows_that_all_need_logits",
    believes="the row of the newest token predicts nothing new",
    name="logits-of-drafts-only",
)
mutant(
    "build_batch",
    "first = max(start, known - 1)",
    "first = max(start, request.num_prompt_tokens - 1)",
    caught_by="test_random_batches_row_by_row",
    believes="all output tokens need logits, also when they are recomputed",
    name="logits-of-recomputed-output",
)
mutant(
    "build_batch",
    "sampled_rows += range(row + first, row + end)",
    "sampled_rows += range(first - start, end - start)",
    caught_by="test_random_batches_row_by_row",
    believes="a row is numbered within its request",
    name="rows-within-the-request",
)
mutant(
    "build_batch",
    "            input_ids += request.spec_token_ids[max(0, start - known) : end - known]\n",
    "            input_ids += [0] * (end - max(start, known))\n",
    caught_by="test_drafts_are_rows_that_all_need_logits",
    believes="drafts are no input",
    name="drafts-left-out",
)
mutant(
    "build_batch",
    "request.params.prompt_logprobs is not None",
    "request.params.prompt_logprobs",
    caught_by="test_prompt_logprobs_need_the_rows_before_each_prompt_token",
    believes="prompt_logprobs=0 asks for none",
    name="zero-prompt-logprobs",
)
mutant(
    "build_batch",
    "last = min(end, request.num_prompt_tokens - 1)",
    "last = min(end, request.num_prompt_tokens)",
    caught_by="test_prompt_logprobs_need_the_rows_before_each_prompt_token",
    believes="the last prompt row predicts a prompt token",
    name="one-prompt-row-too-many",
)
mutant(
    "build_batch",
    "int_tensor(sampled_rows + prompt_rows,",
    "int_tensor(sorted(sampled_rows + prompt_rows),",
    caught_by="test_prompt_logprobs_need_the_rows_before_each_prompt_token",
    believes="rows stay in the order of the batch",
    name="prompt-rows-among-the-others",
)
mutant(
    "build_batch",
    "        slots.append(-1)\n",
    "        slots.append(0)\n",
    caught_by="test_padding_is_dummy_requests_of_one_row",
    believes="slot 0 is nobody's",
    name="padding-in-slot-zero",
)
mutant(
    "build_batch",
    "        seq_lens.append(0)\n",
    "        seq_lens.append(1)\n",
    caught_by="test_padding_is_dummy_requests_of_one_row",
    believes="a dummy request has one token",
    name="padding-of-length-one",
)
mutant(
    "build_batch",
    "range((pad_to or 0) - len(scheduled))",
    "range((pad_to or 0) - len(input_ids))",
    caught_by="test_padding_is_dummy_requests_of_one_row",
    believes="pad_to counts rows",
    name="pads-rows",
)
mutant(
    "build_batch",
    "if not 1 <= n <= request.num_tokens_with_spec - start:",
    "if not 1 <= n <= request.num_tokens - start:",
    caught_by="test_drafts_are_rows_that_all_need_logits",
    believes="only known tokens can be scheduled",
    name="refuses-drafts",
)
mutant(
    "build_batch",
    "if not 1 <= n <= request.num_tokens_with_spec - start:",
    "if n > request.num_tokens_with_spec - start:",
    caught_by="test_impossible_numbers_of_tokens_name_the_request",
    believes="a request may sit out a step inside the batch",
    name="accepts-zero",
)
mutant(
    "build_batch",
    "if end > len(table) * block_size:",
    "if end >= len(table) * block_size:",
    caught_by="test_a_table_that_is_too_short_names_the_request",
    believes="a table must have a free slot left",
    name="table-must-not-be-full",
)
mutant(
    "build_batch",
    "tables.append((table, -(-end // block_size)))",
    "tables.append((table, end // block_size))",
    caught_by="test_random_batches_row_by_row",
    believes="a block that is not full is not read",
    name="last-block-missing",
)
mutant(
    "build_batch",
    "block_table=table_tensor(tables, device),",
    "block_table=table_tensor(tables, device).long(),",
    caught_by="test_dtypes_are_those_the_kernels_read",
    believes="any integer dtype will do",
    name="wide-block-table",
)
mutant(
    "build_batch",
    "max_query_len=max((b - a for a, b in zip(starts, starts[1:], strict=False)), default=0)",
    "max_query_len=max((n for _, n in scheduled[:1]), default=0)",
    caught_by="test_random_batches_row_by_row",
    believes="the first request is the longest",
    name="max-query-len-of-the-first",
)
