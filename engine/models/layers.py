"""The small pieces every model family here is made of: RMSNorm and rotary positions."""

import torch
from torch import nn

from engine.exercises import exercise, fill


class Linear(nn.Linear):
    """nn.Linear, quicker for the few rows of a decode on a CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features]."""
        rows = x.numel() // self.in_features
        if x.device.type != "cpu" or x.dtype != torch.float32 or not 0 < rows <= 64:
            return super().forward(x)
        # With the weight as the left factor BLAS reads it once; as the right one it is repacked at every call.
        y = (self.weight @ x.reshape(rows, -1).t()).t().contiguous()
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], -1)


class RMSNorm(nn.Module):
    """Scale each vector to root mean square 1, then by a learned `weight` [dim]; `eps` keeps a zero vector finite.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    @exercise(17, "RMSNorm")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """RMS norm over the last axis, in float32 inside.  (Your engine: Chapter 17)

        x [..., dim], any leading axes. Returns the same shape and dtype. For each vector, y = x / sqrt(mean(x²) +
        eps) is computed in float32, whatever the dtype of x; y is rounded to x's dtype, and only then multiplied by
        `self.weight`. In bfloat16 that order decides the last bit, and it is the one Hugging Face's checkpoints were
        run with. x itself is not changed.
        """
        raise NotImplementedError


@exercise(17, "Rotary positions")
def rope_cos_sin(
    positions: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of every position's rotation angles.  (Your engine: Chapter 17)

    positions [...] absolute token positions, integers. Returns (cos, sin), each [..., head_dim], on the device of
    positions. Pair i of head_dim/2 turns by the angle positions * theta^(-2i/head_dim). Hugging Face's layout pairs
    entry i with entry i + head_dim/2, so the table of head_dim/2 angles is laid down twice, one copy after the other.
    The angles are computed in float32 and only the finished tables are rounded to `dtype`.
    Raises ValueError naming head_dim when it is odd.
    Source: Su et al., "RoFormer", 2021.
    """
    raise NotImplementedError


@exercise(17, "Rotary positions")
def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (x[i], x[i + D/2]) by its angle.  (Your engine: Chapter 17)

    x [..., D]; cos and sin, from `rope_cos_sin`, broadcast against it: the caller puts in the axis of the heads.
    Returns x's shape and dtype; with x1, x2 the two halves of x, the halves of the result are
    x1 cos - x2 sin and x2 cos + x1 sin. With float32 tables the arithmetic is float32, and a bfloat16 result is
    rounded once. x itself is not changed.
    """
    raise NotImplementedError


fill(__name__)
