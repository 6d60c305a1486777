"""Random traffic and faults for as long as one likes; the first thing that breaks is shrunk and printed for replay."""

import json
import random
import sys
import time
from collections import Counter

from engine.exercises import registry
from engine.milestones.episode import Episode, draw_config

PATIENCE = 60  # seconds for shrinking


class Failed(AssertionError):
    """What broke, and the shortest case found that still breaks, as a line of Python."""


def replay(config: dict, actions: list[tuple]) -> Counter:
    """Carry out a printed case; raises what it raises."""
    episode = Episode(config)
    for action in actions:
        episode.do(action)
    episode.finish()
    return episode.counts


def play(seed: int, length: int) -> Counter:
    """One episode drawn from a seed, that many actions long; Failed with a shrunken case if anything breaks."""
    rng = random.Random(seed)
    config, actions = draw_config(rng), []
    episode = Episode(config)
    try:
        for number in range(length):
            actions.append(episode.draw(rng, number))
            episode.do(actions[-1])
        episode.finish()
    except Exception as error:
        config, actions, last = shrink(config, actions, error)
        case = f"from engine.milestones.soak import replay; replay({config!r}, {actions!r})"
        raise Failed(f"seed {seed}: {describe(last)}\nreplay with IMPL=solution python -c {case!r}") from error
    return episode.counts


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def failure_of(config, actions) -> Exception | None:
    try:
        replay(config, actions)
    except Exception as error:
        return error
    return None


def shrink(config: dict, actions: list[tuple], error: Exception) -> tuple:
    """(config, actions, error): leave out runs of actions, large ones first, while an error of that type remains.

    Source: delta debugging (Zeller and Hildebrandt, 2002).
    """
    deadline, size = time.monotonic() + PATIENCE, len(actions) // 2
    while size:
        i, long = 0, len(actions)
        while i < len(actions) and time.monotonic() < deadline:
            fewer = actions[:i] + actions[i + size :]
            found = failure_of(config, fewer)
            if type(found) is type(error):
                actions, error = fewer, found
            else:
                i += size
        if size > 1 or len(actions) == long:  # single ones again, as long as that helps
            size //= 2
    return config, actions, error


def soak(seconds: float, seed: int, report, least_steps: int = 0) -> Counter:
    """Episode after episode until the time is over and so many steps are done; report(counts, elapsed) now and then."""
    counts, begin, told = Counter(), time.monotonic(), 0.0
    while (elapsed := time.monotonic() - begin) < seconds or counts["steps"] < least_steps:
        length = 2000 if counts["episodes"] % 20 == 19 else 120
        counts += play(seed + counts["episodes"], length)
        counts["episodes"] += 1
        if elapsed - told > 30:
            told = elapsed
            report(counts, elapsed)
    return counts


def main(args) -> int:
    if args.minutes <= 0:
        raise ValueError(f"--minutes must be above 0, got {args.minutes}")
    seed = random.SystemRandom().randrange(1 << 31) if args.seed is None else args.seed
    print(registry.who_wrote(), file=sys.stderr)
    registry.require_all_exercises()
    print(f"seed {seed}, {args.minutes:g} minutes", file=sys.stderr)

    def report(counts, elapsed):
        print(f"{elapsed / 60:6.1f} min {counts['steps']:10,} steps {counts['episodes']:8,} engines", file=sys.stderr)

    begin = time.monotonic()
    try:
        counts = soak(60 * args.minutes, seed, report)
    except Failed as failed:
        print(failed, file=sys.stderr)
        return 1
    line = {"seed": seed, "minutes": round((time.monotonic() - begin) / 60, 1), "failures": 0}
    print(json.dumps(line | {key: counts[key] for key in sorted(counts)}))
    return 0
