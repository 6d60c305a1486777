"""How many blocks the pool gets."""

import torch

from engine.serve.attention import get_backend
from engine.serve.batch import build_batch
from engine.serve.config import EngineConfig
from engine.serve.flat import FlatModel
from engine.serve.request import Request

CPU_KV_CACHE_BYTES = 256 << 20


def cache_shape(cfg, block_size: int, num_blocks: int) -> tuple[int, ...]:
    """Shape of one layer's pool of keys, or of values."""
    return num_blocks, block_size, cfg.num_key_value_heads, cfg.head_dim


def block_bytes(cfg, block_size: int, dtype: torch.dtype) -> int:
    """K and V of one block in all layers."""
    return 2 * cfg.num_hidden_layers * block_size * cfg.num_key_value_heads * cfg.head_dim * dtype.itemsize


def num_pool_blocks(model, config: EngineConfig, max_model_len: int) -> int:
    """config.num_blocks, or as many as the memory set aside for the pool holds.

    Never more than max_num_seqs requests of full length could fill. ValueError if not even one block fits.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    parameter = next(model.parameters())
    if config.kv_cache_bytes is None and parameter.device.type == "cuda":
        num_blocks = profile_num_blocks(model, config, max_model_len)
    else:
        budget = CPU_KV_CACHE_BYTES if config.kv_cache_bytes is None else config.kv_cache_bytes
        num_blocks = budget // block_bytes(model.cfg, config.block_size, parameter.dtype)
    num_blocks = min(num_blocks, config.max_num_seqs * -(-max_model_len // config.block_size))
    if num_blocks < 1:
        raise ValueError(
            f"no room for a pool: one block of {config.block_size} tokens takes "
            f"{block_bytes(model.cfg, config.block_size, parameter.dtype):,} bytes"
        )
    return num_blocks


@torch.inference_mode()
def profile_num_blocks(model, config: EngineConfig, max_model_len: int) -> int:
    """Blocks that fit beside weights and the peak of the largest step, on a CUDA device.

    The largest step computes max_num_batched_tokens tokens at the end of contexts of max_model_len, and float32 logits
    for max_num_seqs rows. It is run once, on a pool of a single block, and its peak is read from the allocator. What
    other processes hold is not ours to use.  Source: the memory profiling of vLLM.
    """
    flat = FlatModel(model)
    cfg, device = flat.cfg, flat.device
    backend = get_backend(config.attention_backend, device)
    total = torch.cuda.get_device_properties(device).total_memory
    others = total - torch.cuda.mem_get_info(device)[0] - torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)

    batch = largest_step(config, max_model_len, device)
    cache = backend.allocate(cache_shape(cfg, config.block_size, 2), flat.dtype, device)
    hidden_states = flat.forward(
        batch.input_ids, batch.positions, [cache] * cfg.num_hidden_layers, batch.meta, backend
    )
    rows = torch.arange(config.max_num_seqs, device=device) % len(hidden_states)
    torch.softmax(flat.compute_logits(hidden_states[rows]), dim=-1)  # sampling needs as much again
    torch.cuda.synchronize(device)

    peak = torch.cuda.max_memory_allocated(device)
    free = int(total * config.gpu_memory_utilization) - peak - others
    return max(0, free) // block_bytes(cfg, config.block_size, flat.dtype)


def largest_step(config: EngineConfig, max_model_len: int, device):
    """A batch of max_num_batched_tokens tokens, each at the end of a context of max_model_len, all in block 0."""
    scheduled, tables, left = [], {}, config.max_num_batched_tokens
    while left > 0:
        request = Request(f"profile {left}", [0] * max_model_len)
        n = min(left, max_model_len)
        request.num_computed_tokens = max_model_len - n
        scheduled.append((request, n))
        tables[request] = [0] * -(-max_model_len // config.block_size)
        left -= n
    return build_batch(scheduled, tables, config.block_size, device)
