import torch
import torch.nn.functional as F
from torch import nn

from engine.attention import causal_attention
from engine.models.layers import apply_rope


class Qwen3Attention(nn.Module):
    def forward(self, hidden, cos, sin, positions, cache=None, layer=None) -> torch.Tensor:
        B, T, _ = hidden.shape
        q = self.q_proj(hidden).view(B, T, self.num_heads, self.head_dim)
        k = self.k_proj(hidden).view(B, T, self.num_kv_heads, self.head_dim)
        v = self.v_proj(hidden).view(B, T, self.num_kv_heads, self.head_dim)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, T, D]
        q = apply_rope(q, cos[:, None], sin[:, None])
        k = apply_rope(k, cos[:, None], sin[:, None])
        k_pos, allowed = positions, None
        if cache is not None:
            k, v, k_pos, allowed = cache.append(layer, k, v, positions)
        out = causal_attention(q, k, v, positions, k_pos, allowed, self.scale)
        return self.o_proj(out.transpose(1, 2).reshape(B, T, self.num_heads * self.head_dim))


class Qwen3MLP(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Qwen3DecoderLayer(nn.Module):
    def forward(self, hidden, cos, sin, positions, cache=None, layer=None) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, positions, cache, layer)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
