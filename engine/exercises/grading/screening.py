"""What no exercise needs and an answer therefore may not use: found in the syntax tree, before anything runs.

It keeps simple cheats and accidents away: reading answers, leaving the process, reaching into the tests. It is no wall:
Python offers more ways than any list has. What it lets through meets the limits of the sandbox.
"""

import ast
import re
from collections.abc import Collection, Iterator

from engine.exercises.source import FunctionNode, body, docstring

MAX_BODY = 20_000  # characters; the longest answer of the book has about 4,000


def _words(text: str) -> set[str]:
    return set(text.split())


MODULES = _words("""
    abc array bisect collections contextlib copy dataclasses engine enum fractions functools hashlib heapq itertools
    json math numbers numpy operator random re statistics string struct time torch typing warnings""")
TORCH = {"nn", "cuda", "types"}  # of its submodules
HIDDEN = _words("""
    builtins ctypes gc importlib inspect io multiprocessing os pathlib pickle pytest runpy shutil signal socket
    subprocess sys tempfile threading traceback unittest""")  # modules, wherever they are found
NAMES = HIDDEN | _words("""
    __builtins__ __import__ __loader__ __spec__ breakpoint compile delattr eval exec exit globals input locals open quit
    vars""")
ATTRIBUTES = HIDDEN | _words("""
    _C _dynamo _getframe _inductor ag_frame attrgetter classes co_code cr_frame ctypeslib distributed f_back f_builtins
    f_code f_globals f_locals from_file fromfile gi_code gi_frame hub jit lib load load_library memmap methodcaller ops
    package save tb_frame tb_next testing tofile utils""")
HARMLESS = {"tl.load", "self.ops"}  # of memory, in a Triton kernel; the kernels of a fused model
DUNDERS = _words("__class__ __init__ __name__ __qualname__ __len__ __iter__ __next__ __getitem__ __setitem__")
METHODS = DUNDERS | _words("__contains__ __lt__ __enter__ __exit__ __repr__ __call__ __post_init__ __hash__")
_DUNDER = re.compile(r"__\w+__")


def screen(function: FunctionNode, methods: Collection[str] = ()) -> list[str]:
    """Why this body is not run, `line: reason` each; empty when nothing was found.

    methods: names of the functions of the class; a body that assigns to one would replace given code.
    """
    found, own = {}, {name for node in ast.walk(function) for name in _bound(node)}
    inner = [n for s in body(function) for n in ast.walk(s) if isinstance(n, ast.ClassDef)]
    theirs = {id(node) for one in inner for node in ast.walk(one)}  # there `self` is something else
    for statement in body(function):
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and node.id in own:
                continue
            if isinstance(node, ast.Attribute) and ast.unparse(node) in HARMLESS and "tl" not in own:
                continue
            for reason in _reasons(node, () if id(node) in theirs else methods):
                found.setdefault(reason, getattr(node, "lineno", function.lineno))
    return [f"line {line}: {reason}" for reason, line in found.items()]


def imports_answers(function: FunctionNode) -> bool:
    """True when the body imports, or names a path in, the package with the answers."""
    for node in ast.walk(ast.Module(body(function), [])):
        if isinstance(node, ast.Import | ast.ImportFrom) and any(_top(m) == "solutions" for m in _modules(node)):
            return True
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if re.search(r"\bsolutions[./\\]", text):
            return True
    return False


def _reasons(node: ast.AST, methods: Collection[str]) -> Iterator[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from (f"imports {module}" for module in _modules(node) if not _importable(module))
        if isinstance(node, ast.ImportFrom):
            yield from (f"uses {alias.name}" for alias in node.names if _hidden(alias.name))
    elif isinstance(node, ast.Name):
        if node.id in NAMES or (_DUNDER.fullmatch(node.id) and node.id not in DUNDERS):
            yield f"uses {node.id}"
    elif isinstance(node, ast.Attribute):
        if _hidden(node.attr):
            yield f"uses .{node.attr}"
        elif not isinstance(node.ctx, ast.Load):
            yield from _stores(node, methods)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str) and _DUNDER.search(node.value):
            yield f"names {_DUNDER.search(node.value)[0]} in a string"
    elif isinstance(node, ast.Call):
        yield from _calls(node)
    elif isinstance(node, ast.Global):
        yield f"changes a variable of the module: global {', '.join(node.names)}"
    elif isinstance(node, FunctionNode) and _DUNDER.fullmatch(node.name) and node.name not in METHODS:
        yield f"defines {node.name}"


def _modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = "." * node.level + (node.module or "")
    if node.module and base != "engine":
        return [base]
    return [f"{base.removesuffix('.')}.{alias.name}" for alias in node.names]


