"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits where it needs that
one's results. With few rows a step is a chain of kernels as short as the pauses between them; so the pauses go.

Of kernels that are launched so, each waits before it touches what an earlier one wrote or may still read; since the
earlier one has waited itself, everything before that is done, too. Weights are read before the wait: a step begins with
kernels that are not launched early, so whatever changed them before the step is over. Needs compute capability 9.0.
"""

from functools import cache as once

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FEW = 4  # rows up to which it can pay; with more a step's products are cuBLAS's, which break the chain of early kernels


@triton.jit
def inputs_ready(EARLY: tl.constexpr):
    """Let the next kernel start as soon as every program came this far or ended, then wait for the kernel before.

    With EARLY False it does nothing: a kernel that is launched as usual starts after the one before has ended.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


def goes_early(rows: int, device: torch.device) -> bool:
    """Should the kernels of a step with so many rows be launched early?"""
    return rows <= FEW and device.type == "cuda" and _can_wait(device)


def launched(early: bool) -> dict:
    """The options of such a launch; none if not early, for not every device knows this one."""
    return {"launch_pdl": True} if early else {}


@once
def _can_wait(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
