"""What a body may not do to be run, and that honest ones do none of it."""

import ast
import builtins
import textwrap
from functools import cache
from pathlib import Path

import pytest

from engine.exercises.catalog import Catalog
from engine.exercises.grading.screening import MAX_BODY, imports_answers, normalised, screen, unknown_names
from engine.exercises.source import Source, functions
from tests.sections import ROOT


def function(body: str, head: str = "def f(self, x):"):
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return ast.parse(f"{head}\n{lines}").body[0]


REFUSED = [
    ("import os\nos._exit(0)", "imports os"),
    ("from os import path", "imports os"),
    ("import torch.utils.cpp_extension", "imports torch.utils.cpp_extension"),
    ("from torch import load", "uses load"),
    ("from torch import os", "uses os"),
    ("import engine.exercises.registry", "imports engine.exercises.registry"),
    ("from engine import exercises", "imports engine.exercises"),
    ("from ..exercises import registry", "imports ..exercises"),
    ("import solutions.attention", "imports solutions.attention"),
    ("from tests.grading import expect", "imports tests.grading"),
    ("import hypothesis", "imports hypothesis"),
    ("return torch.os.getpid()", "uses .os"),
    ("return math.sys", "uses .sys"),
    ("return torch.load('x')", "uses .load"),
    ("tl = torch; return tl.load(0)", "uses .load"),
    ("return open('x')", "uses open"),
    ("eval('1')", "uses eval"),
    ("return __builtins__", "uses __builtins__"),
    ("return f.__globals__", "uses .__globals__"),
    ("return ().__class__.__bases__", "uses .__bases__"),
    ("return getattr(x, 'o' + 's')", "calls getattr with a computed name"),
    ("return getattr(x, '__globals__')", "uses .__globals__"),
    ("names = ['__globals__']", "names __globals__ in a string"),
    ("global row_starts\nrow_starts = None", "changes a variable of the module: global row_starts"),
    ("self.check = lambda: None", "replaces the method check"),
    ("type(self).check = None", "assigns to a class: type(...).check"),
    ("self.__class__.check = None", "assigns to a class: .__class__.check"),
    ("BlockManager.check = None", "assigns to BlockManager.check"),
    ("torch.equal = None", "assigns to torch.equal"),
    ("torch.Tensor.double = None", "assigns to torch.Tensor.double"),
    ("setattr(BlockManager, 'check', None)", "assigns to BlockManager.check"),
    ("class Any:\n    def __eq__(self, other):\n        return True", "defines __eq__"),
    ("try:\n    1 / 0\nexcept Exception as e:\n    return e.__traceback__.tb_frame", "uses .tb_frame"),
]


@pytest.mark.parametrize("body, reason", REFUSED, ids=[reason for _, reason in REFUSED])
def test_refused(body, reason):
    assert any(found.endswith(f": {reason}") for found in screen(function(body), {"check"})), screen(function(body))


HONEST = [
    "import math\nfrom collections import deque\nfrom torch.nn import functional as F\nreturn F.softmax(x, dim=-1)",
    "from engine.serve.request import Status\nfrom engine.attention import causal_attention\nreturn Status",
    "self.model.eval()\nself.table[0] = x\nself.count += 1\nreturn re.compile('a')",
    "for input, signal in x:\n    open = input\nreturn [open, signal]",
    "return getattr(self, 'q_norm', None) is None",
    "class Node:\n    def __init__(self):\n        self.check = 1\n    def __lt__(self, o):\n        return 1\nNode()",
    "raise ValueError(f'no {x.__class__.__name__}')",
    "print(x)\nrequest.status = 3",
]


@pytest.mark.parametrize("body", HONEST)
def test_honest_code_passes(body):
    assert screen(function(body), {"check", "free"}) == []


@cache
def banks():
    from tests.mutation import Bank, load_banks

    return Bank(), load_banks()


def test_no_answer_alternative_or_mutant_is_refused():
    catalog, (bank, entries) = Catalog(ROOT), banks()
    methods = {}
    for ex in catalog.exercises:
        tree = Source.read(Path(ex.path)).tree
        methods[ex.name] = {
            f.name
            for c in ast.walk(tree)
            if isinstance(c, ast.ClassDef) and c.name == ex.qualname.rsplit(".", 1)[-2:][0]
            for f in c.body
            if isinstance(f, ast.FunctionDef)
        }
        answer = bank.answer(ex)[0].find(ex.qualname)
        assert screen(answer, methods[ex.name]) == [], ex.name
        assert bank.answer(ex)[2] - bank.answer(ex)[1] < MAX_BODY / 2, ex.name
    for entry in entries:
        if getattr(entry, "path", ""):
            continue
        ex = bank.exercise(entry)
        if hasattr(entry, "believes"):  # its function alone: a whole file for each of them takes half a minute
            source, start, end = bank.answer(ex)
            assert source.text[start:end].count(entry.old) == 1, entry.id
            mutated = ast.parse(textwrap.dedent(source.text[start:end].replace(entry.old, entry.new))).body[0]
        else:
            mutated = Source(bank.spliced(ex, entry.source)).find(ex.qualname)
        reasons = screen(mutated, methods[ex.name])
        assert all(reason.endswith("uses .__dict__") for reason in reasons), (entry.id, reasons)


def test_answers_know_all_their_names():
    """So a note on unknown names is never wrong about a right body."""
    catalog, (bank, _) = Catalog(ROOT), banks()
    for ex in catalog.exercises:
        tree = Source.read(Path(ex.path)).tree
        assert unknown_names(bank.answer(ex)[0].find(ex.qualname), tree, dir(builtins)) == [], ex.name


def test_imports_of_answers():
    assert imports_answers(function("import solutions.attention"))
    assert imports_answers(function("from solutions import attention"))
    assert imports_answers(function("open('../solutions/attention.py')"))
    assert not imports_answers(function("raise ValueError('no solutions')"))


def test_normalised_forgets_names_and_layout_only():
    one = function("# a\ny = x + 1\nfor i in y:\n    yield (i,\n        y)")
    same = function("'''Doc.'''\nz: int = x + 1\nfor k in z:\n    yield k, z  # b")
    other = function("z = x + 1\nfor k in z:\n    yield z, k")
    assert normalised(one) == normalised(same) != normalised(other)
    assert normalised(function("return x")) != normalised(function("return self"))


def test_every_answer_differs_from_every_other():
    found = {}
    for path in sorted((ROOT / "solutions").rglob("*.py")):
        for name, node in functions(Source.read(path).tree):
            found.setdefault(normalised(node), []).append(f"{path.name}:{name}")
    assert all(len(names) == 1 for names in found.values()), [n for n in found.values() if len(n) > 1]
