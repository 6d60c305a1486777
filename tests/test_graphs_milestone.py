"""`run.py graphs`: its floor, its gate, its timelines and what it prints, on shapes of a few tokens."""

import json
from argparse import Namespace

import pytest
import torch

from engine.milestones import graphs, timeline
from engine.milestones.timeline import Timeline
from engine.serve.graphs import Flight

ARGS = {
    "model": None, "variant": None, "batch": [1, 3], "context": 40, "steps": 2, "requests": 3, "no_workload": False,
    "timeline": None, "device": "cpu",
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(graphs, "SHAPES", {"small": (16, 24, 2, 4, 2, 50, True), **graphs.SHAPES})
    monkeypatch.setitem(graphs.SHAPES, "small", (16, 24, 2, 4, 2, 50, True))
    monkeypatch.setattr(graphs.Ceilings, "measure", classmethod(lambda cls, *given: cls(1e9, 1e10)))


def test_the_floor_is_that_of_a_count_by_hand():
    """2 layers, hidden 16, MLP 24, 4 heads and 2 KV heads of 64, 50 tokens: bytes where few, FLOP where many rows."""
    cfg, ceilings = graphs.shape_of("small", 96), graphs.Ceilings(copy=1000.0, matmul=700.0)
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
    ],
    ids=str,
)  # fmt: skip
def test_bad_arguments(changed, text):
    with pytest.raises(ValueError, match=text):
        graphs.main(Namespace(**{**ARGS, **changed}))


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
    assert svg.count("<rect") == 4 + 2
    for text in ("before, host", "before, device", "after, host", "after, device", "1.0 ms"):
        assert text in svg
    assert 'width="500.0"' in svg and 'width="50.0"' in svg and 'x="226.0"' in svg


def test_a_device_that_mostly_waits_is_no_solid_bar():
    """Kernels of 1 us every 10 us are one bar in a picture of a second, and a pale one."""
    kernels = [(10.0 * i, 10.0 * i + 1) for i in range(1000)]
    svg = timeline.draw({"plain": Timeline([(0, 1e4)], kernels)})
    assert svg.count("<rect") == 2 and svg.count('fill-opacity="0.10"') == 1
