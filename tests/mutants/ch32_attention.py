"""Wrong answers of chapter 32: decode_kernel and prefill_kernel."""

from tests.mutants import mutant


def decode(name, old, new, caught_by, believes):
    mutant("decode_kernel", old, new, caught_by=caught_by, believes=believes, name=name)


def prefill(name, old, new, caught_by, believes):
    mutant("prefill_kernel", old, new, caught_by=caught_by, believes=believes, name=name)


SHARE = "test_each_share_of_a_decode"
DISJOINT = "test_shares_are_disjoint_and_cover_the_context"
WINDOW = "test_a_decode_sees_its_window"
OTHERS = "test_a_decode_leaves_other_requests_alone"
BLOCK = "tl.load(block_table + r * table_stride + position // BLOCK, mask=seen, other=0).to(tl.int64)"

decode("no-scale", " * scale\n", "\n", "test_a_decode_takes_the_callers_scale", "scores are plain products")
decode("physical-order", BLOCK, "position // BLOCK", SHARE, "blocks lie one after the other")
decode("first-table", "block_table + r * table_stride + position", "block_table + position", SHARE,
       "there is one block table")  # fmt: skip
decode("no-offset", "block * BLOCK + position % BLOCK", "block * BLOCK", SHARE, "a block is a slot")
decode("offset-in-the-tile", "position % BLOCK", "t % BLOCK", SHARE, "tiles begin where blocks do")
decode("first-kv-head", "% BLOCK) * KV_HEADS + kv_head) * WIDTH", "% BLOCK) * KV_HEADS) * WIDTH", SHARE,
       "there is one KV head")  # fmt: skip
decode("heads-dealt-out", "kv_head * GROUP + g  #", "g * KV_HEADS + kv_head  #", SHARE,
       "query head h has KV head h % KV_HEADS")  # fmt: skip
decode("one-key-too-many", "(position < length)", "(position <= length)", SHARE, "length is the last position")
decode("last-key-lost", "(position < length)", "(position < length - 1)", SHARE, "a row does not see itself")
decode("everything-in-the-tile", "scores = tl.where(seen[None, :], scores, float(\"-inf\"))", "scores = scores + 0.0",
       SHARE, "what is not loaded is 0 and so without weight")  # fmt: skip
decode("window-too-long", "length - WINDOW, 0)", "length - 1 - WINDOW, 0)", WINDOW, "the row itself does not count")
decode("window-too-short", "length - WINDOW, 0)", "length + 1 - WINDOW, 0)", WINDOW, "the window ends before its edge")
decode("no-window-inside-a-tile", "(position >= first) & (position < length)", "position < length", WINDOW,
       "tiles out of sight are skipped, that is enough")  # fmt: skip
decode("nan-before-the-window", "loaded = seen[:, None] &", "loaded = (position < length)[:, None] &",
       "test_a_window_hides_even_nan", "a weight of 0 hides any value")  # fmt: skip
decode("shares-of-the-whole", "first_tile, end_tile = first // TILE,", "first_tile, end_tile = 0,", WINDOW,
       "shares are those of the whole context")  # fmt: skip
decode("rounded-down", "share = tl.cdiv(end_tile - first_tile, SPLITS)", "share = (end_tile - first_tile) // SPLITS",
       DISJOINT, "tiles divide evenly")  # fmt: skip
decode("overlapping", "end = tl.minimum(begin + share, end_tile)", "end = tl.minimum(begin + share + 1, end_tile)",
       DISJOINT, "the end is included")  # fmt: skip
decode("to-the-end", "end = tl.minimum(begin + share, end_tile)", "end = end_tile", DISJOINT,
       "each share ends with the context")  # fmt: skip
decode("sum-not-shrunk", "total = total * shrink + ", "total = total + ", DISJOINT, "the sum needs no shrinking")
decode("values-not-shrunk", "acc = acc * shrink[:, None] + ", "acc = acc + ", DISJOINT, "only the sum shrinks")
decode("no-largest", "new = tl.maximum(largest, tl.max(scores, 1))", "new = tl.maximum(largest, 0.0)",
       "test_a_decode_takes_the_callers_scale", "exp of a score fits into float32")  # fmt: skip
