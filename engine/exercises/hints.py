"""`run.py hint`: up to three hints of rising strength, from the hints.md beside an exercise's module."""

import re
import textwrap
from pathlib import Path

from engine.exercises import state
from engine.exercises.catalog import Catalog
from engine.exercises.registry import Exercise

HINTS = 3


def hints_of(ex: Exercise) -> list[str]:
    """The numbered hints under the heading that means this exercise; of several headings the most specific."""
    path = Path(ex.path).with_name("hints.md")
    if not path.exists():
        return []
    found = {name: text for name, text in hint_sections(path.read_text(encoding="utf-8")).items() if ex.goes_by(name)}
    return numbered(found[max(found, key=len)]) if found else []


def hint_sections(text: str) -> dict[str, str]:
    """Heading to text, for every `## ` heading; back-ticks around a name are dropped."""
    parts = re.split(r"^## +(.+?)[ \t]*$", text, flags=re.MULTILINE)
    return {heading.strip("` "): body for heading, body in zip(parts[1::2], parts[2::2], strict=True)}


def numbered(text: str) -> list[str]:
    """The items of a Markdown list `1.`, `2.`, …, without the numbers and their indentation."""
    items = re.split(r"^\d+\. +", text, flags=re.MULTILINE)[1:]
    return [_unindent(item.strip()) for item in items]


def _unindent(item: str) -> str:
    first, _, rest = item.partition("\n")
    return f"{first}\n{textwrap.dedent(rest)}".strip()


def hint(catalog: Catalog, name: str, level: int | None = None, everything: bool = False) -> str:
    """The text to print: each call shows one hint more, `level` exactly that one, `everything` all of them.

    Raises LookupFailed for an unknown name and ValueError when the exercise has no hints.
    """
    ex = catalog.one(name)
    hints = hints_of(ex)
    if not hints:
        raise ValueError(f"{ex.qualname} has no hints in the hints.md beside {ex.where}")
    if level is not None and not 1 <= level <= len(hints):
        raise ValueError(f"--level {level}: {ex.qualname} has the hints 1 to {len(hints)}")
    remembered = state.load(catalog.root)
    seen = remembered["hints"].get(ex.name, 0)
    seen = seen if isinstance(seen, int) else 0
    upto = len(hints) if everything else min(level or seen + 1, len(hints))
    if upto > seen:
        remembered["hints"][ex.name] = upto
        state.save(catalog.root, remembered)
    shown = [level - 1] if level else range(upto)
    lines = [f"{ex.where} {ex.qualname}", ""]
    lines += [textwrap.indent(f"{i + 1}. {hints[i]}", "   ").strip() + "\n" for i in shown]
    if not level:
        more = len(hints) - upto
        lines.append(f"{more} more: the same command again" if more else "no more hints")
    return "\n".join([*lines, f"to read: {catalog.link(ex)}"])
