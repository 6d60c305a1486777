"""Rows.fill: every number of every column, and tables on the device that follow those of the block manager."""

from types import SimpleNamespace

import numpy as np
import pytest

from engine.serve.request import Request, SamplingParams
from engine.serve.rows import Field, Rows
from tests.grading import expect, expect_equal, grades, rng

BATCH = "33: The persistent batch"
GARBAGE = 7_777_777  # what the step before left everywhere
fill = Rows.fill


class Bench:
    """Rows, the block tables that they mirror, and after each fill a comparison with plain loops over both."""

    def __init__(self, num_rows=6, width=5, size=4):
        self.rows, self.packed = Rows(num_rows, width, "cpu"), np.full((len(Field), size), GARBAGE)
        self.tables, self.heats, self.mirrored = {}, {}, {}
        self.entered, self.asked, self.count = [], [], 0
        self.rows.enter = self._entering(self.rows.enter)

    def _entering(self, enter):
        def entering(request, table, heat, live):
            self.entered.append(request)
            expect(table is self.tables[request], "enter wants the request's block table, the very list", see=BATCH)
            expect_equal(heat, self.heats[request], "temperature given to enter", "heat_of(request)", BATCH)
            expect(live is self.tables, "enter wants all block tables, to tell who still lives", see=BATCH)
            return enter(request, table, heat, live)

        return entering

    def heat_of(self, request):
        self.asked.append(request)
        return self.heats[request]

    def add(self, prompt, outputs, blocks, heat=0.0, seed=None):
        """A request past its prefill whose newest token is not computed."""
        self.count += 1
        request = Request(f"r{self.count}", list(range(prompt)), SamplingParams(max_tokens=1 << 20, seed=seed))
        request.token_ids += [1000 * self.count + i for i in range(outputs)]
        request.num_computed_tokens = request.num_tokens - 1
        self.tables[request], self.heats[request] = list(blocks), heat
        return request

    def fill(self, requests, sources=None, packed=None):
        """Fill, compare, and do to the tables what the device does."""
        rows, packed = self.rows, self.packed if packed is None else packed
        sources = [-1] * len(requests) if sources is None else sources
        before = rows.tables.clone()
        new = [r for r in requests if rows.row_of.get(r) is None or rows.table_of[rows.row_of[r]] is not self.tables[r]]
        grown = {r: range(self.mirrored[r], len(self.tables[r])) for r in requests if r not in new}
        self.entered, self.asked = [], []
        rows.fill(packed, [(r, 1) for r in requests], self.tables, sources, self.heat_of)
        self._check_columns(packed, requests, sources)
        self._check_updates(packed, new, grown)
        others = [r for r in rows.row_of if r not in requests and r in self.tables]
        for cell, block in zip(packed[Field.CELL].tolist(), packed[Field.BLOCK].tolist(), strict=True):
            rows.tables[cell] = block
        for request in requests:
            row, table = rows.row_of[request], self.tables[request]
            got = rows.tables[row * rows.width :][: len(table)]
            expect_equal(got, table, f"block {{i}} of {request.request_id} on the device", "enter or update", BATCH)
            expect_equal(rows.known[row], len(table), f"known blocks of {request.request_id}", see=BATCH)
            self.mirrored[request] = len(table)
        for request in others:
            part = slice(rows.row_of[request] * rows.width, (rows.row_of[request] + 1) * rows.width)
            what = f"cell {{i}} of {request.request_id}, who is not in this step"
            expect_equal(rows.tables[part], before[part], what, see=BATCH)
        return packed

    def _check_columns(self, packed, requests, sources):
        for i, request in enumerate(requests):
            place = f"column {i} ({request.request_id})"
            expected = {
                Field.ROW: self.rows.row_of[request],
                Field.POSITION: request.num_computed_tokens,
                Field.SOURCE: sources[i],
                Field.SEED: request.params.seed or 0,
                Field.PLACE: len(request.token_ids) - len(request.prompt_token_ids),
                Field.HEAT: np.float64(self.heats[request]).view(np.int64).item(),
            }
            if sources[i] < 0:
                expected[Field.TOKEN] = request.token_ids[-1]
            for line, value in expected.items():
                expect_equal(packed[line, i].item(), value, f"{line.name} of {place}", see=BATCH)
        for i in range(len(requests), packed.shape[1]):
            for line in Field:
                if line not in (Field.CELL, Field.BLOCK):
                    value = -1 if line in (Field.POSITION, Field.SOURCE) else 0
                    hint = "nothing of the step before may remain"
                    expect_equal(packed[line, i].item(), value, f"{line.name} of column {i}, padding", hint, BATCH)

    def _check_updates(self, packed, new, grown):
        rows, columns = self.rows, packed.shape[1]
        cells, blocks = packed[Field.CELL].tolist(), packed[Field.BLOCK].tolist()
        for i, (cell, block) in enumerate(zip(cells, blocks, strict=True)):
            if cell == rows.unused:
                expect_equal(block, 0, f"BLOCK of column {i}, which has no update", see=BATCH)
        updates = [pair for pair in zip(cells, blocks, strict=True) if pair[0] != rows.unused]
        wanted = [(rows.row_of[r] * rows.width + j, self.tables[r][j]) for r, places in grown.items() for j in places]
        if len(wanted) <= columns:
            names, fresh = ([r.request_id for r in x] for x in (self.entered, new))
            expect_equal(names, fresh, "request number {i} that was entered", "only those without a row", BATCH)
            what = "update number {i} (cell, block), in order of the cells"
            expect_equal(sorted(updates), sorted(wanted), what, "one for each new block of a table that grew", BATCH)
        else:
            stray = set(updates) - set(wanted)
            expect(not stray, f"{len(stray)} updates are for no new block", see=BATCH)
        asked = [r.request_id for r in self.asked]
        expect_equal(asked, [r.request_id for r in self.entered], "request number {i} whose temperature was asked")


