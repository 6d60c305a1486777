"""build_batch: the flattened ragged batch, against an account of one row after the other."""

import pytest
import torch

from engine.serve.attention import get_backend
from engine.serve.batch import build_batch
from engine.serve.flat import FlatModel
from engine.serve.request import Request, SamplingParams
from engine.serve.sizing import cache_shape
from tests.ch31.plain_model import model_of
from tests.grading import expect, expect_equal, expect_raises, grades, rng

LAYOUT = "31: The flattened ragged batch"
LOGITS_HINT = "logits are needed from the last known token on; with drafts behind it, of each of them too"


def request_of(name, random, prompt, output=0, computed=0, drafts=0, prompt_logprobs=None):
    params = SamplingParams(prompt_logprobs=prompt_logprobs)
    request = Request(name, [random.randrange(1, 150_000) for _ in range(prompt)], params, arrival_time=0.0)
    for _ in range(output):
        request.append(random.randrange(1, 150_000))
    request.spec_token_ids = [random.randrange(1, 150_000) for _ in range(drafts)]
    request.num_computed_tokens = computed
    return request


def tables_of(random, requests, size, spare=1):
    """A table for each, its physical blocks from all over the pool."""
    counts = [-(-request.num_tokens_with_spec // size) + random.randint(0, spare) for request in requests]
    ids = random.sample(range(3 * sum(counts) + 5), sum(counts))
    return {request: [ids.pop() for _ in range(count)] for request, count in zip(requests, counts, strict=True)}


def check(scheduled, tables, size, pad_to=None):
    """Build the batch and compare everything in it with what the docstring says of each row and each request."""
    before = [(list(r.token_ids), list(r.spec_token_ids), r.num_computed_tokens, list(tables[r])) for r, _ in scheduled]
    batch = build_batch(scheduled, tables, size, pad_to=pad_to)
    after = [(list(r.token_ids), list(r.spec_token_ids), r.num_computed_tokens, list(tables[r])) for r, _ in scheduled]
    expect_equal(after, before, what="what build_batch was given, afterwards, at {i}", hint="only read it", see=LAYOUT)

    padding = max(0, (pad_to or 0) - len(scheduled))
    rows = [(r, p) for r, n in scheduled for p in range(r.num_computed_tokens, r.num_computed_tokens + n)]
    rows += [(None, 0)] * padding
    for name in ("input_ids", "positions"):
        expect_equal(len(getattr(batch, name)), len(rows), what=f"rows of {name}, padding included", see=LAYOUT)
    expect_equal(len(batch.meta.slot_mapping), len(rows), what="rows of slot_mapping, padding included", see=LAYOUT)
    for i, (request, p) in enumerate(rows):
        where, token, slot = "a padding row", 0, -1
        if request is not None:
            token = [*request.token_ids, *request.spec_token_ids][p]
            slot = tables[request][p // size] * size + p % size
            where = f"request {request.request_id!r}, position {p}, which is offset {p % size} of its block {p // size}"
        expect_equal(batch.input_ids[i].item(), token, what=f"input_ids[{i}] ({where})", see=LAYOUT)
        expect_equal(batch.positions[i].item(), p, what=f"positions[{i}] ({where})", see=LAYOUT)
        got, hint = batch.meta.slot_mapping[i].item(), "slot = block * block_size + offset"
        expect_equal(got, slot, what=f"slot_mapping[{i}] ({where})", hint=hint, see=LAYOUT)
    check_meta(batch.meta, scheduled, tables, size, padding)
    check_logits(batch, scheduled, rows)
    return batch


def check_meta(meta, scheduled, tables, size, padding):
    counts = [n for _, n in scheduled] + [1] * padding
    lengths = [r.num_computed_tokens + n for r, n in scheduled] + [0] * padding
    starts = [sum(counts[:r]) for r in range(len(counts) + 1)]
    for name, expected in (("query_start_loc", starts), ("seq_lens", lengths)):
        for copy in (name, f"{name}_cpu"):
            expect_equal(getattr(meta, copy), expected, what=f"{copy}[{{i}}]", see=LAYOUT)
    expect_equal(meta.max_query_len, max(counts), what="max_query_len", see=LAYOUT)
    expect_equal(meta.max_seq_len, max(lengths), what="max_seq_len", see=LAYOUT)
    expect_equal(meta.num_reqs, len(counts), what="num_reqs", see=LAYOUT)
    expect_equal(meta.block_size, size, what="block_size", see=LAYOUT)
    got = meta.block_table
    message = f"block_table: expected a row for each of {len(counts)} requests, got shape {list(got.shape)}"
    expect(got.ndim == 2 and got.shape[0] == len(counts), message, see=LAYOUT)
    for r, (request, _) in enumerate(scheduled):
        blocks = tables[request][: -(-lengths[r] // size)]
        what = f"block {{i}} in block_table of request {request.request_id!r}"
        expect_equal(got[r, : len(blocks)], blocks, what=what, see=LAYOUT)


def check_logits(batch, scheduled, rows):
    sampled, prompt = [], {}
    for request, _ in scheduled:
        mine = [i for i, (owner, _) in enumerate(rows) if owner is request]
        sampled.append([i for i in mine if rows[i][1] >= request.num_tokens - 1])
        wanted = [i for i in mine if rows[i][1] + 1 < request.num_prompt_tokens]
        if request.params.prompt_logprobs is not None and wanted:
            prompt[request] = wanted
    counts = [len(some) for some in sampled]
    got = list(batch.sample_counts)
    expect_equal(got[: len(counts)], counts, what="sample_counts[{i}]", hint=LOGITS_HINT, see=LAYOUT)
    expect(not any(got[len(counts) :]), "sample_counts: nothing is sampled from padding", see=LAYOUT)
    expect_equal(list(batch.request_ids), [r.request_id for r, _ in scheduled], what="request_ids[{i}]", see=LAYOUT)
    flat = [i for some in sampled for i in some]
    indices = batch.logits_indices.tolist()
    what = "logits_indices[{i}], among the rows to sample"
    expect_equal(indices[: len(flat)], flat, what=what, hint=LOGITS_HINT, see=LAYOUT)
    rest = indices[len(flat) :]
    hint = "a request has one entry if it wants prompt_logprobs and has rows whose next token is a prompt token"
    names = sorted(request.request_id for request, _, _ in batch.prompt_spans)
    expect_equal(names, sorted(r.request_id for r in prompt), what="requests in prompt_spans", hint=hint, see=LAYOUT)
    for request, first, count in batch.prompt_spans:
        mine, rest = rest[:count], rest[count:]
        span = (rows[prompt[request][0]][1], len(prompt[request]))
        name = request.request_id
        expect_equal((first, count), span, what=f"prompt span of {name!r} (first position, rows) at {{i}}", see=LAYOUT)
        what = f"logits_indices of the prompt rows of {name!r}, entry {{i}}"
        expect_equal(mine, prompt[request], what=what, hint="they follow after all rows to sample", see=LAYOUT)
    expect_equal(rest, [], what="logits_indices past the rows to sample and those of prompt_spans", see=LAYOUT)


def random_batch(random, size):
    scheduled = []
    for i in range(random.randint(1, 7)):
        prompt, output = random.randint(1, 3 * size + 4), random.choice([0, random.randint(1, size + 3)])
        known = prompt + output
        computed = random.choice([0, known - 1, random.randint(0, known - 1), min(known - 1, size * (known // size))])
        drafts = random.choice([0, 0, random.randint(1, size + 1)])
        wanted = random.choice([None, None, 0, 3])
        request = request_of(f"r{i}", random, prompt, output, computed, drafts, wanted)
        left = request.num_tokens_with_spec - computed
        scheduled.append((request, random.choice([left, left, random.randint(1, left), min(left, size)])))
    return scheduled


@grades(build_batch)
@pytest.mark.parametrize("size", [1, 3, 16])
def test_random_batches_row_by_row(size):
    random = rng(f"batches {size}")
    for _ in range(25):
        scheduled = random_batch(random, size)
        tables = tables_of(random, [request for request, _ in scheduled], size)
        check(scheduled, tables, size, pad_to=random.choice([None, None, random.randint(1, 10)]))


@grades(build_batch)
@pytest.mark.parametrize("size", [1, 3, 16])
def test_slots_at_the_edges_of_blocks(size):
    """Chunks that begin and end one before, at and one after each edge; the first slot of a block is where it slips."""
    random = rng(f"edges {size}")
    request = request_of("r", random, 3 * size + 2)
    tables = tables_of(random, [request], size)
    edges = sorted({p for k in range(4) for p in (k * size - 1, k * size, k * size + 1) if 0 <= p <= 3 * size + 2})
    for begin in edges:
        for end in edges:
            if begin < end:
                request.num_computed_tokens = begin
                check([(request, end - begin)], tables, size)


@grades(build_batch)
def test_a_mid_prompt_chunk_needs_no_logits():
    """A prompt of 10 in chunks: only the chunk that ends with the last known token has a row to sample (case 25)."""
    random = rng("mid prompt")
    request, other = request_of("long", random, 10), request_of("decoding", random, 4, 3, 6)
    tables = tables_of(random, [request, other], 4)
    for begin, n, expected in ((0, 4, []), (4, 5, []), (4, 6, [5]), (9, 1, [0]), (8, 2, [1])):
        request.num_computed_tokens = begin
        batch = check([(request, n), (other, 1)], tables, 4)
        what = f"logits_indices[{{i}}] for positions {begin}..{begin + n - 1} of 10 known tokens, and one decode"
        expect_equal(batch.logits_indices, [*expected, n], what=what, hint=LOGITS_HINT, see=LAYOUT)


@grades(build_batch)
def test_drafts_are_rows_that_all_need_logits():
    """9 known tokens and 3 drafts: the newest token and each draft have their logits compared."""
    random = rng("drafts")
    request = request_of("r", random, 6, 3, 8, drafts=3)
    tables = tables_of(random, [request], 4)
    for n in (1, 2, 4):
        batch = check([(request, n)], tables, 4)
        expect_equal(batch.sample_counts, [n], what=f"sample_counts[{{i}}] for {n - 1} of 3 drafts", see=LAYOUT)
    request.num_computed_tokens = 5  # the rest of a resumed request, and drafts behind it
    check([(request, 7)], tables, 4)


@grades(build_batch)
def test_prompt_logprobs_need_the_rows_before_each_prompt_token():
    random = rng("prompt logprobs")
    asking = request_of("asking", random, 9, prompt_logprobs=0)
    other = request_of("other", random, 5)
    tables = tables_of(random, [asking, other], 4)
    for begin, n in ((0, 9), (0, 4), (4, 5), (8, 1)):  # whole; a chunk; the last chunk; only the last row
        asking.num_computed_tokens = begin
        check([(asking, n), (other, 5)], tables, 4)
        check([(other, 5), (asking, n)], tables, 4)
    decoding = request_of("decoding", random, 5, 3, 7, prompt_logprobs=2)
    tables |= tables_of(random, [decoding], 4)
    check([(decoding, 1), (other, 5)], tables, 4)


@grades(build_batch)
@pytest.mark.parametrize("pad_to", [None, 0, 1, 2, 3, 8])
def test_padding_is_dummy_requests_of_one_row(pad_to):
    random = rng("padding")
    scheduled = [(request_of("a", random, 5), 5), (request_of("b", random, 3, 2, 4), 1)]
    check(scheduled, tables_of(random, [r for r, _ in scheduled], 4), 4, pad_to=pad_to)


@grades(build_batch)
def test_a_batch_of_padding_alone():
    check([], {}, 4, pad_to=3)


@grades(build_batch)
def test_dtypes_are_those_the_kernels_read():
    random = rng("dtypes")
    scheduled = random_batch(random, 3)
    batch = build_batch(scheduled, tables_of(random, [r for r, _ in scheduled], 3), 3)
    meta = batch.meta
    wanted = [(batch, name, torch.int64) for name in ("input_ids", "positions", "logits_indices")]
    wanted += [(meta, name, torch.int32) for name in ("query_start_loc", "seq_lens", "block_table")]
    for owner, name, dtype in (*wanted, (meta, "slot_mapping", torch.int64)):
        tensor = getattr(owner, name)
        expect(torch.is_tensor(tensor), f"{name}: expected a tensor, got {type(tensor).__name__}", see=LAYOUT)
        expect_equal(str(tensor.dtype), str(dtype), what=f"dtype of {name}", see=LAYOUT)


@grades(build_batch)
def test_no_sampled_row_is_an_empty_tensor_of_indices():
    request = request_of("r", rng("no rows"), 9)
    batch = check([(request, 4)], {request: [2, 0, 1]}, 4)
    expect_equal(str(batch.logits_indices.dtype), "torch.int64", what="dtype of empty logits_indices", see=LAYOUT)


@grades(build_batch)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_are_on_the_device():
    request = request_of("r", rng("device"), 9)
    batch = build_batch([(request, 9)], {request: [2, 0, 1]}, 4, device="cuda")
    tensors = [batch.input_ids, batch.positions, batch.logits_indices, batch.meta.block_table, batch.meta.slot_mapping]
    expect(all(t.is_cuda for t in tensors), "build_batch(device='cuda'): a tensor is elsewhere", see=LAYOUT)
    copies = (batch.meta.query_start_loc_cpu, batch.meta.seq_lens_cpu)
    expect(not any(t.is_cuda for t in copies), "build_batch(device='cuda'): a _cpu copy is on the GPU", see=LAYOUT)


@grades(build_batch)
@pytest.mark.parametrize("n", [0, -1, 4, 5])
def test_impossible_numbers_of_tokens_name_the_request(n):
    """6 known tokens, 4 computed, 1 draft: 1, 2 or 3 may be scheduled."""
    random = rng("impossible")
    fine, request = request_of("fine", random, 5), request_of("the-wrong-one", random, 6, 0, 4, drafts=1)
    tables = tables_of(random, [fine, request], 4, spare=3)
    for scheduled in ([(request, n)], [(fine, 5), (request, n)]):
        call = f"build_batch with {n} tokens scheduled where 3 exist"
        expect_raises(ValueError, build_batch, scheduled, tables, 4, match="the-wrong-one", see=LAYOUT, call=call)


@grades(build_batch)
@pytest.mark.parametrize("size", [1, 3, 16])
def test_a_table_that_is_too_short_names_the_request(size):
    request = request_of("the-short-one", rng("short"), 2 * size + 1)
    for blocks, n in ((0, 1), (1, size + 1), (2, 2 * size + 1)):
        call = f"build_batch with {n} tokens in {blocks} blocks of {size}"
        args = ([(request, n)], {request: list(range(blocks))}, size)
        expect_raises(ValueError, build_batch, *args, match="the-short-one", see=LAYOUT, call=call)
        check([(request, n)], {request: list(range(blocks + 1))}, size)
    check([(request, 2 * size)], {request: [1, 0]}, size)  # two full blocks


@grades(build_batch)
def test_only_rows_that_are_sampled_reach_the_lm_head():
    """A chunk, a finished prefill, a decode and padding through the whole model: the LM head sees 2 rows (case 25)."""
    random, model = rng("lm head"), FlatModel(model_of("lm head"))
    scheduled = [(request_of("chunk", random, 9), 5), (request_of("prefill", random, 6), 6)]
    scheduled.append((request_of("decode", random, 4, 2, 5), 1))
    for request, _ in scheduled:
        request.token_ids = [t % model.cfg.vocab_size for t in request.token_ids]
    tables = tables_of(random, [r for r, _ in scheduled], 4)
    batch = build_batch(scheduled, tables, 4, pad_to=5)
    num_blocks, shapes = 1 + max(b for table in tables.values() for b in table), []
    model.model.lm_head.register_forward_pre_hook(lambda _, args: shapes.append(list(args[0].shape)))
    backend = get_backend("reference")
    shape = cache_shape(model.cfg, 4, num_blocks + 1)
    caches = [backend.allocate(shape, model.dtype, model.device) for _ in range(model.cfg.num_hidden_layers)]
    logits = model(batch, caches, backend)
    expect_equal(shapes, [[2, model.cfg.hidden_size]], what="shape of the LM head's input {i}", see=LAYOUT)
    expect_equal(list(logits.shape), [2, model.cfg.vocab_size], what="shape of the logits at {i}", see=LAYOUT)
