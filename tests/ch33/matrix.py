"""Static buffers, fused kernels and one step ahead, alone and together: the tokens of the plain core, everywhere."""

import gc
from functools import cache

import pytest
import torch

from engine.serve.config import EngineConfig
from engine.serve.device_sampler import DeviceSampler
from engine.serve.engine import EngineCore
from engine.serve.graphs import GraphRunner, decode_inputs
from engine.serve.overlap import OverlappedCore
from engine.serve.request import SamplingParams
from engine.serve.rows import Rows
from engine.serve.runner import ModelRunner, make_runner
from tests.ch31.equality import CONFIGS, EVERYBODY, VOCAB, expected, model, serve, workload
from tests.ch31.harness import check_blocks, tokens
from tests.ch32.device import CUDA, TRITON
from tests.grading import expect, expect_equal, expect_raises, grades, rng

STATIC, AHEAD, BATCH = "33: Static buffers", "33: One step ahead", "33: The persistent batch"
WAYS = {
    "static": {"cuda_graphs": "static"},
    "ahead": {"async_scheduling": True},
    "static and ahead": {"cuda_graphs": "static", "async_scheduling": True},
}
ALL = (Rows.fill, decode_inputs, OverlappedCore.step, OverlappedCore.collect)
BACKENDS = ["reference", "sdpa"]
AHEAD_CORE = OverlappedCore  # whose steps run the exercises, all of them; tests/test_steady.py puts another here


def grade(way):
    """The exercises that a way of running needs."""
    return ALL[: 2 if way == "static" else 4] if "static" in way else ALL[2:]


def each_way(test):
    """The test once for each way; each grades its own exercises, so that one unwritten does not hide the others."""
    marks = [pytest.param(way, marks=pytest.mark.grades(*(f.__exercise__ for f in grade(way)))) for way in WAYS]
    return pytest.mark.parametrize("way", marks)(test)


def new_core(sampler=None, eos=True, **settings):
    config = EngineConfig(**{"num_blocks": 96, "block_size": 8, **settings})
    kind = AHEAD_CORE if config.async_scheduling else EngineCore
    return kind(model(), config, workload()[1] if eos else None, sampler or DeviceSampler())


def compare(got, right, where, way):
    see = AHEAD if "ahead" in way else STATIC
    for i, text in right.items():
        hint = "the plain core, one step after the other, gives another token"
        expect_equal(got.get(i, []), text, f"{where}, {way}: request {i}, output token {{i}}", hint, see)


@each_way
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_in_every_configuration(name, way):
    backend = rng(f"backend {name} {way}").choice(BACKENDS)
    core = new_core(attention_backend=backend, **CONFIGS[name], **WAYS[way])
    compare(serve(core, EVERYBODY), dict(enumerate(expected())), name, way)
    if "12 blocks" in name:
        expect(core.num_preemptions > 0, f"{name}: nobody was preempted", see=AHEAD)


@cache
def warm():
    """[(prompt, params)] that are sampled: temperatures on the device, top_k and top_p on the host, and greedy ones."""
    random = rng("warm")
    kinds = [{}, {"temperature": 0.7}, {"temperature": 1.3}, {"temperature": 0.9, "top_k": 20},
             {"temperature": 0.8, "top_p": 0.9}]  # fmt: skip
    shared = tokens(random, 20, VOCAB)
    asked = []
    for i in range(10):
        prompt = [*shared[: random.randrange(20)], *tokens(random, random.randint(1, 14), VOCAB)]
        stops = tuple(range(0, VOCAB, 17)) if i % 3 == 0 else ()
        seed, most = random.getrandbits(63), random.randint(2, 18)
        asked.append((prompt, SamplingParams(most, seed=seed, stop_token_ids=stops, **kinds[i % 5])))
    return asked


