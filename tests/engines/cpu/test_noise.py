"""The noise in Numba is that of plain Python."""

import numba
import numpy as np

from scram.engines.cpu.noise import absorb, below, seeded
from support import plain


def test_noise_is_that_of_plain_python():
    @numba.njit
    def bits(seed, counters):
        state = seeded(seed)
        for word in counters:
            state = absorb(state, word)
        return state

    for seed, counters, _ in plain.VECTORS:
        assert bits(seed, np.array(counters, np.uint32)) == plain.noise(seed, *counters)


def test_below_is_exact():
    @numba.njit
    def number(bits, n):
        return below(bits, n)

    for bits in (0, 1, 2**31, 2**32 - 1):
        for n in (1, 3, 1000, 2**31):
            assert number(np.uint32(bits), n) == bits * n // 2**32
