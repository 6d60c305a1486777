"""`run.py grade` on a small class: right marks for everybody, whatever the neighbours and the other exercises do."""

import csv
import json
import os
import re

import pytest

from engine.exercises.grading.judging import Graders, Judge
from tests.classroom import BODIES, Classroom, bomb, function, links
from tests.toy import one_line, run_py, toy_tree

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="class grading needs a POSIX system")
EXERCISES = ["split", "Index.add", "Index.top", "count"]
KINDS = [
    "interrupts",
    "loops",
    "hoards",
    "recurses",
]  # each takes a run or two of its own; the sandbox's tests have more


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    return toy_tree(tmp_path_factory.mktemp("book"))


@pytest.fixture(scope="module")
def room(book, tmp_path_factory):
    room = Classroom(book, 7, tmp_path_factory.mktemp("class"))
    answers, words = room.answers(), room.path("split")
    room.student("right", answers, {})
    room.student("untouched", {}, {}, "not written")
    room.student("started", {"count": answers["count"]}, {"count": "passed"}, "not written", prefix="repo-main")
    room.student(
        "wrong", {**answers, "split": "def split(text, keep_case=False):\n    return text.split()"}, {"split": "wrong"}
    )
    refused = [kind for kind, (_, status) in BODIES.items() if status == "refused"]
    every = dict(zip(EXERCISES, refused, strict=True))
    room.student("refused", {n: function(room.catalog.one(n), BODIES[k][0]) for n, k in every.items()}, {}, "refused")
    for kind, name in zip(KINDS, EXERCISES, strict=True):
        body, status = BODIES[kind]
        room.student(kind, {**answers, name: function(room.catalog.one(name), body)}, {name: status})
    room.zipped("links", answers, {}, "refused", change=links(words))
    room.zipped("bomb", answers, {}, "refused", change=bomb(words))
    room.broken("broken")
    return room


@pytest.fixture(scope="module")
def graded(book, room, tmp_path_factory):
    results = tmp_path_factory.mktemp("results")
    arguments = ("grade", str(room.folder), "--chapters", "7", "--out", str(results), "--jobs", "2", "--seed", "5")
    done = run_py(book, *arguments, BORROW="split", IMPL="solution")
    assert done.returncode == 0, done
    return results, done


def sheet(graded, student):
    return json.loads((graded[0] / f"{student}.json").read_text())


def test_everybody_gets_the_right_marks(room, graded):
    assert room.check(graded[0]) == []


def test_a_student_gets_gradescopes_format(graded):
    found = sheet(graded, "wrong")
    assert found["score"] == 3.0 == sum(test["score"] for test in found["tests"])
    assert found["output"] == "3 of 4 exercises are right"
    split = next(test for test in found["tests"] if test["name"] == "split")
    assert (split["score"], split["max_score"], split["status"]) == (0.0, 1.0, "failed")
    assert "0 of 1 tests pass" in split["output"] and "expected 'a', got" not in split["output"].split("\n")[0]
    assert "word 1: expected 'b', got 'B'" in split["output"]
    assert set(found) == {"score", "output", "execution_time", "tests", "extra_data"}
    assert found["extra_data"]["seed"] == 5 and found["extra_data"]["chapters"] == [7]


def test_a_mistake_elsewhere_costs_nothing(graded):
    """Index.add and Index.top call split, and their tests fail with the wrong one."""
    tests = {test["name"]: test for test in sheet(graded, "wrong")["tests"]}
    assert tests["Index.top"]["status"] == tests["Index.add"]["status"] == "passed"


def test_messages_of_hostile_ones(graded):
    def says(student, name):
        return next(t["output"] for t in sheet(graded, student)["tests"] if t["name"] == name)

    assert "stopped the whole run, in test_split" in says("interrupts", "split")
    assert "did not finish within" in says("loops", "Index.add")
    assert "MemoryError" in says("hoards", "Index.top")
    assert "RecursionError" in says("recurses", "count")
    assert "imports os" in says("refused", "split")
    assert "a symbolic link" in says("links", "split") and "larger than 1024 KiB" in says("bomb", "split")
    assert "the zip cannot be opened" in says("broken", "count")


def test_the_class_as_csv_and_table(graded):
    rows = list(csv.DictReader((graded[0] / "class.csv").read_text().splitlines()))
    assert [row["student"] for row in rows] == sorted(row["student"] for row in rows) and len(rows) == 12
    by = {row["student"]: row for row in rows}
    assert (by["started"]["score"], by["started"]["max_score"], by["started"]["count"]) == ("1.0", "4", "passed")
    assert by["right"]["flags"].count("equal to the reference") == 4
    assert (
        "Index.top: uses solutions/" in by["refused"]["flags"] and "entries that point outside" in by["links"]["flags"]
    )
    table = graded[1].stdout
    assert all(row["student"] in table for row in rows) and re.search(r"wrong +│ 3 of 4 │ ✗■■■", table)
    assert "12 graded, seed 5" in table


