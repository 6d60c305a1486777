"""The only part of the core that touches the device: pool, forward pass, swap copies."""

import time
from pkgutil import resolve_name

import torch

from engine.serve import logprobs
from engine.serve.attention import get_backend, triton_lacks
from engine.serve.batch import build_batch
from engine.serve.device_sampler import DeviceSampler
from engine.serve.flat import FlatModel
from engine.serve.sampler import SimpleSampler
from engine.serve.scheduler import SchedulerOutput
from engine.serve.sizing import cache_shape


def make_runner(model, config, num_blocks, num_host_blocks, sampler, max_model_len):
    """The runner that a configuration asks for; ValueError for CUDA graphs without a CUDA device."""
    kernels = next(model.parameters()).device.type == "cuda" and not triton_lacks()
    backend = config.attention_backend
    mode = config.cuda_graphs
    if mode == "auto":
        mode = "on" if kernels and backend in ("auto", "triton") else "off"
    if mode == "on" and not (kernels and backend in ("auto", "triton")):
        raise ValueError(
            f"cuda_graphs='on' needs a model on a CUDA device and the backend 'triton', which read no lengths on the "
            f"host; here the backend is {backend!r}. 'static' runs the same code without graphs"
        )
    if mode == "off" and not config.async_scheduling:
        return ModelRunner(model, config, num_blocks, num_host_blocks, sampler)
    if sampler is None and config.async_scheduling:
        sampler = DeviceSampler()
    graph_runner = resolve_name("engine.serve.graphs:GraphRunner")
    return graph_runner(model, config, num_blocks, num_host_blocks, sampler, max_model_len, mode)


class ModelRunner:
    """Runs planned steps of one model over one pool.

    kv_caches: one cache a layer, with num_blocks blocks and one of scratch.  host_caches: the same for swapped blocks.
    seconds: time spent so far in "build" (the batch), "swap", "forward" and "sample"; on a GPU the wait for the
    forward pass ends in "sample".
    """

    def __init__(self, model, config, num_blocks: int, num_host_blocks: int = 0, sampler=None):
        self.model = FlatModel(model)
        if config.fuse is True or config.fuse == "auto" and self.model.device.type == "cuda" and not triton_lacks():
            self.model = self.model.fuse()
        self.config = config
        self.backend = get_backend(config.attention_backend, self.model.device)
        self.sampler = sampler or SimpleSampler()
        layers, device = self.model.cfg.num_hidden_layers, self.model.device
        shape = cache_shape(self.model.cfg, config.block_size, num_blocks + 1)
        self.kv_caches = [self.backend.allocate(shape, self.model.dtype, device) for _ in range(layers)]
        self.host_caches = []
        if num_host_blocks:
            shape = cache_shape(self.model.cfg, config.block_size, num_host_blocks)
            pin = device.type == "cuda"
            self.host_caches = [
                tuple(torch.zeros(shape, dtype=pool.dtype, pin_memory=pin) for pool in cache)
                for cache in self.kv_caches
            ]
        self.seconds = dict.fromkeys(("build", "swap", "forward", "sample"), 0.0)

    @torch.inference_mode()
    def swap(self, out: SchedulerOutput) -> None:
        """Copy blocks out to the host, then in from it."""
        begin = time.perf_counter()
        for _, device_blocks, host_blocks in out.swap_out:
            for cache, host in zip(self.kv_caches, self.host_caches, strict=True):
                for pool, store in zip(cache, host, strict=True):
                    store[host_blocks] = pool[device_blocks].to(store.device)
        for _, device_blocks, host_blocks in out.swap_in:
            for cache, host in zip(self.kv_caches, self.host_caches, strict=True):
                for pool, store in zip(cache, host, strict=True):
                    pool[device_blocks] = store[host_blocks].to(pool.device)
        self.seconds["swap"] += time.perf_counter() - begin

    @torch.inference_mode()
    def execute(self, out: SchedulerOutput, block_tables) -> list[list[int]]:
        """One forward pass over the plan -> for each scheduled request the token ids sampled from its rows."""
        if not out.scheduled:
            return []
        times = [time.perf_counter()]
        batch = build_batch(out.scheduled, block_tables, self.config.block_size, self.model.device)
        times.append(time.perf_counter())
        logits = self.model(batch, self.kv_caches, self.backend)
        times.append(time.perf_counter())
        rows = [
            (request, request.num_output_tokens + j)
            for (request, _), count in zip(out.scheduled, batch.sample_counts, strict=True)
            for j in range(count)
        ]
        token_ids = self.sampler(logits[: len(rows)], rows)
        logprobs.record(logits, rows, token_ids, batch.prompt_spans)
        times.append(time.perf_counter())
        for part, begin, end in zip(("build", "forward", "sample"), times, times[1:], strict=False):
            self.seconds[part] += end - begin
        rest = iter(token_ids)
        return [[next(rest) for _ in range(count)] for count in batch.sample_counts]
