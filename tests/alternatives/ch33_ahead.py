"""Right answers of chapter 33's second half, built differently."""

from tests.alternatives import alternative

alternative(
    "Rows.fill",
    name="column-by-column",
    source="""
        def fill(self, packed, scheduled, block_tables, sources, heat_of):
            grown = []
            for request, _ in scheduled:
                table, row = block_tables[request], self.row_of.get(request)
                if row is None or self.table_of[row] is not table:
                    self.enter(request, table, heat_of(request), block_tables)
                elif len(table) > self.known[row]:
                    grown.append((request, row, table))
            updates = [(row * self.width + j, t[j]) for _, row, t in grown for j in range(self.known[row], len(t))]
            if len(updates) > packed.shape[1]:  # all of them as tables, then
                updates = []
                for request, _, table in grown:
                    self.enter(request, table, heat_of(request), block_tables)
            for _, row, table in grown:
                self.known[row] = len(table)
            updates += [(self.unused, 0)] * (packed.shape[1] - len(updates))
            for i, (cell, block) in enumerate(reversed(updates)):
                numbers = dict.fromkeys(Field, 0) | {Field.POSITION: -1, Field.SOURCE: -1}
                if i < len(scheduled):
                    request = scheduled[i][0]
                    row, position = self.row_of[request], request.num_computed_tokens
                    numbers = {
                        Field.ROW: row, Field.TOKEN: request.token_ids[-1], Field.POSITION: position,
                        Field.SOURCE: sources[i], Field.SEED: self.seeds[row],
                        Field.PLACE: position + 1 - request.num_prompt_tokens,
                        Field.HEAT: self.heats[row : row + 1].view(np.int64)[0],
                    }
                numbers |= {Field.CELL: cell, Field.BLOCK: block}
                for line, value in numbers.items():
                    packed[line, i] = value
    """,
)
alternative(
    "decode_inputs",
    name="flat-cells",
    source="""
        def decode_inputs(packed, tables, width, previous, block_size):
            tables.index_put_((packed[Field.CELL],), packed[Field.BLOCK].to(tables.dtype))
            real = packed[Field.POSITION] >= 0
            positions = packed[Field.POSITION] * real
            fed = packed[Field.SOURCE] >= 0
            tokens = torch.where(fed, previous.index_select(0, packed[Field.SOURCE] * fed), packed[Field.TOKEN])
            begin = packed[Field.ROW] * width
            table = tables[begin[:, None] + torch.arange(width, device=packed.device)]
            block = tables[begin + torch.div(positions, block_size, rounding_mode="floor")].long()
            slots = (block * block_size + torch.remainder(positions, block_size)).masked_fill(~real, -1)
            return tokens, positions, ((positions + 1) * real).to(torch.int32), table, slots
    """,
)
# No line may run under `undo` once `launch` has returned: a flight that is dropped then leaves tokens that belong to
# nobody in the runner's `previous`. So each call has a handler of its own, in a frame that ends with it.
alternative(
    "OverlappedCore.step",
    name="a-handler-for-each-call",
    source="""
        def step(self):
            def attempt(call, *given, copied):
                try:
                    return call(*given)
                except BaseException:
                    self.scheduler.undo(out, copied)
                    raise

            outputs = []
            with self.atomic:
                out = None if self.flights and self.may_preempt() else self.scheduler.schedule()
                if out is None or out.empty:
                    outputs.extend(self.collect())
                else:
                    attempt(self.runner.swap, out, copied=False)
                    self.flights.append(attempt(self.runner.launch, out, self.blocks.block_tables, copied=True))
                    self.num_steps, self.num_preemptions = self.num_steps + 1, self.num_preemptions + len(out.preempted)
                    self.num_scheduled_tokens += sum(n for _, n in out.scheduled)
                    self.advance(out)
                    while len(self.flights) > int(self.has_unfinished):
                        outputs.extend(self.collect())
                return outputs
    """,
)
alternative(
    "OverlappedCore.collect",
    name="publishes-by-itself",
    source="""
        def collect(self):
            if not self.flights:
                return []
            flight, outputs = self.flights.popleft(), []
            for (request, _), new in zip(flight.scheduled, flight.tokens(), strict=True):
                if request.status.finished or len(new) == 0:
                    continue
                place = len(request.token_ids) - request.num_placeholders
                self.atomic.before.append((request, place))
                request.token_ids[place : place + 1] = new
                request.num_placeholders = len(request.token_ids) - place - 1
                stopped = self.check_stop(request, place - len(request.prompt_token_ids))
                if stopped:
                    self.end(request, stopped)
                else:
                    self.blocks.cache_full_blocks(request)
                outputs.append(self.output(request, new))
            while flight.held:
                self.blocks.free(flight.held.pop())
            return outputs
    """,
)