def serve_warm(core, random=None):
    """Tokens by number; with `random` requests arrive at any time and some are aborted."""
    got, left, gone = {}, list(enumerate(warm())), set()
    if random:
        random.shuffle(left)
    for _ in range(2000):
        while left and (random is None or random.random() < 0.4):
            i, asked = left.pop(0)
            core.add_request(str(i), *asked)
        if random and core.has_unfinished and random.random() < 0.05:
            name = random.choice(list(core.scheduler.requests))
            core.abort_request(name)
            gone.add(int(name))
        for output in core.step():
            got.setdefault(int(output.request_id), []).extend(output.new_token_ids)
        check_blocks(core.blocks)
        if not left and not core.has_unfinished:
            break
    expect_equal(core.blocks.num_free, core.blocks.num_blocks, "free blocks of an idle engine", see=AHEAD)
    return {i: text for i, text in got.items() if i not in gone}


@cache
def plain_warm():
    return serve_warm(new_core(cuda_graphs="off", num_blocks=200))


@each_way
@pytest.mark.parametrize("name", CONFIGS)
def test_sampled_tokens_in_every_configuration(name, way):
    compare(serve_warm(new_core(**CONFIGS[name], **WAYS[way])), plain_warm(), name, way)


@each_way
@pytest.mark.parametrize("name", ["ample", "12 blocks, recompute", "12 blocks, swap", "priorities", "blocks of 1"])
def test_arrivals_and_aborts_in_between(name, way):
    random = rng(f"arrivals {name} {way}")
    got = serve_warm(new_core(**CONFIGS[name], **WAYS[way]), random)
    compare(got, {i: plain_warm()[i] for i in got}, name, way)


@each_way
def test_fused_models(way):
    if not (TRITON and CUDA):
        pytest.skip("fused kernels run on a CUDA device with Triton")
    plain, other = (new_core(fuse=True, **settings) for settings in ({"cuda_graphs": "off"}, WAYS[way]))
    compare(serve_warm(other), serve_warm(plain), "fused", way)


@each_way
def test_rows_that_only_the_host_can_sample(way):
    """A sampler of the caller's own gives every token: the device must not."""

    def reversed_sampler(logits, rows):
        return [int(row.argmin()) for row in logits]

    right = serve_warm(new_core(reversed_sampler, cuda_graphs="off"))
    compare(serve_warm(new_core(reversed_sampler, **WAYS[way])), right, "own sampler", way)


@each_way
def test_a_sampler_that_raises_now_and_then(way):
    """On the host, when the device has computed the step already: what was in the air must survive that."""

    class Shaky(DeviceSampler):
        calls, shaky = 0, False

        def __call__(self, logits, rows):
            self.calls += 1
            if self.shaky and self.calls % 3:
                raise MemoryError("now and then")
            return super().__call__(logits, rows)

    sampler = Shaky()
    core, got = new_core(sampler, **WAYS[way]), {}
    for i, asked in enumerate(warm()):
        core.add_request(str(i), *asked)
    sampler.shaky, failed = True, 0
    for _ in range(500):
        if not core.has_unfinished:
            break
        try:
            for output in core.step():
                got.setdefault(int(output.request_id), []).extend(output.new_token_ids)
        except MemoryError:
            failed += 1
        check_blocks(core.blocks)
    expect(failed > 5, f"only {failed} steps failed", see=AHEAD)
    compare(got, plain_warm(), "a sampler that raises", way)


@each_way
def test_log_probabilities(way):
    params = SamplingParams(7, temperature=0.8, seed=3, logprobs=2, prompt_logprobs=1)
    prompts = [prompt for prompt, _ in warm()[:4]]
    (right, got) = (new_core(eos=False, **s).generate(prompts, params) for s in ({"cuda_graphs": "off"}, WAYS[way]))
    for i, (a, b) in enumerate(zip(right, got, strict=True)):
        expect_equal(b.output_token_ids, a.output_token_ids, f"{way}: prompt {i}, token {{i}}", see=AHEAD)
        for name in ("logprobs", "prompt_logprobs"):
            mine, theirs = getattr(b, name), getattr(a, name)
            expect_equal(len(mine), len(theirs), f"{way}: number of {name} of prompt {i}", see=AHEAD)
            for j, (x, y) in enumerate(zip(mine, theirs, strict=True)):
                close = x is y or (x.keys() == y.keys() and all(abs(x[k] - y[k]) < 1e-3 for k in x))
                expect(close, f"{way}: {name} of prompt {i} differ at token {j}", see=AHEAD)


