"""Right answers of chapter 33, built differently."""

from tests.alternatives import alternative

alternative(
    "merge_linears",
    name="filled-in-place",
    source="""
        def merge_linears(linears):
            first = linears[0]
            names = [name for name, _ in first.named_parameters()]
            for linear in linears:
                if linear.in_features != first.in_features or [n for n, _ in linear.named_parameters()] != names:
                    raise ValueError(f"{linear} does not fit {first}")
            wholes = {"bias": None}
            for name in names:
                old = [linear.get_parameter(name) for linear in linears]
                rows = sum(len(p) for p in old)
                whole = wholes[name] = torch.empty(rows, *old[0].shape[1:], dtype=old[0].dtype, device=old[0].device)
                row = 0
                for p in old:
                    whole[row : row + len(p)].copy_(p.data)
                    p.data = whole[row : row + len(p)]
                    p.requires_grad_(False)
                    row += len(p)
            return wholes["weight"], wholes["bias"]
    """,
)
alternative(
    "add_norm_kernel",
    name="root-and-quotient",
    source="""
        def add_norm_kernel(x, residual, weight, normed, eps, ADD: tl.constexpr, WIDTH: tl.constexpr,
                            COLS: tl.constexpr):
            i = tl.arange(0, COLS)
            inside = i < WIDTH
            start = tl.program_id(0) * WIDTH
            s = tl.load(residual + start + i, inside, 0.0)
            if ADD:
                s += tl.load(x + start + i, inside, 0.0)
                tl.store(residual + start + i, s, inside)
            f = s.to(tl.float32)
            y = f / tl.sqrt(tl.sum(f * f) * (1.0 / WIDTH) + eps)
            y = y.to(normed.dtype.element_ty)
            tl.store(normed + start + i, y * tl.load(weight + i, inside, 0.0), inside)
    """,
)
alternative(
    "rope_write_kernel",
    name="whole-heads",
    source="""
        def rope_write_kernel(
            qkv, cos, sin, q_weight, k_weight, q, k_cache, v_cache, slot_mapping, eps,
            NORM: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr,
        ):
            n, h = tl.program_id(0), tl.program_id(1)
            d = tl.arange(0, 2 * COLS)  # a whole head; its other half is loaded beside it
            inside = d < WIDTH
            other = (d + WIDTH // 2) % WIDTH
            head = qkv + (n * (HEADS + 2 * KV_HEADS) + h) * WIDTH
            mine = tl.load(head + d, inside, 0.0)
            turn = h < HEADS + KV_HEADS
            if turn:
                a, b = mine.to(tl.float32), tl.load(head + other, inside, 0.0).to(tl.float32)
                if NORM:
                    root = tl.sqrt(tl.sum(a * a) / WIDTH + eps)
                    a, b = (a / root).to(mine.dtype), (b / root).to(mine.dtype)
                    if h < HEADS:
                        w, v = tl.load(q_weight + d, inside, 0.0), tl.load(q_weight + other, inside, 0.0)
                    else:
                        w, v = tl.load(k_weight + d, inside, 0.0), tl.load(k_weight + other, inside, 0.0)
                    a, b = (a * w).to(tl.float32), (b * v).to(tl.float32)
                c, s = tl.load(cos + n * WIDTH + d, inside, 0.0), tl.load(sin + n * WIDTH + d, inside, 0.0)
                mine = (a * c + tl.where(d < WIDTH // 2, -b, b) * s).to(mine.dtype)
            if h < HEADS:
                tl.store(q + (n * HEADS + h) * WIDTH + d, mine, inside)
            else:
                slot = tl.load(slot_mapping + n)
                if slot >= 0:
                    if turn:
                        at = k_cache + (slot * KV_HEADS + h - HEADS) * WIDTH
                        tl.store(at + d, mine.to(k_cache.dtype.element_ty), inside)
                    else:
                        at = v_cache + (slot * KV_HEADS + h - HEADS - KV_HEADS) * WIDTH
                        tl.store(at + d, mine.to(v_cache.dtype.element_ty), inside)
    """,
)
alternative(
    "swiglu_kernel",
    name="sigmoid",
    source="""
        def swiglu_kernel(gate_up, out, WIDTH: tl.constexpr, COLS: tl.constexpr):
            n, j = tl.program_id(0), tl.program_id(1)
            column = j * COLS + tl.arange(0, COLS)
            row = gate_up + 2 * n * WIDTH
            a = tl.load(row + column, column < WIDTH, 0.0)
            b = tl.load(row + WIDTH + column, column < WIDTH, 0.0)
            act = (a.to(tl.float32) * tl.sigmoid(a.to(tl.float32))).to(a.dtype)
            tl.store(out + n * WIDTH + column, act * b, column < WIDTH)
    """,
)
alternative(
    "matvec_kernel",
    name="a-part-at-a-time",
    source="""
        def matvec_kernel(
            x, weight, bias, out, outputs,
            WIDTH: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
            EARLY: tl.constexpr,
        ):
            first, column = tl.program_id(1) * ROWS, tl.arange(0, COLS)
            output = first + tl.arange(0, ROWS)
            inside = (output < outputs)[:, None] & (column < WIDTH)[None, :]
            a = tl.load(weight + output[:, None].to(tl.int64) * WIDTH + column[None, :], inside, 0.0)
            b, a_bias, b_bias = a, 0.0, 0.0
            if BIAS:
                a_bias = tl.load(bias + output, output < outputs, 0.0).to(tl.float32)
                b_bias = a_bias
            if GATED:
                second = output + outputs
                b = tl.load(weight + second[:, None].to(tl.int64) * WIDTH + column[None, :], inside, 0.0)
                if BIAS:
                    b_bias = tl.load(bias + second, output < outputs, 0.0).to(tl.float32)
            if EARLY:
                inputs_ready(EARLY)
            row = tl.load(x + tl.program_id(0) * WIDTH + column, column < WIDTH, 0.0).to(tl.float32)
            kind = out.dtype.element_ty
            result = (tl.sum(a.to(tl.float32) * row[None, :], 1) + a_bias).to(kind)
            if GATED:
                up = (tl.sum(b.to(tl.float32) * row[None, :], 1) + b_bias).to(kind)
                wide = result.to(tl.float32)
                act = (wide * tl.sigmoid(wide)).to(kind)
                result = (act.to(tl.float32) * up.to(tl.float32)).to(kind)
            tl.store(out + tl.program_id(0) * outputs + output, result, output < outputs)
    """,
)
alternative(
    "FusedModel.attention",
    name="named-parts",
    source="""
        class FusedModel:
            def attention(self, attn, hidden_states, cos, sin, cache, meta, backend):
                weight, bias = self.merged[attn]
                qkv = self.ops.linear(hidden_states, weight, bias)
                q = self.ops.rope_write(qkv, cos, sin, attn, cache, meta, backend)
                heads, out = backend.forward(q, cache, meta, attn.scale), attn.o_proj
                return self.ops.linear(heads.flatten(1), weight=out.weight, bias=out.bias)
    """,
)
alternative(
    "FusedModel.forward",
    name="list-of-halves",
    source="""
        class FusedModel:
            def forward(self, input_ids, positions, kv_caches, meta, backend):
                body = self.model.model
                residual = body.embed_tokens.weight[input_ids]
                tables = rope_cos_sin(positions, self.cfg.head_dim, self.cfg.rope_theta)
                halves = []
                for i, layer in enumerate(body.layers):
                    args = *tables, kv_caches[i], meta, backend
                    halves.append((layer.input_layernorm, self.attention, layer.self_attn, args))
                    halves.append((layer.post_attention_layernorm, self.mlp, layer.mlp, ()))
                out = None
                for norm, run, module, args in halves:
                    out = run(module, self.ops.add_norm(out, residual, norm), *args)
                return self.ops.add_norm(out, residual, body.norm)
    """,
)
alternative(
    "sample_kernel",
    name="noise-for-all",
    source="""
        def sample_kernel(
            logits, temperatures, seeds, places, values, ids, row_stride,
            VOCAB: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
        ):
            n, part = tl.program_id(0), tl.program_id(1)
            heat = tl.load(temperatures + n)
            size = tl.cdiv(VOCAB, PARTS * TILE) * TILE
            first = part * size
            last = tl.minimum(first + size, VOCAB)
            value, winner = float("-inf"), VOCAB
            while first < last:
                token = first + tl.arange(0, TILE)
                score = tl.load(logits + n * row_stride + token, token < last, float("-inf")).to(tl.float32)
                nothing = tl.full([TILE], 0, tl.uint32)
                counter = nothing + tl.load(places + n).to(tl.uint32)
                bits, b, c, d = tl.philox(tl.load(seeds + n), token.to(tl.uint32), counter, nothing, nothing)
                u = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
                score += tl.where(heat > 0, -heat * tl.log(-tl.log(u)), 0.0)
                if tl.sum((score != score).to(tl.int32)) > 0:
                    value, winner = float("inf"), VOCAB
                else:
                    top = tl.max(score)
                    if top > value:
                        value, winner = top, tl.min(tl.where(score == top, token, VOCAB))
                first += TILE
            tl.store(values + n * PARTS + part, value)
            tl.store(ids + n * PARTS + part, winner)
    """,
)
alternative(
    "gumbel_argmax",
    name="row-by-row",
    source="""
        def gumbel_argmax(logits, temperatures, seeds, places):
            tokens = []
            for row, heat, seed, place in zip(logits, temperatures, seeds, places, strict=True):
                score = row.to(torch.float32)
                if heat > 0:
                    bits = philox(seed[None].numpy(), np.arange(len(row)), place[None].numpy())[0]
                    u = torch.from_numpy(((bits >> 9) * 2 + 1).astype(np.float32)) / 2.0**24
                    score = score + heat * -torch.log(-torch.log(u))
                bad = score.isnan().any() or score.max() == -torch.inf
                tokens.append(len(row) if bad else (score == score.max()).nonzero()[0].item())
            return torch.tensor(tokens, dtype=torch.int64)
    """,
)
alternative(
    "gumbel_argmax",
    name="stable-sort",
    source="""
        def gumbel_argmax(logits, temperatures, seeds, places):
            vocab = logits.shape[1]
            u = (philox(seeds.numpy(), range(vocab), places.numpy()) >> 9).astype(np.float32) + np.float32(0.5)
            noise = -torch.log(-torch.log(torch.tensor(u) * 2.0**-23))
            scores = torch.where(temperatures[:, None] > 0, temperatures[:, None] * noise, 0) + logits.float()
            bad = scores.isnan().any(1) | (scores == -torch.inf).all(1)
            order = scores.nan_to_num(nan=0.0, neginf=-torch.inf).sort(dim=1, descending=True, stable=True).indices
            return order[:, 0].masked_fill(bad, vocab)
    """,
)
