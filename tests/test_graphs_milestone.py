"""`run.py graphs`: its floor, its gates, its timelines, transformers beside it, what it prints; on small shapes."""

import dataclasses
import gc
import json
import sys
from argparse import Namespace

import pytest
import torch

from engine.milestones import graphs, throughput, timeline
from engine.milestones.ceilings import Ceilings
from engine.milestones.timeline import Timeline
from engine.serve.graphs import Flight

ARGS = {
    "model": None, "variant": None, "batch": [1, 3], "context": 40, "steps": 2, "requests": 3, "no_workload": False,
    "timeline": None, "device": "cpu", "beside": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(graphs, "SHAPES", {"small": (16, 24, 2, 4, 2, 50, True), **graphs.SHAPES})
    monkeypatch.setitem(graphs.SHAPES, "small", (16, 24, 2, 4, 2, 50, True))
    monkeypatch.setattr(Ceilings, "measure", classmethod(lambda cls, *given: cls(1e9, 1e10)))


def test_the_floor_is_that_of_a_count_by_hand():
    """2 layers, hidden 16, MLP 24, 4 heads and 2 KV heads of 64, 50 tokens: bytes where few, FLOP where many rows."""
    cfg, ceilings = graphs.shape_of("small", 96), Ceilings(copy=1000.0, matmul=700.0)
    matrices = [16 * (256 + 256), 256 * 16, 16 * 48, 24 * 16] * 2 + [16 * 50]
    kv = 2 * 128  # numbers of a token in a layer
    for batch, context in ((1, 10), (100, 10)):
        matmuls = sum(max(4 * m / 1000, 2 * m * batch / 700) for m in matrices)
        attention = max(4 * kv * batch * context / 1000, 4 * 256 * batch * context / 700)
        assert ceilings.floor(cfg, batch, context, 4) == pytest.approx(matmuls + 2 * attention)


def test_prints_a_line_for_each_measurement(capsys):
    assert graphs.main(Namespace(**ARGS)) == 0
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert lines[0] == {"copy_gb_s": 1.0, "matmul_tflop_s": 0.01}
    steps = [line for line in lines if "step_ms" in line]
    assert [(x["requests"], x["variant"]) for x in steps] == [
        (batch, variant) for batch in (1, 3) for variant in ("plain", "fused", "persistent")
    ]
    for line in steps:
        assert line["context"] == 40 and line["step_ms"] >= line["host_ms"] > 0 and line["floor_ms"] > 0
        assert line["tok_s"] == pytest.approx(1e3 * line["requests"] / line["step_ms"], rel=0.01)
    (work,) = (line for line in lines if "workload" in line)
    assert work["workload"].startswith("3 requests, 4-40 ") and work["tok_s"] > 0 and work["variant"] == "fused"
    assert "persistent" in err and "impl=" in err


def test_no_speed_of_a_variant_with_other_tokens(monkeypatch):
    right, calls = graphs.run_steps, []

    def forged(model, variant, *rest):
        run = right(model, variant, *rest)
        calls.append(variant)
        if variant == "async":
            run.tokens[0][-1] += 1
        return run

    monkeypatch.setattr(graphs, "run_steps", forged)
    monkeypatch.setitem(graphs.VARIANTS, "async", {"cuda_graphs": "static", "async_scheduling": True})
    args = Namespace(**{**ARGS, "variant": ["persistent", "async"], "batch": [3], "no_workload": True})
    with pytest.raises(ValueError, match="small, 3 requests: async gives other tokens than persistent"):
        graphs.main(args)
    assert calls == ["persistent", "async"]


def test_async_steps_launch_in_every_call(monkeypatch):
    """A pool that is too small makes every second call only collect, and a step seem to cost half."""
    monkeypatch.setitem(graphs.VARIANTS, "async", {"cuda_graphs": "static", "async_scheduling": True})
    model = graphs.random_weights(graphs.shape_of("small", 160), torch.float32, "cpu")
    core = graphs.decoding_core(model, "async", 3, 40, 6)
    for i in range(8):
        before = core.num_steps
        outputs = core.step()
        assert core.num_steps == before + 1, "a call only collected"
        assert len(outputs) == (3 if i else 0)


def test_what_is_waited_for_is_counted_apart(monkeypatch):
    monkeypatch.setattr(Flight, "wait", lambda flight: sum(range(200_000)))
    with graphs.Waiting() as waiting:
        Flight([], [], torch.zeros(0), torch.zeros(0)).wait()
        assert waiting.seconds > 0


@pytest.mark.parametrize(
    "changed, text",
    [
        ({"steps": 0}, "--steps must be at least 1, got 0"), ({"context": 0}, "--context must be at least 1, got 0"),
        ({"requests": 0}, "--requests must be at least 1, got 0"), ({"variant": ["fast"]}, "unknown variant 'fast'"),
        ({"model": ["gpt"]}, "unknown model shape 'gpt'"), ({"timeline": "x"}, "--timeline needs a CUDA device"),
        ({"beside": -1}, "--beside must be a number of seconds, got -1"),
        ({"beside": float("nan")}, "--beside must be a number of seconds, got nan"),
        ({"beside": 5, "no_workload": True}, "--beside is about the workload, and --no-workload leaves that out"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_arguments(changed, text):
    with pytest.raises(ValueError, match=text):
        graphs.main(Namespace(**{**ARGS, **changed}))


# -- transformers beside it


@pytest.fixture(scope="module")
def transformers():
    """Imported, and out of the sight of the garbage collector, which each run calls several times."""
    transformers = throughput.import_transformers()
    assert transformers.Qwen3ForCausalLM and transformers.AutoModelForCausalLM
    gc.collect()
    gc.freeze()
    yield transformers
    gc.unfreeze()


def load_and_model(temperature=0.0, dtype=torch.float32):
    model = graphs.random_weights(graphs.shape_of("small", 160), dtype, "cpu")
    return throughput.draw_load(50, 6, 3, 12, temperature), model


def test_transformers_gives_our_tokens(transformers):
    """The same weights, prompts and lengths, drawn greedily: so it is the same work."""
    load, model = load_and_model()
    ours = throughput.run_core(model, load, graphs.VARIANTS["fused"])
    theirs = throughput.run_peer(model, load, 60)
    assert theirs.outputs == ours.outputs and [len(x) for x in ours.outputs] == load.max_tokens
    assert theirs.finished == ours.finished == 6 and theirs.seconds < 60
    again = throughput.run_core(model, load, graphs.VARIANTS["fused"])
    assert again.outputs == ours.outputs, "transformers has changed our weights"


def test_at_the_limit_the_tokens_that_came_are_counted(transformers):
    load, model = load_and_model()
    load.max_tokens = [2, 2, 4000, 4000, 4000, 4000]
    served = throughput.run_peer(model, load, 1.5)
    assert served.finished == 2 and 1.5 <= served.seconds < 20
    lengths = [len(x) for x in served.outputs]
    assert lengths[:2] == [2, 2] and all(2 < n < 4000 for n in lengths[2:])
    line = throughput.line_of(load, throughput.PEER, served)
    assert line["output_tokens"] == sum(lengths) and line["finished"] == 2
    assert line["tok_s"] == pytest.approx(sum(lengths) / served.seconds, abs=1)


def test_nobody_begins_in_no_time(transformers):
    load, model = load_and_model()
    served = throughput.run_peer(model, load, 1e-9)
    assert served.finished == 0 and len(served.outputs) == 6 and served.seconds > 0


def test_transformers_draws_at_the_temperature(transformers):
    """At a high one the tokens are others than the likeliest, at a very low one they are those."""
    load, model = load_and_model()
    greedy = throughput.run_core(model, load, graphs.VARIANTS["fused"]).outputs
    cold, hot = (
        throughput.run_peer(model, dataclasses.replace(load, temperature=t), 60).outputs for t in (1e-6, 50.0)
    )
    assert cold == greedy != hot and [len(x) for x in hot] == load.max_tokens


def test_one_model_in_memory(transformers):
    _, model = load_and_model(dtype=torch.bfloat16)
    ours = {parameter.data_ptr() for parameter in model.parameters()}
    assert {parameter.data_ptr() for parameter in throughput.peer(model).parameters()} == ours


def test_no_speed_of_a_model_that_computes_something_else(transformers):
    _, model = load_and_model()
    model.cfg = dataclasses.replace(model.cfg, rope_theta=100.0)
    with pytest.raises(ValueError, match=r"transformers' logits are off by [\d.e-]+, rounding explains"):
        throughput.peer(model)


def test_a_failure_of_transformers_is_named(transformers, monkeypatch):
    load, model = load_and_model()
    monkeypatch.setattr(transformers.Qwen3ForCausalLM, "_get_logits_processor", lambda *_: [lambda *_: 1 / 0])
    with pytest.raises(ValueError, match="transformers, continuous batching: .*division by zero"):
        throughput.run_peer(model, load, 60)


def test_its_line_stands_beside_ours(transformers, capsys):
    args = Namespace(**{**ARGS, "variant": ["fused"], "batch": [1], "beside": 60.0})
    assert graphs.main(args) == 0
    ours, theirs = [x for x in map(json.loads, capsys.readouterr().out.splitlines()) if "workload" in x]
    assert (ours["variant"], theirs["variant"]) == ("fused", "transformers, continuous batching")
    for name in ("workload", "output_tokens", "prompt_tokens", "finished"):
        assert ours[name] == theirs[name]
    assert theirs["finished"] == 3 and theirs["attention"].endswith("sdpa") and theirs["tok_s"] > 0


def test_without_transformers_it_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="--beside needs transformers with continuous batching: python -m pip"):
        graphs.main(Namespace(**{**ARGS, "beside": 5}))


def test_no_line_of_a_run_that_lacks_tokens():
    load = throughput.Load([[1], [2]], [2, 2], 0.0)
    for outputs, finished in (([[5, 6], [7]], 2), ([[5, 6, 7], [7, 8]], 1)):
        with pytest.raises(ValueError, match=r"fused: \d tokens came, 4 were asked for"):
            throughput.line_of(load, "fused", throughput.Served(outputs, 1.0, finished))


# -- timelines


def test_intervals_are_merged_where_they_touch():
    assert timeline.merge([(0, 4), (1, 2), (4, 6), (8, 9), (8.5, 12)]) == [(0, 6), (8, 12)]
    assert timeline.merge([]) == []


def test_idle_is_what_the_device_waits_and_not_how_kernels_start():
    """Kernels of 100 of 150 us in all; pauses of 2, 8 and 40 us, of which one is a wait."""
    line = Timeline([(0, 90), (90, 150)], [(0, 50), (52, 72), (80, 90), (130, 150)])
    assert line.idle == pytest.approx(40 / 150)
    assert line.paused == pytest.approx(50 / 150)


def test_a_picture_has_a_bar_for_each_interval_on_one_scale():
    before = Timeline([(0, 500), (500, 1000)], [(100, 200), (700, 800)])
    lines = {"before": before, "after": Timeline([(0, 50)], [(60, 90)])}
    svg = timeline.draw(lines, width=1130)
    assert svg.count("<rect x") == 4 + 2
    for text in ("before, host", "before, device", "after, host", "after, device", "1.0 ms"):
        assert text in svg
    assert 'width="500.0"' in svg and 'width="50.0"' in svg and 'x="226.0"' in svg


def test_a_device_that_mostly_waits_is_no_solid_bar():
    """Kernels of 1 us every 10 us are one bar in a picture of a second, and a pale one."""
    kernels = [(10.0 * i, 10.0 * i + 1) for i in range(1000)]
    svg = timeline.draw({"plain": Timeline([(0, 1e4)], kernels)})
    assert svg.count("<rect x") == 2 and svg.count('fill-opacity="0.10"') == 1
