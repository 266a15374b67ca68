"""What the kernels share: geometry of grids, tiles and windows, vectors in pieces, products, the online softmax.

Blocks have the shapes of the comments behind them: BQ queries, BK keys or clusters, E and F the widths of features and
values. A width is loaded in pieces of E.BLOCK or F.BLOCK numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...spec.schedule import TILE_QUERIES, tile_shape
from .noise import Seed, absorb, below_argument, row_state, seed_argument
from .runtime.launch import INTERPRETED, cached

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e38)  # where a maximum begins: -inf - -inf would be NaN
WIDEN = tl.constexpr(INTERPRETED)  # Triton's interpreter multiplies no bfloat16


class Geometry(NamedTuple):
    """The pair of grids of a call, one int per axis in each field."""

    q: tuple[int, ...]  # extents of the query grid
    k: tuple[int, ...]  # extents of the key grid
    magic: tuple[int, ...]  # to divide by the extents of the key grid


class KeyMask(NamedTuple):
    """Which keys a mask allows, as kernels take it."""

    mask: Any  # bool [rows of the mask, M], None: all
    group: int  # rows of queries that share a row of the mask


class RoutedClusters(NamedTuple):
    """The clusters whose keys the tile of a query attends elsewhere, as kernels take them."""

    label: Any  # int32 [rows of clusters, M], the cluster of each key; None: no key is left out
    routes: Any  # int32 [rows, tiles, words], a bit for each cluster
    group: int  # rows of queries that share a row of clusters
    words: int
    bits: Any  # of a place within a tile, one int per axis


UNROUTED = RoutedClusters(None, None, 1, 1, None)


class MatchWindows(NamedTuple):
    """The windows around the matches of all queries, as kernels take them."""

    index: Any  # int32 [B, H, *G, kappa]; None without matches
    masked: KeyMask
    geo: Geometry
    reach: tuple[int, ...]  # the radius on each axis, less than its extent
    kappa: int  # matches of a query
    routed: RoutedClusters = UNROUTED


class Dropout(NamedTuple):
    """Dropout of weights, as kernels take it."""

    seed: Seed
    threshold: int  # a pair whose noise lies below is dropped
    keep: float  # 1 / (1 - dropout_p)


class Block(NamedTuple):
    """The queries of a program, known when compiling."""

    TILE: tuple[int, ...]  # the sides of their tile
    BLOCK_Q: int  # how many


class Width(NamedTuple):
    """How vectors of features or values are loaded, known when compiling."""

    SIZE: int  # numbers of a vector
    BLOCK: int  # numbers of a piece
    PIECES: int


class QueryBlock(NamedTuple):
    """Some queries of a row, in a kernel."""

    query: Any  # int32 [BQ], flat
    exists: Any  # bool [BQ]
    index_row: Any  # pointer to the row of matches
    mask_row: Any  # the number of the row of the mask, int64
    row: Any  # its number


UNMASKED = KeyMask(None, 1)


# What the host makes.


def magic(d: int) -> int:
    """factor << 6 | bits with n // d == 2 * n * factor >> 32 >> bits for 0 <= n < 2**31. Always an int64 to Triton."""
    bits = (d - 1).bit_length()
    return -(-(1 << (31 + bits)) // d) << 6 | bits


@cached
def geometry(query_grid: tuple[int, ...], key_grid: tuple[int, ...]) -> Geometry:
    return Geometry(query_grid, key_grid, tuple(map(magic, key_grid)))


@cached
def reaches(radius: tuple[int, ...], key_grid: tuple[int, ...]) -> tuple[int, ...]:
    """The radius, less than the extent on every axis."""
    return tuple(min(b, extent - 1) for b, extent in zip(radius, key_grid, strict=True))


def block_shape(queries: int, rank: int) -> tuple[int, ...]:
    """A near-cubic tile of that many (a power of two) queries, wider on the last axes."""
    bits = queries.bit_length() - 1
    return tuple(1 << (bits + axis) // rank for axis in range(rank))


def tile_block(rank: int) -> Block:
    """A tile of `schedule` as the queries of a program."""
    return Block(tile_shape(rank), TILE_QUERIES)


def tiles(query_grid: Sequence[int], tile: Sequence[int]) -> int:
    """How many tiles cover the query grid."""
    return math.prod(-(-extent // side) for extent, side in zip(query_grid, tile, strict=True))


def vector(width: int, dtype: torch.dtype) -> int:
    """Elements of an aligned load of at most 16 bytes from vectors of `width` elements."""
    return min(16 // dtype.itemsize, width & -width)


def mask_argument(q: Tensor, k: Tensor, key_mask: Tensor | None) -> KeyMask:
    """key_mask bool [B, *G'] or [B, H, *G']."""
    if key_mask is None:
        return UNMASKED
    return KeyMask(key_mask.contiguous(), q.shape[1] if key_mask.ndim == k.ndim - 2 else 1)


def routed_argument(q: Tensor, label: Tensor | None, routes: Tensor | None) -> RoutedClusters:
    """label int32 [B, Hc, *G'], routes int32 [B, H, T, W]."""
    if label is None or routes is None:
        return UNROUTED
    bits = tuple(side.bit_length() - 1 for side in tile_shape(q.ndim - 3))
    group = q.shape[1] // label.shape[1]
    return RoutedClusters(label.contiguous(), routes.contiguous(), group, routes.shape[-1], bits)


def dropout_argument(seed: Tensor | None, dropout_p: float, rows: Tensor | None) -> Dropout:
    """rows int [B, H], the numbers of the rows of queries, None for their own."""
    return Dropout(seed_argument(seed, rows), below_argument(dropout_p), 1 / (1 - dropout_p))


# Geometry: flat keys to coordinates without divisions, queries in tiles.


@triton.jit
def divide(n, magic):
    """n // d for 0 <= n < 2**31, with magic = magic(d): the high word of one product."""
    high = tl.umulhi(n.to(tl.uint32) * 2, (magic >> 6).to(tl.uint32))
    return (high >> (magic & 63).to(tl.uint32)).to(tl.int32)


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
            x_rest = divide(x, geo.magic[a])
            y_rest = divide(y, geo.magic[a])
            ok = ok & (tl.abs((x - x_rest * geo.k[a]) - (y - y_rest * geo.k[a])) <= reach[a])
            x = x_rest
            y = y_rest
        else:
            ok = ok & (tl.abs(x - y) <= reach[a])
    return ok


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
def tile_of(query, geo, bits):
    """The number within its row of the tile of each query [BQ], of sides 2 ** bits; and how many tiles a row has."""
    tile = query * 0  # [BQ]
    stride = 1
    rest = query  # [BQ]
    for a in tl.static_range(len(geo.q) - 1, -1, -1):
        up = rest // geo.q[a] if a > 0 else rest * 0
        tile += ((rest - up * geo.q[a]) >> bits[a]) * stride
        stride = stride * (((geo.q[a] - 1) >> bits[a]) + 1)
        rest = up
    return tile, stride


@triton.jit
def lane_place(corner, a: tl.constexpr, B: tl.constexpr):
    """The coordinate of every query of a tile on axis a."""
    rest = tl.arange(0, B.BLOCK_Q)  # [BQ]
    for inner in tl.static_range(len(corner) - 1, a, -1):
        rest = rest // B.TILE[inner]
    return corner[a] + rest % B.TILE[a]


@triton.jit
def lane_query(corner, geo, B: tl.constexpr):
    """The flat index of every query of a tile, and whether it exists."""
    query = tl.zeros([B.BLOCK_Q], tl.int32)  # [BQ]
    exists = query == 0  # [BQ]
    for a in tl.static_range(len(corner)):
        place = lane_place(corner, a, B)  # [BQ]
        query = query * geo.q[a] + place
        exists = exists & (place < geo.q[a])
    return query, exists


# Windows: the keys around a match.


@triton.jit
def window_size(reach):
    n = 2 * reach[0] + 1
    for a in tl.static_range(1, len(reach)):
        n = n * (2 * reach[a] + 1)
    return n


@triton.jit
def first_offset(reach):
    """Where a walk through a window begins, as an offset from its center on every axis."""
    offset = ()
    for a in tl.static_range(len(reach)):
        offset += (-tl.cast(reach[a], tl.int32),)
    return offset


@triton.jit
def next_offset(offset, reach):
    """The next place of a walk, row-major: counting up takes a fifth of the instructions of dividing a number."""
    moved = ()
    carry = 1
    for a in tl.static_range(len(reach) - 1, -1, -1):
        place = offset[a] + carry
        carry = (place > reach[a]).to(tl.int32)
        moved = (tl.where(carry > 0, -reach[a], place),) + moved  # noqa: RUF005 - Triton knows no unpacking
    return moved


@triton.jit
def offset_of(number, reach):
    """The place `number`, row-major."""
    offset = ()
    for a in tl.static_range(len(reach) - 1, -1, -1):
        offset = (number % (2 * reach[a] + 1) - reach[a],) + offset  # noqa: RUF005 - Triton knows no unpacking
        number = number // (2 * reach[a] + 1)
    return offset


@triton.jit
def window_key(match, offset, geo):
    """The key at an offset from each match [BQ], and whether it lies on the grid."""
    rest = match
    key = match
    stride = 1
    ok = match >= 0
    for a in tl.static_range(len(geo.k) - 1, -1, -1):
        up = divide(rest, geo.magic[a]) if a > 0 else rest * 0
        ok = ok & ((rest - up * geo.k[a] + offset[a]).to(tl.uint32) < tl.cast(geo.k[a], tl.uint32))
        key += offset[a] * stride
        rest = up
        stride = stride * geo.k[a]
    return key, ok


@triton.jit
def unmasked(key, ok, mask_row, masked, geo):
    """Where `ok` also holds whether the mask allows a key."""
    if masked.mask is not None:
        ok = ok & (tl.load(masked.mask + mask_row * points(geo.k) + key, mask=ok, other=0) != 0)
    return ok


@triton.jit
def unrouted(key, ok, row, query, routed, geo):
    """Where `ok` also holds whether the tile of a query of a row leaves out the cluster of a key."""
    if routed.label is not None:
        label_row = routed.label + (row // routed.group).to(tl.int64) * points(geo.k)
        cluster = tl.load(label_row + key, mask=ok, other=-1)  # [BQ]
        tile, count = tile_of(query, geo, routed.bits)
        words = routed.routes + (tl.cast(row, tl.int64) * count + tile) * routed.words  # [BQ]
        exists = ok & (cluster >= 0) & (cluster < 32 * routed.words)  # [BQ]
        word = tl.load(words + (cluster >> 5), mask=exists, other=0)  # [BQ]
        ok = ok & (((word >> (cluster & 31)) & 1) == 0)
    return ok


@triton.jit
def match_of(e, ok, query_block, windows):
    """Match e of each query [BQ], -1 for none; what is off the grid is none. Read where `ok`."""
    place = query_block.index_row + query_block.query.to(tl.int64) * windows.kappa + e
    match = tl.load(place, mask=ok, other=-1)  # [BQ]
    return tl.where(match < points(windows.geo.k), match, -1)


@triton.jit
def attended_key(match, e, offset, query_block, windows, CAUSAL: tl.constexpr, SEVERAL: tl.constexpr):
    """The key [BQ] at `offset` in window e, and whether it counts: it is allowed, and in no window before e."""
    key, ok = window_key(match, offset, windows.geo)
    ok = ok & query_block.exists
    if CAUSAL:
        ok = ok & (key <= query_block.query)
    ok = unmasked(key, ok, query_block.mask_row, windows.masked, windows.geo)
    ok = unrouted(key, ok, query_block.row, query_block.query, windows.routed, windows.geo)
    if SEVERAL:
        for before in range(e):
            earlier = match_of(before, ok, query_block, windows)  # [BQ]
            ok = ok & ~((earlier >= 0) & near(key, tl.maximum(earlier, 0), windows.reach, windows.geo))
    return key, ok


# Vectors of features and values, in pieces.


@triton.jit
def load_piece(base, at, exists, piece, E: tl.constexpr):
    """Piece number `piece` of the vectors base[at]: [len(at), E.BLOCK]; zeros where `exists` is False."""
    e = piece * E.BLOCK + tl.arange(0, E.BLOCK)[None, :]  # [1, E]
    inside = exists[:, None]
    if E.SIZE != E.BLOCK:
        inside = inside & (e < E.SIZE)
    return tl.load(base + at.to(tl.int64)[:, None] * E.SIZE + e, mask=inside, other=0.0)


@triton.jit
def load_pieces(base, at, exists, E: tl.constexpr):
    """All pieces of the vectors base[at]."""
    pieces = ()
    for n in tl.static_range(tl.constexpr(E.PIECES)):
        pieces += (load_piece(base, at, exists, n, E),)
    return pieces


@triton.jit
def load_padded(base, at, piece, E: tl.constexpr):
    """Piece number `piece` of the vectors base[at], which are padded to whole pieces: [len(at), E.BLOCK]."""
    return tl.load(base + at[:, None] * (E.BLOCK * E.PIECES) + (piece * E.BLOCK + tl.arange(0, E.BLOCK))[None, :])


@triton.jit
def load_float32(base, at, exists, E: tl.constexpr):
    """All pieces [BQ, E.BLOCK] of the vectors base[at], as float32; zeros where `exists` is False.

    E.BLOCK fixes how many threads share a query: with few of them little of what is computed per query is computed
    twice.
    """
    start = base + at.to(tl.int64)[:, None] * E.SIZE + tl.arange(0, E.BLOCK)[None, :]  # [BQ, E]
    pieces = ()
    for n in tl.static_range(E.PIECES):
        inside = exists[:, None]
        if (n + 1) * E.BLOCK > E.SIZE:
            inside = inside & (n * E.BLOCK + tl.arange(0, E.BLOCK)[None, :] < E.SIZE)
        pieces += (tl.load(start + n * E.BLOCK, mask=inside, other=0.0).to(tl.float32),)
    return pieces


@triton.jit
def store_pieces(base, at, pieces, exists, E: tl.constexpr):
    """base[at] = pieces, rounded to base's dtype, where `exists`."""
    for n in tl.static_range(len(pieces)):
        e = n * E.BLOCK + tl.arange(0, E.BLOCK)[None, :]  # [1, E]
        place = base + at.to(tl.int64)[:, None] * E.SIZE + e
        tl.store(place, pieces[n].to(base.dtype.element_ty), mask=exists[:, None] & (e < E.SIZE))


@triton.jit
def store_piece(base, at, exists, piece, x, PARTS: tl.constexpr, ADD: tl.constexpr, E: tl.constexpr):
    """A piece of the vectors base[at], plus x by atomics, or x where the vectors are the program's own.

    PARTS programs share the wider of features and values; of the narrower some have no piece.
    """
    e = piece * E.BLOCK + tl.arange(0, E.BLOCK)[None, :]  # [1, E]
    inside = exists[:, None]
    if E.SIZE != E.BLOCK or PARTS > 1:
        inside = inside & (e < E.SIZE)
    place = base + at.to(tl.int64)[:, None] * E.SIZE + e
    if ADD:
        tl.atomic_add(place, x, mask=inside, sem="relaxed")
    else:
        tl.store(place, x.to(base.dtype.element_ty), mask=inside)


@triton.jit
def zero_pieces(BLOCK: tl.constexpr, E: tl.constexpr):
    """Vectors of zeros in pieces [BLOCK, E.BLOCK]."""
    pieces = ()
    for _ in tl.static_range(tl.constexpr(E.PIECES)):
        pieces += (tl.zeros([BLOCK, E.BLOCK], tl.float32),)
    return pieces


@triton.jit
def add_scaled(sums, factor, pieces):
    """sums + factor * pieces, factor [BQ]."""
    more = ()
    for n in tl.static_range(len(sums)):
        more += (sums[n] + factor[:, None] * pieces[n],)
    return more


@triton.jit
def atomic_add_scaled(base, at, factor, pieces, ok, E: tl.constexpr):
    """base[at] += factor * pieces, atomically, where `ok`."""
    for n in tl.static_range(len(pieces)):
        e = n * E.BLOCK + tl.arange(0, E.BLOCK)[None, :]  # [1, E]
        place = base + at.to(tl.int64)[:, None] * E.SIZE + e
        tl.atomic_add(place, factor[:, None] * pieces[n], mask=ok[:, None] & (e < E.SIZE), sem="relaxed")


# Products, and numbers that are not finite.


@triton.jit
def dot(x, y):
    """Vectors as tuples of pieces [BQ, E.BLOCK], twice -> [BQ]."""
    total = x[0] * y[0]  # [BQ, E]
    for n in tl.static_range(1, len(x)):
        total += x[n] * y[n]
    return tl.sum(total, axis=1)


@triton.jit
def for_product(x):
    """x as `product` takes it: Triton's interpreter multiplies no bfloat16."""
    return x.to(tl.float32) if WIDEN and x.dtype == tl.bfloat16 else x


@triton.jit
def product(a, b, acc):
    """acc + a @ b; float32 to nearly all of its digits."""
    return tl.dot(for_product(a), for_product(b), acc, input_precision="tf32x3")


@triton.jit
def fine_product(a, b, acc, NARROW: tl.constexpr):
    """acc + a @ b, where a is float32 and b may not be; of NARROW features a keeps twice the digits of b."""
    if NARROW:
        if b.dtype == tl.bfloat16:  # cut off, not rounded: that takes a fourth of the time, and the rest has all digits
            high = (a.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        else:
            high = a.to(b.dtype).to(tl.float32)
        acc = product((a - high).to(b.dtype), b, acc)
        acc = product(high.to(b.dtype), b, acc)
    else:
        acc = product(a.to(b.dtype), b, acc)
    return acc


@triton.jit
def fp16_scale_of(slope_bound, scale, FP16_SCALE: tl.constexpr):
    """A power of two that lifts slopes of at most `slope_bound` off the smallest numbers of float16, of few digits.

    The largest becomes 2^12 to 2^13; 2^16 would be too large.
    """
    factor = 1.0
    if FP16_SCALE:
        largest = tl.max(tl.where(slope_bound < float("inf"), slope_bound, 0.0), 0) * tl.abs(scale)
        factor = tl.exp2(12.0 - tl.floor(tl.log2(tl.minimum(tl.maximum(largest, 2.0**-100), 2.0**100))))
    return factor


@triton.jit
def is_finite(x):
    return tl.abs(x.to(tl.float32)) < float("inf")


@triton.jit
def finite(x):
    """x with zeros for what is not finite."""
    return tl.where(is_finite(x), x, 0.0).to(x.dtype)


@triton.jit
def all_finite(pieces):
    """Which vectors have nothing that is not finite."""
    ok = tl.min(tl.where(is_finite(pieces[0]), 1, 0), 1) > 0
    for n in tl.static_range(1, len(pieces)):
        ok = ok & (tl.min(tl.where(is_finite(pieces[n]), 1, 0), 1) > 0)
    return ok


# Softmax.


@triton.jit
def powers(s, base):
    """exp(s - base), exactly 1 for s = base; tl.exp would spend as much again on results below 1e-38."""
    return tl.exp2((s - base) * LOG2E)


@triton.jit
def power(s, base, POWER: tl.constexpr):
    """exp(s - base) by tl.exp for "exp", by `powers` for "powers"; 2 ** (s - base) for "exp2".

    "exp2" is for scores that were multiplied by LOG2E, which is one instruction with the difference and not rounded.
    Where it is, as in Triton's interpreter, a large score loses digits: hence for features of 16 bits only.
    """
    if POWER == "exp":
        x = tl.exp(s - base)
    elif POWER == "exp2":
        x = tl.exp2(s - base)
    else:
        x = powers(s, base)
    return x


@triton.jit
def softmax_step(running_max, s, scale, POWER: tl.constexpr, FROM_INF: tl.constexpr, AXIS: tl.constexpr):
    """One step of the online softmax, the only one of the engine: scores `scale` s of some more keys.

    running_max [BQ]; s has the keys on AXIS, or is one key per query, [BQ], where AXIS is None. `scale` None: 1.
    FROM_INF: a maximum begins with -inf, not with LOWEST. Returns the new maximum, what sums so far are multiplied by,
    and the weights of these keys over the new maximum.
    """
    block_max = s if AXIS is None else tl.max(s, AXIS)  # [BQ]
    if scale is not None:
        block_max = block_max * scale
    new_max = tl.maximum(running_max, block_max)  # [BQ]
    base = tl.where(new_max == -float("inf"), 0.0, new_max) if FROM_INF else new_max  # -inf - -inf is NaN
    rescale = power(running_max, base, POWER)  # [BQ]
    if scale is not None:
        s = s * scale
    p = power(s, base if AXIS is None else tl.expand_dims(base, AXIS), POWER)  # [BQ, BK] or [BQ]
    return new_max, rescale, p


@triton.jit
def join_lse(running_max, running_sum, has_keys, offset, near_lse):
    """The joint softmax of a tail and of the windows, whose log-sum-exp is `near_lse`; all [BQ].

    All is over exp(running_max): it may be large and would take the digits of what is added. `offset` is added to the
    log of the tail's sum. Returns the factors of the tail's `powers` and of the windows' output, running_max or 0 for
    none, and the log2 of the sum.
    """
    running_max = tl.where(running_max == LOWEST, 0.0, running_max)
    tail_log2 = tl.where(has_keys, tl.log2(tl.where(has_keys, running_sum, 1.0)) + offset * LOG2E, -float("inf"))
    near_log2 = (near_lse - running_max) * LOG2E
    larger = tl.maximum(tail_log2, near_log2)
    larger = tl.where(larger == -float("inf"), 0.0, larger)
    empty = ~has_keys & (near_log2 == -float("inf"))
    norm = tl.log2(tl.where(empty, 1.0, tl.exp2(tail_log2 - larger) + tl.exp2(near_log2 - larger))) + larger
    factor = tl.where(has_keys, tl.exp2(offset * LOG2E - norm), 0.0)
    return factor, tl.exp2(near_log2 - norm), running_max, tl.where(empty, -float("inf"), norm)


# Dropout: the noise of a pair of query and key.


@triton.jit
def dropout_noise(dropout, row, query):
    """The noise [BQ] of the queries of a row."""
    return absorb(row_state(dropout.seed, row), query)


@triton.jit
def dropped(p, name, noise, dropout, DROPOUT: tl.constexpr):
    """Weights after dropout; `name` is the key's number."""
    if DROPOUT:
        p = tl.where(absorb(noise, name) >= tl.cast(dropout.threshold, tl.uint32), p * dropout.keep, 0.0)
    return p


@triton.jit
def dropout_factor(name, noise, dropout, DROPOUT: tl.constexpr):
    """What dropout multiplies a weight by."""
    factor = (name * 0 + 1).to(tl.float32)
    if DROPOUT:
        factor = tl.where(absorb(noise, name) >= tl.cast(dropout.threshold, tl.uint32), dropout.keep, 0.0)
    return factor
