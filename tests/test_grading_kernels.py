"""What a student sees when a kernel raises in Triton's interpreter, which wraps the error into one of its own."""

import pytest

from tests.small_tree import Tree

pytest.importorskip("triton")

ENGINE = '''
import triton
import triton.language as tl

from engine.exercises import exercise, fill
'''
KERNEL = '''
@exercise(99, "Running sums")
def NAME(x, out, N: tl.constexpr):
    """Doubles the first N elements.  (Your engine: Chapter 99)"""
    raise NotImplementedError
'''
COMPILE = """
mark = NAME.__exercise__
NAME = triton.jit(NAME)
NAME.__exercise__ = mark
"""
ANSWER = """
def NAME(x, out, N: tl.constexpr):
    i = tl.arange(0, 4)
    tl.store(out + i, BODY)
"""
RIGHT = "2 * tl.load(x + i, i < N), i < N"
WRONG = {
    "unknown": ("tl.load(x + j), i < N", "NameError: name 'j' is not defined"),  # in the kernel itself
    "shapes": ("tl.load(x + i) + tl.arange(0, 8), i < N", "ValueError: "),  # deep inside Triton
}
HEAD = """
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from engine import rows
from tests.grading import expect_equal, grades

"""
TEST = """
@grades(rows.NAME)
def test_NAME():
    out = torch.zeros(3)
    rows.NAME[(1,)](torch.ones(3), out, 3)
    expect_equal(out.tolist(), [2.0] * 3, "element {i}", see="99: Running sums")
"""


def test_the_line_of_the_kernel_and_the_true_error(tmp_path):
    """Three kernels in one run, as each run imports torch and Triton: one that is right, and two that raise."""
    names = ["right", *WRONG]

    def each(text):
        return "".join(text.replace("NAME", name) for name in names)

    tree = Tree(tmp_path, tests=HEAD + each(TEST))
    tree.put("engine/rows.py", f"{ENGINE}{each(KERNEL)}\nfill(__name__)\n{each(COMPILE)}")
    tree.put("solutions/rows.py", f"import triton.language as tl\n{each(ANSWER.replace('BODY', RIGHT))}")
    for name, body in {"right": RIGHT, **{name: body for name, (body, _) in WRONG.items()}}.items():
        tree.write(name, ANSWER.replace("NAME", name).replace("BODY", body))
    status, out = tree.pytest("-q")
    assert status == 1 and "2 failed, 1 passed" in out
    for name, (body, says) in WRONG.items():
        assert f"{name} raised {says}" in out
        assert f" at engine/rows.py:{tree.line(body)}\n" in out
    assert "InterpreterError" not in out and "Traceback" not in out
