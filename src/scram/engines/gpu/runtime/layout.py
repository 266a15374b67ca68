"""What search needs besides searching: keys padded or split for the units."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.launch import Kernel, cached, kinds


@triton.jit
def pad(k, wide, count, E: tl.constexpr, KE: tl.constexpr, BLOCK: tl.constexpr):
    """`count` rows of width E to rows of width KE, zeros behind; the programs take blocks of them in turn."""
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK, count * KE, step):
        i = first + tl.arange(0, BLOCK)
        ok = i < count * KE
        x = tl.load(k + i // KE * E + i % KE, mask=ok & (i % KE < E), other=0.0)
        tl.store(wide + i, x, mask=ok)


def halves(x: Tensor) -> Tensor:
    """float32 [..., E] -> bfloat16 [..., 2 E]: the rounded features, then what rounding left of them, rounded too."""
    out = x.new_empty((*x.shape[:-1], 2 * x.shape[-1]), dtype=torch.bfloat16)
    _halves(x.shape[-1], x.numel(), kinds(x))(x, out, x.numel())
    return out


@cached
def _halves(width: int, numbers: int, given: tuple[Any, ...]) -> Kernel:
    flags = {"E": width, "BLOCK": 1024, "num_warps": 4, "enable_fp_fusion": True}
    return Kernel(halves_kernel, triton.cdiv(numbers, 1024), flags)


@triton.jit
def halves_kernel(x, out, count, E: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    whole = tl.load(x + i, mask=i < count, other=0.0)
    high = whole.to(tl.bfloat16)
    low = whole - high.to(tl.float32)
    low = tl.where(tl.abs(low) < float("inf"), low, 0.0)  # what is not finite is so in the first half
    to = out + i // E * (2 * E) + i % E
    tl.store(to, high, mask=i < count)
    tl.store(to + E, low.to(tl.bfloat16), mask=i < count)
