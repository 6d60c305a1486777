"""Runs tests against changed sources, each run in a fork of a process that has imported the slow libraries once.

A run never touches the disk: in the fork the import system is handed another text for one file. It is a fork that
changes modules, environment and limits, so the next one starts as clean as the first.
"""

import ast
import contextlib
import gc
import importlib
import importlib.metadata
import json
import linecache
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path

from engine.exercises.registry import EXERCISES
from tests.sections import ROOT

TEST_LIMIT = 20  # seconds of computing for one test in a fork
RUN_LIMIT = 900  # seconds for one fork, on however busy a machine
MEMORY = 6 << 30  # bytes that a fork may add to its address space
STOPPED: list[int] = []  # signals that ask to end; an exception from a handler could get lost in a fork's clean-up


@dataclass
class Run:
    """tests: names to select, or None for those that grade the exercise; everything must hold for `everything`."""

    id: str
    path: Path  # the file whose text is replaced
    text: str
    files: list[Path]  # test files
    exercise: str  # full name
    tests: list[str] | None = None
    everything: bool = False
    impl: str = "engine"
    seed: int = 0
    until_caught: bool = False  # stop at the first failure that counts


@dataclass
class Result:
    """records: one for each failed phase and each passed test; trouble: why there is nothing to go by."""

    records: list[dict] = field(default_factory=list)
    selected: int = 0
    trouble: str = ""
    seconds: float = 0.0


def counts(record: dict, exercise: str) -> bool:
    """A failure that tells the reader about this exercise: not a crash elsewhere, not a test of something else."""
    if record["outcome"] != "failed" or exercise not in record["graded"]:
        return False
    if record["kind"] == "raised":
        return exercise in record["at"]
    if record["kind"] == "assert":
        return re.search(rf"\b{exercise.rsplit('.', 1)[-1]}\b", record["text"]) is not None
    return record["kind"] in ("wrong", "late")