decode("lse-without-largest", "largest + tl.log(divisor)", "tl.log(divisor)", SHARE, "the lse is the log of the sum")
decode("empty-is-zero", "largest + tl.log(divisor)", "tl.where(total > 0, largest, 0.0) + tl.log(divisor)",
       "test_shares_without_keys", "the lse of nothing is 0")  # fmt: skip
decode("divided-by-zero", "divisor = tl.where(total > 0, total, 1.0)", "divisor = total",
       "test_shares_without_keys", "every share has a key")  # fmt: skip
decode("empty-not-stored", "acc, mask=real)", "acc, mask=real & (total > 0)[:, None])", "test_shares_without_keys",
       "nobody reads what a share without keys stores")  # fmt: skip
decode("not-divided", "acc = acc / divisor[:, None]", "acc = acc * 1.0", SHARE, "the merge divides")
decode("request-for-row", "heads = row * KV_HEADS", "heads = r * KV_HEADS", OTHERS, "request r has row r")
decode("chunks-too", "- row != 1:", "- row < 1:", OTHERS, "every request has a decode row")
decode("padded-group", "mask=g < GROUP)", "mask=g < ROWS)", SHARE, "a group is a power of two")

CHUNK = "test_each_row_of_a_chunk"
BEGIN = "test_a_chunk_may_begin_anywhere"
SEARCH = "test_the_tiles_of_a_request_are_found"
SEES = "test_a_chunk_sees_its_window"
UNSEEN = "test_tiles_that_no_row_sees_are_not_loaded"
TABLE = "tl.load(block_table + r * table_stride + position // BLOCK, position < end, other=0).to(tl.int64)"

prefill("no-scale", "(scale * 1.4426950408889634)", "1.4426950408889634", "test_a_chunk_takes_the_callers_scale",
        "scores are plain products")  # fmt: skip
prefill("exp2-for-exp", "(scale * 1.4426950408889634)", "scale", CHUNK, "2 ** x will do for e ** x")
prefill("begin-lost", "before = tl.load(seq_lens + r) - count", "before = 0", BEGIN, "a chunk begins its context")
prefill("one-too-far", "position[None, :] <= before + row[:, None]  #",
        "position[None, :] <= before + row[:, None] + 1  #", CHUNK, "a row sees the next key")  # fmt: skip
prefill("not-itself", "position[None, :] <= before + row[:, None]  #", "position[None, :] < before + row[:, None]  #",
        CHUNK, "a row does not see itself")  # fmt: skip
prefill("not-causal", "seen = position[None, :] <= before + row[:, None]",
        "seen = (position[None, :] < end) & (row[:, None] >= 0)", CHUNK, "all keys are in sight")  # fmt: skip
prefill("window-too-long", "> before + row[:, None] - WINDOW)", ">= before + row[:, None] - WINDOW)", SEES,
        "the row itself does not count")  # fmt: skip
prefill("begins-late", "before + first_row - WINDOW + 1, 0)", "before + first_row + QUERIES - WINDOW, 0)", SEES,
        "the window of the last row is everybody's")  # fmt: skip
prefill("no-window-inside-a-tile", "seen = seen & (position[None, :] > before + row[:, None] - WINDOW)",
        "seen = seen & (position[None, :] >= 0)", SEES, "tiles out of sight are skipped, that is enough")  # fmt: skip
prefill("first-tiles-looked-at", "tl.maximum(before + first_row - WINDOW + 1, 0) // TILE", "0", UNSEEN,
        "tiles before the window do no harm")  # fmt: skip
prefill("whole-context-looked-at", "end = before + tl.minimum(first_row + QUERIES, count)", "end = before + count",
        UNSEEN, "tiles above the diagonal do no harm")  # fmt: skip
prefill("end-in-the-chunk", "tl.minimum(first_row + QUERIES, count)", "first_row + QUERIES", CHUNK,
        "a tile is full of rows")  # fmt: skip
