"""Wrong answers of chapter 32: what is written in PyTorch, and the merging and storing kernels."""

from tests.mutants import mutant, scaffold_mutant


def wrong(exercise, name, old, new, caught_by, believes):
    mutant(exercise, old, new, caught_by=caught_by, believes=believes, name=name)


TILES = "test_tiles_give_what_a_softmax_over_all_keys_gives"
UNSEEN = "test_unseen_keys_have_no_influence"

wrong("attend_tiles", "no-scale", "k.float().T * scale)", "k.float().T)", "test_the_scale_counts_once",
      "scores are plain products")  # fmt: skip
wrong("attend_tiles", "sum-not-shrunk", "total = total * shrink + ", "total = total + ", TILES,
      "the sum is right whatever the largest score was")  # fmt: skip
wrong("attend_tiles", "values-not-shrunk", "out = out * shrink[:, None] + ", "out = out + ", TILES,
      "only the sum has to shrink")  # fmt: skip
wrong("attend_tiles", "largest-of-the-tile", "torch.maximum(largest, scores.amax(dim=1))", "scores.amax(dim=1)",
      "test_scores_of_any_size", "the largest of the newest tile will do")  # fmt: skip
wrong("attend_tiles", "no-largest", "base = new.masked_fill(new == -torch.inf, 0)",
      "new = base = torch.zeros_like(new)", "test_scores_of_any_size", "exp of a score fits into float32")  # fmt: skip
wrong("attend_tiles", "minus-infinity-taken-off", "base = new.masked_fill(new == -torch.inf, 0)", "base = new", UNSEEN,
      "-inf - -inf is 0")  # fmt: skip
wrong("attend_tiles", "unseen-score-zero", ".masked_fill(~seen, -torch.inf)", ".masked_fill(~seen, 0)", UNSEEN,
      "a score of 0 is no weight")  # fmt: skip
wrong("attend_tiles", "nan-values", "v.float().masked_fill(~seen.any(dim=0)[:, None], 0)", "v.float()", UNSEEN,
      "a weight of 0 hides any value")  # fmt: skip
wrong("attend_tiles", "lse-without-largest", "largest + total.log()", "total.log()", TILES,
      "the lse is the log of the sum kept")  # fmt: skip
wrong("attend_tiles", "divided-by-zero", "total.clamp(min=torch.finfo(torch.float32).tiny)", "total",
      "test_a_query_that_sees_nothing", "every query sees a key")  # fmt: skip
wrong("attend_tiles", "all-at-once", "for k, v, seen in tiles:",
      "tiles = list(tiles)\n    for k, v, seen in [[torch.cat(x, -1 - (x[0].dtype != torch.bool)) "
      "for x in zip(*tiles)]] if tiles else []:", TILES,
      "tiles may be collected first, and then be attended to at once")  # fmt: skip
wrong("attend_tiles", "half-precision", "scores = (q @ k.float().T * scale)",
      "scores = (q.to(k.dtype) @ k.T * scale).float()", "test_half_precision_is_computed_in_float32",
      "products may be rounded to the type of the keys")  # fmt: skip

COUNT = "test_parts_count_by_what_they_saw"
wrong("merge_splits", "plain-mean", "weights = (lses - base).exp()", "weights = (lses > -torch.inf).float()", COUNT,
      "all parts count alike")  # fmt: skip
wrong("merge_splits", "lse-as-weight", "weights = (lses - base).exp()", "weights = lses", COUNT,
      "an lse is a weight")  # fmt: skip
wrong("merge_splits", "no-largest", "base = largest.masked_fill(largest == -torch.inf, 0)",
      "base = torch.zeros_like(largest)", "test_large_lses", "exp of an lse fits into float32")  # fmt: skip
wrong("merge_splits", "minus-infinity-taken-off", "largest.masked_fill(largest == -torch.inf, 0)", "largest",
      "test_nobody_saw_anything", "some part has seen something")  # fmt: skip
wrong("merge_splits", "empty-counts-as-zero", "largest = lses.amax(dim=0)",
      "lses = lses.masked_fill(lses == -torch.inf, 0)\n    largest = lses.amax(dim=0)",
      "test_a_part_that_saw_nothing_has_no_weight", "the lse of nothing is 0")  # fmt: skip
wrong("merge_splits", "nan-outs", "outs.masked_fill(lses[..., None] == -torch.inf, 0)", "outs",
      "test_a_part_that_saw_nothing_has_no_weight", "a weight of 0 hides any out")  # fmt: skip
