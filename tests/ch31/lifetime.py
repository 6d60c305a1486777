"""From add_request to the last output: samples of one prompt, aborts, generate, stats."""

import pytest

from engine.serve.request import SamplingParams
from tests.ch31.fake_pool import LOOP, VOCAB, continuation, fake_core
from tests.ch31.harness import Harness, check_blocks, tokens
from tests.grading import expect, expect_equal, expect_raises, rng, wrong


def run(core, limit=500):
    """All outputs until the core is idle."""
    outputs = []
    for _ in range(limit):
        if not core.has_unfinished:
            return outputs
        outputs += core.step()
        check_blocks(core.blocks)
    raise AssertionError(f"still unfinished after {limit} steps")


def test_samples_of_a_prompt_say_whose_they_are():
    core, prompt = fake_core(max_num_batched_tokens=64), tokens(rng("samples"), 10)
    core.add_request("r", prompt, SamplingParams(n=3, max_tokens=4))
    final = {output.request_id: output for output in run(core) if output.finished}
    expect_equal([o.parent_id for o in final.values()], ["r"] * 3, "parent_id of sample {i}", see=LOOP)
    expect_equal(sorted(o.index for o in final.values()), [0, 1, 2], "index of sample {i}", see=LOOP)
    for output in final.values():
        expect_equal(output.output_token_ids, continuation(prompt, 4), "token {i} of a sample", see=LOOP)
    expect(core.blocks.hit_rate > 0.5, "samples of one prompt share its blocks", see=LOOP)


@pytest.mark.parametrize("when", ["waiting", "running", "one finished"])
def test_aborting_the_parent_ends_all_samples(when):
    core, prompt = fake_core(max_num_batched_tokens=64, max_num_seqs=2), tokens(rng("parent"), 10)
    core.add_request("r", prompt, SamplingParams(n=3, max_tokens=4))
    core.add_request("other", prompt[:5], SamplingParams(max_tokens=3))
    live = 3
    for _ in range({"waiting": 0, "running": 2, "one finished": 4}[when]):
        live -= sum(output.finished for output in core.step())
    outputs = core.abort_request("r")
    expect_equal(len(outputs), live, f"outputs of abort_request, samples {when}", see=LOOP)
    expect_equal({o.finish_reason for o in outputs}, {"abort"}, "finish reasons", see=LOOP)
    expect_equal(list(core.scheduler.requests), ["other"], "live request {i} afterwards", see=LOOP)
    check_blocks(core.blocks)
    try:
        core.add_request("r", prompt, SamplingParams(n=3, max_tokens=1))
    except ValueError as error:
        raise wrong("the id of aborted samples cannot be used again", str(error), LOOP) from None
    run(core)
    expect_equal(core.blocks.num_free, core.blocks.num_blocks, "free blocks when idle", see=LOOP)


def test_aborting_one_sample_leaves_the_others():
    core = fake_core(max_num_batched_tokens=64)
    core.add_request("r", [1, 2, 3], SamplingParams(n=3, max_tokens=4))
    core.step()
    gone = list(core.scheduler.requests)[1]
    expect_equal([o.request_id for o in core.abort_request(gone)], [gone], "aborted request {i}", see=LOOP)
    finished = [o.request_id for o in run(core) if o.finished]
    expect(len(finished) == 2 and gone not in finished, f"after {gone!r} was aborted, {finished} finished", see=LOOP)
    expect_equal(core.abort_request("r"), [], "outputs of aborting a parent whose samples are gone", see=LOOP)


@pytest.mark.parametrize("state", ["waiting", "running", "mid-prompt", "preempted", "swapped out"])
def test_an_abort_gives_back_all_that_was_held(state):
    harness, random = Harness(
        num_blocks=9, max_num_batched_tokens=4 if state == "mid-prompt" else 32,
        host_blocks=9 if state == "swapped out" else None,
    ), rng(f"abort {state}")  # fmt: skip
    harness.add("a", tokens(random, 10), max_tokens=16)
    harness.add("b", tokens(random, 10), max_tokens=16)
    b = harness.scheduler.requests["b"]
    reached = {
        "waiting": lambda: b.status.name == "WAITING",
        "running": lambda: b.num_output_tokens > 1,
        "mid-prompt": lambda: 0 < b.num_computed_tokens < 10,
        "preempted": lambda: b.status.name == "PREEMPTED",
        "swapped out": lambda: b.swapped_out,
    }[state]
    for _ in range(60):
        if reached():
            break
        harness.step()
    expect(reached(), f'"b" never was {state}', see=LOOP)
    (output,) = harness.core.abort_request("b")
    expect_equal((output.finished, output.finish_reason), (True, "abort"), "(finished, finish_reason)[{i}]", see=LOOP)
    expect_equal(output.output_token_ids, harness.asked["b"].got, "token {i} of its last output", see=LOOP)
    harness.asked["b"].reason = "abort"
    harness.check()
    harness.drain()


