"""Geometry in Triton: queries in tiles, flat keys to coordinates without divisions, rows of features."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .runtime.launch import cached


class Geometry(NamedTuple):
    """The pair of grids of a call, one int per axis in each field."""

    q: tuple[int, ...]  # extents of the query grid
    k: tuple[int, ...]  # extents of the key grid
    magic: tuple[int, ...]  # to divide by the extents of the key grid


class KeyMask(NamedTuple):
    """Which keys may be taken, as kernels take it."""

    mask: Any  # bool [rows of the mask, M], None: all
    heads: int  # how many rows of queries share a row of the mask


class Block(NamedTuple):
    """The queries of a program, known when compiling."""

    TILE: tuple[int, ...]  # the sides of their tile
    BLOCK_Q: int  # how many


class Row(NamedTuple):
    """How rows of numbers are loaded, known when compiling."""

    E: int  # numbers of a row
    W: int  # numbers of a piece
    PIECES: int


def magic(d: int) -> int:
    """factor << 6 | bits with n // d == 2 * n * factor >> 32 >> bits for 0 <= n < 2**31. Always an int64 to Triton."""
    bits = (d - 1).bit_length()
    return -(-(1 << (31 + bits)) // d) << 6 | bits


@cached
def geometry(query_grid: tuple[int, ...], key_grid: tuple[int, ...]) -> Geometry:
    return Geometry(query_grid, key_grid, tuple(map(magic, key_grid)))


def tile_shape(queries: int, rank: int) -> tuple[int, ...]:
    """A near-cubic tile of that many (a power of two) queries, wider on the last axes."""
    bits = queries.bit_length() - 1
    return tuple(1 << (bits + axis) // rank for axis in range(rank))


def tiles(query_grid: Sequence[int], tile: Sequence[int]) -> int:
    """How many tiles cover the query grid."""
    return math.prod(-(-extent // side) for extent, side in zip(query_grid, tile, strict=True))


def vector(width: int, dtype: torch.dtype) -> int:
    """Elements of an aligned load of at most 16 bytes from rows of `width` elements."""
    return min(16 // dtype.itemsize, width & -width)


@triton.jit
def divide(n, magic):
    """n // d for 0 <= n < 2**31, with magic = magic(d): the high word of one product."""
    high = tl.umulhi(n.to(tl.uint32) * 2, (magic >> 6).to(tl.uint32))
    return (high >> (magic & 63).to(tl.uint32)).to(tl.int32)


@triton.jit
def tile_at(number, geo, B: tl.constexpr):
    """Row and corner, one coordinate per axis, of a program's tile of queries; numbered row-major within rows."""
    corner = ()
    rest = number
    for a in tl.static_range(len(geo.q) - 1, -1, -1):
        count = (geo.q[a] + B.TILE[a] - 1) // B.TILE[a]
        corner = ((rest % count) * B.TILE[a],) + corner  # noqa: RUF005 - Triton knows no unpacking
        rest = rest // count
    return rest, corner


@triton.jit
def tile_count(geo, B: tl.constexpr):
    """Tiles of a row."""
    n = (geo.q[0] + B.TILE[0] - 1) // B.TILE[0]
    for a in tl.static_range(1, len(geo.q)):
        n = n * ((geo.q[a] + B.TILE[a] - 1) // B.TILE[a])
    return n


@triton.jit
def lane_place(corner, a: tl.constexpr, B: tl.constexpr):
    """The coordinate of every query of a tile on axis a."""
    rest = tl.arange(0, B.BLOCK_Q)
    for inner in tl.static_range(len(corner) - 1, a, -1):
        rest = rest // B.TILE[inner]
    return corner[a] + rest % B.TILE[a]


@triton.jit
def lane_query(corner, geo, B: tl.constexpr):
    """The flat index of every query of a tile, and whether it exists."""
    query = tl.zeros([B.BLOCK_Q], tl.int32)
    exists = query == 0
    for a in tl.static_range(len(corner)):
        place = lane_place(corner, a, B)
        query = query * geo.q[a] + place
        exists = exists & (place < geo.q[a])
    return query, exists


@triton.jit
def points(G):
    """How many points a grid of these extents has."""
    n = tl.cast(G[0], tl.int32)
    for a in tl.static_range(1, len(G)):
        n = n * G[a]
    return n


@triton.jit
def near(x, y, reach, geo):
    """Whether flat keys x and y are at most reach[a] apart on every axis."""
    ok = x == x
    for a in tl.static_range(len(geo.k) - 1, -1, -1):
        if a > 0:
            x_up, y_up = divide(x, geo.magic[a]), divide(y, geo.magic[a])
            ok = ok & (tl.abs((x - x_up * geo.k[a]) - (y - y_up * geo.k[a])) <= reach[a])
            x, y = x_up, y_up
        else:
            ok = ok & (tl.abs(x - y) <= reach[a])
    return ok


@triton.jit
def features(base, at, exists, ROW: tl.constexpr):
    """Rows base[at] as PIECES blocks [BLOCK_Q, W] of float32; zeros where `exists` is False.

    W fixes how many threads share a query: with few of them little of what is computed per query is computed twice.
    """
    start = base + at.to(tl.int64)[:, None] * ROW.E + tl.arange(0, ROW.W)[None, :]
    pieces = ()
    for n in tl.static_range(ROW.PIECES):
        here = exists[:, None]
        if (n + 1) * ROW.W > ROW.E:
            here = here & (n * ROW.W + tl.arange(0, ROW.W)[None, :] < ROW.E)
        pieces += (tl.load(start + n * ROW.W, mask=here, other=0.0).to(tl.float32),)
    return pieces


@triton.jit
def dot(x, y):
    """Rows as tuples of blocks [BLOCK_Q, W], twice -> [BLOCK_Q]."""
    total = x[0] * y[0]
    for n in tl.static_range(1, len(x)):
        total += x[n] * y[n]
    return tl.sum(total, axis=1)


@triton.jit
def put(base, at, pieces, exists, ROW: tl.constexpr):
    """base[at] = pieces, rounded to base's dtype, where `exists`."""
    for n in tl.static_range(len(pieces)):
        e = n * ROW.W + tl.arange(0, ROW.W)[None, :]
        place = base + at.to(tl.int64)[:, None] * ROW.E + e
        tl.store(place, pieces[n].to(base.dtype.element_ty), mask=exists[:, None] & (e < ROW.E))
