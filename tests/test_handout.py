"""`run.py handout`: a tree in which the answers are nowhere, and that says so instead of failing obscurely."""

import shutil
import subprocess
from pathlib import Path

import pytest

from engine.exercises.catalog import Catalog
from engine.exercises.handout import handout
from engine.exercises.source import Source, functions, is_stub
from engine.exercises.splice import solve
from tests.sections import ROOT
from tests.toy import one_line, pytest_in, run_py, toy_tree, write

CHAPTERS = (24, 31)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    out = tmp_path_factory.mktemp("handout") / "tree"
    lines = handout(Catalog(ROOT), "24,31", out)
    assert lines == [f"{out}: without the 18 answers of chapters 24, 31, without mutants and alternatives"]
    return out


def test_the_answers_are_gone_and_the_others_are_there(tree):
    for ex in Catalog(ROOT).exercises:
        path = tree / ex.where.rsplit(":", 1)[0].replace("engine/", "solutions/", 1)
        there = path.exists() and ex.qualname in dict(functions(Source.read(path).tree))
        assert there == (ex.chapter not in CHAPTERS), ex.name


def test_every_exercise_is_a_stub_in_it(tree):
    catalog = Catalog(tree)
    assert [ex.name for ex in catalog.exercises] == [ex.name for ex in Catalog(ROOT).exercises]
    assert not [ex.name for ex in catalog.exercises if ex.written and ex.chapter in CHAPTERS]


def test_nothing_that_gives_answers_away(tree):
    names = {path.relative_to(tree).as_posix() for path in tree.rglob("*")}
    assert not {"tests/mutants", "tests/alternatives", "tests/test_grader.py", ".git", "tests/mutation.py"} & names
    assert {"run.py", "tests/conftest.py", "tests/test_ch31_engine_v2.py", "chapters/31-engine-v2.md"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith(".") and name != ".gitignore"]


def test_the_graders_bring_all_that_they_import(tree):
    """Not one module of tests/ is missing: they can be collected."""
    found = {path.relative_to(tree).as_posix() for path in (tree / "tests").rglob("*.py")}
    for path in (tree / "tests").rglob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("from tests."):
                module, _, names = line.removeprefix("from ").partition(" import ")
                base = module.replace(".", "/")
                inside = f"{base}/{names.split(',')[0].strip()}.py"
                assert {f"{base}.py", f"{base}/__init__.py", inside} & found, f"{path}: {line}"


@pytest.fixture
def toy(tmp_path):
    book = toy_tree(tmp_path / "book")
    done = run_py(book, "handout", "--chapters", "7", "--out", str(tmp_path / "out"))
    assert done.returncode == 0 and "without the 4 answers of chapter 7" in done.stdout, done
    return tmp_path / "out"


def test_what_is_missing_is_said_in_one_line(toy):
    shutil.copy(ROOT / "tests/toy.py", toy / "hypothesis.py")  # as in the toy's own folder: not to be imported
    (toy / "hypothesis.py").write_text("raise ImportError\n")
    write(toy, "Index.add", "for word in split(text):\n    self.counts[word] = 1")
    done = pytest_in(toy, "tests/test_ch07_words.py", "-p", "no:hypothesispytest")
    assert done.returncode == 1 and "Traceback" not in done.stdout, done.stdout
    assert "not written yet   engine/words.py:" in done.stdout and "NotImplementedError" not in done.stdout
    assert "1 of 5 exercises are yours" in done.stdout or "neither written nor in solutions/" in done.stdout


def test_grading_and_solving_need_the_answers(toy, tmp_path):
    assert "no answer for split" in one_line(run_py(toy, "solve", "split"))
    said = one_line(run_py(toy, "grade", str(toy), "--chapters", "7", "--out", str(tmp_path / "results")))
    assert "grading needs the answer of" in said


def test_answers_that_stand_in_engine_become_stubs(tmp_path):
    book = toy_tree(tmp_path / "book")
    solve(Catalog(book), "7")
    handout(Catalog(book), "7", tmp_path / "out")
    source = Source.read(tmp_path / "out/engine/words.py")
    stubs = {name for name, node in functions(source.tree) if is_stub(node)}
    assert stubs == {"split", "count", "Index.add", "Index.top"}
    assert source.text == (toy_tree(tmp_path / "clean") / "engine/words.py").read_text()


def test_one_chapter_of_a_shared_file(tmp_path):
    book = toy_tree(tmp_path / "book")
    path = book / "engine/words.py"
    path.write_text(path.read_text().replace('@exercise(7, "Counting")', '@exercise(12, "Shouting")'))
    handout(Catalog(book), "7", tmp_path / "out")
    left = dict(functions(Source.read(tmp_path / "out/solutions/words.py").tree))
    assert set(left) == {"count"} and "opens with a comment" not in (tmp_path / "out/solutions/words.py").read_text()


def test_an_answer_elsewhere_is_found(tmp_path):
    book = toy_tree(tmp_path / "book")
    text = "def mine(self, s, weight=1, scale=1):\n    # renamed\n    for w, k in count(split(text)).items():\n"
    text += "        self.counts[w] = self.counts.get(w, 0) + k * weight * scale\n"
    (book / "experiments").mkdir()
    (book / "experiments/notes.py").write_text(text)
    with pytest.raises(ValueError, match="experiments/notes.py:1 is the answer of engine.words.Index.add"):
        handout(Catalog(book), "7", tmp_path / "out")


def test_only_what_git_tracks(tmp_path):
    book = toy_tree(tmp_path / "book")
    (book / "engine/exam.py").write_text("# next week's\n")
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x"]
    subprocess.run([*git, "init", "-q"], cwd=book, check=True)
    tracked = [p for p in ("engine", "solutions", "tests", "chapters", "run.py") if p]
    subprocess.run([*git, "add", *tracked], cwd=book, check=True)
    subprocess.run([*git, "rm", "-q", "--cached", "engine/exam.py"], cwd=book, check=True)
    handout(Catalog(book), "7", tmp_path / "out")
    assert (tmp_path / "out/engine/words.py").exists() and not (tmp_path / "out/engine/exam.py").exists()


def test_bad_arguments(tmp_path):
    book = toy_tree(tmp_path / "book")
    said = one_line(run_py(book, "handout", "--chapters", "7", "--out", str(book)))
    assert "is not an empty folder" in said
    assert "no exercises" in one_line(run_py(book, "handout", "--chapters", "7,9", "--out", str(tmp_path / "out")))
    assert not Path(tmp_path / "out").exists()
