"""What is given in engine/serve/blocks.py: trim, reset, check, take_free_block, block_hashes and the figures."""

import pytest

from engine.serve import blocks
from engine.serve.blocks import BlockManager, BrokenInvariant
from tests.ch31.pools import (
    NamedBlocks,
    ask,
    busy_pool,
    expect_state,
    free_in_order,
    give,
    leave_behind,
    name_of,
    state,
    take_back,
)
from tests.grading import expect, expect_equal, expect_raises, grades, rng


def random_tokens(salt, n):
    random = rng(salt)
    return [random.randrange(150_000) for _ in range(n)]


def test_trim_withdraws_what_reaches_past_the_end():
    """16 tokens in 4 published blocks, cut back to each length: only whole blocks keep hash and count."""
    for length in range(17):
        m, request = NamedBlocks(6, 4), ask("r", random_tokens("trim", 17), 16)
        give(m, request, [3, 0, 5, 2], 4)
        m.trim(request, length)
        call, kept, whole = f"trim(request, {length})", -(-length // 4), length // 4
        expect_equal(m.block_tables[request], [3, 0, 5, 2][:kept], what="block {i} of the table", call=call)
        expect_equal(m.num_published[request], whole, what="num_published", call=call)
        expect_equal(set(m.cached.values()), set([3, 0, 5, 2][:whole]), what="blocks that are findable", call=call)
        expect_equal(m.num_free, 6 - kept, what="free blocks", call=call)
        m.check()


@grades(BlockManager.cache_full_blocks)
def test_what_trim_cut_is_published_again_with_its_new_content():
    """The trap: num_published left too high, so that the rewritten block never gets the hash of what it holds now."""
    m, request = NamedBlocks(6, 4), ask("r", random_tokens("trim again", 8), 8)
    give(m, request, [3, 0], 2)
    m.trim(request, 5)
    expect_equal(m.num_published[request], 1, what="num_published after trim to 5 tokens in blocks of 4")
    request.token_ids[5:] = [1, 2, 3]
    request.block_hashes.clear()
    m.cache_full_blocks(request, 8)
    expect_equal(m.hashes[0], name_of(request.token_ids), what="hash of the block that was written again")


def test_trim_refuses_to_cut_a_shared_block():
    tokens = random_tokens("shared", 8)
    m, request = NamedBlocks(6, 4), ask("r", tokens, 8)
    give(m, request, [3, 0], 2)
    give(m, ask("other", [*tokens, 1], 8), [3, 0], 2)
    before = state(m)
    expect_raises(ValueError, m.trim, request, 6, match="'r'", call="trim to 6 tokens, in a shared block")
    expect_state(m, before, "trim", "a refusal changes nothing")
    m.trim(request, 4)  # at an edge the shared block is only given up
    m.check()
    expect_equal(m.hashes[0], name_of(tokens), what="hash of the block that the other one still owns")


def test_the_prefix_cache_is_reset_only_while_nobody_uses_a_block():
    m, request = NamedBlocks(6, 4), ask("r", random_tokens("reset", 9), 8)
    leave_behind(m, random_tokens("other", 8), [1, 4])
    give(m, request, [3, 0], 2)
    before = state(m)
    expect_equal(m.reset_prefix_cache(), False, what="reset_prefix_cache with live blocks")
    expect_state(m, before, "reset_prefix_cache() that returned False", "it must leave everything")
    take_back(m, request)
    expect_equal(m.reset_prefix_cache(), True, what="reset_prefix_cache when idle")
    m.check()
    expect_equal((len(m.cached), set(m.hashes), m.num_free), (0, {None}, 6), what="names and free blocks after a reset")


def test_free_blocks_are_taken_from_the_front_and_lose_their_names():
    m = NamedBlocks(6, 4)
    leave_behind(m, random_tokens("take", 12), [1, 4, 2])
    free_in_order(m, [4, 3])
    for i, (block, cached, evictions) in enumerate([(4, 2, 1), (3, 2, 1)]):
        expect_equal(m.take_free_block(), block, what=f"take_free_block, call {i}")
        expect_equal((len(m.cached), m.hashes[block]), (cached, None), what="names left, and the block's own")
        expect_equal(m.stats.evictions, evictions, what="stats.evictions")
        expect(block not in m.free_blocks, f"block {block} was taken and is still free")


def test_block_hashes_form_a_chain_with_the_cache_key(monkeypatch):
    calls = []

    def hash_block(parent, tokens, extra=()):
        calls.append((parent, list(tokens), extra))
        return len(calls).to_bytes(16, "big")

    monkeypatch.setattr(blocks, "hash_block", hash_block)
    tokens = random_tokens("chain", 14)
    m, request = BlockManager(6, 4), ask("r", tokens[:10], key=("tenant", 1))
    first = list(m.block_hashes(request))
    for token in tokens[10:]:
        request.append(token)
    expect_equal(m.block_hashes(request)[:2], first, what="hash of block {i}, asked for again")
    expected = [(parent, tokens[i * 4 : i * 4 + 4], ("tenant", 1)) for i, parent in enumerate([None, *first])]
    expect_equal(calls, expected, what="argument {i} of hash_block")


@grades(BlockManager.find_cached_prefix)
def test_a_hash_that_collides_would_serve_one_prompt_the_blocks_of_another(monkeypatch):
    """Why the hash must be cryptographic: the manager believes it (case 19). Its books stay in order all the same."""
    monkeypatch.setattr(blocks, "hash_block", lambda *args: bytes(16))
    m = BlockManager(6, 4)
    first, second = (ask(f"r{i}", random_tokens(f"collide {i}", 9), 8) for i in range(2))
    give(m, first, [3, 0, 5], 2)
    expect_equal(len(m.cached), 1, what="names of two blocks under a constant hash")
    expect_equal(m.find_cached_prefix(second), [3, 3], what="block {i} of a prefix that is somebody else's")


def test_usage_and_hit_rate():
    m = NamedBlocks(8, 4)
    expect_equal((m.num_free, m.usage, m.hit_rate), (8, 0.0, 0.0), what="num_free, usage, hit_rate of a new pool")
    tokens = random_tokens("rates", 10)
    leave_behind(m, tokens[:8], [1, 4])
    expect_equal((m.num_free, m.usage), (8, 0.0), what="num_free and usage with cached-free blocks")
    give(m, ask("r", tokens), [1, 4, 0], 2)
    m.stats.tokens_known, m.stats.tokens_adopted = 10, 8
    expect_equal((m.num_free, m.usage, m.hit_rate), (5, 3 / 8, 8 / 10), what="num_free, usage, hit_rate")


def test_a_pool_has_at_least_one_block_of_one_token():
    for sizes in ((0, 4), (4, 0), (-1, 16)):
        expect_raises(ValueError, BlockManager, *sizes, match=str(min(sizes)))


def broken(change):
    m, request = NamedBlocks(6, 4), ask("r", random_tokens("broken", 9), 9)
    leave_behind(m, random_tokens("other", 4), [1])
    give(m, request, [3, 0, 5], 2)
    change(m, request)
    return m


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m, r: m.ref_counts.__setitem__(3, 2), "2 references and 1 owners"),
        (lambda m, r: m.ref_counts.__setitem__(4, 1), "1 references and 0 owners"),
        (lambda m, r: m.free_blocks.pop(4), "block 4 is not free with 0 owners"),
        (lambda m, r: m.free_blocks.__setitem__(3, None), "block 3 is free with 1 owners"),
        (lambda m, r: m.block_tables[r].__setitem__(1, 3), "twice"),
        (lambda m, r: m.cached.__setitem__(b"stray", 2), "does not bear it"),
        (lambda m, r: m.hashes.__setitem__(2, b"stray"), "does not map to it"),
        (lambda m, r: m.hashes.__setitem__(1, None), "does not bear it"),
        (lambda m, r: m.num_published.pop(r), "different requests"),
        (lambda m, r: m.num_published.__setitem__(r, 4), "4 blocks published"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_check_names_the_broken_invariant(change, match):
    expect_raises(BrokenInvariant, broken(change).check, match=match, call="check()")


def test_check_accepts_every_sound_state():
    for i in range(20):
        busy_pool(f"sound {i}")[0].check()
