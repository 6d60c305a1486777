"""From a folder of submissions to a folder of results.

The reference is graded first, with the same seed and behind the same sandbox: it must pass everything, and its times
set the limits of everybody else.
"""

import importlib.util
import queue
import random
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from engine.exercises.catalog import Catalog
from engine.exercises.grading import gradebook, reading, sandbox, submissions
from engine.exercises.grading.bench import Bench, Worker, limits_of
from engine.exercises.grading.judging import Graders, Judge
from engine.exercises.listing import chapter_numbers
from engine.exercises.registry import Exercise


class GradingStopped(ValueError):
    """Nothing can be graded; the message is one line."""


def grade(catalog: Catalog, path: Path, chapters: str, out: Path, jobs: int, seed: int | None = None) -> int:
    """Grade the submissions at `path`, write results to `out`, print a table.

    Raises ValueError for what cannot be used: no submissions, chapters without exercises, a reference that fails.
    """
    numbers = chapter_numbers(catalog, chapters)
    if jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {jobs}")
    _must_run_here()
    found = submissions.find(path, leave_out=out)
    seed = random.SystemRandom().randrange(1, 1 << 31) if seed is None else seed
    out.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="grading-", ignore_cleanup_errors=True) as folder:
        bench = Bench(catalog, numbers, seed, Path(folder))
        walls = ", ".join(bench.layers) or "none on this system"
        walls += (
            "" if sandbox.bounds_processes(bench.layers) else " (processes are not limited for root: be somebody else)"
        )
        console.print(f"seed {seed}; limits on time, memory, processes; sandbox: {walls}", highlight=False)
        status = console.status("grading the reference")
        with status, Class(bench, numbers, min(jobs, len(found))) as everyone:
            everyone.start()
            sheets = []
            for sheet in everyone.grade(found):
                gradebook.write_student(out, sheet, numbers, seed)
                sheets.append(sheet)
                status.update(f"{len(sheets)} of {len(found)} graded")
    sheets.sort(key=lambda sheet: list(found).index(sheet.student))
    gradebook.write_class(out / "class.csv", sheets)
    Console(width=None if sys.stdout.isatty() else 120).print(gradebook.table(sheets))
    print(f"{len(sheets)} graded, seed {seed}: {out}/class.csv and a JSON file each")
    return 0


def _must_run_here() -> None:
    if sys.platform == "win32":
        raise ValueError("grading a class needs limits that Windows does not have; run it on Linux (WSL will do)")
    for package in ("pytest", "pytest_timeout"):
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)


class Class:
    """Workers, the measured reference, and the way from a submission to a sheet."""

    def __init__(self, bench: Bench, chapters: list[int], jobs: int):
        self.bench = bench
        self.exercises = [ex for number in chapters for ex in bench.catalog.of_chapter(number)]
        self.workers = [Worker(bench, number) for number in range(jobs)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for worker in self.workers:
            worker.close()

    def start(self) -> None:
        """Grade the reference. Raises GradingStopped unless it passes all and every exercise has a test."""
        result = self.workers[0].run({}, None)
        records = result["records"]
        bad = next((f"{test}: {r['text']}" for test, r in records.items() if r["outcome"] == "failed"), "")
        if bad or result["ended"] != "finished" or result["errors"]:
            why = bad or "; ".join(result["errors"]) or f"{result['ended']} {result['output'][-300:]}"
            raise GradingStopped(f"the reference itself is not graded as right, so nobody is graded: {why}")
        self.bench.may_change = sorted({name for record in records.values() for name in record["changed"]})
        graded = {test: r["graded"] for test, r in records.items() if r["graded"] and r["outcome"] == "passed"}
        self.graders = Graders(graded, limits_of({test: records[test]["cpu"] for test in graded}))
        blank = [ex.qualname for ex in self.exercises if not self.graders.of([ex.name])]
        if blank:
            raise GradingStopped(f"no test grades {', '.join(blank)}")

    def grade(self, found: dict[str, Path]):
        """Sheets as they come."""
        free, sheets = queue.SimpleQueue(), queue.SimpleQueue()
        for worker in self.workers:
            free.put(worker)

        def one(student: str, path: Path) -> None:
            worker = free.get()
            try:
                sheets.put(self.sheet(student, path, worker.run))
            except BaseException as error:
                sheets.put(error)
            finally:
                free.put(worker)

        with ThreadPoolExecutor(len(self.workers)) as pool:
            for student, path in found.items():
                pool.submit(one, student, path)
            try:
                for _ in found:
                    sheet = sheets.get()
                    if isinstance(sheet, BaseException):
                        raise sheet
                    yield sheet
            except BaseException:  # an interrupt as well: do not wait for what is running
                pool.shutdown(wait=False, cancel_futures=True)
                self.__exit__()
                raise

    def sheet(self, student: str, path: Path, run: Callable) -> gradebook.Sheet:
        start = time.monotonic()
        read = reading.read(self.bench.catalog, self.exercises, path)
        judge = Judge(self.graders, run)
        marks = judge.marks({name: found.text for name, found in read.exercises.items() if found.state == "written"})
        lines = [self._line(ex, read.exercises[ex.name], marks.get(ex.name)) for ex in self.exercises]
        flags = [*(note for note in read.notes), *judge.flags]
        return gradebook.Sheet(student, lines, read.notes, flags, time.monotonic() - start)

    def _line(self, ex: Exercise, found: reading.Found, mark) -> gradebook.Line:
        where, name = f"{ex.where} {ex.qualname}", self.bench.catalog.short(ex)
        if mark is None:
            return gradebook.Line(name, where, found.state, found.message, found.flags)
        status = "passed" if mark.right else "stopped" if mark.stopped else "wrong"
        notes = [] if mark.right else found.notes
        count = f"{mark.passed} of {mark.total} tests pass"
        text = "\n".join([count, *(f"note: {note}" for note in notes), *mark.messages])
        return gradebook.Line(name, where, status, text, found.flags)
