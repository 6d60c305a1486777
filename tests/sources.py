"""Which files a test file consists of: itself and the modules of tests/ that it imports, at any depth."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.sections import ROOT

_IMPORT = re.compile(rb"^\s*(?:from|import) +(tests[.\w]*)(?: +import +(\w+))?", re.MULTILINE)
_HYPOTHESIS = re.compile(rb"^\s*(?:from|import) +hypothesis\b", re.MULTILINE)


def sources(path: Path) -> list[Path]:
    found, left = [], [path]
    while left:
        path = left.pop()
        if path not in found and path.is_file():
            found.append(path)
            for module, name in _IMPORT.findall(path.read_bytes()):
                base = ROOT.joinpath(*module.decode().split("."))
                left += [base.with_suffix(".py"), base / "__init__.py", base / f"{name.decode()}.py"]
    return found


def uses_hypothesis(path: Path) -> bool:
    return any(_HYPOTHESIS.search(source.read_bytes()) for source in sources(path))


@cache
def named(path: Path) -> dict[str, bool]:
    """Functions, methods, classes and module variables of a test file; True for those that carry @grades."""
    return dict(entry for source in sources(path) for entry in _named(ast.parse(source.read_bytes())))


def _named(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    graded = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            graded[node.name] = any("grades(" in ast.unparse(d) for d in node.decorator_list)
    yield from graded.items()
    for node in tree.body:  # TestPool = PoolMachine.TestCase
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, any(graded.get(n.id) for n in ast.walk(node.value) if isinstance(n, ast.Name))
