"""Counter-based noise: 32 bits that are a function of (seed, counters) alone, never of a thread or an order."""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9


def _absorb(state: Tensor, word: Tensor | int) -> Tensor:
    """A bijection of 32-bit words with full avalanche (int64 tensors hold them; products wrap, low bits are right)."""
    x = ((state ^ word) + GOLDEN) & MASK
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def noise(seed: Tensor | int, *counters: Tensor | int) -> Tensor:
    """32 random bits, as int64 in [0, 2**32), for each broadcast tuple of counters.

    >>> noise(0, 0, 0), noise(0, 0, torch.arange(2))
    (tensor(3150628639), tensor([3150628639,  450680253]))
    """
    if not isinstance(seed, Tensor):
        seed = torch.tensor(seed, dtype=torch.int64, device="cpu")
    seed = seed.to(torch.int64)
    state = _absorb(_absorb(torch.zeros_like(seed), seed & MASK), (seed >> 32) & MASK)
    for word in counters:
        state = _absorb(state, word & MASK)
    return state


def numbered(row: Tensor, rows: Tensor | None) -> Tensor:
    """The numbers that the noise of some rows is keyed by: those of `rows` [B, H], or their own.

    >>> numbered(torch.arange(2), None), numbered(torch.arange(2), torch.tensor([[4, 6]]))
    (tensor([0, 1]), tensor([4, 6]))
    """
    return row if rows is None else rows.flatten()[row]


def below(bits: Tensor, n: Tensor | int) -> Tensor:
    """A number in 0..n-1 from 32 random bits, in integers: (bits * n) >> 32. n <= 2**31.

    >>> below(torch.tensor([0, 2**31, 2**32 - 1]), 10)
    tensor([0, 5, 9])
    """
    return (bits * n) >> 32
