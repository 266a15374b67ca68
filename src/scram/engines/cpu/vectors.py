"""Small arithmetic that vector units can do: products of rows [points, width], coordinates, exp."""

import math

import numpy as np
from numba import types
from numba.extending import overload

from ..._compat.numba import ROWS, SIMD_WIDTH, power_of_two, product, products
from .compiled import compiled, plain

LEAST = np.float32(-87)  # exp of less counts as 0
HALF = np.float32(0.5)
INVERSE_LN2 = np.float32(1 / math.log(2))
LN2_HIGH = np.float32(0.693359375)  # few bits: its product with n is exact
LN2_LOW = np.float32(math.log(2) - 0.693359375)
SERIES = tuple(np.float32(1 / math.factorial(n)) for n in range(7, -1, -1))


@compiled
def dot(a, i, b, j):
    """<a[i], b[j]>"""
    width = a.shape[1]
    total = a.dtype.type(0)
    if width == SIMD_WIDTH:  # the compiler's own loop would take few elements one by one
        return product(a, i, b, j)
    for e in range(width):
        total += a[i, e] * b[j, e]
    return total


@compiled
def narrow_dots(a, i, b, j, keys, result, size):
    """result[p] = <a[i + p], b[j + keys[p]]> for p < size, of rows of SIMD_WIDTH elements; the bits of `dot`."""
    whole = size // ROWS * ROWS
    for p in range(0, whole, ROWS):
        products(a, i, b, j, keys, p, result)
    for p in range(whole, size):
        result[p] = dot(a, i + p, b, j + keys[p])


@compiled
def coordinates(index, extent, stride, coordinate, size):
    """One coordinate of each index. By float64, exact below 2^31 and quick: no vector unit divides integers."""
    inner = 1.0 / stride
    outer = 1.0 / (stride * extent)
    for p in range(size):
        middle = index[p] + 0.5
        coordinate[p] = np.int32(middle * inner) - np.int32(middle * outer) * np.int32(extent)


@plain
def _exp32(x):
    """exp of a float32 up to 0, for the vector units: 2^n times a Taylor series, |rest| < ln(2) / 2."""
    known = x if x > LEAST else LEAST  # NaN too: it has no integer
    n = np.floor(known * INVERSE_LN2 + HALF)
    rest = (known - n * LN2_HIGH) - n * LN2_LOW
    series = SERIES[0]
    for c in SERIES[1:]:
        series = series * rest + c
    power = series * power_of_two(np.int32(n))
    return power if x > LEAST else (np.float32(0) if x <= LEAST else x)


def exp(x):
    """exp of a number that is at most 0, or NaN."""


@overload(exp)
def _exp(x):
    return (lambda x: _exp32(x)) if x == types.float32 else (lambda x: math.exp(x))


@compiled
def add(a, i, factor, b, j):
    """a[i] += factor * b[j]"""
    for e in range(a.shape[1]):
        a[i, e] += factor * b[j, e]
