"""The flat model with fewer launches: projections that share their input are one matrix, and norms, rotation, cache
write and activation are one kernel each, or part of one."""

import torch
import torch.nn.functional as F  # noqa: F401  (what the exercises call)
from torch import nn

from engine.exercises import exercise, fill
from engine.models.layers import rope_cos_sin  # noqa: F401  (what the exercises call)
from engine.serve.flat import FlatModel
from engine.serve.ops import KernelOps, PlainOps


@exercise(33, "One matrix for several")
def merge_linears(linears):
    """One weight for linear layers with the same input; theirs become views of it.  (Your engine: Chapter 33)

    linears: list of nn.Linear with equal in_features.
    Returns (weight [sum of out_features, in_features], bias [sum of out_features] or None): theirs, one below the
    other in order, so that F.linear(x, weight, bias) is their outputs side by side. Afterwards the weight (and bias)
    of each is an nn.Parameter without gradient that shares the memory of its rows: nothing is stored twice, and a
    state dict still loads by name, through the parts into the whole.
    Biases: all have one, or none has; ValueError otherwise, and where in_features differ, with nothing changed.
    """
    raise NotImplementedError


def split_linears(linears) -> None:
    """Undo merge_linears: every layer has its own memory again."""
    for linear in linears:
        for name, parameter in list(linear.named_parameters()):
            setattr(linear, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))


def whole_of(linears):
    """What merge_linears returned for these layers before, None if they do not lie in one piece."""
    found = []
    for name in ("weight", "bias"):
        parts = [getattr(linear, name) for linear in linears]
        if parts[0] is None:
            found.append(None)
            continue
        begins = [part.data_ptr() for part in parts]
        ends = [begin + part.nbytes for begin, part in zip(begins, parts, strict=True)]
        if begins[1:] != ends[:-1] or len({part.untyped_storage().data_ptr() for part in parts}) > 1:
            return None
        rows = sum(len(part) for part in parts)
        found.append(parts[0].detach().as_strided((rows, *parts[0].shape[1:]), parts[0].stride()))
    return tuple(found)


class FusedModel(FlatModel):
    """FlatModel over merged weights. Made by `FlatModel.fuse()`; `unfuse()` gives the plain one back.

    The model keeps its modules and names, only the memory behind some weights is shared; move it to its device before.
    self.merged[module]: what merge_linears returned, for each self_attn, and for each mlp that has gate_proj, up_proj
    and down_proj (another kind, a mixture of experts, say, runs as it is).
    self.ops: linear, add_norm, rope_write and gated, see `engine/serve/ops.py`. They are given weights and biases; the
    modules that hold these are not called.
    """

    def __init__(self, model, ops=None):
        super().__init__(model)
        self.ops = ops or (KernelOps() if self.device.type == "cuda" else PlainOps())
        self.merged = {module: whole_of(linears) or merge_linears(linears) for module, linears in self._groups()}

    def _groups(self):
        for layer in self.model.model.layers:
            attn, mlp = layer.self_attn, layer.mlp
            yield attn, [attn.q_proj, attn.k_proj, attn.v_proj]
            if all(hasattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")):
                yield mlp, [mlp.gate_proj, mlp.up_proj]

    def fuse(self) -> "FusedModel":
        return self

    def unfuse(self) -> FlatModel:
        for module, linears in self._groups():
            if module in self.merged:
                split_linears(linears)
        self.merged.clear()
        return FlatModel(self.model)

    @exercise(33, "One launch for several")
    def attention(self, attn, hidden_states, cos, sin, cache, meta, backend):
        """As FlatModel.attention, with one projection and one launch up to attention itself.  (Your engine: Chapter 33)

        The merged projection of `attn`, `self.ops.rope_write(qkv, cos, sin, attn, cache, meta, backend)` -> q
        [N, H, D], then `backend.forward` with attn.scale, then o_proj.  Returns [N, hidden].
        Both products by `self.ops.linear(x, weight, bias)`, which knows a quicker way for few rows.
        """
        raise NotImplementedError

    def mlp(self, mlp, hidden_states):
        """The MLP of a layer, [N, hidden] -> [N, hidden]."""
        if mlp not in self.merged:
            return mlp(hidden_states)
        down = mlp.down_proj
        return self.ops.linear(self.ops.gated(hidden_states, *self.merged[mlp]), down.weight, down.bias)

    @exercise(33, "One launch for several")
    def forward(self, input_ids, positions, kv_caches, meta, backend):
        """As FlatModel.forward, with each residual sum and the norm after it in one.  (Your engine: Chapter 33)

        Arguments and result as there. The residual stream is one tensor [N, hidden] (the embeddings, at first) that
        `self.ops.add_norm(x, residual, norm)` changes in place: x, what the last half of a layer gave, is added to it,
        and the normed sum returned. x is None where nothing was computed yet. So each half of a layer needs one
        add_norm, and the last one is the model's final norm. Attention and MLP are `self.attention` and `self.mlp`.
        """
        raise NotImplementedError

    def compute_logits(self, hidden_states):
        """[L, hidden] -> logits [L, V] in the model's type: the samplers widen them where they read them."""
        return self.model.lm_head(hidden_states)

    @torch.inference_mode()
    def __call__(self, batch, kv_caches, backend):
        return super().__call__(batch, kv_caches, backend).float()


fill(__name__)
