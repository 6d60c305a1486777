"""Entries of the bank and pointers of the tests that have gone stale: found by reading, without running anything."""

import ast
from pathlib import Path

import pytest

from engine.exercises.catalog import anchor, headings
from tests.mutants import Mutant
from tests.mutation import BadEntry, Bank, load_banks
from tests.sections import ROOT, chapter_file, split
from tests.sources import named

BANK = Bank()
ENTRIES = load_banks()
TEST_FILES = sorted([*(ROOT / "tests").glob("test_ch*.py"), *(ROOT / "tests").glob("ch[0-9]*/*.py")])


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.id for entry in ENTRIES])
def test_entry_can_be_tried(entry):
    """A mutant's change applies exactly once, inside the body, and its test exists; an alternative fits in."""
    try:
        run = BANK.mutant(entry) if isinstance(entry, Mutant) else BANK.alternative(entry)
    except BadEntry as error:
        pytest.fail(str(error), pytrace=False)
    names = entry.caught_by.split("::") if isinstance(entry, Mutant) else []
    given = isinstance(entry, Mutant) and entry.path
    if names and not given and not any(named(path).get(name) for path in run.files for name in names):
        pytest.fail(f"{entry.caught_by} carries no @grades", pytrace=False)


def sections_named_in(path: Path) -> list[tuple[int, str]]:
    """(line, see) for each `see="…"`, also through a module constant."""
    tree = ast.parse(path.read_text())
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = []
    for node in ast.walk(tree):
        for keyword in node.keywords if isinstance(node, ast.Call) else []:
            if keyword.arg == "see":
                value = keyword.value
                see = constants.get(value.id) if isinstance(value, ast.Name) else getattr(value, "value", None)
                found += [(value.lineno, see)] if isinstance(see, str) else []
    return found


@pytest.mark.parametrize("path", TEST_FILES, ids=[path.stem for path in TEST_FILES])
def test_sections_that_messages_point_to_exist(path):
    missing = []
    for line, see in sections_named_in(path):
        chapter, section = split(see)
        text = chapter_file(chapter)
        if text is not None and anchor(section) not in [anchor(heading) for heading in headings(text.read_text())]:
            missing.append(f"{path.name}:{line}: {text.name} has no section {section!r}")
    assert not missing, "\n".join(missing)
