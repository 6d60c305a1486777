"""Tries the bank of wrong answers, and of other right ones, against the graders.

    python -m tests.mutation                       every chapter
    python -m tests.mutation ch31 --name hash_block      one exercise, or one mutant by its name
    python -m tests.mutation ch31 --full           the right alternatives against the whole test files of the chapter

Each mutated answer stands in `engine/` as if a student had written it, everything else is borrowed. It counts as caught
only by a failure of the test it names, when that test grades the exercise and its message is about it. The unchanged
answer, run the same way, must pass.
"""

import argparse
import importlib
import json
import signal
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from engine.exercises.bodies import replace_body
from engine.exercises.catalog import Catalog, LookupFailed
from engine.exercises.registry import Exercise
from engine.exercises.source import Source, SourceError
from tests.alternatives import ALTERNATIVES, Alternative
from tests.forks import STOPPED, Result, Run, counts, goes_by, preload, run_all
from tests.mutants import MUTANTS, Mutant
from tests.sections import ROOT
from tests.sources import named, sources

GOOD = ("caught", "passed")


@dataclass
class Outcome:
    """status: caught or missed (mutants), passed or rejected (alternatives), error: the entry itself is at fault."""

    id: str
    status: str
    note: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return self.status in GOOD


def load_banks(chapters: list[int] | None = None) -> list[Mutant | Alternative]:
    for package in ("mutants", "alternatives"):
        for path in sorted((ROOT / "tests" / package).glob("ch*.py")):
            module = f"tests.{package}.{path.stem}"
            if chapters is None or int(path.stem[2:].split("_")[0]) in chapters:
                importlib.import_module(module)
    return [*MUTANTS, *ALTERNATIVES]


class BadEntry(ValueError):
    """A mutant or alternative that cannot be tried."""


class Bank:
    """Turns entries into runs; the sources are read once."""

    def __init__(self, seed: int = 0):
        self.catalog, self.seed = Catalog(ROOT), seed
        self.read = cache(Source.read)
        self.unchanged = cache(self._unchanged)

    def exercise(self, entry: Mutant | Alternative) -> Exercise:
        try:
            return self.catalog.one(entry.exercise)
        except LookupFailed as error:
            raise BadEntry(str(error)) from None

    def files(self, chapter: int, test: str | None = None) -> list[Path]:
        """The test files of a chapter; with a test's name those that define it."""
        found = sorted((ROOT / "tests").glob(f"test_ch{chapter:02d}_*.py"))
        if test is not None:
            found = [path for path in found if test.split("::")[-1] in named(path)]
        if not found:
            raise BadEntry(f"no test {test or ''} in tests/test_ch{chapter:02d}_*.py".replace("  ", " "))
        return found

    def answer(self, ex: Exercise) -> tuple[Source, int, int]:
        """The file of an answer and the range of its function in it."""
        path = ROOT / "solutions" / Path(ex.path).relative_to(ROOT / "engine")
        if not path.exists():
            raise BadEntry(f"{ex.qualname} has no answer in solutions/")
        try:
            source = self.read(path)
            function = source.find(ex.qualname)
        except SourceError as error:
            raise BadEntry(str(error)) from None
        return source, source.starts[function.lineno - 1], source.end(function)

    def spliced(self, ex: Exercise, donor: str) -> str:
        try:
            return replace_body(self.read(Path(ex.path)).text, ex.qualname, donor)
        except SourceError as error:
            raise BadEntry(str(error)) from None

    def _unchanged(self, name: str) -> str:
        ex = self.catalog.one(name)
        return self.spliced(ex, self.answer(ex)[0].text)

    def baseline(self, mutants: list[Mutant]) -> Run:
        """The unchanged answer (or given file) against every test that is to catch a mutant of it."""
        files = sorted({path for m in mutants for path in self.files(m.chapter, m.caught_by)})
        names, first = [m.caught_by for m in mutants], mutants[0]
        if first.path:
            path = ROOT / first.path
            text, impl = self.read(path).text, "solution"
            return Run(f"given {first.path}", path, text, files, first.path, names, impl=impl, seed=self.seed)
        ex = self.exercise(first)
        text = self.unchanged(ex.name)
        return Run(f"answer {ex.name}", Path(ex.path), text, files, ex.name, names, seed=self.seed)

    def mutant(self, m: Mutant) -> Run:
        if m.path:
            return self.scaffold(m)
        ex = self.exercise(m)
        source, start, end = self.answer(ex)
        function = source.text[start:end]
        if function.count(m.old) != 1:
            raise BadEntry(f"`old` occurs {function.count(m.old)} times in the answer of {ex.qualname}, not once")
        text = self.spliced(ex, source.text[:start] + function.replace(m.old, m.new) + source.text[end:])
        if text == self.unchanged(ex.name):
            raise BadEntry("the change is outside the body of the function")
        files = self.files(m.chapter, m.caught_by)
        return Run(m.id, Path(ex.path), text, files, ex.name, [m.caught_by], seed=self.seed, until_caught=True)

    def scaffold(self, m: Mutant) -> Run:
        path = ROOT / m.path
        if not path.is_file():
            raise BadEntry(f"there is no {m.path}")
        text = self.read(path).text
        if text.count(m.old) != 1:
            raise BadEntry(f"`old` occurs {text.count(m.old)} times in {m.path}, not once")
        files, text = self.files(m.chapter, m.caught_by), text.replace(m.old, m.new)
        return Run(m.id, path, text, files, m.path, [m.caught_by], impl="solution", seed=self.seed)

    def alternative(self, a: Alternative, full: bool = False) -> Run:
        ex = self.exercise(a)
        if not full:
            return Run(a.id, Path(ex.path), self.spliced(ex, a.source), self.files(a.chapter), ex.name, seed=self.seed)
        source, path = self.answer(ex)[0], ROOT / "solutions" / Path(ex.path).relative_to(ROOT / "engine")
        text = replace_body(source.text, ex.qualname, a.source)
        return Run(a.id, path, text, self.files(a.chapter), ex.name, everything=True, impl="solution", seed=self.seed)


