import torch

from engine.serve.batch import Batch, BatchMeta


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
        drafts_from, drafts_to = max(0, start - request.num_tokens), max(0, end - request.num_tokens)
        input_ids += request.token_ids[start:end] + request.spec_token_ids[drafts_from:drafts_to]
        positions += range(start, end)
        slots += [table[p // block_size] * block_size + p % block_size for p in range(start, end)]
        starts.append(len(input_ids))
        seq_lens.append(end)
        tables.append(table[: -(-end // block_size)])

        first = max(start, request.num_tokens - 1)
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
        tables.append([])

    width = max(map(len, tables), default=0)
    starts_cpu, seq_lens_cpu = torch.tensor(starts, dtype=torch.int32), torch.tensor(seq_lens, dtype=torch.int32)
    table_cpu = torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32).view(len(tables), width)
    meta = BatchMeta(
        query_start_loc=starts_cpu.to(device),
        seq_lens=seq_lens_cpu.to(device),
        block_table=table_cpu.to(device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        block_size=block_size,
        query_start_loc_cpu=starts_cpu,
        seq_lens_cpu=seq_lens_cpu,
        max_query_len=max((b - a for a, b in zip(starts, starts[1:], strict=False)), default=0),
        max_seq_len=max(seq_lens, default=0),
    )
    return Batch(
        input_ids=torch.tensor(input_ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        meta=meta,
        logits_indices=torch.tensor(sampled_rows + prompt_rows, dtype=torch.int64, device=device),
        sample_counts=sample_counts,
        request_ids=[request.request_id for request, _ in scheduled],
        prompt_spans=prompt_spans,
    )
