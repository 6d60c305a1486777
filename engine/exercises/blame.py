"""`run.py blame`: which written functions make a chapter's tests fail.

The failing tests are run again with some functions replaced by the reference (`--borrow`); the smallest set that makes
all of them pass is at fault. A test that grades a borrowed function runs too, on the answer; the answer still calls
whatever else is the student's, so borrowing a function does not hide what it depends on. What is not written yet is
borrowed by name in every run, so that tests of the whole engine, which grade several exercises, count as evidence.
"""

import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import combinations

from engine.exercises import graders
from engine.exercises.catalog import Catalog
from engine.exercises.listing import chapter_number
from engine.exercises.registry import Exercise

Passes = Callable[[tuple[str, ...]], bool]
PAIRS = 30  # more pairs than this are not all tried
LIMIT = 20.0  # seconds for one test, unless a passing one needs longer


def blame(catalog: Catalog, chapter: str) -> int:
    """Print who is at fault. 0: no test fails; 1: some do. Raises ValueError when there is nothing to run."""
    number = chapter_number(catalog, chapter)
    targets = graders.test_files(catalog.root, [number])
    if not targets:
        raise ValueError(f"no tests/test_ch{number:02d}_*.py to run")
    if catalog.damaged:
        raise ValueError(catalog.damaged[0])
    within = [ex for ex in catalog.exercises if ex.chapter <= number]  # a chapter uses only earlier ones
    written = [ex for ex in within if ex.written]
    if not written:
        print(f"nothing up to chapter {number} is written yet, so nothing of yours can be at fault")
        return 0
    given = [ex.name for ex in within if not ex.written]
    _note(f"running {', '.join(targets)}")
    base = graders.run(catalog.root, targets, borrow=given)
    for file, why in base.errors.items():
        print(f"{file} cannot be collected: {why}")
    failing = base.with_outcome("failed")
    if not failing:
        if not base.errors:
            print(f"no test of chapter {number} fails: {len(base.with_outcome('passed'))} pass with your code")
        return 1 if base.errors else 0
    print(f"{len(failing)} of {len(base.tests)} tests of chapter {number} fail with your code")
    slowest = max((base.tests[test]["seconds"] for test in base.with_outcome("passed")), default=0.0)
    search = _Search(catalog, given, max(LIMIT, 4 * slowest))
    names = _by_suspicion(written, base, number)
    singles = [(name,) for name in names]
    found = first_passing(singles, lambda some: search.passes(failing, some), search.jobs)
    if not found:
        outside = search.failing(failing, names)
        for test, message in outside.items():
            print(f"not in an exercise: {test} fails with every answer too: {message.splitlines()[0]}")
        failing = [test for test in failing if test not in outside]
        if not failing:
            return 1
        again = singles if outside else ()
        found = smallest_set(names, lambda some: search.passes(failing, some), search.jobs, singles=again)
    _report(catalog, found, failing, base)
    return 1


class _Search:
    """Reruns of failing tests."""

    def __init__(self, catalog: Catalog, given: list[str], limit: float):
        cores = os.cpu_count() or 1
        self.root, self.given, self.limit = catalog.root, given, limit
        self.jobs = min(4, cores)
        self.threads = max(1, cores // self.jobs)

    def failing(self, tests: list[str], borrow: Iterable[str]) -> dict[str, str]:
        """Those tests that still fail, with their messages."""
        run = graders.run(self.root, tests, borrow=[*self.given, *borrow], limit=self.limit)
        return {test: run.tests[test]["message"] or "fails" for test in run.with_outcome("failed")}

    def passes(self, tests: list[str], borrow: Iterable[str]) -> bool:
        names = [*self.given, *borrow]
        _note(f"with the reference {', '.join(name.split('.', 2)[-1] for name in borrow)}")
        run = graders.run(
            self.root, tests, borrow=names, first_failure=True, limit=self.limit, threads=self.threads
        )  # fmt: skip
        return run.status == 0


def smallest_set(names: list[str], passes: Passes, jobs: int = 1, singles: Iterable = ()) -> tuple[str, ...]:
    """A smallest set of names with `passes(set)`, given that all of them together pass.

    Of single names only `singles` are tried, for the caller may have been through them. Then halves, quarters and so
    on are left out of the whole while it still passes (delta debugging). What remains cannot lose a name; if it is
    larger than a pair and there are not too many pairs, those are tried as well. Exact when replacing more never makes
    a passing test fail.
    """
    passes = cache(passes)
    if found := first_passing(list(singles), passes, jobs):
        return found
    reduced = without_needless(names, passes)
    pairs = list(combinations(names, 2))
    if len(reduced) > 2 and len(pairs) <= PAIRS:
        return first_passing(pairs, passes, jobs) or reduced
    return reduced


def without_needless(names: Iterable[str], passes: Passes) -> tuple[str, ...]:
    names = tuple(names)
    size = len(names) // 2
    while size:
        at = 0
        while at < len(names) and len(names) > size:
            rest = names[:at] + names[at + size :]
            if passes(rest):
                names = rest
            else:
                at += size
        size //= 2
    return names


def first_passing(sets: list[tuple[str, ...]], passes: Passes, jobs: int) -> tuple[str, ...] | None:
    with ThreadPoolExecutor(jobs) as pool:
        for at in range(0, len(sets), jobs):
            some = sets[at : at + jobs]
            for candidate, good in zip(some, pool.map(passes, some), strict=True):
                if good:
                    return candidate
    return None


def _by_suspicion(written: list[Exercise], base: graders.Run, chapter: int) -> list[str]:
    """First those whose own graders fail most, then the chapter's, then earlier ones."""

    def key(ex: Exercise):
        graded = [entry["outcome"] for entry in base.tests.values() if ex.name in entry["graded"]]
        return -graded.count("failed"), ex.chapter != chapter, ex.name

    return [ex.name for ex in sorted(written, key=key)]


def _report(catalog: Catalog, found: tuple[str, ...], failing: list[str], base: graders.Run) -> None:
    exercises = [ex for ex in catalog.exercises if ex.name in found]
    elsewhere = sum(not set(found) & set(base.tests[test]["graded"]) for test in failing)
    for ex in exercises:
        print(f"at fault: {ex.where} {ex.qualname}")
    place = "its place" if len(found) == 1 else "their places: no one of them is enough, nor can one be left out"
    tests = "the failing test passes" if len(failing) == 1 else f"all {len(failing)} failing tests pass"
    print(f"  {tests} with the reference in {place}")
    if elsewhere:
        print(f"  {elsewhere} of the failing tests grade{'s' * (elsewhere == 1)} something else")
    for ex in exercises:
        message = next((base.tests[test]["message"] for test in failing if ex.name in base.tests[test]["graded"]), "")
        for line in message.splitlines():
            print(f"  {line}")
        print(f"  python run.py hint {catalog.short(ex)}   {catalog.link(ex)}")


def _note(text: str) -> None:
    """Where the search is, for somebody who waits."""
    if sys.stderr.isatty():
        print(f"… {text}", file=sys.stderr)
