"""The operations of a layer but for attention: in Triton where that runs and pays, in torch elsewhere."""

import torch.nn.functional as F

from engine.models.layers import apply_rope


class PlainOps:
    """One torch operation after the other; runs everywhere, and is what the kernels must agree with."""

    def add_norm(self, x, residual, norm):
        """residual [N, width] += x, in place, unless x is None -> norm(residual) [N, width]."""
        if x is not None:
            residual += x
        return norm(residual)

    def rope_write(self, qkv, cos, sin, attn, cache, meta, backend):
        """Merged projection [N, (H + 2 Hkv) * D] -> q [N, H, D]; K and V go into the cache."""
        heads, kv_heads = attn.num_heads, attn.num_kv_heads
        q, k, v = qkv.view(len(qkv), -1, attn.head_dim).split((heads, kv_heads, kv_heads), dim=1)
        if attn.q_norm is not None:
            q, k = attn.q_norm(q), attn.k_norm(k)
        q, k = (apply_rope(x, cos[:, None], sin[:, None]) for x in (q, k))
        backend.write(cache, k, v, meta)
        return q

    def linear(self, x, weight, bias=None):
        """[N, in] -> [N, out]."""
        return F.linear(x, weight, bias)

    def gated(self, x, weight, bias=None):
        """The first half of an MLP, with the merged weights of gate and up: [N, in] -> [N, width]."""
        return self.swiglu(F.linear(x, weight, bias))

    def swiglu(self, gate_up):
        """[N, 2 * width] -> [N, width]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


class KernelOps(PlainOps):
    """The same, one launch each; products of few rows in a kernel of their own."""

    def add_norm(self, x, residual, norm):
        from engine.serve.kernels.norm import add_norm

        return add_norm(x, residual, norm)

    def rope_write(self, qkv, cos, sin, attn, cache, meta, backend):
        from engine.serve.kernels.rope import rope_write

        return rope_write(qkv, cos, sin, attn, cache, meta.slot_mapping)

    def linear(self, x, weight, bias=None):
        from engine.serve.kernels.matvec import fits, matvec

        return matvec(x, weight, bias) if fits(x, weight) else F.linear(x, weight, bias)

    def gated(self, x, weight, bias=None):
        from engine.serve.kernels.matvec import fits, matvec

        return matvec(x, weight, bias, gated=True) if fits(x, weight, gated=True) else super().gated(x, weight, bias)

    def swiglu(self, gate_up):
        from engine.serve.kernels.swiglu import swiglu

        return swiglu(gate_up)
