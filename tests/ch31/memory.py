"""A hundred decode steps are as dear as the first: nothing is kept, nothing is allocated anew. EngineCore.step."""

import gc
import sys
import tracemalloc

import torch

from engine.serve.config import EngineConfig
from engine.serve.engine import EngineCore
from engine.serve.request import SamplingParams
from tests.ch31.equality import VOCAB, model
from tests.ch31.fake_pool import LOOP
from tests.ch31.harness import tokens
from tests.grading import expect, grades, rng


def alive():
    """(tensors, objects that can hold others, blocks of Python's allocator) that exist now."""
    gc.collect()
    things = gc.get_objects()
    return sum(issubclass(type(thing), torch.Tensor) for thing in things), len(things), sys.getallocatedblocks()


def peak_of_a_step(core):
    """Bytes that one step has allocated at once."""
    tracemalloc.start()
    try:
        core.step()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@grades(EngineCore.step)
def test_a_hundred_decode_steps_keep_nothing():
    core = EngineCore(model(), EngineConfig(num_blocks=200, block_size=8))
    for i in range(3):
        core.add_request(i, tokens(rng(f"memory {i}"), 5, VOCAB), SamplingParams(max_tokens=140, ignore_eos=True))
    for _ in range(20):
        core.step()
    first, (tensors, things, blocks) = peak_of_a_step(core), alive()
    for _ in range(100):
        core.step()
    (more_tensors, more_things, more_blocks), last = alive(), peak_of_a_step(core)
    about = {"hint": "what belongs to a step must not outlive it", "see": LOOP}
    kept = more_tensors - tensors
    expect(kept <= 0, f"{kept} tensors more are alive after 100 more decode steps", **about)
    kept = more_things - things
    expect(kept < 100, f"100 decode steps of 3 requests left {kept} lists, outputs or the like behind", **about)
    kept = more_blocks - blocks
    expect(kept < 600, f"100 decode steps of 3 requests left {kept} objects behind, 2 a token are allowed", **about)
    expect(last < 2 * first + 20_000, f"a decode step allocates {last:,} bytes, 100 steps ago {first:,}", **about)
