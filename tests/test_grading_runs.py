"""What a student sees: pytest runs of a small tree with its exercises unwritten, wrong, crashing and endless."""

import json

import pytest

from engine.exercises.registry import Exercise
from tests.scoreboard import Scoreboard
from tests.small_tree import SOLUTIONS, TESTS, Tree
from tests.verdicts import Verdict

WRONG_SUM = """
def row_starts(counts):
    return [sum(counts[: r + 1]) for r in range(len(counts) + 1)]
"""
GIVE = "def give(self, blocks):\n    self.free.extend(blocks)\n"
RIGHT_SUM = SOLUTIONS.split("\n\n\n")[0]


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def test_nothing_written(tree):
    status, out = tree.pytest("-q", "--results", "r.json")
    assert status == 1
    assert 'not written yet   engine/rows.py:6 row_starts   (chapter 99, "Running sums")   3 tests\n' in out
    assert 'engine/rows.py:20 Pool.take   (chapter 99, "Taking blocks")   2 tests\n' in out
    assert "impl=engine: 0 of 3 exercises are yours, 3 borrowed" in out
    assert "next: write engine/rows.py:6 row_starts   read chapters/99-rows.md#running-sums" in out
    assert "1 passed, 5 not written" in out
    assert out.count("not written yet") == 3 and "Error" not in out and "FAILURES" not in out
    results = json.loads((tree.root / "r.json").read_text())
    assert [results[f"engine.rows.{n}"]["not_written"] for n in ("row_starts", "Pool.take", "Pool.give")] == [3, 2, 1]
    status, out = tree.pytest("-v", "--long", "tests/test_ch99_rows.py::TestPool::test_gives_back")
    assert status == 1 and "test_gives_back NOT WRITTEN" in out and "Traceback" not in out


def test_the_reference_is_green_and_quiet(tree):
    status, out = tree.pytest("-q", "--impl", "solution", "--results", "r.json")
    assert status == 0 and "6 passed" in out and "exercises ==" not in out and "next:" not in out
    assert "impl=solution: all 3 exercises are the reference answers" in out
    results = json.loads((tree.root / "r.json").read_text())
    ok = {"passed": 3, "failed": 0, "not_written": 0, "waiting": 0, "messages": []}
    assert results["engine.rows.row_starts"] == ok


def test_a_slip_counts_once():
    """A test of the whole engine counts against the exercise that a narrower test found wrong, or against all."""
    written = {"path": "engine/x.py", "line": 1, "written": True, "source": "yours"}
    takes, gives, names = (Exercise(99, name, "engine.x", name, **written) for name in ("take", "give", "name"))
    board = Scoreboard()
    board.add("whole", [takes, gives, names], Verdict("wrong", "the text differs"))
    assert [score.failed for _, score in board.scores().values()] == [1, 1, 1]
    board.add("pair", [takes, gives], Verdict("wrong", "a block is lost"))
    board.add("narrow", [gives], Verdict("wrong", "a block is given twice"))
    counts = {ex.qualname: (score.failed, score.waiting) for ex, score in board.scores().values()}
    assert counts == {"take": (0, 2), "give": (3, 0), "name": (0, 1)}


def test_one_written_exercise_turns_exactly_its_tests_green(tree):
    tree.write("row_starts", RIGHT_SUM)
    status, out = tree.pytest("-v")
    assert status == 1 and "4 passed, 2 not written" in out
    assert out.count("test_running_sum") == out.count("test_running_sum[counts") == 2
    assert "     3      0        0   engine/rows.py:8 row_starts\n" in out.replace("rows.py:6", "rows.py:8")
    status, out = tree.pytest("-q", "--only", "row_starts")
    assert status == 0 and "3 passed, 3 deselected" in out


