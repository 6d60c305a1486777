"""The fused model through its kernels: steps over pools against float64, and a text of the core."""

import pytest

from engine.serve.fused import FusedModel
from engine.serve.kernels.matvec import matvec_kernel
from engine.serve.kernels.norm import add_norm_kernel
from engine.serve.kernels.rope import rope_write_kernel
from engine.serve.kernels.swiglu import swiglu_kernel
from engine.serve.ops import KernelOps
from engine.serve.paged import TritonBackend
from tests.ch31.flat_layers import KINDS
from tests.ch31.plain_model import model_of
from tests.ch32.device import DEVICE, DTYPES
from tests.ch33.whole import FUSED, TABLES, Steps, texts
from tests.grading import grades

KERNELS = (add_norm_kernel, matvec_kernel, rope_write_kernel, swiglu_kernel)
SMALL = {"num_attention_heads": 3, "num_key_value_heads": 1, "num_hidden_layers": 2}


@grades(*KERNELS, *FUSED)
@pytest.mark.parametrize("kind", ["qwen3", "llama", "with biases"])
def test_steps_through_the_kernels_equal_plain_ones(kind):
    steps = Steps(f"kernels {kind}", (6, 3, 4), TABLES, KernelOps, TritonBackend, DEVICE, **SMALL, **KINDS[kind])
    steps.step({0: (0, 3), 1: (0, 2)})
    steps.step({1: (2, 3), 0: (3, 5), 2: (0, 4)}, padding=1)
    steps.step({0: (5, 6)}, padding=1)


@grades(*KERNELS, *FUSED)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_narrow_types_through_the_kernels(dtype):
    steps = Steps("narrow", (6, 4), [[2, 0], [1]], KernelOps, TritonBackend, DEVICE, dtype, **SMALL)
    steps.step({0: (0, 5), 1: (0, 3)})
    steps.step({1: (3, 4), 0: (5, 6)}, padding=1)


@grades(*KERNELS, *FUSED)
def test_the_core_gives_the_same_text_through_the_fused_kernels():
    texts(KernelOps, "triton", [3, 9], 3)


# Given: which operations run where.


def test_a_gpu_has_the_kernels_and_a_cpu_the_plain_operations():
    ops = FusedModel(model_of("ops").to(DEVICE)).ops
    assert type(ops).__name__ == ("KernelOps" if DEVICE.type == "cuda" else "PlainOps")
