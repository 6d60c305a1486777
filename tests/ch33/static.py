"""decode_inputs: what a decode step computes from its packed numbers, beside a plain loop over the columns."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.serve.graphs import decode_inputs
from engine.serve.rows import Field
from tests.grading import expect, expect_equal, grades, rng

STATIC = "33: Static buffers"
POISON = 900_000  # in cells that nobody wrote
NAMES = ("tokens", "positions", "seq_lens", "block_table", "slots")


def column(row=0, token=0, position=0, source=-1, cell=None, block=0):
    """The numbers of one column; position -1 is padding."""
    return {Field.ROW: row, Field.TOKEN: token, Field.POSITION: position, Field.SOURCE: source,
            Field.CELL: cell, Field.BLOCK: block}  # fmt: skip


def pack(columns, unused):
    packed = torch.full((len(Field), len(columns)), 5)
    for i, numbers in enumerate(columns):
        for line, value in numbers.items():
            packed[line, i] = unused if value is None else value
    return packed


def plain(packed, tables, width, previous, block_size):
    """(the five results as lists, the tables afterwards), column by column."""
    columns, tables, previous = packed.T.tolist(), tables.tolist(), previous.tolist()
    for numbers in columns:
        tables[numbers[Field.CELL]] = numbers[Field.BLOCK]
    results = [[] for _ in NAMES]
    for numbers in columns:
        position, source = numbers[Field.POSITION], numbers[Field.SOURCE]
        row = tables[numbers[Field.ROW] * width :][:width]
        there = max(position, 0)
        slot = -1 if position < 0 else row[there // block_size] * block_size + there % block_size
        token = previous[source] if source != -1 else numbers[Field.TOKEN]
        for result, value in zip(results, (token, there, position + 1, row, slot), strict=True):
            result.append(value)
    return results, tables


def compare(columns, tables, width, previous, block_size, hint=None):
    unused = len(tables) - 1
    packed, table = pack(columns, unused), torch.tensor(tables, dtype=torch.int32)
    expected, after = plain(packed, table, width, torch.tensor(previous), block_size)
    given, before = table, packed.clone()
    got = decode_inputs(packed, given, width, torch.tensor(previous), block_size)
    expect_equal(len(got), 5, "number of results of decode_inputs", see=STATIC)
    for name, mine, right in zip(NAMES, got, expected, strict=True):
        expect_equal(mine, right, f"{name}[{{i}}]", hint, STATIC)
        dtype = torch.int32 if name in ("seq_lens", "block_table") else torch.int64
        expect(mine.dtype == dtype, f"{name} is {mine.dtype}, not {dtype}", see=STATIC)
    expect_equal(given[:unused], after[:unused], "cell {i} of the tables afterwards", "updates go in, in place", STATIC)
    expect_equal(packed, before, "packed number {i} afterwards", "they are given, not to be changed", STATIC)


def filled(num_rows, width, blocks):
    """Tables whose cells hold poison but for `blocks`: dict (row, place) -> block."""
    tables = [POISON] * (num_rows * width + 1)
    for (row, place), block in blocks.items():
        tables[row * width + place] = block
    return tables


@grades(decode_inputs)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_a_token_goes_to_the_slot_of_its_position(block_size):
    width = 3
    for position in range(width * block_size):
        blocks = {(2, place): 40 + 7 * place for place in range(position // block_size + 1)}
        hint = f"block_size {block_size}: position {position} is in place {position // block_size} of the table"
        compare([column(row=2, position=position)], filled(4, width, blocks), width, [0], block_size, hint)


@grades(decode_inputs)
def test_tokens_come_from_the_host_or_from_the_step_before():
    columns = [column(i, 10 + i, i, source) for i, source in enumerate((-1, 0, 2, 0, -1))]
    compare(columns, list(range(5 * 2 + 1)), 2, [71, 72, 73], 4, "SOURCE -1: TOKEN; else previous[SOURCE]")


@grades(decode_inputs)
@pytest.mark.parametrize("longer", [False, True])
def test_the_step_before_had_another_size(longer):
    previous = list(range(500, 540)) if longer else [500]
    columns = [column(i, 10 + i, i, source) for i, source in enumerate((39 if longer else 0, -1, 0))]
    compare(columns, list(range(4 * 2 + 1)), 2, previous, 4, f"previous has {len(previous)} tokens, not 3")


@grades(decode_inputs)
def test_padding_is_stored_nowhere_and_attends_to_nothing():
    columns = [column(1, 8, 5), *[column(position=-1)] * 3]
    compare(columns, list(range(30, 30 + 3 * 2 + 1)), 2, [3], 4, "padding: position 0, length 0, slot -1")


@grades(decode_inputs)
def test_updates_come_before_anything_is_read():
    """The token of a new block: its table reaches it by an update of the very same step, in another column."""
    columns = [column(1, 8, 8, cell=4 * 3), column(4, 9, 4, cell=1 * 3 + 2, block=55), column(0, 7, 2, cell=4 * 3 + 1)]
    columns[0][Field.BLOCK], columns[2][Field.BLOCK] = 61, 62
    blocks = {(1, 0): 50, (1, 1): 51, (0, 0): 70}
    compare(columns, filled(5, 3, blocks), 3, [1], 4, "tables[CELL] = BLOCK first")


@grades(decode_inputs)
def test_columns_without_an_update_disturb_no_table():
    columns = [column(i, 5, 3) for i in range(4)]
    compare(columns, list(range(70, 70 + 4 * 2 + 1)), 2, [1], 2, "the last cell belongs to no row")


@grades(decode_inputs)
def test_rows_in_any_order():
    columns = [column(row, 5 + row, row) for row in (3, 0, 5, 1)]
    compare(columns, list(range(100, 100 + 6 * 3 + 1)), 3, [1], 2, "block_table[i] is row ROW[i] of the tables")


@grades(decode_inputs)
def test_random_steps():
    random = rng("static")
    for _ in range(60):
        size, width, block_size = random.randint(1, 9), random.randint(1, 5), random.choice([1, 2, 5, 16])
        num_rows = random.randint(size, 12)
        rows, cells = random.sample(range(num_rows), size), random.sample(range(num_rows * width), size)
        previous = [random.randrange(9999) for _ in range(random.randint(1, 12))]
        columns = []
        for row, cell in zip(rows, cells, strict=True):
            position = random.randrange(-1, width * block_size)
            source = random.choice([-1, random.randrange(len(previous))]) if position >= 0 else -1
            update = (cell, random.randrange(999)) if random.random() < 0.5 else (None, 0)
            columns.append(column(row if position >= 0 else 0, random.randrange(9999), position, source, *update))
        tables = [random.randrange(999) for _ in range(num_rows * width + 1)]
        compare(columns, tables, width, previous, block_size)


class Recorder(TorchDispatchMode):
    """The operations that run, with the shapes of their results."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        shapes = [tuple(x.shape) for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, torch.Tensor)]
        self.seen.append((str(function), shapes))
        return out


