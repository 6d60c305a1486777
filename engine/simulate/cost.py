"""How long a step takes, from the bytes it moves and the operations it does; and how many blocks the memory holds.

A roofline for each class of operations, one class after the other: linear layers, attention of decodes, attention of
chunks, LM head. Weights and K/V are bf16. Activations between kernels are left out: a step's rows are small beside its
weights, or its arithmetic is what takes the time.
Source: Williams et al., Roofline (CACM 2009); simulation of a serving engine on such a model: Vidur (MLSys 2024).
"""

from dataclasses import dataclass

from engine.models.config import Qwen3Config
from engine.serve.config import EngineConfig
from engine.simulate.hardware import GPU

BYTES = 2  # bf16, of a weight and of an element of K or V
# Decode attention reads scattered blocks of contexts of about 1,000 tokens at 3.25 TB/s where a copy does 4.2 (Triton
# kernel with split contexts, Qwen3-8B's heads, 256 requests, H200).
DECODE_ATTENTION = 3.25 / 4.2
# What a step takes beyond its rooflines: about a dozen kernels in a layer, each a few microseconds to start and end.
# From whole decode steps of one request in a CUDA graph on an H200: Qwen3-0.6B takes 2.1 ms for 28 layers, Qwen3-8B 6.0
# for 36; less what their bytes take, 0.32 and 3.65 ms, 64 and 65 microseconds a layer.
LAYER_OVERHEAD = 65e-6
# CUDA context, workspaces, activations and logits of the largest step: what chapter 31 leaves beside weights and pool.
RESERVED = 2e9


@dataclass
class StepWork:
    """Counts of one step. A decode is a request with one row; a chunk has more.

    tokens: rows in all.  sampled: rows that need logits.  decode_context, chunk_context: tokens whose K/V are read.
    chunk_pairs: (query, key) pairs, causal.  swapped_blocks: copied to the host or back.
    """

    tokens: int = 0
    sampled: int = 0
    decode_context: int = 0
    chunk_context: int = 0
    chunk_pairs: int = 0
    swapped_blocks: int = 0

    @classmethod
    def of(cls, out) -> "StepWork":
        """From a SchedulerOutput, before num_computed_tokens moves."""
        tokens = sampled = decode_context = chunk_context = chunk_pairs = 0
        for request, n in out.scheduled:
            start = request.num_computed_tokens
            tokens += n
            sampled += start + n == len(request.token_ids)
            if n == 1:
                decode_context += start + 1
            else:
                chunk_context += start + n
                chunk_pairs += n * start + n * (n + 1) // 2
        swapped = sum(len(host) for _, _, host in out.swap_out + out.swap_in)
        return cls(tokens, sampled, decode_context, chunk_context, chunk_pairs, swapped)


class CostModel:
    """Seconds of a step on one GPU.  overhead: seconds a step beyond its rooflines; None: LAYER_OVERHEAD a layer."""

    def __init__(self, gpu: GPU, cfg: Qwen3Config, block_size: int, overhead: float | None = None):
        self.gpu, self.cfg = gpu, cfg
        hidden, layers = cfg.hidden_size, cfg.num_hidden_layers
        query, kv = cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim
        # q and o; k and v; gate, up and down. Norms are a few thousand weights and not counted.
        self.layer_params = layers * (2 * hidden * query + 2 * hidden * kv + 3 * hidden * cfg.intermediate_size)
        self.head_params = cfg.vocab_size * hidden
        self.kv_bytes = 2 * layers * kv * BYTES  # of a token
        self.block_bytes = block_size * self.kv_bytes
        self.pair_flops = 4 * layers * query  # of one (query, key) pair: two products
        self.overhead = layers * LAYER_OVERHEAD if overhead is None else overhead

    @property
    def weight_bytes(self) -> int:
        """Of the whole checkpoint; the input embedding is a matrix of its own unless it is tied to the LM head."""
        return BYTES * (self.layer_params + self.head_params * (1 if self.cfg.tie_word_embeddings else 2))

    def seconds(self, work: StepWork) -> float:
        return sum(self.parts(work).values())

    def parts(self, work: StepWork) -> dict[str, float]:
        """Seconds by class of operations. Writing the new K/V is counted with the linear layers that make it."""
        logits = 2 * 4 * work.sampled * self.cfg.vocab_size  # float32, written and read
        decode_bytes = self.kv_bytes * work.decode_context / DECODE_ATTENTION
        new_kv = self.kv_bytes * work.tokens
        computes = work.tokens > 0
        return {
            "linear": self._roof(
                computes * BYTES * self.layer_params + new_kv, 2 * self.layer_params * work.tokens
            ),
            "decode attention": self._roof(decode_bytes, self.pair_flops * work.decode_context),
            "chunk attention": self._roof(self.kv_bytes * work.chunk_context, self.pair_flops * work.chunk_pairs),
            "lm head": self._roof(
                (work.sampled > 0) * BYTES * self.head_params + logits, 2 * self.head_params * work.sampled
            ),
            "swap": work.swapped_blocks * self.block_bytes / self.gpu.pcie,
            "overhead": self.overhead,
        }

    def _roof(self, moved: float, operations: float) -> float:
        return max(moved / self.gpu.bandwidth, operations / self.gpu.flops)

    def max_model_len(self, config: EngineConfig) -> int:
        """config.max_model_len, or the model's limit; ValueError if it exceeds that."""
        limit = self.cfg.max_position_embeddings
        if (config.max_model_len or limit) > limit:
            raise ValueError(f"max_model_len {config.max_model_len} exceeds the model's {limit} positions")
        return config.max_model_len or limit

    def num_blocks(self, config: EngineConfig) -> int:
        """Blocks of the pool, as `engine.serve.sizing` counts them with RESERVED for the measured peak.

        ValueError if not even one fits.
        """
        max_model_len = self.max_model_len(config)
        if config.num_blocks is not None:
            return config.num_blocks
        room = config.kv_cache_bytes
        if room is None:
            room = self.gpu.memory * config.gpu_memory_utilization - self.weight_bytes - RESERVED
        num_blocks = min(int(room // self.block_bytes), config.max_num_seqs * -(-max_model_len // config.block_size))
        if num_blocks < 1:
            raise ValueError(
                f"no room for a pool: {room / 1e9:.1f} GB are left for it and a block takes {self.block_bytes:,} bytes "
                f"({self.gpu.memory / 1e9:.0f} GB of memory, {self.weight_bytes / 1e9:.1f} GB of weights)"
            )
        return num_blocks
