"""Block pools for the graders: built by hand, without any exercise; each call is checked against a plain account."""

from dataclasses import asdict
from hashlib import blake2b

from engine.serve.blocks import BlockManager
from engine.serve.request import Request, SamplingParams
from tests.grading import expect, expect_equal, rng

STATES = "31: The three states of a block"


def name_of(tokens, key=()):
    """A name for the block that ends this sequence: a hash of everything up to its end, in one go."""
    return blake2b(repr((key, list(tokens))).encode(), digest_size=16).digest()


class NamedBlocks(BlockManager):
    """A BlockManager that takes block hashes from `name_of`, so that no grader of it depends on hash_block."""

    def block_hashes(self, request):
        ends = range(self.block_size, request.num_tokens + 1, self.block_size)
        request.block_hashes[:] = [name_of(request.token_ids[:end], request.cache_key) for end in ends]
        return request.block_hashes


def ask(request_id, tokens, num_computed=0, output=(), key=(), **params):
    """A request whose first num_computed tokens have K/V."""
    request = Request(request_id, list(tokens), SamplingParams(**params), cache_key=key, arrival_time=0.0)
    for token in output:
        request.append(token)
    request.num_computed_tokens = num_computed
    return request


def give(m, request, blocks, num_published=0):
    """Make these blocks, some of them perhaps others' too, a request's table; its first ones have been published."""
    m.block_tables[request], m.num_published[request] = list(blocks), num_published
    for i, block in enumerate(blocks):
        if m.ref_counts[block] == 0:
            del m.free_blocks[block]
            if i < num_published and m.hashes[block] != m.block_hashes(request)[i]:
                assert m.hashes[block] is None
        m.ref_counts[block] += 1
    for i, name in enumerate(m.block_hashes(request)[:num_published]):
        if name not in m.cached:
            m.cached[name], m.hashes[blocks[i]] = blocks[i], name
    m.check()


def take_back(m, request):
    """The request is gone; its blocks are at the back of the free queue, hashes kept."""
    for block in m.block_tables.pop(request):
        m.ref_counts[block] -= 1
        if m.ref_counts[block] == 0:
            m.free_blocks[block] = None
    del m.num_published[request]
    m.check()


