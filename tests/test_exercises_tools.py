"""What `run.py` says of progress, blame, hints, the list and the state of the machine."""

import json
import sys

import pytest

from engine.exercises import blame, doctor
from engine.exercises.catalog import Catalog
from engine.exercises.hints import numbered
from tests.sections import ROOT
from tests.toy import one_line, run_py, toy_tree, write


@pytest.fixture
def tree(tmp_path):
    return toy_tree(tmp_path)


def rows(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


# progress


def test_progress_of_a_fresh_tree(tree):
    done = run_py(tree, "progress")
    assert done.returncode == 0
    assert rows(done.stdout) == [["07", "□□□□ 4", "·", "·", "·", "4", ""], ["12", "□ 1", "·", "·", "·", "1", ""]]
    assert "next: write engine/words.py:6 split\n      read chapters/07-words.md#words\n" in done.stdout


def test_progress_counts_and_names_what_to_mend(tree):
    write(tree, "split", "return text.split()")
    write(tree, "count", "return {w: words.count(w) for w in words}")
    write(tree, "shout", "return []", "engine/more.py")
    done = run_py(tree, "progress")
    assert rows(done.stdout) == [
        ["07", "■■□□ 4", "2", "1", "1", "2", ""],
        ["12", "■ 1", "1", "·", "·", "·", "1 not graded"],
    ]
    assert "next: mend engine/words.py:6 split" in done.stdout and "word 1: expected 'b', got 'B'" in done.stdout
    results = json.loads((tree / ".progress.json").read_text())["results"]
    split = results["engine.words.split"]
    assert (split["passed"], split["failed"], split["not_written"], len(split["messages"])) == (0, 1, 0, 1)
    assert set(results) == {"engine.words.split", "engine.words.count"}


def test_cached_progress_runs_nothing_and_tells_what_has_changed(tree):
    write(tree, "count", "return {w: words.count(w) for w in words}")
    assert "nothing was graded yet" in run_py(tree, "progress", "--cached").stdout
    assert "count      engine/words.py:12  passing" in run_py(tree, "progress", "07").stdout
    write(tree, "count", "return 1 / 0")
    done = run_py(tree, "progress", "7", "--cached")
    assert "passing changed since" in done.stdout and "results of 20" in done.stdout
    assert "failing 1 of 1" in run_py(tree, "progress", "7").stdout


def test_grading_one_chapter_keeps_the_results_of_others(tree):
    write(tree, "count", "return {w: words.count(w) for w in words}")
    run_py(tree, "progress")
    run_py(tree, "progress", "12")
    assert rows(run_py(tree, "progress", "--cached").stdout)[0][3] == "1"


def test_progress_in_a_tree_that_does_not_import(tree):
    write(tree, "shout", "return []", "engine/more.py")
    write(tree, "count", "return {}")
    (tree / "engine/words.py").write_text((tree / "engine/words.py").read_text() + "\nbroken(\n")
    done = run_py(tree, "progress")
    assert done.returncode == 0
    assert "cannot be used: engine/words.py:3" in done.stdout and rows(done.stdout)[0][0] == "12"
    (tree / "engine/words.py").write_text((tree / "engine/words.py").read_text().replace("broken(", "broken()"))
    assert "tests/test_ch07_words.py: NameError: name 'broken' is not defined" in run_py(tree, "progress").stdout


def test_progress_without_tests_and_when_all_is_done(tree):
    assert run_py(tree, "solve", "7").returncode == run_py(tree, "solve", "12").returncode == 0
    assert "all written, 1 not graded" in run_py(tree, "progress").stdout
    assert "all written and passing" in run_py(tree, "progress", "7").stdout
    (tree / "tests/test_ch07_words.py").unlink()
    assert "4 not graded" in run_py(tree, "progress", "7").stdout


# blame


def test_blame_finds_the_function_and_not_the_one_whose_tests_fail(tree):
    run_py(tree, "solve", "7")
    write(tree, "count", "return dict.fromkeys(words, 1)")  # its own test has no word twice
    done = run_py(tree, "blame", "7")
    assert done.returncode == 1
    faults = [line for line in done.stdout.splitlines() if line.startswith("at fault")]
    assert faults == [f"at fault: {Catalog(tree).one('count').where} count"]
    assert "1 of the failing tests grades something else" in done.stdout
    assert "python run.py hint count   chapters/07-words.md#counting" in done.stdout


def test_blame_uses_tests_of_what_is_not_written(tree):
    write(tree, "count", "return dict.fromkeys(words, 1)")  # only a test of Index.top and Index.add can tell
    done = run_py(tree, "blame", "7")
    assert done.returncode == 1 and "at fault: engine/words.py:12 count" in done.stdout


def test_blame_finds_two_functions_that_fail_together(tree):
    run_py(tree, "solve", "7")
    write(tree, "count", "return dict.fromkeys(words, 1)")
    write(tree, "split", "return text.split()[:2]")
    done = run_py(tree, "blame", "7")
    faults = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("at fault")]
    assert faults == ["split", "count"]
    assert "no one of them is enough" in done.stdout


