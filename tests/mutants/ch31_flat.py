"""Wrong answers of chapter 31: the flat model."""

from tests.mutants import mutant

ATTENTION = "FlatModel.attention"
FORWARD = "FlatModel.forward"
WRITE = "        backend.write(cache, k, v, meta)\n"
ATTEND = "        out = backend.forward(q, cache, meta, scale=attn.scale)\n"

mutant(
    ATTENTION,
    WRITE + ATTEND,
    ATTEND + WRITE,
    caught_by="test_keys_and_values_are_written_before_anybody_attends",
    believes="this step's keys are for the next one",
    name="attends-before-writing",
)
mutant(
    ATTENTION,
    "        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)\n" + WRITE,
    WRITE + "        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)\n",
    caught_by="test_the_backend_gets_rotated_heads",
    believes="the cache holds keys before they are rotated",
    name="writes-before-rotating",
)
mutant(
    ATTENTION,
    "        if attn.q_norm is not None:\n            q, k = attn.q_norm(q), attn.k_norm(k)\n",
    "",
    caught_by="test_the_backend_gets_rotated_heads",
    believes="Qwen3 is Llama",
    name="no-head-norms",
)
mutant(
    ATTENTION,
    "            q, k = attn.q_norm(q), attn.k_norm(k)\n",
    "            q, k, v = attn.q_norm(q), attn.k_norm(k), attn.k_norm(v)\n",
    caught_by="test_the_backend_gets_rotated_heads",
    believes="values are normalised as well",
    name="normalises-v",
)
mutant(
    ATTENTION,
    "            q, k = attn.q_norm(q), attn.k_norm(k)\n        cos, sin = cos[:, None], sin[:, None]"
    "  # one angle for all heads of a row\n        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)\n",
    "            pass\n        cos, sin = cos[:, None], sin[:, None]\n"
    "        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)\n"
    "        if attn.q_norm is not None:\n            q, k = attn.q_norm(q), attn.k_norm(k)\n",
    caught_by="test_the_backend_gets_rotated_heads",
    believes="norm and rotation may be swapped",
    name="norm-after-rope",
)
mutant(
    ATTENTION,
    "q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)",
    "q = apply_rope(q, cos, sin)",
    caught_by="test_the_backend_gets_rotated_heads",
    believes="rotating the queries is enough",
    name="keys-not-rotated",
)
mutant(
    ATTENTION,
    "q = attn.q_proj(hidden_states).view(n, attn.num_heads, d)",
    "q = attn.q_proj(hidden_states).view(n, d, attn.num_heads).transpose(1, 2)",
    caught_by="test_the_backend_gets_rotated_heads",
    believes="the heads are interleaved",
    name="interleaved-heads",
)
mutant(
    ATTENTION,
    ", scale=attn.scale)",
    ")",
    caught_by="test_the_scale_is_the_layers",
    believes="every family scales by D ** -0.5",
    name="default-scale",
)
mutant(
    ATTENTION,
    "attn.o_proj(out.reshape(n, -1))",
    "attn.o_proj(out.transpose(1, 2).reshape(n, -1))",
    caught_by="test_the_heads_go_side_by_side_through_the_output_projection",
    believes="the order within a row does not matter",
    name="heads-transposed",
)
mutant(
    ATTENTION,
    "        return attn.o_proj(out.reshape(n, -1))",
    "        return hidden_states + attn.o_proj(out.reshape(n, -1))",
    caught_by="test_the_heads_go_side_by_side_through_the_output_projection",
    believes="the residual belongs to attention",
    name="adds-the-residual",
)
mutant(
    FORWARD,
    "rope_cos_sin(positions,",
    "rope_cos_sin(torch.arange(len(input_ids)),",
    caught_by="test_angles_come_from_positions_not_from_row_numbers",
    believes="row numbers are positions",
    name="row-numbers",
)
mutant(
    FORWARD,
    "            normed = layer.input_layernorm(hidden_states)\n",
    "            normed = layer.input_layernorm(hidden_states)\n"
    "            cos, sin = rope_cos_sin(positions, self.cfg.head_dim, self.cfg.rope_theta)\n",
    caught_by="test_rope_tables_are_made_once_a_step",
    believes="each layer has angles of its own",
    name="tables-per-layer",
)
mutant(
    FORWARD,
    "self.cfg.rope_theta)",
    "10_000.0)",
    caught_by="test_angles_come_from_positions_not_from_row_numbers",
    believes="theta is 10,000 everywhere",
    name="fixed-theta",
)
mutant(
    FORWARD,
    "cos, sin, cache, meta, backend)",
    "cos, sin, kv_caches[0], meta, backend)",
    caught_by="test_each_layer_has_its_own_cache_and_attention",
    believes="one cache serves all layers",
    name="one-cache-for-all",
)
mutant(
    FORWARD,
    "zip(model.layers, kv_caches, strict=True)",
    "zip(model.layers, reversed(kv_caches), strict=True)",
    caught_by="test_each_layer_has_its_own_cache_and_attention",
    believes="the order of caches does not matter as long as it stays",
    name="caches-reversed",
)
mutant(
    FORWARD,
    "hidden_states = hidden_states + self.attention(",
    "hidden_states = normed + self.attention(",
    caught_by="test_each_layer_norms_attends_and_adds",
    believes="the residual takes the normalised input",
    name="residual-after-norm",
)
mutant(
    FORWARD,
    "hidden_states = hidden_states + layer.mlp(",
    "hidden_states = layer.mlp(",
    caught_by="test_each_layer_norms_attends_and_adds",
    believes="the MLP replaces the hidden state",
    name="no-residual-around-the-mlp",
)
mutant(
    FORWARD,
    "layer.mlp(layer.post_attention_layernorm(hidden_states))",
    "layer.mlp(layer.input_layernorm(hidden_states))",
    caught_by="test_each_layer_norms_attends_and_adds",
    believes="a layer has one norm",
    name="wrong-norm-before-the-mlp",
)
mutant(
    FORWARD,
    "return model.norm(hidden_states)",
    "return hidden_states",
    caught_by="test_each_layer_norms_attends_and_adds",
    believes="the LM head has a norm of its own",
    name="no-final-norm",
)
mutant(
    FORWARD,
    "layer.mlp(layer.post_attention_layernorm(hidden_states))",
    "layer.mlp(layer.post_attention_layernorm(hidden_states)[None])[0]",
    caught_by="test_a_feed_forward_part_of_rows_runs_unchanged",
    believes="modules want a batch axis",
    name="batch-axis-for-the-mlp",
)
