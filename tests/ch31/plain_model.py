"""Chapter 17's model once more, in float64 and without any exercise: what the flat model must compute."""

import torch

from engine.models.qwen3 import Qwen3, Qwen3Config
from tests.ch31.ragged import UNIT, plain_attention
from tests.grading import rng


def model_of(salt, **changes):
    """Three small layers with random weights in float32; no two sizes agree."""
    cfg = Qwen3Config(**{
        "vocab_size": 83, "hidden_size": 36, "intermediate_size": 52, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 10, "rope_theta": 500.0, **changes,
    })  # fmt: skip
    model, generator = Qwen3(cfg).requires_grad_(False).eval(), rng.torch(f"weights {salt}")
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.normal_(0, 1.5 * (parameter.shape[-1] if parameter.ndim > 1 else 4) ** -0.5, generator=generator)
    return model


def linear(module, x):
    out = x @ module.weight.double().T
    return out if module.bias is None else out + module.bias.double()


def rms_norm(module, x):
    return x / (x.pow(2).mean(-1, keepdim=True) + module.eps).sqrt() * module.weight.double()


def angles(positions, head_dim, theta):
    """[N, D/2] in float64."""
    powers = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    return positions.double()[:, None] * theta**-powers


def rotate(x, angle):
    """x [N, H, D], angle [N, D/2]: pairs (i, i + D/2)."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def heads_of(attn, x, angle):
    """q, k, v [N, heads, D] of a layer, as they go to the backend."""
    q, k, v = (linear(p, x).unflatten(1, (-1, attn.head_dim)) for p in (attn.q_proj, attn.k_proj, attn.v_proj))
    if attn.q_norm is not None:
        q, k = rms_norm(attn.q_norm, q), rms_norm(attn.k_norm, k)
    return rotate(q, angle), rotate(k, angle), v


def mlp(module, x):
    gate, up = linear(module.gate_proj, x), linear(module.up_proj, x)
    return linear(module.down_proj, gate * gate.sigmoid() * up)


def hidden_states(model, token_ids, noise=None):
    """[T, hidden] after the final norm, of one sequence. noise: a generator; every sum is then off by some rounding."""
    n, scale = len(token_ids), 0.0 if noise is None else 2 * UNIT * model.cfg.intermediate_size

    def rounded(x):
        return x if noise is None else x + scale * x.abs().max() * torch.empty_like(x).uniform_(-1, 1, generator=noise)

    angle = angles(torch.arange(n), model.cfg.head_dim, model.cfg.rope_theta)
    hidden = model.model.embed_tokens.weight[torch.tensor(token_ids)].double()
    for layer in model.model.layers:
        attn = layer.self_attn
        q, k, v = map(rounded, heads_of(attn, rounded(rms_norm(layer.input_layernorm, hidden)), angle))
        out = plain_attention(q, k[None], v[None], [(n, n)], [[0]], n, attn.scale)  # one block of n tokens
        hidden = rounded(hidden + linear(attn.o_proj, rounded(out).flatten(1)))
        hidden = rounded(hidden + mlp(layer.mlp, rounded(rms_norm(layer.post_attention_layernorm, hidden))))
    return rms_norm(model.model.norm, hidden)


def with_tolerance(model, token_ids):
    """(hidden states, how far such roundings move them: twice the worst of three tries)."""
    exact = hidden_states(model, token_ids)
    tries = [hidden_states(model, token_ids, rng.torch(f"noise {i}")) for i in range(3)]
    return exact, 2 * max((some - exact).abs().max().item() for some in tries)
