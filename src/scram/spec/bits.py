"""One bit for each of many flags, in words of 32."""

from __future__ import annotations

import torch
from torch import Tensor


def packed(chosen: Tensor) -> Tensor:
    """bool [..., 32 W] -> int32 [..., W], the first in the lowest bit.

    >>> packed(torch.tensor([True, False, True] + [False] * 28 + [True]))
    tensor([-2147483643], dtype=torch.int32)
    """
    bit = 1 << torch.arange(32, device=chosen.device)
    words = (chosen.reshape(*chosen.shape[:-1], chosen.shape[-1] // 32, 32) * bit).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpacked(words: Tensor, count: int) -> Tensor:
    """The inverse of `packed`: int32 [..., W] -> bool [..., count]."""
    bit = torch.arange(32, device=words.device, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> bit) & 1).flatten(-2).bool()[..., :count]
