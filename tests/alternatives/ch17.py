"""Other right answers of chapter 17."""

from tests.alternatives import alternative

alternative(
    "RMSNorm.forward",
    name="functional",
    source="""
def forward(self, x):
    y = F.rms_norm(x.float(), x.shape[-1:], eps=self.eps)
    return self.weight * y.type_as(x)
""".replace("F.rms_norm", "nn.functional.rms_norm"),
)

alternative(
    "rope_cos_sin",
    name="einsum-in-float64",
    source="""
def rope_cos_sin(positions, head_dim, theta, dtype=torch.float32):
    half, odd = divmod(head_dim, 2)
    if odd:
        raise ValueError(f"an odd head_dim, {head_dim}, has no pairs")
    i = torch.arange(half, device=positions.device, dtype=torch.float64)
    angles = torch.einsum("...,i->...i", positions.double(), torch.pow(float(theta), -2 * i / head_dim))
    cos, sin = angles.cos().float().to(dtype), angles.sin().float().to(dtype)
    return torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
""",
)

alternative(
    "apply_rope",
    name="complex",
    source="""
def apply_rope(x, cos, sin):
    D = x.shape[-1]
    wide = torch.promote_types(x.dtype, cos.dtype)
    pairs = torch.stack((x[..., : D // 2], x[..., D // 2 :]), dim=-1).to(wide)
    turned = torch.view_as_complex(pairs) * torch.complex(cos[..., : D // 2], sin[..., : D // 2])
    return torch.cat((turned.real, turned.imag), dim=-1).to(x.dtype)
""",
)

alternative(
    "apply_rope",
    name="roll",
    source="""
def apply_rope(x, cos, sin):
    half = x.shape[-1] // 2
    sign = torch.ones(2 * half, dtype=cos.dtype, device=x.device)
    sign[:half] = -1
    return (x * cos + x.roll(half, dims=-1) * (sin * sign)).to(x.dtype)
""",
)

alternative(
    "Qwen3Attention.forward",
    name="sdpa",
    source="""
def forward(self, hidden, cos, sin, positions, cache=None, layer=None):
    B, T, _ = hidden.shape
    q = self.q_proj(hidden).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
    k = self.k_proj(hidden).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
    v = self.v_proj(hidden).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
    if self.q_norm is not None:
        q, k = self.q_norm(q), self.k_norm(k)
    q, k = apply_rope(q, cos.unsqueeze(1), sin.unsqueeze(1)), apply_rope(k, cos.unsqueeze(1), sin.unsqueeze(1))
    if cache is None:
        k_pos, allowed = positions, None
    else:
        k, v, k_pos, allowed = cache.append(layer, k, v, positions)
    mask = (k_pos.view(-1, 1, k_pos.shape[-1]) <= positions[:, :, None])[:, None]
    if allowed is not None:
        mask = mask & allowed
    group = self.num_heads // self.num_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
    return self.o_proj(out.transpose(1, 2).flatten(2))
""",
)

alternative(
    "Qwen3MLP.forward",
    name="one-matmul",
    source="""
def forward(self, x):
    both = torch.cat((self.gate_proj.weight, self.up_proj.weight))
    gate, up = torch.nn.functional.linear(x, both).chunk(2, dim=-1)
    return self.down_proj(gate * torch.sigmoid(gate) * up)
""",
)

alternative(
    "Qwen3DecoderLayer.forward",
    name="keywords",
    source="""
def forward(self, hidden, cos, sin, positions, cache=None, layer=None):
    residual = hidden
    out = self.self_attn(self.input_layernorm(hidden), cos=cos, sin=sin, positions=positions, cache=cache, layer=layer)
    residual = residual + out
    out = self.mlp(self.post_attention_layernorm(residual))
    return torch.add(out, residual)
""",
)
