"""How much of the chats' history the prefix cache still holds, against the size of the pool.

Every turn's prompt is the whole conversation so far and a new question. ALIVE chats are open at any time; a chat that
ends makes way for the next one. Counted in each step: tokens adopted and computed, evictions, and how many blocks are
in use, cached-free and empty-free.
"""

import random
from dataclasses import dataclass, field
from itertools import accumulate, chain

from engine.serve.config import EngineConfig
from engine.serve.engine import EngineCore
from engine.serve.request import SamplingParams

ALIVE, CHATS, TURNS, QUESTION, REPLY, PAUSE = 8, 20, (3, 6), (24, 56), 8, (2, 12)
POOLS = (32, 48, 56, 64, 72, 80, 88, 96, 128, 160)
AMPLE = 640  # blocks: nothing is ever evicted
SHOWN = 64  # the pool whose steps are printed and plotted
COUNTERS = ("tokens_known", "tokens_adopted", "evictions")


@dataclass
class Chat:
    """One conversation: its questions, and the pause in steps before each."""

    questions: list[list[int]]
    pauses: list[int]
    history: list[int] = field(default_factory=list)
    turn: int = 0


def make_chats(verses, seed, count=CHATS):
    """Questions are pieces of the book, no piece twice until all had their turn, so no two chats begin alike."""
    rng = random.Random(seed)
    text = list(chain(*verses))
    place, chats = rng.randrange(len(text)), []
    for _ in range(count):
        chat = Chat([], [])
        for _ in range(rng.randint(*TURNS)):
            length = rng.randint(*QUESTION)
            chat.questions.append([text[(place + i) % len(text)] for i in range(length)])
            chat.pauses.append(rng.randint(*PAUSE))
            place += length
        chats.append(chat)
    return chats


def serve(model, chats, num_blocks, alive=ALIVE, reply=REPLY):
    """Run all chats through one engine -> (core, one dict of counters a step)."""
    core = EngineCore(model, EngineConfig(num_blocks=num_blocks, max_num_seqs=4))
    params = SamplingParams(max_tokens=reply, ignore_eos=True)
    waiting = list(enumerate(chats))
    due = {}  # open chats that will ask -> the step in which they do
    asking = {}  # open chats that wait for a reply, by request id
    steps, now = [], 0

    def open_next():
        if waiting:
            name, chat = waiting.pop(0)
            due[name] = now + chat.pauses[0]

    for _ in range(alive):
        open_next()
    while due or asking:
        for name in [name for name, step in due.items() if step <= now]:
            del due[name]
            chat = chats[name]
            chat.history += chat.questions[chat.turn]
            core.add_request(f"{name}-{chat.turn}", chat.history, params)
            asking[f"{name}-{chat.turn}"] = name
        size = sum(len(chats[name].history) for name in (*due, *asking.values()))
        before = count(core)
        outputs = core.step()
        steps.append({key: value - before[key] for key, value in count(core).items()} | gauges(core) | {"alive": size})
        now += 1
        for output in outputs:
            if output.finished:
                name = asking.pop(output.request_id)
                chat = chats[name]
                chat.history += output.output_token_ids
                chat.turn += 1
                if chat.turn < len(chat.questions):
                    due[name] = now + chat.pauses[chat.turn]
                else:
                    open_next()
    return core, steps


def count(core):
    """What has been counted so far."""
    counted = {name: getattr(core.blocks.stats, name) for name in COUNTERS}
    return counted | {"computed": core.num_scheduled_tokens, "preemptions": core.num_preemptions}


def gauges(core):
    """Blocks in each of the three states."""
    blocks = core.blocks
    cached_free = sum(blocks.hashes[block] is not None for block in blocks.free_blocks)
    return {
        "in use": blocks.num_blocks - blocks.num_free,
        "cached-free": cached_free,
        "empty-free": blocks.num_free - cached_free,
    }


def total(steps, key):
    return sum(step[key] for step in steps)


def find_knee(rates, ceiling, share=0.95):
    """The smallest pool from which on the hit rate is at least that share of the ceiling; None if there is none."""
    knee = None
    for pool in sorted(rates, reverse=True):
        if rates[pool] < share * ceiling:
            break
        knee = pool
    return knee


