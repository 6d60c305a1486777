"""Qwen3, and Llama, which is the same without q/k norms: a decoder that serves any cache with an `append`.

Module and parameter names are Hugging Face's, so a checkpoint's state dict loads without renaming.
"""

import torch
import torch.nn.functional as F  # noqa: F401 - what the bodies of the exercises may use
from torch import nn

from engine.attention import causal_attention  # noqa: F401 - what the bodies of the exercises may use
from engine.exercises import exercise, fill
from engine.models.config import Qwen3Config
from engine.models.layers import Linear, RMSNorm, apply_rope, rope_cos_sin

__all__ = [
    "Qwen3", "Qwen3Attention", "Qwen3Config", "Qwen3DecoderLayer", "Qwen3MLP", "Qwen3Model",
    "RMSNorm", "apply_rope", "random_model", "rope_cos_sin", "test_model",
]  # fmt: skip


class Qwen3Attention(nn.Module):
    """Grouped-query attention with rotary positions; q_norm and k_norm are None in a model without them (Llama)."""

    def __init__(self, cfg: Qwen3Config):
        super().__init__()
        self.num_heads = cfg.num_attention_heads
        self.num_kv_heads = cfg.num_key_value_heads
        self.head_dim = cfg.head_dim
        self.scale = cfg.head_dim**-0.5
        bias = cfg.attention_bias
        self.q_proj = Linear(cfg.hidden_size, self.num_heads * self.head_dim, bias=bias)
        self.k_proj = Linear(cfg.hidden_size, self.num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = Linear(cfg.hidden_size, self.num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = Linear(self.num_heads * self.head_dim, cfg.hidden_size, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, cfg.rms_norm_eps) if cfg.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, cfg.rms_norm_eps) if cfg.qk_norm else None

    @exercise(17, "Grouped attention with q/k norm")
    def forward(self, hidden, cos, sin, positions, cache=None, layer=None) -> torch.Tensor:
        """Attention of one layer, over this call's tokens and whatever the cache holds.  (Your engine: Chapter 17)

        hidden [B, T, hidden_size]; cos, sin [B, T, head_dim] for these tokens; positions [B, T]; layer: which layer
        this is.
        Returns [B, T, hidden_size] in hidden's dtype.
        q_proj, k_proj and v_proj give num_heads, num_kv_heads and num_kv_heads heads of head_dim each. q_norm and
        k_norm act on each head's head_dim values, where they are not None; RoPE turns q and k afterwards; v gets
        neither. Without a cache, keys and values are this call's, at `positions`. With one, `cache.append(layer, k,
        v, positions)`, k and v [B, num_kv_heads, T, head_dim], is called exactly once and returns (k, v, k_pos,
        allowed) to attend to. `causal_attention` does the rest with `self.scale`; its heads, side by side in order,
        go through o_proj. num_heads * head_dim need not be hidden_size.
        """
        raise NotImplementedError


class Qwen3MLP(nn.Module):
    """The gated feed-forward half of a block."""

    def __init__(self, cfg: Qwen3Config):
        super().__init__()
        self.gate_proj = Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.up_proj = Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.down_proj = Linear(cfg.intermediate_size, cfg.hidden_size, bias=False)

    @exercise(17, "The gated MLP")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """SwiGLU: down(silu(gate(x)) * up(x)).  (Your engine: Chapter 17)

        x [..., hidden_size] -> [..., hidden_size]. silu(a) = a * sigmoid(a) acts on the gate branch only.
        Source: Shazeer, "GLU Variants Improve Transformer", 2020.
        """
        raise NotImplementedError


class Qwen3DecoderLayer(nn.Module):
    """One block: attention, then the MLP, each behind a norm and beside a residual path."""

    def __init__(self, cfg: Qwen3Config):
        super().__init__()
        self.self_attn = Qwen3Attention(cfg)
        self.mlp = Qwen3MLP(cfg)
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)

    @exercise(17, "The block")
    def forward(self, hidden, cos, sin, positions, cache=None, layer=None) -> torch.Tensor:
        """Residual block: h = hidden + attention(norm(hidden)), then h + mlp(norm(h)).  (Your engine: Chapter 17)

        Arguments as in `Qwen3Attention.forward`, to which all but hidden are handed on. Returns [B, T, hidden_size].
        `input_layernorm` stands before `self_attn`, `post_attention_layernorm` before `mlp`; what is added on the
        residual path is the un-normalised input of each half. The caller's `hidden` is not changed in place.
        """
        raise NotImplementedError


