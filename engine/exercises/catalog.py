"""Every exercise of the tree, found by reading the source: works without torch and in a tree that does not import."""

import ast
import difflib
import re
from pathlib import Path

from engine.exercises.registry import Exercise
from engine.exercises.source import Source, SourceError, functions, is_stub

ROOT = Path(__file__).resolve().parents[2]


class LookupFailed(ValueError):
    """A name or chapter that means nothing here, or too much; the message is one line."""


class Catalog:
    """exercises: in the order of the chapters and, within one, of its sections. damaged: a line per unreadable file."""

    def __init__(self, root: Path = ROOT):
        self.root = Path(root)
        self.damaged: list[str] = []
        found = []
        for path in sorted((self.root / "engine").rglob("*.py")):
            try:
                found += _exercises_in(path, self.root)
            except SourceError as error:
                self.damaged.append(str(error))
        self._sections: dict[int, list[str]] = {}
        self.exercises = sorted(found, key=self._place)

    @property
    def chapters(self) -> list[int]:
        return sorted({ex.chapter for ex in self.exercises})

    def of_chapter(self, chapter: int) -> list[Exercise]:
        return [ex for ex in self.exercises if ex.chapter == chapter]

    def lookup(self, what: str) -> list[Exercise]:
        """The exercises of a CHAPTER (`31`, `05`) or the one of a NAME: any end of a full name that starts at a dot.

        Raises LookupFailed, listing the candidates, when that is none or several.
        """
        what = what.strip()
        if what.isdecimal():
            if found := self.of_chapter(int(what)):
                return found
            raise LookupFailed(self._blame_damage(f"chapter {int(what)} has no exercises; {self._known_chapters()}"))
        return [self.one(what)]

    def one(self, name: str) -> Exercise:
        found = [ex for ex in self.exercises if ex.goes_by(name)]
        if len(found) == 1:
            return found[0]
        if found:
            raise LookupFailed(f"{name!r} is ambiguous: {', '.join(self.short(ex) for ex in found)}")
        raise LookupFailed(self._blame_damage(f"no exercise is called {name!r}{self._close_to(name)}"))

    def short(self, ex: Exercise) -> str:
        """The shortest name that means only this exercise and has its class in it."""
        parts = ex.name.split(".")
        for i in range(len(parts) - len(ex.qualname.split(".")), -1, -1):
            name = ".".join(parts[i:])
            if sum(other.goes_by(name) for other in self.exercises) == 1:
                return name
        return ex.name

    def chapter_file(self, chapter: int) -> Path | None:
        return next(iter(sorted((self.root / "chapters").glob(f"{chapter:02d}-*.md"))), None)

    def sections(self, chapter: int) -> list[str]:
        """The headings of a chapter's text, in order; empty when it is not written."""
        if chapter not in self._sections:
            path = self.chapter_file(chapter)
            self._sections[chapter] = headings(path.read_text(encoding="utf-8")) if path else []
        return self._sections[chapter]

    def link(self, ex: Exercise) -> str:
        """`chapters/31-engine-v2.md#flattened-ragged-batches`, or chapter and section in words without that text."""
        path = self.chapter_file(ex.chapter)
        if path is None or ex.section not in self.sections(ex.chapter):
            return f'chapter {ex.chapter}, "{ex.section}"'
        return f"{path.relative_to(self.root).as_posix()}#{anchor(ex.section)}"

    def _place(self, ex: Exercise):
        sections = self.sections(ex.chapter)
        section = sections.index(ex.section) if ex.section in sections else len(sections)
        return ex.chapter, section, ex.module, ex.line

    def _known_chapters(self) -> str:
        return f"chapters that have: {', '.join(map(str, self.chapters)) or 'none'}"

    def _close_to(self, name: str) -> str:
        by_last = {self.short(ex): ex for ex in self.exercises}
        inside = [short for short, ex in by_last.items() if name.lower() in ex.name.lower()]
        ends = {short.rsplit(".", 1)[-1]: short for short in by_last}
        alike = difflib.get_close_matches(name, by_last, n=3)
        alike += [ends[end] for end in difflib.get_close_matches(name.rsplit(".", 1)[-1], ends, n=3)]
        near = list(dict.fromkeys(inside[:5] or alike))
        return f"; near it: {', '.join(near)}" if near else "; `python run.py list` shows all"

    def _blame_damage(self, message: str) -> str:
        return f"{message} (not read: {'; '.join(self.damaged)})" if self.damaged else message


def _exercises_in(path: Path, root: Path) -> list[Exercise]:
    if b"@exercise(" not in path.read_bytes():
        return []
    relative = path.relative_to(root)
    module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
    found = []
    for qualname, node in functions(Source.read(path, relative.as_posix()).tree):
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).rsplit(".", 1)[-1] == "exercise":
                chapter, section = _arguments(decorator, f"{relative.as_posix()}:{node.lineno}")
                found.append(Exercise(chapter, section, module, qualname, str(path), node.lineno, not is_stub(node)))
    return found


def _arguments(call: ast.Call, where: str) -> tuple[int, str]:
    try:
        values = [ast.literal_eval(a) for a in call.args] + [ast.literal_eval(k.value) for k in call.keywords]
        chapter, section = values
        if type(chapter) is not int or type(section) is not str:
            raise ValueError
    except (ValueError, TypeError):
        raise SourceError(f"{where}: expected @exercise(chapter number, section title)") from None
    return chapter, section


def headings(text: str) -> list[str]:
    """The headings below the title of a Markdown text, code blocks left out."""
    found, fenced = [], False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif re.match(r"##+ ", line) and not fenced:
            found.append(line.strip("#").strip())
    return found


def anchor(heading: str) -> str:
    """The fragment that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
