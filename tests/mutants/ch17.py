"""Wrong answers of chapter 17."""

from tests.mutants import mutant

# RMSNorm

mutant(
    "RMSNorm.forward", "torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)",
    "1 / (y.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)",
    caught_by="test_rms_norm", believes="eps guards the division, so it is added to the root", name="eps-outside",
)  # fmt: skip
mutant(
    "RMSNorm.forward", "y = x.to(torch.float32)", "y = (x - x.mean(-1, keepdim=True)).to(torch.float32)",
    caught_by="test_rms_norm", believes="a norm subtracts the mean, as LayerNorm does", name="centred",
)  # fmt: skip
mutant(
    "RMSNorm.forward", ".mean(-1, keepdim=True)", ".sum(-1, keepdim=True)",
    caught_by="test_rms_norm", believes="the norm is the length of the vector", name="sum",
)  # fmt: skip
mutant(
    "RMSNorm.forward", "return y.to(x.dtype) * self.weight", "return y.to(x.dtype) * (1 + self.weight)",
    caught_by="test_rms_norm", believes="the weight is stored as its difference from 1, as in Gemma", name="one-plus",
)  # fmt: skip
mutant(
    "RMSNorm.forward", ".mean(-1, keepdim=True)", ".mean()",
    caught_by="test_rms_norm", believes="one mean does for the whole batch", name="whole-batch",
)  # fmt: skip
mutant(
    "RMSNorm.forward", " + self.eps)", ")",
    caught_by="test_rms_norm_of_zeros_is_finite", believes="eps is too small to matter", name="no-eps",
)  # fmt: skip
mutant(
    "RMSNorm.forward", "y = x.to(torch.float32)", "y = x",
    caught_by="test_rms_norm_is_float32_inside", believes="the input's precision is good enough", name="low-precision",
)  # fmt: skip
mutant(
    "RMSNorm.forward", "return y.to(x.dtype) * self.weight", "return (y * self.weight.float()).to(x.dtype)",
    caught_by="test_rms_norm_rounds_before_the_weight", believes="round once, at the very end", name="round-last",
)  # fmt: skip

# Rotary positions

mutant(
    "rope_cos_sin", "/ head_dim\n", "/ (head_dim // 2)\n",
    caught_by="test_rope_tables", believes="the exponent is 2i over the number of pairs", name="half-exponent",
)  # fmt: skip
mutant(
    "rope_cos_sin", "torch.arange(0, head_dim, 2,", "torch.arange(head_dim // 2,",
    caught_by="test_rope_tables", believes="the exponent is i / head_dim", name="exponent-without-2",
)  # fmt: skip
mutant(
    "rope_cos_sin", "1.0 / theta**exponents", "theta**exponents",
    caught_by="test_rope_tables", believes="later pairs turn faster", name="no-inverse",
)  # fmt: skip
mutant(
    "rope_cos_sin", "torch.cat((angles, angles), dim=-1)", "angles.repeat_interleave(2, dim=-1)",
    caught_by="test_rope_tables", believes="the two of a pair are neighbours, as in the paper", name="interleaved",
)  # fmt: skip
mutant(
    "rope_cos_sin", "positions[..., None].to(torch.float32)", "(positions - positions.min())[..., None].float()",
    caught_by="test_rope_tables", believes="positions count from the first token of the input", name="offset-lost",
)  # fmt: skip
mutant(
    "rope_cos_sin", "return angles.cos().to(dtype), angles.sin().to(dtype)",
    "return angles.to(dtype).cos(), angles.to(dtype).sin()",
    caught_by="test_rope_tables_are_rounded_last", believes="cast early, compute fast", name="low-precision-angles",
)  # fmt: skip
mutant(
    "rope_cos_sin", "return angles.cos().to(dtype), angles.sin().to(dtype)", "return angles.cos(), angles.sin()",
    caught_by="test_rope_tables_are_rounded_last", believes="the dtype is a hint", name="dtype-ignored",
)  # fmt: skip
mutant(
    "rope_cos_sin", "if head_dim % 2:", "if head_dim < 2:",
    caught_by="test_rope_needs_pairs", believes="the middle entry simply stays", name="odd-width",
)  # fmt: skip

