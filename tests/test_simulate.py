"""`run.py simulate`: times by hand, nothing lost, sharing by brute force, the core as oracle, bad input."""

import json
import random
import statistics
from dataclasses import fields, replace

import pytest
import torch

import run
from engine.milestones import simulate as command
from engine.milestones.options import SIMULATE
from engine.models.qwen3 import Qwen3, test_model
from engine.serve import sizing
from engine.serve.config import EngineConfig
from engine.serve.request import Request, SamplingParams
from engine.serve.scheduler import SchedulerOutput
from engine.simulate.arrivals import Arrival, shared
from engine.simulate.cost import CostModel, StepWork
from engine.simulate.csv_trace import read_trace
from engine.simulate.generators import GENERATORS, Shape
from engine.simulate.hardware import find_gpu, find_model
from engine.simulate.plots import check_plot
from engine.simulate.report import report
from engine.simulate.simulator import Simulator
from tests.ch31.fake_pool import fake_core

H200 = find_gpu("h200")
QWEN3_8B = CostModel(H200, find_model("qwen3-8b"), block_size=16)
ROOMY = {"num_blocks": 4000}


def play(arrivals, cost=QWEN3_8B, **config) -> Simulator:
    return Simulator(arrivals, EngineConfig(**config), cost).run()


def alone(at: float, prompt: int, answer: int, token: int) -> Arrival:
    return Arrival(at, ((token, prompt),), answer, token)


# -- the cost of a step


def test_a_decode_of_qwen3_8b_by_hand():
    """36 layers of 192,937,984 weights, an LM head of 4,096 x 151,936; K/V of 147,456 bytes a token."""
    parts = QWEN3_8B.parts(StepWork(tokens=1, sampled=1, decode_context=1000))
    assert parts["linear"] == pytest.approx((36 * 192_937_984 * 2 + 147_456) / 4.2e12)
    assert parts["lm head"] == pytest.approx((4096 * 151_936 * 2 + 2 * 4 * 151_936) / 4.2e12)
    assert parts["decode attention"] == pytest.approx(147_456_000 / 3.25e12)
    assert parts["overhead"] == pytest.approx(36 * 65e-6) and parts["swap"] == parts["chunk attention"] == 0
    assert QWEN3_8B.seconds(StepWork(1, 1, 1000)) == sum(parts.values()) > 16.4e9 / 4.2e12


