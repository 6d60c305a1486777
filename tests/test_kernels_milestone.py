"""`run.py kernels`: its steps, its gate and what it prints, on shapes of a few tokens."""

import json
from argparse import Namespace

import pytest
import torch

from engine.milestones import kernels
from engine.serve.attention import ReferenceBackend, write_kv
from engine.serve.sdpa import SdpaBackend
from tests.ch31.ragged import plain_attention, rounding

ARGS = {"backend": None, "repeat": 1, "threads": None}
SMALL = {"batch": [1, 3], "context": [40], "chunks": [(2, 20)], "mixed": (9, 4, 33), "rows": 7}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(kernels, "ON_CPU", SMALL)
    monkeypatch.setattr(kernels.torch.cuda, "is_available", lambda: False)


def test_steps_are_what_they_say():
    """Whole prompts, chunks and decodes over scattered blocks, against float64; bytes and products counted by hand."""
    shapes = [(20, 20), (35, 4), (17, 1)]
    step = kernels.make_step(shapes, torch.float32, torch.device("cpu"))
    tables = step.meta.block_table.tolist()
    used = [block for (s, _), table in zip(shapes, tables, strict=True) for block in table[: -(-s // kernels.BLOCK)]]
    assert len(used) == len(set(used)) == 2 + 3 + 2 and used != sorted(used)
    slots = [tables[r][p // 16] * 16 + p % 16 for r, (s, t) in enumerate(shapes) for p in range(s - t, s)]
    assert step.meta.slot_mapping.tolist() == slots
    got = ReferenceBackend().forward(step.q, step.cache, step.meta)
    expected = plain_attention(step.q, *step.cache, shapes, tables, 16)
    atol = rounding(step.q, *(pool.view(-1, kernels.WIDTH) for pool in step.cache), 35)
    torch.testing.assert_close(got.double(), expected, atol=atol, rtol=0)
    assert step.kv_bytes == (20 + 35 + 17) * 2 * 8 * 128 * 4
    pairs = sum(p + 1 for s, t in shapes for p in range(s - t, s))
    assert step.flops == 2 * 2 * pairs * 32 * 128


def test_prints_a_line_for_each_measurement(capsys):
    assert kernels.main(Namespace(**ARGS)) == 0
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert lines[0]["what"] == "copy" and lines[0]["gb_s"] > 0
    found = {(line["what"], line["backend"]) for line in lines[1:]}
    for name in ("reference", "sdpa"):
        assert ("write 7 rows", name) in found
        for what in ("decode 1 x 40", "decode 3 x 40", "prefill 2 x 20", "mixed step: 9 + 4 x 33", "mixed / apart"):
            assert (what, name) in found
    assert all(line["ms"] > 0 and line["gb_s"] >= 0 for line in lines[1:] if "ms" in line)
    assert "decode 3 x 40" in err and "impl=" in err


def test_no_speed_of_a_backend_that_is_wrong(monkeypatch, capsys):
    right = SdpaBackend.forward
    monkeypatch.setattr(SdpaBackend, "forward", lambda self, *given: 1.01 * right(self, *given))
    with pytest.raises(ValueError, match=r"decode 1 x 40: sdpa is off by [\d.e-]+, rounding explains"):
        kernels.main(Namespace(**ARGS))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert not [line for line in lines if line.get("backend") == "sdpa" and "decode" in line["what"]]


def test_no_speed_of_a_write_that_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(SdpaBackend, "write", lambda self, cache, k, v, meta: write_kv(*cache, v, k, meta.slot_mapping))
    with pytest.raises(ValueError, match="write 7 rows: what sdpa stored is not what it was given"):
        kernels.main(Namespace(**ARGS))
    assert '"sdpa"' not in capsys.readouterr().out


def test_bad_arguments():
    with pytest.raises(ValueError, match="--repeat must be at least 1, got 0"):
        kernels.main(Namespace(**{**ARGS, "repeat": 0}))
    with pytest.raises(ValueError, match="unknown attention backend 'flash'"):
        kernels.main(Namespace(**{**ARGS, "backend": ["sdpa", "flash"]}))
