"""What is taken from a folder or a zip: the bodies of exercises, and nothing by a trick."""

import os
import stat
import zipfile

import pytest

from engine.exercises.catalog import Catalog
from engine.exercises.grading import submissions
from engine.exercises.grading.reading import read
from engine.exercises.grading.submissions import Unreadable, find, open_tree
from tests.classroom import Classroom, bomb, links, lying_bomb
from tests.toy import toy_tree, write

WORDS, MORE = "engine/words.py", "engine/more.py"


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    return toy_tree(tmp_path_factory.mktemp("book"))


@pytest.fixture
def room(book, tmp_path):
    return Classroom(book, 7, tmp_path / "class")


def found(book, path, chapter=7):
    catalog = Catalog(book)
    return {
        catalog.short(catalog.one(n)): e for n, e in read(catalog, catalog.of_chapter(chapter), path).exercises.items()
    }


def states(book, path):
    return {name: entry.state for name, entry in found(book, path).items()}


def pack(path, entries):
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in entries.items():
            archive.writestr(name, text)
    return path


@pytest.mark.parametrize("form", ["folder", "one level down", "zip", "zip of a folder", "zip in a folder"])
def test_a_tree_in_any_packing(book, room, form):
    answers = room.answers()
    if form in ("folder", "one level down"):
        room.student("a", answers, {}, prefix="repo-main" if form != "folder" else "")
        path = room.folder / "a"
    else:
        room.zipped("a", answers, {}, prefix="repo-main/" if form == "zip of a folder" else "")
        path = room.folder / "a.zip"
        if form == "zip in a folder":
            path = room.folder / "a"
            path.mkdir()
            (room.folder / "a.zip").rename(path / "handed in.zip")
    assert set(states(book, path).values()) == {"written"}


def test_stubs_are_not_written(book, room):
    room.student("a", {}, {})
    assert set(states(book, room.folder / "a").values()) == {"not written"}
    assert "not written yet" in found(book, room.folder / "a")["split"].message


def test_submissions_are_the_folders_and_zips(tmp_path):
    for name in ("b", "a", ".hidden", "__MACOSX", "results"):
        (tmp_path / name).mkdir()
    (tmp_path / "a.zip").touch()
    (tmp_path / "list.csv").touch()
    assert list(find(tmp_path, leave_out=tmp_path / "results")) == ["a", "a.zip", "b"]
    with pytest.raises(Unreadable, match="no submissions"):
        find(tmp_path / "b")
    (tmp_path / "b/engine").mkdir()
    assert find(tmp_path / "b") == {"b": tmp_path / "b"}


def test_links_and_paths_outside(book, room):
    room.zipped("a", room.answers(), {}, change=links(WORDS))
    reading = read(Catalog(book), Catalog(book).of_chapter(7), room.folder / "a.zip")
    assert {e.message for e in reading.exercises.values()} == {f"{WORDS}: a symbolic link"}
    assert "'../../engine/words.py'" in reading.notes[0] and "'/tmp/taken.py'" in reading.notes[0]


def test_links_in_folders(book, room, tmp_path):
    for name in ("file", "folder"):
        room.student(name, room.answers(), {})
    target = room.folder / "file" / WORDS
    target.rename(tmp_path / "elsewhere.py")
    target.symlink_to(tmp_path / "elsewhere.py")
    (room.folder / "folder/engine").rename(tmp_path / "engine")
    (room.folder / "folder/engine").symlink_to(tmp_path / "engine")
    for name in ("file", "folder"):
        assert {e.message for e in found(book, room.folder / name).values()} == {f"{WORDS}: a symbolic link"}
    (room.folder / "whole").symlink_to(room.folder / "file")
    assert "symbolic link" in found(book, room.folder / "whole")["split"].message


def test_a_pipe_does_not_make_us_wait(book, room):
    room.student("a", room.answers(), {})
    (room.folder / "a" / WORDS).unlink()
    os.mkfifo(room.folder / "a" / WORDS)
    assert "not a regular file" in found(book, room.folder / "a")["split"].message


@pytest.mark.parametrize("change", [bomb, lying_bomb])
def test_a_bomb_is_read_to_the_limit(book, room, change):
    room.zipped("a", room.answers(), {}, change=change(WORDS))
    assert (room.folder / "a.zip").stat().st_size < 1 << 20
    message = found(book, room.folder / "a.zip")["split"].message
    assert f"{WORDS} is larger than 1024 KiB" == message or f"{WORDS} cannot be unpacked" in message


