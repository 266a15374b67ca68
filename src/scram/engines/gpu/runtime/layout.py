"""How keys are laid out for the units of the device: padded, or split in two halves of 16 bits."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Kernel, cached, kinds


@triton.jit
def pad(k, wide, count, SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """`count` vectors of SIZE numbers to PADDED ones, zeros behind; the programs take blocks of them in turn."""
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK, count * PADDED, step):
        i = first + tl.arange(0, BLOCK)  # [BLOCK]
        ok = i < count * PADDED
        x = tl.load(k + i // PADDED * SIZE + i % PADDED, mask=ok & (i % PADDED < SIZE), other=0.0)  # [BLOCK]
        tl.store(wide + i, x, mask=ok)


def halves(x: Tensor) -> Tensor:
    """float32 [..., E] -> bfloat16 [..., 2 E]: the rounded features, then what rounding left of them, rounded too."""
    out = x.new_empty((*x.shape[:-1], 2 * x.shape[-1]), dtype=torch.bfloat16)
    _halves(x.shape[-1], x.numel(), kinds(x))(x, out, x.numel())
    return out


@cached
def _halves(width: int, numbers: int, given: tuple[Any, ...]) -> Kernel:
    flags = {"SIZE": width, "BLOCK": 1024, "num_warps": 4, "enable_fp_fusion": True}
    return Kernel(halves_kernel, triton.cdiv(numbers, 1024), flags)


@triton.jit
def halves_kernel(x, out, count, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    exact = tl.load(x + i, mask=i < count, other=0.0)  # [BLOCK]
    high = exact.to(tl.bfloat16)
    low = exact - high.to(tl.float32)
    low = tl.where(tl.abs(low) < float("inf"), low, 0.0)  # what is not finite is so in the first half
    place = out + i // SIZE * (2 * SIZE) + i % SIZE
    tl.store(place, high, mask=i < count)
    tl.store(place + SIZE, low.to(tl.bfloat16), mask=i < count)
