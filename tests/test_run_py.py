"""The command line: whose code it chooses, bad arguments, missing packages, odd terminals."""

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.sections import ROOT
from tests.toy import one_line, python, run_py, toy_tree, write


@pytest.fixture
def tree(tmp_path):
    return toy_tree(tmp_path)


def test_overview_from_a_python_without_packages(tree):
    for arguments in ((), ("list",), ("hint", "split"), ("solve", "split"), ("reset", "split")):
        done = bare_python(tree, *arguments)
        assert done.returncode == 0 and done.stdout and not done.stderr, done
    assert "python run.py core --requests 16" in bare_python(tree).stdout


@pytest.mark.parametrize("command", ["progress", "doctor"])
def test_a_missing_package_is_one_line(tree, command):
    line = one_line(bare_python(tree, command))
    assert line.startswith(f"run.py {command}: needs rich: python -m pip install -r ")


def bare_python(tree, *arguments):
    """As if nothing were installed: -S leaves out site-packages."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    command = [sys.executable, "-S", str(tree / "run.py"), *arguments]
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("solve",),
        ("solve", "nobody"),
        ("solve", "split", "--forse"),
        ("reset", "99"),
        ("hint", "nobody"),
        ("hint", "split", "--level", "x"),
        ("core", "--impl", "mine"),
        ("core", "--requests", "many"),
        ("core", "--requests", "0"),
        ("core", "--impl", "engine", "--borrow", "nobody"),
        ("core", "--borrow", "split"),
        ("progress", "seven"),
    ],
)
def test_bad_arguments_are_one_line(tree, arguments):
    assert one_line(run_py(tree, *arguments)).startswith("run.py")


def test_core_chooses_the_code_before_the_engine_is_imported(tree):
    write(tree, "split", "return ['mine']")
    assert run_py(tree, "core").stdout == "solution  16 ['a', 'a']\n"
    assert run_py(tree, "core", "--impl", "engine", "--requests", "2").stdout == "engine  2 ['mine']\n"
    borrowed = run_py(tree, "core", "--impl", "engine", "--borrow", "words.split", IMPL="solution")
    assert borrowed.stdout == "engine engine.words.split 16 ['a', 'a']\n"


def test_an_error_in_the_engine_says_where_it_came_from(tree):
    write(tree, "split", "raise ValueError('two\\nlines')")
    line = one_line(run_py(tree, "core", "--impl", "engine"))
    assert line == "run.py core: two lines (engine/words.py:8 split; --traceback shows the way there)\n"
    assert "Traceback" in run_py(tree, "core", "--impl", "engine", "--traceback").stderr


def test_any_working_directory_will_do(tree, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    assert "Chapter 7" in python(tree, str(tree / "run.py"), "list", cwd=elsewhere).stdout
    assert "failing 1 of 1" not in python(tree, str(tree / "run.py"), "progress", "7", cwd=elsewhere).stdout
    assert not list(elsewhere.iterdir())


def test_output_survives_an_ascii_terminal(tree):
    text = (tree / "engine/hints.md").read_text().replace("First of split", "≤ 1.5× ümlaut")
    (tree / "engine/hints.md").write_text(text, encoding="utf-8")
    plain = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for arguments in (("hint", "split"), ("list",), ("progress",)):
        done = run_py(tree, *arguments, **plain)
        assert done.returncode == 0, done.stderr
    assert "? 1.5? ?mlaut" in run_py(tree, "hint", "split", "--all", PYTHONIOENCODING="ascii", **plain).stdout


def test_a_closed_pipe_is_quiet(tree):
    read, write_end = os.pipe()
    os.close(read)
    command = [sys.executable, str(tree / "run.py"), "list"]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, timeout=60)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")


def test_an_interrupt_is_quiet(monkeypatch):
    spec = importlib.util.spec_from_file_location("run_py", ROOT / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "main", interrupted)
    with open(os.devnull, "w") as nowhere:
        monkeypatch.setattr(sys, "stdout", nowhere)
        monkeypatch.setattr(sys, "stderr", nowhere)
        assert module.entry() == 130
