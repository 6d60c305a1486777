"""Traces from files: `arrived_at,num_prefill_tokens,num_decode_tokens[,prefix_group]`, one request a line."""

import csv
import math
from dataclasses import replace

from engine.simulate.arrivals import Arrival, shared

COLUMNS = "arrived_at", "num_prefill_tokens", "num_decode_tokens"


def read_trace(path: str, limit: int | None, prefix_tokens: int) -> tuple[list[Arrival], str | None]:
    """The first `limit` requests of a CSV file (None: all), and a remark if they had to be sorted by arrival.

    Requests of one prefix_group share their first prefix_tokens tokens, or the whole of a shorter prompt; those
    without a group share nothing. Further columns are ignored. OSError, or ValueError naming the line and the value.
    """
    rows: list[tuple[float, int, int, str]] = []
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            if missing := [name for name in COLUMNS if name not in (reader.fieldnames or ())]:
                raise ValueError(
                    f"{path}: the first line must name the columns {','.join(COLUMNS)}[,prefix_group]; "
                    f"{', '.join(missing)} missing"
                )
            for row in reader:
                if limit is not None and len(rows) == limit:
                    break
                where = f"{path}, line {reader.line_num}"
                arrived_at = number(where, "arrived_at", row["arrived_at"], float, 0)
                lengths = [number(where, name, row[name], int, 1) for name in COLUMNS[1:]]
                rows.append((arrived_at, *lengths, row.get("prefix_group") or ""))
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a CSV file in UTF-8: {error}") from None
    if not rows:
        raise ValueError(f"{path}: no requests")
    ordered = sorted(rows, key=lambda row: row[0])  # stable: equal times keep their order
    remark = None if ordered == rows else f"{path}: arrivals were not in order; sorted"
    groups: dict[str, int] = {}
    return [to_arrival(i, row, groups, prefix_tokens) for i, row in enumerate(ordered)], remark


def number(where: str, name: str, text: str | None, kind: type, low: int):
    """A finite number of at least `low` from a cell; ValueError with the line and the value."""
    try:
        value = kind(text)
        if not math.isfinite(value) or value < low:
            raise ValueError
    except (TypeError, ValueError):
        what = "an integer" if kind is int else "a number"
        raise ValueError(f"{where}: {name} must be {what} of at least {low}, got {text!r}") from None
    return value


def to_arrival(index: int, row: tuple[float, int, int, str], groups: dict[str, int], prefix_tokens: int) -> Arrival:
    arrived_at, num_prefill, num_decode, group = row
    runs = [(index, num_prefill)]
    if group:
        common = min(prefix_tokens, num_prefill)
        runs = [(shared(groups.setdefault(group, len(groups))), common), (index, num_prefill - common)]
    return Arrival(arrived_at, tuple(run for run in runs if run[1]), num_decode, index)


def faster(arrivals: list[Arrival], speed: float) -> list[Arrival]:
    """The same requests, `speed` times as fast."""
    return [replace(arrival, at=arrival.at / speed) for arrival in arrivals]
