"""The persistent batch: what the device must know of a running request stays there, a row for each."""

from enum import IntEnum

import numpy as np
import torch

from engine.exercises import exercise, fill
from engine.serve.device_sampler import drawn_with


class Field(IntEnum):
    """Lines of the packed numbers of a decode step; one column for each row of the batch."""

    ROW = 0  # of the block tables
    TOKEN = 1  # to compute
    POSITION = 2  # of that token; -1: padding
    SOURCE = 3  # place of the token among those that the step before sampled; -1: TOKEN says it
    SEED = 4
    PLACE = 5  # output position that is sampled
    HEAT = 6  # the temperature, as the bits of a float64
    CELL = 7  # of the tables: one that changes
    BLOCK = 8  # its new value


class Rows:
    """A row of block ids on the device for each running request, and how to fill the packed numbers of a step.

    tables: [num_rows * width + 1] i32, flat; the last cell takes the updates of columns that have none.
    row_of: dict Request -> its row.  table_of[row]: the block table (the very list) that the row mirrors.
    known[row]: how many of its blocks are there.  facts: per row, in arrays [num_rows]: prompt length, seed, heat.
    """

    def __init__(self, num_rows: int, width: int, device):
        self.num_rows, self.width = num_rows, width
        self.tables = torch.zeros(num_rows * width + 1, dtype=torch.int32, device=device)
        self.row_of: dict = {}
        self.table_of: list[list[int] | None] = [None] * num_rows
        self.known = [0] * num_rows
        self.free = list(range(num_rows))
        self.prompts, self.seeds = (np.zeros(num_rows, dtype=np.int64) for _ in "ps")
        self.heats = np.zeros(num_rows, dtype=np.float64)
        self._places = np.arange(num_rows)  # 0, 1, 2, …: SOURCE of columns whose tokens were sampled in their order
        self._no_update = np.array([[self.unused], [0]])  # CELL and BLOCK of columns without one

    @property
    def unused(self) -> int:
        """The cell that nobody reads."""
        return self.num_rows * self.width

    def enter(self, request, table: list[int], heat: float, live) -> int:
        """Give a request a row and upload its table; `live`: the block tables of all requests that own blocks."""
        row = self.row_of.get(request)
        if row is None:
            if not self.free:
                self._sweep(live)
            row = self.row_of[request] = self.free.pop()
        self.table_of[row] = table
        self.prompts[row] = request.num_prompt_tokens
        self.seeds[row], self.heats[row] = drawn_with(request.params)[1], heat
        begin = row * self.width
        self.tables[begin : begin + len(table)] = torch.tensor(table, dtype=torch.int32)
        self.known[row] = len(table)
        return row

    def _sweep(self, live) -> None:
        """Take back the rows of requests that own no blocks any more."""
        for request in [r for r in self.row_of if r not in live]:
            row = self.row_of.pop(request)
            self.table_of[row] = None
            self.free.append(row)

    def follow(self, packed, before, count: int, grown, block_tables) -> None:
        """Write the columns of the step after `before`: the same requests, each one token further.

        packed, before: [9, B] as for `fill`.  count: columns that are no padding; the token of each is what the step
        before samples in the same place.  grown: those whose table has one block more than at `before`.
        """
        cells, blocks = [], []
        for request in grown:
            row, table = self.row_of[request], block_tables[request]
            self.known[row] = known = len(table)
            cells.append(row * self.width + known - 1)
            blocks.append(table[-1])

        packed[:] = before
        packed[Field.CELL : Field.BLOCK + 1] = self._no_update
        if cells:
            packed[Field.CELL, : len(cells)], packed[Field.BLOCK, : len(cells)] = cells, blocks
        packed[Field.TOKEN, :count], packed[Field.SOURCE, :count] = -1, self._places[:count]
        for line in (Field.POSITION, Field.PLACE):
            np.add(before[line, :count], 1, out=packed[line, :count])

    @exercise(33, "The persistent batch")
    def fill(self, packed, scheduled, block_tables, sources, heat_of) -> None:
        """Write the columns of a decode step.  (Your engine: Chapter 33)

        packed: [9, B] int64 numpy array; its lines are those of Field, all of it is written.  scheduled: list of
        (request, 1), at most B of them; each computes its newest token.  block_tables: dict Request -> list of blocks.
        sources: for each scheduled request, in order, where the device finds its token (Field.SOURCE), or -1.
        heat_of(request): the temperature for the device, asked once for each row that is entered.

        Column i belongs to request i: its row, the newest token, that token's position (num_computed_tokens), its
        source, seed and temperature (from `seeds` and `heats`, the latter as float64 bits), and PLACE, which is the
        position + 1 - prompt length. A request without a row, or whose block table is another list than
        table_of[row], is entered first: self.enter(request, table, heat_of(request), block_tables) -> row.
        A table that grew since (len > known[row]) needs one update for each new block, CELL = row * width + its place,
        in any columns; known[row] follows. If the updates are more than B, upload those tables by `enter` instead.
        Columns from len(scheduled) on are padding: position and source -1, zeros otherwise. Columns without an update
        have CELL = self.unused and BLOCK 0. Nothing of the step before may remain.
        Source: the persistent batch of vLLM V1.
        """
        raise NotImplementedError


fill(__name__)
