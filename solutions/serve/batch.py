import torch

from engine.serve.batch import Batch, BatchMeta, int_tensor, table_tensor


def build_batch(scheduled, block_tables, block_size, device="cpu", pad_to=None):
    input_ids, positions, slots, starts, seq_lens, tables = [], [], [], [0], [], []
    sampled_rows, prompt_rows, sample_counts, prompt_spans = [], [], [], []
    for request, n in scheduled:
        start, end = request.num_computed_tokens, request.num_computed_tokens + n
        table = block_tables[request]
        if not 1 <= n <= request.num_tokens_with_spec - start:
            raise ValueError(
                f"request {request.request_id!r}: {n} tokens scheduled, {request.num_tokens_with_spec - start} exist"
            )
        if end > len(table) * block_size:
            raise ValueError(
                f"request {request.request_id!r}: {end} tokens do not fit {len(table)} blocks of {block_size}"
            )
        row = len(input_ids) - start  # row + p is the row of position p
        known = request.num_tokens
        input_ids += request.token_ids[start:end]
        if end > known:
            input_ids += request.spec_token_ids[max(0, start - known) : end - known]
        for p in range(start, end):
            positions.append(p)
            slots.append(table[p // block_size] * block_size + p % block_size)
        starts.append(len(input_ids))
        seq_lens.append(end)
        tables.append((table, -(-end // block_size)))

        first = max(start, known - 1)
        sample_counts.append(max(0, end - first))
        sampled_rows += range(row + first, row + end)
        if request.params.prompt_logprobs is not None and start < request.num_prompt_tokens - 1:
            last = min(end, request.num_prompt_tokens - 1)
            prompt_rows += range(row + start, row + last)
            prompt_spans.append((request, start, last - start))

    for _ in range((pad_to or 0) - len(scheduled)):
        input_ids.append(0)
        positions.append(0)
        slots.append(-1)
        starts.append(len(input_ids))
        seq_lens.append(0)
        tables.append(([], 0))

    starts_cpu, seq_lens_cpu = int_tensor(starts, torch.int32), int_tensor(seq_lens, torch.int32)
    meta = BatchMeta(
        query_start_loc=starts_cpu.to(device),
        seq_lens=seq_lens_cpu.to(device),
        block_table=table_tensor(tables, device),
        slot_mapping=int_tensor(slots, torch.int64, device),
        block_size=block_size,
        query_start_loc_cpu=starts_cpu,
        seq_lens_cpu=seq_lens_cpu,
        max_query_len=max((b - a for a, b in zip(starts, starts[1:], strict=False)), default=0),
        max_seq_len=max(seq_lens, default=0),
    )
    return Batch(
        input_ids=int_tensor(input_ids, torch.int64, device),
        positions=int_tensor(positions, torch.int64, device),
        meta=meta,
        logits_indices=int_tensor(sampled_rows + prompt_rows, torch.int64, device),
        sample_counts=sample_counts,
        request_ids=[request.request_id for request, _ in scheduled],
        prompt_spans=prompt_spans,
    )
