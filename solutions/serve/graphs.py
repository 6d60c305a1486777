import torch

from engine.serve.rows import Field


def decode_inputs(packed, tables, width, previous, block_size):
    tables[packed[Field.CELL]] = packed[Field.BLOCK].int()
    position, source = packed[Field.POSITION], packed[Field.SOURCE]
    padding, positions = position < 0, position.clamp(min=0)
    tokens = torch.where(source < 0, packed[Field.TOKEN], previous[source.clamp(min=0)])
    block_table = tables[:-1].view(-1, width)[packed[Field.ROW]]
    blocks = block_table.gather(1, (positions // block_size)[:, None])[:, 0].long()
    slots = torch.where(padding, -1, blocks * block_size + positions % block_size)
    return tokens, positions, (position + 1).int(), block_table, slots
