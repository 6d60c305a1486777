"""A radix tree over tokens against hash chains at block sizes 1, 16 and 64: hit rate and host time.

Bookkeeping alone, no model: a request is a prompt and a reply of known tokens, served one after the other. The chains
are the engine's BlockManager; the tree is SGLang's RadixAttention (NeurIPS 2024), its capacity counted in tokens.
"""

import heapq
import random
import statistics
import time
from itertools import chain, count

from engine.serve.blocks import BlockManager
from engine.serve.request import Request

CAPACITY, REQUESTS, REPLY, REPEAT = 4096, 300, 12, 3
SIZES = 1, 16, 64


class Node:
    """An edge and what follows it. All its tokens were last used at the same moment."""

    __slots__ = ("tokens", "children", "parent", "last_used")

    def __init__(self, tokens, parent, last_used):
        self.tokens, self.parent, self.last_used = tokens, parent, last_used
        self.children = {}  # by the first token of their edge


class RadixTree:
    """Cached sequences of tokens, `capacity` tokens at most; the least recently used leaf goes first, tail first.

    match(tokens): how many of the first tokens are cached.  insert(tokens): cache them all.
    """

    def __init__(self, capacity):
        self.capacity, self.size, self.evicted = capacity, 0, 0
        self.root = Node([], None, 0)
        self._leaves = []  # heap of (last_used, serial, node); an entry may be out of date
        self._serial, self._clock = count(), 0

    def walk(self, tokens):
        """-> (the last node of which a token matches, how many of its edge match, how many match in all)."""
        node, place, end = self.root, 0, 0
        while place < len(tokens) and (child := node.children.get(tokens[place])):
            node, edge = child, child.tokens
            end = common(edge, tokens[place : place + len(edge)])
            place += end
            if end < len(edge):
                break
        return node, end, place

    def match(self, tokens):
        return self.walk(tokens)[2]

    def insert(self, tokens):
        """ValueError if there are more than fit."""
        if len(tokens) > self.capacity:
            raise ValueError(f"{len(tokens)} tokens do not fit into {self.capacity}")
        self._clock += 1
        node, end, place = self.walk(tokens)
        if end < len(node.tokens):
            node = self._split(node, end)
        path = node
        while path:  # the whole path is in use now, and so it is evicted last
            path.last_used = self._clock
            path = path.parent
        self._evict(self.size + len(tokens) - place - self.capacity)
        if place < len(tokens):
            leaf = Node(tokens[place:], node, self._clock)
            node.children[tokens[place]] = leaf
            self.size += len(leaf.tokens)
            node = leaf
        self._note(node)

    def _split(self, node, end):
        """Cut an edge in two -> the upper node; only the lower one keeps its time."""
        upper = Node(node.tokens[:end], node.parent, node.last_used)
        upper.parent.children[upper.tokens[0]] = upper
        node.tokens, node.parent = node.tokens[end:], upper
        upper.children[node.tokens[0]] = node
        return upper

    def _note(self, node):
        if not node.children and node is not self.root:
            heapq.heappush(self._leaves, (node.last_used, next(self._serial), node))

    def _evict(self, num_tokens):
        """Forget so many tokens: the tail of the oldest leaf first."""
        self.evicted += max(0, num_tokens)
        self.size -= max(0, num_tokens)
        while num_tokens > 0:
            last_used, _, leaf = self._leaves[0]
            if leaf.children or leaf.last_used != last_used or not leaf.tokens:
                heapq.heappop(self._leaves)  # it has grown, was used again, or is gone
                continue
            cut = min(num_tokens, len(leaf.tokens))
            num_tokens -= cut
            if cut < len(leaf.tokens):
                del leaf.tokens[-cut:]
            else:
                del leaf.parent.children[leaf.tokens[0]]
                leaf.tokens = []
                self._note(leaf.parent)

    def sequences(self):
        """Every cached sequence that is no beginning of another one: from the root to a leaf."""
        stack = [(self.root, [])]
        while stack:
            node, before = stack.pop()
            tokens = before + node.tokens
            stack += [(child, tokens) for child in node.children.values()]
            if not node.children:
                yield tokens


def common(a, b):
    """Length of the common beginning of two lists."""
    if a == b:  # the usual case, and fast
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Tree:
    """The radix tree as a cache of requests."""

    def __init__(self):
        self.tree = RadixTree(CAPACITY)

    def serve(self, prompt, reply):
        """-> tokens adopted; the last of the prompt is always computed."""
        adopted = min(self.tree.match(prompt), len(prompt) - 1)
        self.tree.insert(prompt + reply)
        return adopted


