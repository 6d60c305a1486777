"""Opening what was handed in, folders and zips: files are read by name and up to a size, nothing is unpacked.

So an archive's tricks have nothing to work on: a path that leads outside names no file that is asked for, a link is not
followed, and a bomb is read to the limit and no further.
"""

import contextlib
import os
import stat
import zipfile
from pathlib import Path, PurePosixPath

MAX_FILE = 1 << 20  # bytes of one source file
MAX_ARCHIVE = 512 << 20
MAX_ENTRIES = 100_000
SHOWN = 3  # names in a message


class Unreadable(ValueError):
    """A submission, or a file of it, that cannot be used; the message is one line."""


def find(path: Path, leave_out: Path | None = None) -> dict[str, Path]:
    """Submissions by name: the folders and zips in a folder, or the one tree or zip that `path` itself is.

    Raises Unreadable when there is none.
    """
    path = Path(path)
    if not path.exists():
        raise Unreadable(f"{path} does not exist")
    if path.is_file() or (path / "engine").is_dir():
        return {path.resolve().name.removesuffix(".zip") or "submission": path}
    found = [p for p in sorted(path.iterdir()) if not p.name.startswith((".", "__MACOSX"))]
    found = [p for p in found if p.is_dir() or p.suffix.lower() == ".zip"]
    if leave_out is not None:
        found = [p for p in found if p.resolve() != leave_out.resolve()]
    if not found:
        raise Unreadable(f"{path} holds no submissions: neither folders nor .zip files")
    names = [p.stem if p.suffix.lower() == ".zip" else p.name for p in found]
    return {p.name if names.count(name) > 1 else name: p for p, name in zip(found, names, strict=True)}


def open_tree(path: Path) -> "Folder | Archive":
    """The tree of a submission: the folder that holds `engine/`, at the top or one level down; a zip may stand in a
    folder of its own. Raises Unreadable."""
    if path.is_symlink():
        raise Unreadable("is a symbolic link")
    if path.is_file():
        return Archive(path)
    names = [p.name for p in path.iterdir() if not p.name.startswith((".", "__MACOSX"))]
    if "engine" in names:
        return Folder(path)
    trees = [name for name in names if (path / name / "engine").is_dir() and not (path / name).is_symlink()]
    archives = [name for name in names if name.lower().endswith(".zip") and (path / name).is_file()]
    if len(trees) + len(archives) != 1:
        raise Unreadable(_which(trees + archives))
    return Folder(path / trees[0]) if trees else open_tree(path / archives[0])


def _which(found: list[str]) -> str:
    if not found:
        return "there is no engine/ folder in it, at the top or one level down"
    return f"it holds {len(found)} trees, where one is expected: {_some(found)}"


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name[:80]) for name in names[:SHOWN])
    return f"{shown} and {len(names) - SHOWN} more" if len(names) > SHOWN else shown


class Folder:
    def __init__(self, root: Path):
        self.root, self.notes = root, []

    def read(self, relative: str) -> bytes:
        """A regular file below the root, reached without following a link. Raises Unreadable."""
        with contextlib.ExitStack() as opened:
            at = above = None
            parts = [str(self.root), *PurePosixPath(relative).parts]
            for i, part in enumerate(parts):
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO must not make us wait
                try:
                    at = os.open(part, flags | (os.O_DIRECTORY if i < len(parts) - 1 else 0), dir_fd=above)
                except FileNotFoundError:
                    raise Unreadable(f"{relative} is not in the submission") from None
                except OSError as error:
                    link = above is not None and _is_link(part, above)
                    raise Unreadable(f"{relative}: {'a symbolic link' if link else error.strerror}") from None
                opened.callback(os.close, at)
                above = at
            found = os.fstat(at)
            if not stat.S_ISREG(found.st_mode):
                raise Unreadable(f"{relative} is not a regular file")
            with os.fdopen(os.dup(at), "rb") as file:
                return _within(file.read(MAX_FILE + 1), relative)


def _is_link(name: str, folder: int) -> bool:
    return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)


def _within(data: bytes, relative: str) -> bytes:
    if len(data) > MAX_FILE:
        raise Unreadable(f"{relative} is larger than {MAX_FILE >> 10} KiB")
    return data


class Archive:
    def __init__(self, path: Path):
        self.notes: list[str] = []
        size = path.stat().st_size
        if size > MAX_ARCHIVE:
            raise Unreadable(f"the archive has {size >> 20} MiB; at most {MAX_ARCHIVE >> 20} are read")
        try:
            self.zip = zipfile.ZipFile(path)
            entries = self.zip.infolist()
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError) as error:
            raise Unreadable(f"the zip cannot be opened: {error}") from None
        if len(entries) > MAX_ENTRIES:
            raise Unreadable(f"the archive has {len(entries)} entries; at most {MAX_ENTRIES} are read")
        outside = [e.filename for e in entries if not _inside(e.filename)]
        if outside:
            self.notes.append(f"entries that point outside the archive were ignored: {_some(outside)}")
        self.entries: dict[str, list[zipfile.ZipInfo]] = {}
        for entry in entries:
            if _inside(entry.filename) and not entry.is_dir():
                self.entries.setdefault(entry.filename, []).append(entry)
        self.prefix = self._root()

    def _root(self) -> str:
        if any(name.startswith("engine/") for name in self.entries):
            return ""
        tops = {name.split("/")[0] for name in self.entries if name.split("/")[1:2] == ["engine"]}
        tops = sorted(tops - {"__MACOSX"})
        if len(tops) != 1:
            raise Unreadable(_which(tops))
        return f"{tops[0]}/"

    def read(self, relative: str) -> bytes:
        """A regular entry of that name. Raises Unreadable."""
        entries = self.entries.get(self.prefix + relative, [])
        if not entries:
            raise Unreadable(f"{relative} is not in the submission")
        if len(entries) > 1:
            raise Unreadable(f"{relative} is {len(entries)} times in the archive")
        entry = entries[0]
        if stat.S_ISLNK(entry.external_attr >> 16):
            raise Unreadable(f"{relative}: a symbolic link")
        if entry.flag_bits & 1:
            raise Unreadable(f"{relative} is encrypted")
        if entry.file_size > MAX_FILE:
            raise Unreadable(f"{relative} is larger than {MAX_FILE >> 10} KiB")
        try:
            with self.zip.open(entry) as file:
                return _within(file.read(MAX_FILE + 1), relative)
        except Unreadable:
            raise
        except Exception as error:  # each compression method has errors of its own
            raise Unreadable(f"{relative} cannot be unpacked: {' '.join(str(error).split())[:100]}") from None


def _inside(name: str) -> bool:
    parts = name.split("/")
    return not (name.startswith("/") or ".." in parts or "\\" in name or ":" in parts[0] or "\0" in name)
