"""A tree with one chapter of three small exercises and the real grading machinery, for the tests of that machinery."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from engine.exercises.bodies import replace_body
from tests.sections import ROOT

MACHINERY = ["conftest", "grading", "differences", "sections", "scoreboard", "sources", "verdicts", "forks", "mutation"]

ENGINE = '''
from engine.exercises import exercise, fill


@exercise(99, "Running sums")
def row_starts(counts):
    """First row of each request, and the total.  (Your engine: Chapter 99)"""
    raise NotImplementedError


def first_of(counts):
    return row_starts(counts)[0]


class Pool:
    def __init__(self, size):
        self.size, self.free = size, list(range(size))

    @exercise(99, "Taking blocks")
    def take(self, n):
        """Take n free blocks.  (Your engine: Chapter 99)"""
        raise NotImplementedError

    @exercise(99, "Taking blocks")
    def give(self, blocks):
        """Give blocks back.  (Your engine: Chapter 99)"""
        raise NotImplementedError

    def check(self):
        if len(set(self.free)) != len(self.free):
            raise AssertionError("a block is free twice")


fill(__name__)
'''

SOLUTIONS = """
def row_starts(counts):
    starts = [0]
    for n in counts:
        if n < 1:
            raise ValueError(f"a request has {n} tokens")
        starts.append(starts[-1] + n)
    return starts


class Pool:
    def take(self, n):
        if n > len(self.free):
            return None
        return [self.free.pop() for _ in range(n)]

    def give(self, blocks):
        self.free.extend(blocks)
"""

CHAPTER = "# Chapter 99\n\n## Running sums\n\n## Taking blocks\n"

TESTS = """
import pytest
from engine.rows import Pool, first_of, row_starts
from tests.grading import expect, expect_equal, expect_raises, grades, rng

SUMS = "99: Running sums"


@grades(row_starts)
@pytest.mark.parametrize("counts", [[1], [3, 1, 4]])
def test_running_sum(counts):
    expected = [sum(counts[:r]) for r in range(len(counts) + 1)]
    call = f"row_starts({counts})"
    expect_equal(row_starts(counts), expected, "start of request {i}", hint="add them up", see=SUMS, call=call)


@grades(row_starts)
def test_zero_is_refused():
    expect_raises(ValueError, row_starts, [2, 0], match="0 tokens", see=SUMS)


class TestPool:
    @grades(Pool.take)
    def test_takes_all_different(self):
        size = rng("pool").randint(3, 9)
        expect_equal(sorted(Pool(size).take(size)), list(range(size)), "block {i}", see="99: Taking blocks")

    @grades(Pool.take, Pool.give)
    def test_gives_back(self):
        pool = Pool(4)
        pool.give(pool.take(4))
        pool.check()
        expect_equal(len(pool.free), 4, "free blocks", see="99: Taking blocks")


def test_scaffolding():
    assert Pool(3).size == 3
"""


class Tree:
    def __init__(self, root: Path, tests: str = TESTS):
        self.root = root / "tree"
        self.pycache = root.parent / "pycache"  # pytest rewrites hypothesis at each start where nothing is kept
        root = self.root
        for folder in ("engine/exercises", "solutions", "chapters", "tests/mutants", "tests/alternatives"):
            (root / folder).mkdir(parents=True)
        for path in (ROOT / "engine" / "exercises").glob("*.py"):
            shutil.copy(path, root / "engine" / "exercises")
        for name in (*MACHINERY, "mutants/__init__", "alternatives/__init__"):
            shutil.copy(ROOT / "tests" / f"{name}.py", root / "tests" / f"{name}.py")
        shutil.copy(ROOT / "pyproject.toml", root)
        for package in ("engine", "solutions", "tests"):
            (root / package / "__init__.py").touch()
        self.put("engine/rows.py", ENGINE)
        self.put("solutions/rows.py", SOLUTIONS)
        self.put("chapters/99-rows.md", CHAPTER)
        self.put("tests/test_ch99_rows.py", tests)

    def put(self, path: str, text: str) -> None:
        (self.root / path).write_text(text)

    def line(self, text: str, path: str = "engine/rows.py") -> int:
        """Number of the first line with this text."""
        return next(n for n, line in enumerate((self.root / path).read_text().splitlines(), 1) if text in line)

    def write(self, name: str, function: str) -> None:
        """Fill in an exercise as a student would."""
        path = self.root / "engine" / "rows.py"
        path.write_text(replace_body(path.read_text(), name, function))

    def pytest(self, *arguments: str) -> tuple[int, str]:
        """Exit status and everything that was printed."""
        return self.run("-m", "pytest", *arguments)

    def run(self, *arguments: str) -> tuple[int, str]:
        unset = ("IMPL", "BORROW", "GRADE_SEED", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
        environment = {k: v for k, v in os.environ.items() if k not in unset}
        environment["PYTHONPYCACHEPREFIX"] = str(self.pycache)
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True, timeout=300)
        return done.returncode, done.stdout + done.stderr
