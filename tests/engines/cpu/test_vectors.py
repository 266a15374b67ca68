"""Arithmetic for vector units, to the last bit."""

import numba
import numpy as np
import pytest

from scram.engines.cpu.vectors import coordinates, dot, exp, narrow_dots


def test_coordinates_are_exact_up_to_the_largest_grid():
    @numba.njit
    def fill(*arguments):
        coordinates(*arguments)

    random = np.random.default_rng(0)
    for extent, stride in ((2**31 - 1, 1), (46341, 46340), (9, 49), (1, 1), (1, 2**31 - 1), (65536, 32767)):
        last = extent * stride - 1
        index = np.r_[0, last, random.integers(0, last + 1, 500), random.integers(0, extent, 500) * stride]
        index = np.r_[index, np.maximum(index - 1, 0)].astype(np.int32)
        got = np.empty_like(index)
        fill(index, extent, stride, got, len(index))
        assert (got == index // stride % extent).all(), (extent, stride)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_narrow_rows_give_the_same_bits_one_by_one_and_many_at_a_time(dtype):
    @numba.njit
    def each(a, i, b, j, keys, result):
        for p in range(len(keys)):
            result[p] = dot(a, i + p, b, j + keys[p])

    @numba.njit
    def many(a, i, b, j, keys, result):
        narrow_dots(a, i, b, j, keys, result, len(keys))

    random = np.random.default_rng(0)
    a, b = (random.standard_normal((90, 4)).astype(dtype) for _ in range(2))
    for size in (0, 1, 15, 16, 17, 70):
        keys = random.integers(0, 80, size).astype(np.int32)
        one, all_, true = np.empty(size, dtype), np.empty(size, dtype), (a[5 : 5 + size] * b[10 + keys]).sum(1)
        each(a, 5, b, 10, keys, one)
        many(a, 5, b, 10, keys, all_)
        assert (one == all_).all()
        np.testing.assert_allclose(one, true, rtol=0, atol=20 * np.finfo(dtype).eps)


def test_exp_is_right_to_the_last_bits():
    @numba.njit
    def values(x):
        return np.array([exp(one) for one in x])

    x = np.r_[np.linspace(-86.9, 0, 20001), -np.logspace(-9, 0, 1000)].astype(np.float32)
    assert np.abs(values(x) / np.exp(x.astype(np.float64)) - 1).max() < 1.2e-7  # one unit of float32
    small, none, unknown = values(np.array([-1000, -np.inf, np.nan], np.float32))
    assert small == 0
    assert none == 0
    assert np.isnan(unknown)
