"""The exercises of this tree keep their form; and the registry runs whose code it says it runs."""

import ast
import builtins
import dis
import importlib
import inspect
import json
import os
import re
from pathlib import Path

import pytest

from engine.exercises import registry
from engine.exercises.bodies import body_of
from engine.exercises.catalog import Catalog
from engine.exercises.hints import HINTS, hint_sections, hints_of
from engine.exercises.source import Source, docstring, functions
from tests.sections import ROOT
from tests.toy import pytest_in, python, toy_tree, write

CATALOG = Catalog(ROOT)
each_exercise = pytest.mark.parametrize("ex", CATALOG.exercises, ids=lambda ex: ex.name.removeprefix("engine."))
answer_files = sorted(p for p in (ROOT / "solutions").rglob("*.py") if p.name != "__init__.py")
each_answer_file = pytest.mark.parametrize("path", answer_files, ids=lambda p: p.relative_to(ROOT).as_posix())


def stub_of(ex) -> tuple[Source, ast.FunctionDef]:
    source = Source.read(Path(ex.path))
    return source, source.find(ex.qualname)


def answer_of(ex) -> tuple[Source, ast.FunctionDef]:
    source = Source.read(ROOT / "solutions" / Path(ex.path).relative_to(ROOT / "engine"))
    return source, source.find(ex.qualname)


# The form of stubs and answers


def test_every_file_can_be_read():
    assert CATALOG.damaged == []
    assert CATALOG.exercises


@each_exercise
def test_stub_and_answer_have_the_same_signature(ex):
    stub, answer = stub_of(ex)[1], answer_of(ex)[1]
    assert ast.unparse(stub.args) == ast.unparse(answer.args)
    assert type(stub) is type(answer) is ast.FunctionDef


@each_exercise
def test_docstring_names_the_chapter(ex):
    source, stub = stub_of(ex)
    assert docstring(stub), "the docstring is the specification"
    first = docstring(stub).value.value.splitlines()[0]
    assert first.endswith(f"  (Your engine: Chapter {ex.chapter})"), first


@each_exercise
def test_stub_has_one_decorator_and_its_body_a_line_of_its_own(ex):
    source, stub = stub_of(ex)
    assert len(stub.decorator_list) == 1, "rebinding drops any other decorator"
    assert not body_of(source, stub).inline
    assert ex.qualname.count(".") <= 1, "the registry looks into classes, not into classes of classes"


@pytest.mark.skipif(os.environ.get("CI_STUBS") != "1", reason="CI_STUBS=1 asks for it: true until somebody writes")
def test_the_committed_tree_is_all_stubs():
    assert [ex.where for ex in CATALOG.exercises if ex.written] == []


@each_exercise
def test_the_section_is_in_the_text(ex):
    if CATALOG.chapter_file(ex.chapter):
        assert ex.section in CATALOG.sections(ex.chapter)


@each_exercise
def test_three_hints(ex):
    hints = hints_of(ex)
    assert len(hints) == HINTS
    assert all(len(hint) > 20 for hint in hints)
    assert re.match(r"\W*pitfall", hints[-1], re.IGNORECASE), "the last hint names the pitfall"


@pytest.mark.parametrize("path", sorted((ROOT / "engine").rglob("hints.md")), ids=lambda p: p.parent.name)
def test_every_heading_of_the_hints_means_one_exercise(path):
    beside = [ex for ex in CATALOG.exercises if Path(ex.path).parent == path.parent]
    for heading in hint_sections(path.read_text(encoding="utf-8")):
        assert sum(ex.goes_by(heading) for ex in beside) == 1, heading


