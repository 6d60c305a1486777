"""The correctness test: whatever the engine does, everybody gets the text of a plain loop over their prompt alone."""

from collections import OrderedDict
from functools import cache

import pytest
import torch

from engine import sampling
from engine.models.qwen3 import test_model
from engine.serve.attention import ReferenceBackend, write_kv
from engine.serve.batch import build_batch
from engine.serve.blocks import BlockManager, hash_block
from engine.serve.config import EngineConfig
from engine.serve.engine import EngineCore
from engine.serve.flat import FlatModel
from engine.serve.request import SamplingParams
from engine.serve.scheduler import Scheduler
from tests.ch31.harness import check_blocks, cropped, tokens
from tests.grading import expect, expect_equal, grades, rng

ALL = (
    hash_block, BlockManager.find_cached_prefix, BlockManager.allocate_slots, BlockManager.cache_full_blocks,
    BlockManager.free, build_batch, write_kv, ReferenceBackend.forward, FlatModel.attention, FlatModel.forward,
    Scheduler.schedule, Scheduler.preempt, EngineCore.check_stop, EngineCore.step,
)  # fmt: skip
CORRECT, VOCAB, MOST = "31: The correctness test", 199, 20
SWAP = {"preemption_mode": "swap"}
TIGHT = {"num_blocks": 12, "block_size": 6}  # the longest request alone needs them all
CONFIGS = {
    "ample": {},
    "a budget of 5": {"max_num_batched_tokens": 5},
    "12 blocks, recompute": TIGHT,
    "12 blocks, swap": {**TIGHT, **SWAP},
    "12 blocks, swap, no prefix cache": {**TIGHT, **SWAP, "enable_prefix_caching": False},
    "12 blocks, swap space for few": {**TIGHT, **SWAP, "swap_space_bytes": 3 * 6 * 1024},
    "12 blocks, small chunks": {**TIGHT, "max_num_batched_tokens": 7},
    "no prefix cache, two sequences": {"enable_prefix_caching": False, "max_num_seqs": 2},
    "priorities": {**TIGHT, "policy": "priority"},
    "priorities, swap": {**TIGHT, **SWAP, "policy": "priority", "max_num_batched_tokens": 30},
    "long-prefill cap": {"long_prefill_token_threshold": 6, "max_num_batched_tokens": 20},
    "chunked prefill off": {**TIGHT, "enable_chunked_prefill": False, "max_num_batched_tokens": 64},
    "blocks of 1": {"block_size": 1, "num_blocks": 96},
    "blocks of 3": {"block_size": 3, "num_blocks": 30},
}


@cache
def model():
    return test_model(rng.number("equality model"))


@cache
def greedy(prompt):
    """(tokens of one prompt alone, a full forward pass for each; the smallest lead of a chosen token over the next)."""
    text, leads = list(prompt), []
    with torch.inference_mode():
        for _ in range(MOST):
            best = model()(torch.tensor([text]))[0, -1].topk(2)
            text.append(int(best.indices[0]))
            leads.append(float(best.values[0] - best.values[1]))
    return text[len(prompt) :], min(leads)


def endless(prompt):
    return greedy(tuple(prompt))[0]


def decided(random, prefix, length):
    """A prompt whose every greedy token leads by far more than rounding could take away."""
    while True:
        prompt = [*prefix, *tokens(random, length - len(prefix), VOCAB)]
        if greedy(tuple(prompt))[1] > 1e-3:
            return prompt


