"""Where two values first differ, in words that do not give the whole expected value away."""

from dataclasses import dataclass

SHOWN = 8  # entries of a sequence that a message shows
WIDTH = 72  # characters of a value that a message shows
SCALARS = (bool, int, float, complex, str, bytes, type(None))


@dataclass
class Difference:
    path: tuple  # indices and keys that lead to it
    text: str  # "expected 3, got 4"


def is_array(value) -> bool:
    """True for a torch tensor or a numpy array."""
    return hasattr(value, "tolist") and hasattr(value, "shape") and hasattr(value, "dtype")


def shorten(value) -> str:
    """A value on one line, cut where it is long."""
    return cut(_short(value))


def cut(text: str, width: int = WIDTH) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 2] + " …"


def _short(value) -> str:
    if is_array(value):
        entries = f" {_short(value.tolist())}" if len(value.shape) <= 1 else ""
        return f"a tensor {list(value.shape)}{entries}" if len(value.shape) else _short(value.tolist())
    if isinstance(value, bytes) and len(value) > SHOWN:
        return f"{len(value)} bytes {value[:4].hex()}…"
    if type(value) in (list, tuple):
        left, right = "[]" if type(value) is list else "()"
        more = f", … {len(value)} entries" if len(value) > SHOWN else ""
        return f"{left}{', '.join(_short(v) for v in value[:SHOWN])}{more}{right}"
    return repr(value)


def kind(value) -> str:
    """What a value is: "a list of 3 entries", "a tensor [2, 3]", "None: did you forget to return?"."""
    if value is None:
        return "None: did you forget to return?"
    if is_array(value):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {count(len(value), 'entry')}"
    return f"{shorten(value)} ({type(value).__name__})"


def count(n: int, noun: str) -> str:
    plural = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{n} {noun if n == 1 else plural}"


def difference(got, expected, path: tuple = ()) -> Difference | None:
    """The first difference, None where there is none.

    Lists, tuples and arrays are compared as sequences, without regard to which of them it is and to an array's dtype;
    where an integer is expected, 1.0 and True are not 1.
    """
    if is_array(got) and is_array(expected) and list(got.shape) != list(expected.shape):
        return Difference(path, f"expected shape {list(expected.shape)}, got {list(got.shape)}")
    got, expected = (v.tolist() if is_array(v) else v for v in (got, expected))
    if isinstance(expected, (list, tuple)):
        return _in_sequence(got, expected, path)
    if isinstance(expected, dict):
        return _in_dict(got, expected, path)
    if isinstance(expected, (set, frozenset)):
        return _in_set(got, expected, path)
    if type(expected) is float and type(got) is int:
        got = float(got)
    if type(got) is not type(expected) and (isinstance(expected, SCALARS) or isinstance(got, (*SCALARS, list, tuple))):
        return Difference(path, f"expected {shorten(expected)}, got {kind(got)}")
    if got == expected:
        return None
    return Difference(path, _unequal(got, expected))


def _unequal(got, expected) -> str:
    if isinstance(expected, (str, bytes)) and len(expected) > SHOWN:
        pairs = enumerate(zip(got, expected, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(got), len(expected)))
        unit = "byte" if isinstance(expected, bytes) else "character"
        lengths = "" if len(got) == len(expected) else f"; {len(expected)} {unit}s expected, {len(got)} came"
        a, b = (f"{v[at : at + 4]!r}" if v[at:] else "the end" for v in (expected, got))
        return f"expected {a} from {unit} {at} on, got {b}{lengths}"
    a, b = shorten(expected), shorten(got)
    return f"expected {a}, got {b}" if a != b else f"expected {a}, got another one that looks the same"


def _in_sequence(got, expected, path: tuple) -> Difference | None:
    if not isinstance(got, (list, tuple)):
        return Difference(path, f"expected {count(len(expected), 'entry')}, got {kind(got)}")
    pairs = zip(got, expected, strict=False)
    first = next((d for i, (a, b) in enumerate(pairs) if (d := difference(a, b, (*path, i)))), None)
    if len(got) == len(expected):
        return first
    text = f"expected {count(len(expected), 'entry')}, got {len(got)}"
    if first is not None:
        text += f"; the first that differs is {index(first.path[len(path) :])}: {first.text}"
    return Difference(path, text)


def _in_dict(got, expected, path: tuple) -> Difference | None:
    if not isinstance(got, dict):
        return Difference(path, f"expected a dict of {count(len(expected), 'key')}, got {kind(got)}")
    for key in expected:
        if key not in got:
            return Difference(path, f"key {shorten(key)} is missing")
        if found := difference(got[key], expected[key], (*path, key)):
            return found
    extra = next((key for key in got if key not in expected), None)
    return None if len(got) == len(expected) else Difference(path, f"key {shorten(extra)} is one too many")


def _in_set(got, expected, path: tuple) -> Difference | None:
    if not isinstance(got, (set, frozenset)):
        return Difference(path, f"expected a set of {count(len(expected), 'entry')}, got {kind(got)}")
    missing, extra = (sorted(s, key=repr) for s in (expected - got, got - expected))
    words = [f"{shorten(missing[0])} is missing"] if missing else []
    words += [f"{shorten(extra[0])} is one too many"] if extra else []
    return Difference(path, ", ".join(words)) if words else None


def index(path: tuple) -> str:
    """`3`, or `(2, 17)` for a place in something nested."""
    return str(path[0]) if len(path) == 1 else f"({', '.join(map(str, path))})"