def test_damaged_archives(book, room, tmp_path):
    room.zipped("a", room.answers(), {})
    data = bytearray((room.folder / "a.zip").read_bytes())
    for name, text in (("cut", data[: len(data) // 2]), ("text", b"hello"), ("empty", b"")):
        (tmp_path / f"{name}.zip").write_bytes(text)
        assert "the zip cannot be opened" in found(book, tmp_path / f"{name}.zip")["split"].message
    at = data.index(b"words.py") + 100
    data[at : at + 20] = bytes(20)
    (tmp_path / "flipped.zip").write_bytes(data)
    assert f"{WORDS} cannot be unpacked" in found(book, tmp_path / "flipped.zip")["split"].message


def test_too_many_entries(monkeypatch, tmp_path):
    monkeypatch.setattr(submissions, "MAX_ENTRIES", 3)
    with pytest.raises(Unreadable, match="4 entries"):
        open_tree(pack(tmp_path / "a.zip", {f"engine/{i}.py": "" for i in range(4)}))


def test_which_tree_is_meant(tmp_path):
    with pytest.raises(Unreadable, match="no engine/ folder"):
        open_tree(pack(tmp_path / "a.zip", {"words.py": ""}))
    with pytest.raises(Unreadable, match="2 trees"):
        open_tree(pack(tmp_path / "b.zip", {"x/engine/a.py": "", "y/engine/a.py": ""}))
    assert open_tree(pack(tmp_path / "c.zip", {"x/engine/a.py": "1", "__MACOSX/engine/a.py": ""})).read("engine/a.py")


def test_a_name_twice_is_nobodys_choice(tmp_path):
    with pytest.warns(UserWarning), zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for text in ("1", "2"):
            archive.writestr("engine/a.py", text)
    with pytest.raises(Unreadable, match="2 times"):
        open_tree(tmp_path / "a.zip").read("engine/a.py")


@pytest.mark.parametrize(
    "text, says",
    [
        ("def split(:\n", "engine/words.py:1: invalid syntax"),
        ("x = '\n", "engine/words.py:1: unterminated"),
        ("(" * 300 + ")" * 300, "too many nested"),
        ("x = " + "-" * 200_000 + "1", "cannot be"),
        ("\0", "null bytes"),
        ("# coding: nonsense\n", "unknown encoding"),
        ("def other():\n    pass\n", "no function split"),
        ("class split:\n    pass\n", "no function split"),
    ],
    ids=["syntax", "string", "parentheses", "unary", "null", "encoding", "missing", "class"],
)
def test_files_that_cannot_be_read(book, tmp_path, text, says):
    """One file is lost, its neighbour is not."""
    catalog = Catalog(book)
    room = Classroom(book, 12, tmp_path / "class")
    room.student("a", room.answers(), {})
    (room.folder / "a" / WORDS).write_text(text)
    reading = read(catalog, catalog.exercises, room.folder / "a")
    entry = reading.exercises["engine.words.split"]
    assert entry.state == "refused" and says in entry.message, entry
    assert reading.exercises["engine.more.shout"].state == "written"


def test_a_missing_file(book, tmp_path):
    (tmp_path / "engine").mkdir()
    assert found(book, tmp_path)["count"].message == f"{WORDS} is not in the submission"


def test_only_the_body_is_taken(book, room):
    """Neither the signature nor decorators, defaults, helpers or code at the top of the module."""
    room.student("a", {}, {})
    write(room.folder / "a", "split", "return helper(text, Counter)")
    path = room.folder / "a" / WORDS
    text = path.read_text().replace("def split(text, keep_case=False)", "@evil\ndef split(text, keep_case=print(1))")
    path.write_text("from collections import Counter\nraise SystemExit\n\ndef helper(text): pass\n" + text)
    entry = found(book, room.folder / "a")["split"]
    assert (entry.state, entry.text) == ("written", "return helper(text, Counter)")
    assert entry.notes[0] == "the signature was changed; the body ran as split(text, keep_case=False)"
    assert "uses helper, Counter, unknown in the book's engine/words.py" in entry.notes[1]


def test_bodies_that_are_the_reference(book, room):
    other = "def split(t):\n    'Mine.'\n    # me\n    return (text.split() if keep_case\n  else text.lower().split())"
    mine = "def count(words):\n    n: dict = {}\n    for w in words:\n        n[w] = n.get(w, 0) + 1\n    return n\n"
    room.student("a", {"split": other, "count": mine, "Index.top": "def top(self):\n    return 'y'\n"}, {})
    flags = {name: entry.flags for name, entry in found(book, room.folder / "a").items()}
    assert flags == {"split": ["equal to the reference"], "count": ["equal to the reference"]} | dict.fromkeys(
        ("Index.add", "Index.top"), []
    )


def test_entries_that_are_links_by_mode_only(tmp_path):
    entry = zipfile.ZipInfo("engine/a.py")
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(entry, "x = 1")
    with pytest.raises(Unreadable, match="symbolic link"):
        open_tree(tmp_path / "a.zip").read("engine/a.py")
