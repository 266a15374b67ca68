"""Small arithmetic that vector units can do: products of rows [points, width], coordinates, exp."""

# Numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba.core.cgutils import create_struct_proxy
from numba.core.types import float32, int32, int64, none
from numba.extending import intrinsic, overload

from .compiled import compiled, plain

LANES = 4  # narrower rows are padded to as many elements
ROWS = LANES**2  # of them are multiplied at a time
LEAST = np.float32(-87)  # exp of less counts as 0
HALF, INVERSE_LN2 = np.float32(0.5), np.float32(1 / math.log(2))
LN2_HIGH = np.float32(0.693359375)  # few bits: its product with n is exact
LN2_LOW = np.float32(math.log(2) - 0.693359375)
SERIES = tuple(np.float32(1 / math.factorial(n)) for n in range(7, -1, -1))


def _load(context, builder, signature, arguments, which, index, lanes):
    """The place of `lanes` elements of an array argument, taken flat, and what stands there."""
    array = create_struct_proxy(signature.args[which])(context, builder, value=arguments[which])
    place = builder.gep(array.data, [index], inbounds=True)
    element = place.type.pointee
    if lanes > 1:
        place = builder.bitcast(place, ir.VectorType(element, lanes).as_pointer())
    return place, builder.load(place, align=context.get_abi_sizeof(element))


def _shuffle(builder, x, y, order):
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), len(order)), list(order)))


def _sum_of_pairs(builder, x, y, lanes):
    """Of x and y one after the other, elements 0 and 1, 2 and 3, and so on. Never reordered: equal rows, equal bits."""
    evens, odds = (_shuffle(builder, x, y, range(start, 2 * lanes, 2)) for start in (0, 1))
    return builder.fadd(evens, odds)


@intrinsic
def _product(typing_context, a, i, b, j):
    """Sum of a[i + n] * b[j + n] over n < LANES, of contiguous arrays taken flat."""

    def generate(context, builder, signature, arguments):
        left, right = (
            _load(context, builder, signature, arguments, which, arguments[which + 1], LANES)[1] for which in (0, 2)
        )
        total = builder.fmul(left, right)
        for _ in range(2):
            total = _sum_of_pairs(builder, total, total, LANES)
        return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))

    return a.dtype(a, int64, b, int64), generate


@intrinsic
def _products(typing_context, a, i, b, j, keys, p, result):
    """result[p + n] = <a[i + n], b[j + keys[p + n]]> for n < ROWS, of rows of LANES elements."""

    def generate(context, builder, signature, arguments):
        def load(which, index, lanes):
            return _load(context, builder, signature, arguments, which, index, lanes)

        def number(n):
            return ir.Constant(ir.IntType(64), n)

        rows = []
        for n in range(ROWS):
            key = builder.sext(load(4, builder.add(arguments[5], number(n)), 1)[1], ir.IntType(64))
            rows.append(load(2, builder.mul(builder.add(arguments[3], key), number(LANES)), LANES)[1])
        while len(rows) > LANES:
            rows = [
                _shuffle(builder, x, y, range(2 * x.type.count)) for x, y in zip(rows[::2], rows[1::2], strict=True)
            ]
        for n, right in enumerate(rows):
            left = load(0, builder.mul(builder.add(arguments[1], number(n * LANES)), number(LANES)), ROWS)[1]
            rows[n] = builder.fmul(left, right)
        while len(rows) > 1:
            rows = [_sum_of_pairs(builder, x, y, ROWS) for x, y in zip(rows[::2], rows[1::2], strict=True)]
        place, _ = load(6, arguments[5], ROWS)
        builder.store(rows[0], place, align=context.get_abi_sizeof(place.type.pointee.element))
        return context.get_dummy_value()

    return none(a, int64, b, int64, keys, int64, result), generate


@compiled
def dot(a, i, b, j):
    """<a[i], b[j]>"""
    width, total = a.shape[1], a.dtype.type(0)
    if width == LANES:  # the compiler's own loop would take few elements one by one
        return _product(a, i * LANES, b, j * LANES)
    for e in range(width):
        total += a[i, e] * b[j, e]
    return total


@compiled
def narrow_dots(a, i, b, j, keys, result, size):
    """result[p] = <a[i + p], b[j + keys[p]]> for p < size, of rows of LANES elements; the bits of `dot`."""
    whole = size // ROWS * ROWS
    for p in range(0, whole, ROWS):
        _products(a, i + p, b, j, keys, p, result)
    for p in range(whole, size):
        result[p] = dot(a, i + p, b, j + keys[p])


@compiled
def coordinates(index, extent, stride, coordinate, size):
    """One coordinate of each index. By float64, exact below 2^31 and quick: no vector unit divides integers."""
    inner, outer = 1.0 / stride, 1.0 / (stride * extent)
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
    power = series * _power_of_two(np.int32(n))
    return power if x > LEAST else (np.float32(0) if x <= LEAST else x)


def exp(x):
    """exp of a number that is at most 0, or NaN."""


@overload(exp)
def _exp(x):
    return (lambda x: _exp32(x)) if x == float32 else (lambda x: math.exp(x))


@intrinsic
def _power_of_two(typing_context, n):
    """2^n as float32, n from -126 to 127."""

    def generate(context, builder, signature, arguments):
        biased = builder.add(arguments[0], ir.Constant(ir.IntType(32), 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(ir.IntType(32), 23)), ir.FloatType())

    return float32(int32), generate


@compiled
def add(a, i, factor, b, j):
    """a[i] += factor * b[j]"""
    for e in range(a.shape[1]):
        a[i, e] += factor * b[j, e]