def test_a_prefill_of_qwen3_8b_by_hand():
    """2,048 rows: arithmetic is what takes the time; one row of logits still reads the whole LM head."""
    parts = QWEN3_8B.parts(StepWork(tokens=2048, sampled=1, chunk_context=2048, chunk_pairs=2048 * 2049 // 2))
    assert parts["linear"] == pytest.approx(2 * 36 * 192_937_984 * 2048 / 777e12)
    assert parts["chunk attention"] == pytest.approx(2 * 2 * 32 * 128 * 36 * (2048 * 2049 / 2) / 777e12)
    assert parts["lm head"] == pytest.approx((4096 * 151_936 * 2 + 2 * 4 * 151_936) / 4.2e12)


def test_a_swap_by_hand():
    work = StepWork(swapped_blocks=100)
    assert QWEN3_8B.seconds(work) == pytest.approx(100 * 16 * 147_456 / 50e9 + 36 * 65e-6)


@pytest.mark.parametrize(
    ("model", "requests", "ms"),
    [("qwen3-0.6b", 1, 2.1), ("qwen3-0.6b", 64, 4.5), ("qwen3-0.6b", 256, 10.4)]
    + [("qwen3-8b", 1, 6.0), ("qwen3-8b", 64, 9.6), ("qwen3-8b", 256, 19.6)],
)
def test_close_to_measured_decode_steps(model, requests, ms):
    """Whole steps at contexts of 1,024 tokens, measured on an H200 with Triton kernels in a CUDA graph."""
    cost = CostModel(H200, find_model(model), 16)
    assert cost.seconds(StepWork(requests, requests, 1024 * requests)) == pytest.approx(ms / 1e3, rel=0.12)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_and_blocks_are_those_of_the_model(tied):
    model = Qwen3(replace(test_model().cfg, tie_word_embeddings=tied))
    cost = CostModel(H200, model.cfg, block_size=8)
    assert cost.weight_bytes == 2 * sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert cost.block_bytes == sizing.block_bytes(model.cfg, 8, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-0.6b", 0.596), ("qwen3-1.7b", 1.72), ("qwen3-4b", 4.02), ("qwen3-8b", 8.19), ("qwen3-14b", 14.8)]
    + [("qwen3-32b", 32.8), ("smollm2-135m", 0.1345)],
)
def test_the_models_have_their_published_sizes(name, billions):
    assert CostModel(H200, find_model(name), 16).weight_bytes / 2e9 == pytest.approx(billions, rel=0.005)


def test_a_model_from_its_config(tmp_path):
    config = {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072}
    config |= {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    work = StepWork(3, 2, 70, 100, 200)
    same = [CostModel(H200, find_model(name), 16).seconds(work) for name in (str(tmp_path), "qwen3-0.6b")]
    assert same[0] == same[1]


def test_step_work_counts_as_by_brute_force():
    """Each (query, key) pair one by one, over random chunks, decodes and chunks that end in mid-prompt."""
    rng, out = random.Random(0), SchedulerOutput()
    decode = chunk = pairs = sampled = 0
    for i in range(40):
        request = Request(str(i), [0] * rng.randint(1, 60), arrival_time=0.0)
        request.num_computed_tokens = start = rng.randrange(request.num_tokens)
        n = rng.randint(1, request.num_tokens - start)
        out.scheduled.append((request, n))
        seen = [len(range(position + 1)) for position in range(start, start + n)]
        decode += seen[0] if n == 1 else 0
        chunk += seen[-1] if n > 1 else 0
        pairs += sum(seen) if n > 1 else 0
        sampled += start + n == request.num_tokens
    out.swap_in.append((request, [1, 2], [3, 4]))
    assert StepWork.of(out) == StepWork(out.num_tokens, sampled, decode, chunk, pairs, 2)


def test_more_work_never_takes_less_time():
    rng, base = random.Random(1), StepWork(64, 32, 9000, 4000, 8000, 4)
    faster_memory = CostModel(replace(H200, bandwidth=2 * H200.bandwidth), QWEN3_8B.cfg, 16)
    assert faster_memory.seconds(base) < QWEN3_8B.seconds(base)
    for field in fields(StepWork):
        for _ in range(20):
            less, more = sorted(rng.sample(range(1, 100_000), 2))
            times = [QWEN3_8B.seconds(replace(base, **{field.name: value})) for value in (less, more)]
            assert times[0] <= times[1], (field.name, less, more)
        assert QWEN3_8B.seconds(replace(base, **{field.name: 10**8})) > QWEN3_8B.seconds(base), field.name


def test_pool_from_memory_by_hand():
    """80 GB at 90 %, less 16.38 GB of weights and 2 GB, in blocks of 2,359,296 bytes; chapter 31 has the same sum."""
    h100 = CostModel(find_gpu("h100"), find_model("qwen3-8b"), 16)
    assert h100.num_blocks(EngineConfig(max_num_seqs=1000)) == int((72e9 - 16_380_854_272 - 2e9) / 2_359_296) == 22_726
    assert h100.num_blocks(EngineConfig(max_num_seqs=2, max_model_len=100)) == 2 * 7  # no more than two could fill
    assert h100.num_blocks(EngineConfig(kv_cache_bytes=10 * 2_359_296 + 5)) == 10
    with pytest.raises(ValueError, match=r"no room for a pool: -45.9 GB .* 65.5 GB of weights"):
        CostModel(find_gpu("l4"), find_model("qwen3-32b"), 16).num_blocks(EngineConfig())


# -- the loop


def test_one_request_by_hand():
    """Its prompt in one step, then a decode for each further token, each with one more token of context."""
    sim = play([alone(3.0, 100, 5, 0)], **ROOMY)
    prefill = QWEN3_8B.seconds(StepWork(100, 1, 0, 100, 5050))
    decodes = [QWEN3_8B.seconds(StepWork(1, 1, context)) for context in (101, 102, 103, 104)]
    (done,) = sim.finished
    assert done.first_token_at == pytest.approx(3 + prefill)
    assert done.finished_at == pytest.approx(3 + prefill + sum(decodes))
    found = report(sim)
    assert found["ttft_s"]["p50"] == pytest.approx(prefill, abs=1e-6)
    assert found["tpot_s"]["p99"] == pytest.approx(sum(decodes) / 4, abs=1e-6)
    assert found["output_tok_s"] == pytest.approx(5 / (prefill + sum(decodes)), rel=1e-5)
    assert found["computed_tokens"] == 104 and found["steps"] == 5 and found["busy"] == pytest.approx(1)


def test_an_idle_engine_waits_for_the_next_arrival():
    sim = play([alone(0.0, 64, 3, 0), alone(500.0, 64, 3, 1)], **ROOMY)
    first, second = sim.finished
    assert second.arrived_at == 500.0
    assert second.finished_at - 500.0 == pytest.approx(first.finished_at, abs=1e-9) and first.finished_at < 1
    found = report(sim)
    assert found["busy"] == pytest.approx(2 * first.finished_at / (500 + first.finished_at), abs=1e-6)
    assert found["running"] == {"mean": found["busy"], "max": 1.0}  # one at a time whenever busy


def test_who_arrives_during_a_step_waits_for_its_end():
    prefill = QWEN3_8B.seconds(StepWork(1000, 1, 0, 1000, 500_500))
    sim = play([alone(0.0, 1000, 2, 0), alone(prefill / 2, 50, 1, 1)], **ROOMY)
    both = QWEN3_8B.seconds(StepWork(51, 2, 1001, 50, 1275))
    assert {r.arrival.token: r.finished_at for r in sim.finished} == {0: pytest.approx(prefill + both),
                                                                     1: pytest.approx(prefill + both)}  # fmt: skip


CONFIGS = [
    {},
    {"enable_prefix_caching": False, "max_num_seqs": 7},
    {"num_blocks": 90, "max_model_len": 1400},
    {"num_blocks": 90, "max_model_len": 1400, "preemption_mode": "swap", "swap_space_bytes": 90 * QWEN3_8B.block_bytes},
    {"num_blocks": 90, "max_model_len": 1400, "policy": "priority", "long_prefill_token_threshold": 100},
    {"enable_chunked_prefill": False, "max_num_batched_tokens": 900, "block_size": 16},
]


@pytest.mark.parametrize("trace", GENERATORS)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: ",".join(config) or "default")
def test_every_token_is_delivered_and_every_block_comes_back(trace, config):
    shape = Shape(80, 40.0, 3, 120, 40, 96, groups=3, burst=9, turns=3, think=0.2, priorities=3)
    arrivals = GENERATORS[trace](shape)
    sim = play(arrivals, **(ROOMY | config))
    answered = {r.arrival.token for r in sim.finished}
    assert answered | {a.token for a, _ in sim.refused} == set(range(80))
    assert len(sim.finished) + len(sim.refused) == 80 and len(sim.finished) > 40
    assert sum(sim.timeline.sampled) == sum(r.arrival.num_decode_tokens for r in sim.finished)
    for r in sim.finished:
        assert r.arrived_at < r.first_token_at <= r.finished_at
        floor = 36 * 65e-6 * (r.arrival.num_decode_tokens - 1)  # every token has a step of its own
        assert r.finished_at - r.first_token_at > floor or floor == 0
    sim.blocks.check()
    assert sim.blocks.num_free == sim.blocks.num_blocks and not sim.scheduler.has_unfinished
    num_host = min(config.get("swap_space_bytes", 0) // QWEN3_8B.block_bytes, 64 * 90)
    assert sorted(sim.scheduler.free_host_blocks) == list(range(num_host))
    ends = [b + s for b, s in zip(sim.timeline.begin, sim.timeline.seconds, strict=True)]
    assert all(end <= begin for end, begin in zip(ends, sim.timeline.begin[1:], strict=False))
    if "num_blocks" in config:
        assert sim.num_preemptions > 0 and max(sim.timeline.used_blocks) <= 90
        assert (sim.num_swapped_blocks > 0) == ("swap_space_bytes" in config)
    else:  # each token but an answer's last is computed once, or was found
        adopted = sim.blocks.stats.tokens_adopted
        known = sum(r.arrival.num_prefill_tokens + r.arrival.num_decode_tokens - 1 for r in sim.finished)
        assert sim.num_preemptions == 0 and sim.num_computed_tokens == known - adopted
        assert (adopted > 0) == config.get("enable_prefix_caching", True)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_plans_what_the_core_plans(mode, seed):
    """The same prompts through EngineCore.step on a fake model: in each step the same requests, rows, preemptions."""
    settings = {"num_blocks": 30, "block_size": 4, "max_num_batched_tokens": 20, "max_num_seqs": 6}
    config = EngineConfig(**settings, preemption_mode=mode)
    rng = random.Random(seed)
    arrivals = [
        Arrival(0.0, ((shared(0), 9), (i, rng.randint(1, 30))), rng.randint(1, 20), i) for i in range(25)
    ]
    core = fake_core(**settings, preemption_mode=mode)
    num_host = len(core.scheduler.free_host_blocks)
    cost = QWEN3_8B if mode == "recompute" else CostModel(H200, find_model("qwen3-8b"), 4)
    if mode == "swap":
        config = replace(config, swap_space_bytes=num_host * cost.block_bytes)
    sim = Simulator(arrivals, config, cost)
    for arrival in arrivals:
        # Tokens of this vocabulary: 50 for what is shared, else the request's own.
        prompt = [50 if token < 0 else token for token in arrival.prompt_token_ids()]
        core.add_request(str(arrival.token), prompt, SamplingParams(max_tokens=arrival.num_decode_tokens))
    plans = record(core.scheduler), record(sim.scheduler)
    while core.has_unfinished:
        core.step()
    sim.run()
    assert plans[0] == plans[1] and any(preempted for _, preempted, _, _ in plans[0])
    assert sim.blocks.hit_rate == core.blocks.hit_rate > 0


def record(scheduler) -> list:
    """What `schedule` of this scheduler plans from now on."""
    plans, schedule = [], scheduler.schedule

    def recording():
        out = schedule()
        swaps = [len(blocks) for _, blocks, _ in out.swap_out], [len(blocks) for _, blocks, _ in out.swap_in]
        plan = [(r.request_id, n) for r, n in out.scheduled], [r.request_id for r in out.preempted], *swaps
        plans.append(plan)
        return out

    scheduler.schedule = recording
    return plans


def test_shared_prefixes_are_found_as_by_brute_force():
    """One request at a time and room for all: what is adopted is the longest common beginning, in whole blocks."""
    arrivals = GENERATORS["tree"](Shape(60, 0.05, 1, 60, 20, 50, depth=3, branching=2))
    sim = play(arrivals, **ROOMY)
    seen = []
    for done in sim.finished:
        prompt = done.arrival.prompt_token_ids()
        longest = max((common(prompt, other) for other in seen), default=0)
        assert done.num_cached_tokens == min(longest, len(prompt) - 1) // 16 * 16
        seen.append(prompt + [done.arrival.token] * done.arrival.num_decode_tokens)
    assert report(sim)["hit_rate"] > 0.4


def common(a, b) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_a_turn_finds_all_that_was_said():
    arrivals = GENERATORS["chat"](Shape(30, 0.001, 2, 100, 50, 64, turns=4, think=1.0))
    sim = play(arrivals, **ROOMY)
    by_token = {r.arrival.token: r for r in sim.finished}
    turns = [a for a in arrivals if a.after is not None]
    assert len(turns) > 10
    for turn in turns:
        before = by_token[turn.after]
        said = before.arrival.num_prefill_tokens + before.arrival.num_decode_tokens
        # The K/V of an answer's last token was never computed.
        assert by_token[turn.token].num_cached_tokens == (said - 1) // 16 * 16
        assert by_token[turn.token].arrived_at == pytest.approx(before.finished_at + turn.at)


def test_refused_requests_are_counted_with_the_turns_behind_them():
    arrivals = [
        alone(0.0, 5000, 10, 0),
        Arrival(0.0, ((1, 50),), 2000, 1),
        Arrival(1.0, ((1, 2050), (2, 5)), 5, 2, after=1),
        Arrival(1.0, ((1, 2050), (2, 10), (3, 5)), 5, 3, after=2),
        alone(0.5, 50, 5, 4),
    ]
    sim = play(arrivals, num_blocks=100, max_model_len=3000)
    assert [r.arrival.token for r in sim.finished] == [4]
    reasons = {a.token: why for a, why in sim.refused}
    assert "5010 tokens exceed max_model_len 3000" in reasons[0] and "the whole pool holds 1600" in reasons[1]
    assert reasons[2] == reasons[3] == "the turn before it was refused"
    assert report(sim)["refused"] == 4
    nothing = report(play(arrivals[:1], num_blocks=100))
    assert nothing["finished"] == 0 and nothing["ttft_s"]["p50"] is None and nothing["output_tok_s"] is None


def test_a_full_queue_refuses():
    """Ten come at once, three find a place in the queue; when these are done, there is room for one more."""
    sim = play([alone(0.0, 50, 2, i) for i in range(10)] + [alone(9.0, 50, 2, 10)], **ROOMY, max_waiting=3)
    assert {r.arrival.token for r in sim.finished} == {0, 1, 2, 10}
    assert {why for _, why in sim.refused} == {"3 requests wait already, max_waiting allows no more"}
    assert len(play([alone(0.0, 50, 2, i) for i in range(10)], **ROOMY, max_waiting=10).finished) == 10


def test_a_scheduler_that_stands_still_is_reported(monkeypatch):
    sim = Simulator([alone(0.0, 10, 2, 0)], EngineConfig(**ROOMY), QWEN3_8B)
    monkeypatch.setattr(sim.scheduler, "schedule", SchedulerOutput)
    with pytest.raises(RuntimeError, match="plans nothing although 0 requests run and 1 wait"):
        sim.run()


def test_percentiles_by_hand():
    """Eleven requests, far apart and alike but for the number of decodes: the percentiles of their times."""
    sim = play([alone(50.0 * i, 64, 2 + i, i) for i in range(11)], **ROOMY)
    times = sorted(r.finished_at - r.arrived_at for r in sim.finished)
    found = report(sim)["e2e_s"]
    assert found["p50"] == pytest.approx(times[5], abs=1e-6) and found["p90"] == pytest.approx(times[9], abs=1e-6)
    assert found["p99"] == pytest.approx(times[9] + 0.9 * (times[10] - times[9]), abs=1e-6)


# -- traces


@pytest.mark.parametrize("trace", GENERATORS)
def test_a_seed_is_a_trace(trace):
    shape = Shape(300, groups=2, priorities=4)
    make = GENERATORS[trace]
    assert make(shape) == make(shape) != make(replace(shape, seed=1))
    arrivals = make(shape)
    assert [a.token for a in arrivals] == list(range(300)) and {a.priority for a in arrivals} == {0, 1, 2, 3}
    opening = [a.at for a in arrivals if a.after is None]
    assert opening == sorted(opening) and opening[0] > 0
    assert all(count > 0 for a in arrivals for _, count in a.prompt) and all(a.num_decode_tokens > 0 for a in arrivals)


@pytest.mark.parametrize("trace", ["poisson", "bursts", "tree"])
def test_rate_and_lengths_are_as_asked(trace):
    """Of n exponential gaps the mean strays by 1 / sqrt(n) of itself; 4 of these, and likewise for medians."""
    arrivals = GENERATORS[trace](Shape(8000, 5.0, 7, 200, 50, 100, burst=4))
    gaps = 8000 / 4 if trace == "bursts" else 8000
    assert arrivals[-1].at == pytest.approx(8000 / 5, rel=4 / gaps**0.5)
    own = [a.prompt[-1][1] for a in arrivals]
    assert statistics.median(own) == pytest.approx(200, rel=4 * 0.6 * 1.2533 / 8000**0.5)
    answers = [a.num_decode_tokens for a in arrivals]
    assert statistics.quantiles(answers, n=100)[98] / 50 == pytest.approx(601 / 129, rel=0.15)


def test_bursts_come_together():
    arrivals = GENERATORS["bursts"](Shape(100, burst=10))
    times = [a.at for a in arrivals]
    assert len(set(times)) == 10 and all(len(set(times[i : i + 10])) == 1 for i in range(0, 100, 10))


def test_a_chat_goes_on_from_what_was_said():
    arrivals = GENERATORS["chat"](Shape(400, seed=4, turns=3, prefix_tokens=10))
    for turn in arrivals:
        before = [(shared(0), 10)]
        if turn.after is not None:
            last = arrivals[turn.after]
            before = [*last.prompt[:-1], (last.token, last.prompt[-1][1] + last.num_decode_tokens)]
        assert list(turn.prompt[:-1]) == before and turn.prompt[-1][0] == turn.token
    lengths, behind = [], {a.after for a in arrivals}
    for last in (a for a in arrivals if a.token not in behind):
        count = 1
        while last.after is not None:
            last, count = arrivals[last.after], count + 1
        lengths.append(count)
    assert set(lengths) == {1, 2, 3, 4, 5}  # 1 to 2 * 3 - 1


def test_a_tree_has_its_nodes():
    arrivals = GENERATORS["tree"](Shape(500, depth=3, branching=3, prefix_tokens=7))
    paths = {tuple(token for token, _ in a.prompt[:-1]) for a in arrivals}
    assert len(paths) == 9 and {len(path) for path in paths} == {3}
    assert [len({path[: level + 1] for path in paths}) for level in range(3)] == [1, 3, 9]
    assert len({path[-1] for path in paths}) == 9  # leaves of different parents are different nodes


def trace_file(tmp_path, text: str) -> str:
    file = tmp_path / "trace.csv"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(file)


HEAD = "arrived_at,num_prefill_tokens,num_decode_tokens"


def test_csv_groups_share_their_first_tokens(tmp_path):
    lines = f"\ufeff{HEAD},prefix_group,other\n0,100,5,a,x\n1.5,40,6,b,x\n1.5,30,7,a,x\n2,90,8,a,x\n3,20,9,,x\n"
    arrivals, remark = read_trace(trace_file(tmp_path, lines), None, prefix_tokens=64)
    tokens = [a.prompt_token_ids() for a in arrivals]
    assert remark is None and [len(t) for t in tokens] == [100, 40, 30, 90, 20]
    assert [common(tokens[0], tokens[i]) for i in range(1, 5)] == [0, 30, 64, 0]
    assert [(a.at, a.num_decode_tokens) for a in arrivals] == [(0, 5), (1.5, 6), (1.5, 7), (2, 8), (3, 9)]
    assert len(read_trace(trace_file(tmp_path, lines), 2, 64)[0]) == 2


def test_csv_out_of_order_is_sorted_and_said(tmp_path):
    file = trace_file(tmp_path, f"{HEAD}\n5,10,1\n2,20,1\n5,30,1\n")
    arrivals, remark = read_trace(file, None, 0)
    assert [a.num_prefill_tokens for a in arrivals] == [20, 10, 30] and "not in order; sorted" in remark


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "num_prefill_tokens, num_decode_tokens missing"),
        ("arrived_at,tokens\n1,2\n", "num_prefill_tokens, num_decode_tokens missing"),
        (f"{HEAD}\n", "no requests"),
        (f"{HEAD}\n0,10,5\n1,ten,5\n", "line 3: num_prefill_tokens must be an integer of at least 1, got 'ten'"),
        (f"{HEAD}\n0,10,5\n1,10\n", "line 3: num_decode_tokens must be an integer of at least 1, got None"),
        (f"{HEAD}\n0,10,0\n", "line 2: num_decode_tokens must be an integer of at least 1, got '0'"),
        (f"{HEAD}\n0,10.5,3\n", "line 2: num_prefill_tokens must be an integer of at least 1, got '10.5'"),
        (f"{HEAD}\n-1,10,3\n", "line 2: arrived_at must be a number of at least 0, got '-1'"),
        (f"{HEAD}\nnan,10,3\n", "line 2: arrived_at must be a number of at least 0, got 'nan'"),
        (b"\xff\xfe\x00\x01", "not a CSV file in UTF-8"),
    ],
)
def test_bad_csv_names_line_and_value(tmp_path, text, message):
    with pytest.raises(ValueError, match="trace.csv") as caught:
        read_trace(trace_file(tmp_path, text), None, 0)
    assert message in str(caught.value)


