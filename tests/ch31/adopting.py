"""BlockManager.find_cached_prefix and allocate_slots."""

import pytest

from engine.serve import blocks
from engine.serve.blocks import BlockManager
from tests.ch31.pools import (
    STATES,
    NamedBlocks,
    ask,
    busy_pool,
    checked_allocate,
    checked_find,
    free_in_order,
    give,
    leave_behind,
    state,
    take_back,
)
from tests.grading import expect, expect_equal, grades, rng

find = BlockManager.find_cached_prefix
allocate = BlockManager.allocate_slots


def random_tokens(salt, n):
    random = rng(salt)
    return [random.randrange(150_000) for _ in range(n)]


@grades(find)
def test_prefixes_are_found_as_by_comparing_tokens():
    """In random pools, against a search that compares whole prefixes with what the blocks hold."""
    for i in range(60):
        m, live, another = busy_pool(f"find {i}")
        for request in (*live, *(another(f"new{j}") for j in range(6))):
            checked_find(m, request)


@grades(find)
@pytest.mark.parametrize("size", [1, 3, 16])
def test_the_block_of_the_last_known_token_is_not_adopted(size):
    """Two full blocks of the same prompt are cached, three are; something must be left to compute (case 18)."""
    tokens = random_tokens("last token", 4 * size)
    m = NamedBlocks(9, size)
    leave_behind(m, tokens, [5, 2, 7, 1])
    for length in range(1, 4 * size + 1):
        got = checked_find(m, ask("again", tokens[:length]))
        message = f"prompt of {length} tokens in blocks of {size}: {len(got)} blocks leave nothing to compute"
        expect(len(got) * size < length, message, "the logits of its last token are needed", STATES)


@grades(find)
def test_the_search_stops_at_the_first_miss():
    tokens = random_tokens("first miss", 20)
    m = NamedBlocks(9, 4)
    leave_behind(m, tokens, [5, 2, 7, 1, 8])
    m.forget_hash(7)
    got = checked_find(m, ask("again", [*tokens, 1]))
    expect_equal(got, [5, 2], what="find_cached_prefix after its third block was evicted, block {i}", see=STATES)
    m.forget_hash(5)
    expect_equal(checked_find(m, ask("again", [*tokens, 1])), [], what="find_cached_prefix without a head", see=STATES)


@grades(find)
def test_blocks_in_use_are_found_as_well_as_free_ones():
    tokens = random_tokens("in use", 13)
    m = NamedBlocks(9, 4)
    leave_behind(m, tokens, [5, 2, 7, 1])
    give(m, ask("running", tokens[:8], 8), [5, 2], 2)
    expect_equal(checked_find(m, ask("again", tokens)), [5, 2, 7], what="block {i} of the prefix", see=STATES)


@grades(find)
def test_a_prompt_that_wants_logprobs_adopts_nothing():
    tokens = random_tokens("prompt logprobs", 13)
    m = NamedBlocks(9, 4)
    leave_behind(m, tokens, [5, 2, 7, 1])
    for wanted, expected in ((None, 3), (0, 0), (2, 0)):
        got = checked_find(m, ask("again", tokens, prompt_logprobs=wanted))
        expect_equal(len(got), expected, what=f"blocks found with prompt_logprobs={wanted}", see=STATES)


@grades(find)
def test_nothing_is_found_with_caching_off():
    tokens = random_tokens("off", 13)
    m = NamedBlocks(9, 4)
    leave_behind(m, tokens, [5, 2, 7, 1])
    m.enable_prefix_caching = False
    expect_equal(checked_find(m, ask("again", tokens)), [], what="find_cached_prefix with caching off", see=STATES)


@grades(find)
def test_a_resumed_request_finds_its_output_too():
    tokens = random_tokens("resume", 12)
    m = NamedBlocks(9, 4)
    leave_behind(m, tokens, [5, 2, 7])
    for known, expected in ((12, 2), (13, 3)):
        request = ask("resumed", tokens[:5], output=[*tokens, 1][5:known])
        what = f"blocks found for 5 prompt and {known - 5} output tokens"
        expect_equal(len(checked_find(m, request)), expected, what=what, see=STATES)


