"""How results are written: Gradescope's JSON for a student, a CSV and a table for the class."""

import csv
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from rich.markup import escape
from rich.table import Table


@dataclass
class Line:
    """One exercise of one student. status: passed, wrong, stopped, refused, not written."""

    name: str
    where: str
    status: str
    text: str
    flags: list[str] = field(default_factory=list)

    @property
    def score(self) -> float:
        return 1.0 if self.status == "passed" else 0.0


@dataclass
class Sheet:
    """A student's results; notes are for the student, flags for the instructor."""

    student: str
    lines: list[Line]
    notes: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def score(self) -> float:
        return sum(line.score for line in self.lines)

    @property
    def all_flags(self) -> list[str]:
        return [*self.flags, *(f"{line.name}: {flag}" for line in self.lines for flag in line.flags)]


def gradescope(sheet: Sheet, chapters: list[int], seed: int) -> dict:
    """https://gradescope-autograders.readthedocs.io/en/latest/specs/#output-format; `extra_data` is not shown to
    students and has what only the instructor needs."""
    right = sum(line.status == "passed" for line in sheet.lines)
    return {
        "score": sheet.score,
        "output": "\n".join([f"{right} of {len(sheet.lines)} exercises are right", *sheet.notes]),
        "execution_time": round(sheet.seconds, 1),
        "tests": [
            {
                "name": line.name,
                "score": line.score,
                "max_score": 1.0,
                "status": "passed" if line.status == "passed" else "failed",
                "output": f"{line.status}   {line.where}\n{line.text}".rstrip(),
                "visibility": "visible",
            }
            for line in sheet.lines
        ],
        "extra_data": {
            "student": sheet.student, "max_score": float(len(sheet.lines)), "chapters": chapters, "seed": seed,
            "status": {line.name: line.status for line in sheet.lines}, "flags": sheet.all_flags,
        },
    }  # fmt: skip


def write_student(folder: Path, sheet: Sheet, chapters: list[int], seed: int) -> Path:
    path = folder / f"{file_name(sheet.student)}.json"
    path.write_text(json.dumps(gradescope(sheet, chapters, seed), indent=1) + "\n", encoding="utf-8")
    return path


def file_name(student: str) -> str:
    """Letters, digits, dots and dashes, never a hidden file or one of another folder."""
    return re.sub(r"[^\w.-]", "_", student).lstrip(".") or "_"


def write_class(path: Path, sheets: list[Sheet]) -> None:
    """A row for each student, a column for each exercise."""
    names = [line.name for line in sheets[0].lines]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["student", "score", "max_score", *names, "flags", "seconds"])
        for sheet in sheets:
            statuses = [line.status for line in sheet.lines]
            row = [sheet.student, sheet.score, len(names), *statuses, "; ".join(sheet.all_flags)]
            writer.writerow([_harmless(cell) for cell in row] + [round(sheet.seconds, 1)])


def _harmless(cell):
    """A spreadsheet takes these for formulas."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@") else cell


MARKS = {"passed": "[green]■", "wrong": "[red]✗", "stopped": "[red]!", "refused": "[red]!", "not written": "[dim]□"}


def table(sheets: list[Sheet]) -> Table:
    grid = Table("student", "right", "", "flags", header_style="")
    grid.columns[1].justify = "right"
    for sheet in sheets:
        marks = "[/]".join(MARKS[line.status] for line in sheet.lines) + "[/]"
        grid.add_row(escape(sheet.student), f"{sheet.score:.0f} of {len(sheet.lines)}", marks, escape(_short(sheet)))
    return grid


def _short(sheet: Sheet) -> str:
    kinds: dict[str, int] = {}
    for flag in [*sheet.flags, *(flag for line in sheet.lines for flag in line.flags)]:
        kinds[flag] = kinds.get(flag, 0) + 1
    return "; ".join(f"{flag} ({count})" if count > 1 else flag for flag, count in kinds.items())
