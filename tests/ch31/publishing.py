"""BlockManager.cache_full_blocks and free."""

import pytest

from engine.serve import blocks
from engine.serve.blocks import BlockManager
from tests.ch31.pools import (
    STATES,
    NamedBlocks,
    ask,
    busy_pool,
    checked_free,
    checked_publish,
    give,
    leave_behind,
    name_of,
    state,
    take_back,
)
from tests.grading import expect, expect_equal, grades, rng

publish = BlockManager.cache_full_blocks
free = BlockManager.free


def random_tokens(salt, n):
    random = rng(salt)
    return [random.randrange(150_000) for _ in range(n)]


@grades(publish)
def test_full_blocks_are_published_in_random_pools():
    for i in range(80):
        random = rng(f"publish {i}")
        m, live, _ = busy_pool(f"publish {i}")
        for request in live:
            room = len(m.block_tables[request]) * m.block_size
            for token in random_tokens(f"draft {i}", random.randint(0, 2 * m.block_size)):
                request.spec_token_ids.append(token)
            most = min(room, request.num_tokens_with_spec)
            checked_publish(m, request, random.choice([None, most, random.randint(0, most)]))
            m.check()


@grades(publish)
@pytest.mark.parametrize("size", [1, 3, 16])
def test_only_full_blocks_of_computed_tokens_are_published(size):
    tokens = random_tokens("full", 4 * size)
    for computed in range(4 * size + 1):
        m, request = NamedBlocks(6, size), ask("r", tokens, computed)
        give(m, request, [3, 0, 5, 2])
        checked_publish(m, request)
        what = f"published blocks of size {size} with {computed} tokens computed"
        expect_equal(len(m.cached), computed // size, what=what, see=STATES)


@grades(publish)
def test_the_scheduler_may_count_the_tokens_of_the_coming_step():
    """Requests that arrive together share a prefix only if it is published before it is computed."""
    m, request = NamedBlocks(6, 4), ask("r", random_tokens("coming", 18), 3)
    give(m, request, [3, 0, 5, 2, 1])
    checked_publish(m, request)
    expect_equal(len(m.cached), 0, what="published blocks with 3 tokens computed", see=STATES)
    checked_publish(m, request, 15)
    expect_equal(len(m.cached), 3, what="published blocks with num_tokens=15", see=STATES)


@grades(publish)
def test_a_draft_is_never_published():
    """9 known tokens, 3 drafts: the third block is full of K/V, but what stands in it may be rejected (case 22)."""
    m, request = NamedBlocks(6, 4), ask("r", random_tokens("draft", 9), 8)
    request.spec_token_ids = random_tokens("drafts", 3)
    give(m, request, [3, 0, 5])
    checked_publish(m, request, 12)
    hint = "count known tokens only, min(num_tokens, request.num_tokens)"
    expect_equal(m.hashes[5], None, what="hash of a block with drafts in it", hint=hint, see=STATES)
    expect_equal(m.num_published[request], 2, what="num_published", hint=hint, see=STATES)


@grades(publish)
@pytest.mark.parametrize("accepted", [0, 3])
def test_drafts_leave_the_hashes_that_single_steps_leave(accepted):
    """All drafts accepted or none: afterwards the cache holds the names of the real sequence (case 22)."""
    tokens = random_tokens("accept", 24)
    m, request = NamedBlocks(8, 4), ask("r", tokens[:6], 6)
    give(m, request, [3, 0, 5, 2, 1, 7])
    request.append(tokens[6])
    while request.num_tokens < 20:
        known = request.num_tokens
        truth = tokens[known : known + 3]
        request.spec_token_ids = truth if accepted else [t + 1 for t in truth]
        checked_publish(m, request, known + 3)
        for token in tokens[known : known + accepted + 1]:
            request.append(token)
        request.spec_token_ids, request.num_computed_tokens = [], request.num_tokens - 1
    checked_publish(m, request)
    expected = {name_of(tokens[:end]) for end in range(4, request.num_computed_tokens + 1, 4)}
    message = "cache_full_blocks: with drafts other names are in the cache than without"
    expect(set(m.cached) == expected, message, "no block with a draft in it is published", STATES)


@grades(publish)
def test_the_first_writer_of_a_block_wins():
    tokens = random_tokens("first writer", 8)
    m = NamedBlocks(6, 4)
    give(m, ask("first", tokens, 8), [3, 0], 2)
    second = ask("second", tokens, 8)
    give(m, second, [5, 2])
    checked_publish(m, second)
    expect_equal(m.cached[name_of(tokens)], 0, what="block that bears the name both would give", see=STATES)
    expect_equal([m.hashes[5], m.hashes[2]], [None, None], what="hash of the second writer's block {i}", see=STATES)


@grades(publish)
def test_a_block_goes_through_once():
    """The second writer's blocks stay without a name, also when those of the first are gone."""
    tokens = random_tokens("once", 12)
    m, second = NamedBlocks(8, 4), ask("second", tokens, 8)
    leave_behind(m, tokens[:8], [3, 0])
    give(m, second, [5, 2, 1], 2)
    m.forget_hash(3)
    m.forget_hash(0)
    checked_publish(m, second, 12)
    checked_publish(m, second, 8)
    expect_equal(m.num_published[second], 3, what="num_published after 12 tokens and then 8", see=STATES)


@grades(publish)
def test_nothing_is_published_with_caching_off():
    m, request = NamedBlocks(6, 4, enable_prefix_caching=False), ask("r", random_tokens("off", 9), 9)
    give(m, request, [3, 0, 5])
    checked_publish(m, request)
    checked_publish(m, request, 8)


@grades(publish)
def test_chunks_over_a_hit_hash_each_block_once(monkeypatch):
    """A prefix of two blocks was adopted; the rest comes in chunks of 3 tokens (case 23)."""
    calls = []
    monkeypatch.setattr(blocks, "hash_block", lambda *args: calls.append(args) or len(calls).to_bytes(16, "big"))
    m, request = BlockManager(9, 4), ask("r", random_tokens("chunks", 24))
    give(m, request, [3, 0, 5, 2, 1, 7], 2)
    for computed in range(8, 25, 3):
        request.num_computed_tokens = computed
        m.cache_full_blocks(request)
    message = f"cache_full_blocks, chunk by chunk over 6 blocks, computed {len(calls)} hashes"
    expect(len(calls) == 6, message, "`block_hashes` computes each once and keeps it", STATES)


@grades(publish)
def test_a_name_says_whose_cache_it_is():
    tokens = random_tokens("key", 8)
    m = NamedBlocks(6, 4)
    give(m, ask("mine", tokens, 8, key=("mine",)), [3, 0], 2)
    yours = ask("yours", tokens, 8, key=("yours",))
    give(m, yours, [5, 2])
    checked_publish(m, yours)
    expect_equal(len(m.cached), 4, what="names of the same two blocks under two cache keys", see=STATES)


@grades(free)
def test_requests_leave_random_pools():
    for i in range(60):
        m, live, another = busy_pool(f"free {i}")
        rng(f"leaving {i}").shuffle(live)
        for request in (*live, another("never admitted")):
            checked_free(m, request)
            m.check()
        expect_equal(m.num_free, m.num_blocks, what="free blocks when everybody has left", see=STATES)


@grades(free)
def test_the_tail_is_evicted_before_the_head():
    """Four hashed blocks go to the back, the tail of the sequence first: a head is useful to more prompts."""
    m, request = NamedBlocks(7, 4), ask("r", random_tokens("tail", 16), 16)
    give(m, request, [5, 2, 6, 0], 4)
    checked_free(m, request)
    got = list(m.free_blocks)[-4:]
    hint = "whoever frees from the head loses the prefix first, and with it every hit"
    expect_equal(got, [0, 6, 2, 5], what="free_blocks, entry {i} of the last four", hint=hint, see=STATES)


@grades(free)
def test_blocks_without_a_hash_go_first():
    """The last, unfinished block can never be hit: it is handed out again before any cached one."""
    m, request = NamedBlocks(7, 4), ask("r", random_tokens("unhashed", 10), 10)
    leave_behind(m, random_tokens("older", 8), [3, 1])
    give(m, request, [5, 2, 6], 2)
    checked_free(m, request)
    expect_equal(next(iter(m.free_blocks)), 6, what="block that is handed out next", see=STATES)


@grades(free)
def test_a_shared_block_loses_a_reference_only():
    """Two users of two blocks: one leaves, the other's stay in use and findable (case 17)."""
    tokens = random_tokens("shared", 12)
    m = NamedBlocks(7, 4)
    one, two = ask("one", tokens, 12), ask("two", [*tokens[:8], 1, 2], 10)
    give(m, one, [5, 2, 6], 3)
    give(m, two, [5, 2, 0], 2)
    checked_free(m, one)
    for block in (5, 2):
        expect_equal(m.ref_counts[block], 1, what=f"references of block {block}, which `two` still owns", see=STATES)
        expect(block not in m.free_blocks, f"free('one'): block {block} is free, but 'two' still owns it", see=STATES)
    checked_free(m, two)


@grades(free)
def test_a_preempted_request_gives_all_its_blocks_back():
    """It counts as not computed at all by then; and its last block has been allocated but never written."""
    m, request = NamedBlocks(7, 4), ask("r", random_tokens("preempted", 13), 12)
    give(m, request, [5, 2, 6, 0], 3)
    request.num_computed_tokens = 0
    checked_free(m, request)
    expect_equal(m.num_free, 7, what="free blocks after a preemption", hint="every block of the table", see=STATES)


@grades(free)
def test_freed_blocks_stay_findable():
    tokens = random_tokens("findable", 8)
    m, request = NamedBlocks(7, 4), ask("r", tokens, 8)
    give(m, request, [5, 2], 2)
    checked_free(m, request)
    for end, block in ((4, 5), (8, 2)):
        got = m.cached.get(name_of(tokens[:end]))
        expect_equal(got, block, what=f"block found for the first {end} tokens after free", see=STATES)


@grades(free)
def test_a_request_that_leaves_twice_or_never_came_changes_nothing():
    m, request = NamedBlocks(7, 4), ask("r", random_tokens("twice", 8), 8)
    checked_free(m, ask("never came", [1, 2, 3]))
    give(m, request, [5, 2], 2)
    checked_free(m, request)
    before = state(m)
    checked_free(m, request)
    expect_equal(m.num_free, 7, what="free blocks after freeing a request twice", see=STATES)
    expect_equal(state(m)["free_blocks"], before["free_blocks"], what="free_blocks, entry {i}", see=STATES)


@grades(free)
def test_nothing_of_a_request_is_left():
    m, request = NamedBlocks(7, 4), ask("r", random_tokens("left", 9), 9)
    other = ask("other", random_tokens("other", 4), 4)
    give(m, other, [1], 1)
    give(m, request, [5, 2, 6], 1)
    checked_free(m, request)
    for name in ("block_tables", "num_published"):
        expect(request not in getattr(m, name), f"free left an entry in {name}", "else the pool leaks", STATES)
    take_back(m, other)