@cache
def workload():
    """[(prompt, params)], with an end of sequence and stop ids that really come up; and the end of sequence."""
    random = rng("workload")
    shared = tokens(random, 24, VOCAB)
    lengths = [1, 7, 8, 12, 16, 17, 30, 41, 50]
    asked = [decided(random, shared[: length // 2], length) for length in lengths]
    asked.append(list(asked[4]))  # two blocks exactly, sent twice
    texts = [endless(prompt) for prompt in asked]
    eos = (texts[2][9], texts[6][12], asked[3][2])  # the last one stands in a prompt, where it stops nothing
    params = []
    for i in range(len(asked)):
        most = 1 if i == 1 else MOST - i
        stops = {texts[i][random.randrange(1, most)]} if i % 3 == 2 else ()
        least = random.randint(0, most) if i % 2 else 0
        on = i in (0, 3, 4)  # together, these three outgrow a pool of 12 blocks
        params.append(SamplingParams(most, stop_token_ids=stops, min_tokens=least, ignore_eos=on))
    return list(zip(asked, params, strict=True)), eos


def expected():
    requests, eos = workload()
    return [cropped(endless(prompt), params, eos) for prompt, params in requests]


def new_core(shuffled=False, **settings):
    core = EngineCore(model(), EngineConfig(**{"num_blocks": 96, "block_size": 8, **settings}), workload()[1])
    if shuffled:  # physical blocks in any order must do
        blocks = list(core.blocks.free_blocks)
        rng("permutation").shuffle(blocks)
        core.blocks.free_blocks = OrderedDict.fromkeys(blocks)
    return core


def serve(core, order, late=(), each_step=None, limit=3000):
    """Output by number. order: numbers of requests, added at once; late: those added one a step."""
    requests, got, random = workload()[0], {}, rng("priorities")

    def add(i):
        core.add_request(str(i), *requests[i], priority=random.randrange(3), cache_key=())

    late = list(late)
    for i in order:
        add(i)
    for _ in range(limit):
        if late:
            add(late.pop(0))
        elif not core.has_unfinished:
            break
        for output in core.step():
            got.setdefault(int(output.request_id), []).extend(output.new_token_ids)
        check_blocks(core.blocks)
        if each_step:
            each_step()
    expect(not core.has_unfinished, f"requests are still unfinished after {limit} steps", see=CORRECT)
    expect_equal(core.blocks.num_free, core.blocks.num_blocks, "free blocks of an idle engine", see=CORRECT)
    return got


def expect_texts(got, numbers, where):
    right, requests = expected(), workload()[0]
    for i in numbers:
        what = f"{where}: request {i} (prompt of {len(requests[i][0])}), output token {{i}}"
        hint = "a full forward pass for every token of that prompt alone gives another token"
        expect_equal(got.get(i, []), right[i], what, hint, CORRECT)


EVERYBODY = range(10)


@grades(*ALL)
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_configuration_gives_the_text_of_one_request_alone(name, backend):
    core = new_core(attention_backend=backend, **CONFIGS[name])
    expect_texts(serve(core, EVERYBODY), EVERYBODY, f"{name}, {backend}")
    if "12 blocks" in name:
        expect(core.num_preemptions > 0, f"{name}: nobody was preempted", see=CORRECT)


@grades(*ALL)
@pytest.mark.parametrize(
    "name", ["ample", "a budget of 5", "12 blocks, recompute", "12 blocks, swap", "priorities, swap"]
)
def test_any_order_of_arrival_gives_the_same_text(name):
    order = rng(f"arrivals {name}").sample(EVERYBODY, len(EVERYBODY))
    for shuffled, first, late in ((True, order, ()), (False, (), order), (True, order[:3], order[3:])):
        core = new_core(shuffled, **CONFIGS[name])
        expect_texts(serve(core, first, late), EVERYBODY, f"{name}, {len(late)} of 10 arriving one a step")


@grades(*ALL)
@pytest.mark.parametrize("name", ["ample", "12 blocks, recompute", "12 blocks, swap", "priorities", "blocks of 3"])
def test_aborts_in_between_disturb_nobody(name):
    core, random = new_core(**CONFIGS[name]), rng(f"aborts {name}")
    gone = random.sample(EVERYBODY, 4)
    left = list(gone)

    def maybe_abort():
        if left and random.random() < 0.4:
            core.abort_request(str(left.pop()))
            check_blocks(core.blocks)

    got = serve(core, EVERYBODY, each_step=maybe_abort)
    expect_texts(got, [i for i in EVERYBODY if i not in gone], name)
    for i in gone:
        expect_equal(
            got.get(i, []), expected()[i][: len(got.get(i, []))], f"{name}: token {{i}} of aborted {i}", see=CORRECT
        )


@grades(*ALL)
@pytest.mark.parametrize("name", ["ample", "12 blocks, swap"])
def test_a_second_round_on_a_warm_cache_gives_the_same_text(name):
    core = new_core(**CONFIGS[name])
    for number in range(2):
        expect_texts(serve(core, EVERYBODY), EVERYBODY, f"{name}, round {number}")


@grades(*ALL)
def test_new_weights_need_a_reset_of_the_prefix_cache():
    mine, other = test_model(1), test_model(2)
    core = EngineCore(mine, EngineConfig(num_blocks=64, block_size=8))
    prompt, params = workload()[0][5][0], SamplingParams(max_tokens=8)
    core.add_request("old", prompt, params)
    core.step()
    expect(core.reset_prefix_cache() is False, "the cache was reset under a running request", see=CORRECT)
    while core.has_unfinished:
        core.step()
    mine.load_state_dict(other.state_dict())
    expect(core.reset_prefix_cache() is True, "an idle engine refused to reset its cache", see=CORRECT)
    (got,) = core.generate([prompt], params)
    (fresh,) = EngineCore(other, EngineConfig(num_blocks=64, block_size=8)).generate([prompt], params)
    expect_equal(got.output_token_ids, fresh.output_token_ids, "token {i} with the new weights", see=CORRECT)


def test_the_oracle_is_the_plain_generate_of_chapter_8():
    for i in (0, 4):
        prompt = workload()[0][i][0]
        got = sampling.generate(model(), prompt, max_tokens=5)
        expect_equal(got, endless(prompt)[:5], "sampling.generate, token {i}", see=CORRECT)