def _top(module: str) -> str:
    return module.lstrip(".").split(".")[0]


def _importable(module: str) -> bool:
    parts = module.strip(".").split(".")
    if module.startswith("."):
        return parts[0] not in ("exercises", "solutions", "tests")
    if parts[0] == "engine":
        return parts[1:2] not in (["exercises"], ["milestones"])
    if parts[0] == "torch":
        return len(parts) == 1 or parts[1] in TORCH
    return parts[0] in MODULES and len(parts) == 1 or module == "collections.abc"


def _hidden(name: str) -> bool:
    return name in ATTRIBUTES or (_DUNDER.fullmatch(name) is not None and name not in DUNDERS)


def _stores(node: ast.Attribute, methods: Collection[str]) -> Iterator[str]:
    """Assignments that replace given code: of an object's own class, of another class, of a module."""
    owner = node.value
    if isinstance(owner, ast.Name) and owner.id == "self" and node.attr in methods:
        yield f"replaces the method {node.attr}"
    elif isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "type":
        yield f"assigns to a class: type(...).{node.attr}"
    elif isinstance(owner, ast.Attribute) and owner.attr == "__class__":
        yield f"assigns to a class: .__class__.{node.attr}"
    elif isinstance(owner, ast.Name) and (owner.id in MODULES or owner.id[:1].isupper()):
        yield f"assigns to {owner.id}.{node.attr}"
    elif isinstance(owner, ast.Attribute) and owner.attr[:1].isupper():
        yield f"assigns to {ast.unparse(owner)}.{node.attr}"


def _calls(node: ast.Call) -> Iterator[str]:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name not in ("getattr", "setattr", "hasattr") or len(node.args) < 2:
        return
    what = node.args[1]
    if not (isinstance(what, ast.Constant) and isinstance(what.value, str)):
        yield f"calls {name} with a computed name"
    elif _hidden(what.value):
        yield f"uses .{what.value}"
    elif name == "setattr" and isinstance(node.args[0], ast.Name) and node.args[0].id[:1].isupper():
        yield f"assigns to {node.args[0].id}.{what.value}"


def normalised(function: FunctionNode) -> str:
    """The body without what renaming and rewording change: comments, layout, docstrings, annotations, local names."""
    fresh = ast.parse(ast.unparse(ast.Module(body(function), []))) if body(function) else ast.Module([], [])
    local = {}
    for node in ast.walk(fresh):
        for name in _bound(node):
            local.setdefault(name, f"v{len(local)}")
    return ast.dump(_Renamer(local).visit(fresh))


def _bound(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, FunctionNode) or isinstance(node, ast.ExceptHandler) and node.name:
        yield node.name


class _Renamer(ast.NodeTransformer):
    def __init__(self, names: dict[str, str]):
        self.names = names

    def visit_Name(self, node):
        node.id = self.names.get(node.id, node.id)
        return node

    def visit_arg(self, node):
        node.arg, node.annotation = self.names.get(node.arg, node.arg), None
        return node

    def visit_ExceptHandler(self, node):
        node.name = self.names.get(node.name, node.name)
        return self.generic_visit(node)

    def visit_AnnAssign(self, node):
        self.generic_visit(node)
        return ast.Assign([node.target], node.value) if node.value else None

    def visit_FunctionDef(self, node):
        node.name, node.returns = self.names.get(node.name, node.name), None
        if docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)


def unknown_names(function: FunctionNode, module: ast.Module, builtins: Collection[str]) -> list[str]:
    """Names that the body uses although neither it nor the given module has them: helpers left behind, imports."""
    known = set(builtins) | {"__class__"}
    for node in ast.walk(function):
        known |= set(_bound(node))
        known |= {(a.asname or a.name).split(".")[0] for a in getattr(node, "names", ()) if isinstance(a, ast.alias)}
        known |= {node.name} if isinstance(node, ast.ClassDef) else set()
        known |= {node.name} if isinstance(node, ast.MatchAs | ast.MatchStar) and node.name else set()
        known |= {node.rest} if isinstance(node, ast.MatchMapping) and node.rest else set()
    for node in ast.walk(module):
        known |= set(_bound(node)) if not isinstance(node, ast.arg) else set()
        known |= {node.name} if isinstance(node, ast.ClassDef) else set()
        known |= {(a.asname or a.name).split(".")[0] for a in getattr(node, "names", ()) if isinstance(a, ast.alias)}
    used = (n for s in body(function) for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
    return list(dict.fromkeys(node.id for node in used if node.id not in known))
