"""The counter hash of `scram.spec.noise` in Triton: the same 32 bits for the same counters."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

MASK = 0xFFFFFFFF


def signed(word: int) -> int:
    """A 32-bit word as the int32 of the same bits: Triton types an int argument by its value."""
    word &= MASK
    return word - (1 << 32) if word >> 31 else word


class Seed(NamedTuple):
    """A seed as kernels take it: a pointer to one on the device, or the two halves of one on the CPU; and the rows."""

    pointer: Any
    low: int
    high: int
    rows: Tensor | None  # int [B, H], the numbers of the rows; None: their own
    number: int  # of rows


def seed_argument(seed: Tensor | None, rows: Tensor | None) -> Seed:
    """`rows`: int [B, H], the numbers of the rows of queries, None for their own."""
    if seed is None:
        return Seed(None, 0, 0, None, 0)
    numbers = (None, 0) if rows is None else (rows.contiguous(), rows.numel())
    if seed.is_cuda:
        return Seed(seed, 0, 0, *numbers)
    value = int(seed.item())
    return Seed(None, signed(value), signed(value >> 32), *numbers)


def below_argument(share: float) -> int:
    """The threshold that `share` of all 32-bit words lie below."""
    return signed(int(share * 2**32))


@triton.jit
def absorb(state, word):
    x = (state ^ tl.cast(word, tl.uint32)) + 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def row_state(seed, row):
    """The hash after the seed and the number of the row; of one that is not there, any."""
    if seed.pointer is not None:
        word = tl.load(seed.pointer)
        low, high = word & 0xFFFFFFFF, (word >> 32) & 0xFFFFFFFF
    else:
        low, high = seed.low, seed.high
    if seed.rows is not None:
        row = tl.load(seed.rows + row, mask=row < seed.number, other=0)
    return absorb(absorb(absorb(tl.cast(low, tl.uint32) * 0, low), high), row)


@triton.jit
def below(bits, n):
    """A number in 0..n-1 from 32 random bits."""
    return tl.umulhi(bits, n.to(tl.uint32)).to(tl.int32)