def judge_mutant(m: Mutant, run: Run, result: Result, answer: Result) -> Outcome:
    """answer: what the unchanged answer got in the same tests."""

    def outcome(status: str, note: str) -> Outcome:
        return Outcome(m.id, status, note, result.seconds)

    records = [r for r in answer.records if goes_by(r["test"], m.caught_by)]
    failed = next((r for r in records if r["outcome"] == "failed"), None)
    if result.trouble or answer.trouble:
        return outcome("error", result.trouble or f"the unchanged answer: {answer.trouble}")
    if not records or not m.path and not any(run.exercise in r["graded"] for r in records):
        return outcome("error", f"{m.caught_by} does not grade {m.exercise}" if records else f"{m.caught_by} never ran")
    if failed:
        return outcome("error", f"the unchanged answer does not pass: {failed['test']}: {failed['text']}")
    caught = next((r for r in result.records if (_has_message(r) if m.path else counts(r, run.exercise))), None)
    if caught:
        return outcome("caught", caught["text"])
    failed = next((r for r in result.records if r["outcome"] == "failed"), None)
    note = f"fails, but not with a message about it: {failed['text']}" if failed else f"{m.caught_by} passes"
    return outcome("missed", f"{note}\n  (it believes: {m.believes})")


def _has_message(record: dict) -> bool:
    return record["outcome"] == "failed" and record["kind"] in ("wrong", "assert")


def judge_right(id: str, run: Run, result: Result) -> Outcome:
    """An answer that must pass everything that ran, and something must have run."""
    failed = next((r for r in result.records if r["outcome"] == "failed"), None)
    if result.trouble or failed:
        note = result.trouble or f"{failed['test']}: {failed['text']}"
        return Outcome(id, "rejected", note, result.seconds)
    if not any(r["outcome"] == "passed" for r in result.records):
        return Outcome(id, "error", f"no test of {run.exercise} ran", result.seconds)
    return Outcome(id, "passed", f"{len(result.records)} tests", result.seconds)


def try_out(entries: list[Mutant | Alternative], workers: int = 2, seed: int = 0, full: bool = False):
    """Yields an Outcome for each entry, and one for each unchanged answer that does not pass its tests."""
    bank, runs, by_id, groups = Bank(seed), [], {}, {}
    for entry in entries:
        try:
            if isinstance(entry, Mutant):
                run = bank.mutant(entry)
                groups.setdefault(run.exercise, []).append((entry, run))
            else:
                run = bank.alternative(entry, full)
                runs.append(run)
            by_id[run.id] = entry
        except BadEntry as error:
            yield Outcome(entry.id, "error", str(error))
    for group in groups.values():
        runs += [bank.baseline([m for m, _ in group]), *(run for _, run in group)]
    preload({part for run in runs for path in run.files for part in sources(path)})
    answers, held = {}, []
    for run, result in run_all(runs, workers):
        entry = by_id.get(run.id)
        if isinstance(entry, Alternative):
            yield judge_right(entry.id, run, result)
        elif entry is None:
            answers[run.exercise] = result
        else:
            held.append((entry, run, result))
        for waiting in [h for h in held if h[1].exercise in answers]:
            held.remove(waiting)
            yield judge_mutant(*waiting, answers[waiting[1].exercise])


def table(outcomes: list[Outcome]) -> list[str]:
    """A line for each chapter: how many mutants were caught and alternatives accepted."""
    by_chapter: dict[str, Counter] = {}
    for outcome in outcomes:
        by_chapter.setdefault(outcome.id.split("-")[0], Counter())[outcome.status] += 1
    lines = ["chapter   caught  missed   passed  rejected   errors"]
    for chapter, n in sorted(by_chapter.items()):
        numbers = f"{n['caught']:6} {n['missed']:7} {n['passed']:8} {n['rejected']:9} {n['error']:8}"
        lines.append(f"{chapter:9} {numbers}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.splitlines()[0])
    parser.add_argument("chapters", nargs="*", metavar="chNN", help="chapters (default: all)")
    parser.add_argument("--name", action="append", default=[], help="an exercise, a mutant's name or a whole id")
    parser.add_argument("--full", action="store_true", help="alternatives: run the chapter's whole test files")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--grade-seed", type=int, default=0, metavar="N")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, _: STOPPED.append(number))  # the forks end with us
    chapters = [int(c.removeprefix("ch")) for c in args.chapters] or None
    entries = [e for e in load_banks(chapters) if not args.name or any(_means(name, e) for name in args.name)]
    if not entries:
        parser.error("no mutant or alternative goes by that name")
    outcomes = []
    for outcome in try_out(entries, args.workers, args.grade_seed, args.full):
        outcomes.append(outcome)
        print(json.dumps(asdict(outcome)) if args.json else _shown(outcome), flush=True)
    if not args.json:
        print("\n".join(["", *table(outcomes)]))
    return 0 if all(o.good for o in outcomes) else 1


def _shown(outcome: Outcome) -> str:
    note = outcome.note.replace("\n", "\n    ")
    return f"{outcome.status:8} {outcome.id}   {outcome.seconds:.1f} s\n    {note}"


def _means(name: str, entry: Mutant | Alternative) -> bool:
    return name in (entry.id, entry.name, entry.exercise) or f".{entry.exercise}".endswith(f".{name}")


if __name__ == "__main__":
    sys.exit(main())
