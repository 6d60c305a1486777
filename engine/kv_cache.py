"""The contiguous KV cache: keys and values are kept, so a new token costs one forward pass of one token."""

import torch

from engine.exercises import exercise, fill
from engine.sampling import sample  # noqa: F401 - what the bodies of the exercises may use


class KVCache:
    """Room for `max_len` positions of every layer, filled from position 0 on, equally far in every row of the batch.

    k_cache, v_cache: [num_layers, batch, num_kv_heads, max_len, head_dim]. lengths: positions held, layer by layer;
    within a forward pass the first layers are ahead of the last. Memory: 2 * layers * batch * kv_heads * max_len *
    head_dim elements, allocated at once and never moved.
    """

    def __init__(self, num_layers, batch, num_kv_heads, max_len, head_dim, dtype=torch.float32, device="cpu"):
        shape = (num_layers, batch, num_kv_heads, max_len, head_dim)
        if min(shape) < 1:
            raise ValueError(f"a cache of layers, batch, kv_heads, max_len, head_dim {shape} has no room")
        self.max_len = max_len
        self.k_cache = torch.zeros(shape, dtype=dtype, device=device)
        self.v_cache = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = [0] * num_layers

    @classmethod
    def for_model(cls, model, batch: int, max_len: int) -> "KVCache":
        """A cache of the model's shape, in the dtype and on the device of its weights."""
        cfg, weight = model.cfg, model.lm_head.weight
        return cls(
            cfg.num_hidden_layers, batch, cfg.num_key_value_heads, max_len, cfg.head_dim, weight.dtype, weight.device
        )

    @property
    def length(self) -> int:
        """Positions that all layers hold: where the next token goes."""
        return min(self.lengths)

    @exercise(16, "The contiguous cache")
    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor):
        """Write new keys and values of one layer behind the old ones; return all of them.  (Your engine: Chapter 16)

        k, v [B, Hkv, T, D], already rotated; positions [B, T], which must continue this layer: the T positions from
        `self.lengths[layer]` on, in every row. They are copied into `k_cache` and `v_cache` at their positions, and
        `self.lengths[layer]` grows by T; the other layers are untouched.
        Returns (k_all [B, Hkv, S, D], v_all [B, Hkv, S, D], k_pos [S], None), S the new length, k_pos = 0 … S-1 on the
        device of the cache; k_all and v_all are views of the cache, not copies. None: every key may be seen, as far as
        positions allow.
        Raises ValueError, and leaves the cache as it was, when k or v is not [B, Hkv, T, D] with the cache's B, Hkv
        and D, when positions do not continue (naming what was expected and what came), and when there are not T free
        positions left (naming the length, T and max_len).
        """
        raise NotImplementedError


@exercise(16, "Prefill once, then one token at a time")
def generate(
    model, prompt_token_ids, max_tokens=16, temperature=0.0, top_k=0, top_p=1.0, generator=None, eos_token_id=None
) -> list[int]:
    """The tokens of `sampling.generate`, with a KV cache under the model.  (Your engine: Chapter 16)

    Arguments, errors and result as there: a list of new tokens, at most max_tokens, up to and including the first end
    token; eos_token_id is None, an int or a tuple of ints. `sample` is called once a token, on the logits [1, V]
    after the newest token, so that the same generator gives the same tokens.
    The model sees the prompt once, in one call, and after that only the newest token: one call a token, none whose
    logits nobody samples from, and never more than len(prompt) + max_tokens positions of cache.
    Raises ValueError for an empty prompt and for max_tokens below 1.
    """
    raise NotImplementedError


fill(__name__)
