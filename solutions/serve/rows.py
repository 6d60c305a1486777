import numpy as np

from engine.serve.rows import Field


class Rows:
    def fill(self, packed, scheduled, block_tables, sources, heat_of):
        count, size = len(scheduled), packed.shape[1]
        rows, tokens, positions, cells, blocks = [], [], [], [], []
        for request, _ in scheduled:
            table, row = block_tables[request], self.row_of.get(request)
            if row is None or self.table_of[row] is not table:
                row = self.enter(request, table, heat_of(request), block_tables)
            known = self.known[row]
            if len(table) > known:
                if len(cells) + len(table) - known > size:
                    self.enter(request, table, heat_of(request), block_tables)
                else:
                    cells += range(row * self.width + known, row * self.width + len(table))
                    blocks += table[known:]
                    self.known[row] = len(table)
            rows.append(row)
            tokens.append(request.token_ids[-1])
            positions.append(request.num_computed_tokens)

        packed[:] = 0
        packed[Field.POSITION] = packed[Field.SOURCE] = -1
        packed[Field.CELL] = self.unused
        packed[Field.CELL, : len(cells)], packed[Field.BLOCK, : len(cells)] = cells, blocks
        if count:
            real, chosen = packed[:, :count], np.array(rows)
            real[Field.ROW], real[Field.TOKEN] = chosen, tokens
            real[Field.POSITION], real[Field.SOURCE] = positions, sources
            real[Field.SEED] = self.seeds[chosen]
            real[Field.PLACE] = real[Field.POSITION] + 1 - self.prompts[chosen]
            real[Field.HEAT] = self.heats[chosen].view(np.int64)
