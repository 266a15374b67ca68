"""Sums over the keys of each cluster, in Triton: keys in the order of their labels are cut into equal splits.

A program adds up the keys of its split, one cluster after the other: a segment is what a split has of a cluster.
Segments are added in order: the bits are the same every time. Products of keys and values, which are not of one
cluster, are summed apart, over the keys as they lie. All sums are of keys less the centers that they were
compared with, which lie near their means: one pass has all the digits of two.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..primitives import for_product, load_padded, load_piece, product

CHUNK = tl.constexpr(256)  # clusters that are looked at at a time
LANES = tl.constexpr(16)  # rows of keys that are summed apart
MANY = tl.constexpr(8)  # splits that are loaded at a time


class Segments(NamedTuple):
    """Sums of keys and values less centers; cluster c of split s is segment c + s of a row. Widths are whole pieces."""

    k: Tensor  # float32 [R, C + splits, E]
    v: Tensor  # float32 [R, C + splits, F]
    square: Tensor  # float32 [R, C + splits, E], of squares of the keys
    slope: Tensor  # float32 [R, slope_splits, E, F], of keys times values, over all clusters
    splits: int
    slope_splits: int


class SegmentConfig(NamedTuple):
    """What `segments_kernel` is compiled for."""

    BLOCK_S: int  # keys
    SQUARES: bool  # squares too
    PARTS: int  # programs that share the width


class Statistics(NamedTuple):
    """What becomes of the segments; as in `Clustered`, but for the last two."""

    k: Tensor  # float32 [R, C, E], centers
    v: Tensor  # float32 [R, C, F]
    slope: Tensor  # float32 [R, E, F]
    sizes: Tensor  # int32 [R, C]
    variance: Tensor  # float32 [R, E]
    spreads: Tensor  # float32 [R, C]
    scatter: Tensor  # float32 [R, C, E], sums of squares around the centers, in whole pieces
    scatters: Tensor  # float32 [R, C], of the scores


@triton.jit
def keys_of_split(keys, splits):
    return (keys + splits - 1) // splits


@triton.jit
def cluster_at(start_row, place, count):
    """The cluster of the key at a place of the order. By halves: a bound that is a sum over a block would hide from
    Triton that vectors are contiguous."""
    low = tl.cast(0, tl.int32)
    step = tl.cast(1, tl.int32)
    while step < count:
        step = step * 2
    while step > 0:
        trial = low + step
        ahead = tl.load(start_row + tl.minimum(trial, count))
        low = tl.where((trial < count) & (ahead <= place), trial, low)
        step = step // 2
    return low


@triton.jit
def by_lane(x):
    """Sums of every LANES-th row: [BK, E] -> [LANES, E]; the rows of a thread, so that threads need not meet."""
    return tl.sum(tl.reshape(x, [x.shape[0] // LANES, LANES, x.shape[1]]), 0)


@triton.jit
def segments_kernel(
    source,
    order,
    starting,
    forms,
    segments,
    CONFIG: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
):
    """Program (row, split, piece of the width)."""
    part = tl.program_id(0) % CONFIG.PARTS
    rest = tl.program_id(0) // CONFIG.PARTS
    split = rest % segments.splits
    row = (rest // segments.splits).to(tl.int64)
    piece = tl.minimum(part, E.PIECES - 1)  # of the narrower the last piece comes up again
    value_piece = tl.minimum(part, F.PIECES - 1)
    width = E.BLOCK * E.PIECES
    value_width = F.BLOCK * F.PIECES
    count = forms.count
    keys = source.keys
    start_row = starting + row * (count + 1)
    each = keys_of_split(keys, segments.splits)
    first = split * each
    last = tl.minimum(first + each, tl.load(start_row + count))
    begin_cluster = cluster_at(start_row, first, count)
    end_cluster = cluster_at(start_row, last - 1, count) + 1
    e = piece * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
    f = value_piece * F.BLOCK + tl.arange(0, F.BLOCK)  # [F]
    for c in range(begin_cluster, end_cluster):
        slot = row * forms.padded + c
        center = tl.load(forms.k + slot * width + e)  # [E]
        value = tl.load(forms.v + slot * value_width + f)  # [F]
        begin = tl.maximum(tl.load(start_row + c), first)
        end = tl.minimum(tl.load(start_row + c + 1), last)
        k_sum = tl.zeros([LANES, E.BLOCK], tl.float32)  # [LANES, E]
        v_sum = tl.zeros([LANES, F.BLOCK], tl.float32)  # [LANES, F]
        square = tl.zeros([LANES, E.BLOCK], tl.float32)  # [LANES, E]
        at = begin + tl.arange(0, CONFIG.BLOCK_S)  # [BK]
        key = tl.load(order + row * keys + at, mask=at < end, other=0)  # [BK]
        for place in range(begin, end, CONFIG.BLOCK_S):
            at = place + tl.arange(0, CONFIG.BLOCK_S)  # [BK]
            inside = at < end  # [BK]
            after = at + CONFIG.BLOCK_S  # [BK]
            next_key = tl.load(order + row * keys + after, mask=after < end, other=0)  # [BK]
            k_block = load_piece(source.k + row * keys * E.SIZE, key, inside, piece, E).to(tl.float32)  # [BK, E]
            v_block = load_piece(source.v + row * keys * F.SIZE, key, inside, value_piece, F).to(tl.float32)  # [BK, F]
            k_apart = tl.where(inside[:, None], k_block - center[None, :], 0.0)  # [BK, E]
            v_apart = tl.where(inside[:, None], v_block - value[None, :], 0.0)  # [BK, F]
            k_sum += by_lane(k_apart)
            v_sum += by_lane(v_apart)
            if CONFIG.SQUARES:
                square += by_lane(k_apart * k_apart)
            key = next_key
        segment = row * (count + segments.splits) + c + split
        tl.store(segments.k + segment * width + e, tl.sum(k_sum, 0))  # the same numbers by programs of other pieces
        tl.store(segments.v + segment * value_width + f, tl.sum(v_sum, 0))
        if CONFIG.SQUARES:
            tl.store(segments.square + segment * width + e, tl.sum(square, 0))


class ProductConfig(NamedTuple):
    """What `products_kernel` is compiled for."""

    BLOCK_S: int  # keys
    NARROW: bool  # keys and values of 16 bits: so are what is multiplied


@triton.jit
def apart_from(base, centers, row, at, name, keys, forms, piece, E: tl.constexpr):
    """A piece [BK, E] of keys `at` less the centers of their clusters; zeros where they have none."""
    e = piece * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
    slot = row * forms.padded + tl.maximum(name, 0)  # [BK]
    center = tl.load(centers + slot[:, None] * (E.BLOCK * E.PIECES) + e[None, :])  # [BK, E]
    x = load_piece(base + row * keys * E.SIZE, at, name >= 0, piece, E).to(tl.float32)  # [BK, E]
    return tl.where((name >= 0)[:, None], x - center, 0.0)


@triton.jit
def products_kernel(source, label, forms, segments, CONFIG: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    """Sums of keys times values, both less centers. Program (row, split of the keys, piece of both widths)."""
    value_piece = tl.program_id(0) % F.PIECES
    piece = tl.program_id(0) // F.PIECES % E.PIECES
    rest = tl.program_id(0) // (E.PIECES * F.PIECES)
    split = rest % segments.slope_splits
    row = (rest // segments.slope_splits).to(tl.int64)
    keys = source.keys
    each = keys_of_split(keys, segments.slope_splits)
    first = split * each
    last = tl.minimum(first + each, keys)
    slope = tl.zeros([E.BLOCK, F.BLOCK], tl.float32)  # [E, F]
    at = first + tl.arange(0, CONFIG.BLOCK_S)  # [BK]
    name = tl.load(label + row * keys + at, mask=at < last, other=-1)  # [BK]
    for begin in range(first, last, CONFIG.BLOCK_S):
        at = begin + tl.arange(0, CONFIG.BLOCK_S)  # [BK]
        after = at + CONFIG.BLOCK_S  # [BK]
        next_name = tl.load(label + row * keys + after, mask=after < last, other=-1)  # [BK]
        k_apart = apart_from(source.k, forms.k, row, at, name, keys, forms, piece, E)  # [BK, E]
        v_apart = apart_from(source.v, forms.v, row, at, name, keys, forms, value_piece, F)  # [BK, F]
        if CONFIG.NARROW:
            k_rounded = for_product(k_apart.to(tl.bfloat16))  # [BK, E]
            v_rounded = for_product(v_apart.to(tl.bfloat16))  # [BK, F]
            slope = tl.dot(tl.trans(k_rounded), v_rounded, slope)
        else:
            slope = product(tl.trans(k_apart), v_apart, slope)
        name = next_name
    e = piece * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
    f = value_piece * F.BLOCK + tl.arange(0, F.BLOCK)  # [F]
    place = (row * segments.slope_splits + split) * (E.BLOCK * E.PIECES) + e  # [E]
    tl.store(segments.slope + place[:, None] * (F.BLOCK * F.PIECES) + f[None, :], slope)


@triton.jit
def cluster_segments(at, row, starting, keys, splits, count):
    """Of the clusters `at` the numbers of keys, and the first and last split that have some; all int32 [BC]."""
    exists = at < count  # [BC]
    start_row = starting + row * (count + 1)
    start = tl.load(start_row + at, mask=exists, other=0)  # [BC]
    number = tl.load(start_row + at + 1, mask=exists, other=0) - start  # [BC]
    each = keys_of_split(keys, splits)
    first = start // each  # [BC]
    last = tl.where(number > 0, (start + number - 1) // each, first - 1)  # [BC]
    return number, first, last


@triton.jit
def segment_sum(base, at, row, first, last, segments, count, piece, E: tl.constexpr):
    """Sums of base [R, C + splits, E] over the splits of clusters `at`: [BC, E]."""
    total = tl.zeros([at.shape[0], E.BLOCK], tl.float32)  # [BC, E]
    slot = row * (count + segments.splits) + at + first  # [BC]
    e = piece * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
    for n in range(tl.max(last - first, 0) + 1):
        inside = (first + n <= last)[:, None]  # [BC, 1]
        place = base + (slot + n)[:, None] * (E.BLOCK * E.PIECES) + e[None, :]  # [BC, E]
        total += tl.load(place, mask=inside, other=0.0)
    return total


@triton.jit
def means_kernel(
    starting,
    segments,
    forms,
    metric,
    statistics,
    keys,
    BLOCK_C: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
):
    """The mean key, mean value and number of keys of every cluster, and how they scatter. Program (row, block)."""
    width = E.BLOCK * E.PIECES
    count = forms.count
    blocks = (count + BLOCK_C - 1) // BLOCK_C
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)  # [BC]
    exists = at < count  # [BC]
    number, first, last = cluster_segments(at, row, starting, keys, segments.splits, count)
    slot = row * count + at  # [BC]
    form = row * forms.padded + at  # [BC]
    tl.store(statistics.sizes + slot, number, mask=exists)
    has_keys = (number > 0)[:, None]  # [BC, 1]
    several = (number > 1)[:, None]  # [BC, 1]
    divisor = tl.maximum(number, 1).to(tl.float32)[:, None]  # [BC, 1]
    scatters = tl.zeros([BLOCK_C], tl.float32)  # [BC]
    for n in tl.static_range(tl.constexpr(E.PIECES)):
        e = n * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
        away = segment_sum(segments.k, at, row, first, last, segments, count, n, E) / divisor  # [BC, E]
        mean = tl.where(has_keys, load_padded(forms.k, form, n, E) + away, 0.0)  # [BC, E]
        inside = exists[:, None] & (e < E.SIZE)[None, :]
        tl.store(statistics.k + slot[:, None] * E.SIZE + e[None, :], mean, mask=inside)
        square = segment_sum(segments.square, at, row, first, last, segments, count, n, E)  # [BC, E]
        scatter = tl.where(several, tl.maximum(square - divisor * away * away, 0.0), 0.0)  # [BC, E]
        tl.store(statistics.scatter + slot[:, None] * width + e[None, :], scatter, mask=exists[:, None])
        scatters += tl.sum(scatter * tl.load(metric + (row * width + e) * width + e)[None, :], 1)
    tl.store(statistics.scatters + slot, scatters, mask=exists)
    for n in tl.static_range(tl.constexpr(F.PIECES)):
        f = n * F.BLOCK + tl.arange(0, F.BLOCK)  # [F]
        away = segment_sum(segments.v, at, row, first, last, segments, count, n, F) / divisor  # [BC, F]
        mean = tl.where(has_keys, load_padded(forms.v, form, n, F) + away, 0.0)  # [BC, F]
        inside = exists[:, None] & (f < F.SIZE)[None, :]
        tl.store(statistics.v + slot[:, None] * F.SIZE + f[None, :], mean, mask=inside)


class SlopeConfig(NamedTuple):
    """What `slope_kernel` is compiled for."""

    TILE: int  # features
    VALUE_TILE: int
    BLOCK_C: int  # clusters per product


@triton.jit
def slope_kernel(starting, segments, forms, statistics, CONFIG: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    """Slope, variance and spreads. Program (row, tile of the features, tile of the values).

    The sums around the means are those around the old centers, less what the means are away from these.
    """
    width = E.BLOCK * E.PIECES
    value_width = F.BLOCK * F.PIECES
    tiles = width // CONFIG.TILE
    value_tiles = value_width // CONFIG.VALUE_TILE
    value_tile = tl.program_id(0) % value_tiles
    rest = tl.program_id(0) // value_tiles
    tile = rest % tiles
    row = (rest // tiles).to(tl.int64)
    count = forms.count
    each = 1 / tl.maximum(tl.load(starting + row * (count + 1) + count), 1).to(tl.float32)
    e = tile * CONFIG.TILE + tl.arange(0, CONFIG.TILE)  # [TILE]
    f = value_tile * CONFIG.VALUE_TILE + tl.arange(0, CONFIG.VALUE_TILE)  # [VALUE_TILE]
    slope = tl.zeros([CONFIG.TILE, CONFIG.VALUE_TILE], tl.float32)  # [TILE, VALUE_TILE]
    at = (row * segments.slope_splits * width + e)[:, None] * value_width + f[None, :]  # [TILE, VALUE_TILE]
    for begin in range(0, segments.slope_splits, MANY):
        for n in tl.static_range(MANY):
            inside = (e * 0 + begin + n < segments.slope_splits)[:, None]
            further = tl.cast(begin + n, tl.int64) * (width * value_width)
            slope += tl.load(segments.slope + at + further, mask=inside, other=0.0)
    variance = tl.zeros([CONFIG.TILE], tl.float32)  # [TILE]
    for begin in range(0, count, CONFIG.BLOCK_C):
        c = begin + tl.arange(0, CONFIG.BLOCK_C)  # [BC]
        slot = row * count + c  # [BC]
        form = row * forms.padded + c  # [BC]
        number = tl.load(statistics.sizes + slot, mask=c < count, other=0)  # [BC]
        exists = (number > 0)[:, None]  # [BC, 1]
        inside = exists & (e < E.SIZE)[None, :]  # [BC, TILE]
        center = tl.load(statistics.k + slot[:, None] * E.SIZE + e[None, :], mask=inside, other=0.0)
        k_away = center - tl.load(forms.k + form[:, None] * width + e[None, :], mask=inside, other=0.0)  # [BC, TILE]
        inside = exists & (f < F.SIZE)[None, :]  # [BC, VALUE_TILE]
        value = tl.load(statistics.v + slot[:, None] * F.SIZE + f[None, :], mask=inside, other=0.0)
        v_away = value - tl.load(forms.v + form[:, None] * value_width + f[None, :], mask=inside, other=0.0)
        slope = product(tl.trans(k_away * -number.to(tl.float32)[:, None]), v_away, slope)
        scatter = tl.load(statistics.scatter + slot[:, None] * width + e[None, :], mask=exists, other=0.0)
        variance += tl.sum(scatter, 0)
    inside = (e < E.SIZE)[:, None] & (f < F.SIZE)[None, :]  # [TILE, VALUE_TILE]
    tl.store(statistics.slope + (row * E.SIZE + e)[:, None] * F.SIZE + f[None, :], slope * each, mask=inside)
    # The same numbers by programs of other values.
    tl.store(statistics.variance + row * E.SIZE + e, variance * each, mask=e < E.SIZE)
    if tile + value_tile == 0:
        total = tl.zeros([CHUNK], tl.float32)  # [CHUNK]
        for begin in range(0, count, CHUNK):
            c = begin + tl.arange(0, CHUNK)  # [CHUNK]
            total += tl.load(statistics.scatters + row * count + c, mask=c < count, other=0.0)
        mean = tl.sum(total, 0) * each
        factor = tl.where(mean > 0, 1 / tl.where(mean > 0, mean, 1.0), 0.0)
        for begin in range(0, count, CHUNK):
            c = begin + tl.arange(0, CHUNK)  # [CHUNK]
            number = tl.load(statistics.sizes + row * count + c, mask=c < count, other=1)  # [CHUNK]
            own = tl.load(statistics.scatters + row * count + c, mask=c < count, other=0.0)  # [CHUNK]
            spread = own / tl.maximum(number, 1).to(tl.float32) * factor
            tl.store(statistics.spreads + row * count + c, spread, mask=c < count)
