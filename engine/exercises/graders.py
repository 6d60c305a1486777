"""Runs graders: pytest in a process of its own, so that it sees the source as it is now and a crash stays there."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


class GradersStopped(ValueError):
    """pytest did not get as far as running tests; the message is one line."""


@dataclass
class Run:
    """tests, errors: as outcomes.py writes them. results: by exercise, as `pytest --results` writes them."""

    status: int
    tests: dict[str, dict]
    errors: dict[str, str]
    results: dict[str, dict]
    output: str

    def with_outcome(self, outcome: str) -> list[str]:
        """Node ids, the quick ones first."""
        found = [test for test, entry in self.tests.items() if entry["outcome"] == outcome]
        return sorted(found, key=lambda test: self.tests[test]["seconds"])


def test_files(root: Path, chapters: Iterable[int]) -> list[str]:
    """`tests/test_ch31_engine_v2.py`, … of these chapters, as far as there are any."""
    found = [path for n in chapters for path in sorted((root / "tests").glob(f"test_ch{n:02d}_*.py"))]
    return [path.relative_to(root).as_posix() for path in found]


def run(
    root: Path,
    targets: Iterable[str],
    only: Iterable[str] = (),
    borrow: Iterable[str] = (),
    first_failure: bool = False,
    limit: float | None = None,
    threads: int | None = None,
) -> Run:
    """Run test files or node ids on the code in engine/.

    only: tests that grade these exercises. borrow: these are the reference. limit: seconds for one test.
    Raises ModuleNotFoundError when there is no pytest, GradersStopped when it did not run tests.
    """
    if importlib.util.find_spec("pytest") is None:
        raise ModuleNotFoundError("No module named 'pytest'", name="pytest")
    with tempfile.TemporaryDirectory() as folder:
        outcomes, results, arguments = (Path(folder) / name for name in ("outcomes.json", "results.json", "arguments"))
        arguments.write_text("\n".join(targets), encoding="utf-8")  # in a file: there may be thousands of node ids
        command = [sys.executable, "-m", "pytest", "-q", "--impl", "engine", "--results", str(results)]
        command += ["-p", "engine.exercises.outcomes", "--continue-on-collection-errors", "--tb=short"]
        command += [word for name in only for word in ("--only", name)]
        command += [word for name in borrow for word in ("--borrow", name)]
        command += ["-x"] * first_failure + ([f"-o=timeout={limit:g}"] if limit else [])
        env = {k: v for k, v in os.environ.items() if k not in ("IMPL", "BORROW", "PYTEST_ADDOPTS")}
        env["OUTCOMES"] = str(outcomes)
        if threads:
            env["OMP_NUM_THREADS"] = str(threads)
        done = subprocess.run(
            [*command, f"@{arguments}"], cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, text=True, encoding="utf-8", errors="replace",
        )  # fmt: skip
        if not outcomes.exists():
            lines = [line for line in done.stdout.splitlines() if line.strip()]
            raise GradersStopped(f"pytest stopped with status {done.returncode}: {lines[-1] if lines else 'no output'}")
        found = json.loads(outcomes.read_text(encoding="utf-8"))
        by_exercise = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    return Run(done.returncode, found["tests"], found["errors"], by_exercise, done.stdout)
