"""What README, chapters and command line name must exist: links, paths, commands, options, modules, exercises."""

import re
from importlib.util import find_spec

import pytest

import run
from engine.exercises.catalog import Catalog
from tests.sections import ROOT

TEXTS = [ROOT / "README.md", *sorted((ROOT / "chapters").glob("*.md"))]
FOLDERS = ("engine", "solutions", "tests", "chapters", "experiments")
COMMANDS = next(a.choices for a in run.parser()._actions if a.dest == "command")
NAMES = ("NAME", "CHAPTER", "CHAPTER|NAME", "DIR", "SUBMISSIONS")


@pytest.fixture(params=TEXTS, ids=lambda path: path.name)
def text(request):
    return request.param, request.param.read_text(encoding="utf-8")


def test_relative_links_lead_somewhere(text):
    path, body = text
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", body):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_paths_exist(text):
    path, body = text
    for target in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`", body):
        assert (ROOT / target).exists() or target.startswith("experiments/ch"), f"{path.name} names {target}"


def test_commands_and_their_options_exist(text):
    path, body = text
    for command, rest in re.findall(r"run\.py ([a-z]+)((?: +[^\s`#]+)*)", body):
        assert command in COMMANDS, f"{path.name}: run.py {command}"
        known = COMMANDS[command]._option_string_actions
        for option in re.findall(r"(?<![\w-])--[a-z-]+", rest):
            assert option in known, f"{path.name}: run.py {command} {option}"


def test_modules_that_are_run_exist(text):
    path, body = text
    for module in re.findall(r"python -m ((?:experiments|tests|engine)[\w.]*)", body):
        assert find_spec(module), f"{path.name}: python -m {module}"


def test_exercises_that_commands_name_exist(text):
    path, body = text
    catalog = Catalog(ROOT)
    for name in re.findall(r"(?:run\.py hint|--only|--borrow) ([A-Za-z_][\w.]*)", body):
        assert name in NAMES or catalog.one(name), f"{path.name}: {name}"


def test_the_overview_names_what_exists():
    for command in re.findall(r"run\.py ([a-z]+)", run.OVERVIEW):
        assert command in COMMANDS
    for target in re.findall(r"chapters/[\w-]+\.md|tests/\w+\.py", run.OVERVIEW):
        assert (ROOT / target).exists(), target