def test_blame_says_when_it_is_no_exercise(tree):
    run_py(tree, "solve", "7")
    path = tree / "engine/words.py"
    path.write_text(path.read_text().replace("        return split(text)", "        return split(text) + ['?']"))
    done = run_py(tree, "blame", "7")
    assert done.returncode == 1
    assert "not in an exercise: tests/test_ch07_words.py::test_scaffolding fails with every answer too" in done.stdout
    assert "at fault" not in done.stdout


def test_blame_without_a_fault(tree):
    assert "nothing up to chapter 7 is written yet" in run_py(tree, "blame", "7").stdout
    write(tree, "count", "return {w: words.count(w) for w in words}")
    done = run_py(tree, "blame", "7")
    assert done.returncode == 0 and "no test of chapter 7 fails" in done.stdout


def test_blame_refuses_what_it_cannot_run(tree):
    assert "no tests/test_ch12_*.py to run" in one_line(run_py(tree, "blame", "12"))
    assert "'seven' is not a chapter number" in one_line(run_py(tree, "blame", "seven"))
    (tree / "engine/more.py").write_text("@exercise(\n")
    assert "engine/more.py:1" in one_line(run_py(tree, "blame", "7"))


@pytest.mark.parametrize("faulty", ["c", "af", "bdg", "abcdefgh"])
@pytest.mark.parametrize("jobs", [1, 3])
def test_the_smallest_set_is_exactly_the_faulty_ones(faulty, jobs):
    tried = []

    def passes(some):
        tried.append(some)
        return set(faulty) <= set(some)

    names = list("abcdefgh")
    assert blame.smallest_set(names, passes, jobs, singles=[(name,) for name in names]) == tuple(faulty)
    assert len(tried) == len(set(tried)) <= 8 + 28 + 28


def test_a_pair_is_preferred_where_several_sets_would_do():
    def passes(some):
        return {"a", "b", "c"} <= set(some) or {"d", "e"} <= set(some)

    assert blame.smallest_set(list("deabc"), passes) in (("d", "e"), ("e", "d"))
    assert blame.smallest_set(list("abcde"), passes) == ("d", "e")


# hint and list


def test_each_call_shows_one_hint_more(tree):
    first, second, third, fourth = (run_py(tree, "hint", "split").stdout for _ in range(4))
    assert "1. First of split,\n   on two lines." in first and "Second" not in first and "2 more" in first
    assert "2. Second of split." in second and "Pitfall" not in second
    assert "3. Pitfall of split." in third and third == fourth and "no more hints" in third
    assert first.splitlines()[0] == "engine/words.py:6 split" and "chapters/07-words.md#words" in first


def test_hints_by_level_or_all_at_once(tree):
    level = run_py(tree, "hint", "Index.top", "--level", "2").stdout
    assert "2. Second of Index.top." in level and "First" not in level and "Pitfall" not in level
    everything = run_py(tree, "hint", "count", "--all").stdout
    assert all(word in everything for word in ("First of `count`", "Second of `count`", "Pitfall of `count`"))
    assert "hints 1 to 3" in one_line(run_py(tree, "hint", "count", "--level", "4"))
    (tree / ".progress.json").write_text("{broken")
    assert "First of Index.add" in run_py(tree, "hint", "Index.add").stdout


def test_hints_that_are_not_there(tree):
    (tree / "engine/hints.md").unlink()
    assert "split has no hints in the hints.md beside engine/words.py:6" in one_line(run_py(tree, "hint", "split"))


def test_a_hint_may_span_paragraphs():
    assert numbered("\n1. One\n   more\n\n       code\n2. Two\n3. Three\n") == ["One\nmore\n\n    code", "Two", "Three"]


def test_list(tree):
    write(tree, "count", "return {}")
    lines = run_py(tree, "list").stdout.splitlines()
    assert lines[0] == "Chapter 7: 1 of 4 written   chapters/07-words.md"
    assert lines[1].split() == [".", "split", "engine/words.py:6", "Words"]
    assert lines[4].split() == ["written", "count", "engine/words.py:12", "Counting"]
    assert "Chapter 12" not in run_py(tree, "list", "07").stdout
    assert "chapter 99 has no exercises" in one_line(run_py(tree, "list", "99"))


# doctor


def test_doctor_on_this_machine():
    done = run_py(ROOT, "doctor")
    broken = [row for row in rows(done.stdout) if row[0] == "broken"]
    assert done.returncode == bool(broken), done.stdout
    what = [row[1] for row in rows(done.stdout)]
    assert {"python", "torch", "threads", "matmul", "GPU", "Triton interpreter", "weights"} <= set(what)


def test_doctor_calls_a_missing_requirement_broken_and_another_version_a_note(tmp_path):
    requirements = tmp_path / "requirements.txt"
    pins = f"# comment\nno-such-package-here==1.0\npytest==0.1\npytest=={pytest.__version__}\n"
    requirements.write_text(pins + "winonly==1; sys_platform == 'win32'\n")
    checks = doctor.packages(requirements, "broken")
    assert [check.state for check in checks] == ["broken", "note", "ok"]
    assert "pip install" in checks[0].found and checks[1].found.endswith("tested with 0.1")


def test_doctor_notices_a_kernel_that_fails(tree):
    (tree / "engine/exercises/triton_probe.py").write_text("raise ValueError('no kernels today')\n")
    if sys.platform == "linux":
        check = doctor.triton_check(tree)
        assert (check.state, check.found) == ("broken", "ValueError: no kernels today")
