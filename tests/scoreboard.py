"""What stands at the end of a run: by exercise, passed, wrong and not written, and the one thing to do next."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from engine.exercises.catalog import Catalog
from engine.exercises.registry import Exercise, impl
from tests.sections import ROOT
from tests.verdicts import Verdict, is_blank


@dataclass
class Score:
    passed: int = 0
    failed: int = 0
    not_written: int = 0
    waiting: int = 0  # tests that say nothing before another exercise is written or mended
    messages: list[str] = field(default_factory=list)


class Scoreboard:
    """Collects one result for each test that grades something; only: names of the exercises that are asked about."""

    def __init__(self, only=()):
        self.only = only
        self.tests: dict[str, tuple[list[Exercise], Verdict | None]] = {}

    def add(self, test: str, graded: list[Exercise], verdict: Verdict | None) -> None:
        """verdict None: passed. A failure counts, whichever phase of the test it comes from."""
        if verdict is not None or test not in self.tests:
            self.tests[test] = (graded, verdict)

    def scores(self) -> dict[str, tuple[Exercise, Score]]:
        scores: dict[str, tuple[Exercise, Score]] = {}
        blamed = self._blamed()
        for test, (graded, verdict) in self.tests.items():
            blank = verdict.exercises if verdict and verdict.kind == "not written" else []
            for ex in dict.fromkeys([*(e.name for e in graded), *(e.name for e in blank)]):
                owner = next(e for e in [*graded, *blank] if e.name == ex)
                if is_blank(owner) and not blank:
                    continue  # borrowed: the test said nothing about it
                score = scores.setdefault(ex, (owner, Score()))[1]
                if verdict is None:
                    score.passed += 1
                elif owner.name in blamed.get(test, ()):
                    score.failed += 1
                    score.messages.append(verdict.text)
                elif owner in blank:
                    score.not_written += 1
                else:
                    score.waiting += 1
        return dict(sorted(scores.items(), key=lambda pair: (pair[1][0].chapter, pair[1][0].module, pair[1][0].line)))

    def _blamed(self) -> dict[str, set[str]]:
        """The exercises that each failing test counts against, so that one slip counts once.

        Those that the traceback names; else those of its own that a narrower test found wrong; else all of its own.
        """
        failing = [(test, graded, v) for test, (graded, v) in self.tests.items() if v and v.kind != "not written"]
        blamed: dict[str, set[str]] = {}
        wrong: set[str] = set()
        for test, graded, verdict in sorted(failing, key=lambda entry: len(entry[1])):
            names = {ex.name for ex in verdict.exercises or graded}
            blamed[test] = names & wrong or names
            wrong |= blamed[test]
        return blamed

    def write(self, path: Path) -> None:
        """{"engine.serve.blocks.hash_block": {"passed": 3, "failed": 1, "not_written": 0, "messages": […], …}}"""
        results = {name: vars(score) for name, (_, score) in self.scores().items()}
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    def lines(self) -> list[str]:
        """The table and what to do next; nothing when all is well."""
        scores = [s for s in self.scores().values() if not self.only or any(map(s[0].goes_by, self.only))]
        if not any(s.failed or s.not_written or s.waiting for _, s in scores):
            return []
        return [*_table(scores), *_blank(scores), *self._next(scores), ""]

    def _next(self, scores) -> list[str]:
        """The one thing to do: mend what is wrong before writing what is not there."""
        wrong = [ex for ex, s in scores if s.failed and ex.source == "yours"]
        blank = [ex for ex, s in scores if s.not_written]
        if impl() != "engine" or not (wrong or blank):
            return []
        ex, catalog = (wrong or blank)[0], Catalog(ROOT)
        name = catalog.short(ex)
        files = sorted({test.split("::")[0] for test, (graded, _) in self.tests.items() if ex in graded})
        several = f"      several are wrong: python run.py blame {ex.chapter} looks for the cause"
        return [
            "",
            f"next: {'mend' if wrong else 'write'} {ex.where} {ex.qualname}   read {catalog.link(ex)}",
            f"      python run.py hint {name}   then   {' '.join(['pytest', *files])} --only {name}",
            *([several] if len(wrong) > 1 else []),
        ]


def _table(scores) -> list[str]:
    rows = [(ex, s) for ex, s in scores if not s.not_written]
    if not rows:
        return []
    head = f"{'passed':>6} {'wrong':>6} {'waiting':>8}   exercise"
    return [head, *(f"{s.passed:6} {s.failed:6} {s.waiting:8}   {ex.where} {ex.qualname}" for ex, s in rows)]


def _blank(scores) -> list[str]:
    return [f"{ex.not_written}   {s.not_written} test{'s' * (s.not_written > 1)}" for ex, s in scores if s.not_written]
