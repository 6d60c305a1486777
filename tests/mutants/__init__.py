"""The bank of wrong answers. A file a chapter, `chNN.py`, each entry a small, plausible change to an answer:

    mutant("row_starts", "starts = [0]", "starts = []", caught_by="test_starts_are_a_running_sum",
           believes="the first request needs no start", name="no-zero")

`old` occurs exactly once in the answer in `solutions/`. The test `caught_by` must name the exercise and must fail with
a message about it, for this reason and no other. `python -m tests.mutation ch31 --name row_starts` tries them out.

Given code is tested as well. There `old` occurs exactly once in a file of `engine/`, and the answers run:

    scaffold_mutant("engine/serve/blocks.py", "if self.num_free < self.num_blocks:", "if False:", …)
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

MUTANTS: list["Mutant"] = []


@dataclass(frozen=True)
class Mutant:
    exercise: str  # any end of the full name that starts at a dot
    old: str
    new: str
    caught_by: str
    believes: str
    name: str
    chapter: int
    path: str = ""  # of a scaffold mutant: the file that changes; `exercise` is then its name without suffix

    @property
    def id(self) -> str:
        return f"ch{self.chapter:02d}-{self.exercise}-{self.name}"


def mutant(exercise: str, old: str, new: str, caught_by: str, believes: str, name: str | None = None) -> None:
    """Add a wrong answer to the bank of the calling file's chapter."""
    name = name or re.sub(r"\W+", "-", believes.lower()).strip("-")[:40].rstrip("-")
    _add(Mutant(exercise, old, new, caught_by, believes, name, chapter_of(sys._getframe(1).f_code.co_filename)))


def scaffold_mutant(path: str, old: str, new: str, caught_by: str, believes: str, name: str) -> None:
    """Add a fault in given code to the bank of the calling file's chapter."""
    chapter = chapter_of(sys._getframe(1).f_code.co_filename)
    _add(Mutant(Path(path).stem, old, new, caught_by, believes, name, chapter, path))


def _add(new_one: Mutant) -> None:
    if any(m.id == new_one.id for m in MUTANTS):
        raise ValueError(f"two mutants are called {new_one.id}")
    if new_one.old == new_one.new:
        raise ValueError(f"mutant {new_one.id} changes nothing")
    MUTANTS.append(new_one)


def chapter_of(path: str) -> int:
    """31 for `…/ch31.py` and for `…/ch31_scheduler.py`."""
    found = re.match(r"ch(\d+)", Path(path).stem)
    if not found:
        raise ValueError(f"{path}: entries live in a file named chNN.py")
    return int(found[1])
