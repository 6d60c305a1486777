"""A small tree with exercises of its own, without torch: what the tests of the mechanism run on."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from engine.exercises.source import Source
from tests.sections import ROOT

FILES = {
    "pyproject.toml": '[tool.pytest.ini_options]\ntestpaths = ["tests"]\naddopts = "-p no:cacheprovider"\n',
    "hypothesis.py": "raise ImportError('not needed here, and slow to import')\n",
    "engine/__init__.py": "",
    "engine/milestones/__init__.py": "",
    "engine/milestones/core.py": '''
import os

from engine.words import Index


def main(args):
    if args.requests < 1:
        raise ValueError(f"--requests {args.requests}: at least 1")
    print(os.environ["IMPL"], os.environ["BORROW"], args.requests, Index().words("a a"))
    return 0
''',
    "engine/words.py": '''
from engine.exercises import exercise, fill


@exercise(7, "Words")
def split(text, keep_case=False):
    """The words of a text, list of str; lower case unless keep_case.  (Your engine: Chapter 7)"""
    raise NotImplementedError


@exercise(7, "Counting")
def count(words):
    """How often each word occurs, dict.  (Your engine: Chapter 7)"""
    raise NotImplementedError


class Index:
    def __init__(self):
        self.counts = {}

    def words(self, text):
        """Scaffolding: not an exercise."""
        return split(text)

    @exercise(7, "The index")
    def add(self, text, weight=1, *, scale=1):
        """Add weight * scale for each occurrence of each word of a text.  (Your engine: Chapter 7)"""
        raise NotImplementedError

    @exercise(7, "The index")
    def top(self):
        """The word with the largest count.  (Your engine: Chapter 7)"""
        raise NotImplementedError


fill(__name__)
''',
    "engine/more.py": '''
from engine.exercises import exercise, fill
from engine.words import split


@exercise(12, "Shouting")
def shout(text):
    """The words in capitals.  (Your engine: Chapter 12)"""
    raise NotImplementedError


fill(__name__)
''',
    "engine/hints.md": "# Hints\n\n"
    + "".join(
        f"## {name}\n\n1. First of {name},\n   on two lines.\n2. Second of {name}.\n3. Pitfall of {name}.\n\n"
        for name in ("split", "`count`", "Index.add", "Index.top", "more.shout")
    ),
    "solutions/__init__.py": "",
    "solutions/words.py": '''
from engine.words import count, split


def split(text, keep_case=False):
    # The answer opens with a comment.
    return text.split() if keep_case else text.lower().split()


def count(words):
    counts = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    return counts


class Index:
    def add(self, text, weight=1, *, scale=1):
        for word, n in count(split(text)).items():
            self.counts[word] = self.counts.get(word, 0) + n * weight * scale

    def top(self):
        return max(self.counts, key=self.counts.get)
''',
    "solutions/more.py": '''
from engine.words import split


def shout(text):
    return [word.upper() for word in split(text)]
''',
    "chapters/07-words.md": "# Words\n\n## Words\n\n```\n## Not a heading\n```\n\n## The index\n\n## Counting\n",
    "tests/test_ch07_words.py": '''
from engine.words import Index, count, split
from tests.grading import expect_equal, grades


@grades(split)
def test_split():
    expect_equal(split("a B"), ["a", "b"], what="word {i}")
    expect_equal(split("a B", keep_case=True), ["a", "B"], what="word {i}")


@grades(count)
def test_count():
    expect_equal(count(["x"]), {"x": 1}, what="counts")


@grades(Index.add)
def test_weights():
    index = Index()
    index.add("q")
    index.add("r", 2, scale=3)
    expect_equal(index.counts, {"q": 1, "r": 6}, what="counts")


@grades(Index.top, Index.add)
def test_top():
    index = Index()
    index.add("x y y y z z")
    expect_equal(index.top(), "y", what="top word")


@grades(Index.top)
def test_scaffolding():
    expect_equal(Index().words("a"), ["a"], what="words")
''',
}


OPTIONS = "engine/milestones/options.py"  # run.py needs it
QUICK = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def toy_tree(folder: Path) -> Path:
    """The machinery of the real tree around the exercises above: engine/exercises, the graders' helpers and run.py."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    no_caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "engine/exercises", folder / "engine/exercises", ignore=no_caches)
    for path in [*ROOT.glob("tests/*.py"), *map(ROOT.joinpath, ("run.py", "requirements.txt", OPTIONS))]:
        if not path.name.startswith("test_"):
            shutil.copy(path, folder / path.relative_to(ROOT))
    return folder


def write(tree: Path, qualname: str, body: str, file: str = "engine/words.py") -> None:
    """A student writes one exercise: `body` in place of what the function holds now."""
    from engine.exercises.bodies import body_of, put

    source = Source((tree / file).read_text(encoding="utf-8"))
    old = body_of(source, source.find(qualname))
    lines = body.splitlines()
    text = "\n".join([lines[0], *(old.indent + line for line in lines[1:])])
    (tree / file).write_text(put(old, old.start, old.end, text), encoding="utf-8")


def python(tree: Path, *arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess:
    """This interpreter in that tree, without what this process decided about IMPL and the like."""
    ours = {k: v for k, v in os.environ.items() if k not in ("IMPL", "BORROW", "GRADE_SEED", "PYTEST_ADDOPTS")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd or tree,
        env={**ours, **QUICK, **env},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=300,
    )


def run_py(tree: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    return python(tree, str(tree / "run.py"), *arguments, **env)


def pytest_in(tree: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    return python(tree, "-m", "pytest", "-q", *arguments, **env)


def one_line(done: subprocess.CompletedProcess) -> str:
    """What a refused command says: status 2, one line on stderr, nothing on stdout."""
    assert done.returncode == 2, done
    assert done.stdout == "" and done.stderr.count("\n") == 1, done
    return done.stderr