@each_answer_file
def test_answers_and_nothing_else(path):
    source = Source.read(path)
    module = ".".join(("engine", *path.relative_to(ROOT / "solutions").with_suffix("").parts))
    wanted = {ex.qualname for ex in CATALOG.exercises if ex.module == module}
    assert sorted(name for name, _ in functions(source.tree)) == sorted(wanted)
    for node in source.tree.body:
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        assert text or isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef), ast.unparse(node)
        if isinstance(node, ast.ClassDef):
            assert all(isinstance(inner, ast.FunctionDef) for inner in node.body), ast.unparse(node)
    for name, node in functions(source.tree):
        assert docstring(node) is None, f"{name}: the docstring stands in the stub"
        assert node.decorator_list == []
        calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and ast.unparse(n) == "super()"]
        assert not calls, f"{name}: super() without arguments does not survive the move into another class"


@each_answer_file
def test_the_names_that_answers_use_exist_in_the_engine(path):
    module = ".".join(("engine", *path.relative_to(ROOT / "solutions").with_suffix("").parts))
    known = {*vars(importlib.import_module(module)), *vars(builtins)}
    code = compile(path.read_text(encoding="utf-8"), str(path), "exec")
    for body in function_codes(code):
        missing = global_names(body) - known
        assert not missing, f"{body.co_name} uses {sorted(missing)}, which {module} does not have"


def function_codes(code):
    for inner in code.co_consts:
        if hasattr(inner, "co_code") and inner.co_flags & inspect.CO_OPTIMIZED:
            yield inner
        elif hasattr(inner, "co_code"):  # the body of a class
            yield from function_codes(inner)


def global_names(code) -> set[str]:
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return names.union(*(global_names(c) for c in code.co_consts if hasattr(c, "co_code")))


def test_registry_and_catalog_agree():
    for module in {ex.module for ex in CATALOG.exercises}:
        importlib.import_module(module)
    found = {ex.name: ex for ex in CATALOG.exercises}
    ours = {name: ex for name, ex in registry.EXERCISES.items() if name in found or ex.path.startswith(str(ROOT))}
    assert {n: (e.chapter, e.section, e.line, e.written) for n, e in ours.items()} == {
        n: (e.chapter, e.section, e.line, e.written) for n, e in found.items()
    }


@each_exercise
def test_fill_is_the_last_line_of_the_module(ex):
    """Of a module of kernels the last but one: `jit` makes kernels of what `fill` chose."""
    *_, before, last = map(ast.unparse, Source.read(Path(ex.path)).tree.body)
    assert "fill(__name__)" in (last, before) and ("= jit(" in last or "= (jit(" in last or last == "fill(__name__)")


