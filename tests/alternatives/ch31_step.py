"""Right answers of chapter 31, built differently: the batch, attention over the pool, the flat model."""

from tests.alternatives import alternative

alternative(
    "build_batch",
    name="vectorised",
    source='''
        def build_batch(scheduled, block_tables, block_size, device="cpu", pad_to=None):
            for request, n in scheduled:
                begin, table = request.num_computed_tokens, block_tables[request]
                if n < 1 or begin + n > request.num_tokens_with_spec or begin + n > len(table) * block_size:
                    raise ValueError(f"{request.request_id}: {n} tokens from {begin} on, {len(table)} blocks")
            real, requests = len(scheduled), [request for request, _ in scheduled]
            total = max(real, pad_to or 0)
            counts = torch.ones(total, dtype=torch.int64)
            begins, known, prompts = (torch.zeros(total, dtype=torch.int64) for _ in range(3))
            asking = torch.zeros(total, dtype=torch.bool)
            table = torch.zeros(total, max([len(block_tables[r]) for r in requests], default=1) or 1, dtype=torch.int32)
            for i, (request, n) in enumerate(scheduled):
                counts[i], begins[i] = n, request.num_computed_tokens
                known[i], prompts[i] = request.num_tokens, request.num_prompt_tokens
                asking[i] = request.params.prompt_logprobs is not None
                table[i, : len(block_tables[request])] = torch.tensor(block_tables[request], dtype=torch.int32)
            starts = torch.zeros(total + 1, dtype=torch.int64)
            starts[1:] = counts.cumsum(0)
            owner = torch.repeat_interleave(torch.arange(total), counts)
            positions = torch.arange(int(starts[-1])) - starts[owner] + begins[owner]
            is_real = owner < real
            slots = table[owner, positions // block_size].long() * block_size + positions % block_size
            ids = [t for r, n in scheduled for t in [*r.token_ids, *r.spec_token_ids][r.num_computed_tokens :][:n]]
            sampled = is_real & (positions >= known[owner] - 1)
            asked = is_real & asking[owner] & (positions < prompts[owner] - 1)
            indices = torch.cat((sampled.nonzero()[:, 0], asked.nonzero()[:, 0]))
            spans = []
            for i in range(real):
                mine = positions[asked & (owner == i)]
                if len(mine):
                    spans.append((requests[i], int(mine[0]), len(mine)))
            lengths = torch.where(torch.arange(total) < real, begins + counts, 0).int()
            meta = BatchMeta(
                query_start_loc=starts.int().to(device),
                seq_lens=lengths.to(device),
                block_table=table.to(device),
                slot_mapping=torch.where(is_real, slots, -1).to(device),
                block_size=block_size,
                query_start_loc_cpu=starts.int(),
                seq_lens_cpu=lengths,
                max_query_len=int(counts.max()),
                max_seq_len=int(lengths.max()),
            )
            return Batch(
                input_ids=torch.tensor(ids + [0] * (total - real), dtype=torch.int64, device=device),
                positions=positions.to(device),
                meta=meta,
                logits_indices=indices.to(device),
                sample_counts=[int((sampled & (owner == i)).sum()) for i in range(real)],
                request_ids=[request.request_id for request in requests],
                prompt_spans=spans,
            )
    ''',
)
alternative(
    "write_kv",
    name="negative-index",
    source='''
        def write_kv(k_cache, v_cache, k, v, slot_mapping):
            k_cache.flatten(0, 1)[slot_mapping] = k.to(k_cache.dtype)  # -1: the last slot of the last block, scratch
            v_cache.flatten(0, 1)[slot_mapping] = v.to(v_cache.dtype)
    ''',
)
alternative(
    "write_kv",
    name="block-and-offset",
    source='''
        def write_kv(k_cache, v_cache, k, v, slot_mapping):
            num_blocks, size = k_cache.shape[:2]
            padding = slot_mapping == -1
            block = torch.where(padding, num_blocks - 1, slot_mapping // size)
            offset = torch.where(padding, 0, slot_mapping % size)
            k_cache.index_put_((block, offset), k.to(k_cache.dtype))
            v_cache.index_put_((block, offset), v.to(v_cache.dtype))
    ''',
)
alternative(
    "ReferenceBackend.forward",
    name="sdpa-per-request",
    source='''
        def forward(self, q, cache, meta, scale=None, window=0):
            import torch.nn.functional as F

            heads, results = q.shape[1], []
            counts = meta.query_start_loc_cpu.diff().tolist()
            for r, mine in enumerate(q.split(counts)):
                s = int(meta.seq_lens_cpu[r])
                if not s:
                    results.append(torch.zeros_like(mine))
                    continue
                at = torch.arange(s, device=q.device)
                slots = meta.block_table[r].long()[at // meta.block_size] * meta.block_size + at % meta.block_size
                k, v = (pool.flatten(0, 1)[slots].float().transpose(0, 1) for pool in cache)
                k, v = (x.repeat_interleave(heads // len(x), dim=0) for x in (k, v))
                behind = at[-len(mine) :, None] - at
                seen = (behind >= 0) & (behind < window) if window > 0 else behind >= 0
                out = F.scaled_dot_product_attention(mine.float().transpose(0, 1), k, v, attn_mask=seen, scale=scale)
                results.append(out.transpose(0, 1).to(q.dtype))
            return torch.cat(results)
    ''',
)
alternative(
    "ReferenceBackend.forward",
    name="row-by-row",
    source='''
        def forward(self, q, cache, meta, scale=None, window=0):
            out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
            for r in range(meta.num_reqs):
                first, end = meta.query_start_loc_cpu[r : r + 2].tolist()
                length = meta.seq_lens_cpu[r].item()
                for row in range(first, end if length else first):
                    seen = torch.arange(length - (end - row) + 1, device=q.device)
                    seen = seen[-window:] if window > 0 else seen
                    blocks = meta.block_table[r, seen // meta.block_size].long()
                    k, v = (pool[blocks, seen % meta.block_size].permute(1, 0, 2)[None] for pool in cache)
                    query = q[row][None, :, None]
                    out[row] = causal_attention(query, k, v, seen[-1:], seen, scale=scale)[0, :, 0]
            return out
    ''',
)
alternative(
    "FlatModel.attention",
    name="heads-by-unflatten",
    source='''
        def attention(self, attn, hidden_states, cos, sin, cache, meta, backend):
            def heads(projection, norm, rotated):
                x = projection(hidden_states).unflatten(-1, (-1, attn.head_dim))
                x = x if norm is None else norm(x)
                return apply_rope(x, cos.unsqueeze(1), sin.unsqueeze(1)) if rotated else x

            k, v = heads(attn.k_proj, attn.k_norm, True), heads(attn.v_proj, None, False)
            backend.write(cache, k, v, meta)
            q = heads(attn.q_proj, attn.q_norm, True)
            return attn.o_proj(backend.forward(q, cache, meta, attn.scale).flatten(1))
    ''',
)
alternative(
    "FlatModel.forward",
    name="by-index",
    source='''
        def forward(self, input_ids, positions, kv_caches, meta, backend):
            body = self.model.model
            x = torch.nn.functional.embedding(input_ids, body.embed_tokens.weight)
            tables = rope_cos_sin(positions, self.cfg.head_dim, self.cfg.rope_theta)
            for i in range(len(body.layers)):
                layer = body.layers[i]
                attended = self.attention(
                    attn=layer.self_attn, hidden_states=layer.input_layernorm(x), cos=tables[0], sin=tables[1],
                    cache=kv_caches[i], meta=meta, backend=backend,
                )
                x = attended + x
                x = layer.mlp(layer.post_attention_layernorm(x)) + x
            return body.norm(x)
    ''',
)
