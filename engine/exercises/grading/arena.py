"""A worker of class grading: imports the slow libraries once, forks for each job, watches the fork, tells what came.

    python -m engine.exercises.grading.arena NUMBER LAYERS TEST_FILE…

reads a job a line from stdin and writes a result a line to stdout, both JSON. It never imports a tree itself: what a
student wrote runs in the forks only, behind the sandbox.
"""

import ast
import contextlib
import gc
import json
import mmap
import os
import select
import signal
import sys
import time
from pathlib import Path
from pkgutil import resolve_name

from engine.exercises.grading import sandbox, trial

OUTPUT = 16 << 20  # bytes of output, and of results, that a run may have
TAIL = 2_000  # bytes of it that are kept
PATIENCE = 10  # as in tests/conftest.py: how much longer than it computes a test may take
GRACE = 10.0  # seconds after that for the test's own limit to end it


def main(number: str, layers: str, *test_files: str) -> None:
    sandbox.adopt_orphans()
    preload([Path(file) for file in test_files])
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        job = json.loads(line)
        replies.write(json.dumps(run(job, int(number), [x for x in layers.split(",") if x])) + "\n")
        replies.flush()


def preload(files: list[Path]) -> None:
    """Import the libraries that these files name; nothing of the engine or its tests."""
    for path in files:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                [_touch(alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                _touch(node.module)
    for name in ("pytest_timeout", "hypothesis", "hypothesis.stateful"):
        _touch(name)
    gc.collect()
    gc.freeze()  # the forks share these pages and never search them


def _touch(module: str) -> None:
    if module.split(".")[0] not in ("engine", "solutions", "tests", "run"):
        with contextlib.suppress(ImportError):
            resolve_name(module)


def run(job: dict, number: int, layers: list[str]) -> dict:
    """records: by test. ended: "finished", or how it ended before that, then `running` names the test that it was in
    and `inside` the exercise, for a job with profile. forged: lines in the pipe that are not ours."""
    watch = _Watch(job, os.urandom(32))
    pipe, sink = os.pipe()
    printed, out = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        _child(job, number, layers, sink, out, watch)
    os.close(sink)
    os.close(out)
    try:
        status = _supervise(pid, pipe, printed, watch)
    finally:
        os.close(pipe)
        os.close(printed)
        sandbox.end_children()
    return watch.result(status)


def _child(job, number, layers, sink, out, watch) -> None:
    try:
        nothing = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, nothing), (1, out), (2, out)):
            os.dup2(source, target)
        os.set_inheritable(sink, False)
        keep = {0, 1, 2, sink}
        for fd in [int(name) for name in os.listdir("/dev/fd")]:
            if fd not in keep:
                with contextlib.suppress(OSError):
                    os.close(fd)
        readable = [*sandbox.SYSTEM, *sandbox.interpreter(), job["tree"]]
        sandbox.confined(
            lambda: trial.run(job, sink, watch.key, watch.seen),
            layers, number, readable, [job["tmp"], os.devnull], cpu=job["cpu"], memory=job["memory"],
        )  # fmt: skip
    except BaseException as error:
        os.write(2, f"the sandbox could not be set up: {error!r}".encode())
    finally:
        os._exit(1)


def _supervise(pid: int, pipe: int, printed: int, watch: "_Watch") -> int | None:
    """Read until the process ends, or end it. Its status, None when it was ended from here."""
    sources = {pipe: watch.results, printed: watch.output}
    for source in sources:
        os.set_blocking(source, False)

    def drain() -> None:
        for source, sink in sources.items():
            with contextlib.suppress(BlockingIOError):
                while data := os.read(source, 1 << 16):
                    sink(data)
                    if watch.trouble():
                        return

    while True:
        select.select(list(sources), [], [], 0.05)
        drain()
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            drain()
            return status
        if watch.trouble():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.01)


class _Watch:
    def __init__(self, job: dict, key: bytes):
        self.job, self.key = job, key
        self.seen = mmap.mmap(-1, 16)
        self.records: dict[str, dict] = {}
        self.running, self.finished, self.forged, self.number = "", False, 0, 0
        self.errors: list[str] = []
        self.rest, self.printed, self.size, self.tail = b"", 0, 0, b""
        self.deadline = time.monotonic() + job["wall"]
        self.test_deadline = self.deadline

    def results(self, data: bytes) -> None:
        self.size += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in filter(None, lines):
            record = trial.opened(self.key, self.number + 1, line)
            if record is None:
                self.forged += 1
                continue
            self.number += 1
            self._take(record)

    def _take(self, record: dict) -> None:
        kind = record.pop("kind")
        if kind == "start":
            self.running = record["test"]
            limit = (self.job["tests"] or {}).get(self.running, self.job["wall"])
            self.test_deadline = time.monotonic() + PATIENCE * limit + GRACE
        elif kind == "test":
            self.records[record.pop("test")] = record
            self.running, self.test_deadline = "", self.deadline
        elif kind == "trouble":
            self.errors.append(record["text"])
        else:
            self.finished = True

    def output(self, data: bytes) -> None:
        self.printed += len(data)
        self.tail = (self.tail + data)[-TAIL:]

    def trouble(self) -> str:
        now = time.monotonic()
        if now > self.test_deadline:
            return "did not finish and could not be interrupted"
        if now > self.deadline:
            return f"ran for more than {self.job['wall']:.0f} s"
        if self.printed > OUTPUT or self.size > OUTPUT:
            return f"printed more than {OUTPUT >> 20} MiB"
        return ""

    def result(self, status: int | None) -> dict:
        ended = self.trouble() if status is None else _ended(status)
        if self.finished:  # a KeyboardInterrupt, say, ends pytest in good order in the middle of a test
            ended = "stopped the whole run" if self.running else ""
        inside = int.from_bytes(self.seen[:2], "little")
        return {
            "records": self.records,
            "ended": ended or "finished",
            "running": self.running,
            "inside": self.job["exercises"][inside - 1] if inside else "",
            "forged": self.forged,
            "errors": self.errors,
            "output": self.tail.decode(errors="replace"),
        }


def _ended(status: int) -> str:
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
    if code == 128 + signal.SIGXCPU:
        return "computed for too long"
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"ended the test process ({signal.Signals(code - 128).name})"
    return f"ended the test process (exit status {code})"


if __name__ == "__main__":
    main(*sys.argv[1:])
