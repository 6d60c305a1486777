"""Wrong answers of chapter 31: write_kv and ReferenceBackend.forward."""

from tests.mutants import mutant

FORWARD = "ReferenceBackend.forward"

mutant(
    "write_kv",
    "num_slots - 1, slot_mapping)",
    "num_slots - 1 - k_cache.shape[1], slot_mapping)",
    caught_by="test_padding_lands_in_scratch_and_nowhere_else",
    believes="the last slot of the pool is free for padding",
    name="padding-in-the-last-real-slot",
)
mutant(
    "write_kv",
    "torch.where(slot_mapping < 0, num_slots - 1, slot_mapping)",
    "slot_mapping.clamp(min=0)",
    caught_by="test_padding_lands_in_scratch_and_nowhere_else",
    believes="slot 0 is nobody's",
    name="padding-in-slot-zero",
)
mutant(
    "write_kv",
    "    slots = torch.where(slot_mapping < 0, num_slots - 1, slot_mapping)\n",
    "    keep = slot_mapping >= 0\n    slots, k, v = slot_mapping[keep], k[keep], v[keep]\n",
    caught_by="test_nothing_waits_for_the_device",
    believes="a boolean mask costs nothing",
    name="boolean-mask",
)
mutant(
    "write_kv",
    "        cache.view(num_slots, *cache.shape[2:]).index_copy_(0, slots, new.to(cache.dtype))",
    "        for row in range(slots.shape[0]):\n"
    "            flat = cache.view(num_slots, *cache.shape[2:])\n"
    "            flat.index_copy_(0, slots[row : row + 1], new[row : row + 1].to(cache.dtype))",
    caught_by="test_one_scatter_whatever_the_number_of_rows",
    believes="a loop is as good as one scatter",
    name="loop-over-rows",
)
mutant(
    "write_kv",
    "        cache.view(num_slots, *cache.shape[2:]).index_copy_(0, slots, new.to(cache.dtype))",
    "        cache[slots % cache.shape[0], slots // cache.shape[0]] = new.to(cache.dtype)",
    caught_by="test_each_row_lands_in_its_slot",
    believes="the offset comes first",
    name="block-and-offset-swapped",
)
mutant(
    "write_kv",
    "((k_cache, k), (v_cache, v))",
    "((k_cache, k), (v_cache, k))",
    caught_by="test_each_row_lands_in_its_slot",
    believes="K twice, by slip",
    name="k-into-v",
)
mutant(
    "write_kv",
    "        cache.view(num_slots, *cache.shape[2:]).index_copy_(0, slots, new.to(cache.dtype))",
    "        cache.view(num_slots, *cache.shape[2:]).index_add_(0, slots, new.to(cache.dtype))",
    caught_by="test_each_row_lands_in_its_slot",
    believes="slots are zero before they are written",
    name="adds-to-what-was-there",
)
mutant(
    "write_kv",
    "new.to(cache.dtype))",
    "new.half().to(cache.dtype))",
    caught_by="test_each_row_lands_in_its_slot",
    believes="pools are half precision",
    name="always-half",
)
mutant(
    "write_kv",
    "cache.view(num_slots, *cache.shape[2:]).index_copy_",
    "cache.clone().view(num_slots, *cache.shape[2:]).index_copy_",
    caught_by="test_each_row_lands_in_its_slot",
    believes="a copy is returned by reference",
    name="writes-to-a-copy",
)
mutant(
    FORWARD,
    "q_pos = k_pos[s - (rows.stop - rows.start) :]",
    "q_pos = k_pos[: rows.stop - rows.start]",
    caught_by="test_queries_of_a_later_chunk_stand_at_the_end_of_the_context",
    believes="the rows of a step are its first positions",
    name="queries-at-the-start",
)
mutant(
    FORWARD,
    "q_pos = k_pos[s - (rows.stop - rows.start) :]",
    "q_pos = k_pos[s - (rows.stop - rows.start) :] - 1",
    caught_by="test_queries_of_a_later_chunk_stand_at_the_end_of_the_context",
    believes="a token does not see itself",
    name="not-itself",
)
mutant(
    FORWARD,
    "q_pos = k_pos[s - (rows.stop - rows.start) :]",
    "q_pos = (k_pos * 0 + s - 1)[s - (rows.stop - rows.start) :]",
    caught_by="test_queries_of_a_later_chunk_stand_at_the_end_of_the_context",
    believes="all rows of a chunk see the whole context",
    name="no-causality-in-a-chunk",
)
mutant(
    FORWARD,
    "meta.block_table[r, : -(-s // meta.block_size)].long()",
    "meta.block_table[r, : -(-s // meta.block_size)].long().sort().values",
    caught_by="test_physical_blocks_may_be_in_any_order",
    believes="blocks are handed out in rising order",
    name="sorted-blocks",
)
mutant(
    FORWARD,
    "meta.block_table[r, : -(-s // meta.block_size)].long()",
    "torch.arange(-(-s // meta.block_size)) + int(meta.block_table[r, 0])",
    caught_by="test_physical_blocks_may_be_in_any_order",
    believes="the blocks of a request lie one after the other",
    name="contiguous-blocks",
)
mutant(
    FORWARD,
    "            k, v = (pool[blocks].flatten(0, 1)[None, :s].transpose(1, 2) for pool in cache)  # [1, Hkv, s, D]\n"
    "            k_pos = torch.arange(s, device=q.device)\n"
    "            q_pos = k_pos[s - (rows.stop - rows.start) :]\n",
    "            k, v = (pool[blocks].flatten(0, 1)[None].transpose(1, 2) for pool in cache)\n"
    "            k_pos = torch.arange(k.shape[2], device=q.device)\n"
    "            q_pos = torch.arange(s - (rows.stop - rows.start), s)\n",
    caught_by="test_every_row_attends_to_its_own_context",
    believes="the causal mask hides what lies past the context (0 * NaN is NaN)",
    name="reads-past-the-context",
)
mutant(
    FORWARD,
    "            if s == 0:\n                continue\n",
    "            if s == 0:\n                out[starts[r]] = q[starts[r]]\n                continue\n",
    caught_by="test_padding_rows_are_zero",
    believes="nobody reads padding rows",
    name="padding-not-zero",
)
mutant(
    FORWARD,
    "k_pos > q_pos[:, None] - window if window > 0 else None",
    "k_pos >= q_pos[:, None] - window if window > 0 else None",
    caught_by="test_a_window_shows_a_query_the_last_keys_only",
    believes="a window of w shows w keys before the query",
    name="window-one-too-wide",
)
mutant(
    FORWARD,
    "k_pos > q_pos[:, None] - window if window > 0 else None",
    "None",
    caught_by="test_a_window_shows_a_query_the_last_keys_only",
    believes="windows are somebody else's concern",
    name="window-ignored",
)
mutant(
    FORWARD,
    "k_pos > q_pos[:, None] - window if window > 0 else None",
    "k_pos >= s - window if window > 0 else None",
    caught_by="test_a_window_shows_a_query_the_last_keys_only",
    believes="all rows of a chunk share a window",
    name="window-of-the-last-row",
)
mutant(
    FORWARD,
    "allowed, scale)",
    "allowed)",
    caught_by="test_the_scale_is_the_callers",
    believes="the scale is always D ** -0.5",
    name="scale-ignored",
)
mutant(
    FORWARD,
    "out = torch.zeros_like(q)",
    "out = torch.zeros_like(q, dtype=torch.float32)",
    caught_by="test_the_result_has_the_dtype_of_q",
    believes="attention results are float32",
    name="float32-result",
)
mutant(
    FORWARD,
    "rows = slice(starts[r], starts[r + 1])",
    "rows = slice(starts[r], starts[r] + 1)",
    caught_by="test_every_row_attends_to_its_own_context",
    believes="a request has one row",
    name="decodes-only",
)
