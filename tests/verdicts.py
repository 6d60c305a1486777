"""What an exception in a graded test means to the one who wrote the exercise: a few lines in place of a traceback.

An innermost frame in `engine/` says where it happened; the exercise nearest to it says whose code was running.
"""

import linecache
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

import pytest

from engine.exercises.registry import EXERCISES, Exercise
from tests.differences import cut
from tests.grading import Wrong
from tests.sections import ROOT

STEPS = 12  # lines of a failing example that are shown


class DidNotFinish(BaseException):
    """Raised into a test that ran past its limit. No Exception, or hypothesis would shrink it for ever."""


@dataclass
class Verdict:
    """kind: "wrong" (a message of ours), "assert" (a bare assert), "raised", "late" or "not written"."""

    kind: str
    text: str
    exercises: list[Exercise] = field(default_factory=list)  # whose code was at fault, where the traceback tells


@dataclass
class Frame:
    code: CodeType
    line: int

    @property
    def path(self) -> str:
        """Relative to the project, "" outside it."""
        path = Path(self.code.co_filename)
        return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}"

    @property
    def function(self) -> str:
        return self.code.co_qualname.split(".<locals>")[0]

    @property
    def exercise(self) -> Exercise | None:
        floor, _, rest = self.path.removesuffix(".py").partition("/")
        if floor not in ("engine", "solutions") or not rest:
            return None
        return EXERCISES.get(f"engine.{rest.replace('/', '.')}.{self.function}")


def is_blank(ex: Exercise) -> bool:
    return not ex.written and ex.source != "reference"


def unwritten(exercises: list[Exercise]) -> list[Exercise]:
    """What keeps a test from running: all it grades is still unwritten. With one of several written, it grades that."""
    return exercises if all(map(is_blank, exercises)) else []


def not_written(exercises: list[Exercise]) -> Verdict:
    return Verdict("not written", "\n".join(ex.not_written for ex in exercises), exercises)


def judge(error: BaseException, graded: list[Exercise]) -> Verdict:
    """What a failure of a test that grades these exercises means."""
    first, found = _first(error)
    verdict = _judge_one(first, graded)
    verdict.text += _example(first)
    if any(base.__name__ == "Flaky" for base in type(error).__mro__):
        verdict.text += "\n  and not always: the same input gave two different results"
    elif found > 1:
        verdict.text += f"\n  (hypothesis found {found} different failures; this is one)"
    return verdict


def _first(error: BaseException) -> tuple[BaseException, int]:
    """Of a group of failures one that has a message of ours, and how many there are."""
    if not isinstance(error, BaseExceptionGroup):
        return error, 1
    leaves = [_first(e) for e in error.exceptions]
    best = next((e for e, _ in leaves if isinstance(e, Wrong)), leaves[0][0])
    return best, sum(n for _, n in leaves)


def _judge_one(error: BaseException, graded: list[Exercise]) -> Verdict:
    error, frames = _unwrapped(error)
    if isinstance(error, Wrong):
        return Verdict("wrong", str(error))
    inside = [f for f in frames if f.path.startswith(("engine/", "solutions/"))]
    if isinstance(error, DidNotFinish):
        return _late(error, inside, graded)
    if isinstance(error, pytest.fail.Exception):
        return Verdict("assert", str(error))
    if isinstance(error, AssertionError) and (not inside or inside[-1] is not frames[-1]):
        at = next((f for f in reversed(frames) if f.path), frames[-1])
        return Verdict("assert", f"{at.where}: {_source(at)}\n{error}")
    if inside:
        return _raised(error, inside, graded)
    at = next((f for f in reversed(frames) if f.path), frames[-1])
    text = f"{_one_line(error)} at {at.where}: {_source(at)}"
    return Verdict("raised", f"{text}\n  did {_names(graded)} return what the docstring promises?")


def _late(error: DidNotFinish, inside: list[Frame], graded: list[Exercise]) -> Verdict:
    subject = _subject(inside)
    name = subject.exercise.qualname if subject else _names(graded)
    where = f" It was at {inside[-1].where}" if inside else ""
    return Verdict("late", f"{name} {error}: an endless loop?{where}", [subject.exercise] if subject else [])


def _raised(error: BaseException, inside: list[Frame], graded: list[Exercise]) -> Verdict:
    last, subject = inside[-1], _subject(inside)
    owner = last.exercise
    if isinstance(error, NotImplementedError) and owner and owner.source == "missing":
        return not_written([owner])
    if isinstance(error, AssertionError) and owner is None:  # scaffolding that checks an invariant: a message of ours
        return Verdict("wrong", f"after {_names(graded)}: {error}\n  checked by {last.function} at {last.where}")
    if subject is None:
        text = f"{last.function} raised {_one_line(error)} at {last.where}"
        return Verdict("raised", f"{text}\n  in a test of {_names(graded)}")
    text = f"{subject.exercise.qualname} raised {_one_line(error)} at {last.where}"
    if last is not subject:
        text += f"\n  in {last.function}, called at {subject.where}"
    return Verdict("raised", text, [owner] if owner is subject.exercise else [])


def _subject(inside: list[Frame]) -> Frame | None:
    """The innermost frame of an exercise that is not borrowed."""
    return next((f for f in reversed(inside) if f.exercise and f.exercise.source != "borrowed"), None)


def _unwrapped(error: BaseException) -> tuple[BaseException, list[Frame]]:
    """What was raised, and the frames that led there. Triton's interpreter wraps what a kernel raises."""
    frames = _frames(error)
    while type(error).__name__ == "InterpreterError" and (cause := error.__cause__ or error.__context__):
        error = cause
        frames += _frames(error)
    return error, frames


def _frames(error: BaseException) -> list[Frame]:
    frames, tb = [], error.__traceback__
    while tb is not None:
        frames.append(Frame(tb.tb_frame.f_code, tb.tb_lineno))
        tb = tb.tb_next
    return frames


def _one_line(error: BaseException) -> str:
    text = cut(str(error), 200)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _source(frame: Frame) -> str:
    return linecache.getline(frame.code.co_filename, frame.line).strip()


def _names(exercises: list[Exercise]) -> str:
    return " or ".join(ex.qualname for ex in exercises)


def _example(error: BaseException) -> str:
    """The example that hypothesis noted on the error, compactly."""
    lines = "\n".join(getattr(error, "__notes__", ())).splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("Falsifying")), None)
    if start is None:
        return ""
    more = [line.split("  # or any")[0].strip() for line in lines[start + 1 :]]
    end = next((i for i, line in enumerate(more) if line.startswith(("Explanation:", "You can reproduce"))), len(more))
    more = [line for line in more[:end] if line and line != ")" and not line.startswith("#")]
    if lines[start].endswith("("):
        return f"\n  example: {cut(' '.join(more).rstrip(','), 300)}"
    dropped = [f"… {len(more) - STEPS} more steps"] if len(more) > STEPS else []
    return "\n  steps:" + "".join(f"\n    {line}" for line in [*more[:STEPS], *dropped])