prefill("tiles-not-counted", "// QUERIES + middle <= number", "// QUERIES <= number", SEARCH,
        "a request begins with a new tile only where it fits")  # fmt: skip
prefill("before-only", "+ middle <= number", "+ middle < number", SEARCH, "tiles begin after their number")
prefill("first-row-lost", "(number - start // QUERIES - r) * QUERIES", "(number - start // QUERIES) * QUERIES", SEARCH,
        "the tiles of request r begin at its rows // QUERIES")  # fmt: skip
prefill("decodes-too", " | (count == 1)", "", CHUNK, "a single row is a chunk as well")
prefill("pairs-by-group", "m // PADDED, m % PADDED", "m // GROUP, m % GROUP", "test_a_program_has_the_rows_of_its_tile",
        "a group is a power of two")  # fmt: skip
prefill("rows-by-group", "m // PADDED, m % PADDED", "m // GROUP, m % PADDED", CHUNK, "a group is a power of two")
prefill("physical-order", TABLE, "position // BLOCK", CHUNK, "blocks lie one after the other")
prefill("no-offset", "block * BLOCK + position % BLOCK", "block * BLOCK", CHUNK, "a block is a slot")
prefill("first-kv-head", "% BLOCK) * KV_HEADS + kv_head) * WIDTH", "% BLOCK) * KV_HEADS) * WIDTH", CHUNK,
        "there is one KV head")  # fmt: skip
prefill("padded-group", "KV_HEADS + kv_head) * GROUP + head", "KV_HEADS + kv_head) * PADDED + head", CHUNK,
        "a group is a power of two")  # fmt: skip
prefill("nan-past-the-context", "loaded & (position < end)[:, None]", "loaded & (position >= 0)[:, None]", CHUNK,
        "a weight of 0 hides any value")  # fmt: skip
prefill("sum-not-shrunk", "total = total * shrink + ", "total = total + ", BEGIN, "the sum needs no shrinking")
prefill("values-not-shrunk", "v, acc * shrink[:, None], ", "v, acc, ", BEGIN, "only the sum shrinks")
prefill("minus-infinity-taken-off", "base = tl.where(new > float(\"-inf\"), new, 0.0)", "base = new", SEES,
        "each row sees something of each tile")  # fmt: skip
prefill("no-largest", "new = tl.maximum(largest, tl.max(scores, 1))", "new = tl.maximum(largest * 0.0, 0.0)",
        "test_a_chunk_takes_the_callers_scale", "exp of a score fits into float32")  # fmt: skip

# Two passes: tiles that every row sees whole, then those at the edge.
prefill("one-whole-tile-too-many", "edge_tile = 0, (before + first_row + 1) // TILE",
        "edge_tile = 0, tl.cdiv(before + first_row + 1, TILE)", CHUNK,
        "the tile of the first row is whole")  # fmt: skip
prefill("next-key-in-a-whole-tile", "(before + first_row + 1) // TILE", "(before + first_row + 2) // TILE", BEGIN,
        "the first row sees the key after its own")  # fmt: skip
prefill("whole-for-the-last-row", "(before + first_row + 1) // TILE", "end // TILE", BEGIN,
        "what the last row sees, all see")  # fmt: skip
prefill("edge-lost", "from_tile, to_tile = edge_tile, ", "from_tile, to_tile = edge_tile + 1, ", CHUNK,
        "the whole tiles include the edge")  # fmt: skip
prefill("whole-tiles-twice", "from_tile, to_tile = edge_tile, ", "from_tile, to_tile = begin_tile, ", BEGIN,
        "the second pass begins where the first did")  # fmt: skip
prefill("window-without-masks", "        edge_tile = begin_tile\n",
        "        edge_tile = tl.maximum(edge_tile, begin_tile)\n", SEES,
        "tiles below the diagonal are whole, in a window too")  # fmt: skip
prefill("last-number-plus-one", "tl.num_programs(0) - 1 - ", "tl.num_programs(0) - ", SEARCH,
        "the last program has the number of programs")  # fmt: skip