def leave_behind(m, tokens, blocks, key=()):
    """Cached-free blocks that hold the K/V of these tokens, left behind by a request that is gone."""
    former = ask("former", tokens, len(tokens), key=key)
    give(m, former, blocks, len(tokens) // m.block_size)
    take_back(m, former)


def free_in_order(m, first):
    """Bring these free blocks to the front of the queue, in this order."""
    for block in reversed(first):
        m.free_blocks.move_to_end(block, last=False)


def busy_pool(salt):
    """(manager, live requests, a function that makes one more request) in some state that traffic could leave."""
    random = rng(salt)
    size = random.choice([1, 3, 4])
    m = NamedBlocks(random.randint(8, 16), size)
    families = [[random.randrange(1000) for _ in range(6 * size)] for _ in range(2)]
    keys = [(), ("tenant",)] if random.random() < 0.3 else [()]

    def another(request_id):
        family = random.choice(families)
        prefix = family[: random.choice([random.randint(0, len(family)), random.randint(0, 6) * size])]
        tail = [random.randrange(1000) for _ in range(random.randint(not prefix, 2 * size))]
        return ask(request_id, prefix + tail, key=random.choice(keys))

    for i in range(random.randint(2, 7)):
        request = another(f"r{i}")
        request.num_computed_tokens = random.choice([request.num_tokens, random.randint(1, request.num_tokens)])
        names = m.block_hashes(request)[: request.num_computed_tokens // size]
        adopted = [m.cached[name] for name in _leading(names, m.cached)]
        adopted = adopted[: random.choice([0, len(adopted), len(adopted)])]
        empty = [b for b in m.free_blocks if m.hashes[b] is None]
        random.shuffle(empty)
        missing = m.blocks_for(request.num_computed_tokens) - len(adopted) + random.choice([0, 0, 1])
        if missing <= len(empty):
            give(m, request, adopted + empty[:missing], random.choice([len(adopted), len(names)]))
    for request in list(m.block_tables):
        if random.random() < 0.5:
            take_back(m, request)
    order = list(m.free_blocks)
    random.shuffle(order)
    free_in_order(m, order)
    return m, list(m.block_tables), another


def _leading(names, cached):
    return names[: next((i for i, name in enumerate(names) if name not in cached), len(names))]


# What a call must do, told from the state before it. Each of these makes the call and compares.


def state(m):
    """Everything a manager knows, in plain values; requests by id."""
    return {
        "block_tables": {request.request_id: list(table) for request, table in m.block_tables.items()},
        "ref_counts": list(m.ref_counts),
        "free_blocks": list(m.free_blocks),
        "hashes": list(m.hashes),
        "cached": dict(m.cached),
        "num_published": {request.request_id: count for request, count in m.num_published.items()},
        "stats": asdict(m.stats),
    }


def situation(m, request):
    """The state before a call, for a message."""
    table = m.block_tables.get(request, "none")
    hashed = [b for b, name in enumerate(m.hashes) if name is not None]
    return (
        f"block size {m.block_size}, {request.request_id!r} knows {request.num_tokens} tokens, "
        f"{request.num_computed_tokens} computed, table {table}; free {list(m.free_blocks)}, hashed {hashed}"
    )


def expect_state(m, expected, call, hint):
    got = state(m)
    for part in expected:
        expect_equal(got[part], expected[part], what=f"{part}[{{i}}]", hint=hint, see=STATES, call=call)


def checked_find(m, request):
    before, hint, size = state(m), situation(m, request), m.block_size
    expected, tokens = [], request.token_ids
    if m.enable_prefix_caching and request.params.prompt_logprobs is None:
        for end in range(size, len(tokens), size):  # a block that ends at the last token is out
            holders = [b for b, name in enumerate(m.hashes) if name == name_of(tokens[:end], request.cache_key)]
            if not holders:
                break
            expected.append(holders[0])
    call = f"find_cached_prefix({request.request_id!r})"
    got = m.find_cached_prefix(request)
    expect_equal(got, expected, what="block {i} of the prefix", hint=hint, see=STATES, call=call)
    expect_state(m, before, call, "it looks only; nothing may change")
    return got


def checked_allocate(m, request, n, cached=None):
    """cached: None for a call without cached_blocks."""
    before, hint, given = state(m), situation(m, request), list(cached or ())
    old = before["block_tables"].get(request.request_id, [])
    in_place = max(request.num_computed_tokens, len(given) * m.block_size)
    head = old + given
    num_new = max(0, -(-(in_place + n) // m.block_size) - len(head))
    left = [b for b in before["free_blocks"] if b not in given]
    fits = num_new <= len(left)
    call = f"allocate_slots({request.request_id!r}, {n}{'' if cached is None else f', {given}'})"
    try:
        got = m.allocate_slots(request, n, *(() if cached is None else (cached,)))
    except KeyError as error:  # what an empty free queue raises
        message = f"{call}: {num_new} new blocks are needed beside those adopted, {len(left)} are left, but it went on"
        expect(fits, f"{message} until it raised {error!r}", f"count all free blocks it uses up first; {hint}", STATES)
        raise
    expect_equal(got, fits, what="result", hint=hint, see=STATES, call=call)
    expect_equal(list(cached or ()), given, what="the caller's list of cached blocks[{i}]", see=STATES, call=call)
    if not fits:
        expect_state(m, before, call, "it returned False: then nothing at all may have changed")
        return False
    admitted, new = request.request_id not in before["block_tables"], left[:num_new]
    table = m.block_tables.get(request)
    expect_equal((table or [])[: len(head)], head, what="block {i} of the table", hint=hint, see=STATES, call=call)
    what = "the new blocks, sorted, block {i}"
    expect_equal(sorted(table[len(head) :]), sorted(new), what=what, hint=hint, see=STATES, call=call)
    for block in (*given, *new):
        before["ref_counts"][block] += 1
    for block in new:
        before["stats"]["evictions"] += before["hashes"][block] is not None
        before["cached"].pop(before["hashes"][block], None)
        before["hashes"][block] = None
    before["free_blocks"] = left[num_new:]
    before["block_tables"][request.request_id] = list(table)
    if admitted:
        before["num_published"][request.request_id] = len(given)
        before["stats"]["tokens_known"] += request.num_tokens
        before["stats"]["tokens_adopted"] += len(given) * m.block_size
    expect_state(m, before, call, hint)
    return True


def checked_publish(m, request, num_tokens=None):
    before, hint, size = state(m), situation(m, request), m.block_size
    call = f"cache_full_blocks({request.request_id!r}{'' if num_tokens is None else f', {num_tokens}'})"
    m.cache_full_blocks(request, *(() if num_tokens is None else (num_tokens,)))
    if m.enable_prefix_caching:
        in_place = request.num_computed_tokens if num_tokens is None else num_tokens
        done, full = before["num_published"][request.request_id], min(in_place, request.num_tokens) // size
        for i in range(done, full):
            block = before["block_tables"][request.request_id][i]
            name = name_of(request.token_ids[: (i + 1) * size], request.cache_key)
            if name not in before["cached"]:
                before["cached"][name], before["hashes"][block] = block, name
        before["num_published"][request.request_id] = max(done, full)
    expect_state(m, before, call, f"{done if m.enable_prefix_caching else 0} published before; {hint}")


def checked_free(m, request):
    before, hint, call = state(m), situation(m, request), f"free({request.request_id!r})"
    table = before["block_tables"].pop(request.request_id, [])
    before["num_published"].pop(request.request_id, None)
    for block in table:
        before["ref_counts"][block] -= 1
    freed = [b for b in reversed(table) if before["ref_counts"][b] == 0]
    front = [b for b in freed if before["hashes"][b] is None]
    back = [b for b in freed if before["hashes"][b] is not None]
    m.free(request)
    got = list(m.free_blocks)
    what, hint = "free_blocks afterwards, entry {i}", f"empty ones first, hashed ones last, tail before head; {hint}"
    expected = [*sorted(front), *before.pop("free_blocks"), *back]
    in_front = sorted(got[: len(front)]) + got[len(front) :]  # in what order the empty ones stand is all the same
    expect_equal(in_front, expected, what=what, hint=hint, see=STATES, call=call)
    expect_state(m, before, call, hint)
