"""One step as flat tensors: every scheduled token is a row, whichever request it belongs to."""

from array import array
from dataclasses import dataclass, field

import torch

from engine.exercises import exercise, fill
from engine.serve.request import Request

CODES = {torch.int32: "i", torch.int64: "q"}


@dataclass
class BatchMeta:
    """What attention needs to know about the rows of a step.  R requests, N rows, W the widest block table.

    query_start_loc [R+1] i32: request r owns rows query_start_loc[r] .. query_start_loc[r+1] - 1.
    seq_lens [R] i32: tokens in the pool once this step has written its own; 0 for a padding request.
    block_table [R, W] i32: physical block of each logical block; what lies past a request's length is never read.
    slot_mapping [N] i64: where a row's K and V go, block * block_size + offset; -1 for a padding row.
    The two `_cpu` copies and the two maxima spare the backends a wait for the device.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    block_size: int
    query_start_loc_cpu: torch.Tensor
    seq_lens_cpu: torch.Tensor
    max_query_len: int
    max_seq_len: int

    @property
    def num_reqs(self) -> int:
        return len(self.seq_lens_cpu)

    @property
    def decode_only(self) -> bool:
        return self.max_query_len == 1


@dataclass
class Batch:
    """The input of one forward pass.

    input_ids [N], positions [N] i64.  logits_indices [L] i64: the rows whose logits are needed, first those to sample,
    request by request, then those for prompt log-probabilities.  sample_counts: rows to sample of each request.
    prompt_spans: (request, position of the first of its prompt rows, how many), in the order of those rows.
    request_ids: the real requests in order; padding has none.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    meta: BatchMeta
    logits_indices: torch.Tensor
    sample_counts: list[int]
    request_ids: list[str]
    prompt_spans: list[tuple[Request, int, int]] = field(default_factory=list)
    extra: dict = field(default_factory=dict)


def int_tensor(numbers, dtype, device="cpu") -> torch.Tensor:
    """A list of ints as a tensor of dtype int32 or int64; about five times as fast as torch.tensor."""
    if not numbers:
        return torch.empty(0, dtype=dtype, device=device)
    return torch.frombuffer(array(CODES[dtype], numbers), dtype=dtype).to(device)


def table_tensor(tables, device="cpu") -> torch.Tensor:
    """Block ids as one table [R, W] i32.  tables: (list of ids, how many of them count); zeros fill up shorter rows."""
    width = max((count for _, count in tables), default=0)
    packed, zeros = array("i"), array("i", [0] * width)
    for table, count in tables:
        packed.fromlist(table if len(table) == count else table[:count])
        packed += zeros[count:]
    return int_tensor(packed, torch.int32, device).view(len(tables), width)


@exercise(31, "The flattened ragged batch")
def build_batch(scheduled, block_tables, block_size, device="cpu", pad_to=None) -> Batch:
    """Lay the scheduled tokens of all requests out as rows.  (Your engine: Chapter 31)

    scheduled: list of (request, n).  The n tokens of a request are those that follow its computed ones in
    token_ids + spec_token_ids; their positions follow on too.  Requests keep their order, tokens theirs.
    block_tables: for each request (the key is the Request) its physical blocks in logical order.
    Row of position p: slot = block_tables[request][p // block_size] * block_size + p % block_size.
    A request's seq_len is its computed tokens + n, of which the n are written by this very step.

    Rows that need logits (see Batch): none for a chunk that stops before the last known token (the newest in
    token_ids); otherwise every row from the last known token on: 1 for a decode or a finished prefill, 1 + drafts when
    verifying.  For a request with params.prompt_logprobs not None, also each row whose next token is a prompt token;
    all those come after all rows to sample, and prompt_spans says whose they are (no entry for a request without any).

    pad_to: append dummy requests up to that many: one row each, token 0, position 0, slot -1, seq_len 0, not sampled.
    Raises ValueError naming the request if n < 1, if n exceeds the tokens that exist, or if its table is too short.
    Source: the ragged layout of vLLM's and FlashAttention's varlen interface (query_start_loc is their cu_seqlens).
    """
    raise NotImplementedError


fill(__name__)
