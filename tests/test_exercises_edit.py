"""`run.py solve` and `reset` change one body and nothing else."""

import shutil
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.exercises import splice
from engine.exercises.catalog import Catalog, LookupFailed
from engine.exercises.source import Source, SourceError, same_body
from tests.sections import ROOT
from tests.toy import run_py, toy_tree, write


def contents(tree: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in tree.rglob("*") if p.is_file() and ".backup" not in p.parts}


# The exercises of this tree


@pytest.fixture(scope="module")
def real_tree(tmp_path_factory):
    tree = tmp_path_factory.mktemp("real")
    for folder in ("engine", "solutions", "chapters"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__", "assets"))
    catalog = Catalog(tree)
    for ex in catalog.exercises:
        if ex.written:  # by a student, in the tree that was copied
            splice.reset(catalog, ex.name, force=True)
    return catalog


@pytest.mark.parametrize("name", [ex.name for ex in Catalog(ROOT).exercises])
def test_every_exercise_round_trips(real_tree, name):
    root, before = real_tree.root, contents(real_tree.root)
    assert len(splice.solve(real_tree, name).done) == 1
    ex = real_tree.one(name)
    path = root / "solutions" / Path(ex.path).relative_to(root / "engine")
    assert same_body(Source.read(Path(ex.path)).find(ex.qualname), Source.read(path).find(ex.qualname))
    changed = {p for p, text in contents(root).items() if text != before[p]}
    assert changed == {Path(ex.path)}
    assert len(splice.reset(real_tree, name).done) == 1
    assert contents(root) == before


def test_all_chapters_together_round_trip(real_tree):
    root, before = real_tree.root, contents(real_tree.root)
    for chapter in real_tree.chapters:
        splice.solve(real_tree, str(chapter))
    assert all(ex.written for ex in Catalog(root).exercises)
    for chapter in reversed(real_tree.chapters):
        splice.reset(real_tree, f"{chapter:02d}")
    assert contents(root) == before


# Unusual files

ANSWERS = [
    "    return x",
    "    # opens with a comment\n\n    # and another\n    y = x\n    return y  # ends with one",
    "    for i in range(3):\n        # inside\n        if i:\n            yield i",
    '    text = """\n  less indented\nnot at all\n"""\n    return text',
    "    text = f'''\n{x}\n      more {x!r}'''\n\n    return text",
    "    def inner(a):\n        return (\n  a,  # closer to the margin\n)\n    return inner(x)\n    # trailing",
    "    s = 'back\\\nslash'\n\n\n    return s",
    "    return 'ümlaut', \"\u2028\", x  # ünïcode",
    "    if x:\n        return 1\n    else:\n        return 2",
]
DOCS = [None, '"""One line."""', '"""Several\n\n    lines: ünïcode.\n    """', "'concat' 'enated'", 'r"""raw \\d"""']
SIGNATURES = [
    "def f(x):",
    "def f(x, *, y: dict = {'a': 1}) -> dict[str, int]:  # f(x): a comment: with colons",
    "def f(  # comment: here\n    x,  # and: there\n    y=lambda: 0,\n    *rest,\n):",
    "def f(x=':', y=[1, 2][0:1]) -> (\n    'int'\n):",
]


@st.composite
def files(draw):
    """An engine file with one stub in an unusual layout, and the file of its answer."""
    unit = draw(st.sampled_from(["    ", "  ", "\t"]))
    method = draw(st.booleans())
    doc, signature = draw(st.sampled_from(DOCS)), draw(st.sampled_from(SIGNATURES))
    lines = ['@exercise(7, "Words")', *signature.split("\n")]
    body = doc.split("\n") if doc else []
    body += draw(st.sampled_from([[], ["# yours to write"], ["", "# two", "", "# comments", ""]]))
    body += ["raise NotImplementedError" + draw(st.sampled_from(["", "  # write this", "   "]))]
    body += draw(st.sampled_from([[], ["# after it"], ["", "    # deeper, after a blank line"]]))
    level = unit if method else ""
    lines += [unit + line if line else "" for line in body]
    lines = [level + line if line else "" for line in lines]
    head = ["from engine.exercises import exercise, fill", "", draw(st.sampled_from(["X = '''\f\n'''", "", "é = 1"]))]
    if method:
        head += ["class A:"]
    tail = draw(st.sampled_from([[], ["", "# a comment of the module"], ["", "def g():", "    return f"]]))
    newline = draw(st.sampled_from(["\n", "\r\n", "\r"]))
    engine = newline.join("\n".join([*head, *lines, *tail]).split("\n")) + draw(st.sampled_from(["", newline]))
    answer = f"{signature}\n{draw(st.sampled_from(ANSWERS))}\n"
    if method:
        answer = "class A:\n" + textwrap.indent(answer, "    ", lambda line: not line.startswith("not at all"))
    bom = draw(st.sampled_from([b"", b"\xef\xbb\xbf"]))
    return bom + engine.encode(), answer, "A.f" if method else "f"


@given(files())
def test_solve_then_reset_is_byte_for_byte(tmp_path_factory, case):
    engine, answer, name = case
    tree = tmp_path_factory.mktemp("odd")
    for folder in ("engine", "solutions"):
        (tree / folder).mkdir()
    path = tree / "engine/odd.py"
    path.write_bytes(engine)
    (tree / "solutions/odd.py").write_bytes(answer.encode())
    assert splice.solve(Catalog(tree), name).done
    solved = Source.read(path)
    assert same_body(solved.find(name), Source(answer).find(name))
    assert path.read_bytes().startswith(b"\xef\xbb\xbf") == engine.startswith(b"\xef\xbb\xbf")
    if b"\n" not in engine:
        assert b"\n" not in path.read_bytes()
    assert splice.solve(Catalog(tree), name).unchanged
    assert splice.reset(Catalog(tree), name).done
    assert path.read_bytes() == engine
    assert splice.reset(Catalog(tree), name).unchanged


def one_function(tmp_path, engine: str, answer: str = "def f(x):\n    return x\n") -> Catalog:
    for folder in ("engine", "solutions"):
        (tmp_path / folder).mkdir()
    (tmp_path / "engine/odd.py").write_text('@exercise(7, "Words")\n' + engine)
    (tmp_path / "solutions/odd.py").write_text(answer)
    return Catalog(tmp_path)


def test_a_stub_on_one_line_is_refused_because_it_could_not_come_back(tmp_path):
    catalog = one_function(tmp_path, "def f(x): raise NotImplementedError\n")
    with pytest.raises(SourceError, match=r"engine/odd\.py:2: give the raise of f a line of its own"):
        splice.solve(catalog, "f")


def test_an_answer_written_in_another_layout_can_be_reset(tmp_path):
    catalog = one_function(tmp_path, "def f(x):\n    '''Doc.'''\n    return (x)  # mine\n    # and mine\n\n\nX = 1\n")
    assert splice.reset(catalog, "f").done
    expected = '@exercise(7, "Words")\ndef f(x):\n    \'\'\'Doc.\'\'\'\n    raise NotImplementedError\n\n\nX = 1\n'
    assert (tmp_path / "engine/odd.py").read_text() == expected


# Protection of what somebody wrote


def test_code_that_is_not_the_answer_is_kept_unless_forced(tmp_path):
    tree = toy_tree(tmp_path)
    write(tree, "count", "# my idea\nreturn {w: words.count(w) for w in words}\n# a note")
    before = contents(tree)
    for command in ("solve", "reset"):
        refused = run_py(tree, command, "count")
        assert refused.returncode == 1 and "--force" in refused.stderr and refused.stdout == ""
        assert contents(tree) == before
    forced = run_py(tree, "reset", "count", "--force")
    assert forced.returncode == 0
    text = (tree / "engine/words.py").read_text()
    assert "my idea" not in text and "a note" not in text
    backup = tree / forced.stdout.split("the files as they were: ")[1].strip()
    assert (backup / "engine/words.py").read_bytes() == before[tree / "engine/words.py"]
    assert not Catalog(tree).one("count").written


def test_a_chapter_is_solved_around_what_somebody_wrote(tmp_path):
    tree = toy_tree(tmp_path)
    write(tree, "count", "return 'mine'")
    done = run_py(tree, "solve", "7")
    assert done.returncode == 1 and "count: holds code that is not the answer" in done.stderr
    assert all(ex.written for ex in Catalog(tree).of_chapter(7))
    assert "return 'mine'" in (tree / "engine/words.py").read_text()
    assert run_py(tree, "solve", "7", "--force").returncode == 0
    assert "mine" not in (tree / "engine/words.py").read_text()


def test_backups_do_not_overwrite_each_other(tmp_path):
    tree = toy_tree(tmp_path)
    folders = {run(Catalog(tree), "split").backup for run in (splice.solve, splice.reset) * 3}
    assert len(folders) == 6 and all((tree / folder).is_dir() for folder in folders)


@pytest.mark.parametrize("damage", ["def broken(:\n", "x = 'open\n", "def f(a, a): pass\n", "x = '\0'\n"])
def test_a_damaged_file_is_named_and_nothing_is_written(tmp_path, damage):
    tree = toy_tree(tmp_path)
    path = tree / "engine/words.py"
    lines = path.read_text().count("\n")
    path.write_text(path.read_text() + damage)
    before = contents(tree)
    for arguments in (("solve", "7"), ("solve", "split"), ("reset", "7", "--force")):
        done = run_py(tree, *arguments)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
        assert "engine/words.py:1" in done.stderr if "\0" in damage else f"engine/words.py:{lines + 1}" in done.stderr
    assert contents(tree) == before


def test_a_damaged_answer_stops_the_whole_chapter(tmp_path):
    tree = toy_tree(tmp_path)
    (tree / "solutions/words.py").write_text("def split(text):\n  return [\n")
    before = contents(tree)
    with pytest.raises(SourceError, match=r"^solutions/words\.py:2: "):
        splice.solve(Catalog(tree), "7")
    assert contents(tree) == before


def test_without_answers_nothing_is_solved(tmp_path):
    tree = toy_tree(tmp_path)
    (tree / "solutions/words.py").unlink()
    with pytest.raises(SourceError, match="there is no answer for"):
        splice.solve(Catalog(tree), "7")
    write(tree, "split", "return 'mine'")
    assert splice.reset(Catalog(tree), "split").refused


# Names


@pytest.mark.parametrize("name", ["top", "Index.top", "words.Index.top", "engine.words.Index.top"])
def test_any_end_of_a_full_name_will_do(tmp_path, name):
    assert [ex.qualname for ex in Catalog(toy_tree(tmp_path)).lookup(name)] == ["Index.top"]


def test_chapters_are_in_the_order_of_their_sections(tmp_path):
    catalog = Catalog(toy_tree(tmp_path))
    assert [ex.qualname for ex in catalog.lookup("07")] == ["split", "Index.add", "Index.top", "count"]
    assert catalog.link(catalog.one("top")) == "chapters/07-words.md#the-index"
    assert catalog.link(catalog.one("shout")) == 'chapter 12, "Shouting"'


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuont", "no exercise is called 'cuont'; near it: count"),
        ("Index", "near it: Index.add, Index.top"),
        ("op", "near it: Index.top"),
        ("31", "chapter 31 has no exercises; chapters that have: 7, 12"),
        ("words", "near it: split"),
    ],
)
def test_an_unknown_name_gets_a_suggestion(tmp_path, name, message):
    with pytest.raises(LookupFailed, match=message):
        Catalog(toy_tree(tmp_path)).lookup(name)


def test_an_ambiguous_name_lists_the_candidates(tmp_path):
    tree = toy_tree(tmp_path)
    more = tree / "engine/more.py"
    more.write_text(more.read_text().replace("def shout", "def count"))
    catalog = Catalog(tree)
    with pytest.raises(LookupFailed, match="'count' is ambiguous: words.count, more.count"):
        catalog.one("count")
    assert catalog.one("more.count").chapter == 12
