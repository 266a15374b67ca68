"""Products and transposed copies of matrices by one thread, in tiles that registers hold. Arrays are contiguous; the
widths of those that lie along the vector units are multiples of LANES.

Rows are taken four at a time; where some are missing at the end, the last one stands for them. Parts of arrays are
named by numbers instead of slices: those take long to compile.
"""

import numpy as np

from ..._compat.numba import (
    LANES,
    TILE_BYTES,
    TILE_ROWS,
    added_narrow_tile_of_columns,
    added_narrow_tile_of_rows,
    added_tile_of_columns,
    added_tile_of_rows,
    narrow_tile_of_rows,
    prefetch,
    tile_of_rows,
    tile_to_columns,
    tile_to_rows,
)
from .compiled import compiled


@compiled
def _four(i, last):
    """The rows from i on, none after the last."""
    return i, min(i + 1, last), min(i + 2, last), min(i + 3, last)


@compiled
def _listed(at, rows, first):
    """What a list says of four rows."""
    return (
        np.int64(first + at[rows[0]]),
        np.int64(first + at[rows[1]]),
        np.int64(first + at[rows[2]]),
        np.int64(first + at[rows[3]]),
    )


@compiled
def _places(rows, width, p):
    """Where element p of four rows lies in a matrix."""
    return rows[0] * width + p, rows[1] * width + p, rows[2] * width + p, rows[3] * width + p


@compiled
def fetch_row(x, row):
    """Fetch a row of a matrix into the cache: rows that are listed are far apart."""
    for e in range(0, x.shape[1], LANES):
        prefetch(x, row * x.shape[1] + e)


@compiled
def multiply(a, first, at, begin, number, b, b_row, c, c_row):
    """c[c_row + i, p] = the sum over j of a[first + at[begin + i], j] * b[b_row + j, p], for i < number."""
    depth = a.shape[1]
    size = b.shape[1]
    lanes = max(LANES, TILE_BYTES // b.itemsize)
    whole = size // lanes * lanes
    for i in range(0, number, TILE_ROWS):
        rows = _four(i, number - 1)
        starts = _places(_listed(at, _places(rows, 1, begin), first), depth, 0)
        for n in range(i + TILE_ROWS, min(i + 2 * TILE_ROWS, number)):
            fetch_row(a, first + at[begin + n])
        for p in range(0, whole, lanes):
            to = _places(rows, c.shape[1], c_row * c.shape[1] + p)
            tile_of_rows(a, starts, at, 0, b, b_row * size + p, size, c, to, 0, depth)
        for p in range(whole, size, LANES):
            to = _places(rows, c.shape[1], c_row * c.shape[1] + p)
            narrow_tile_of_rows(a, starts, at, 0, b, b_row * size + p, size, c, to, 0, depth)


@compiled
def add_columns(a, first, at, begin, number, b, b_row, c, c_row):
    """c[c_row + i, p] += sum over j < number of a[first + at[begin + j], i] * b[b_row + j, p], for i < a.shape[1]."""
    width = a.shape[1]
    size = b.shape[1]
    lanes = max(LANES, TILE_BYTES // b.itemsize)
    whole = size // lanes * lanes
    b_first = (b_row - begin) * size
    for i in range(0, width, TILE_ROWS):
        rows = _four(i, width - 1)
        starts = _places(rows, 1, first * width)
        for p in range(0, whole, lanes):
            to = _places(rows, c.shape[1], c_row * c.shape[1] + p)
            added_tile_of_columns(a, starts, at, width, b, b_first + p, size, c, to, begin, begin + number)
        for p in range(whole, size, LANES):
            to = _places(rows, c.shape[1], c_row * c.shape[1] + p)
            added_narrow_tile_of_columns(a, starts, at, width, b, b_first + p, size, c, to, begin, begin + number)


@compiled
def add_rows(a, a_row, depth, b, b_column, c, first, at, begin, number):
    """c[first + at[begin + i], p] += the sum over j < depth of a[a_row + i, j] * b[j, b_column + p], for i < number.

    p goes up to the width of c. No row is listed twice.
    """
    size = c.shape[1]
    lanes = max(LANES, TILE_BYTES // b.itemsize)
    whole = size // lanes * lanes
    for i in range(0, number, TILE_ROWS):
        rows = _four(i, number - 1)
        starts = _places(rows, a.shape[1], a_row * a.shape[1])
        sums = _listed(at, _places(rows, 1, begin), first)
        for p in range(0, whole, lanes):
            to = _places(sums, size, p)
            added_tile_of_rows(a, starts, at, 0, b, b_column + p, b.shape[1], c, to, 0, depth)
        for p in range(whole, size, LANES):
            to = _places(sums, size, p)
            added_narrow_tile_of_rows(a, starts, at, 0, b, b_column + p, b.shape[1], c, to, 0, depth)


@compiled
def add_guarded_columns(a, first, at, begin, number, b, b_row, c, c_row):
    """As `add_columns`, where a 0 in b lets no NaN or infinity of a through."""
    for j in range(number):
        for i in range(a.shape[1]):
            factor = a[first + at[begin + j], i]
            for p in range(b.shape[1]):
                c[c_row + i, p] += factor * b[b_row + j, p] if b[b_row + j, p] != 0 else c.dtype.type(0)


@compiled
def add_guarded_rows(a, a_row, depth, b, b_column, c, first, at, begin, number):
    """As `add_rows`, where a 0 in a lets no NaN or infinity of b through."""
    for i in range(number):
        for j in range(depth):
            factor = a[a_row + i, j]
            if factor != 0:
                for p in range(c.shape[1]):
                    c[first + at[begin + i], p] += factor * b[j, b_column + p]


@compiled
def to_columns(x, first, at, begin, number, y, y_row):
    """y[y_row + e, p] = x[first + at[begin + p], e] for p < number, and 0 for p up to the width of y."""
    width = x.shape[1]
    size = y.shape[1]
    wide = width // LANES * LANES
    whole = number // LANES * LANES
    for p in range(0, whole, LANES):
        for e in range(0, wide, LANES):
            tile_to_columns(x, first, at, begin + p, width, e, y, (y_row + e) * size + p, size)
    for p in range(number):
        for e in range(wide if p < whole else 0, width):
            y[y_row + e, p] = x[first + at[begin + p], e]
    for p in range(number, size):
        for e in range(width):
            y[y_row + e, p] = 0


@compiled
def to_rows(y, y_row, x, first, at, begin, number):
    """The inverse: x[first + at[begin + p], e] = y[y_row + e, p] for p < number."""
    width = x.shape[1]
    size = y.shape[1]
    wide = width // LANES * LANES
    whole = number // LANES * LANES
    for p in range(0, whole, LANES):
        for e in range(0, wide, LANES):
            tile_to_rows(x, first, at, begin + p, width, e, y, (y_row + e) * size + p, size)
    for p in range(number):
        for e in range(wide if p < whole else 0, width):
            x[first + at[begin + p], e] = y[y_row + e, p]
