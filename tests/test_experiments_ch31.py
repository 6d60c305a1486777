"""The logic of chapter 31's stretch experiments: what they count and decide, not what they time."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import kv_cache
from engine.models.qwen3 import test_model
from experiments import ch31_cache, ch31_order, ch31_radix, ch31_swap
from experiments.ch31_radix import Chains, RadixTree, Tree, common

MODEL = test_model()
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
TEXT = random.Random(0).choices(range(MODEL.cfg.vocab_size), k=1500)


class TokenTrie:
    """The oracle: every cached beginning by itself, with the time of its last use."""

    def __init__(self, capacity):
        self.capacity, self.used, self.clock = capacity, {}, 0

    def match(self, tokens):
        return next((n for n in range(len(tokens), 0, -1) if tuple(tokens[:n]) in self.used), 0)

    def insert(self, tokens):
        self.clock += 1
        self.used.update((tuple(tokens[:n]), self.clock) for n in range(1, len(tokens) + 1))
        while len(self.used) > self.capacity:  # the oldest goes first, of one age the longest
            del self.used[min(self.used, key=lambda beginning: (self.used[beginning], -len(beginning)))]


@settings(max_examples=150)
@given(st.lists(st.tuples(TOKENS, TOKENS), max_size=25), st.integers(12, 40))
def test_the_radix_tree_is_a_trie_of_single_tokens(work, capacity):
    tree, trie = RadixTree(capacity), TokenTrie(capacity)
    for tokens, other in work:
        for query in (tokens, other):
            longest = max(common(query, live) for live in tree.sequences())
            assert tree.match(query) == trie.match(query) == longest
        tree.insert(tokens)
        trie.insert(tokens)
        assert tree.match(tokens) == len(tokens)
        assert tree.size == ch31_radix.tree_size(tree.root) == len(trie.used) <= capacity


def test_a_sequence_that_does_not_fit_leaves_the_tree_alone():
    tree = RadixTree(4)
    tree.insert([1, 2, 3])
    with pytest.raises(ValueError, match="5 tokens do not fit into 4"):
        tree.insert([1, 2, 3, 4, 5])
    assert list(tree.sequences()) == [[1, 2, 3]]


@pytest.mark.parametrize("workload", ch31_radix.WORKLOADS)
def test_tree_and_blocks_of_one_token_adopt_the_same(workload, monkeypatch):
    monkeypatch.setattr(ch31_radix, "CAPACITY", 1 << 14)  # nothing is evicted
    work = list(ch31_radix.WORKLOADS[workload](TEXT, random.Random(1), 40))
    ch31_radix.check(work)
    tree, single, sixteen = Tree(), Chains(1), Chains(16)
    total = 0
    for prompt, reply in work:
        adopted = tree.serve(prompt, reply)
        total += adopted
        assert single.serve(prompt, reply) == adopted
        assert sixteen.serve(prompt, reply) == adopted // 16 * 16
        for chains in (single, sixteen):
            chains.blocks.check()
    assert tree.tree.evicted == 0
    assert total == ch31_radix.ceiling(work) > 0


@pytest.mark.parametrize("num_blocks", [32, 400])
def test_the_counters_of_the_cache_add_up(num_blocks):
    chats = ch31_cache.make_chats([TEXT], 0, count=6)
    core, steps = ch31_cache.serve(MODEL, chats, num_blocks, alive=3, reply=4)
    turns = sum(len(chat.questions) for chat in chats)
    for step in steps:
        assert step["in use"] + step["cached-free"] + step["empty-free"] == num_blocks
    known, adopted, computed = (ch31_cache.total(steps, key) for key in ("tokens_known", "tokens_adopted", "computed"))
    assert core.blocks.hit_rate == adopted / known
    if ch31_cache.total(steps, "preemptions") == 0:
        assert adopted + computed == known + 3 * turns  # of 4 tokens of a reply the last is never computed
    assert (ch31_cache.total(steps, "evictions") > 0) == (num_blocks == 32)
    for chat in chats:
        assert chat.turn == len(chat.questions)
        assert len(chat.history) == sum(map(len, chat.questions)) + 4 * chat.turn
    assert max(step["alive"] for step in steps) <= sum(len(chat.history) for chat in chats)


def test_the_knee_is_where_it_stays_above():
    rates = {1: 0.1, 2: 0.96, 3: 0.9, 4: 0.95, 5: 1.0}
    assert ch31_cache.find_knee(rates, 1.0) == 4
    assert ch31_cache.find_knee({1: 0.1}, 1.0) is None


def test_rules_of_admission_change_the_order_and_nothing_else():
    stream = ch31_order.alternating(TEXT, 0, count=12)
    results = ch31_order.compare(MODEL, stream)  # raises if outputs differ
    rates = [rate for rate, _, _ in results.values()]
    assert rates[0] < rates[2] <= rates[1]
    _, outputs, _ = ch31_order.serve(MODEL, stream, math.inf)
    for arrival, output in list(zip(stream, outputs, strict=True))[:3]:
        assert output == kv_cache.generate(MODEL, arrival.prompt, max_tokens=ch31_order.OUTPUT)


def test_ageing_ends_starvation():
    waits = {}
    for count in (12, 24):
        stream = ch31_order.starving(TEXT, 0, count)
        place = next(i for i, arrival in enumerate(stream) if arrival.family == "C")
        for patience in (3, math.inf):
            _, _, waited = ch31_order.serve(MODEL, stream, patience)
            waits[patience, count] = waited[place]
    assert waits[3, 12] == waits[3, 24]
    assert waits[math.inf, 24] > waits[math.inf, 12] + 20 > waits[3, 12] + 20


@given(st.lists(st.integers(-1, 4), max_size=60), st.integers(1, 4))
def test_nobody_waits_longer_than_the_bound(events, patience):
    """An event is an arrival with so many cached blocks, or -1: an admission."""

    class Blocks:
        def find_cached_prefix(self, request):
            return [0] * request[1]

    queue, admitted, bound = ch31_order.LongestCachedFirst(Blocks(), patience), 0, {}
    for number, event in enumerate([*events, *[-1] * len(events)]):
        if event >= 0:
            bound[number, event] = admitted + (len(queue) + 1) * (patience + 1)
            queue.add((number, event))
        elif queue:
            request = queue.first()
            assert request == queue.first()
            queue.remove(request)
            assert admitted <= bound.pop(request)
            admitted += 1
    assert not bound and not queue


def test_ways_of_preemption_give_the_same_tokens():
    """measure raises if the outputs or the number of preemptions are not what they should be."""
    assert set(ch31_swap.measure(MODEL, 70, 2, TEXT, repeat=1)) == set(ch31_swap.WAYS)
    for way in ch31_swap.WAYS:
        core = ch31_swap.make_core(MODEL, way, 70, 2, TEXT)
        before, victim = core.num_scheduled_tokens, core.scheduler.running[-1]
        ch31_swap.step_time(core, True)
        core.blocks.check()
        assert victim.num_preemptions == 1 and victim.swapped_out is None
        assert core.num_scheduled_tokens - before == 2 + {"recompute": 71, "recompute, cached": 71 - 64}.get(way, 1)
