"""From a submission to the bodies of its exercises, in a process of its own: parsing a hostile file may end it.

    python -m engine.exercises.grading.reading ROOT CHAPTERS SUBMISSION [FILE]

prints {"notes": […], "exercises": {full name: Found}} as JSON. Nothing of the submission is imported or run.
"""

import ast
import builtins
import dataclasses
import io
import json
import subprocess
import sys
import tokenize
from dataclasses import dataclass, field
from pathlib import Path

from engine.exercises.bodies import body_of, checked, lay_out, put
from engine.exercises.catalog import Catalog
from engine.exercises.grading.sandbox import limit
from engine.exercises.grading.screening import (
    MAX_BODY,
    imports_answers,
    normalised,
    screen,
    unknown_names,
)
from engine.exercises.grading.submissions import Archive, Folder, Unreadable, open_tree
from engine.exercises.registry import Exercise
from engine.exercises.source import Source, SourceError, is_stub

SECONDS, MEMORY = 30, 2 << 30


@dataclass
class Found:
    """state: "written", "not written", or "refused" with a message; text: the body, laid out for the book's file."""

    state: str
    message: str = ""
    text: str = ""
    flags: list[str] = field(default_factory=list)  # for the instructor
    notes: list[str] = field(default_factory=list)  # for the student


@dataclass
class Reading:
    exercises: dict[str, Found]
    notes: list[str] = field(default_factory=list)


def read(catalog: Catalog, exercises: list[Exercise], submission: Path) -> Reading:
    """The bodies of these exercises. When the reading process dies, once more file by file, to lose only one."""
    chapters = ",".join(str(n) for n in sorted({ex.chapter for ex in exercises}))
    reading, trouble = _process(catalog.root, chapters, submission)
    if reading is not None:
        return reading
    found: dict[str, Found] = {}
    for file in dict.fromkeys(ex.where.rsplit(":", 1)[0] for ex in exercises):
        one, trouble = _process(catalog.root, chapters, submission, file)
        names = [ex.name for ex in exercises if ex.where.startswith(f"{file}:")]
        refused = {name: Found("refused", f"{file} cannot be read: {trouble}") for name in names}
        found |= one.exercises if one else refused
    return Reading(found)


def _process(root: Path, *arguments) -> tuple[Reading | None, str]:
    command = [sys.executable, "-m", "engine.exercises.grading.reading", str(root), *map(str, arguments)]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, stdin=subprocess.DEVNULL, timeout=4 * SECONDS)
    except subprocess.TimeoutExpired:
        return None, f"took more than {4 * SECONDS} s"
    if done.returncode:
        return None, f"the reader stopped with status {done.returncode}"
    answer = json.loads(done.stdout)
    return Reading({name: Found(**entry) for name, entry in answer["exercises"].items()}, answer["notes"]), ""


class _File:
    """One file of the book beside the student's version of it."""

    def __init__(self, root: Path, relative: str):
        self.relative = relative
        self.book = Source.read(root / relative, relative)
        answers = root / relative.replace("engine/", "solutions/", 1)
        self.answers = Source.read(answers) if answers.exists() else None
        self.methods = {
            node.name: {f.name for f in node.body if isinstance(f, ast.FunctionDef)}
            for node in ast.walk(self.book.tree)
            if isinstance(node, ast.ClassDef)
        }

    def found(self, ex: Exercise, student: Source) -> Found:
        function = student.find(ex.qualname)
        if is_stub(function):
            return Found("not written", ex.not_written)
        new, old = body_of(student, function), body_of(self.book, self.book.find(ex.qualname))
        if len(new.text) > MAX_BODY:
            return Found("refused", f"its body has {len(new.text)} characters; at most {MAX_BODY} are taken")
        flags = ["uses solutions/"] if imports_answers(function) else []
        if self._is_reference(ex, function):
            flags.append("equal to the reference")
        reasons = screen(function, self.methods.get(ex.qualname.rsplit(".", 1)[0], ()))
        if reasons:
            return Found("refused", "not run, as it does what no exercise needs: " + "; ".join(reasons), flags=flags)
        text = lay_out(new, old)
        checked(put(old, old.start, old.end, text), ex.qualname, function)
        return Found("written", text=text, flags=flags, notes=self._notes(function, old.function))

    def _is_reference(self, ex: Exercise, function) -> bool:
        try:
            return self.answers is not None and normalised(self.answers.find(ex.qualname)) == normalised(function)
        except SourceError:
            return False

    def _notes(self, function, stub) -> list[str]:
        notes = []
        if ast.dump(function.args) != ast.dump(stub.args):
            notes.append(f"the signature was changed; the body ran as {stub.name}({ast.unparse(stub.args)})")
        if unknown := unknown_names(function, self.book.tree, dir(builtins)):
            notes.append(
                f"it uses {', '.join(unknown[:5])}, unknown in the book's {self.relative}: "
                "only bodies are taken, so helpers and imports belong inside the function"
            )
        return notes


def _read_file(root: Path, tree: Folder | Archive, relative: str, exercises: list[Exercise]) -> dict[str, Found]:
    try:
        file, student = _File(root, relative), _source(tree.read(relative), relative)
    except (Unreadable, SourceError) as error:
        return {ex.name: Found("refused", str(error)) for ex in exercises}
    found = {}
    for ex in exercises:
        try:
            found[ex.name] = file.found(ex, student)
        except SourceError as error:
            found[ex.name] = Found("refused", str(error))
        except (RecursionError, MemoryError):
            found[ex.name] = Found("refused", "its body is nested too deeply")
    return found


def _source(data: bytes, relative: str) -> Source:
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return Source(data.decode(encoding), relative, encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise SourceError(f"{relative}:1: {error}") from None


def main(root: str, chapters: str, submission: str, only: str | None = None) -> None:
    limit(cpu=SECONDS, memory=MEMORY)
    catalog = Catalog(Path(root))
    exercises = [ex for number in chapters.split(",") for ex in catalog.of_chapter(int(number))]
    found, notes = {}, []
    try:
        tree = open_tree(Path(submission))
    except (Unreadable, OSError) as error:
        found = {ex.name: Found("refused", f"the submission cannot be used: {error}") for ex in exercises}
    else:
        notes = tree.notes
        for relative in dict.fromkeys(ex.where.rsplit(":", 1)[0] for ex in exercises):
            ours = [ex for ex in exercises if ex.where.startswith(f"{relative}:")]
            if only in (None, relative):
                found |= _read_file(catalog.root, tree, relative, ours)
    answer = {"notes": notes, "exercises": {name: dataclasses.asdict(entry) for name, entry in found.items()}}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
