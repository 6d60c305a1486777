"""The Triton backend: K and V are read where they lie, in one launch for decodes and one for prefill chunks."""

from functools import cache as once

import torch

from engine.serve.attention import PoolBackend
from engine.serve.kernels.decode import choose_splits, decode
from engine.serve.kernels.prefill import prefill
from engine.serve.kernels.write import write_kv

SPLITS = 8  # in Triton's interpreter, where nothing is gained by them


class TritonBackend(PoolBackend):
    """Kernels over the pool: float32, float16, bfloat16; block sizes and head widths of any size."""

    name = "triton"

    def write(self, cache, k, v, meta) -> None:
        write_kv(*cache, k, v, meta.slot_mapping)

    def forward(self, q, cache, meta, scale=None, window=0):
        """As ReferenceBackend.forward: q [N, H, D] -> [N, H, D]."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self.attend(q.contiguous(), cache, meta, out, q.shape[-1] ** -0.5 if scale is None else scale, window)
        return out

    def attend(self, q, cache, meta, out, scale, window) -> None:
        """Into out [N, H, D], every row of it; q without gaps.

        A request with one row, a decode or padding, is the first kernel's; all others the second's.
        """
        starts = meta.query_start_loc_cpu
        if meta.decode_only or bool((starts[1:] - starts[:-1] == 1).any()):
            keys = min(window, meta.max_seq_len) if window > 0 else meta.max_seq_len
            splits = choose_splits(meta.num_reqs, cache[0].shape[2], keys, _processors(q.device))
            decode(q, cache, meta, out, scale, window, splits)
        if not meta.decode_only:
            prefill(q, cache, meta, out, scale, window)


@once
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else SPLITS