@each_way
def test_samples_of_one_prompt_are_those_of_the_plain_core(way):
    params = SamplingParams(6, temperature=1.1, seed=5, n=4)
    right, got = (new_core(**s).generate([[3, 1, 4]], params) for s in ({"cuda_graphs": "off"}, WAYS[way]))
    got, right = ([o.output_token_ids for o in outputs] for outputs in (got, right))
    expect_equal(got, right, f"{way}: (sample, token) {{i}}", see=AHEAD)


@each_way
def test_a_large_batch_and_then_a_small_padded_one(way):
    """Nothing stale survives: 13 requests of temperature, then 3 greedy ones in a batch padded to 4."""
    core, random = new_core(eos=False, **WAYS[way]), rng("padded")
    for length in (13, 3, 9, 1, 5):
        prompts = [tokens(random, 4 + i, VOCAB) for i in range(length)]
        params = [SamplingParams(9, temperature=0.9 * (length > 8), seed=i) for i in range(length)]
        plain = new_core(eos=False, cuda_graphs="off").generate(prompts, params)
        got = core.generate(prompts, params)
        for i in range(length):
            what = f"{way}: request {i} of {length}, token {{i}}"
            expect_equal(got[i].output_token_ids, plain[i].output_token_ids, what, "nothing stale survives", BATCH)


@grades(*ALL)
def test_a_thousand_steps_without_growth():
    """Objects, block manager and rows after 1,000 steps are what they were after 300."""
    way, random = WAYS["static and ahead"], rng("thousand")
    core = new_core(eos=False, max_num_seqs=2, num_blocks=20, enable_prefix_caching=False, **way)
    count = steps = 0
    sizes = []
    while steps < 1000 or core.has_unfinished:
        while steps < 1000 and len(core.scheduler.requests) < 2:
            count += 1
            prompt, most = tokens(random, random.randint(1, 12), VOCAB), random.randint(2, 9)
            core.add_request(str(count), prompt, SamplingParams(most))
        core.step()
        steps += 1
        if steps in (300, 1000):
            gc.collect()
            sizes.append(len(gc.get_objects()))
    left = len(core.blocks.block_tables), len(core.scheduler.requests), len(core.flights)
    expect_equal(left, (0, 0, 0), "(block tables, requests, flights)[{i}] of an idle engine", see=BATCH)
    rows = core.runner.rows
    expect(len(rows.row_of) <= rows.num_rows, "more requests have a row than there are rows", see=BATCH)
    growth = sizes[1] - sizes[0]
    text = f"{growth} more objects after 1,000 steps than after 300, {count} requests in all"
    expect(growth < 200, text, "who keeps a request?", BATCH)


# -- configurations


def test_the_runner_that_a_configuration_asks_for():
    def made(**settings):
        config = EngineConfig(num_blocks=8, max_num_seqs=4, **settings)
        return make_runner(model(), config, 8, 0, None, 64)

    if CUDA:
        pytest.skip("the model stands on the CPU in this test, whatever device there is")
    for settings in ({}, {"cuda_graphs": "off"}, {"fuse": False}):
        expect(type(made(**settings)) is ModelRunner, f"{settings}: not the plain runner", see=STATIC)
    for settings, mode in (({"cuda_graphs": "static"}, "static"), ({"async_scheduling": True}, "off")):
        runner = made(**settings)
        right = type(runner) is GraphRunner and runner.mode == mode
        expect(right, f"{settings}: not a GraphRunner of mode {mode}", see=STATIC)
    sampler = made(async_scheduling=True).sampler
    expect(isinstance(sampler, DeviceSampler), "one step ahead, tokens are sampled on the device", see=AHEAD)
    expect_raises(ValueError, made, cuda_graphs="on", match="'static' runs the same code", see=STATIC)


