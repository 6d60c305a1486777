"""The logic of experiments/ch33_launches.py: what its variants change, and how a trace is cut into parts."""

import pytest
import torch

import tests.ch32.device  # noqa: F401  first of all: it decides how Triton's kernels run

pytest.importorskip("triton")
from engine.serve import paged  # noqa: E402
from engine.serve.kernels import early, matvec  # noqa: E402
from experiments.ch33_launches import VARIANTS, parts  # noqa: E402


def test_each_variant_takes_one_thing_away(monkeypatch):
    x, weight, device = torch.zeros(1, 64), torch.zeros(8, 64), torch.device("cuda")
    monkeypatch.setattr(early, "_can_wait", lambda device: True)
    found = {}
    for name, patches in VARIANTS.items():
        for each in patches:
            each.start()
        found[name] = matvec.fits(x, weight), early.goes_early(1, device), paged.choose_splits(1, 8, 1024, 132)
        for each in patches:
            each.stop()
    assert list(found.values()) == [(False, False, 4), (True, False, 4), (True, True, 4), (True, True, 16)]
    assert matvec.fits(x, weight) and paged.choose_splits(1, 8, 1024, 132) == 16


def test_parts_of_a_trace():
    kernels = [
        (0.0, 5.0, "gather"), (6.0, 9.0, "embedding"), (10.0, 12.0, "early_add_norm"), (11.0, 20.0, "matvec_kernel"),
        (19.0, 22.0, "early_add_norm"), (25.0, 95.0, "head"), (96.0, 100.0, "sample_kernel"),
    ]  # fmt: skip
    got = parts(reversed(kernels))
    assert got == {"whole": 100.0, "before": 10.0, "operations_before": 2, "layers": 12.0, "head": 70.0, "kernels": 7}
