"""What groups of similar blocks are shrunk in: a transform of each block, and one along the group."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

SIDE = 8  # of a block
PIXELS = SIDE**2


def cosine() -> Tensor:
    """The orthonormal cosine transform of a line of a block, float64 [8, 8], one function a row."""
    n = torch.arange(SIDE, dtype=torch.float64, device="cpu")
    made = torch.cos(math.pi * (n + 0.5) * n[:, None] / SIDE) * math.sqrt(2 / SIDE)
    made[0] /= math.sqrt(2)
    return made


def spline() -> Tensor:
    """A biorthogonal spline wavelet transform of a line, float64 [8, 8], one function a row, each of unit length.

    Details are differences of two neighbors; means are taken by ten taps, so that a ramp is told by few numbers.
    """
    low = torch.tensor([3.0, -3, -22, 22, 128, 128, 22, -22, -3, 3], dtype=torch.float64, device="cpu")
    made = torch.eye(SIDE, dtype=torch.float64, device="cpu")
    n = SIDE
    while n > 1:
        half = n // 2
        level = torch.zeros(n, n, dtype=torch.float64, device="cpu")
        for i in range(half):
            for tap in range(len(low)):
                level[i, (2 * i + tap - 4) % n] += low[tap] / 128
            level[half + i, 2 * i] = 1
            level[half + i, 2 * i + 1] = -1
        made = torch.cat([level @ made[:n], made[n:]])
        n = half
    return F.normalize(made)


def haar(size: int) -> Tensor:
    """The orthonormal Haar transform along a group, float64 [size, size], a power of two, one function a row."""
    made = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    while len(made) < size:
        means = made.repeat_interleave(2, 1)
        steps = torch.kron(torch.eye(len(made), dtype=torch.float64, device="cpu"), made.new_tensor([[1, -1]]))
        made = torch.cat([means, steps]) / math.sqrt(2)
    return made
