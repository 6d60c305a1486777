"""The graders graded: every wrong answer of the bank must be caught, every other right answer accepted.

    pytest tests/test_grader.py                        all of it, some minutes on two cores
    pytest tests/test_grader.py -k ch31-hash_block     the entries of one exercise
    pytest --grader                                    the whole suite with it
    BANK_PART=2/3 pytest tests/test_grader.py          every third entry, from the third on: what CI does, in turns

Without one of these two ways to ask for it this file is left out: it runs the other test files again and again. All
entries that are selected go to one process (tests/mutation.py), which works on two at a time.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile

import pytest

from tests.mutation import Outcome, load_banks, table
from tests.sections import ROOT

pytestmark = pytest.mark.timeout(0)  # a test here waits for the runs before its own; each run has limits


def part_of(entries: list, part: str) -> list:
    """part "k/n": every n-th entry from the k-th on, k from 0; "" is all of them."""
    if not part:
        return entries
    k, _, n = part.partition("/")
    if not (k.isdigit() and n.isdigit() and int(k) < int(n)):
        raise ValueError(f"BANK_PART must be k/n with k below n, got {part!r}")
    return entries[int(k) :: int(n)]


ENTRIES = part_of(load_banks(), os.environ.get("BANK_PART", ""))


class Runner:
    """Starts the process when the first outcome is asked for, and keeps those that came before they were wanted."""

    def __init__(self, ids: list[str]):
        self.ids, self.process, self.outcomes = ids, None, {}
        self.errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 (closed in stop)

    def outcome(self, id: str) -> Outcome:
        if self.process is None:
            command = [sys.executable, "-m", "tests.mutation", "--json", *(f"--name={i}" for i in self.ids)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=self.errors, text=True
            )
        while id not in self.outcomes:
            line = self.process.stdout.readline()
            if not line:
                self.errors.seek(0)
                pytest.fail(f"tests.mutation ended early:\n{self.errors.read()[-2000:]}", pytrace=False)
            outcome = Outcome(**json.loads(line))
            self.outcomes[outcome.id] = outcome
        return self.outcomes[id]

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)  # it ends its forks
            self.process.stdout.close()
            self.process.wait()
        self.errors.close()

    def pytest_terminal_summary(self, terminalreporter):
        if self.outcomes:
            terminalreporter.section("bank")
            for line in table(list(self.outcomes.values())):
                terminalreporter.line(line)


@pytest.fixture(scope="session")
def runner(request):
    entries = [i.callspec.params["entry"] for i in request.session.items if getattr(i, "function", None) is test_bank]
    runner = Runner([entry.id for entry in entries])
    request.config.pluginmanager.register(runner)
    yield runner
    runner.stop()


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.id for entry in ENTRIES])
def test_bank(entry, runner):
    outcome = runner.outcome(entry.id)
    if not outcome.good:
        pytest.fail(f"{outcome.status}: {outcome.note}", pytrace=False)