mutant(
    "apply_rope", "x1, x2 = x.chunk(2, dim=-1)", "x1, x2 = x[..., ::2], x[..., 1::2]",
    caught_by="test_apply_rope", believes="neighbours are a pair", name="pairs-interleaved",
)  # fmt: skip
mutant(
    "apply_rope", "torch.cat((-x2, x1), dim=-1)", "torch.cat((x2, -x1), dim=-1)",
    caught_by="test_apply_rope", believes="the sign is a matter of taste", name="sign",
)  # fmt: skip
mutant(
    "apply_rope", "torch.cat((-x2, x1), dim=-1)", "torch.cat((x2, x1), dim=-1)",
    caught_by="test_apply_rope", believes="swapping the halves is the rotation", name="no-minus",
)  # fmt: skip
mutant(
    "apply_rope", "x * cos + quarter_turn * sin", "x * sin + quarter_turn * cos",
    caught_by="test_apply_rope", believes="cos goes with the turned part", name="cos-sin-swapped",
)  # fmt: skip
mutant(
    "apply_rope", "(x * cos + quarter_turn * sin).to(x.dtype)", "x.mul_(cos).add_(quarter_turn * sin)",
    caught_by="test_apply_rope", believes="in place saves memory and harms nobody", name="in-place",
)  # fmt: skip
mutant(
    "apply_rope", "(x * cos + quarter_turn * sin).to(x.dtype)", "x * cos.to(x.dtype) + quarter_turn * sin.to(x.dtype)",
    caught_by="test_apply_rope_rounds_once", believes="tables in the dtype of x are as good", name="low-precision",
)  # fmt: skip
mutant(
    "apply_rope", "(x * cos + quarter_turn * sin).to(x.dtype)", "x * cos + quarter_turn * sin",
    caught_by="test_apply_rope_rounds_once", believes="float32 out does not hurt", name="dtype-grows",
)  # fmt: skip

# Attention

NORM_K = "        if self.k_norm is not None:\n            k = self.k_norm(k)\n"
TURN_Q = "        q = apply_rope(q, cos[:, None], sin[:, None])\n"
TURN_K = "        k = apply_rope(k, cos[:, None], sin[:, None])\n"

mutant(
    "Qwen3Attention.forward", NORM_K, "",
    caught_by="test_attention", believes="only queries are normed", name="k-norm-missing",
)  # fmt: skip
mutant(
    "Qwen3Attention.forward", "k = self.k_norm(k)", "k = self.q_norm(k)",
    caught_by="test_attention", believes="one norm serves both", name="one-norm-for-both",
)  # fmt: skip
mutant(
    "Qwen3Attention.forward", TURN_K, TURN_K + "        q = q if self.q_norm is None else self.q_norm(q)\n",
    caught_by="test_attention", believes="queries are normed once more after the rotation", name="q-normed-twice",
)  # fmt: skip
mutant(
    "Qwen3Attention.forward",
    "        if self.q_norm is not None:\n            q = self.q_norm(q)\n" + NORM_K
    + "        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, T, D]\n" + TURN_Q + TURN_K,
    "        q, k, v = (x.transpose(1, 2) for x in (q, k, v))\n" + TURN_Q + TURN_K
    + "        if self.q_norm is not None:\n            q, k = self.q_norm(q), self.k_norm(k)\n",
    caught_by="test_attention", believes="a rotation keeps the length, so the norm may come after it",
    name="norm-after-rope",
)  # fmt: skip
mutant(
    "Qwen3Attention.forward", TURN_K, "",
    caught_by="test_attention", believes="turning the queries is enough", name="keys-not-turned",
)  # fmt: skip
mutant(
    "Qwen3Attention.forward", TURN_K, TURN_K + "        v = apply_rope(v, cos[:, None], sin[:, None])\n",
    caught_by="test_attention", believes="values carry positions, too", name="values-turned",
)  # fmt: skip
mutant(
    "Qwen3Attention.forward", ".view(B, T, self.num_heads, self.head_dim)\n",
    ".view(B, T, self.head_dim, self.num_heads).transpose(2, 3)\n",
    caught_by="test_attention", believes="heads are the inner axis of the projection", name="heads-inside",
)  # fmt: skip
mutant(
    "Qwen3Attention.forward", "out.transpose(1, 2).reshape", "out.reshape",
    caught_by="test_attention", believes="reshape puts the heads side by side", name="no-transpose-back",
)  # fmt: skip
mutant(
    "Qwen3Attention.forward", "k_pos, allowed = positions, None", "k_pos, allowed = torch.arange(T), None",
    caught_by="test_attention", believes="without a cache positions are 0 to T-1", name="keys-from-zero",
)  # fmt: skip
mutant(
    "Qwen3Attention.forward", "allowed, self.scale)", "allowed)",
    caught_by="test_attention_uses_its_scale", believes="the default scale is always right", name="own-scale-ignored",
)  # fmt: skip
mutant(
    "Qwen3Attention.forward", "causal_attention(q, k, v, positions, k_pos, allowed, self.scale)",
    "causal_attention(q, k, v, positions, k_pos, None, self.scale)",
    caught_by="test_attention_through_a_cache", believes="the causal mask is the only one", name="allowed-ignored",
)  # fmt: skip
mutant(
    "Qwen3Attention.forward", "k, v, k_pos, allowed = cache.append(layer, k, v, positions)",
    "k, v, _, allowed = cache.append(layer, k, v, positions)\n            k_pos = torch.arange(k.shape[2])",
    caught_by="test_attention_through_a_cache", believes="a cache is always filled from position 0",
    name="cache-positions-ignored",
)  # fmt: skip
mutant(
    "Qwen3Attention.forward", "cache.append(layer, k, v, positions)", "cache.append(0, k, v, positions)",
    caught_by="test_attention_through_a_cache", believes="every layer has a cache of its own", name="layer-zero",
)  # fmt: skip
mutant(
    "Qwen3Attention.forward", "cache.append(layer, k, v, positions)",
    "cache.append(layer, k, v, positions - positions[:, :1])",
    caught_by="test_attention_through_a_cache", believes="the cache counts from the first new token",
    name="positions-relative",
)  # fmt: skip
mutant(
    "Qwen3Attention.forward", TURN_K + "        k_pos, allowed = positions, None\n        if cache is not None:\n"
    "            k, v, k_pos, allowed = cache.append(layer, k, v, positions)\n",
    "        k_pos, allowed, new = positions, None, k\n        if cache is not None:\n"
    "            k, v, k_pos, allowed = cache.append(layer, k, v, positions)\n"
    "        k = torch.cat((k[:, :, :-T], apply_rope(new, cos[:, None], sin[:, None])), dim=2)\n",
    caught_by="test_attention_through_a_cache", believes="keys are cached as projected and turned on reading",
    name="cached-unturned",
)  # fmt: skip

