"""Where kernels are graded: on a CUDA device if there is one, else on the CPU in Triton's interpreter.

Triton decides at its import, for its own library too, so this module comes before it.
"""

import os
from importlib.util import find_spec

import torch

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
TRITON = find_spec("triton") is not None
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if CUDA else [])  # the interpreter gets bfloat16 wrong

if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
