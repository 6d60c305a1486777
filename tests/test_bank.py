"""Entries of the bank and pointers of the tests that have gone stale: found by reading, without running anything."""

import ast
from pathlib import Path

import pytest

from tests.mutants import Mutant
from tests.mutation import BadEntry, Bank, load_banks
from tests.sections import ROOT, anchor, chapter_file, headings, split

BANK = Bank()
ENTRIES = load_banks()
TEST_FILES = sorted((ROOT / "tests").glob("test_ch*.py"))


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.id for entry in ENTRIES])
def test_entry_can_be_tried(entry):
    """A mutant's change applies exactly once, inside the body, and its test exists; an alternative fits in its place."""
    try:
        run = BANK.mutant(entry) if isinstance(entry, Mutant) else BANK.alternative(entry)
    except BadEntry as error:
        pytest.fail(str(error), pytrace=False)
    if isinstance(entry, Mutant):
        assert entry.believes.strip() and grading(run.files, entry.caught_by), f"{entry.caught_by} carries no @grades"


def grading(files: list[Path], test: str) -> bool:
    """True when a test of that name, its class or its state machine carries @grades."""
    last = test.split("::")[-1]
    for path in files:
        tree = ast.parse(path.read_text())
        machines = {
            node.value.value.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Attribute)
            and isinstance(node.value.value, ast.Name)
            and any(isinstance(t, ast.Name) and t.id == last for t in node.targets)
        }
        for node in ast.walk(tree):
            named = isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in {*test.split("::"), *machines}
            if named and any("grades" in ast.unparse(decorator) for decorator in node.decorator_list):
                return True
    return False


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
        if text is not None and anchor(section) not in [anchor(heading) for heading in headings(text)]:
            missing.append(f"{path.name}:{line}: {text.name} has no section {section!r}")
    assert not missing, "\n".join(missing)
