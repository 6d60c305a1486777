"""Who is admitted next: the first, the one with the longest cached prefix, or that one with a rule against starvation.

Two streams, in a pool that holds the opening of one family of prompts: families A and B alternate; then family A comes
as fast as it is served, with some of B and one request of a third family, C. Hit rates, and steps waited.
"""

import math
import random
from dataclasses import dataclass
from itertools import chain

from engine.serve.config import EngineConfig
from engine.serve.engine import EngineCore
from engine.serve.queue import FCFSQueue
from engine.serve.request import SamplingParams

OPENING, QUESTION, OUTPUT = 192, (17, 28), 4
NUM_BLOCKS = 18  # of 16 tokens: 12 for an opening, 3 for the rest of each of two requests
PATIENCE = 8
LENGTHS = 20, 40, 80  # requests of family A in the second stream
RULES = {"first come": None, "longest cached": math.inf, "longest, ageing": PATIENCE}


class LongestCachedFirst(FCFSQueue):
    """The waiting request with the most cached tokens goes first, the older one among equals.

    patience: once that many in a row have gone before the oldest, the oldest is next, and the count starts again. So a
    request that finds m others waiting is admitted after (m + 1) * (patience + 1) others at most. math.inf: never.
    `first` looks up every waiting request; their hashes are computed once.
    """

    def __init__(self, blocks, patience=math.inf):
        super().__init__()
        self.blocks, self.patience, self.num_passed = blocks, patience, 0

    def first(self):
        if self.num_passed >= self.patience:
            return super().first()
        return max(self, key=lambda request: len(self.blocks.find_cached_prefix(request)))

    def remove(self, request):
        self.num_passed = 0 if request is super().first() else self.num_passed + 1
        super().remove(request)


@dataclass
class Arrival:
    """A prompt and the step before which it arrives."""

    step: int
    family: str
    prompt: list[int]


def make_prompts(text, seed):
    """prompt(family): its opening and a question of its own, all from the book."""
    rng = random.Random(seed)

    def prompt(family):
        start = OPENING * "ABC".index(family)
        length, place = rng.randint(*QUESTION), rng.randrange(3 * OPENING, len(text) - QUESTION[1])
        return text[start : start + OPENING] + text[place : place + length]

    return prompt


def alternating(text, seed, count=24):
    """A, B, A, B, ...: one every other step."""
    prompt = make_prompts(text, seed)
    return [Arrival(2 * i, "AB"[i % 2], prompt("AB"[i % 2])) for i in range(count)]


def starving(text, seed, count):
    """Four of A at once, then one every other step, as fast as two at a time are served; C in step 4; a tenth is B."""
    prompt = make_prompts(text, seed)
    stream = [Arrival(max(0, 2 * (i - 4)), "A", prompt("A")) for i in range(count)]
    stream += [Arrival(2 * i, "B", prompt("B")) for i in range(5, count, 10)]
    return sorted([*stream, Arrival(4, "C", prompt("C"))], key=lambda arrival: arrival.step)


def serve(model, stream, patience, num_blocks=NUM_BLOCKS):
    """-> (core, outputs, steps that each request waited for its first admission), in the order of the stream."""
    config = EngineConfig(num_blocks=num_blocks, max_num_seqs=2)
    core = EngineCore(model, config)
    if patience is not None:
        core.scheduler.waiting = LongestCachedFirst(core.blocks, patience)
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
    waits, outputs, requests = {}, {}, {}
    now = added = 0
    while added < len(stream) or core.has_unfinished:
        while added < len(stream) and stream[added].step <= now:
            core.add_request(added, stream[added].prompt, params)
            requests[added] = core.scheduler.requests[added]
            added += 1
        outputs.update((output.request_id, output.output_token_ids) for output in core.step() if output.finished)
        for i, request in list(requests.items()):
            if request.num_cached_tokens is not None:  # set at its first admission
                waits[i] = now - stream[i].step
                del requests[i]
        now += 1
    return core, [outputs[i] for i in range(added)], [waits[i] for i in range(added)]


def compare(model, stream):
    """{rule: (hit rate, waits, steps)}; RuntimeError if a rule changes what anybody is told."""
    results, first = {}, None
    for rule, patience in RULES.items():
        core, outputs, waits = serve(model, stream, patience)
        first = first or outputs
        if outputs != first:
            raise RuntimeError(f"{rule}: the outputs differ")
        results[rule] = core.blocks.hit_rate, waits, core.num_steps
    return results


def main(model, verses, seed):
    text = list(chain(*verses))
    stream = alternating(text, seed)
    both = compare(model, stream)
    print(f"openings of {OPENING} tokens, questions of {QUESTION[0]}-{QUESTION[1]}, pool of {16 * NUM_BLOCKS} tokens")
    print(f"\nA and B alternate, {len(stream)} requests")
    print(f"{'':17}{'hit rate':>9}{'steps':>7}{'mean wait':>11}{'longest':>9}")
    for rule, (rate, waits, steps) in both.items():
        print(f"{rule:17}{rate:>9.3f}{steps:>7}{sum(waits) / len(waits):>11.1f}{max(waits):>9}")
    gain = [rate - both["first come"][0] for rate, _, _ in both.values()]
    print(f"ageing keeps {gain[2] / gain[1]:.0%} of the gain")

    print(f"\nA without a pause, a tenth of B, one C; steps waited, patience {PATIENCE}")
    print(f"{'':17}{'of A':>6}{'hit rate':>10}{'steps':>7}{'C waits':>9}{'longest of others':>19}")
    waits_of_c = {rule: [] for rule in RULES}
    for count in LENGTHS:
        stream = starving(text, seed, count)
        families = [arrival.family for arrival in stream]
        place = families.index("C")
        for rule, (rate, waits, steps) in compare(model, stream).items():
            waits_of_c[rule].append(waits[place])
            others = max(waits[:place] + waits[place + 1 :])
            print(f"{rule:17}{count:>6}{rate:>10.3f}{steps:>7}{waits[place]:>9}{others:>19}")
    print("the outputs are the same under all three rules")
    return plot({rule: rate for rule, (rate, _, _) in both.items()}, waits_of_c)


def plot(rates, waits_of_c):
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 4.2), layout="constrained")
    bars = left.bar(range(len(rates)), rates.values(), color=["C0", "C1", "C2"], width=0.6)
    left.set_xticks(range(len(rates)), rates)
    left.bar_label(bars, fmt="%.2f")
    left.set(ylabel="tokens adopted / known", ylim=(0, 1), title="Two families alternate: hit rate")
    for (rule, waits), style in zip(waits_of_c.items(), ("o-", "s-", "^-"), strict=True):
        right.plot(LENGTHS, waits, style, label=rule)
    right.set(xlabel="requests of family A in the stream", ylabel="steps until admission", ylim=(0, None))
    right.set_title("A as fast as it is served: how long C waits")
    right.set_xticks(LENGTHS)
    right.grid(alpha=0.3)
    right.legend()
    return figure