def test_what_students_see_holds_no_flags(graded):
    for path in graded[0].glob("*.json"):
        found = json.loads(path.read_text())
        shown = json.dumps([found["output"], found["tests"]])
        assert "equal to the reference" not in shown and "solutions/words" not in shown


@pytest.mark.parametrize(
    "arguments, says",
    [
        (("nowhere", "--chapters", "7"), "nowhere does not exist"),
        ((".", "--chapters", "99"), "chapter 99 has no exercises"),
        ((".", "--chapters", "seven"), "'seven' is not a chapter number"),
        ((".", "--chapters", "7", "--jobs", "0"), "--jobs must be at least 1"),
        (("chapters", "--chapters", "7"), "holds no submissions"),
        ((".", "--chapters", "12"), "no tests/test_chNN_"),
    ],
)
def test_what_cannot_be_graded(book, tmp_path, arguments, says):
    assert says in one_line(run_py(book, "grade", *arguments, "--out", str(tmp_path / "out")))


def test_a_reference_that_fails_stops_everything(room, tmp_path):
    book = toy_tree(tmp_path / "book")
    path = book / "solutions/words.py"
    path.write_text(path.read_text().replace("text.lower()", "text"))
    arguments = ("grade", str(room.folder), "--chapters", "7", "--out", str(tmp_path / "out"), "--seed", "1")
    done = run_py(book, *arguments)
    assert done.returncode == 2 and "the reference itself is not graded as right" in done.stderr, done
    assert not list((tmp_path / "out").iterdir())


GRADED = {"t1": ["a"], "t2": ["b"], "t3": ["a", "b", "c", "d"], "t4": ["c"], "t5": ["d"]}


class Fake:
    """Runs that are decided by a rule: rule(names at work, test) -> "passed", "failed", "late", or "ended"."""

    def __init__(self, rule, guilty="a"):
        self.rule, self.guilty, self.runs = rule, guilty, []

    def __call__(self, bodies, limits, profile):
        self.runs.append((sorted(bodies), sorted(limits)))
        result = {
            "records": {},
            "ended": "finished",
            "running": "",
            "inside": "",
            "forged": 0,
            "errors": [],
            "output": "",
        }
        for test in limits:
            outcome = self.rule(set(bodies), test)
            if outcome == "ended":
                return result | {"ended": "ended the test process", "running": test, "inside": self.guilty * profile}
            record = {"outcome": outcome, "graded": GRADED[test], "text": f"{test} fails", "verdict": "", "at": []}
            if outcome == "late":
                record |= {"outcome": "failed", "verdict": "late", "at": [self.guilty]}
            result["records"][test] = record
            if outcome == "late":
                break
        return result


def marks(fake):
    judge = Judge(Graders(GRADED, dict.fromkeys(GRADED, 4.0)), fake)
    found = judge.marks(dict.fromkeys("abcd", "body"))
    return {n: "stopped" if m.stopped else "right" if m.right else "wrong" for n, m in found.items()}


def test_all_right_takes_one_run():
    fake = Fake(lambda names, test: "passed")
    assert set(marks(fake).values()) == {"right"} and len(fake.runs) == 1


def test_the_guilty_one_alone_is_wrong():
    fake = Fake(lambda names, test: "failed" if "a" in names and test in ("t1", "t3", "t4") else "passed")
    assert marks(fake) == {"a": "wrong", "b": "right", "c": "right", "d": "right"}


def test_wrong_in_a_shared_test_only():
    fake = Fake(lambda names, test: "failed" if "b" in names and test == "t3" else "passed")
    assert marks(fake) == {"a": "right", "b": "wrong", "c": "right", "d": "right"}


@pytest.mark.parametrize("way", ["ended", "late"])
def test_who_ends_a_run_is_taken_out(way):
    fake = Fake(lambda names, test: way if "a" in names and test in ("t2", "t3", "t1") else "passed")
    assert marks(fake) == {"a": "stopped", "b": "right", "c": "right", "d": "right"}
    assert len(fake.runs) <= 5


def test_everybody_ends_the_run():
    fake = Fake(lambda names, test: "ended" if names else "passed", guilty="")
    assert set(marks(fake).values()) == {"stopped"} and len(fake.runs) < 20


def test_a_run_that_ends_once_only():
    """By chance, or because the machine ran out of memory: tried again, nobody is blamed."""
    left = ["ended"]
    fake = Fake(lambda names, test: left.pop() if left and test == "t3" else "passed")
    assert set(marks(fake).values()) == {"right"}


def test_blamed_for_another_ones_fault():
    """c calls a, which never returns; the traceback names c."""
    fake = Fake(lambda names, test: "late" if {"a", "c"} <= names and test == "t4" else "passed", guilty="c")
    assert marks(fake)["c"] == "right"
