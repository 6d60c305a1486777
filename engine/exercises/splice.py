"""`run.py solve` and `reset`: put an answer's body into a stub, and the raise back.

Only the characters of the body change. Solving replaces the raise and nothing around it; resetting looks for exactly
the text that was pasted, so the two together give back the file byte for byte.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from shutil import copy2

from engine.exercises.bodies import Body, body_of, checked, lay_out, put
from engine.exercises.catalog import Catalog
from engine.exercises.registry import Exercise
from engine.exercises.source import Source, SourceError, body, is_stub, same_body, write_atomically

RAISE = "raise NotImplementedError"
_Change = Callable[[Body, Body | None, Exercise, bool], str | None]


@dataclass
class Outcome:
    """What became of each exercise, a line each; `refused` were left alone to protect somebody's code."""

    done: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    backup: str = ""  # folder, relative to the root, that holds the files as they were


def solve(catalog: Catalog, what: str, force: bool = False) -> Outcome:
    """Write the answers of a CHAPTER or NAME into engine/.

    Raises LookupFailed for a name that means nothing, SourceError for a file that cannot be read or edited and for an
    exercise without an answer: then nothing at all was written.
    """
    return _edit(catalog, what, force, _solved, ("solved", "already the answer"))


def reset(catalog: Catalog, what: str, force: bool = False) -> Outcome:
    """Turn the exercises of a CHAPTER or NAME back into stubs; raises as `solve` does."""
    return _edit(catalog, what, force, _reset, ("reset", "already a stub"))


def _edit(catalog: Catalog, what: str, force: bool, change: _Change, verbs: tuple[str, str]) -> Outcome:
    """Plan all changes in memory, then back up and write."""
    outcome, files, texts = Outcome(), {}, {}
    for ex in catalog.lookup(what):
        path, where = Path(ex.path), ex.where.rsplit(":", 1)[0]
        if path not in files:
            files[path] = Source.read(path, where)
            texts[path] = files[path].text
        target = Source(texts[path], where)
        text = change(body_of(target, target.find(ex.qualname)), _answer(catalog, ex), ex, force)
        line = f"{where} {ex.qualname}"
        if text is None:
            outcome.refused.append(f"{line}: holds code that is not the answer; --force overwrites it")
        elif text == target.text:
            outcome.unchanged.append(f"{line}: {verbs[1]}")
        else:
            texts[path] = text
            outcome.done.append(f"{line}: {verbs[0]}")
    changed = [path for path in files if texts[path] != files[path].text]
    outcome.backup = _back_up(catalog.root, changed) if changed else ""
    for path in changed:
        write_atomically(path, texts[path], files[path].encoding)
    return outcome


def _solved(old: Body, answer: Body | None, ex: Exercise, force: bool) -> str | None:
    """The new text of the file, None when somebody's code is in the way."""
    if answer is None:
        raise SourceError(f"{ex.where}: there is no answer for {ex.qualname} in solutions/")
    if same_body(old.function, answer.function):
        return old.source.text
    if not is_stub(old.function):
        if not force:
            return None
        return checked(put(old, old.start, old.end, lay_out(answer, old)), ex.qualname, answer.function)
    if old.inline:
        raise SourceError(f"{ex.where}: give the raise of {ex.qualname} a line of its own first")
    the_raise = body(old.function)[0]
    start, end = old.source.start(the_raise), old.source.end(the_raise)
    return checked(put(old, start, end, lay_out(answer, old)), ex.qualname, answer.function)


def _reset(old: Body, answer: Body | None, ex: Exercise, force: bool) -> str | None:
    if is_stub(old.function):
        return old.source.text
    if answer is None or not same_body(old.function, answer.function):
        return put(old, old.start, old.end, RAISE) if force else None
    pasted = lay_out(answer, old)
    start = old.start + old.lead - len(lay_out(answer, old, answer.lead))
    if not old.inline and old.source.text.startswith(pasted, start):
        return put(old, start, start + len(pasted), RAISE)
    return put(old, old.start, old.end, RAISE)


def _answer(catalog: Catalog, ex: Exercise) -> Body | None:
    relative = Path(ex.path).relative_to(catalog.root / "engine")
    path = catalog.root / "solutions" / relative
    if not path.exists():
        return None
    source = Source.read(path, f"solutions/{relative.as_posix()}")
    try:
        return body_of(source, source.find(ex.qualname))
    except SourceError:
        return None


def _back_up(root: Path, paths: list[Path]) -> str:
    """Copies of the files in a new folder named after the time, one that nobody else has."""
    stamp, number = datetime.now().strftime("%Y%m%d-%H%M%S"), 1
    folder = root / ".backup" / stamp
    while folder.exists():
        number += 1
        folder = root / ".backup" / f"{stamp}-{number}"
    for path in paths:
        copy = folder / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy2(path, copy)
    return folder.relative_to(root).as_posix()