def test_an_unknown_id_aborts_nothing():
    core = fake_core()
    core.add_request("r", [1, 2])
    expect_equal(core.abort_request("nobody"), [], "outputs of aborting an unknown id", see=LOOP)
    expect(core.has_unfinished, "aborting an unknown id ended another request", see=LOOP)


def test_generate_returns_final_outputs_in_order():
    core, random = fake_core(max_num_batched_tokens=16, num_blocks=12), rng("generate")
    prompts = [tokens(random, random.randint(1, 20)) for _ in range(6)]
    params = [SamplingParams(max_tokens=random.randint(1, 9)) for _ in prompts]
    outputs = core.generate(prompts, params)
    expected = [continuation(p, its.max_tokens) for p, its in zip(prompts, params, strict=True)]
    expect_equal([o.output_token_ids for o in outputs], expected, "output {r}, token {c}", see=LOOP)
    expect(all(o.finished for o in outputs), "generate returned an unfinished output", see=LOOP)
    samples = core.generate(prompts[:2], SamplingParams(n=2, max_tokens=3))
    expected = [continuation(p, 3) for p in prompts[:2] for _ in range(2)]
    expect_equal([o.output_token_ids for o in samples], expected, "sample {r}, token {c}", see=LOOP)
    expect_equal(core.generate([]), [], "outputs for no prompts", see=LOOP)


def test_generate_wants_the_engine_for_itself():
    core = fake_core()
    core.add_request("r", [1, 2])
    expect_raises(RuntimeError, core.generate, [[1]], match="1 requests", see=LOOP)
    expect_equal(list(core.scheduler.requests), ["r"], "live request {i} afterwards", see=LOOP)
    core.abort_request("r")
    expect_raises(ValueError, core.generate, [[1], [2]], [SamplingParams()], match="2 prompts", see=LOOP)


@pytest.mark.parametrize("fault", ["bad prompt", "failing step"])
def test_a_generate_that_fails_leaves_nothing_behind(fault):
    core = fake_core()
    core.runner.fail_at = "forward" if fault == "failing step" else None
    error = MemoryError if fault == "failing step" else ValueError
    expect_raises(error, core.generate, [[1, 2], [3] if fault == "failing step" else [VOCAB]], see=LOOP)
    expect(not core.has_unfinished, "a generate that failed left its requests in the engine", see=LOOP)
    expect_equal(core.blocks.num_free, core.blocks.num_blocks, "free blocks", see=LOOP)
    expect_equal(
        core.generate([[1, 2]])[0].output_token_ids, continuation([1, 2], 16), "token {i} afterwards", see=LOOP
    )


def test_stats_add_up():
    harness, random = Harness(num_blocks=7, max_num_batched_tokens=32, max_num_seqs=3), rng("stats")
    prompt = tokens(random, 9)
    for i in range(4):
        harness.add(str(i), prompt, max_tokens=8)
    harness.step()
    stats = harness.core.stats()
    used = (harness.blocks.num_blocks - harness.blocks.num_free) / harness.blocks.num_blocks
    got = [stats[key] for key in ("steps", "scheduled_tokens", "running", "waiting", "kv_slots", "kv_usage")]
    expected = [1, sum(n for _, n in harness.runner.plans[0]), 3, 1, 28, used]
    expect_equal(got, expected, "steps, scheduled_tokens, running, waiting, kv_slots, kv_usage: {i}", see=LOOP)
    expect_equal(stats["prefix_hit_rate"], 16 / 27, "hit rate: two of three prompts of 9 adopt 8", see=LOOP)
    harness.drain()
    stats = harness.core.stats()
    expect_equal([stats[key] for key in ("running", "waiting", "kv_usage")], [0, 0, 0.0], "idle gauge {i}", see=LOOP)
    expect(stats["preemptions"] > 0, "nobody was preempted, but four requests need more than 7 blocks", see=LOOP)
