"""`run.py watch` as somebody at a terminal uses it: a pseudo-terminal, saves and keys."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from engine.exercises import watch
from tests.toy import QUICK, one_line, run_py, toy_tree, write

pty = pytest.importorskip("pty")
pytestmark = pytest.mark.timeout(300)
PATIENCE = 90  # seconds for one thing to appear on the screen


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return toy_tree(tmp_path_factory.mktemp("book"))


class Terminal:
    """A process whose terminal we hold."""

    def __init__(self, tree, *arguments, **env):
        self.screen, ours = pty.openpty()
        clean = {k: v for k, v in os.environ.items() if k not in ("IMPL", "BORROW", "GRADE_SEED", "PYTEST_ADDOPTS")}
        self.process = subprocess.Popen(
            [sys.executable, str(tree / "run.py"), *arguments],
            stdin=ours, stdout=ours, stderr=ours, env={**clean, **QUICK, **env}, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored, if a shell runs us behind it
        )  # fmt: skip
        os.close(ours)
        os.set_blocking(self.screen, False)
        self.text = ""

    def until(self, pattern: str) -> str:
        """What appears up to and with the pattern; it is not looked at again."""
        end = time.monotonic() + PATIENCE
        while not (found := re.search(pattern, self.text)):
            assert time.monotonic() < end, f"no {pattern!r} in {self.text!r}"
            try:
                self.text += os.read(self.screen, 4096).decode(errors="replace").replace("\r\n", "\n")
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:
                assert re.search(pattern, self.text), f"ended without {pattern!r}: {self.text!r}"
        seen, self.text = self.text[: found.end()], self.text[found.end() :]
        return seen

    def press(self, key: str) -> None:
        os.write(self.screen, key.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.screen)


@pytest.fixture
def terminal(tree):
    started = []

    def start(*arguments, **env):
        started.append(Terminal(tree, *arguments, **env))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_saves_and_keys(tree, terminal):
    """A wrong body, a right one, a damaged file, a stub again; and the keys between."""
    screen = terminal("watch", "7")
    screen.until("watching chapter 7.*\nh hint +n next +l list +q quit\n")
    screen.press("n")
    screen.until(r"next: write engine/words.py:\d+ split")
    clean = (tree / "engine/words.py").read_text()
    write(tree, "split", "return [text]")
    screen.until(r"grading split\n")
    said = screen.until("h hint")
    assert re.search(r"failing +engine/words.py:\d+ split +1 of 1 tests fail", said), said
    assert "-> " in said or "word" in said
    screen.press("h")
    assert "1. First of split" in screen.until("2 more")
    screen.press("h")
    screen.until("2. Second of split")
    write(tree, "split", "return text.split() if keep_case else text.lower().split()")
    assert re.search(r"passing +engine/words.py:\d+ split +1 tests pass", screen.until("tests pass"))
    screen.until("h hint")
    screen.press("l")
    screen.until(r"written +split")
    (tree / "engine/words.py").write_text(clean.replace("raise NotImplementedError", "return (", 1))
    screen.until(r"engine/words.py:\d+: .*(never closed|invalid syntax)")
    (tree / "engine/words.py").write_text(clean)
    screen.until("not written yet +engine/words.py")
    screen.press("x")
    screen.until("h hint")
    screen.press("q")
    assert screen.process.wait(PATIENCE) == 0


def test_only_what_changed_is_graded(tree, terminal):
    screen = terminal("watch", "7")
    screen.until("q quit")
    write(tree, "split", "return text.split() if keep_case else text.lower().split()")
    write(tree, "count", "return {word: words.count(word) for word in words}")
    said = screen.until("q quit")
    said += screen.until("q quit") if "count" not in said else ""
    assert {"split", "count"} <= set(re.findall(r"passing +\S+ (\S+)", said)), said
    write(tree, "count", "return {w: words.count(w) for w in words}")
    said = screen.until("q quit")
    assert "grading count\n" in said and " split " not in said
    write(tree, "split", "raise NotImplementedError")
    screen.until("not written yet")
    screen.press("\x04")
    assert screen.process.wait(PATIENCE) == 0


def test_without_the_library_it_polls(tree, terminal, tmp_path):
    (tmp_path / "watchfiles.py").write_text("raise ModuleNotFoundError(name='watchfiles')\n")
    screen = terminal("watch", "7", PYTHONPATH=str(tmp_path))
    screen.until(r"looked for every 1 s \(python -m pip install")
    write(tree, "count", "return {}")
    screen.until(r"failing +engine/words.py:\d+ count")
    os.killpg(screen.process.pid, signal.SIGINT)
    assert screen.process.wait(PATIENCE) == 130


def test_the_terminal_is_as_before(tree, terminal):
    import termios

    screen = terminal("watch", "7")
    before = termios.tcgetattr(screen.screen)[3]
    screen.until("q quit")
    assert not termios.tcgetattr(screen.screen)[3] & termios.ICANON
    screen.press("q")
    screen.process.wait(PATIENCE)
    assert termios.tcgetattr(screen.screen)[3] == before


def test_unknown_chapters_are_one_line(tree):
    assert "chapter 99 has no exercises" in one_line(run_py(tree, "watch", "99"))
    assert "is not a chapter number" in one_line(run_py(tree, "watch", "seven"))


def test_results_are_remembered(tree, monkeypatch):
    """As `progress --cached` shows them."""
    write(tree, "count", "return {}")
    watcher = watch.Watcher(tree, "7")
    result = {"engine.words.count": {"failed": 1, "passed": 0, "messages": ["counts: no"]}}
    monkeypatch.setattr(watch, "grade", lambda catalog, exercises: (result, []))
    watcher._grade(watcher._exercises()[-1:])
    assert watch.state.load(tree)["results"]["engine.words.count"]["failed"] == 1


def test_a_change_around_exercises_concerns_all_of_the_file(tree, monkeypatch):
    write(tree, "count", "return {'x': 1}")
    write(tree, "split", "return ['a', 'b']")
    watcher, graded = watch.Watcher(tree, "7"), []
    monkeypatch.setattr(watcher, "_grade", lambda exercises: graded.append([ex.qualname for ex in exercises]))
    watcher.look()
    assert graded == []
    path = tree / "engine/words.py"
    path.write_text("HELPER = 1\n" + path.read_text())
    watcher.look()
    assert graded == [["split", "count"]]
