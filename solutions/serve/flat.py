from engine.models.layers import apply_rope, rope_cos_sin


class FlatModel:
    def attention(self, attn, hidden_states, cos, sin, cache, meta, backend):
        n, d = hidden_states.shape[0], attn.head_dim
        q = attn.q_proj(hidden_states).view(n, attn.num_heads, d)
        k = attn.k_proj(hidden_states).view(n, attn.num_kv_heads, d)
        v = attn.v_proj(hidden_states).view(n, attn.num_kv_heads, d)
        if attn.q_norm is not None:
            q, k = attn.q_norm(q), attn.k_norm(k)
        cos, sin = cos[:, None], sin[:, None]  # one angle for all heads of a row
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        backend.write(cache, k, v, meta)
        out = backend.forward(q, cache, meta, scale=attn.scale)
        return attn.o_proj(out.reshape(n, -1))

    def forward(self, input_ids, positions, kv_caches, meta, backend):
        model = self.model.model
        hidden_states = model.embed_tokens(input_ids)
        cos, sin = rope_cos_sin(positions, self.cfg.head_dim, self.cfg.rope_theta)
        for layer, cache in zip(model.layers, kv_caches, strict=True):
            normed = layer.input_layernorm(hidden_states)
            hidden_states = hidden_states + self.attention(layer.self_attn, normed, cos, sin, cache, meta, backend)
            hidden_states = hidden_states + layer.mlp(layer.post_attention_layernorm(hidden_states))
        return model.norm(hidden_states)