wrong("merge_splits", "not-divided", " / total.clamp(min=1e-30)[:, None]", "", COUNT,
      "the outs are normalised already")  # fmt: skip
wrong("merge_splits", "lse-without-largest", "base + total.log()", "total.log()", COUNT,
      "the lse is the log of the sum of weights")  # fmt: skip
wrong("merge_splits", "divided-by-zero", "total.clamp(min=1e-30)[:, None]", "total[:, None]",
      "test_nobody_saw_anything", "the sum is never 0")  # fmt: skip

GATHER = "test_padded_gathers_give_every_row_its_own_context"
FORWARD = "SdpaBackend.forward"
wrong(FORWARD, "no-scale", ", scale=scale)", ")", "test_padded_gathers_take_the_callers_scale",
      "the default scale is everybody's")  # fmt: skip
wrong(FORWARD, "no-mask", "attn_mask=mask", "attn_mask=None", GATHER, "rows of a group see the same keys")
wrong(FORWARD, "no-window", "self.plans(meta, window, group)", "self.plans(meta, 0, group)",
      "test_padded_gathers_in_a_window", "the mask of the context will do")  # fmt: skip
wrong(FORWARD, "unused-left-in", "gather(pool, blocks, unused)", "gather(pool, blocks, unused[:0])", GATHER,
      "the mask hides what lies past a context")  # fmt: skip
wrong(FORWARD, "heads-dealt-out", "q[rows].unflatten(2, (kv_heads, group)).transpose(1, 2)",
      "q[rows].unflatten(2, (group, kv_heads)).movedim(3, 1)", "test_padded_gathers_of_grouped_heads",
      "query head h has KV head h % Hkv")  # fmt: skip
wrong(FORWARD, "head-by-head", ".transpose(1, 2).flatten(2, 3)", ".permute(0, 2, 3, 1, 4).flatten(2, 3)", GATHER,
      "all rows of a head, then those of the next")  # fmt: skip
wrong(FORWARD, "given-back-head-by-head", "result.unflatten(2, (-1, group)).transpose(1, 2)",
      "result.unflatten(2, (group, -1)).permute(0, 3, 1, 2, 4)", GATHER,
      "results come back all rows of a head, then those of the next")  # fmt: skip
wrong(FORWARD, "padding-left", "out = torch.zeros_like(q)", "out = q.clone()", GATHER,
      "rows that belong to nobody may hold anything")  # fmt: skip
wrong(FORWARD, "repeated", "result = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)",
      "g, k, v = q[rows].transpose(1, 2), k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)\n"
      "            result = F.scaled_dot_product_attention(g, k, v, attn_mask=mask[:, :, ::group], scale=scale)\n"
      "            result = result.unflatten(1, (kv_heads, group)).transpose(2, 3).flatten(2, 3)",
      "test_one_attention_call_for_a_group", "repeating K and V for the heads of a group is free")  # fmt: skip

STORE = "test_a_program_stores_a_row_in_its_slot"
PADDING = "test_padding_rows_are_stored_nowhere"
wrong("write_kernel", "before-the-pool", " & (slot >= 0)", "", PADDING, "a negative offset is no store")
wrong("write_kernel", "slot-zero", "used = (i < ROW) & (slot >= 0)",
      "used = i < ROW\n    slot = tl.maximum(slot, 0)", PADDING, "slot 0 is nobody's")  # fmt: skip
wrong("write_kernel", "runs-over", "used = (i < ROW) & (slot >= 0)", "used = (i < PADDED) & (slot >= 0)", STORE,
      "the power of two is the row")  # fmt: skip
wrong("write_kernel", "padded-slots", "v_cache + slot * ROW", "v_cache + slot * PADDED", STORE,
      "slots are a power of two apart")  # fmt: skip
wrong("write_kernel", "one-stride", "n * v_stride", "n * k_stride", "test_rows_may_lie_apart",
      "V lies as K does")  # fmt: skip
wrong("write_kernel", "no-stride", "k + n * k_stride", "k + n * ROW", "test_rows_may_lie_apart",
      "rows lie side by side")  # fmt: skip
wrong("write_kernel", "row-for-slot", "k_cache + slot * ROW", "k_cache + n * ROW", STORE, "row n goes to slot n")
wrong("write_kernel", "k-into-v", "tl.load(v + n * v_stride + i, used)", "tl.load(k + n * k_stride + i, used)", STORE,
      "K twice, by slip")  # fmt: skip

