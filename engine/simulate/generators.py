"""Traces made up from a seed: Poisson arrivals, bursts, chats whose prompt grows, a tree of shared prefixes.

Lengths are lognormal around the median that is asked for. Their spread is that of the Azure conversation trace of 2023
(Splitwise, ISCA 2024): prompts of 1,020 tokens in the median and 4,142 at the 99th percentile, so
ln(4142 / 1020) / 2.326 = 0.60, the 99th percentile of a normal distribution being 2.326 deviations away; answers of
129 and 601, 0.66.
"""

import math
import random
from dataclasses import dataclass, replace

from engine.simulate.arrivals import Arrival, shared

PROMPT_SPREAD, OUTPUT_SPREAD = 0.60, 0.66


@dataclass(frozen=True)
class Shape:
    """What a generator is asked for; ValueError for values that make no trace.

    rate: requests a second on average (chat: new chats).  prompt_tokens, output_tokens: medians, of what is a
    request's own.  prefix_tokens: length of each shared prefix.  groups: of poisson and bursts, as many prefixes; 0 is
    none.  burst: requests that arrive at once.  turns, think: a chat's mean number of turns, and the mean seconds from
    an answer's end to the next turn.  depth, branching: of the tree.  priorities: that many levels, drawn at random.
    """

    requests: int = 1000
    rate: float = 4.0
    seed: int = 0
    prompt_tokens: int = 1020
    output_tokens: int = 129
    prefix_tokens: int = 512
    groups: int = 0
    burst: int = 20
    turns: int = 5
    think: float = 10.0
    depth: int = 3
    branching: int = 4
    priorities: int = 1

    def __post_init__(self):
        lows = {"groups": 0, "think": 0, "prefix_tokens": 0, "seed": None}
        for name in self.__dataclass_fields__:
            value, low = getattr(self, name), lows.get(name, 1)
            if name == "rate" and not (math.isfinite(value) and value > 0):
                raise ValueError(f"rate must be a positive number, got {value}")
            if name != "rate" and low is not None and not (math.isfinite(value) and value >= low):
                raise ValueError(f"{name} must be at least {low}, got {value}")


def length(rng: random.Random, median: int, spread: float) -> int:
    return max(1, round(median * math.exp(spread * rng.gauss(0, 1))))


def lengths(rng: random.Random, shape: Shape) -> tuple[int, int]:
    """Of the own part of a prompt, and of its answer."""
    return length(rng, shape.prompt_tokens, PROMPT_SPREAD), length(rng, shape.output_tokens, OUTPUT_SPREAD)


def poisson(shape: Shape) -> list[Arrival]:
    """Independent arrivals at a constant mean rate."""
    return _independent(replace(shape, burst=1))


def bursts(shape: Shape) -> list[Arrival]:
    """The same mean rate, but `burst` requests at a time."""
    return _independent(shape)


def _independent(shape: Shape) -> list[Arrival]:
    rng, at, arrivals = random.Random(shape.seed), 0.0, []
    for i in range(shape.requests):
        if i % shape.burst == 0:
            at += rng.expovariate(shape.rate / shape.burst)
        own, answer = lengths(rng, shape)
        prefix = ((shared(rng.randrange(shape.groups)), shape.prefix_tokens),) if shape.groups else ()
        arrivals.append(_arrival(rng, shape, at, (*prefix, (i, own)), answer, i))
    return arrivals


def chat(shape: Shape) -> list[Arrival]:
    """Conversations: a turn's prompt is all that was said so far and a new message; one system prompt for all.

    A turn comes `think` seconds, on average and exponentially, after the answer before it has ended: a closed loop
    within a chat, an open one between chats. 1 to 2 * turns - 1 turns, each number as likely.
    """
    rng, begin, arrivals = random.Random(shape.seed), 0.0, []
    while len(arrivals) < shape.requests:
        begin += rng.expovariate(shape.rate)
        said, before, at = ((shared(0), shape.prefix_tokens),), None, begin
        for _ in range(rng.randint(1, 2 * shape.turns - 1)):
            if len(arrivals) == shape.requests:
                break
            i = len(arrivals)
            message, answer = lengths(rng, shape)
            arrivals.append(_arrival(rng, shape, at, (*said, (i, message)), answer, i, before))
            said = (*said, (i, message + answer))
            before, at = i, (rng.expovariate(1 / shape.think) if shape.think else 0.0)
    return arrivals


def tree(shape: Shape) -> list[Arrival]:
    """Prompts that begin with a path from the root to a leaf, each node a piece of text: a tree of templates, say."""
    rng, at, arrivals = random.Random(shape.seed), 0.0, []
    for i in range(shape.requests):
        at += rng.expovariate(shape.rate)
        node, path = 0, []
        for level in range(shape.depth):
            if level:
                node = node * shape.branching + 1 + rng.randrange(shape.branching)
            path.append((shared(node), shape.prefix_tokens))
        own, answer = lengths(rng, shape)
        arrivals.append(_arrival(rng, shape, at, (*path, (i, own)), answer, i))
    return arrivals


def _arrival(rng, shape, at, prompt, answer, i, after=None) -> Arrival:
    priority = rng.randrange(shape.priorities)
    return Arrival(at, tuple(run for run in prompt if run[1]), answer, i, after, priority)


GENERATORS = {"poisson": poisson, "bursts": bursts, "chat": chat, "tree": tree}
