import torch
from torch import nn

from engine.models.layers import rope_cos_sin


def merge_linears(linears):
    if len({linear.in_features for linear in linears}) > 1:
        raise ValueError(f"in_features differ: {[linear.in_features for linear in linears]}")
    if len({linear.bias is None for linear in linears}) > 1:
        raise ValueError("some of the layers have a bias and some have none")
    sizes = [linear.out_features for linear in linears]

    def merge(name):
        whole = torch.cat([linear.get_parameter(name).detach() for linear in linears])
        for linear, part in zip(linears, whole.split(sizes), strict=True):
            linear.register_parameter(name, nn.Parameter(part, requires_grad=False))
        return whole

    return merge("weight"), None if linears[0].bias is None else merge("bias")


class FusedModel:
    def attention(self, attn, hidden_states, cos, sin, cache, meta, backend):
        qkv = self.ops.linear(hidden_states, *self.merged[attn])
        q = self.ops.rope_write(qkv, cos, sin, attn, cache, meta, backend)
        out = backend.forward(q, cache, meta, scale=attn.scale)
        return self.ops.linear(out.reshape(len(out), -1), attn.o_proj.weight, attn.o_proj.bias)

    def forward(self, input_ids, positions, kv_caches, meta, backend):
        model = self.model.model
        x, residual = None, model.embed_tokens(input_ids)
        cos, sin = rope_cos_sin(positions, self.cfg.head_dim, self.cfg.rope_theta)
        for layer, cache in zip(model.layers, kv_caches, strict=True):
            normed = self.ops.add_norm(x, residual, layer.input_layernorm)
            x = self.attention(layer.self_attn, normed, cos, sin, cache, meta, backend)
            normed = self.ops.add_norm(x, residual, layer.post_attention_layernorm)
            x = self.mlp(layer.mlp, normed)
        return self.ops.add_norm(x, residual, model.norm)
