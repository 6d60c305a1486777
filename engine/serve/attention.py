"""Attention over the pool: K and V scattered into blocks, read back through block tables.

A backend is a small class: `allocate` makes one layer's cache, `write` stores a step's K and V, `forward` attends.
"""

import os
from importlib.util import find_spec
from pkgutil import resolve_name

import torch

from engine.attention import causal_attention  # noqa: F401  (what the exercise ReferenceBackend.forward calls)
from engine.exercises import exercise, fill


@exercise(31, "Attention over the pool")
def write_kv(k_cache, v_cache, k, v, slot_mapping) -> None:
    """Store the K and V of all N rows of a step in their slots.  (Your engine: Chapter 31)

    k_cache, v_cache: [num_blocks + 1, block_size, Hkv, D], changed in place; slot s is offset s % block_size of block
    s // block_size.  k, v: [N, Hkv, D].  slot_mapping: [N] i64.
    Slot -1 marks a padding row; its K and V may land anywhere in the extra last block (scratch) and nowhere else.
    One scatter each for K and V, no loop over rows, and no wait for the device (no .item(), no boolean mask).
    Values are cast to the dtype of the pool.
    Source: reshape_and_cache of vLLM (PagedAttention, SOSP 2023).
    """
    raise NotImplementedError


class PoolBackend:
    """What backends over block pools share: a layer's cache is a pair (k_cache, v_cache)."""

    name = "pool"

    def allocate(self, shape, dtype, device):
        """Zeroed (k_cache, v_cache), each of shape [num_blocks + 1, block_size, Hkv, D]."""
        return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)

    def write(self, cache, k, v, meta) -> None:
        write_kv(*cache, k, v, meta.slot_mapping)

    def forward(self, q, cache, meta, scale=None, window=0):
        raise NotImplementedError(f"{type(self).__name__}.forward")


class ReferenceBackend(PoolBackend):
    """One request after the other through chapter 5's attention. Slow on purpose: every backend's oracle."""

    name = "reference"

    @exercise(31, "Attention over the pool")
    def forward(self, q, cache, meta, scale=None, window=0):
        """Attention of every row over its own request's context in the pool.  (Your engine: Chapter 31)

        q: [N, H, D], rows as in BatchMeta.  cache: (k_cache, v_cache), each [num_blocks + 1, block_size, Hkv, D], into
        which this step's K and V have been written.  meta: BatchMeta.
        For request r with t rows and s = seq_lens[r]: gather its first s keys and values through block_table[r]
        (logical order; the physical blocks may be in any order) and call `causal_attention`.  Its queries are the last
        t positions of the context: s - t .. s - 1.  Nothing past the s-th slot may have any influence.
        scale: as in causal_attention.  window: if > 0, a query at p sees only keys at positions > p - window.
        Returns [N, H, D] in q's dtype; rows of padding requests (seq_len 0) are zero.
        Source: PagedAttention (SOSP 2023), without its kernel.
        """
        raise NotImplementedError


BACKENDS = {
    "reference": "engine.serve.attention:ReferenceBackend",
    "sdpa": "engine.serve.sdpa:SdpaBackend",
    "triton": "engine.serve.paged:TritonBackend",
}


def get_backend(name: str, device="cuda") -> PoolBackend:
    """The attention backend of that name; "auto" takes the fastest for a model on that device, if there is one here.

    ValueError lists the known names, or says what "triton" lacks on this machine.
    """
    if name == "auto":
        on_gpu = torch.device(device).type == "cuda" and torch.cuda.is_available()
        name = "triton" if on_gpu and not triton_lacks() else "sdpa"
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}; known: {', '.join(sorted((*BACKENDS, 'auto')))}")
    if name == "triton" and (lack := triton_lacks()):
        raise ValueError(f"attention backend 'triton' {lack}; 'sdpa' runs everywhere")
    return resolve_name(BACKENDS[name])()


def triton_lacks() -> str:
    """What keeps Triton's kernels from running here, "" if nothing does."""
    if not find_spec("triton"):
        return "needs the package triton, which exists for Linux"
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return "needs a CUDA device, or TRITON_INTERPRET=1 to be interpreted on the CPU, which takes minutes"
    return ""


fill(__name__)
