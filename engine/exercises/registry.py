"""Marks exercises and decides, once, while modules are imported, whose body each of them runs.

The policy comes from two environment variables, set by `--impl` and `--borrow` before the engine is imported:
IMPL=engine (what is written is used, what is still a stub is borrowed), IMPL=solution (every answer),
BORROW=name,name (these are the answer, written or not).

A borrowed body runs in the globals of the engine module: when it calls another exercise by name, it reaches whatever
that name is bound to there, which may be the student's. So one written function is used by the whole engine.
"""

import importlib
import linecache
import os
import sys
from dataclasses import dataclass
from types import FunctionType, ModuleType

EXERCISES: dict[str, "Exercise"] = {}  # by full name, in the order of import


@dataclass
class Exercise:
    chapter: int
    section: str
    module: str
    qualname: str
    path: str
    line: int
    written: bool
    # "yours"; "borrowed": the answer, in place of a stub; "reference": the answer, asked for by IMPL or by name in
    # BORROW, so it may be graded although nothing is written; "missing": a stub without an answer in this tree
    source: str = ""

    @property
    def name(self) -> str:
        """`engine.serve.blocks.BlockManager.free`"""
        return f"{self.module}.{self.qualname}"

    @property
    def where(self) -> str:
        """`engine/serve/blocks.py:41`"""
        return f"{self.module.replace('.', '/')}.py:{self.line}"

    def goes_by(self, name: str) -> bool:
        """True for the full name and for any end of it that starts at a dot: `free`, `BlockManager.free`."""
        return f".{self.name}".endswith(f".{name}")

    @property
    def not_written(self) -> str:
        return f'not written yet   {self.where} {self.qualname}   (chapter {self.chapter}, "{self.section}")'


def impl() -> str:
    value = os.environ.get("IMPL") or "engine"
    if value not in ("engine", "solution"):
        raise ValueError(f"IMPL is {value!r}; it must be 'engine' or 'solution'")
    return value


def exercise(chapter: int, section: str):
    """Mark a function or method as an exercise of a chapter, explained in that section of its text."""

    def mark(stub: FunctionType) -> FunctionType:
        module, path, line = stub.__module__, stub.__code__.co_filename, _def_line(stub.__code__)
        stub.__exercise__ = Exercise(chapter, section, module, stub.__qualname__, path, line, not is_stub(stub))
        return stub

    return mark


def _def_line(code) -> int:
    """A function's code starts at its first decorator; its `def` is what a reader looks for."""
    for line in range(code.co_firstlineno, code.co_firstlineno + 20):
        if linecache.getline(code.co_filename, line).lstrip().startswith(("def ", "async def ")):
            return line
    return code.co_firstlineno


def is_stub(function: FunctionType) -> bool:
    """True while the whole body is `raise NotImplementedError`."""

    def blank():
        raise NotImplementedError

    code = function.__code__
    return code.co_code == blank.__code__.co_code and code.co_names == ("NotImplementedError",)


def fill(module_name: str) -> None:
    """The last line of a module with exercises: rebinds those whose answer is wanted or still missing."""
    module = sys.modules[module_name]
    for owner, name, stub in list(_exercises_in(module)):
        ex = stub.__exercise__
        EXERCISES[ex.name] = ex
        ex.source = _source(ex)
        if ex.source == "yours":
            continue
        answer = _answer(ex)
        if answer is None:
            ex.source = "yours" if ex.written else "missing"
            continue
        setattr(owner, name, _rehome(answer, stub, vars(module)))


def _exercises_in(module: ModuleType):
    classes = (c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__)
    for owner in (module, *classes):
        for name, value in vars(owner).items():
            if getattr(value, "__module__", None) == module.__name__ and hasattr(value, "__exercise__"):
                yield owner, name, value


def _source(ex: Exercise) -> str:
    if impl() == "solution":
        return "reference"
    if any(ex.goes_by(name.strip()) for name in os.environ.get("BORROW", "").split(",") if name.strip()):
        return "reference"
    return "yours" if ex.written else "borrowed"


def _answer(ex: Exercise) -> FunctionType | None:
    """The answer of the same qualified name in the mirror module, None if this tree does not have it."""
    mirror = ex.module.replace("engine", "solutions", 1)
    try:
        module = importlib.import_module(mirror)
        if _find(module, ex.qualname) is None and getattr(module.__spec__, "_initializing", False):
            # The answers were imported first and are waiting for us; a second, whole copy replaces them.
            del sys.modules[mirror]
            module = importlib.import_module(mirror)
    except ModuleNotFoundError as error:
        if error.name not in ("solutions", *(mirror.rsplit(".", i)[0] for i in range(mirror.count(".") + 1))):
            raise
        return None
    return _find(module, ex.qualname)


def _find(owner, qualname: str):
    for part in qualname.split("."):
        owner = vars(owner).get(part) if owner is not None else None
    return owner


def _rehome(answer: FunctionType, stub: FunctionType, engine_globals: dict) -> FunctionType:
    """The answer as a function of the engine module: its names resolve there, its documentation is the stub's."""
    function = FunctionType(answer.__code__, engine_globals, answer.__name__, answer.__defaults__, answer.__closure__)
    function.__kwdefaults__ = answer.__kwdefaults__
    function.__annotations__ = stub.__annotations__
    function.__doc__ = stub.__doc__
    function.__module__, function.__qualname__ = stub.__module__, stub.__qualname__
    function.__exercise__ = stub.__exercise__
    return function


def who_wrote() -> str:
    """One line on whose code runs, over the modules imported so far."""
    sources = [ex.source for ex in EXERCISES.values()]
    total, missing = len(sources), sources.count("missing")
    if impl() == "solution":
        if sources.count("reference") == total:
            return f"impl=solution: all {total} exercises are the reference answers"
        parts = [f"{sources.count('reference')} of {total} exercises are the reference answers"]
        parts += [f"{yours} without an answer here are yours"] if (yours := sources.count("yours")) else []
    else:
        asked = sources.count("reference")
        borrowed = f"{sources.count('borrowed') + asked} borrowed" + (f" ({asked} on request)" if asked else "")
        parts = [f"{sources.count('yours')} of {total} exercises are yours", borrowed]
    parts += [f"{missing} neither written nor in solutions/"] if missing else []
    return f"impl={impl()}: " + ", ".join(parts)


def require_all_exercises() -> None:
    """ValueError if something is a stub that nobody answers: a solutions/ that was taken away, say."""
    if missing := [ex.not_written for ex in EXERCISES.values() if ex.source == "missing"]:
        raise ValueError(f"{len(missing)} exercises have neither code nor answer here; the first: {missing[0]}")