# -- the command


def run_simulate(capsys, *arguments: str) -> tuple[int, list[str], str]:
    status = run.main(["simulate", *arguments])
    out, err = capsys.readouterr()
    return status, out.splitlines(), err


SHORT = "chat", "--requests", "40", "--rate", "2", "--prompt-tokens", "50", "--output-tokens", "20"


def test_the_same_seed_gives_the_same_bytes(capsys):
    first, again, other = (run_simulate(capsys, *SHORT, "--seed", seed) for seed in "334")
    assert first[0] == 0 and first[1] == again[1] != other[1] and len(first[1]) == 1
    assert json.loads(first[1][0])["finished"] == 40
    assert "of wall time" in first[2] and "wall" not in first[1][0]
    assert "TPOT, ms" in first[2] and "p50 / p90 / p99" in first[2]


def test_a_sweep_is_its_runs(capsys):
    status, lines, _ = run_simulate(capsys, *SHORT, "--sweep", "max-num-seqs=1,4")
    alone = [run_simulate(capsys, *SHORT, "--max-num-seqs", value)[1][0] for value in "14"]
    assert status == 0 and lines == alone
    waits = [json.loads(line)["ttft_s"]["p99"] for line in lines]
    assert waits[0] > waits[1]
    _, lines, _ = run_simulate(capsys, *SHORT, "--sweep", "enable_prefix_caching=true,false")
    assert [json.loads(line)["hit_rate"] > 0 for line in lines] == [True, False]


