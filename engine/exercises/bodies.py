"""Function bodies as text: where one begins and ends, and how to lay it out inside another function."""

import ast
import re
from dataclasses import dataclass

from engine.exercises.source import FunctionNode, Source, SourceError, body, docstring, functions, same_body

_STRINGS = tuple(getattr(ast, name) for name in ("JoinedStr", "TemplateStr") if hasattr(ast, name))


@dataclass
class Body:
    """The text [start, end) of a body: its comments before the first statement and after the last one belong to it.

    indent: the white space before the first statement. inline: it stands on the line of the signature or docstring.
    lead: how many characters of comments stand before the first statement.
    """

    source: Source
    function: FunctionNode
    start: int
    end: int
    indent: str
    inline: bool
    lead: int

    @property
    def text(self) -> str:
        return self.source.text[self.start : self.end]


def body_of(source: Source, function: FunctionNode) -> Body:
    statements = body(function)
    first, last = source.start(statements[0]), statements[-1].end_lineno
    head = source.end(docstring(function)) if docstring(function) else _colon(source, function)
    between = source.text[head:first]
    if not re.search(r"[\r\n]", between):
        return Body(source, function, first, source.end(statements[-1]), _indent_below(source, function), True, 0)
    start, indent = first, _white(source.line(statements[0].lineno))
    for line in range(source.line_of(head) + 1, statements[0].lineno):
        if source.line(line).strip():
            start = source.starts[line - 1] + len(_white(source.line(line)))
            break
    for line in range(last + 1, len(source.starts) + 1):
        text = source.line(line)
        if text.strip() and not (text.startswith(indent) and text.lstrip().startswith("#")):
            break
        last = line if text.strip() else last
    end = source.starts[last - 1] + len(source.line(last).rstrip())
    return Body(source, function, start, end, indent, False, first - start)


def replace_body(source: str, qualname: str, new_function_source: str) -> str:
    """`source` with the body of one function taken from another text; decorators, signature and docstring stay.

    new_function_source: a module that has `qualname`, or just the function (for a method also without its class,
    indented or not). Its docstring is dropped, comments in its body are kept, the indentation is adapted.
    Raises SourceError when either text does not parse or lacks the function.
    """
    target = Source(source, qualname)
    function, new = target.find(qualname), _donor(new_function_source, qualname)
    old = body_of(target, function)
    return checked(put(old, old.start, old.end, lay_out(new, old)), qualname, new.function)


def put(old: Body, start: int, end: int, text: str) -> str:
    """The file with [start, end) of a body replaced; an inline body gets a line of its own."""
    source = old.source
    before = source.text[:start]
    if old.inline:
        before = before.rstrip(" \t;") + source.newline(old.function.lineno) + old.indent
    return before + text + source.text[end:]


def lay_out(new: Body, at: Body, length: int | None = None) -> str:
    """The text of a body (or the first `length` characters of it) with the indentation and newlines of another place.

    Lines inside multi-line strings keep their indentation: there it is content.
    """
    first = new.source.line_of(new.start)
    within = _lines_within_strings(new.function)
    newline = at.source.newline(at.function.lineno)
    lines = re.split(r"\r\n|\r|\n", new.text if length is None else new.text[:length])
    for i, line in enumerate(lines[1:], 1):
        if first + i not in within and line.strip(" \t") and line.startswith(new.indent):
            lines[i] = at.indent + line[len(new.indent) :]
    if length is not None and len(lines) > 1:
        lines[-1] = at.indent  # the cut is just before the first statement
    return newline.join(lines)


def checked(text: str, qualname: str, donor: FunctionNode) -> str:
    """The edited text, once it is certain that it parses and that the function now has the donor's body."""
    if not same_body(Source(text, qualname).find(qualname), donor):
        raise SourceError(f"{qualname}: its new body does not survive the move; layout too unusual")
    return text


def _donor(text: str, qualname: str) -> Body:
    first = next((line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    source = Source(f"if True:\n{text}" if first[:1] in (" ", "\t") else text, f"new {qualname}")
    names = {name for name, _ in functions(source.tree)}
    last = qualname.rsplit(".", 1)[-1]
    return body_of(source, source.find(last if qualname not in names and last in names else qualname))


def _colon(source: Source, function: FunctionNode) -> int:
    """Offset after the colon that ends the signature."""
    nodes = [n for part in (function.args, *getattr(function, "type_params", ())) for n in ast.walk(part)]
    nodes += ast.walk(function.returns) if function.returns else []
    ends = [source.end(n) for n in nodes if hasattr(n, "end_lineno")]
    at = max(ends, default=source.start(function))
    while source.text[at] != ":":
        at = source.line_end(source.line_of(at)) + 1 if source.text[at] == "#" else at + 1
    return at + 1


def _indent_below(source: Source, function: FunctionNode) -> str:
    """The indentation that an inline body would have on a line of its own."""
    doc = docstring(function)
    if doc and not source.text[source.starts[doc.lineno - 1] : source.start(doc)].strip():
        return _white(source.line(doc.lineno))
    return _white(source.line(function.lineno)) + "    "


def _white(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _lines_within_strings(function: FunctionNode) -> set[int]:
    within = set()
    for node in ast.walk(function):
        if isinstance(node, _STRINGS) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)):
            within.update(range(node.lineno + 1, node.end_lineno + 1))
    return within
