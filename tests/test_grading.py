"""What the `expect…` helpers accept, and what they say about the rest."""

import hashlib

import pytest
import torch

from tests.differences import shorten
from tests.grading import Wrong, expect, expect_close, expect_equal, expect_raises, grades, rng

NAN, INF = float("nan"), float("inf")


def said(function, *args, **kwargs) -> str:
    """The message of a helper that must object."""
    with pytest.raises(Wrong) as caught:
        function(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize(
    "got, expected",
    [
        (3, 3),
        ([1, 2], (1, 2)),
        (torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), [[1, 2], [3, 4]]),
        ([1, 2], torch.tensor([1, 2])),
        (torch.tensor(7), 7),
        (None, None),
        (b"key", b"key"),
        ({"a": [1], "b": None}, {"b": None, "a": [1]}),
        ({1, 2}, {2, 1}),
        ([], []),
        (2, 2.0),
    ],
)
def test_equal_values_pass(got, expected):
    expect_equal(got, expected)


@pytest.mark.parametrize(
    "got, expected, words",
    [
        ([0, 3, 5], [0, 3, 4], "entry 2: expected 4, got 5"),
        (None, [0, 3, 4], "entry: expected 3 entries, got None: did you forget to return?"),
        (None, 4, "entry: expected 4, got None: did you forget to return?"),
        ([0, 3], [0, 3, 4], "entry: expected 3 entries, got 2"),
        ([0, 2], [0, 3, 4], "entry: expected 3 entries, got 2; the first that differs is 1: expected 3, got 2"),
        ([], [1], "entry: expected 1 entry, got 0"),
        ([[1, 2], [3, 4]], [[1, 2], [3, 5]], "entry (1, 1): expected 5, got 4"),
        ([[1], [3]], [[1], [3, 5]], "entry 1: expected 2 entries, got 1"),
        (torch.ones(2, 3), torch.ones(3, 2), "entry: expected shape [3, 2], got [2, 3]"),
        (torch.tensor([1.0, 2.0]), [1, 2], "entry 0: expected 1, got 1.0 (float)"),
        (True, 1, "entry: expected 1, got True (bool)"),
        (1, True, "entry: expected True, got 1 (int)"),
        ("1", 1, "entry: expected 1, got '1' (str)"),
        (3, [3], "entry: expected 1 entry, got 3 (int)"),
        ([3], 3, "entry: expected 3, got a list of 1 entry"),
        ({"a": 1}, {"a": 2}, "entry a: expected 2, got 1"),
        ({"a": 1}, {"a": 1, "b": 2}, "entry: key 'b' is missing"),
        ({"a": 1, "b": 2}, {"a": 1}, "entry: key 'b' is one too many"),
        ({1, 2}, {1, 3}, "entry: 3 is missing, 2 is one too many"),
        (b"a" * 16, b"a" * 15 + b"b", "entry: expected b'b' from byte 15 on, got b'a'"),
        ("page_sizes", "page_size", "entry: expected the end from character 9 on, got 's'; 9 characters expected, …"),
        (NAN, 1.0, "entry: expected 1.0, got nan"),
    ],
)
def test_first_difference(got, expected, words):
    assert said(expect_equal, got, expected, "entry {i}").removesuffix("10 came") == words.removesuffix("…")


def test_a_value_equal_to_all_others_is_no_answer():
    class Anything:
        def __eq__(self, other):
            return True

        __hash__ = None

    for expected in (3, "x", b"x", None, [1, 2], {"a": 1}, {1}):
        said(expect_equal, Anything(), expected)
    said(expect_equal, [Anything()], [3])


def test_message_has_call_hint_and_section():
    words = said(expect_equal, 1, 2, "length", hint="count again", see="99: No such chapter", call="f(1)")
    assert words == 'f(1): length: expected 2, got 1\n  count again   -> chapter 99, "No such chapter"'
    assert said(expect, False, "no", see="99: A") == 'no\n  -> chapter 99, "A"'
    expect(True, "never shown")


def test_index_stands_where_it_is_asked_for():
    got, expected = [[1, 2], [3, 4]], [[1, 2], [3, 5]]
    assert said(expect_equal, got, expected, "row {r}, column {c}") == "row 1, column 1: expected 5, got 4"
    assert said(expect_equal, got, expected, "table") == "table at (1, 1): expected 5, got 4"


def test_a_malformed_section_is_an_error_of_the_test():
    with pytest.raises(ValueError, match="Section title"):
        expect(False, "x", see="Flattened ragged batches")