class Chains:
    """The engine's blocks as a cache of requests."""

    def __init__(self, block_size):
        self.blocks = BlockManager(CAPACITY // block_size, block_size)

    def serve(self, prompt, reply):
        blocks, request = self.blocks, Request("r", prompt, arrival_time=0.0)
        cached = blocks.find_cached_prefix(request)
        adopted = len(cached) * blocks.block_size
        blocks.allocate_slots(request, len(prompt) - adopted, cached)
        request.num_computed_tokens = len(prompt)
        request.token_ids += reply
        if not blocks.allocate_slots(request, len(reply)):
            raise RuntimeError(f"a request of {request.num_tokens} tokens does not fit into the pool")
        blocks.cache_full_blocks(request, request.num_tokens)
        blocks.free(request)
        return adopted


CACHES = {"tree": Tree} | {f"chains of {size}": lambda size=size: Chains(size) for size in SIZES}


def shared_prompt(text, rng, requests):
    """One system prompt of 150 tokens, another question each time."""
    for _ in range(requests):
        yield text[:150] + piece(text, rng, 16, 64), piece(text, rng, REPLY, REPLY)


def branching(text, rng, requests):
    """Conversations that go on from any earlier turn: half of the time from the newest turn, else from an old one."""
    turns = []
    for _ in range(requests):
        fresh = not turns or rng.random() < 0.1
        before = [] if fresh else turns[-1] if rng.random() < 0.5 else rng.choice(turns[-40:])
        if len(before) > 600:
            before = before[:300]
        prompt, reply = before + piece(text, rng, 8, 40), piece(text, rng, REPLY, REPLY)
        turns.append(prompt + reply)
        yield prompt, reply


def templates(text, rng, requests):
    """40 tokens for all, then one of 40 names, then 150 tokens of instructions that all share, then a question."""
    names = [piece(text, rng, 3, 9) for _ in range(40)]
    for _ in range(requests):
        yield text[:40] + rng.choice(names) + text[40:190] + piece(text, rng, 8, 24), piece(text, rng, REPLY, REPLY)


def piece(text, rng, low, high):
    length = rng.randint(low, high)
    start = rng.randrange(len(text) - length)
    return text[start : start + length]


WORKLOADS = {"shared prompt": shared_prompt, "branching": branching, "early difference": templates}


def check(work):
    """The tree's match is the longest common beginning with anything it holds, by brute force; AssertionError."""
    cache = Tree()
    for prompt, reply in work:
        longest = max(common(prompt, tokens) for tokens in cache.tree.sequences())
        assert cache.tree.match(prompt) == longest, (cache.tree.match(prompt), longest)
        cache.serve(prompt, reply)
        assert cache.tree.size == tree_size(cache.tree.root) <= CAPACITY


def tree_size(node):
    return len(node.tokens) + sum(map(tree_size, node.children.values()))


def main(model, verses, seed):
    text = list(chain(*verses))
    print(f"{REQUESTS} requests, {CAPACITY} tokens of cache; hit rate, and host µs a request, median of {REPEAT}")
    print("ceiling: the hit rate token by token if nothing were evicted\n")
    print(f"{'':18}{'tokens':>7}{'ceiling':>9}" + "".join(f"{name:>20}" for name in CACHES))
    rates, times = {}, {}
    for workload, make in WORKLOADS.items():
        work = list(make(text, random.Random(seed), REQUESTS))
        check(work)
        known = sum(len(prompt) for prompt, _ in work)
        seconds = {name: [] for name in CACHES}
        for _ in range(REPEAT):
            for name, cache in CACHES.items():  # in turn, so that a slow moment of the machine meets all of them
                cache = cache()
                begin = time.perf_counter()
                adopted = sum(cache.serve(prompt, reply) for prompt, reply in work)
                seconds[name].append(time.perf_counter() - begin)
                rates[workload, name] = adopted / known
        for name in CACHES:
            times[workload, name] = 1e6 * statistics.median(seconds[name]) / REQUESTS
        cells = (f"{rates[workload, name]:.3f} {times[workload, name]:8.0f} µs" for name in CACHES)
        limit = ceiling(work) / known
        print(f"{workload:18}{known / REQUESTS:>7.0f}{limit:>9.3f}" + "".join(f"{cell:>20}" for cell in cells))
    print("\nthe tree's matches are those of a brute-force search")
    return plot(rates, times)


def ceiling(work):
    """Tokens that a cache without limit would adopt, by brute force."""
    seen, adopted = [], 0
    for prompt, reply in work:
        adopted += min(max((common(prompt, tokens) for tokens in seen), default=0), len(prompt) - 1)
        seen.append(prompt + reply)
    return adopted


def plot(rates, times):
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    width = 0.8 / len(CACHES)
    for axis, values in ((left, rates), (right, times)):
        for i, name in enumerate(CACHES):
            places = [x + (i - 1.5) * width for x in range(len(WORKLOADS))]
            axis.bar(places, [values[workload, name] for workload in WORKLOADS], width, label=name)
        axis.set_xticks(range(len(WORKLOADS)), WORKLOADS)
    left.set(ylabel="tokens adopted / known", ylim=(0, 1), title="Hit rate")
    right.set(yscale="log", ylim=(1, None), ylabel="µs a request", title="Host time")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure
