"""What a student sees when a kernel raises in Triton's interpreter, which wraps the error into one of its own."""

import pytest

from tests.small_tree import Tree

pytest.importorskip("triton")

ENGINE = '''
import triton
import triton.language as tl

from engine.exercises import exercise, fill


@exercise(99, "Running sums")
def double_kernel(x, out, N: tl.constexpr):
    """Doubles the first N elements.  (Your engine: Chapter 99)"""
    raise NotImplementedError


def double(x, out):
    double_kernel[(1,)](x, out, 3)


fill(__name__)
mark = double_kernel.__exercise__
double_kernel = triton.jit(double_kernel)
double_kernel.__exercise__ = mark
'''
ANSWER = """
import triton.language as tl


def double_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, 4)
    tl.store(out + i, 2 * tl.load(x + i, i < N), i < N)
"""
TESTS = """
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from engine.rows import double, double_kernel
from tests.grading import expect_equal, grades


@grades(double_kernel)
def test_doubles():
    out = torch.zeros(3)
    double(torch.ones(3), out)
    expect_equal(out.tolist(), [2.0] * 3, "element {i}", see="99: Running sums")
"""
WRONG = """
def double_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, 4)
    tl.store(out + i, BODY)
"""


@pytest.fixture
def tree(tmp_path):
    tree = Tree(tmp_path, tests=TESTS)
    tree.put("engine/rows.py", ENGINE)
    tree.put("solutions/rows.py", ANSWER)
    return tree


def test_the_answer_passes(tree):
    status, out = tree.pytest("-q", "--impl", "solution")
    assert status == 0 and "1 passed" in out


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("tl.load(x + j), i < N", "NameError: name 'j' is not defined"),  # in the kernel itself
        ("tl.load(x + i) + tl.arange(0, 8), i < N", "ValueError: "),  # deep inside Triton
    ],
)
def test_the_line_of_the_kernel_and_the_true_error(tree, body, says):
    tree.write("double_kernel", WRONG.replace("BODY", body))
    status, out = tree.pytest("-q")
    assert status == 1 and f"double_kernel raised {says}" in out
    assert f" at engine/rows.py:{tree.line(body)}\n" in out
    assert "InterpreterError" not in out and "Traceback" not in out