# MLP

mutant(
    "Qwen3MLP.forward", "F.silu(self.gate_proj(x)) * self.up_proj(x)", "self.gate_proj(x) * F.silu(self.up_proj(x))",
    caught_by="test_mlp", believes="silu stands on the up branch", name="wrong-branch",
)  # fmt: skip
mutant(
    "Qwen3MLP.forward", "F.silu(self.gate_proj(x)) * self.up_proj(x)", "F.silu(self.gate_proj(x) * self.up_proj(x))",
    caught_by="test_mlp", believes="silu acts on the product", name="silu-of-product",
)  # fmt: skip
mutant(
    "Qwen3MLP.forward", "F.silu", "F.gelu",
    caught_by="test_mlp", believes="gelu and silu are the same", name="gelu",
)  # fmt: skip
mutant(
    "Qwen3MLP.forward", "F.silu", "torch.sigmoid",
    caught_by="test_mlp", believes="a gate is a sigmoid", name="sigmoid",
)  # fmt: skip
mutant(
    "Qwen3MLP.forward", "F.silu(self.gate_proj(x)) * self.up_proj(x)", "F.silu(self.gate_proj(x)) + self.up_proj(x)",
    caught_by="test_mlp", believes="the branches are added", name="added",
)  # fmt: skip
mutant(
    "Qwen3MLP.forward", " * self.up_proj(x)", "",
    caught_by="test_mlp", believes="a feed-forward layer has one hidden branch", name="no-up",
)  # fmt: skip

# The block

ATTEND = "hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, positions, cache, layer)"

mutant(
    "Qwen3DecoderLayer.forward", ATTEND, ATTEND.removeprefix("hidden + "),
    caught_by="test_block_wiring", believes="one residual path, around the MLP, is enough",
    name="first-residual-missing",
)  # fmt: skip
mutant(
    "Qwen3DecoderLayer.forward", "return hidden + self.mlp", "return self.mlp",
    caught_by="test_block_wiring", believes="one residual path, around attention, is enough",
    name="second-residual-missing",
)  # fmt: skip
mutant(
    "Qwen3DecoderLayer.forward", f"        hidden = {ATTEND}\n",
    "        hidden = self.input_layernorm(hidden)\n"
    "        hidden = hidden + self.self_attn(hidden, cos, sin, positions, cache, layer)\n",
    caught_by="test_block_wiring", believes="the residual path carries the normed value", name="normed-residual",
)  # fmt: skip
mutant(
    "Qwen3DecoderLayer.forward", ATTEND,
    "self.input_layernorm(hidden + self.self_attn(hidden, cos, sin, positions, cache, layer))",
    caught_by="test_block_wiring", believes="the norm comes after, as in the first transformer", name="post-norm",
)  # fmt: skip
mutant(
    "Qwen3DecoderLayer.forward", "self.mlp(self.post_attention_layernorm(hidden))",
    "self.mlp(self.input_layernorm(hidden))",
    caught_by="test_block_wiring", believes="the two norms are the same", name="same-norm-twice",
)  # fmt: skip
mutant(
    "Qwen3DecoderLayer.forward", "self.mlp(self.post_attention_layernorm(hidden))",
    "self.post_attention_layernorm(self.mlp(hidden))",
    caught_by="test_block_wiring", believes="the second norm stands behind the MLP", name="norm-behind-mlp",
)  # fmt: skip
mutant(
    "Qwen3DecoderLayer.forward", "positions, cache, layer)", "positions)",
    caught_by="test_block_wiring", believes="the cache is the model's affair", name="cache-not-handed-on",
)  # fmt: skip
mutant(
    "Qwen3DecoderLayer.forward", "hidden = hidden + self.self_attn", "hidden += self.self_attn",
    caught_by="test_block_wiring", believes="in place saves memory and harms nobody", name="in-place",
)  # fmt: skip