def test_a_wrong_one(tree):
    tree.write("row_starts", WRONG_SUM)
    status, out = tree.pytest("-q", "--results", "r.json", "-k", "not Pool")
    fact = "row_starts([3, 1, 4]): start of request 0: expected 0, got 3"
    message = f"{fact}\n  add them up   -> chapters/99-rows.md#running-sums"
    assert status == 1 and message in out
    assert "Traceback" not in out and "def test_running_sum" not in out and "short test summary" not in out
    assert "next: mend engine/rows.py:6 row_starts" in out and "python run.py hint row_starts" in out
    results = json.loads((tree.root / "r.json").read_text())["engine.rows.row_starts"]
    assert results["failed"] == 3 and message in results["messages"]
    _, out = tree.pytest("-q", "--long", "--only", "row_starts")
    assert "def test_running_sum" in out and fact in out
    status, out = tree.pytest("-q", "--borrow", "rows.row_starts", "--only", "row_starts")
    assert status == 0 and "3 passed" in out and "0 of 3 exercises are yours" in out
    status, out = tree.pytest("-x", "tests/test_ch99_rows.py::test_running_sum")
    assert status == 1 and "1 failed in" in out


def test_a_crash_says_whose_code_and_where(tree):
    tree.write("Pool.take", "def take(self, n):\n    return [self.free[0][i] for i in range(n)]\n")
    tree.write("Pool.give", GIVE)
    status, out = tree.pytest("-q", "-k", "Pool", "--results", "r.json")
    where = f"engine/rows.py:{tree.line('[0][i]')}"
    assert status == 1 and f"Pool.take raised TypeError: 'int' object is not subscriptable at {where}\n" in out
    assert "Traceback" not in out
    results = json.loads((tree.root / "r.json").read_text())
    assert results["engine.rows.Pool.take"]["failed"] == 2
    assert results["engine.rows.Pool.give"]["failed"] == 0, "one slip counted twice"


def test_an_invariant_that_scaffolding_checks_is_a_message(tree):
    tree.write("Pool.take", "def take(self, n):\n    return self.free[:n]\n")
    tree.write("Pool.give", GIVE)
    _, out = tree.pytest("-q", "-k", "test_gives_back")
    assert "after Pool.take or Pool.give: a block is free twice\n  checked by Pool.check at engine/rows.py:" in out


MORE_TESTS = (
    TESTS
    + """

from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule


@grades(row_starts)
@given(counts=st.lists(st.integers(1, 9), min_size=1))
@settings(max_examples=50)
def test_any_counts(counts):
    expect_equal(row_starts(counts)[-1], sum(counts), "number of rows")


@given(counts=st.lists(st.integers(1, 9), min_size=1))
@grades(row_starts)
def test_starts_at_zero(counts):
    expect(row_starts(counts)[0] == 0, "it does not start at 0")


@grades(row_starts)
class PoolMachine(RuleBasedStateMachine):
    @rule(n=st.integers(1, 3))
    def sums(self, n):
        expect_equal(row_starts([n]), [0, n], "start {i}")


TestPoolMachine = PoolMachine.TestCase


@grades(row_starts)
def test_bare_assert():
    assert row_starts([2]) == [0, 2]


@grades(row_starts)
def test_unpacks():
    first, last, more = row_starts([4])


def test_ordinary():
    assert first_of([2]) == 5
"""
)


@pytest.fixture
def rich(tmp_path):
    tree = Tree(tmp_path, MORE_TESTS)
    tree.write("row_starts", "def row_starts(counts):\n    return [1, *counts]\n")
    return tree


def test_every_kind_of_test(rich):
    status, out = rich.pytest("-q", "-k", "not Pool or Machine")
    assert status == 1
    assert "number of rows: expected" in out and "\n  example: counts=[" in out
    assert "it does not start at 0\n  example: counts=[1]\n" in out
    assert "start 0: expected 0, got 1\n  steps:\n    state = PoolMachine()\n    state.sums(n=1)\n" in out
    assert "test_ch99_rows.py:" in out and "assert row_starts([2]) == [0, 2]\nassert [1, 2] == [0, 2]\n" in out
    assert "At index 0 diff: 1 != 0" in out
    assert "def test_ordinary():" in out, "a test that grades nothing keeps pytest's own display"
    assert "def test_any_counts" not in out and "Traceback" not in out
    line = rich.line("first, last, more", "tests/test_ch99_rows.py")
    assert f"at tests/test_ch99_rows.py:{line}: first, last, more = row_starts([4])\n  did row_starts return" in out


