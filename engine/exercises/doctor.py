"""`run.py doctor`: is this machine set up, and what can it do?"""

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

LEAST_PYTHON = (3, 11)


@dataclass
class Check:
    """state: "ok", "note" (works, but differs or is missing without harm) or "broken"."""

    what: str
    state: str
    found: str


def doctor(root: Path, console: Console | None = None) -> int:
    """Print a table of checks; 1 when something that the engine needs is broken."""
    checks = [python(), *packages(root / "requirements.txt", "broken")]
    checks += [*packages(root / "tests/requirements.txt", "note"), *torch_checks(), triton_check(root), weights(root)]
    grid = Table("", "check", "found", header_style="")
    colours = {"ok": "green", "note": "yellow", "broken": "red"}
    for check in checks:
        grid.add_row(f"[{colours[check.state]}]{check.state}", check.what, check.found.replace("[", "\\["))
    (console or Console(width=None if sys.stdout.isatty() else 120)).print(grid)
    return int(any(check.state == "broken" for check in checks))


def python() -> Check:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    least = ".".join(map(str, LEAST_PYTHON))
    if sys.version_info < LEAST_PYTHON:
        return Check("python", "broken", f"{found}; {least} or later is needed")
    return Check("python", "ok", found)


def packages(requirements: Path, if_missing: str) -> list[Check]:
    """Each pin of a requirements file against what is installed. Another version is only a note."""
    if not requirements.exists():
        return []
    checks = []
    for line in requirements.read_text(encoding="utf-8").splitlines():
        match = re.match(r"([\w.-]+)==([^\s;]+)\s*(?:;\s*sys_platform\s*==\s*[\"'](\w+)[\"'])?", line)
        if not match or (match[3] and match[3] != sys.platform):
            continue
        name, pin = match[1], match[2]
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            folder = "tests/" if requirements.parent.name == "tests" else ""
            install = f"python -m pip install -r {folder}requirements.txt"
            checks.append(Check(name, if_missing, f"not installed: {install}"))
            continue
        same = version.split("+")[0] == pin
        checks.append(Check(name, "ok" if same else "note", version if same else f"{version}; tested with {pin}"))
    return checks


def torch_checks() -> list[Check]:
    try:
        import torch
    except Exception as error:  # a broken installation raises more than ImportError
        return [Check("torch works", "broken", _one_line(error))]
    omp = os.environ.get("OMP_NUM_THREADS")
    threads = f"{torch.get_num_threads()} on {usable_cores()} cores, OMP_NUM_THREADS {omp or 'not set'}"
    many = torch.get_num_threads() > usable_cores()
    checks = [Check("threads", "note" if many else "ok", threads + ("; more threads than cores are slow" * many))]
    try:
        checks.append(Check("matmul", "ok", matmul_speeds(torch)))
    except Exception as error:
        checks.append(Check("matmul", "broken", _one_line(error)))
    checks.append(Check("GPU", "ok", gpu(torch)))
    return checks


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def matmul_gflops(torch, rows: int = 256, inner: int = 576, columns: int = 1536) -> dict[str, float]:
    """GFLOP/s of a small model's linear layer on the CPU, in both types: tells whether bfloat16 pays here."""
    speeds = {}
    for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        x, w = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
        for _ in range(3):
            torch.nn.functional.linear(x, w)
        best = float("inf")
        end = time.perf_counter() + 0.3
        while time.perf_counter() < end:
            start = time.perf_counter()
            torch.nn.functional.linear(x, w)
            best = min(best, time.perf_counter() - start)
        speeds[name] = 2 * rows * inner * columns / best / 1e9
    return speeds


def matmul_speeds(torch) -> str:
    speeds = ", ".join(f"{name} {speed:.0f}" for name, speed in matmul_gflops(torch).items())
    return f"{speeds} GFLOP/s (256 x 576 x 1536, CPU)"


def gpu(torch) -> str:
    if torch.cuda.is_available():
        properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return ", ".join(f"{p.name}, {p.total_memory / 2**30:.0f} GiB" for p in properties)
    if getattr(torch.backends, "mps", None) and torch.backends.mps.is_available():
        return "Apple GPU (MPS)"
    return "none; everything runs on the CPU"


def triton_check(root: Path) -> Check:
    """Whether a small kernel runs in Triton's interpreter, which needs no GPU."""
    what = "Triton interpreter"
    if sys.platform != "linux":
        return Check(what, "note", "Triton exists for Linux only; the kernels of chapter 32 do not run here")
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "engine.exercises.triton_probe"]
    try:
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, errors="replace", timeout=120)
    except subprocess.TimeoutExpired:
        return Check(what, "broken", "a kernel of 100 elements did not finish in 120 s")
    if done.returncode == 0:
        return Check(what, "ok", "a kernel ran")
    lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
    return Check(what, "broken", lines[-1])


def weights(root: Path) -> Check:
    found = []
    for path in sorted(p for p in (root / "engine/assets").glob("*") if p.is_dir()):
        files = [f for f in path.rglob("*") if f.is_file()]
        found.append(f"{path.name} ({sum(f.stat().st_size for f in files) / 1e6:.1f} MB)")
    return Check("weights", "ok", ", ".join(found) or "none in engine/assets; --model random needs none")


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