def main(model, verses, seed):
    runs = {pool: serve(model, make_chats(verses, seed), pool) for pool in (*POOLS, AMPLE)}
    turns = sum(len(chat.questions) for chat in make_chats(verses, seed))
    print(f"{CHATS} chats, {ALIVE} open at a time, {turns} turns; blocks of 16 tokens")
    print(f"{'blocks':>6}{'tokens':>8}{'hit rate':>10}{'adopted':>9}{'computed':>10}{'evictions':>11}{'preempted':>11}")
    for pool, (core, steps) in runs.items():
        adopted, computed = total(steps, "tokens_adopted"), total(steps, "computed")
        print(
            f"{pool:>6}{16 * pool:>8}{core.blocks.hit_rate:>10.3f}{adopted:>9}{computed:>10}"
            f"{total(steps, 'evictions'):>11}{total(steps, 'preemptions'):>11}"
        )
    core, steps = runs[AMPLE]
    if total(steps, "evictions"):
        raise RuntimeError(f"{AMPLE} blocks are too few to evict nothing")
    rates = {pool: core.blocks.hit_rate for pool, (core, _) in runs.items()}
    knee = find_knee(rates, rates[AMPLE])
    sizes = [step["alive"] for step in steps]
    working_set = sum(sizes) / len(sizes), max(sizes)
    print(f"95 % of the hit rate without evictions ({rates[AMPLE]:.3f}) from {knee} blocks = {16 * knee} tokens on")
    print(f"all conversations alive: {working_set[0]:.0f} tokens on average, {working_set[1]} at most")

    steps = runs[SHOWN][1]
    print(f"\n{SHOWN} blocks, sums of 12 parts of the {len(steps)} steps; blocks at the end of each part")
    head = f"{'steps':>9}{'adopted':>9}{'computed':>10}{'evictions':>11}"
    print(head + f"{'in use':>8}{'cached-free':>13}{'empty-free':>12}")
    for i in range(12):
        part = slice(i * len(steps) // 12, (i + 1) * len(steps) // 12)
        sums = [total(steps[part], key) for key in ("tokens_adopted", "computed", "evictions")]
        last = steps[part.stop - 1]
        print(
            f"{f'{part.start}-{part.stop - 1}':>9}{sums[0]:>9}{sums[1]:>10}{sums[2]:>11}"
            f"{last['in use']:>8}{last['cached-free']:>13}{last['empty-free']:>12}"
        )
    return plot(rates, working_set, knee, steps)


def plot(rates, working_set, knee, steps):
    import matplotlib.pyplot as plt

    figure, (upper, middle, lower) = plt.subplots(3, figsize=(8, 9.5), layout="constrained")
    pools = [pool for pool in rates if pool != AMPLE]
    upper.plot([16 * pool for pool in pools], [rates[pool] for pool in pools], "o-")
    upper.axhline(rates[AMPLE], color="grey", linestyle=":", label="nothing evicted")
    upper.axvspan(*working_set, color="C1", alpha=0.3, label="all conversations alive: average to maximum")
    upper.axvline(16 * knee, color="C3", linestyle="--", label="95 % of the hit rate without evictions")
    upper.set(xlabel="pool, tokens", ylabel="tokens adopted / known", ylim=(0, 1), title="Chats of several turns")
    upper.legend(loc="lower right")

    numbers = range(len(steps))
    states = ("in use", "cached-free", "empty-free")
    middle.stackplot(
        numbers, *([step[state] / SHOWN for step in steps] for state in states), labels=states,
        colors=("C0", "C2", "lightgrey"), step="post",
    )  # fmt: skip
    middle.set(ylabel="share of the pool", ylim=(0, 1), xlim=(0, len(steps)), title=f"Step by step, {SHOWN} blocks")
    middle.legend(loc="lower left")
    for key, label, size in (
        ("tokens_adopted", "tokens adopted", 1),
        ("computed", "tokens computed", 1),
        ("evictions", "tokens in evicted blocks", 16),
    ):
        lower.plot(numbers, list(accumulate(size * step[key] for step in steps)), label=label)
    lower.set(xlabel="step", ylabel="so far", xlim=(0, len(steps)), ylim=(0, None))
    lower.legend(loc="upper left")
    return figure
