"""Geometry in Triton: queries in tiles, flat keys to coordinates without divisions, rows of features.

A kernel gets a grid pair as `geometry(...)`: extents q0..q3 and k0..k3, and `magic` numbers to divide by k1..k3.
Unused trailing axes are 1; RANK says how many count.
"""

# Kernels carry no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

GEOMETRY = ("q0", "q1", "q2", "q3", "k0", "k1", "k2", "k3", "m1", "m2", "m3")


def magic(d: int) -> int:
    """factor << 6 | bits with n // d == 2 * n * factor >> 32 >> bits for 0 <= n < 2**31. Always an int64 to Triton."""
    bits = (d - 1).bit_length()
    return -(-(1 << (31 + bits)) // d) << 6 | bits


@lru_cache(maxsize=256)
def geometry(query_grid: tuple[int, ...], key_grid: tuple[int, ...]) -> tuple[int, ...]:
    pad = (1,) * (4 - len(key_grid))
    keys = (*key_grid, *pad)
    return (*query_grid, *pad, *keys, magic(keys[1]), magic(keys[2]), magic(keys[3]))


def tile_shape(lanes: int, rank: int) -> tuple[int, int, int, int]:
    """A near-cubic tile of `lanes` (a power of two) queries, wider on the last axes; 1 on the axes beyond the rank."""
    bits = lanes.bit_length() - 1
    sides = [1 << (bits + axis) // rank for axis in range(rank)]
    return (*sides, *(1,) * (4 - rank))  # type: ignore[return-value]


def tiles(query_grid: Sequence[int], tile: Sequence[int]) -> int:
    """How many tiles cover the query grid."""
    return math.prod(-(-extent // side) for extent, side in zip(query_grid, tile, strict=False))


def vector(width: int, dtype: torch.dtype) -> int:
    """Elements of an aligned load of at most 16 bytes from rows of `width` elements."""
    return min(16 // dtype.itemsize, width & -width)


@triton.jit
def divide(n, magic):
    """n // d for 0 <= n < 2**31, with magic = magic(d): the high word of one product."""
    high = tl.umulhi(n.to(tl.uint32) * 2, (magic >> 6).to(tl.uint32))
    return (high >> (magic & 63).to(tl.uint32)).to(tl.int32)


@triton.jit
def tile_at(number, QG, RANK: tl.constexpr, TILE: tl.constexpr):
    """Row and corner (c0..c3) of a program's tile of queries; tiles are numbered row-major within rows."""
    corner = ()
    rest = number
    for a in tl.static_range(RANK - 1, -1, -1):
        count = (QG[a] + TILE[a] - 1) // TILE[a]
        corner = ((rest % count) * TILE[a],) + corner  # noqa: RUF005 - Triton knows no unpacking
        rest = rest // count
    return rest, corner


@triton.jit
def lane_place(corner, a: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr):
    """The coordinate of every lane's query on axis a."""
    rest = tl.arange(0, LANES)
    for inner in tl.static_range(RANK - 1, a, -1):
        rest = rest // TILE[inner]
    return corner[a] + rest % TILE[a]


@triton.jit
def lane_query(corner, QG, RANK: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr):
    """The flat query of every lane, and whether it exists."""
    query = tl.zeros([LANES], tl.int32)
    exists = query == 0
    for a in tl.static_range(RANK):
        place = lane_place(corner, a, RANK, TILE, LANES)
        query = query * QG[a] + place
        exists = exists & (place < QG[a])
    return query, exists


@triton.jit
def points(G, RANK: tl.constexpr):
    n = G[0]
    for a in tl.static_range(1, RANK):
        n = n * G[a]
    return n


@triton.jit
def near(x, y, reach, KG, MAGIC, RANK: tl.constexpr):
    """Whether flat keys x and y are at most reach[a] apart on every axis."""
    ok = x == x
    for a in tl.static_range(RANK - 1, -1, -1):
        if a > 0:
            x_up, y_up = divide(x, MAGIC[a]), divide(y, MAGIC[a])
            ok = ok & (tl.abs((x - x_up * KG[a]) - (y - y_up * KG[a])) <= reach[a])
            x, y = x_up, y_up
        else:
            ok = ok & (tl.abs(x - y) <= reach[a])
    return ok


@triton.jit
def features(base, at, exists, E: tl.constexpr, W: tl.constexpr, PIECES: tl.constexpr):
    """Rows base[at] of width E as PIECES blocks [LANES, W] of float32; zeros where a lane does not exist.

    W fixes how many threads share a lane: with few of them little of what is computed per lane is computed twice.
    """
    start = base + at.to(tl.int64)[:, None] * E + tl.arange(0, W)[None, :]
    pieces = ()
    for n in tl.static_range(PIECES):
        here = exists[:, None]
        if (n + 1) * W > E:
            here = here & (n * W + tl.arange(0, W)[None, :] < E)
        pieces += (tl.load(start + n * W, mask=here, other=0.0).to(tl.float32),)
    return pieces


@triton.jit
def dot(x, y, PIECES: tl.constexpr):
    """PIECES blocks [LANES, W] twice -> [LANES]."""
    total = x[0] * y[0]
    for n in tl.static_range(1, PIECES):
        total += x[n] * y[n]
    return tl.sum(total, axis=1)


@triton.jit
def put(base, at, pieces, exists, E: tl.constexpr, W: tl.constexpr, PIECES: tl.constexpr):
    """base[at] = pieces, rounded to base's dtype, for the lanes that exist."""
    for n in tl.static_range(PIECES):
        e = n * W + tl.arange(0, W)[None, :]
        place = base + at.to(tl.int64)[:, None] * E + e
        tl.store(place, pieces[n].to(base.dtype.element_ty), mask=exists[:, None] & (e < E))