@grades(fill)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_column_for_each_request(count):
    bench, random = Bench(), rng(f"columns {count}")
    requests = [
        bench.add(random.randint(1, 30), random.randint(1, 30), random.sample(range(99), 3), 0.7, seed)
        for seed in [random.getrandbits(63) for _ in range(count)]
    ]
    bench.fill(requests)
    for request in requests:
        request.token_ids.append(random.randrange(999))
        request.num_computed_tokens += 1
    random.shuffle(requests)
    bench.fill(requests)


@grades(fill)
def test_columns_follow_the_batch_and_not_the_rows():
    bench = Bench()
    a, b, c = (bench.add(3 + i, 2 + i, [10 * i, 10 * i + 1], seed=i) for i in range(3))
    for requests in ([a, b, c], [c, a], [b], [c, b, a]):
        bench.fill(requests)


@grades(fill)
def test_nothing_of_a_larger_batch_remains():
    bench = Bench()
    requests = [bench.add(5, 3 + i, [i], heat=0.5 + i, seed=9 + i) for i in range(4)]
    bench.fill(requests, [3, 2, 1, 0])
    for table in bench.tables.values():
        table.append(90)
    bench.fill(requests)  # four updates
    bench.fill(requests[1:2])
    bench.fill(requests[:3])


@grades(fill)
def test_sources_say_where_a_placeholder_gets_its_value():
    bench = Bench()
    requests = [bench.add(4, 2, [i]) for i in range(4)]
    for request in requests[:2]:
        request.append(-1)
        request.num_placeholders, request.num_computed_tokens = 1, request.num_computed_tokens + 1
    bench.fill(requests, [7, 0, -1, -1])


@grades(fill)
def test_a_table_that_grew_is_updated_cell_by_cell():
    bench = Bench()
    a, b, c = (bench.add(8, 2, blocks) for blocks in ([3, 4], [5], [6, 7, 8]))
    bench.fill([a, b, c])
    bench.tables[a].append(20)
    bench.tables[c].append(21)
    bench.fill([a, b, c])
    bench.tables[b] += [22, 23]  # two at once
    bench.fill([b])
    bench.fill([a, b, c])  # and an update comes once


