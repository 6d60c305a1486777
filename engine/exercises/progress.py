"""`run.py progress`: chapter by chapter what is written, what passes, and what to do next."""

import hashlib
import sys
from collections import Counter
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from engine.exercises import graders, state
from engine.exercises.catalog import Catalog
from engine.exercises.listing import chapter_number
from engine.exercises.registry import Exercise
from engine.exercises.source import Source

COLOURS = {"passing": "green", "failing": "red", "not written": "dim", "waiting": "yellow", "not graded": "yellow"}


def progress(catalog: Catalog, chapter: str | None = None, cached: bool = False, console: Console | None = None) -> int:
    """Grade what is written (all chapters or one), remember the results, print them.

    cached: the remembered results instead. Raises LookupFailed for a chapter without exercises.
    """
    number = chapter_number(catalog, chapter)
    console = console or Console(width=None if sys.stdout.isatty() else 120)
    exercises = catalog.exercises if number is None else catalog.of_chapter(number)
    remembered = state.load(catalog.root)
    troubles = list(catalog.damaged)
    if not cached:
        results, errors = grade(catalog, [ex for ex in exercises if ex.written])
        troubles += errors
        names = {ex.name for ex in exercises}
        kept = {name: entry for name, entry in remembered["results"].items() if name not in names}
        remembered["results"] = {**kept, **results}
        remembered["ran"] = datetime.now().strftime("%Y-%m-%d %H:%M")
        state.save(catalog.root, remembered)
    results = remembered["results"]
    console.print(table(catalog, exercises, results))
    if number is not None:
        console.print(details(catalog, exercises, results))
    if cached:
        ran = remembered.get("ran")
        _say(console, f"results of {ran}" if ran else "nothing was graded yet: leave out --cached")
    for line in troubles:
        _say(console, f"cannot be used: {line}")
    for line in what_next(catalog, exercises, results):
        _say(console, line)
    return 0


def grade(catalog: Catalog, written: list[Exercise]) -> tuple[dict[str, dict], list[str]]:
    """Results by full name, each with a digest of the source that was graded; and what kept tests from running."""
    digests = {ex.name: digest(ex) for ex in written}
    files = graders.test_files(catalog.root, sorted({ex.chapter for ex in written}))
    if not files:
        return {}, []
    with Console(stderr=True).status(f"grading {len(written)} written exercises"):
        run = graders.run(catalog.root, files, only=[ex.name for ex in written])
    results = {name: {**entry, "digest": digests[name]} for name, entry in run.results.items() if name in digests}
    return results, [f"{file}: {why}" for file, why in run.errors.items()]


def digest(ex: Exercise) -> str:
    source = Source.read(Path(ex.path))
    node = source.find(ex.qualname)
    return hashlib.blake2b(source.text[source.start(node) : source.end(node)].encode(), digest_size=8).hexdigest()


def standing(ex: Exercise, results: dict[str, dict]) -> str:
    """passing, failing, not written; waiting: its tests need another exercise first; not graded: no test ran."""
    entry = results.get(ex.name) or {}
    if not ex.written:
        return "not written"
    if entry.get("failed"):
        return "failing"
    if entry.get("passed"):
        return "passing"
    return "waiting" if entry.get("waiting") else "not graded"


def table(catalog: Catalog, exercises: list[Exercise], results: dict[str, dict]) -> Table:
    columns = ("written", "passing", "failing", "not written")
    grid = Table("chapter", "", *(f"[{COLOURS.get(c, 'bold')}]{c}" for c in columns), "", header_style="")
    for number in dict.fromkeys(ex.chapter for ex in exercises):
        ours = [ex for ex in exercises if ex.chapter == number]
        count = Counter(standing(ex, results) for ex in ours)
        count["written"] = sum(ex.written for ex in ours)
        cells = [f"[{COLOURS.get(c, 'bold')}]{count[c]}" if count[c] else "[dim]·" for c in columns]
        rest = ", ".join(f"{count[c]} {c}" for c in ("waiting", "not graded") if count[c])
        grid.add_row(f"{number:02d}", _bar(count, len(ours)), *cells, f"[yellow]{rest}")
    for column in grid.columns[2:6]:
        column.justify = "right"
    return grid


def _bar(count: Counter, total: int) -> str:
    """One mark for each exercise."""
    middle = count["waiting"] + count["not graded"]
    marks = "[green]" + "■" * count["passing"] + "[/][red]" + "■" * count["failing"] + "[/]"
    return marks + "[yellow]" + "■" * middle + "[/][dim]" + "□" * count["not written"] + f"[/] {total}"


def details(catalog: Catalog, exercises: list[Exercise], results: dict[str, dict]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for ex in exercises:
        entry, word = results.get(ex.name) or {}, standing(ex, results)
        if word == "failing":
            word = f"[red]failing {entry['failed']} of {entry['failed'] + entry.get('passed', 0)}"
        else:
            word = f"[{COLOURS[word]}]{word}"
        stale = " [yellow]changed since" if ex.written and entry.get("digest", "") not in ("", digest(ex)) else ""
        grid.add_row(catalog.short(ex), ex.where, word + stale)
    return grid


def what_next(catalog: Catalog, exercises: list[Exercise], results: dict[str, dict]) -> list[str]:
    """The one thing to do: mend what fails before writing what is missing."""
    by = {word: [ex for ex in exercises if standing(ex, results) == word] for word in COLOURS}
    if not exercises:
        return ["no exercises found"]
    if not by["failing"] and not by["not written"]:
        rest = len(by["waiting"]) + len(by["not graded"])
        return ["all written" + (f", {rest} not graded" if rest else " and passing")]
    ex = (by["failing"] or by["not written"])[0]
    lines = [f"next: {'mend' if by['failing'] else 'write'} {ex.where} {ex.qualname}", f"      read {catalog.link(ex)}"]
    if by["failing"]:
        lines += [f"      {line}" for line in (results[ex.name].get("messages") or [""])[0].splitlines()]
    return [*lines, f"      python run.py hint {catalog.short(ex)}"]


def _say(console: Console, line: str) -> None:
    """As it is: neither wrapped nor coloured, so that paths can be copied."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)