def preload(files: Iterable[Path]) -> None:
    """Import the libraries that the engine and these test files use, once, before any fork."""
    if not Path("/dev/nvidia0").exists():
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    for path in [*files, *sorted((ROOT / "engine").rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                [_touch(alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                _touch(node.module, [alias.name for alias in node.names])
    for name in getattr(importlib.import_module("_pytest.config"), "default_plugins", ()):
        _touch(f"_pytest.{name}")
    _touch("hypothesis.stateful")  # its pytest plugin imports it at the end of a run, whether used or not
    for plugin in importlib.metadata.entry_points(group="pytest11"):
        _touch(plugin.module)
    gc.collect()
    gc.freeze()  # the forks share these pages and never search them


def _touch(module: str, names: Iterable[str] = ()) -> None:
    if module.split(".")[0] not in ("engine", "solutions", "tests", "run"):
        with contextlib.suppress(ImportError):
            found = importlib.import_module(module)
            for name in names:  # some libraries load what is inside them on first touch
                getattr(found, name, None)


def run_all(runs: list[Run], workers: int) -> Iterator[tuple[Run, Result]]:
    """Results as they come. Whatever is still running is killed when the caller stops."""
    waiting, alive = list(runs), {}
    with tempfile.TemporaryDirectory() as folder:
        # A file is compiled once, not once a fork.
        sys.pycache_prefix, sys.dont_write_bytecode = f"{folder}/pycache", False
        try:
            while waiting or alive:
                if STOPPED:
                    raise SystemExit(143)
                while waiting and len(alive) < workers:
                    run = waiting.pop(0)
                    out = Path(folder) / str(len(waiting))
                    alive[_fork(run, out)] = (run, out, time.monotonic())
                for pid, (run, out, start) in list(alive.items()):
                    done, status = os.waitpid(pid, os.WNOHANG)
                    late = time.monotonic() - start > RUN_LIMIT
                    if done or late:
                        if not done:
                            _kill(pid)
                        del alive[pid]
                        yield run, _result(out, status if done else None, time.monotonic() - start)
                time.sleep(0.01)
        finally:
            for pid in alive:
                _kill(pid)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _result(out: Path, status: int | None, seconds: float) -> Result:
    if status is None:
        return Result(trouble=f"ran past {RUN_LIMIT} s", seconds=seconds)
    answer = out.with_suffix(".json")
    if not answer.exists():
        tail = "".join(out.read_text(errors="replace")[-600:]) if out.exists() else ""
        return Result(trouble=f"the test process died (status {status}): {tail.strip()}", seconds=seconds)
    return Result(**json.loads(answer.read_text()), seconds=seconds)


def _fork(run: Run, out: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return pid
    status = 1
    try:
        os.setpgid(0, 0)
        _child(run, out)
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _child(run: Run, out: Path) -> None:
    import pytest

    fd = os.open(out, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.environ["IMPL"] = run.impl
    os.environ.pop("BORROW", None)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, resource.RLIM_INFINITY))
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    overlay(run.path, run.text)
    recorder = _Recorder(run)
    quiet = ["-q", "-W", "ignore", "--tb=native", f"--rootdir={ROOT}"]
    arguments = [*quiet, f"--grade-seed={run.seed}", "-o", f"timeout={TEST_LIMIT}", *map(str, run.files)]
    pytest.main(arguments, plugins=[recorder])
    answer = {"records": recorder.records, "selected": recorder.selected, "trouble": recorder.trouble}
    temporary = out.with_suffix(".part")
    temporary.write_text(json.dumps(answer))
    temporary.rename(out.with_suffix(".json"))


def overlay(path: Path, text: str) -> None:
    """From now on, importing the file at `path` compiles this text; no bytecode is read or written for it."""
    target, data = str(path), text.encode()
    linecache.cache[target] = len(data), None, text.splitlines(keepends=True), target  # where Triton reads a kernel
    get_data, path_stats = SourceFileLoader.get_data, SourceFileLoader.path_stats

    def patched_data(self, wanted):
        return data if os.path.abspath(wanted) == target else get_data(self, wanted)

    def patched_stats(self, wanted):
        if os.path.abspath(wanted) == target:
            raise OSError("no bytecode for a replaced text")
        return path_stats(self, wanted)

    SourceFileLoader.get_data, SourceFileLoader.path_stats = patched_data, patched_stats


def goes_by(nodeid: str, name: str) -> bool:
    """True for `test_x` and `TestClass::test_x` with any parameters, and for a class that holds the test."""
    parts = nodeid.split("[")[0].split("::")[1:]
    return f"::{'::'.join(parts)}".endswith(f"::{name}") or name in parts[:-1]


class _Recorder:
    """A pytest plugin that keeps only the tests of a run and notes what became of them."""

    def __init__(self, run: Run):
        self.run, self.records, self.selected, self.trouble = run, [], 0, ""

    def pytest_pycollect_makemodule(self):
        if "hypothesis" in sys.modules:  # looking for the smallest example costs time and decides nothing
            from hypothesis import Phase, settings

            settings.register_profile("fork", settings(), phases=(Phase.explicit, Phase.generate))
            settings.load_profile("fork")

    def pytest_sessionstart(self, session):
        self.session = session

    def pytest_collectreport(self, report):
        if report.failed:
            self.trouble = f"{report.nodeid} cannot be imported: {str(report.longrepr)[-400:]}"

    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if self._wanted(item)]
        self.selected = len(items)
        for ex in EXERCISES.values():  # a test that grades others too shall run, with those borrowed
            ex.written = True

    def _wanted(self, item) -> bool:
        if self.run.everything:
            return True
        if self.run.tests is not None:
            return any(goes_by(item.nodeid, name) for name in self.run.tests)
        return any(ex.name == self.run.exercise for mark in item.iter_markers("grades") for ex in mark.args)

    def pytest_runtest_logreport(self, report):
        if not report.failed and report.when != "call":
            return
        verdict = report.verdict
        record = {
            "test": report.nodeid,
            "outcome": report.outcome,
            "graded": [ex.name for ex in report.graded],
            "kind": verdict.kind if verdict else "",
            "text": verdict.text if verdict else "",
            "at": [ex.name for ex in verdict.exercises] if verdict else [],
        }
        self.records.append(record)
        if self.run.until_caught and counts(record, self.run.exercise):
            self.session.shouldstop = "caught"