class Qwen3Model(nn.Module):
    """Embedding, blocks and the final norm."""

    def __init__(self, cfg: Qwen3Config):
        super().__init__()
        self.cfg = cfg
        self.embed_tokens = nn.Embedding.from_pretrained(torch.empty(cfg.vocab_size, cfg.hidden_size), freeze=False)
        if not self.embed_tokens.weight.is_meta:  # there torch would import sympy to draw nothing, two seconds of it
            nn.init.normal_(self.embed_tokens.weight)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(cfg) for _ in range(cfg.num_hidden_layers))
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor, cache=None, positions: torch.Tensor | None = None) -> torch.Tensor:
        """input_ids [B, T] -> hidden states [B, T, hidden_size]. Positions [B, T]; default: those after the cache's."""
        if positions is None:
            start = 0 if cache is None else cache.length
            T = input_ids.shape[1]
            positions = torch.arange(start, start + T, device=input_ids.device).expand(input_ids.shape)
        cos, sin = rope_cos_sin(positions, self.cfg.head_dim, self.cfg.rope_theta)
        hidden = self.embed_tokens(input_ids)
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden, cos, sin, positions, cache, i)
        return self.norm(hidden)


class Qwen3(nn.Module):
    """The language model: `model(input_ids [B, T], cache=None, positions=None)` -> float32 logits [B, T, V]."""

    def __init__(self, cfg: Qwen3Config):
        super().__init__()
        self.cfg = cfg
        self.model = Qwen3Model(cfg)
        self.lm_head = Linear(cfg.hidden_size, cfg.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """One matrix for embedding and LM head where the config says so; again after parameters were replaced."""
        if self.cfg.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor, cache=None, positions: torch.Tensor | None = None) -> torch.Tensor:
        return self.lm_head(self.model(input_ids, cache, positions)).float()


def random_model(cfg: Qwen3Config, seed: int = 0) -> Qwen3:
    """Seeded random weights in float32, ready for inference; leaves the global random state alone.

    Logits spread over a few units, so rounding does not decide greedy tokens: over 800 tokens of seeds 0 to 7 the two
    best logits are never closer than 1.6e-3, while cached and uncached logits differ by 2e-5 at most.
    """
    with torch.device("meta"):
        model = Qwen3(cfg)
    generator, weights = torch.Generator().manual_seed(seed), {}
    for name, parameter in model.named_parameters():
        weight = weights[name] = torch.empty(parameter.shape)  # to_empty() of a whole model imports sympy, for seconds
        if name.endswith("norm.weight"):
            weight.uniform_(0.5, 1.5, generator=generator)
        elif "embed_tokens" in name:
            weight.normal_(0, 1, generator=generator)
        else:  # variance is kept from layer to layer; the LM head spreads the logits over a few units
            gain = 3.0 if "lm_head" in name else 1.5
            weight.normal_(0, gain * weight.shape[1] ** -0.5, generator=generator)
    model.load_state_dict(weights, strict=False, assign=True)
    model.requires_grad_(False).eval().tie_weights()
    return model


def test_model(seed: int = 0) -> Qwen3:
    """Two small layers with seeded random weights; no two sizes agree that a wrong axis could hide behind."""
    cfg = Qwen3Config(
        vocab_size=199, hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, rope_theta=10_000.0, max_position_embeddings=4096,
    )  # fmt: skip
    return random_model(cfg, seed)


test_model.__test__ = False  # pytest: not a test, whatever its name says

fill(__name__)
