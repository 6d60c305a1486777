"""The loaded model, run on flat rows: same modules, same weights, another loop."""

from pkgutil import resolve_name

import torch

from engine.exercises import exercise, fill
from engine.models.layers import apply_rope, rope_cos_sin  # noqa: F401  (what the exercises call)


class FlatModel:
    """Runs a model of `engine.models` over [N, ...] rows, with attention given to a backend.

    Nothing is copied or renamed: `model.model.embed_tokens`, `.layers`, `.norm` and `model.lm_head` are used in place.
    A layer's `mlp` may be any module that maps [N, hidden] to [N, hidden] (a mixture of experts, say), and its
    `self_attn` may have no q_norm and k_norm (None, as in Llama).
    """

    def __init__(self, model):
        self.model = model
        self.cfg = model.cfg
        parameter = next(model.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device

    @exercise(31, "The flat model")
    def attention(self, attn, hidden_states, cos, sin, cache, meta, backend):
        """One attention layer over the rows of all requests.  (Your engine: Chapter 31)

        attn: a layer's `self_attn` (q_proj, k_proj, v_proj, o_proj, q_norm, k_norm; num_heads, num_kv_heads, head_dim,
        scale).  hidden_states: [N, hidden], already normalised.  cos, sin: [N, D], for apply_rope.
        Project, split into heads [N, H or Hkv, D], normalise q and k per head where the model has those norms, rotate q
        and k, `backend.write` K and V into this layer's cache, then `backend.forward`, then o_proj.
        Write comes first: a row attends to its own K, and to rows of other requests that share its blocks.
        Returns [N, hidden].
        """
        raise NotImplementedError

    @exercise(31, "The flat model")
    def forward(self, input_ids, positions, kv_caches, meta, backend):
        """All layers over the rows of a step.  (Your engine: Chapter 31)

        input_ids, positions: [N] i64.  kv_caches: one cache a layer, as `backend.allocate` made it.  meta: BatchMeta.
        Embed; the RoPE tables once for all layers (from `positions`, cfg.head_dim, cfg.rope_theta; not from the row
        number); in each layer the residual around attention (input_layernorm before it) and around the MLP
        (post_attention_layernorm before it); the final norm.  The attention is `self.attention`.
        Returns hidden states [N, hidden], before the LM head.
        """
        raise NotImplementedError

    def fuse(self):
        """The same model with fewer launches; see `FusedModel`."""
        return resolve_name("engine.serve.fused:FusedModel")(self.model)

    def compute_logits(self, hidden_states):
        """[L, hidden], only rows that are needed -> logits [L, V] in float32."""
        return self.model.lm_head(hidden_states).float()

    @torch.inference_mode()
    def __call__(self, batch, kv_caches, backend):
        """Batch -> logits [L, V] of the rows in batch.logits_indices."""
        hidden_states = self.forward(batch.input_ids, batch.positions, kv_caches, batch.meta, backend)
        return self.compute_logits(hidden_states[batch.logits_indices])


fill(__name__)