@grades(fill)
def test_a_table_that_grew_unseen_catches_up():
    """A request may sit out a step, and its table grow meanwhile."""
    bench = Bench()
    a, b = bench.add(8, 2, [3]), bench.add(8, 2, [5])
    bench.fill([a, b])
    bench.tables[b].append(6)
    bench.fill([a])
    bench.tables[b].append(7)
    bench.fill([a, b])


@grades(fill)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_more_updates_than_columns(size):
    bench = Bench(width=9, size=4)
    requests = [bench.add(8, 2, [10 * i]) for i in range(4)]
    bench.fill(requests)
    for i, request in enumerate(requests):
        bench.tables[request] += range(100 * i, 100 * i + 3)
    bench.fill(requests[:size], packed=bench.packed[:, :size])
    bench.fill(requests)


@grades(fill)
def test_a_request_with_another_block_table_is_entered_anew():
    """After a preemption its blocks are others, in another list; it may be shorter or longer than the old one."""
    bench = Bench()
    a, b = bench.add(8, 2, [3, 4, 5]), bench.add(8, 2, [6])
    bench.fill([a, b])
    row = bench.rows.row_of[a]
    for blocks in ([7, 8, 9], [1, 2], [5, 4, 3, 2]):
        bench.tables[a] = list(blocks)
        bench.fill([b, a])
        expect_equal(bench.rows.row_of[a], row, "row of a request that had one", see=BATCH)


@grades(fill)
def test_rows_of_those_who_left_are_taken_again():
    bench = Bench(num_rows=4)
    for turn in range(5):
        requests = [bench.add(4 + turn, 1 + i, [10 * turn + i], heat=turn + 0.25, seed=turn) for i in range(3)]
        bench.fill(requests)
        for request in requests:
            del bench.tables[request]
    expect(len(bench.rows.row_of) <= 4, "more requests than rows have one", see=BATCH)


@grades(fill)
@pytest.mark.parametrize("heat", [0.0, 0.1, 1.0, 1 / 3, 1e-300, 2.5e9])
def test_temperatures_travel_as_the_bits_of_a_float64(heat):
    """A number of another type in the same array: what arrives has to be the very same float64."""
    bench = Bench()
    request = bench.add(3, 2, [1], heat=heat)  # its params say 0: what counts is heat_of
    packed = bench.fill([request])
    expect_equal(packed[Field.HEAT, :1].view(np.float64)[0], heat, "temperature that the device reads", see=BATCH)


@grades(fill)
def test_a_step_asks_the_requests_for_little():
    """What does not change is in the row's arrays: a second step asks for no temperature, and enters nobody."""
    bench = Bench()
    requests = [bench.add(3, 2, [i], heat=i / 7, seed=i) for i in range(4)]
    bench.fill(requests)
    bench.fill(requests)
    expect(not bench.asked and not bench.entered, "a second step entered requests that had their rows", see=BATCH)


@grades(fill)
def test_a_long_life():
    """Random arrivals, ends, growth, preemption and batches of any size, beside plain loops."""
    random, bench, live = rng("long life"), Bench(num_rows=12, width=8, size=6), []
    blocks = SimpleNamespace(next=0)

    def some(count):
        blocks.next += count
        return range(blocks.next - count, blocks.next)

    for _ in range(300):
        if live and random.random() < 0.3:
            del bench.tables[live.pop(random.randrange(len(live)))]
        while len(live) < 10 and random.random() < 0.5:
            live.append(bench.add(random.randint(1, 9), random.randint(1, 9), some(random.randint(1, 4)),
                                  random.random(), random.getrandbits(63)))  # fmt: skip
        for request in live:
            if random.random() < 0.1:
                bench.tables[request] = list(some(random.randint(1, 4)))
            elif random.random() < 0.5 and len(bench.tables[request]) < 8:
                bench.tables[request] += some(random.randint(1, 8 - len(bench.tables[request])))
        size = random.randint(1, 6)
        chosen = random.sample(live, min(len(live), random.randint(1, size)))
        if chosen:
            bench.fill(chosen, [random.choice([-1, 3]) for _ in chosen], bench.packed[:, :size])
