"""The runner of the bank: what counts as caught, and what is an error of the entry."""

import json

import pytest

from tests.forks import goes_by
from tests.mutants import MUTANTS, mutant
from tests.small_tree import TESTS, Tree

MUTANTS_99 = '''
from tests.mutants import mutant


def try_out(name, exercise, old, new, caught_by):
    mutant(exercise, old, new, caught_by=caught_by, believes="it does not matter", name=name)


try_out("no-zero", "row_starts", "starts = [0]", "starts = [1]", "test_running_sum")
try_out("in-class", "Pool.take", "range(n)", "range(n - 1)", "TestPool::test_takes_all_different")
try_out("graded-with-others", "Pool.give", "extend(blocks)", "extend(blocks[1:])", "TestPool::test_gives_back")
try_out("survives", "row_starts", "if n < 1", "if n < 0", "test_running_sum")
try_out("wrong-test", "Pool.take", "range(n)", "range(n - 1)", "test_running_sum")
try_out("no-such-test", "row_starts", "starts = [0]", "starts = [1]", "test_nowhere")
try_out("twice", "row_starts", "starts", "stops", "test_running_sum")
try_out("absent", "row_starts", "nowhere", "here", "test_running_sum")
try_out("signature", "row_starts", "counts)", "numbers)", "test_running_sum")
try_out("syntax", "row_starts", "starts = [0]", "starts = [", "test_running_sum")
try_out("no-exercise", "first_of", "0", "1", "test_running_sum")
try_out("crash-inside", "row_starts", "starts = [0]", "starts = None", "test_running_sum")
try_out("crash-outside", "row_starts", "return starts", "return 5", "test_unpacks")
try_out("endless", "row_starts", "starts.append(starts[-1] + n)", "\\n        while True: pass", "test_running_sum")
try_out("exit", "row_starts", "starts = [0]", "import os; os._exit(3)", "test_running_sum")
try_out("plain", "row_starts", "starts = [0]", "starts = [1]", "test_bare")
try_out("bad-answer", "Pool.give", "extend", "append", "test_impossible")
'''

ALTERNATIVES_99 = """
from tests.alternatives import alternative

alternative("row_starts", name="accumulate", source='''
    def row_starts(counts):
        from itertools import accumulate

        for n in counts:
            if n < 1:
                raise ValueError(f"{n} tokens")
        return [0, *accumulate(counts)]
''')
alternative("row_starts", name="unchecked", source='''
    def row_starts(counts):
        return [sum(counts[:r]) for r in range(len(counts) + 1)]
''')
"""

MORE = """

@grades(row_starts)
def test_unpacks():
    first, last = row_starts([4])


@grades(row_starts)
def test_bare():
    assert row_starts([4]) == [0, 4]


@grades(Pool.give)
def test_impossible():
    expect(False, "the answer itself cannot pass")
"""

GIVEN = {
    "no-zero": ("caught", "start of request 0: expected 0, got 1"),
    "in-class": ("caught", "block: expected"),
    "graded-with-others": ("caught", "free blocks: expected 4, got 3"),
    "survives": ("missed", "test_running_sum passes\n  (it believes: it does not matter)"),
    "wrong-test": ("error", "test_running_sum does not grade Pool.take"),
    "no-such-test": ("error", "no test test_nowhere in tests/test_ch99_*.py"),
    "twice": ("error", "times in the answer of row_starts, not once"),
    "absent": ("error", "`old` occurs 0 times"),
    "signature": ("error", "outside the body"),
    "syntax": ("error", "row_starts"),
    "no-exercise": ("error", "no exercise is called 'first_of'"),
    "crash-inside": ("caught", "row_starts raised AttributeError"),
    "crash-outside": ("missed", "fails, but not with a message about it: TypeError: cannot unpack"),
    "endless": ("caught", "row_starts did not finish within"),
    "exit": ("error", "the test process died (status 768)"),
    "plain": ("caught", "assert row_starts([4]) == [0, 4]"),
    "bad-answer": ("error", "the unchanged answer does not pass: "),
    "accumulate": ("passed", "5 tests"),
    "unchecked": ("rejected", "test_zero_is_refused: row_starts([2, 0]): expected ValueError, but nothing was raised"),
}


def contents(root):
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    tree = Tree(tmp_path_factory.mktemp("bank"), TESTS + MORE)
    tree.put("tests/mutants/ch99.py", MUTANTS_99)
    tree.put("tests/alternatives/ch99.py", ALTERNATIVES_99)
    forks = tree.root / "tests" / "forks.py"
    forks.write_text(forks.read_text().replace("TEST_LIMIT = 20", "TEST_LIMIT = 2"))
    before = contents(tree.root)
    status, out = tree.run("-m", "tests.mutation", "--json")
    assert status == 1
    assert before == contents(tree.root), "the tree was touched"
    found = [json.loads(line) for line in out.splitlines()]
    assert len(found) == len(GIVEN)
    return {outcome["id"].split("-", 2)[2]: outcome for outcome in found}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", GIVEN)
def test_verdict(outcomes, name):
    status, words = GIVEN[name]
    assert outcomes[name]["status"] == status and words in outcomes[name]["note"], outcomes[name]


def test_entries_are_checked_when_they_are_added():
    before = list(MUTANTS)
    with pytest.raises(ValueError, match="a file named chNN.py"):
        mutant("f", "a", "b", caught_by="test_f", believes="x")
    assert before == MUTANTS


@pytest.mark.parametrize("name, fits", [("test_x", True), ("TestA::test_x", True), ("TestA", True), ("x", False)])
def test_names_of_tests(name, fits):
    assert goes_by("tests/test_ch99.py::TestA::test_x[a::b-test_y]", name) is fits
    assert not goes_by("tests/test_ch99.py::TestA::test_xx", name) or name == "TestA"
