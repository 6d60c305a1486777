"""A small pytest plugin, `-p engine.exercises.outcomes`: what became of each test, as JSON in the file OUTCOMES.

{"tests": {node id: {"outcome": "passed" | "failed" | "not written", "graded": [full names], "seconds", "message"}},
 "errors": {file: why it could not be collected}}
"""

import json
import os
import re
import sys
from pathlib import Path

_tests: dict[str, dict] = {}
_errors: dict[str, str] = {}


def pytest_pycollect_makemodule():
    """After conftest.py's: which tests fail is the question, not the smallest example, which takes far longer."""
    if "hypothesis" in sys.modules:
        from hypothesis import Phase, settings

        settings.register_profile("outcomes", settings(), phases=(Phase.explicit, Phase.generate))
        settings.load_profile("outcomes")


def pytest_runtest_logreport(report):
    entry = _tests.setdefault(report.nodeid, {"outcome": "passed", "graded": [], "seconds": 0.0, "message": ""})
    entry["graded"] = [ex.name for ex in getattr(report, "graded", None) or ()]
    entry["seconds"] += report.duration
    if report.failed:
        blank = getattr(getattr(report, "verdict", None), "kind", "") == "not written"
        entry.update(outcome="not written" if blank else "failed", message=report.longreprtext)
    elif report.skipped and entry["outcome"] == "passed":
        entry["outcome"] = "skipped"


def pytest_collectreport(report):
    if report.failed:
        _errors[report.nodeid] = _short(report.longreprtext)


def pytest_sessionfinish():
    Path(os.environ["OUTCOMES"]).write_text(json.dumps({"tests": _tests, "errors": _errors}), encoding="utf-8")


def _short(text: str) -> str:
    """The error and the last place that a traceback of pytest names."""
    errors = re.findall(r"^E +(\S.*)$", text, flags=re.MULTILINE) or text.strip().splitlines()[-1:]
    places = re.findall(r"^(\S+\.py:\d+): ", text, flags=re.MULTILINE)
    places += [f"{path}:{line}" for path, line in re.findall(r'^E +File "(.+)", line (\d+)', text, flags=re.MULTILINE)]
    return f"{errors[-1]} at {places[-1]}" if places else errors[-1]