def test_speed_brings_requests_sooner(capsys, tmp_path):
    file = trace_file(tmp_path, f"{HEAD}\n0,10,2\n100,10,2\n")
    spans = [
        json.loads(run_simulate(capsys, file, "--speed", speed)[1][0])["seconds"] for speed in ("1", "4")
    ]
    assert spans[0] > 100 and 25 < spans[1] < 26


def test_every_setting_of_the_scheduler_is_an_option():
    known = {field.name for field in fields(EngineConfig)}
    # There is no model, and the loop is the one that waits for each step.
    assert known - set(SIMULATE) == {"attention_backend", "fuse", "cuda_graphs", "async_scheduling"}
    assert {field.name for field in fields(Shape)} <= set(SIMULATE)
    for field in fields(Shape):
        if field.name != "requests":
            assert SIMULATE[field.name].default == field.default


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.csv",), "'nowhere.csv' is neither a file nor one of poisson"),
        (("poisson", "--gpu", "abacus"), "gpu must be one of h200"),
        (("poisson", "--model", "gpt"), "model must be one of qwen3-0.6b"),
        (("poisson", "--rate", "0"), "rate must be a positive number, got 0.0"),
        (("poisson", "--rate", "nan"), "rate must be a positive number, got nan"),
        (("chat", "--turns", "0"), "turns must be at least 1, got 0"),
        (("chat", "--think", "inf"), "think must be at least 0, got inf"),
        (("poisson", "--requests", "0"), "requests must be at least 1, got 0"),
        (("poisson", "--speed", "0"), "speed must be positive, got 0.0"),
        (("poisson", "--overhead-us", "-1"), "overhead_us must be at least 0, got -1.0"),
        (("poisson", "--policy", "lifo"), "policy must be 'fcfs' or 'priority', got 'lifo'"),
        (("poisson", "--max-model-len", "99999"), "max_model_len 99999 exceeds the model's 40960 positions"),
        (("poisson", "--sweep", "colour=1"), "--sweep takes OPTION=VALUE"),
        (("poisson", "--sweep", "num_blocks"), "--sweep takes OPTION=VALUE"),
        (("poisson", "--sweep", "num_blocks=5,many"), "num_blocks must be an integer, got 'many'"),
        (("poisson", "--sweep", "enable_prefix_caching=maybe"), "must be true or false, got 'maybe'"),
        (("poisson", "--sweep", "num_blocks=500,0"), "num_blocks must be an integer of at least 1, got 0"),
        (("poisson", "--plot", "plot.jpg"), "--plot writes PNG files, got 'plot.jpg'"),
        (("poisson", "--plot", "no/such/plot.png"), "there is no folder"),
    ],
)
def test_bad_arguments_are_one_line_before_anything_runs(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(command, "Simulator", None)
    monkeypatch.setattr("engine.simulate.plots.find_spec", lambda name: True)
    status, lines, err = run_simulate(capsys, *arguments)
    assert status == 2 and lines == []
    assert [message in line for line in err.splitlines()] == [False, True]  # after the line on whose code runs


def test_a_plot_without_matplotlib_names_the_requirements(monkeypatch, tmp_path):
    monkeypatch.setattr("engine.simulate.plots.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"matplotlib: .* -r experiments/requirements.txt"):
        check_plot(tmp_path / "plot.png")
    check_plot(None)


@pytest.mark.parametrize("sweep", [(), ("--sweep", "num_blocks=200,4000"), ("--sweep", "policy=fcfs,priority")])
def test_plots_are_small_png_files(capsys, tmp_path, sweep):
    image = pytest.importorskip("matplotlib.image")
    files = [tmp_path / "plot.png", tmp_path / "again.png"]
    for file in files if len(sweep) == 0 else files[:1]:
        assert run_simulate(capsys, *SHORT, *sweep, "--plot", str(file))[0] == 0
        assert file.stat().st_size < 80_000 and image.imread(file).shape[:2] == (360, 648)
    assert sweep or files[0].read_bytes() == files[1].read_bytes()