def test_long_expected_values_are_not_shown():
    random = rng("secret")
    expected = [random.getrandbits(30) for _ in range(40)]
    for got in (None, [], expected[:20], [0] * 40, torch.zeros(40), {}, "x"):
        words = said(expect_equal, got, expected)
        assert sum(str(n) in words for n in expected) <= 1, words
    secret = hashlib.blake2b(b"secret", digest_size=32).digest()
    for got in (None, b"", secret[:16], bytes(32)):
        assert repr(secret)[2:20] not in said(expect_equal, got, secret)
    values = torch.rand(40, dtype=torch.float64, generator=rng.torch("secret"))
    words = said(expect_close, torch.zeros(40), values, 1e-6)
    assert sum(f"{v:.6g}" in words for v in values.tolist()) == 1, words
    assert len(said(expect_raises, KeyError, lambda x: x, list(range(10_000)))) < 300


@pytest.mark.parametrize("value", [list(range(1000)), "x" * 1000, b"x" * 1000, torch.zeros(1000), {"a": "y" * 1000}])
def test_shortened_to_one_line(value):
    assert len(shorten(value)) <= 72 and "\n" not in shorten(value)


def test_close_accepts_what_is_within_the_tolerance():
    expected = torch.tensor([[1.0, -2.0], [INF, 0.0]], dtype=torch.float64)
    expect_close(expected.float() * (1 + 1e-6), expected, atol=0, rtol=2e-6)
    expect_close(expected + 9e-4, expected, atol=1e-3)
    expect_close(1.5, torch.tensor(1.5), atol=0)
    expect_close(torch.ones(2, dtype=torch.bfloat16, requires_grad=True), torch.ones(2), atol=0)


@pytest.mark.parametrize(
    "got, words",
    [
        ([[1, 2], [3, 5]], "x (1, 1): expected 4, got 5, off by 1 where 0.1 is allowed; 1 of 4 elements differ, …"),
        ([[1, NAN], [3, 9]], "x (0, 1): expected 2, got nan; 2 of 4 elements differ, the first at (0, 1)"),
        ([[1, 2.2], [3, -INF]], "x (1, 1): expected 4, got -inf; 2 of 4 elements differ, the first at (0, 1)"),
        ([[1, 2, 3, 4]], "x: expected shape [2, 2], got [1, 4]"),
        (1.0, "x: expected shape [2, 2], got []"),
    ],
)
def test_close_names_the_worst_element(got, words):
    message = said(expect_close, torch.tensor(got), torch.tensor([[1.0, 2], [3, 4]]), atol=0.1, what="x {i}")
    assert message.startswith(words.removesuffix("…"))


def test_close_and_other_types():
    assert "got None: did you forget to return?" in said(expect_close, None, torch.ones(2), 1.0)
    assert "expected a tensor [2], got a list of 2 entries" in said(expect_close, [1.0, 1.0], torch.ones(2), 1.0)
    said(expect_close, torch.tensor(INF), torch.tensor(-INF), atol=1.0, rtol=1.0)
    said(expect_close, torch.tensor(1.0), torch.tensor(INF), atol=1.0, rtol=1.0)
    with pytest.raises(ValueError, match="expected values hold NaN"):
        expect_close(torch.tensor(NAN), torch.tensor(NAN), atol=1.0)


def test_raises():
    def pick(i, *, of=()):
        return of[i]

    assert isinstance(expect_raises(IndexError, pick, 3, of=[1], match="out of range"), IndexError)
    name = pick.__qualname__.replace("<locals>.", "")
    words = f"{name}(0, of=[7]): expected IndexError, but nothing was raised; it returned 7"
    assert said(expect_raises, IndexError, pick, 0, of=[7]) == words
    assert "expected IndexError, got TypeError" in said(expect_raises, IndexError, pick, "0", of=[7])
    assert "its IndexError does not mention 'request 3'" in said(expect_raises, IndexError, pick, 1, match="request 3")
    words = said(expect_raises, (KeyError, ValueError), pick, 0, of=[7], call="pick")
    assert words.startswith("pick: expected KeyError or ValueError, but")


def test_randomness_is_a_function_of_seed_and_salt(monkeypatch):
    def draw(seed, salt):
        monkeypatch.setenv("GRADE_SEED", str(seed))
        return rng(salt).random(), torch.rand(1, generator=rng.torch(salt)).item()

    assert draw(0, "a") == draw(0, "a")
    assert len({draw(seed, salt) for seed in (0, 1, 12) for salt in ("a", "b", 3)}) == 9


@pytest.mark.parametrize("what", [(len,), (), (3,)])
def test_grades_takes_exercises_only(what):
    with pytest.raises(TypeError, match="@grades"):
        grades(*what)
