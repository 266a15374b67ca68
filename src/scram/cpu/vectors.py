"""Small arithmetic that vector units can do: products of rows [points, width], coordinates, exp."""

# Numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba.core.cgutils import create_struct_proxy
from numba.core.types import float32, int32, int64
from numba.extending import intrinsic, overload

from .compiled import compiled, plain

LANES = 4  # narrower rows are padded to as many elements
LEAST = np.float32(-87)  # exp of less counts as 0
HALF, INVERSE_LN2 = np.float32(0.5), np.float32(1 / math.log(2))
LN2_HIGH = np.float32(0.693359375)  # few bits: its product with n is exact
LN2_LOW = np.float32(math.log(2) - 0.693359375)
SERIES = tuple(np.float32(1 / math.factorial(n)) for n in range(7, -1, -1))


@intrinsic
def _product(typing_context, a, i, b, j):
    """Sum of a[i + n] * b[j + n] over n < LANES, of contiguous arrays taken flat."""

    def generate(context, builder, signature, arguments):
        element = context.get_data_type(signature.return_type)
        block = ir.VectorType(element, LANES)
        factors = []
        for array, index in (0, 1), (2, 3):
            data = create_struct_proxy(signature.args[array])(context, builder, value=arguments[array]).data
            place = builder.bitcast(builder.gep(data, [arguments[index]], inbounds=True), block.as_pointer())
            factors.append(builder.load(place, align=context.get_abi_sizeof(element)))
        kind = "f32" if element == ir.FloatType() else "f64"
        add_up = ir.FunctionType(element, (element, block))
        function = builder.module.declare_intrinsic(f"llvm.vector.reduce.fadd.v{LANES}{kind}", (), add_up)
        start, products = ir.Constant(element, 0.0), builder.fmul(*factors, flags=("contract",))
        return builder.call(function, (start, products), fastmath=("reassoc",))

    return a.dtype(a, int64, b, int64), generate


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
