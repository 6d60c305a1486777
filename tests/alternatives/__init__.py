"""Right answers that are built differently. A file a chapter, `chNN.py`:

    alternative("row_starts", name="accumulate", source='''
        def row_starts(counts):
            return [0, *itertools.accumulate(counts)]
    ''')

Names that the engine module lacks are imported inside the function. Every test that grades the exercise must pass: one
that rejects a right answer asserts more than the docstring and the chapter promise.
"""

import sys
import textwrap
from dataclasses import dataclass

from tests.mutants import chapter_of

ALTERNATIVES: list["Alternative"] = []


@dataclass(frozen=True)
class Alternative:
    exercise: str  # any end of the full name that starts at a dot
    name: str
    source: str
    chapter: int

    @property
    def id(self) -> str:
        return f"ch{self.chapter:02d}-{self.exercise}-{self.name}"


def alternative(exercise: str, name: str, source: str) -> None:
    """Add a right answer to those of the calling file's chapter."""
    chapter = chapter_of(sys._getframe(1).f_code.co_filename)
    new_one = Alternative(exercise, name, textwrap.dedent(source).strip() + "\n", chapter)
    if any(a.id == new_one.id for a in ALTERNATIVES):
        raise ValueError(f"two alternatives are called {new_one.id}")
    ALTERNATIVES.append(new_one)
