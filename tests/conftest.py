"""How graded tests run and what a failing one says. The options stand in `pytest --help` under "grading".

A test that names an unwritten exercise fails without being run; the other failures show a message in place of a
traceback (`--long` has it). Whose code ran is said before the tests and after them.
"""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from engine.exercises import registry
from tests.scoreboard import Scoreboard
from tests.sections import ROOT
from tests.sources import uses_hypothesis
from tests.verdicts import DidNotFinish, judge, not_written, unwritten

PATIENCE = 10
SHRINKING = 5  # seconds: a smaller example is not worth more of a reader's time
pytest.register_assert_rewrite(*(f"tests.{folder.name}" for folder in (ROOT / "tests").glob("ch[0-9]*/")))
BOARD = pytest.StashKey[Scoreboard]()


def pytest_addoption(parser):
    option = parser.getgroup("grading", "grading of exercises").addoption
    option("--impl", choices=("engine", "solution"), help="yours with the rest borrowed (default), or the reference")
    option("--borrow", action="append", default=[], metavar="NAME", help="use the reference for this written exercise")
    option("--only", action="append", default=[], metavar="NAME", help="run only the tests that grade this exercise")
    option("--grade-seed", type=int, default=0, metavar="N", help="draw other inputs (default 0)")
    option("--long", action="store_true", help="show tracebacks")
    option("--grader", action="store_true", help="also run the graders' own checks and class grading: minutes")
    option("--results", type=Path, metavar="FILE", help="write the counts and messages by exercise to FILE, as JSON")


def pytest_configure(config):
    config.addinivalue_line("markers", "grades(*exercises): the exercises a test grades; set by tests.grading.grades")
    option = config.option
    if option.impl:
        os.environ["IMPL"] = option.impl
    if option.borrow:
        os.environ["BORROW"] = ",".join(option.borrow)
    os.environ["GRADE_SEED"] = str(option.grade_seed)
    config.stash[BOARD] = Scoreboard(option.only)
    if option.reportchars == "fE" and not option.long:
        option.reportchars = "E"  # the messages are short enough to stand once


# minutes: collected when named, or with --grader
SLOW = ("test_grader", "test_canary", "test_class_grading", "test_class_sandbox")


def pytest_ignore_collect(collection_path, config):
    if collection_path.stem in SLOW and not config.option.grader:
        named = any(collection_path.stem in str(argument) for argument in config.invocation_params.args)
        return None if named else True
    return None


def pytest_pycollect_makemodule(module_path, parent):
    """Examples depend on the grade seed and on nothing that earlier runs left behind."""
    if uses_hypothesis(module_path):  # importing it takes a second that the other files need not spend
        from hypothesis import Phase, core, settings
        from hypothesis.internal.conjecture import engine

        engine.MAX_SHRINKING_SECONDS = SHRINKING  # hypothesis has no setting for it
        phases = [phase for phase in Phase if phase != Phase.explain]
        settings.register_profile("grading", deadline=None, database=None, print_blob=False, phases=phases)
        settings.load_profile("grading")
        if core.global_force_seed is None:  # no --hypothesis-seed
            core.global_force_seed = parent.config.option.grade_seed


def graded_by(item) -> list[registry.Exercise]:
    marked = [ex for mark in item.iter_markers("grades") for ex in mark.args]
    return list({ex.name: ex for ex in marked}.values())


def pytest_collection_modifyitems(config, items):
    names = config.option.only
    if names:
        wanted = [item for item in items if any(ex.goes_by(name) for ex in graded_by(item) for name in names)]
        config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
        items[:] = wanted
    items.sort(key=lambda item: len(graded_by(item)) > 2)  # whole-engine tests last: the narrow ones say more


def pytest_report_collectionfinish(config):
    unknown = [
        f"{option} {name}: none of the collected tests imports an exercise of that name"
        for option in ("only", "borrow")
        for name in getattr(config.option, option)
        if not any(ex.goes_by(name) for ex in registry.EXERCISES.values())
    ]
    return [*whose_code(), *(f"--{line}" for line in unknown)]


def whose_code() -> list[str]:
    return [registry.who_wrote()] if registry.EXERCISES else []


def pytest_runtest_setup(item):
    if unwritten(graded_by(item)):
        pytest.fail("not written yet", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    _stop_timer(item)
    if not item.config.option.long:
        vars(item).pop("hypothesis_report_information", None)  # how the search went; what failed is in the verdict
    report = yield
    graded = graded_by(item)
    report.graded, report.verdict = graded, None
    if report.failed:
        blank = unwritten(graded)
        if blank:
            report.when = "call"  # a failure of the test, not an error of its fixtures
        report.verdict = not_written(blank) if blank else judge(call.excinfo.value, graded)
        ours = graded or report.verdict.kind in ("wrong", "late")
        if blank or ours and not item.config.option.long:
            report.longrepr = report.verdict.text
    if graded and (report.failed or report.passed and report.when == "call"):
        item.config.stash[BOARD].add(item.nodeid, graded, report.verdict)
    return report


def pytest_report_teststatus(report):
    verdict = getattr(report, "verdict", None)
    if verdict is not None and verdict.kind == "not written":
        return "not written", "N", ("NOT WRITTEN", {"yellow": True})
    return None


def pytest_terminal_summary(terminalreporter, config):
    if not config.option.collectonly:
        lines = config.stash[BOARD].lines()
        if lines:
            terminalreporter.section("exercises")
        for line in [*lines, *whose_code()]:
            terminalreporter.line(line)


def pytest_sessionfinish(session):
    path = session.config.option.results
    if path:
        session.config.stash[BOARD].write(path)


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item, settings):
    """The time limit of pytest-timeout, raised as an exception that student code and hypothesis do not catch.

    It is seconds of computing, so that a busy machine fails nobody; a test that waits may take PATIENCE times as long.
    """
    if settings.method != "signal" or threading.current_thread() is not threading.main_thread():
        return None
    from pytest_timeout import is_debugging

    started, computed = time.monotonic(), time.thread_time()

    def ring(signum, frame):
        if is_debugging():
            return
        left = settings.timeout - (time.thread_time() - computed)
        if left > 0 and time.monotonic() - started < PATIENCE * settings.timeout:
            signal.setitimer(signal.ITIMER_REAL, max(left, 0.1))
            return
        signal.setitimer(signal.ITIMER_REAL, 1)  # once more, should a bare `except:` swallow this one
        item.grading_late = True
        raise DidNotFinish(f"did not finish within {settings.timeout:g} s")

    def cancel():
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout)
    return True


def _stop_timer(item) -> None:
    if getattr(item, "grading_late", False):
        signal.setitimer(signal.ITIMER_REAL, 0)