SHARES = "test_shares_count_by_what_they_saw"
EMPTY = "test_an_empty_share_has_no_weight"
wrong("merge_kernel", "no-largest", "tl.exp(lse - tl.where(largest > float(\"-inf\"), largest, 0.0))", "tl.exp(lse)",
      "test_large_lses_do_not_overflow", "exp of an lse fits into float32")  # fmt: skip
wrong("merge_kernel", "minus-infinity-taken-off", "tl.where(largest > float(\"-inf\"), largest, 0.0)", "largest",
      "test_a_row_without_any_key_becomes_zero", "some share has a key")  # fmt: skip
wrong("merge_kernel", "divided-by-zero", "tl.where(total > 0, total, 1.0)", "total",
      "test_a_row_without_any_key_becomes_zero", "the sum is never 0")  # fmt: skip
wrong("merge_kernel", "nan-outs", "parts = tl.where(weights[:, None] > 0, parts, 0.0)", "parts = parts * 1.0", EMPTY,
      "a weight of 0 hides any out")  # fmt: skip
wrong("merge_kernel", "empty-counts-as-zero", "    largest = tl.max(lse, 0)",
      "    lse = tl.where(lse > float(\"-inf\"), lse, 0.0)\n    largest = tl.max(lse, 0)", EMPTY,
      "the lse of nothing is 0")  # fmt: skip
wrong("merge_kernel", "padded-shares", "mask=s < SPLITS, other", "mask=s < PADDED, other", SHARES,
      "shares are a power of two")  # fmt: skip
wrong("merge_kernel", "mean", "tl.sum(parts * weights[:, None], 0)", "tl.sum(parts, 0)", SHARES,
      "all shares count alike")  # fmt: skip
wrong("merge_kernel", "not-divided", " / tl.where(total > 0, total, 1.0)", "", SHARES,
      "the outs are normalised already")  # fmt: skip
wrong("merge_kernel", "request-for-row", "place = row * HEADS + head", "place = r * HEADS + head",
      "test_merging_leaves_other_requests_alone", "request r has row r")  # fmt: skip
wrong("merge_kernel", "chunks-too", "if tl.load(query_start_loc + r + 1) - row != 1:",
      "if tl.load(query_start_loc + r + 1) - row < 1:",
      "test_merging_leaves_other_requests_alone", "every request has a decode row")  # fmt: skip
wrong("merge_kernel", "padded-width", "tl.store(out + place * WIDTH + d", "tl.store(out + place * COLS + d",
      "test_shares_of_any_width", "heads are a power of two apart")  # fmt: skip

scaffold_mutant("engine/serve/kernels/decode.py", "keys // TILE", "2 * keys // TILE",
                "test_shares_fill_the_processors_and_are_no_smaller_than_a_tile",
                "the more shares the better", "tiny-shares")  # fmt: skip
scaffold_mutant("engine/serve/kernels/decode.py", "min(4 * processors //", "min(processors //",
                "test_shares_fill_the_processors_and_are_no_smaller_than_a_tile",
                "one program a processor, rounded down", "few-programs")  # fmt: skip
scaffold_mutant("engine/serve/kernels/decode.py", "1 << max(0, most.bit_length() - 1)", "max(1, most)",
                "test_shares_fill_the_processors_and_are_no_smaller_than_a_tile",
                "any number of shares will do", "any-number")  # fmt: skip
scaffold_mutant("engine/serve/kernels/decode.py", " if splits > 1 else out  #", " if splits > 0 else out  #",
                "test_mixed_steps_through_the_backend", "a single share is merged as well", "one-share-lost")
scaffold_mutant("engine/serve/kernels/decode.py", "    if splits > 1:\n", "    if splits > 3:\n",
                "test_each_launch_has_its_own_rows", "few shares need no merge", "few-shares-not-merged")
scaffold_mutant("engine/serve/paged.py", "if not meta.decode_only:", "if meta.max_query_len > 9:",
                "test_the_core_gives_the_same_text_through_the_kernels",
                "short chunks are decodes", "chunks-forgotten")  # fmt: skip
scaffold_mutant("engine/serve/paged.py", "q.contiguous(), cache", "q, cache", "test_mixed_steps_through_the_backend",
                "rows of q lie side by side", "q-with-gaps")  # fmt: skip
scaffold_mutant("engine/serve/attention.py", "on_gpu and not triton_lacks()",
                "not triton_lacks()", "test_triton_needs_a_gpu_or_its_interpreter",
                "the interpreter is fast", "auto-interprets")  # fmt: skip
