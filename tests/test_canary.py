"""What the student wrote is what is graded: written exercises that raise a marker, which must come out."""

import os
import shutil
from pathlib import Path

import pytest

from engine.exercises import graders
from engine.exercises.bodies import replace_body
from engine.exercises.catalog import Catalog
from engine.exercises.source import Source
from tests.sections import ROOT
from tests.toy import pytest_in, toy_tree, write


def test_a_function_and_a_method(tmp_path):
    tree = toy_tree(tmp_path)
    write(tree, "split", "raise RuntimeError('canary in a function')")
    write(tree, "Index.top", "raise RuntimeError('canary in a method')")
    write(tree, "Index.add", "self.counts = {'x': 1}")
    graded = pytest_in(tree, "tests")
    assert graded.returncode == 1
    assert "canary in a function" in graded.stdout and "canary in a method" in graded.stdout
    assert "3 of 4 exercises are yours, 1 borrowed" in graded.stdout, "nothing is borrowed silently"
    reference = pytest_in(tree, "--impl", "solution", "tests")
    assert reference.returncode == 0 and "canary" not in reference.stdout
    spared = pytest_in(tree, "--borrow", "split", "tests")
    assert "canary in a method" in spared.stdout and "canary in a function" not in spared.stdout


QUICK = """
import pytest
from hypothesis import Phase, settings

@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    config.option.tbstyle = "native"  # pytest's own parses a whole file for each entry
    settings.register_profile("first failure", phases=[Phase.explicit, Phase.generate], max_examples=1)
    settings.load_profile("first failure")
"""


@pytest.mark.skipif(os.environ.get("CI_STUBS") != "1", reason="CI_STUBS=1 asks for it: a run of all graders")
@pytest.mark.timeout(300)
def test_every_grader_of_this_tree_runs_what_is_in_engine(tmp_path, monkeypatch):
    """All exercises raise their own name: no test that grades one may pass, and each name must come out somewhere."""
    for folder in ("engine", "solutions", "tests", "chapters"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    files = [p.relative_to(ROOT).as_posix() for p in sorted((ROOT / "tests").glob("test_ch[0-9]*.py"))]
    chapters = {int(Path(file).name[len("test_ch") :].split("_")[0]) for file in files}
    exercises = [ex for ex in Catalog(tmp_path).exercises if ex.chapter in chapters]
    for ex in exercises:
        path = Path(ex.path)
        source = Source.read(path)
        raising = f"def {ex.qualname.split('.')[-1]}(): raise RuntimeError('canary {ex.name};')"
        path.write_text(replace_body(source.text, ex.qualname, raising), encoding="utf-8")
    (tmp_path / "quick.py").write_text(QUICK)
    monkeypatch.setenv("PYTEST_PLUGINS", "quick")
    run = graders.run(tmp_path, files, only=[ex.name for ex in exercises])
    assert run.errors == {}
    graded = {test: entry for test, entry in run.tests.items() if entry["graded"]}
    assert [test for test, entry in graded.items() if entry["outcome"] not in ("failed", "skipped")] == []
    silent = [ex.name for ex in exercises if not came_out(ex.name, run)]
    while silent:  # their tests always need others first: take the answers of those
        tests = [test for test, entry in graded.items() if set(silent) & set(entry["graded"])]
        run = graders.run(tmp_path, tests, only=silent, borrow=[ex.name for ex in exercises if ex.name not in silent])
        heard = [name for name in silent if came_out(name, run)]
        assert heard, silent
        silent = [name for name in silent if name not in heard]


def came_out(name: str, run: graders.Run) -> bool:
    return any(f"canary {name};" in entry["message"] for entry in run.tests.values())