BOTH_ORDERS = """
import contextlib, gc, importlib, os, sys
for library in ("torch", "triton", "safetensors.torch", "tokenizers"):
    with contextlib.suppress(ImportError):
        importlib.import_module(library)
gc.freeze()
modules, failed = sys.argv[1:], 0
for module in modules:
    for first in (module, module.replace("engine", "solutions", 1)):
        child = os.fork()
        if not child:
            importlib.import_module(first)
            from engine.exercises.registry import EXERCISES, _find
            engine = importlib.import_module(module)
            for ex in EXERCISES.values():
                if ex.module == module:
                    function = _find(engine, ex.qualname)
                    path = getattr(function, "fn", function).__code__.co_filename  # .fn: of a Triton kernel
                    assert ex.source == "reference" and f"{os.sep}solutions{os.sep}" in path, (ex.name, first, path)
            sys.stdout.flush()
            os._exit(0)
        failed |= os.waitpid(child, 0)[1]
sys.exit(bool(failed))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks, to import the libraries only once")
def test_engine_and_solutions_may_be_imported_in_either_order():
    done = python(ROOT, "-c", BOTH_ORDERS, *sorted({ex.module for ex in CATALOG.exercises}), IMPL="solution")
    assert done.returncode == 0, done.stderr


# The registry, on a small tree


def sources(tree: Path, first: str = "engine.words", **env: str) -> dict[str, str]:
    code = f"import {first}, json; from engine.exercises.registry import EXERCISES as E, who_wrote\n"
    code += "print(json.dumps({**{e.qualname: e.source for e in E.values()}, 'who': who_wrote()}))"
    done = python(tree, "-c", code, **env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("first", ["engine.words", "solutions.words", "engine.more", "solutions.more"])
def test_what_is_written_is_used_and_the_rest_borrowed(tmp_path, first):
    tree = toy_tree(tmp_path)
    write(tree, "count", "return {'mine': 1}")
    write(tree, "Index.top", "return 'mine'")
    found = sources(tree, first)
    others = int(found.pop("shout", "") == "borrowed")
    assert others == (first == "engine.more"), "the answers of `more` import only what is not theirs"
    assert found.pop("who") == f"impl=engine: 2 of {4 + others} exercises are yours, {2 + others} borrowed"
    assert found == {"split": "borrowed", "count": "yours", "Index.add": "borrowed", "Index.top": "yours"}


def test_solution_takes_every_answer(tmp_path):
    tree = toy_tree(tmp_path)
    write(tree, "count", "return {'mine': 1}")
    found = sources(tree, IMPL="solution")
    assert found.pop("who") == "impl=solution: all 4 exercises are the reference answers"
    assert set(found.values()) == {"reference"}


def test_borrowing_by_name(tmp_path):
    tree = toy_tree(tmp_path)
    write(tree, "count", "return {}")
    write(tree, "Index.add", "return None")
    found = sources(tree, BORROW="Index.add, words.count")
    assert found.pop("who") == "impl=engine: 0 of 4 exercises are yours, 4 borrowed (2 on request)"
    assert found == {"split": "borrowed", "count": "reference", "Index.add": "reference", "Index.top": "borrowed"}


def test_a_borrowed_answer_reaches_the_students_function_and_keeps_its_defaults(tmp_path):
    tree = toy_tree(tmp_path)
    write(tree, "split", "return ['mine', 'mine']")
    code = "from engine.words import Index; i = Index(); i.add('x'); i.add('x', 5, scale=7); print(i.counts, Index.add)"
    done = python(tree, "-c", code)
    assert done.stdout.startswith("{'mine': 72} <function Index.add"), done


def test_a_borrowed_answer_has_the_documentation_of_the_stub(tmp_path):
    code = "from engine.words import Index, split; print(Index.add.__doc__, Index.add.__qualname__, split.__module__)"
    done = python(toy_tree(tmp_path), "-c", code)
    assert "(Your engine: Chapter 7) Index.add engine.words" in done.stdout


def test_a_tree_without_answers_says_so(tmp_path):
    tree = toy_tree(tmp_path)
    (tree / "solutions/words.py").unlink()
    write(tree, "count", "return {}")
    found = sources(tree)
    who = "impl=engine: 1 of 4 exercises are yours, 0 borrowed, 3 neither written nor in solutions/"
    assert found.pop("who") == who
    assert found == {"split": "missing", "count": "yours", "Index.add": "missing", "Index.top": "missing"}
    who = sources(tree, IMPL="solution")["who"]
    assert who.startswith("impl=solution: 0 of 4 exercises are the reference answers, 1 without an answer here")


def test_an_answer_that_does_not_import_is_not_taken_for_a_missing_one(tmp_path):
    tree = toy_tree(tmp_path)
    (tree / "solutions/words.py").write_text("import no_such_module\n")
    done = python(tree, "-c", "import engine.words")
    assert "No module named 'no_such_module'" in done.stderr


def test_impl_must_be_known(tmp_path):
    done = python(toy_tree(tmp_path), "-c", "import engine.words", IMPL="mine")
    assert "IMPL is 'mine'" in done.stderr


def test_a_stub_borrowed_by_name_is_graded(tmp_path):
    """Otherwise tests of several exercises could not tell which of the written ones is at fault."""
    tree = toy_tree(tmp_path)
    write(tree, "Index.add", "self.counts = {'y': 1}")
    assert "1 failed, 1 passed, 3 not written" in pytest_in(tree).stdout
    assert "1 failed, 2 passed, 2 not written" in pytest_in(tree, "--borrow", "Index.top").stdout
