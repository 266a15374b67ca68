"""The counter hash of `scram.noise` in Triton: the same 32 bits for the same counters."""

# Kernels carry no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

MASK = 0xFFFFFFFF


def signed(word: int) -> int:
    """A 32-bit word as the int32 of the same bits: Triton types an int argument by its value."""
    word &= MASK
    return word - (1 << 32) if word >> 31 else word


def seed_arguments(seed: Tensor | None) -> tuple[Tensor | None, int, int]:
    """(pointer, low, high) for the kernels: a seed on the device is read there, one on the CPU goes by value."""
    if seed is None:
        return None, 0, 0
    if seed.is_cuda:
        return seed, 0, 0
    value = int(seed.item())
    return None, signed(value), signed(value >> 32)


def below_argument(share: float) -> int:
    """The threshold that `share` of all 32-bit words lie below."""
    return signed(int(share * 2**32))


@triton.jit
def absorb(state, word):
    x = (state ^ word.to(tl.uint32)) + 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def row_state(SEED, low, high, row):
    """The hash after the seed and the row; a seed given by pointer comes before `low` and `high`."""
    if SEED is not None:
        seed = tl.load(SEED)
        low = (seed & 0xFFFFFFFF).to(tl.uint32)
        high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    start = low.to(tl.uint32) * 0
    return absorb(absorb(absorb(start, low), high), row)


@triton.jit
def below(bits, n):
    """A number in 0..n-1 from 32 random bits."""
    return tl.umulhi(bits, n.to(tl.uint32)).to(tl.int32)
