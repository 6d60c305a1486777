"""Every setting of the core."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one EngineCore; ValueError for values and combinations that cannot work.

    block_size: tokens in a block.  num_blocks: blocks in the pool; None sizes it from memory.
    max_num_batched_tokens: token budget of a step.  max_num_seqs: requests running at once.
    max_model_len: prompt + output of one request at most; None takes the model's limit.
    max_waiting: requests in the queue at most, more are refused; None: as many as memory holds.
    long_prefill_token_threshold: cap on one request's share of a step; 0 is off.
    policy: "fcfs", or "priority" (lower priority value first, then arrival).
    preemption_mode: "recompute" forgets the K/V, "swap" copies it to the host, at most swap_space_bytes of it.
    attention_backend: a name of `get_backend`; "auto" takes the fastest here.
    gpu_memory_utilization: share of a GPU's memory that weights, activations and pool may fill together.
    kv_cache_bytes: size of the pool where num_blocks is None; None: profiled on CUDA, 256 MiB elsewhere.
    fuse: merged projections and fused kernels; "auto" on CUDA with Triton.
    cuda_graphs: "on" replays decode steps from CUDA graphs, "static" runs the same code without them, "off" builds
    every step anew; "auto" is on where attention runs in Triton's kernels on CUDA.
    async_scheduling: plan and launch a step before the tokens of the last one are read.
    seed: where the seeds of requests without one come from.
    """

    block_size: int = 16
    num_blocks: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    max_model_len: int | None = None
    max_waiting: int | None = 10_000
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    policy: str = "fcfs"
    preemption_mode: str = "recompute"
    swap_space_bytes: int = 1 << 30
    attention_backend: str = "auto"
    gpu_memory_utilization: float = 0.9
    kv_cache_bytes: int | None = None
    fuse: bool | str = "auto"
    cuda_graphs: str = "auto"
    async_scheduling: bool = False
    seed: int = 0

    def __post_init__(self):
        for name in ("block_size", "max_num_batched_tokens", "max_num_seqs"):
            self._at_least(name, 1)
        for name in ("long_prefill_token_threshold", "swap_space_bytes"):
            self._at_least(name, 0)
        for name in ("num_blocks", "max_model_len", "max_waiting", "kv_cache_bytes"):
            if getattr(self, name) is not None:
                self._at_least(name, 1)
        if self.fuse not in (True, False, "auto"):
            raise ValueError(f"fuse must be True, False or 'auto', got {self.fuse!r}")
        if self.cuda_graphs not in ("auto", "on", "static", "off"):
            raise ValueError(f"cuda_graphs must be 'auto', 'on', 'static' or 'off', got {self.cuda_graphs!r}")
        for name in ("enable_prefix_caching", "enable_chunked_prefill", "async_scheduling"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ValueError(f"seed must be an integer, got {self.seed!r}")
        if self.policy not in ("fcfs", "priority"):
            raise ValueError(f"policy must be 'fcfs' or 'priority', got {self.policy!r}")
        if self.preemption_mode not in ("recompute", "swap"):
            raise ValueError(f"preemption_mode must be 'recompute' or 'swap', got {self.preemption_mode!r}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must lie in (0, 1], got {self.gpu_memory_utilization!r}")
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            raise ValueError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} cuts prompts into chunks, "
                "but enable_chunked_prefill is False"
            )
        if self.num_blocks is not None and self.kv_cache_bytes is not None:
            raise ValueError(
                f"num_blocks={self.num_blocks} and kv_cache_bytes={self.kv_cache_bytes} both size the pool: give one"
            )

    def _at_least(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")
