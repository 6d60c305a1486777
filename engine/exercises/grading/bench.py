"""Clean trees with somebody's bodies in them, and the workers that run graders on such trees.

A tree for grading has no solutions/: the answers that a run needs stand in engine/, in the places of exercises that the
student did not write or whose bodies are left out of this run. Where the student's body stands, its answer is nowhere.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

from engine.exercises import graders
from engine.exercises.bodies import body_of, lay_out
from engine.exercises.catalog import Catalog
from engine.exercises.grading import sandbox
from engine.exercises.grading.trial import environment
from engine.exercises.source import Source, SourceError

MEMORY = 4 << 30  # bytes of address space that a run may add
WHOLE = 3600.0  # seconds that the reference may take
LEAST, FACTOR = 4.0, 8.0  # a test may take FACTOR times what it took with the reference, and no less than LEAST seconds
START = 30.0  # seconds to import a tree and collect its tests


class Bench:
    """The template of all trees, in a folder that only we can enter.

    Raises SourceError when an exercise has no answer, ValueError when a chapter has no graders.
    """

    def __init__(self, catalog: Catalog, chapters: list[int], seed: int, folder: Path, memory: int = MEMORY):
        self.catalog, self.seed, self.memory = catalog, seed, memory
        self.names = [ex.name for ex in catalog.exercises]
        self.may_change: list[str] = []  # functions that libraries replace themselves
        self.files = graders.test_files(catalog.root, chapters)
        if not self.files:
            raise ValueError(f"no tests/test_chNN_*.py for chapters {', '.join(map(str, chapters))}")
        self.folder, self.template = folder, folder / "template"
        self.places = [_place(catalog.root, ex) for ex in catalog.exercises]
        folder.chmod(0o711)
        self.layers = sandbox.available(folder)
        self._fill_template()

    def _fill_template(self) -> None:
        root, template = self.catalog.root, self.template
        template.mkdir(mode=0o700)
        others = [p.name for p in (root / "tests").glob("test_*.py") if f"tests/{p.name}" not in self.files]
        ignore = shutil.ignore_patterns("__pycache__", "assets", "mutants", "alternatives", ".*", *others)
        for name in ("engine", "tests", "chapters"):
            if (root / name).exists():
                shutil.copytree(root / name, template / name, ignore=ignore)
        for path in root.glob("pyproject.toml"):
            shutil.copy(path, template)
        shutil.rmtree(template / "engine/exercises/grading", ignore_errors=True)

    def tree(self, bodies: dict[str, str], where: Path) -> None:
        """A copy of the template with these bodies, by full name, and the answers everywhere else."""
        shutil.copytree(self.template, where)
        where.chmod(0o755)
        for relative in {place.relative for place in self.places}:
            text = None
            for place in sorted((p for p in self.places if p.relative == relative), key=lambda p: -p.start):
                text = place.source if text is None else text
                text = text[: place.start] + bodies.get(place.name, place.answer) + text[place.end :]
            (where / relative).write_text(text, encoding=place.encoding, newline="")


class _place:
    """Where the body of an exercise stands in its file, and the answer laid out for that place."""

    def __init__(self, root: Path, ex):
        self.name, self.relative = ex.name, ex.where.rsplit(":", 1)[0]
        source = Source.read(root / self.relative, self.relative)
        old = body_of(source, source.find(ex.qualname))
        if old.inline:
            raise SourceError(f"{ex.where}: give the body of {ex.qualname} lines of its own first")
        answers = self.relative.replace("engine/", "solutions/", 1)
        if not (root / answers).exists():
            raise SourceError(f"{ex.where}: grading needs the answer of {ex.qualname} in {answers}")
        answer = Source.read(root / answers, answers)
        self.source, self.encoding, self.start, self.end = source.text, source.encoding, old.start, old.end
        self.answer = lay_out(body_of(answer, answer.find(ex.qualname)), old)


class Worker:
    """A process that runs one job at a time; started again when it was lost."""

    def __init__(self, bench: Bench, number: int):
        self.bench, self.number, self.count = bench, number, 0
        self.process, self.closed = None, False
        self.lock = threading.Lock()
        self.start()

    def start(self) -> None:
        root = self.bench.catalog.root
        home = self.bench.folder / f"home{self.number}"
        home.mkdir(mode=0o700, exist_ok=True)
        files = [str(path) for path in sorted((self.bench.template / "tests").rglob("*.py"))]
        files += [str(path) for path in sorted((self.bench.template / "engine").rglob("*.py"))]
        command = [sys.executable, "-m", "engine.exercises.grading.arena", str(self.number)]
        self.process = subprocess.Popen(
            [*command, ",".join(self.bench.layers), *files], cwd=root, env=environment(str(home)), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def run(self, bodies: dict[str, str], tests: dict[str, float] | None, profile: bool = False) -> dict:
        """Run tests, with a limit of seconds for each (None: all of the chapters), on a tree with these bodies."""
        with self.lock:
            self.count += 1
            folder = self.bench.folder / f"run{self.number}-{self.count}"
            try:
                return self._run(folder, bodies, tests, profile)
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def _run(self, folder: Path, bodies, tests, profile) -> dict:
        folder.mkdir(mode=0o700)
        tree, home = folder / "tree", folder / "home"
        self.bench.tree(bodies, tree)
        home.mkdir(mode=0o700)
        if "user" in self.bench.layers:
            for path in (folder, home):
                os.chown(path, sandbox.FIRST_UID + self.number, -1)
        cpu = WHOLE if tests is None else START + sum(tests.values())
        job = {
            "may_change": None if tests is None else self.bench.may_change,
            **{"tree": str(tree), "tmp": str(home), "root": str(self.bench.catalog.root), "tests": tests},
            **{"files": self.bench.files, "seed": self.bench.seed, "env": environment(str(home)), "profile": profile},
            **{"cpu": cpu, "wall": 3 * cpu + START, "memory": self.bench.memory, "exercises": self.bench.names},
        }
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
            if line:
                return json.loads(line)
        except (OSError, ValueError):  # its end of a pipe, or ours, is closed
            pass
        if self.closed:
            raise ValueError("grading was stopped")
        self.stop()
        self.start()
        lost = "ended the process that was to watch it"
        return {"records": {}, "ended": lost, "running": "", "inside": "", "forged": 0, "errors": [], "output": ""}

    def close(self) -> None:
        """For good: whoever waits for a run gets an error."""
        self.closed = True
        self.stop()

    def stop(self) -> None:
        self.process.kill()  # and with it, by the kernel, all of its forks
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            stream.close()


def limits_of(seconds: dict[str, float]) -> dict[str, float]:
    """Seconds that each test may take, from what it took with the reference."""
    return {test: round(max(LEAST, FACTOR * took), 1) for test, took in seconds.items()}
