"""Options of the graders. `pytest --help` lists them under "grading"."""

import os

from engine.exercises import registry


def pytest_addoption(parser):
    option = parser.getgroup("grading", "grading of exercises").addoption
    option("--impl", choices=("engine", "solution"), help="yours with the rest borrowed (default), or the reference")
    option("--borrow", action="append", default=[], metavar="NAME", help="use the reference for this written exercise")
    option("--grade-seed", type=int, default=0, metavar="N", help="draw other inputs (default 0)")


def pytest_configure(config):
    config.addinivalue_line("markers", "grades(*exercises): the exercises a test grades; set by tests.grading.grades")
    if config.option.impl:
        os.environ["IMPL"] = config.option.impl
    if config.option.borrow:
        os.environ["BORROW"] = ",".join(config.option.borrow)
    os.environ["GRADE_SEED"] = str(config.option.grade_seed)


def pytest_report_collectionfinish():
    return registry.who_wrote()
