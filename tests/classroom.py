"""A class of submissions to try grading on: right, wrong and hostile ones, with the status that each exercise must get.

python -m tests.classroom FOLDER        30 submissions of chapter 31, ten of them hostile, and FOLDER/expected.json
python run.py grade FOLDER/class --chapters 31 --out FOLDER/results
python -m tests.classroom FOLDER --check
"""

import argparse
import json
import random
import shutil
import stat
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from engine.exercises.bodies import replace_body
from engine.exercises.catalog import Catalog
from engine.exercises.registry import Exercise
from tests.sections import ROOT

BOMB = 64 << 20  # bytes of a file that is small when packed


class Classroom:
    """Writes submissions of one chapter into a folder."""

    def __init__(self, root: Path, chapter: int, folder: Path):
        self.catalog, self.chapter, self.folder = Catalog(root), chapter, folder
        self.root = root
        self.exercises = self.catalog.of_chapter(chapter)
        self.names = [self.catalog.short(ex) for ex in self.exercises]
        self.expected: dict[str, dict[str, str]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, name: str) -> str:
        return self.catalog.one(name).where.rsplit(":", 1)[0]

    def answers(self) -> dict[str, str]:
        """By short name: a text that has the answer under the exercise's qualified name."""
        return {self.catalog.short(ex): self.answer_file(ex).read_text(encoding="utf-8") for ex in self.exercises}

    def answer_file(self, ex: Exercise) -> Path:
        return self.root / self.path(ex.name).replace("engine/", "solutions/", 1)

    def files(self, bodies: dict[str, str]) -> dict[str, str]:
        """The chapter's files with these functions in place of stubs."""
        texts = {path: (self.root / path).read_text(encoding="utf-8") for path in map(self.path, self.names)}
        for name, source in bodies.items():
            path = self.path(name)
            texts[path] = replace_body(texts[path], self.catalog.one(name).qualname, source)
        return texts

    def expect(self, student: str, statuses: dict[str, str], otherwise: str = "passed") -> None:
        self.expected[student] = {name: statuses.get(name, otherwise) for name in self.names}

    def student(self, student: str, bodies: dict[str, str], statuses: dict[str, str], otherwise="passed", prefix=""):
        """A folder; `prefix` puts the tree one level down."""
        self.expect(student, statuses, otherwise)
        for path, text in self.files(bodies).items():
            target = self.folder / student / prefix / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")

    def zipped(self, student: str, bodies, statuses, otherwise="passed", change: Callable | None = None, prefix=""):
        """An archive; change(zip, files) may write and remove entries first."""
        self.expect(student, statuses, otherwise)
        files = self.files(bodies)
        with zipfile.ZipFile(self.folder / f"{student}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            if change:
                change(archive, files)
            for path, text in files.items():
                archive.writestr(prefix + path, text)

    def broken(self, student: str) -> None:
        self.expect(student, {}, "refused")
        (self.folder / f"{student}.zip").write_bytes(b"PK\x03\x04 and then nothing")

    def in_file_of(self, name: str, status: str) -> dict[str, str]:
        return {other: status for other in self.names if self.path(other) == self.path(name)}

    def check(self, results: Path) -> list[str]:
        """What differs from what was expected, a line each."""
        wrong = []
        for student, expected in self.expected.items():
            path = results / f"{student}.json"
            got = json.loads(path.read_text())["extra_data"]["status"] if path.exists() else {}
            got = {
                name: "wrong" if status == "stopped" and expected.get(name) == "wrong" else status
                for name, status in got.items()
            }  # a mistake may well be an endless loop
            wrong += [f"{student}: {n} is {got.get(n)}, expected {s}" for n, s in expected.items() if got.get(n) != s]
        return wrong


def function(ex: Exercise, body: str) -> str:
    """A function with this body and no regard for the arguments: only the body is taken from it."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return f"def {ex.qualname.rsplit('.', 1)[-1]}():\n{lines}\n"


def links(path: str) -> Callable:
    """The entry is a symbolic link to a file outside."""

    def change(archive: zipfile.ZipFile, files: dict[str, str]) -> None:
        del files[path]
        entry = zipfile.ZipInfo(path)
        entry.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(entry, "/etc/passwd")
        archive.writestr(f"../../{path}", "raise SystemExit")
        archive.writestr("/tmp/taken.py", "raise SystemExit")

    return change


def bomb(path: str) -> Callable:
    """The entry is small when packed and huge when unpacked."""

    def change(archive: zipfile.ZipFile, files: dict[str, str]) -> None:
        del files[path]
        archive.writestr(path, b"#" * BOMB)

    return change


def lying_bomb(path: str) -> Callable:
    """The same, and the archive says that it has ten bytes."""

    def change(archive: zipfile.ZipFile, files: dict[str, str]) -> None:
        bomb(path)(archive, files)
        archive.getinfo(path).file_size = 10

    return change


BODIES = {  # hostile ones that pass the screening or not, and the status that they must get
    "leaves": ("import os\nos._exit(0)", "refused"),
    "interrupts": ("raise KeyboardInterrupt", "stopped"),
    "loops": ("while True:\n    pass", "stopped"),
    "prints": ("while True:\n    print('x' * 100_000)", "wrong"),
    "hoards": ("kept = []\nwhile True:\n    kept.append(bytes(1 << 28))", "wrong"),
    "recurses": ("def again(n):\n    return again(n + 1)\nreturn again(0)", "wrong"),
    "borrows": ("from solutions import attention\nreturn attention", "refused"),
    "reads": ("return open('solutions/__init__.py').read()", "refused"),
    "large": ("x = 0\n" + "x += 1\n" * 5_000, "refused"),
}


def chapter_31(folder: Path) -> Classroom:
    """Twenty honest submissions and ten hostile ones."""
    room = Classroom(ROOT, 31, folder / "class")
    honest(room)
    answers = room.answers()
    targets = ["hash_block", "Scheduler.schedule", "BlockManager.allocate_slots", "EngineCore.step", "build_batch"]
    targets += ["write_kv", "BlockManager.free"]
    kinds = ["leaves", "interrupts", "loops", "prints", "hoards", "recurses", "borrows"]
    for kind, name in zip(kinds, targets, strict=True):
        body, status = BODIES[kind]
        room.student(f"hostile-{kind}", {**answers, name: function(room.catalog.one(name), body)}, {name: status})
    path = room.path("hash_block")
    room.zipped("hostile-links", answers, room.in_file_of("hash_block", "refused"), change=links(path))
    room.zipped(
        "hostile-bomb", answers, room.in_file_of("build_batch", "refused"), change=bomb(room.path("build_batch"))
    )
    room.broken("hostile-broken")
    return room


def honest(room: Classroom) -> None:
    from tests.mutation import Bank, load_banks

    entries, bank, answers = load_banks([room.chapter]), Bank(), room.answers()
    wrong = [entry for entry in entries if hasattr(entry, "believes") and not entry.path]
    other = [entry for entry in entries if not hasattr(entry, "believes")]
    short = room.catalog.short
    for i in range(6):  # the answers, in all forms of packing
        room.student(f"right-{i}", answers, {}, prefix="repository-main" if i % 2 else "")
    for i in range(2):
        room.zipped(f"right-zip-{i}", answers, {}, prefix="repository-main/" if i else "")
    for i in range(4):  # differently built: one alternative for each exercise that has enough of them
        mine = {short(bank.exercise(a)): a.source for a in other[i::4]}
        room.student(f"other-{i}", {**answers, **mine}, {})
    for i in range(6):  # mistakes in one, two, … exercises
        some = {short(bank.exercise(m)): m for m in wrong[i::17]}
        some = {name: some[name] for name in random.Random(i).sample(sorted(some), i + 1)}
        mutated = {name: bank.mutant(m).text for name, m in some.items()}
        room.student(f"wrong-{i}", {**answers, **mutated}, dict.fromkeys(some, "wrong"))
    few = dict(list(answers.items())[:5])
    room.student("started", few, dict.fromkeys(few, "passed"), "not written")
    room.student("untouched", {}, {}, "not written")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.classroom", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true", help="compare FOLDER/results with what was expected")
    args = parser.parse_args(arguments)
    expected = args.folder / "expected.json"
    if not args.check:
        shutil.rmtree(args.folder / "class", ignore_errors=True)
        room = chapter_31(args.folder)
        expected.write_text(json.dumps(room.expected, indent=1))
        print(f"{len(room.expected)} submissions in {room.folder}")
        return 0
    room = Classroom(ROOT, 31, args.folder / "class")
    room.expected = json.loads(expected.read_text())
    wrong = room.check(args.folder / "results")
    print("\n".join(wrong) or f"all {len(room.expected)} as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