def test_unwritten_hypothesis_tests_and_machines_are_not_run(tmp_path):
    tree = Tree(tmp_path, MORE_TESTS)
    status, out = tree.pytest("-q")
    assert status == 1 and 'row_starts   (chapter 99, "Running sums")   8 tests' in out


def test_examples_follow_the_grade_seed(tmp_path):
    tree = Tree(
        tmp_path,
        """
import pytest
from hypothesis import Phase, given, settings, strategies as st
from tests.grading import rng
drawn = []


@settings(phases=[Phase.generate], max_examples=5)
@given(st.integers(0, 10**12))
def test_draws(n):
    drawn.append(n)


def test_shows():
    print("drawn", drawn, rng("x").random())
""",
    )
    runs = [tree.pytest("-q", "-s", *seed) for seed in ((), ("--grade-seed", "0"), ("--grade-seed", "7"))]
    first, again, other = (next(line for line in out.splitlines() if "drawn" in line) for _, out in runs)
    assert first == again != other


ENDLESS = """
def row_starts(counts):
    while True:
        try:
            counts = list(counts)
        except Exception:
            pass
"""
STUBBORN = """
def row_starts(counts):
    for _ in range(2):
        try:
            while True:
                sum(counts)
        except:
            pass
    while True:
        sum(counts)
"""


@pytest.mark.parametrize("loop", [ENDLESS, STUBBORN])
def test_endless_loops(rich, loop):
    rich.write("row_starts", loop)
    status, out = rich.pytest("-q", "-o", "timeout=1", "-k", "refused or any_counts or Machine or scaffolding")
    assert status == 1 and "3 failed, 1 passed" in out
    message = "row_starts did not finish within 1 s: an endless loop? It was at engine/rows.py:"
    assert out.count(message) == 3


def test_results_that_change(rich):
    body = "calls.append(1)\n    return [sum(counts) + (len(calls) < 2)]"
    rich.write("row_starts", f"def row_starts(counts):\n    {body}\n")
    path = rich.root / "engine" / "rows.py"
    path.write_text(f"calls = []\n{path.read_text()}")  # only the first call is wrong
    _, out = rich.pytest("-q", "-k", "any_counts")
    assert "number of rows: expected" in out and "not always: the same input gave two different results" in out


CALLS_TAKE = """
from engine.rows import Pool
from tests.grading import grades


@grades(Pool.give)
def test_calls_take():
    pool = Pool(2)
    pool.give(pool.take(1))
"""


def test_a_tree_without_the_answer(tree):
    (tree.root / "solutions" / "rows.py").unlink()
    tree.write("Pool.give", GIVE)
    tree.put("tests/test_ch99_more.py", CALLS_TAKE)
    status, out = tree.pytest("-q", "tests/test_ch99_more.py")
    assert status == 1 and 'not written yet   engine/rows.py:20 Pool.take   (chapter 99, "Taking blocks")' in out
    assert "neither written nor in solutions/" in out and "1 not written" in out


NO_EXERCISE = """
from engine.rows import first_of
from tests.grading import grades


@grades(first_of)
def test_x(): ...
"""


def test_errors_of_the_files_stay_pytests_own(tree):
    tree.put("tests/test_ch99_bad.py", NO_EXERCISE)
    status, out = tree.pytest("-q", "tests/test_ch99_bad.py")
    assert status == 2 and "is not an exercise" in out and "ERROR collecting tests/test_ch99_bad.py" in out
    tree.put("engine/rows.py", "def row_starts(:\n")
    status, out = tree.pytest("-q", "tests/test_ch99_rows.py")
    assert status == 2 and "SyntaxError" in out and "engine/rows.py" in out


def test_names_that_mean_nothing_are_mentioned(tree):
    status, out = tree.pytest("--only", "zzz", "--borrow", "yyy")
    assert status == 5 and "--only zzz: none of the collected tests" in out and "--borrow yyy: none" in out


def test_runs_without_pytest_timeout(tree):
    tree.write("row_starts", RIGHT_SUM)
    status, out = tree.pytest("-q", "-p", "no:timeout", "--only", "row_starts")
    assert status == 0 and "3 passed" in out
