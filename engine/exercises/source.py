"""Reading Python source without importing it: where functions are, what their bodies are, what is a stub.

Offsets are characters of the decoded text, newlines untouched, so that an edit changes nothing but what it means to.
"""

import ast
import bisect
import os
import re
import shutil
import tempfile
import tokenize
import warnings
from pathlib import Path

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_NEWLINE = re.compile(r"\r\n|\r|\n")  # what Python's own tokenizer counts; str.splitlines also splits at form feeds


class SourceError(ValueError):
    """A file that cannot be read or edited; the message is one line and starts with file:line."""


class Source:
    """The text of a Python file, its syntax tree, and the way from tree positions to character offsets."""

    def __init__(self, text: str, where: str = "<text>", encoding: str = "utf-8"):
        self.text, self.where, self.encoding = text, where, encoding
        self.starts = [0, *(m.end() for m in _NEWLINE.finditer(text))]
        try:
            with warnings.catch_warnings(action="ignore"):
                self.tree = ast.parse(text)
                compile(self.tree, where, "exec", dont_inherit=True)  # parsing alone accepts `def f(a, a)`
        except SyntaxError as error:
            raise SourceError(f"{where}:{error.lineno or 1}: {error.msg}") from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise SourceError(f"{where}:1: cannot be parsed: {error}") from None

    @classmethod
    def read(cls, path: Path, where: str | None = None) -> "Source":
        where = where or str(path)
        try:
            with open(path, "rb") as file:
                encoding, _ = tokenize.detect_encoding(file.readline)
                file.seek(0)
                text = file.read().decode(encoding)
        except SyntaxError as error:
            raise SourceError(f"{where}:1: {error.msg or error}") from None
        except UnicodeDecodeError as error:
            line = error.object[: error.start].count(b"\n") + 1
            raise SourceError(f"{where}:{line}: not valid {error.encoding}") from None
        return cls(text, where, encoding)

    def offset(self, line: int, column: int) -> int:
        """Character offset of a tree position: a line from 1 and a column counted in UTF-8 bytes."""
        start = self.starts[line - 1]
        return start + len(self.text[start : self.line_end(line)].encode()[:column].decode())

    def start(self, node: ast.AST) -> int:
        return self.offset(node.lineno, node.col_offset)

    def end(self, node: ast.AST) -> int:
        return self.offset(node.end_lineno, node.end_col_offset)

    def line_of(self, offset: int) -> int:
        return bisect.bisect_right(self.starts, offset)

    def line_end(self, line: int) -> int:
        """Offset just before the newline of that line (or the end of the text)."""
        if line >= len(self.starts):
            return len(self.text)
        end = self.starts[line]
        return end - (2 if self.text[end - 2 : end] == "\r\n" else 1)

    def line(self, line: int) -> str:
        return self.text[self.starts[line - 1] : self.line_end(line)]

    def newline(self, line: int) -> str:
        """The newline in use around that line."""
        for near in (line, line - 1, 1):
            if 0 < near < len(self.starts):
                return self.text[self.line_end(near) : self.starts[near]]
        return "\n"

    def find(self, qualname: str) -> FunctionNode:
        """The function of that qualified name; of several definitions the last, which is the one that counts."""
        found = [node for name, node in functions(self.tree) if name == qualname]
        if not found:
            raise SourceError(f"{self.where}:1: no function {qualname}")
        return found[-1]


def functions(tree: ast.AST, prefix: str = ""):
    """(qualified name, node) of functions and methods, also under `if` and `try`; not of functions inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, FunctionNode):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from functions(node, prefix)


def docstring(function: FunctionNode) -> ast.stmt | None:
    first = function.body[0]
    value = first.value if isinstance(first, ast.Expr) else None
    return first if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def body(function: FunctionNode) -> list[ast.stmt]:
    """The statements after the docstring."""
    return function.body[1:] if docstring(function) else function.body


def is_stub(function: FunctionNode) -> bool:
    """True while the whole body is `raise NotImplementedError`; the same question as registry.is_stub, on source."""
    statements = body(function)
    if len(statements) != 1 or not isinstance(statements[0], ast.Raise) or statements[0].cause:
        return False
    return isinstance(statements[0].exc, ast.Name) and statements[0].exc.id == "NotImplementedError"


def same_body(one: FunctionNode, other: FunctionNode) -> bool:
    """Equal statements after the docstring, whatever their comments and layout."""
    return [ast.dump(s) for s in body(one)] == [ast.dump(s) for s in body(other)]


def write_atomically(path: Path, text: str, encoding: str = "utf-8") -> None:
    """Replace a file in one step, its permissions kept; a crash leaves the old one or the new one."""
    path = path.resolve()
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode(encoding))
        if path.exists():
            shutil.copymode(path, temporary)
        else:
            os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