def recorded(columns, width=3, num_rows=40):
    packed, tables = pack(columns, num_rows * width), torch.zeros(num_rows * width + 1, dtype=torch.int32)
    previous = torch.arange(9)
    with Recorder() as recorder:
        decode_inputs(packed, tables, width, previous, 4)
    return recorder.seen


@grades(decode_inputs)
def test_the_same_operations_whatever_the_numbers_are():
    """A graph replays what was recorded: it cannot look at a value, nor at how many columns are padding."""
    padding = recorded([column(position=-1)] * 6)
    mixed = recorded([column(i, 5, i, i - 1, cell=i) for i in range(3)] + [column(position=-1)] * 3)
    full = recorded([column(i, 5, i + 5, 3, cell=i, block=2) for i in range(6)])
    hint = "no `if` on a value, no boolean index, no shape that depends on a number"
    for other in (mixed, full):
        expect_equal([x for x, _ in other], [x for x, _ in padding], "operation number {i}", hint, STATIC)
        expect_equal([x for _, x in other], [x for _, x in padding], "shape of operation number {i}", hint, STATIC)


@grades(decode_inputs)
def test_no_loop_over_the_columns():
    few, many = recorded([column(i, 5, i) for i in range(2)]), recorded([column(i, 5, 3) for i in range(30)])
    text = f"2 columns take {len(few)} operations, 30 columns {len(many)}"
    expect(len(many) == len(few), text, "each operation is a launch: all columns at once", STATIC)


@grades(decode_inputs)
def test_nothing_is_read_on_the_host():
    """On the device 'meta' tensors have shapes and no values: whoever reads one fails."""
    packed, tables = torch.zeros(len(Field), 4, dtype=torch.int64, device="meta"), torch.zeros(13, device="meta").int()
    try:
        got = decode_inputs(packed, tables, 3, torch.zeros(2, dtype=torch.int64, device="meta"), 4)
    except (NotImplementedError, RuntimeError) as error:
        expect(False, f"a value is read on the host: {str(error)[:80]}", "a read waits for the device", STATIC)
    shapes = [tuple(x.shape) for x in got]
    expect_equal(shapes, [(4,), (4,), (4,), (4, 3), (4,)], "shape of result {i}", see=STATIC)
