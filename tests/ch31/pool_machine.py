"""The block manager under random traffic: every call checked, and every request must always read its own K/V."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.serve.blocks import BlockManager
from tests.ch31.pools import (
    STATES,
    NamedBlocks,
    ask,
    checked_allocate,
    checked_find,
    checked_free,
    checked_publish,
    expect_state,
    state,
)
from tests.grading import expect, expect_equal, grades, rng

KEYS = [(), (), ("tenant",)]


@grades(
    BlockManager.find_cached_prefix, BlockManager.allocate_slots, BlockManager.cache_full_blocks, BlockManager.free
)  # fmt: skip
class PoolTraffic(RuleBasedStateMachine):
    """`held` is the pool's content: in each slot the whole sequence up to the token whose K/V was written there."""

    @initialize(size=st.sampled_from([1, 3, 4]), num_blocks=st.integers(3, 10), caching=st.sampled_from([True, False]))
    def start(self, size, num_blocks, caching):
        self.m = NamedBlocks(num_blocks, size, caching)
        self.held = [None] * (num_blocks * size)
        self.running, self.count, self.known, self.adopted = [], 0, 0, 0

    def content(self, request, position):
        return request.cache_key, tuple(request.token_ids[: position + 1])

    def slots(self, request, positions):
        table, size = self.m.block_tables[request], self.m.block_size
        return [table[p // size] * size + p % size for p in positions]

    def compute(self, request, n):
        """As a step does: publish at once, write, advance; a request at its end appends a token."""
        begin, end = request.num_computed_tokens, request.num_computed_tokens + n
        checked_publish(self.m, request, end)
        for position, slot in zip(range(begin, end), self.slots(request, range(begin, end)), strict=True):
            self.held[slot] = self.content(request, position)
        request.num_computed_tokens = end
        if end == request.num_tokens:
            request.append(rng(f"token {sum(request.token_ids)}").randrange(5))

    @rule(
        family=st.integers(0, 1), length=st.integers(1, 20), tail=st.integers(0, 2), key=st.sampled_from(KEYS),
        n=st.integers(1, 9),
    )  # fmt: skip
    def admit(self, family, length, tail, key, n):
        random = rng(f"family {family}")
        request = ask(f"r{self.count}", [*(random.randrange(5) for _ in range(length)), *[tail] * (tail > 0)], key=key)
        self.count += 1
        self.enter(request, n)

    def enter(self, request, n):
        found = checked_find(self.m, request)
        computed = len(found) * self.m.block_size
        n = min(n, request.num_tokens - computed)
        if checked_allocate(self.m, request, n, found):
            self.known, self.adopted = self.known + request.num_tokens, self.adopted + computed
            request.num_computed_tokens = computed
            self.running.append(request)
            self.compute(request, n)

    @rule(which=st.integers(0, 9), n=st.integers(1, 9))
    def go_on(self, which, n):
        if self.running:
            request = self.running[which % len(self.running)]
            n = min(n, request.num_tokens - request.num_computed_tokens)
            if checked_allocate(self.m, request, n):
                self.compute(request, n)

    @rule(which=st.integers(0, 9), drafts=st.integers(1, 6), accepted=st.integers(0, 6))
    def verify_drafts(self, which, drafts, accepted):
        """Write the K/V of drafts, take over some of them and give the rest of the blocks back."""
        if not self.running:
            return
        request = self.running[which % len(self.running)]
        if request.num_tokens - request.num_computed_tokens != 1:
            return
        request.spec_token_ids = [7 + i for i in range(drafts)]
        if checked_allocate(self.m, request, 1 + drafts):
            begin = request.num_computed_tokens
            checked_publish(self.m, request, begin + 1 + drafts)
            sequence = [*request.token_ids, *request.spec_token_ids]
            for i, slot in enumerate(self.slots(request, range(begin, begin + 1 + drafts))):
                self.held[slot] = request.cache_key, tuple(sequence[: begin + i + 1])
            for token in request.spec_token_ids[:accepted]:
                request.append(token)
            request.num_computed_tokens = request.num_tokens
            request.append(3)
            self.m.trim(request, request.num_computed_tokens)
        request.spec_token_ids = []

    @rule(which=st.integers(0, 9), again=st.booleans(), n=st.integers(1, 9))
    def leave(self, which, again, n):
        """Finish, or be preempted and come back."""
        if self.running:
            request = self.running.pop(which % len(self.running))
            checked_free(self.m, request)
            if again:
                request.num_computed_tokens = 0
                self.enter(request, n)

    @rule()
    def reset(self):
        before, in_use = state(self.m), bool(self.running)
        expect_equal(self.m.reset_prefix_cache(), not in_use, what="reset_prefix_cache()", see=STATES)
        if in_use:
            expect_state(self.m, before, "reset_prefix_cache()", "unchanged while a block is in use")

    @invariant()
    def everybody_reads_its_own(self):
        if not hasattr(self, "m"):
            return
        self.m.check()
        for request in self.running:
            positions = range(request.num_computed_tokens)
            for position, slot in zip(positions, self.slots(request, positions), strict=True):
                message = f"{request.request_id!r} reads another sequence's K/V at position {position}, slot {slot}"
                expect(self.held[slot] == self.content(request, position), message, "who wrote there last?", STATES)
        rate = self.adopted / self.known if self.known else 0.0
        expect_equal(self.m.hit_rate, rate, what="hit_rate", hint="tokens adopted / known, per admission", see=STATES)


PoolTraffic.TestCase.settings = settings(max_examples=25, stateful_step_count=25)
TestPoolTraffic = PoolTraffic.TestCase
