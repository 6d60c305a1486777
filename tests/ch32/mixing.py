"""The kernels together: TritonBackend on mixed steps, and the whole core with each backend."""

import copy

import pytest
import torch

from engine.serve.attention import ReferenceBackend, get_backend
from engine.serve.config import EngineConfig
from engine.serve.engine import EngineCore
from engine.serve.kernels.decode import decode, decode_kernel, merge_kernel
from engine.serve.kernels.prefill import prefill, prefill_kernel
from engine.serve.kernels.write import write_kernel
from engine.serve.paged import TritonBackend
from engine.serve.request import SamplingParams
from engine.serve.sdpa import SdpaBackend
from tests.ch31.equality import VOCAB, decided, endless, model
from tests.ch32.device import CUDA, DEVICE, DTYPES
from tests.ch32.paged import SENTINEL, PagedStep
from tests.grading import expect, expect_close, expect_equal, grades, rng

KERNELS = (decode_kernel, merge_kernel, prefill_kernel)
WALKING, PREFILL = "32: Walking the block table", "32: Prefill tiles"
MIXED = [(1, 1), (20, 20), (0, 1), (130, 1), (75, 9), (3, 2), (17, 1), (0, 1)]


def compare(got, step, scale=None, window=0):
    atol, rtol, _ = step.bounds(scale)
    for r, (s, t) in enumerate(step.shapes):
        rows = slice(step.starts[r], step.starts[r + 1])
        what = f"rows of request {r} ({t} rows, context {s}), [row, head, d] {{i}}"
        expect_close(got[rows], step.attend(r, scale, window)[0], atol, rtol, what, see=WALKING if t == 1 else PREFILL)


@grades(*KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [0, 40])
def test_mixed_steps_through_the_backend(dtype, window):
    """Decodes, prompts, chunks and padding in one step; every row of a poisoned output is stored."""
    step = PagedStep(f"mixed {window}", MIXED, 16, 6, 2, 24, dtype, wild=True)
    backend, out = TritonBackend(), torch.full_like(step.q, torch.nan)
    backend.attend(step.q, step.cache, step.meta, out, step.scale(), window)
    compare(out, step, window=window)
    options = {"window": window} if window else {}
    got = backend.forward(step.q.transpose(0, 1).contiguous().transpose(0, 1), step.cache, step.meta, **options)
    expect_close(got, out, 0.0, what="TritonBackend.forward, rows of q apart from each other, {i}", see=WALKING)


@grades(*KERNELS)
def test_the_backend_agrees_with_the_reference():
    step = PagedStep("reference", MIXED, 16)
    reference = ReferenceBackend().forward(step.q, step.cache, step.meta, scale=0.3)
    got = TritonBackend().forward(step.q, step.cache, step.meta, scale=0.3)
    expect_close(got, reference, 2 * step.bounds(0.3)[0], what="TritonBackend and ReferenceBackend, {i}", see=WALKING)


@grades(*KERNELS)
def test_each_launch_has_its_own_rows():
    step = PagedStep("launches", MIXED, 16, wild=True)
    first, second = (torch.full_like(step.q, SENTINEL) for _ in "ab")
    decode(step.q, step.cache, step.meta, first, step.scale(), 0, 3)
    prefill(step.q, step.cache, step.meta, second, step.scale(), 0)
    for r, (_, t) in enumerate(step.shapes):
        rows = slice(step.starts[r], step.starts[r + 1])
        untouched, name = (second, "prefill") if t == 1 else (first, "decode")
        expect((untouched[rows] == SENTINEL).all(), f"{name} stores rows of request {r}, which has {t}", see=WALKING)
        first[rows] = (first if t == 1 else second)[rows]
    compare(first, step)


CORRECT = "31: The correctness test"
LENGTHS, NEW = [1, 8, 21], 4


def texts(backend):
    random = rng("backends")
    prompts = [decided(random, (), length) for length in LENGTHS]
    config = EngineConfig(num_blocks=40, block_size=8, max_num_batched_tokens=13, attention_backend=backend)
    core = EngineCore(copy.deepcopy(model()).to(DEVICE), config)
    got = core.generate(prompts, SamplingParams(max_tokens=NEW, ignore_eos=True))
    for i, (prompt, output) in enumerate(zip(prompts, got, strict=True)):
        hint = "a full forward pass for every token of that prompt alone gives another token"
        what = f"backend {backend}: request {i} (prompt of {len(prompt)} of {VOCAB} tokens), output token {{i}}"
        expect_equal(output.output_token_ids, endless(prompt)[:NEW], what, hint, CORRECT)


@grades(write_kernel, *KERNELS)
def test_the_core_gives_the_same_text_through_the_kernels():
    texts("triton")


@grades(SdpaBackend.forward)
def test_the_core_gives_the_same_text_through_padded_gathers():
    texts("sdpa")


# Given: which backend runs where.


def test_the_core_gives_the_same_text_through_the_reference():
    texts("reference")


def test_triton_needs_a_gpu_or_its_interpreter(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    expect_equal(type(get_backend("auto")).__name__, "SdpaBackend", what='get_backend("auto") without a GPU')
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    expect_equal(type(get_backend("triton")).__name__, "TritonBackend", what='get_backend("triton"), interpreted')
    expect_equal(type(get_backend("auto")).__name__, "SdpaBackend", what='get_backend("auto") without a GPU')
    monkeypatch.delenv("TRITON_INTERPRET")
    refused(("CUDA", "TRITON_INTERPRET"))


def test_triton_needs_its_package(monkeypatch):
    monkeypatch.setattr("engine.serve.attention.find_spec", lambda name: None)
    refused(("package triton",))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    refused(("package triton",))
    expect_equal(type(get_backend("auto")).__name__, "SdpaBackend", what='get_backend("auto") without triton')


def refused(words):
    with pytest.raises(ValueError, match="'sdpa'") as error:
        get_backend("triton")
    for word in ("'triton'", *words):
        expect(word in str(error.value), f"get_backend('triton'): its error does not mention {word}: {error.value}")


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_auto_takes_the_kernels_on_a_gpu():
    expect_equal(type(get_backend("auto")).__name__, "TritonBackend", what='get_backend("auto")')
