"""`run.py handout`: a copy of this tree for students, without the answers of some chapters.

Left out: those answers, every mutant and alternative (they quote answers), the tests of the machinery itself, what git
does not track. Exercises of those chapters are stubs in it, whatever stands here.
"""

import ast
import re
import shutil
import subprocess
from pathlib import Path

from engine.exercises.bodies import body_of, put
from engine.exercises.catalog import Catalog
from engine.exercises.grading.screening import normalised
from engine.exercises.listing import chapter_numbers
from engine.exercises.registry import Exercise
from engine.exercises.source import Source, SourceError, functions, is_stub
from engine.exercises.splice import RAISE

TOP = (".gitignore", "LICENSE", "README.md", "pyproject.toml", "requirements.txt", "run.py")
FOLDERS = ("chapters", "engine", "experiments", "solutions")
TELLING = 40  # nodes of a syntax tree: a body this large does not stand in two places by chance
_IMPORT = re.compile(r"^\s*(?:from|import) +(tests[.\w]*)(?: +import +(\w+))?", re.MULTILINE)


def handout(catalog: Catalog, chapters: str, out: Path) -> list[str]:
    """Write the tree; returns lines on what was left out.

    chapters: `24,31`. Raises ValueError when `out` exists and is not empty, and when an answer still stands somewhere
    in the new tree.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder")
    if catalog.damaged:
        raise ValueError(catalog.damaged[0])
    numbers = chapter_numbers(catalog, chapters)
    exercises = [ex for number in numbers for ex in catalog.of_chapter(number)]
    answers = {ex.name: answer for ex in exercises if (answer := _answer(catalog.root, ex))}
    for relative in _files(catalog.root):
        if (catalog.root / relative).is_file():
            (out / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(catalog.root / relative, out / relative, follow_symlinks=True)
    for relative in dict.fromkeys(_module(ex) for ex in exercises):
        ours = [ex for ex in exercises if _module(ex) == relative]
        _make_stubs(out / relative, ours)
        _remove_answers(out / relative.replace("engine/", "solutions/", 1), ours)
    if places := _leaks(out, answers):
        raise ValueError(f"{out} still holds answers: {'; '.join(places)}")
    named = f"chapter{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
    return [f"{out}: without the {len(answers)} answers of {named}, without mutants and alternatives"]


def _module(ex: Exercise) -> str:
    return ex.where.rsplit(":", 1)[0]


def _answer(root: Path, ex: Exercise):
    path = root / _module(ex).replace("engine/", "solutions/", 1)
    try:
        return Source.read(path).find(ex.qualname)
    except (OSError, SourceError):
        return None


def _files(root: Path) -> list[str]:
    """What goes into the tree, relative to the root: what git tracks of it, or everything where there is no git."""
    tracked = _tracked(root)
    found = [name for name in TOP if (root / name).is_file()]
    for folder in FOLDERS:
        found += [p.relative_to(root).as_posix() for p in sorted((root / folder).rglob("*")) if p.is_file()]
    found += _graders(root)
    hidden = re.compile(r"(^|/)(\.(?!gitignore$)|__pycache__/)")
    return [name for name in found if not hidden.search(name) and (tracked is None or name in tracked)]


def _tracked(root: Path) -> set[str] | None:
    if not (root / ".git").exists():
        return None
    done = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True)
    return set(done.stdout.decode().split("\0")) if done.returncode == 0 else None


def _graders(root: Path) -> list[str]:
    """The chapters' tests and the modules of tests/ that they import, at any depth."""
    left = [root / "tests/conftest.py", *sorted((root / "tests").glob("test_ch[0-9]*.py"))]
    found = [root / "tests/__init__.py", root / "tests/requirements.txt"]
    while left:
        path = left.pop()
        if path in found or not path.is_file():
            continue
        found.append(path)
        for module, name in _IMPORT.findall(path.read_text(encoding="utf-8")):
            base = root.joinpath(*module.split("."))
            left += [base.with_suffix(".py"), base / "__init__.py", base / f"{name}.py"]
    return sorted(p.relative_to(root).as_posix() for p in found if p.is_file())


def _make_stubs(path: Path, exercises: list[Exercise]) -> None:
    for ex in exercises:
        source = Source.read(path)
        function = source.find(ex.qualname)
        if not is_stub(function):
            old = body_of(source, function)
            path.write_text(put(old, old.start, old.end, RAISE), encoding=source.encoding, newline="")


def _remove_answers(path: Path, exercises: list[Exercise]) -> None:
    """Those functions, the comments above them, classes that are empty then, and the file with the last answer."""
    if not path.exists():
        return
    source = Source.read(path)
    names = {ex.qualname for ex in exercises}
    if not {name for name, _ in functions(source.tree)} - names:
        path.unlink()
        return
    gone = [node for name, node in functions(source.tree) if name in names]
    gone += [n for n in source.tree.body if isinstance(n, ast.ClassDef) and all(part in gone for part in n.body)]
    lines = source.text.splitlines(keepends=True)
    for node in gone:
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        while first > 1 and source.line(first - 1).lstrip().startswith("#"):
            first -= 1
        for i in range(first - 1, node.end_lineno):
            lines[i] = ""
    path.write_text("".join(lines), encoding=source.encoding, newline="")


def _leaks(out: Path, answers: dict) -> list[str]:
    """Functions anywhere in the tree whose body is an answer that was taken out."""
    telling = {name: node for name, node in answers.items() if sum(1 for _ in ast.walk(node)) > TELLING}
    wanted = {normalised(node): name for name, node in telling.items()}
    return [
        f"{path.relative_to(out)}:{node.lineno} is the answer of {name}"
        for path in sorted(out.rglob("*.py"))
        for _, node in functions(Source.read(path).tree)
        if (name := wanted.get(normalised(node)))
    ]
