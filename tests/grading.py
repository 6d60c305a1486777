"""What the graders are written with: `@grades` names the exercises, `expect…` say what is wrong, `rng` draws inputs.

    @grades(row_starts)
    def test_starts_are_a_running_sum():
        expect_equal(row_starts([3, 1]), [0, 3, 4], what="start row of request {i}", see="31: Flattened ragged batches")

A message names what was called, what was expected, what came and where they first differ; then a likely cause (`hint`)
and the section to read again (`see`). It never holds enough to copy the expected value from.
"""

import hashlib
import math
import os
import random

import pytest

from tests.differences import count, cut, difference, index, is_array, kind, shorten
from tests.sections import link, split


class Wrong(AssertionError):
    """Raised by every `expect…`; its text is all that the reader sees."""


def grades(*functions):
    """Name the exercises that a test function, class or hypothesis state machine grades."""
    exercises = [getattr(f, "__exercise__", None) for f in functions]
    for function, exercise in zip(functions, exercises, strict=True):
        if exercise is None:
            raise TypeError(f"@grades: {function!r} is not an exercise: it has no @exercise, or was taken too early")
    if not functions:
        raise TypeError("@grades names at least one exercise")
    mark = pytest.mark.grades(*exercises)

    def decorate(test):
        mark(test.TestCase if hasattr(test, "TestCase") else test)  # a state machine is collected as its TestCase
        return test

    return decorate


def wrong(fact: str, hint: str | None = None, see: str | None = None) -> Wrong:
    where = f"-> {link(*split(see))}" if see else ""
    second = "   ".join(part for part in (hint, where) if part)
    return Wrong(f"{fact}\n  {second}" if second else fact)


def expect(condition, message: str, hint: str | None = None, see: str | None = None) -> None:
    """Fail with this message unless the condition holds."""
    __tracebackhide__ = True
    if not condition:
        raise wrong(message, hint, see)


def expect_equal(got, expected, what="result", hint=None, see=None, call=None) -> None:
    """Fail with the first difference.

    Numbers, strings, bytes, None; sequences (lists, tuples, tensors, nested or not: by their values, whatever the type
    and dtype), dicts and sets of them. In `what`, `{i}` stands for the index of the difference, `(2, 17)` in something
    nested; `{r}` and `{c}` for the first two indices.
    """
    __tracebackhide__ = True
    found = difference(got, expected)
    if found is not None:
        raise wrong(_fact(call, what, found.path, found.text), hint, see)


def expect_close(got, expected, atol, rtol=0.0, what="result", hint=None, see=None, call=None) -> None:
    """Fail with the worst element of a tensor unless |got - expected| <= atol + rtol |expected| everywhere.

    Compared in float64 on the CPU; an infinity must be matched by the same one, and NaN never passes.
    """
    import torch

    __tracebackhide__ = True
    expected = torch.as_tensor(expected).detach().cpu().double()
    if expected.isnan().any():
        raise ValueError("expect_close: the expected values hold NaN")
    if not is_array(got) and not isinstance(got, (int, float)):
        raise wrong(_fact(call, what, (), f"expected a tensor {list(expected.shape)}, got {kind(got)}"), hint, see)
    got = torch.as_tensor(got).detach().cpu().double()
    if got.shape != expected.shape:
        text = f"expected shape {list(expected.shape)}, got {list(got.shape)}"
        raise wrong(_fact(call, what, (), text), hint, see)
    error = torch.where(got == expected, 0.0, (got - expected).abs())
    excess = torch.where(got == expected, -1.0, error - atol - rtol * expected.abs()).nan_to_num(nan=torch.inf)
    bad = excess > 0
    if not bad.any():
        return
    worst = _unravel(excess.flatten().argmax().item(), excess.shape)
    a, b, off = (t[worst].item() for t in (expected, got, error))
    text = f"expected {a:.6g}, got {b:.6g}"
    if math.isfinite(off):
        text += f", off by {off:.2g} where {atol + rtol * abs(a):.2g} is allowed"
    if got.numel() > 1:
        first = _unravel(bad.flatten().int().argmax().item(), bad.shape)
        text += f"; {bad.sum().item()} of {count(bad.numel(), 'element')} differ, the first at {index(first)}"
    raise wrong(_fact(call, what, worst, text), hint, see)


def expect_raises(error, function, *args, match=None, hint=None, see=None, call=None, **kwargs):
    """Fail unless the call raises `error` with `match` somewhere in its message. Returns the exception."""
    __tracebackhide__ = True
    call = call or _call_text(function, args, kwargs)
    try:
        got = function(*args, **kwargs)
    except error as raised:
        if match is not None and match not in str(raised):
            text = f"its {type(raised).__name__} does not mention {match!r}: {cut(str(raised))}"
            raise wrong(f"{call}: {text}", hint, see) from raised
        return raised
    except Exception as raised:
        text = f"expected {_name(error)}, got {type(raised).__name__}: {cut(str(raised))}"
        raise wrong(f"{call}: {text}", hint, see) from raised
    raise wrong(f"{call}: expected {_name(error)}, but nothing was raised; it returned {shorten(got)}", hint, see)


class Rng:
    """Seeded randomness: a function of the salt and of `--grade-seed` alone."""

    def __call__(self, salt) -> random.Random:
        return random.Random(self.number(salt))

    def torch(self, salt):
        """A CPU `torch.Generator`."""
        import torch

        return torch.Generator().manual_seed(self.number(salt))

    def number(self, salt) -> int:
        seed = int(os.environ.get("GRADE_SEED") or 0)
        return int.from_bytes(hashlib.blake2b(f"{seed}/{salt}".encode(), digest_size=7).digest())


rng = Rng()


def _fact(call: str | None, what: str, path: tuple, text: str) -> str:
    asked = "{i}" in what or "{r}" in what
    if path:
        places = {"{i}": index(path), "{r}": str(path[0]), "{c}": str(path[min(1, len(path) - 1)])}
        for mark, place in places.items():
            what = what.replace(mark, place)
        where = "" if asked else f" at {index(path)}"
    else:  # a difference of the whole: its length, its type
        what, where = " ".join(what.replace("{i}", "").replace("{r}", "").replace("{c}", "").split()), ""
    return f"{cut(call, 100)}: {what}{where}: {text}" if call else f"{what}{where}: {text}"


def _name(error) -> str:
    return " or ".join(e.__name__ for e in error) if isinstance(error, tuple) else error.__name__


def _call_text(function, args, kwargs) -> str:
    name = getattr(function, "__qualname__", repr(function)).replace("<locals>.", "")
    return cut(f"{name}({', '.join([*map(shorten, args), *(f'{k}={shorten(v)}' for k, v in kwargs.items())])})", 100)


def _unravel(flat: int, shape) -> tuple[int, ...]:
    place = []
    for size in reversed(shape):
        flat, rest = divmod(flat, size)
        place.append(rest)
    return tuple(reversed(place))
