"""What the host does around a forward pass, measured without one: planning, layout, bookkeeping, queue, look-ups.

Every figure is a median, one JSON line each. "ratio" is to the smallest size of the same kind: per request for steps,
per block for look-ups, per operation for the queue. What is flat stays near 1.
"""

import random
import statistics
import time
from types import SimpleNamespace

import torch

from engine.serve.batch import build_batch
from engine.serve.config import EngineConfig
from engine.serve.engine import EngineCore
from engine.serve.request import SamplingParams

BLOCK, VOCAB, CONTEXT = 16, 50_000, 512
DECODES = [32, 1, 256, 1024]  # the first is what the others are compared with
QUEUES, PROMPTS = [100, 10_000, 100_000], [1 << 10, 1 << 14, 1 << 17]
AT_ONCE = 50  # operations timed together where one is shorter than the clock is fine


class NoModel:
    """As much of a model as an EngineCore looks at."""

    cfg = SimpleNamespace(
        vocab_size=VOCAB, max_position_embeddings=1 << 20, num_hidden_layers=1, num_key_value_heads=1, head_dim=1
    )

    def parameters(self):
        yield torch.zeros(1)


class NoForward:
    """A runner that builds the batch and samples at once; `seconds` holds the build time of the last step."""

    def __init__(self, block_size: int):
        self.block_size, self.build = block_size, 0.0

    def swap(self, out) -> None:
        pass

    def execute(self, out, block_tables) -> list[list[int]]:
        begin = time.perf_counter()
        batch = build_batch(out.scheduled, block_tables, self.block_size)
        self.build = time.perf_counter() - begin
        return [[7] * count for count in batch.sample_counts]


def make_core(num_blocks: int, **settings) -> EngineCore:
    core = EngineCore(NoModel(), EngineConfig(block_size=BLOCK, num_blocks=num_blocks, **settings))
    core.runner = NoForward(BLOCK)
    return core


def step_times(num_decodes: int, repeat: int) -> dict[str, float]:
    """Median microseconds of a step in which that many requests decode, around 512 tokens each: in all and in parts."""
    most = CONTEXT + BLOCK + repeat + 8
    core = make_core(
        num_decodes * -(-most // BLOCK), max_num_seqs=num_decodes, max_num_batched_tokens=max(1 << 15, num_decodes)
    )
    rng = random.Random(0)
    for i in range(num_decodes):  # lengths that differ, so that in each step one in 16 comes to the end of a block
        prompt = rng.choices(range(VOCAB), k=CONTEXT + i % BLOCK)
        core.add_request(str(i), prompt, SamplingParams(max_tokens=repeat + 8, ignore_eos=True))
    while core.scheduler.waiting or any(r.num_computed_tokens < r.num_prompt_tokens for r in core.scheduler.running):
        core.step()
    schedule, planning = core.scheduler.schedule, []

    def timed():
        begin = time.perf_counter()
        out = schedule()
        planning.append(time.perf_counter() - begin)
        return out

    core.scheduler.schedule = timed
    whole, build = [], []
    for _ in range(repeat):
        begin = time.perf_counter()
        core.step()
        whole.append(time.perf_counter() - begin)
        build.append(core.runner.build)
    parts = {"schedule": planning, "build": build}
    parts["update"] = [w - s - b for w, s, b in zip(whole, planning, build, strict=True)]
    return {name: 1e6 * statistics.median(times) for name, times in {"step": whole, **parts}.items()}
