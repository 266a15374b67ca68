"""The counter hash of `scram.spec.noise`, in Numba. Every step is cast back to 32 bits: Numba would widen it."""

import numpy as np

from .compiled import compiled

GOLDEN = np.uint32(0x9E3779B9)
FIRST = np.uint32(0x7FEB352D)
SECOND = np.uint32(0x846CA68B)
S15 = np.uint32(15)
S16 = np.uint32(16)


@compiled
def absorb(state, word):
    """The hash state after one more 32-bit counter; the state is the noise."""
    x = np.uint32(np.uint32(state ^ np.uint32(word)) + GOLDEN)
    x = np.uint32(x ^ np.uint32(x >> S16))
    x = np.uint32(x * FIRST)
    x = np.uint32(x ^ np.uint32(x >> S15))
    x = np.uint32(x * SECOND)
    return np.uint32(x ^ np.uint32(x >> S16))


@compiled
def seeded(seed):
    """The hash state of a 64-bit seed."""
    low = np.uint32(seed & 0xFFFFFFFF)
    high = np.uint32((seed >> 32) & 0xFFFFFFFF)
    return absorb(absorb(np.uint32(0), low), high)


@compiled
def below(bits, n):
    """A number in 0..n-1 from 32 random bits."""
    return np.int64((np.uint64(bits) * np.uint64(n)) >> np.uint64(32))