@grades(find)
def test_another_tenant_finds_nothing():
    tokens = random_tokens("tenant", 13)
    m = NamedBlocks(9, 4)
    leave_behind(m, tokens, [5, 2, 7, 1], key=("mine",))
    for key, expected in ((("mine",), 3), (("yours",), 0), ((), 0)):
        got = len(checked_find(m, ask("again", tokens, key=key)))
        expect_equal(got, expected, what=f"blocks cached under ('mine',) and found under {key}", see=STATES)


@grades(find)
def test_looking_twice_hashes_each_block_once(monkeypatch):
    calls = []
    monkeypatch.setattr(blocks, "hash_block", lambda *args: calls.append(args) or len(calls).to_bytes(16, "big"))
    m, request = BlockManager(9, 4), ask("r", random_tokens("hash once", 17))
    for _ in range(3):
        m.find_cached_prefix(request)
    message = f"find_cached_prefix, three times on 4 full blocks, computed {len(calls)} hashes"
    expect(len(calls) <= 4, message, "`block_hashes` computes each once and keeps it", STATES)


@grades(allocate)
def test_allocations_in_random_pools():
    for i in range(80):
        random = rng(f"allocate {i}")
        m, live, another = busy_pool(f"allocate {i}")
        for j in range(5):
            if live and random.random() < 0.5:
                request, cached = random.choice(live), None
                slack = (len(m.block_tables[request]) + m.num_free) * m.block_size - request.num_computed_tokens
            else:
                request = another(f"new{j}")
                names = m.block_hashes(request)[: (request.num_tokens - 1) // m.block_size]
                run = next((k for k, name in enumerate(names) if name not in m.cached), len(names))
                cached = [m.cached[name] for name in names[: random.choice([0, run, run])]]
                slack = (m.num_free + sum(m.ref_counts[b] > 0 for b in cached) - len(cached)) * m.block_size
            n = random.choice([1, random.randint(1, 3 * m.block_size), slack, slack + 1, slack - m.block_size + 1])
            checked_allocate(m, request, max(n, 1), cached)
            m.check()


@grades(allocate)
def test_three_cached_free_hits_and_two_new_blocks_need_five_free_ones():
    """With four free blocks, three of them the hits, there is one left for two (case 15)."""
    tokens = random_tokens("five", 18)
    for others, fits in ((5, False), (4, True)):
        m = NamedBlocks(9, 4)
        give(m, ask("running", tokens[::-1], 4 * others), range(others))
        leave_behind(m, tokens[:12], [6, 8, 7])
        got = checked_allocate(m, ask("new", tokens), 6, [6, 8, 7])
        what = f"allocate_slots with {9 - others} free blocks, for 3 cached-free hits and 2 new blocks"
        expect_equal(got, fits, what=what, hint="a cached-free block that is adopted is no longer free", see=STATES)


@grades(allocate)
def test_adopting_a_block_in_use_costs_nothing():
    tokens = random_tokens("free of charge", 14)
    m = NamedBlocks(4, 4)
    give(m, ask("running", tokens[:12], 12), [3, 1, 2], 3)
    checked_allocate(m, ask("new", tokens), 2, [3, 1, 2])
    expect_equal(m.ref_counts, [1, 2, 2, 2], what="references of block {i}", see=STATES)


@grades(allocate)
def test_the_last_free_block_is_handed_out():
    m = NamedBlocks(3, 4)
    request = ask("r", random_tokens("last block", 40))
    expect_equal(checked_allocate(m, request, 12), True, what="allocate_slots for all 12 slots of the pool", see=STATES)
    request.num_computed_tokens = 12
    expect_equal(checked_allocate(m, request, 1), False, what="allocate_slots for one more", see=STATES)


@grades(allocate)
def test_a_failed_admission_leaves_no_trace():
    """No entry, no reference, no hit counted; the same admission works once there is room."""
    tokens = random_tokens("no trace", 18)
    m = NamedBlocks(6, 4)
    running = ask("running", tokens[::-1], 4)
    give(m, running, [0, 5])
    leave_behind(m, tokens[:8], [2, 4])
    new = ask("new", tokens)
    expect_equal(checked_allocate(m, new, 10, [2, 4]), False, what="allocate_slots, one block short", see=STATES)
    for name in ("block_tables", "num_published"):
        left = new in getattr(m, name)
        expect(not left, f"allocate_slots returned False and left an entry in {name}", "ask first, then touch", STATES)
    hint = "only admissions that succeed count"
    expect_equal(m.hit_rate, 0.0, what="hit_rate after a failed admission", hint=hint, see=STATES)
    take_back(m, running)
    expect_equal(checked_allocate(m, new, 10, [2, 4]), True, what="allocate_slots, with room", see=STATES)
    expect_equal(m.hit_rate, 8 / 18, what="hit_rate after it was admitted", hint=hint, see=STATES)


@grades(allocate)
def test_a_failed_growth_leaks_no_block():
    m = NamedBlocks(4, 4)
    request = ask("r", random_tokens("leak", 40), 8)
    give(m, request, [3, 0])
    expect_equal(checked_allocate(m, request, 9), False, what="allocate_slots for 3 blocks of 2", see=STATES)
    expect_equal(m.num_free, 2, what="free blocks after a failed allocation", hint="all or nothing", see=STATES)


@grades(allocate)
def test_an_adopted_block_is_not_handed_out_as_a_new_one():
    """The hits stand at the front of the free queue, where new blocks are taken from."""
    tokens = random_tokens("front", 18)
    m = NamedBlocks(7, 4)
    leave_behind(m, tokens[:12], [6, 2, 4])
    free_in_order(m, [4, 2, 6])
    checked_allocate(m, ask("new", tokens), 6, [6, 2, 4])


@grades(allocate)
@pytest.mark.parametrize("size", [1, 3, 16])
def test_a_block_is_added_when_the_last_one_is_full(size):
    m, request = NamedBlocks(6, size), ask("r", random_tokens("edges", 5 * size))
    for computed in range(5 * size):
        request.num_computed_tokens = computed
        checked_allocate(m, request, 1)
        owned, needed = len(m.block_tables[request]), computed // size + 1
        expect_equal(owned, needed, what=f"blocks of size {size} for {computed + 1} tokens", see=STATES)


@grades(allocate)
def test_blocks_left_over_from_rejected_drafts_are_used_first():
    m, request = NamedBlocks(6, 4), ask("r", random_tokens("left over", 20), 5)
    give(m, request, [3, 0, 5])
    for n, owned in ((1, 3), (7, 3), (8, 4)):
        checked_allocate(m, request, n)
        what = f"blocks after allocate_slots for {n} tokens after 5, with room for 12 at first"
        expect_equal(len(m.block_tables[request]), owned, what=what, see=STATES)


@grades(allocate)
def test_a_swapped_request_gets_room_for_what_it_had_computed():
    """It comes back with 10 tokens computed and adopts the first block only."""
    tokens = random_tokens("swapped", 11)
    m = NamedBlocks(6, 4)
    leave_behind(m, tokens[:4], [4])
    request = ask("r", tokens, 10)
    checked_allocate(m, request, 1, [4])
    expect_equal(len(m.block_tables[request]), 3, what="blocks for 10 computed tokens and one more", see=STATES)


@grades(allocate)
def test_a_block_that_is_handed_out_again_is_no_longer_found():
    """Its new owner writes over it: the old name must miss (case 16)."""
    tokens = random_tokens("again", 8)
    m = NamedBlocks(2, 4)
    leave_behind(m, tokens, [1, 0])
    names = list(m.cached)
    checked_allocate(m, ask("new", tokens[::-1]), 8)
    for name in names:
        expect(name not in m.cached, "allocate_slots handed a block out and its old hash still finds it", see=STATES)
    expect_equal(state(m)["stats"]["evictions"], 2, what="stats.evictions", hint="`take_free_block` counts", see=STATES)


@grades(allocate)
def test_the_callers_list_of_hits_does_not_grow():
    """The scheduler still reads from it how much was adopted."""
    tokens = random_tokens("alias", 18)
    m = NamedBlocks(7, 4)
    leave_behind(m, tokens[:8], [6, 2])
    found, request = [6, 2], ask("new", tokens)
    checked_allocate(m, request, 2, found)
    request.num_computed_tokens = 10
    checked_allocate(m, request, 8)
    expect_equal(found, [6, 2], what="the list handed to allocate_slots, entry {i}", hint="copy it", see=STATES)
