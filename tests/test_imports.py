"""Imports run downwards: run.py, milestones, simulator, serve and slots, models, the single functions, exercises."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.sections import ROOT

FLOORS = [
    ("run",),
    ("engine.milestones",),
    ("engine.simulate",),
    ("engine.serve", "engine.slots", "engine.slot_cache"),
    ("engine.models",),
    ("engine.sampling", "engine.attention", "engine.kv_cache"),
    ("engine.exercises",),
]
FILES = [ROOT / "run.py", *sorted((ROOT / "engine").rglob("*.py"))]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in FILES}


def floor(module: str) -> int | None:
    """0 is the top; None for the bare package, which imports nothing."""
    found = [i for i, names in enumerate(FLOORS) if any(module == n or module.startswith(f"{n}.") for n in names)]
    return found[0] if found else None


def imports(path: Path) -> set[str]:
    """Modules of this repository that a file imports anywhere, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import hides its floor"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in inner if name in MODULES} or {node.module}
    return {name for name in found if name.split(".")[0] in ("engine", "solutions", "tests", "run")}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_import_runs_upwards(path):
    here = floor(name_of(path))
    if name_of(path) == "engine":
        assert imports(path) == set()
        return
    assert here is not None, "give it a floor in this file"
    for module in imports(path):
        assert module.split(".")[0] == "engine", f"{module}: only the registry reaches solutions/, and by name"
        assert floor(module) is None or floor(module) >= here, f"{name_of(path)} imports {module} from a floor above"


def test_no_circle():
    list(TopologicalSorter({name: imports(path) for name, path in MODULES.items()}).static_order())


def test_only_the_registry_names_solutions():
    """As a module to import; the splicer reads the files, which is another matter."""
    for path in FILES:
        imported = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Call)]
        calls = [n for n in imported if ast.unparse(n.func).split(".")[-1] in ("import_module", "__import__")]
        assert not calls or name_of(path) == "engine.exercises.registry", path
