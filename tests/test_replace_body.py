"""`replace_body`: one function's body from another text, nothing else changed."""

import ast

import pytest

from engine.exercises.bodies import replace_body
from engine.exercises.source import Source, SourceError, is_stub

TARGET = '''class A:
    @exercise(7, "Words")
    def f(
        self, x
    ):
        """Doc."""
        raise NotImplementedError

    def g(self):
        return 1
'''


@pytest.mark.parametrize(
    "new",
    [
        "def f(self, x):\n    '''Other doc.'''\n    # why\n    return '''\n  kept\n'''\n",
        "    def f(self, x):\n        # why\n        return '''\n  kept\n'''\n",
        "class A:\n  def f(self, x):\n    # why\n    return '''\n  kept\n'''\n",
        "\tdef f(self, x):\n\t\t# why\n\t\treturn '''\n  kept\n'''\n",
    ],
)
def test_replace_body_takes_a_function_however_it_comes(new):
    expected = TARGET.replace("raise NotImplementedError", "# why\n        return '''\n  kept\n'''")
    assert replace_body(TARGET, "A.f", new) == expected


def test_replace_body_from_and_to_a_single_line():
    assert replace_body(TARGET, "A.f", "def f(self, x): y = x; return y").count("        y = x; return y\n") == 1
    assert replace_body("def f(x): return x\nX = 1\n", "f", "def f(x):\n  x += 1\n  return x") == (
        "def f(x):\n    x += 1\n    return x\nX = 1\n"
    )
    inline = "def f(x):\n  'doc'; return x\n"
    assert replace_body(inline, "f", "def f(x): return 2") == "def f(x):\n  'doc'\n  return 2\n"


def test_replace_body_leaves_everything_else_alone():
    text = replace_body(TARGET, "A.f", "def f(self, x): return 2")
    before, after = ast.parse(TARGET), ast.parse(text)
    assert not is_stub(Source(text).find("A.f"))
    for tree in (before, after):
        tree.body[0].body[0].body[1:] = []
    assert ast.dump(before) == ast.dump(after)


@pytest.mark.parametrize("new", ["def g(self, x): return 2", "def f(self, x:\n", ""])
def test_replace_body_says_what_is_wrong(new):
    with pytest.raises(SourceError, match=r"^new A\.f:\d+: "):
        replace_body(TARGET, "A.f", new)
