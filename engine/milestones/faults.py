"""Failures on order: an exception at a named point of a step, or Ctrl-C at any line of the core."""

import builtins
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = tuple(str(ROOT / folder / "serve") for folder in ("engine", "solutions"))


class Faults:
    """Called with the name of each point that a step passes; raises at the one that is armed, once."""

    def __init__(self):
        self.where = None

    def arm(self, where: str, countdown: int, error: str) -> None:
        """Raise that exception, by its name, when `where` is passed for the countdown-th time."""
        self.where, self.countdown, self.error = where, countdown, getattr(builtins, error)

    def disarm(self) -> None:
        self.where = None

    def __call__(self, where: str) -> None:
        if where == self.where:
            self.countdown -= 1
            if self.countdown == 0:
                self.where = None
                raise self.error(f"injected: {where}")

    def before(self, where: str, call):
        """The same callable, with such a point before it."""

        def passing(*args, **kwargs):
            self(where)
            return call(*args, **kwargs)

        return passing


class Interrupt:
    """Calls something and raises at the at-th line that runs in the core's code.

    place: where that was, None if there were fewer lines.  raised: it reached the caller of this.
    """

    def __init__(self, at: int, error=KeyboardInterrupt):
        self.left, self.error, self.place, self.raised = at, error, None, False

    def __call__(self, call):
        """What call() returns; None if it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return call()
        except self.error:
            if self.place is None:
                raise
            self.raised = True
            return None
        finally:
            sys.settrace(before)

    def _enter(self, frame, event, _):
        return self._line if frame.f_code.co_filename.startswith(CODE) else None

    def _line(self, frame, event, _):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                path = Path(frame.f_code.co_filename).relative_to(ROOT).as_posix()
                self.place = f"{path}:{frame.f_lineno}"
                raise self.error(f"injected: {self.place}")
        return self._line