@pytest.mark.parametrize(
    "settings", [{"cuda_graphs": "yes"}, {"cuda_graphs": True}, {"async_scheduling": 1}, {"fuse": "on"}], ids=str
)
def test_settings_that_are_none(settings):
    (name,) = settings
    expect_raises(ValueError, EngineConfig, **settings, match=name, see=STATIC)


# -- on a GPU


@pytest.mark.skipif(not (CUDA and TRITON), reason="CUDA graphs need a CUDA device and Triton")
@grades(Rows.fill, decode_inputs)
def test_a_replay_is_the_step_run_eagerly_bit_by_bit():
    """For every captured size: the same packed numbers, replayed and launched operation by operation."""
    from engine.serve.rows import Field

    core = cuda_core(cuda_graphs="on", max_num_seqs=40)
    runner, random = core.runner, rng("replay")
    for size, (graph, ids, hidden) in runner._graphs.items():
        packed = torch.zeros_like(runner.packed, device="cpu")
        packed[Field.CELL], packed[Field.SOURCE] = runner.rows.unused, -1
        for i in range(size):
            packed[Field.ROW, i], packed[Field.TOKEN, i] = i, random.randrange(VOCAB)
            packed[Field.POSITION, i] = random.randrange(-1, 30)
        runner.rows.tables[:-1] = torch.arange(len(runner.rows.tables) - 1, device="cuda") % 90
        for cache_ in runner.kv_caches:
            for pool in cache_:
                pool.normal_(generator=torch.Generator("cuda").manual_seed(size))
        pools = [pool.clone() for c in runner.kv_caches for pool in c]
        runner.packed.copy_(packed)
        graph.replay()
        replayed = [x.clone() for x in (ids, hidden, *(pool for c in runner.kv_caches for pool in c))]
        for pool, kept in zip((pool for c in runner.kv_caches for pool in c), pools, strict=True):
            pool.copy_(kept)
        with torch.inference_mode():
            eager = (*runner.decode_step(size), *(pool for c in runner.kv_caches for pool in c))
        for i, (a, b) in enumerate(zip(replayed, eager, strict=True)):
            real = packed[Field.POSITION, :size].cuda() >= 0
            a, b = (x[:size][real] if i < 2 else x[:-1] for x in (a, b))
            text = f"size {size}: part {i} of a replay differs from the eager step"
            expect(torch.equal(a, b), text, see=STATIC)


def cuda_core(steady=False, **settings):
    from copy import deepcopy

    config = EngineConfig(**{"num_blocks": 96, "block_size": 16, "attention_backend": "triton", **settings})
    kind = AHEAD_CORE if config.async_scheduling and not steady else EngineCore
    return kind(deepcopy(model()).cuda(), config, None, DeviceSampler())


@pytest.mark.skipif(not (CUDA and TRITON), reason="CUDA graphs need a CUDA device and Triton")
@grades(*ALL)
def test_graphs_give_the_tokens_of_static_buffers():
    cores = [
        cuda_core(cuda_graphs="static"), cuda_core(cuda_graphs="on"),
        cuda_core(cuda_graphs="on", async_scheduling=True),
        cuda_core(cuda_graphs="on", async_scheduling=True, num_blocks=12),
        cuda_core(cuda_graphs="on", async_scheduling=True, steady=True),
    ]  # fmt: skip
    right, *others = [serve_warm(core) for core in cores]
    names = "graphs", "graphs and ahead", "graphs and ahead, 12 blocks", "graphs, ahead and steady"
    for name, got in zip(names, others, strict=True):
        compare(got, right, "on a GPU", name)
