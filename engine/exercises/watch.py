"""`run.py watch`: on save, the graders of the exercise that changed; keys for a hint, the next thing, the list."""

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from engine.exercises import state
from engine.exercises.catalog import Catalog
from engine.exercises.hints import hint
from engine.exercises.listing import chapter_number, listing
from engine.exercises.progress import digest, grade, standing, what_next
from engine.exercises.registry import Exercise

KEYS = "h hint   n next   l list   q quit"
POLL = 1.0  # seconds between looks at the files, should no event come
SETTLE = 0.1  # seconds for an editor to finish its several steps of one save
SHOWN = 2  # messages for an exercise


def watch(root: Path, chapter: str) -> int:
    """Until q, Ctrl-D or Ctrl-C. Raises LookupFailed for a chapter without exercises."""
    watcher = Watcher(root, chapter)
    happenings: queue.SimpleQueue[str] = queue.SimpleQueue()
    with file_events(root / "engine", happenings) as note, key_presses(happenings) as keys:
        say(f"watching chapter {watcher.number}: save a file in engine/ to run its graders{note}")
        say(KEYS if keys else "Ctrl-C ends it")
        while True:
            try:
                happening = happenings.get(timeout=POLL)
            except queue.Empty:
                happening = ""
            if happening in ("q", "\x04"):
                return 0
            if happening.isprintable() and happening:
                watcher.press(happening)
            else:
                watcher.look()


class Watcher:
    """What was seen of the files last, and what to do about a difference or a key."""

    def __init__(self, root: Path, chapter: str):
        self.root = root
        self.catalog = Catalog(root)
        self.number = chapter_number(self.catalog, chapter)
        self.stamps = self._stamps()
        self.digests = self._digests()
        self.current: str | None = None

    def _stamps(self) -> dict[Path, tuple[int, int]]:
        stamps = {}
        for path in sorted((self.root / "engine").rglob("*.py")):
            with contextlib.suppress(FileNotFoundError):  # in the middle of a save
                found = path.stat()
                stamps[path] = found.st_mtime_ns, found.st_size
        return stamps

    def _exercises(self) -> list[Exercise]:
        return self.catalog.of_chapter(self.number)

    def _digests(self) -> dict[str, str]:
        return {ex.name: digest(ex) for ex in self._exercises()}

    def look(self) -> None:
        """Grade what changed since the last look."""
        if self._stamps() == self.stamps:
            return
        time.sleep(SETTLE)
        before, self.stamps = self.stamps, self._stamps()
        files = {str(path) for path, stamp in self.stamps.items() if before.get(path) != stamp}
        self.catalog = Catalog(self.root)
        for line in self.catalog.damaged:
            say(f"\n{line}")
        changed = self._changed(files)
        for ex in [ex for ex in changed if not ex.written]:
            say(f"\n{ex.not_written}")
        written = [ex for ex in changed if ex.written]
        if written:
            self.current = written[0].name
            self._grade(written)

    def _changed(self, files: set[str]) -> list[Exercise]:
        """Exercises with another text; where a file changed around them, all that are written in it."""
        old, now = self.digests, self._digests()
        self.digests = {**old, **now}  # a damaged file keeps what it had
        changed = [ex for ex in self._exercises() if old.get(ex.name) != now[ex.name]]
        touched = {ex.path for ex in changed}
        return changed + [ex for ex in self._exercises() if ex.written and ex.path in files - touched]

    def _grade(self, exercises: list[Exercise]) -> None:
        say(f"\n{time.strftime('%H:%M:%S')}  grading {', '.join(self.catalog.short(ex) for ex in exercises)}")
        try:
            results, errors = grade(self.catalog, exercises)
        except ValueError as error:
            say(str(error))
            return
        remembered = state.load(self.root)
        remembered["results"] |= results
        state.save(self.root, remembered)
        for line in errors:
            say(f"cannot be used: {line}")
        for ex in exercises:
            self._report(ex, results)
        say(KEYS)

    def _report(self, ex: Exercise, results: dict[str, dict]) -> None:
        entry, word = results.get(ex.name) or {}, standing(ex, results)
        failed, passed = entry.get("failed", 0), entry.get("passed", 0)
        count = f"{failed} of {failed + passed} tests fail" if failed else f"{passed} tests pass"
        say(f"{word}   {ex.where} {ex.qualname}   {count}")
        for message in list(dict.fromkeys(entry.get("messages") or []))[:SHOWN]:
            say("\n".join(f"  {line}" for line in message.splitlines()))

    def press(self, key: str) -> None:
        if key == "h":
            self._hint()
        elif key == "n":
            say("\n".join(what_next(self.catalog, self._exercises(), state.load(self.root)["results"])))
        elif key == "l":
            say(listing(self.catalog, str(self.number)))
        else:
            say(KEYS)

    def _hint(self) -> None:
        """For the exercise that was saved last, otherwise for the first that is not written."""
        ex = next((ex for ex in self._exercises() if ex.name == self.current), None)
        ex = ex or next((ex for ex in self._exercises() if not ex.written), None)
        if ex is None:
            say("save an exercise first")
            return
        try:
            say(hint(self.catalog, ex.name))
        except ValueError as error:
            say(str(error))


def say(text: str) -> None:
    print(text, flush=True)


@contextlib.contextmanager
def file_events(folder: Path, happenings: queue.SimpleQueue) -> Iterator[str]:
    """Put "" into the queue when something below the folder changes. Gives a note on how, should that be news."""
    try:
        import watchfiles
    except ModuleNotFoundError:
        yield f", looked for every {POLL:g} s (python -m pip install -r tests/requirements.txt brings file events)"
        return
    stop = threading.Event()

    def run() -> None:
        with contextlib.suppress(Exception):  # no events on this file system or no more of them: polling remains
            for _ in watchfiles.watch(folder, stop_event=stop, raise_interrupt=False, step=50, debounce=200):
                happenings.put("")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield ""
    finally:
        stop.set()


@contextlib.contextmanager
def key_presses(happenings: queue.SimpleQueue) -> Iterator[bool]:
    """Put each key into the queue as it is pressed. Gives False where there is no terminal for that."""
    if not (sys.stdin and sys.stdin.isatty()) or os.name != "posix":
        yield False
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)

    def run() -> None:
        with contextlib.suppress(OSError):
            while key := os.read(sys.stdin.fileno(), 1):
                happenings.put(key.decode("ascii", errors="replace"))
            happenings.put("q")

    threading.Thread(target=run, daemon=True).start()
    try:
        yield True
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
