"""Where keys are clustered, in Triton: `clustering.Space` of every row, and the keys that k-means starts from.

Sums over the sample are made in splits by programs of their own and added in order: the bits are the same every time.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ....spec.clustering import START_EVEN, START_MOST, VALUE_WEIGHT
from ..primitives import for_product, load_piece, product, softmax_step
from .sample import FEW

WEIGHT = tl.constexpr(VALUE_WEIGHT)
MOST = tl.constexpr(START_MOST)
EVEN = tl.constexpr(START_EVEN)
MANY = tl.constexpr(4)  # parts that are loaded at a time; there is a whole multiple of them
METRIC_ROWS = 16  # of a program that adds up the metric


class Moments(NamedTuple):
    """Sums over the sample in splits, of keys and values less the first key and value; widths are whole pieces."""

    square: Tensor  # float32 [R, splits, E, E]
    k_sum: Tensor  # float32 [R, splits, E]
    v_sum: Tensor  # float32 [R, splits, F]
    v_square: Tensor  # float32 [R, splits, F]
    number: Tensor  # float32 [R, splits]
    splits: int


class Space(NamedTuple):
    """Distances of each row, `clustering.Space`; widths are whole pieces."""

    metric: Tensor  # float32 [R, E, E]
    k_mean: Tensor  # float32 [R, E]
    v_mean: Tensor  # float32 [R, F]
    spread: Tensor  # float32 [R, tiles], variance of the scores, by METRIC_ROWS rows of the metric
    variance: Tensor  # float32 [R], of the values
    tiles: int


class SpaceConfig(NamedTuple):
    """What the kernels here are compiled for. Widths are whole multiples of D and FD."""

    WIDTH: int  # of the keys
    D: int  # features of one product
    VALUE_WIDTH: int
    FD: int
    ROWS: int  # METRIC_ROWS
    BLOCK_S: int  # keys of a block of the moments
    BLOCK_Q: int  # queries of a block
    BLOCK_RATE: int  # keys of a block of the rates
    NARROW: bool  # keys of 16 bits: so are their squares
    SAMPLED: int  # places for all keys of the sample


@triton.jit
def value_weight(space, row):
    """What a squared distance of values counts, and the squared distance above which a key is far from its center."""
    by_scores = tl.zeros([64], tl.float32)  # [64]
    for begin in range(0, space.tiles, 64):
        tile = begin + tl.arange(0, 64)  # [64]
        by_scores += tl.load(space.spread + row * space.tiles + tile, mask=tile < space.tiles, other=0.0)
    spread = tl.maximum(tl.sum(by_scores, 0), 0.0)
    variance = tl.load(space.variance + row)
    share = tl.where(spread > 0, WEIGHT * spread, 1.0)  # values alone where all scores are equal
    weight = tl.where(variance > 0, share / tl.where(variance > 0, variance, 1.0), 0.0)
    weight = tl.where(weight < float("inf"), weight, 0.0)  # values near the least number have no part
    return weight, 1e-6 * (spread + weight * variance)


@triton.jit
def parts_sum(base, stride, parts, place):
    """The sum over `parts`, a multiple of MANY, of base[part * stride + place]."""
    total = tl.load(base + place)
    for n in tl.static_range(1, MANY):
        total += tl.load(base + n * stride + place)
    for begin in range(MANY, parts, MANY):
        for n in tl.static_range(MANY):
            total += tl.load(base + (begin + n) * stride + place)
    return total


@triton.jit
def first_piece(base, some, sample, row, piece, E: tl.constexpr):
    """A piece [1, E] of the first key or value of a row, which is taken off all: what they share costs no digits."""
    one = tl.arange(0, 1)  # [1]
    exists = tl.load(sample.valid + row * some.keys + one) > 0
    return load_piece(base + row * some.keys * E.SIZE, one, exists, piece, E).to(tl.float32)


@triton.jit
def add_moments(number, some, sample, moments, CONFIG: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    """Program (row, split of the sample, piece of the keys, other piece)."""
    other = number % E.PIECES
    piece = number // E.PIECES % E.PIECES
    rest = number // (E.PIECES * E.PIECES)
    split = rest % moments.splits
    row = (rest // moments.splits).to(tl.int64)
    slot = row * moments.splits + split
    keys = some.keys
    each = (keys + CONFIG.BLOCK_S * moments.splits - 1) // (CONFIG.BLOCK_S * moments.splits) * CONFIG.BLOCK_S
    first = split * each
    last = tl.minimum(first + each, keys)
    k_row = some.k + row * keys * E.SIZE
    v_row = some.v + row * keys * F.SIZE
    k_first = first_piece(some.k, some, sample, row, piece, E)  # [1, E]
    k_other = first_piece(some.k, some, sample, row, other, E)  # [1, E]
    square = tl.zeros([E.BLOCK, E.BLOCK], tl.float32)  # [E, E]
    k_sum = tl.zeros([E.BLOCK], tl.float32)  # [E]
    valid_keys = tl.zeros([CONFIG.BLOCK_S], tl.float32)  # [BK]
    for begin in range(first, last, CONFIG.BLOCK_S):
        at = begin + tl.arange(0, CONFIG.BLOCK_S)  # [BK]
        valid = tl.load(sample.valid + row * keys + at, mask=at < last, other=0.0)  # [BK]
        exists = valid > 0
        x = load_piece(k_row, at, exists, piece, E).to(tl.float32)  # [BK, E]
        x = tl.where(exists[:, None], x - k_first, 0.0)
        y = x  # [BK, E]
        if E.PIECES > 1:
            y = load_piece(k_row, at, exists, other, E).to(tl.float32)
            y = tl.where(exists[:, None], y - k_other, 0.0)
        k_sum += tl.sum(x, 0)
        valid_keys += valid
        if CONFIG.NARROW:
            square = tl.dot(for_product(tl.trans(x.to(tl.bfloat16))), for_product(y.to(tl.bfloat16)), square)
        else:
            square = product(tl.trans(x), y, square)
    i = piece * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
    j = other * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
    tl.store(moments.square + (slot * CONFIG.WIDTH + i)[:, None] * CONFIG.WIDTH + j[None, :], square)
    tl.store(moments.k_sum + slot * CONFIG.WIDTH + i, k_sum)  # the same numbers by programs of other pieces
    tl.store(moments.number + slot, tl.sum(valid_keys, 0))
    if piece + other == 0:
        for n in tl.static_range(tl.constexpr(F.PIECES)):
            v_first = first_piece(some.v, some, sample, row, n, F)  # [1, F]
            v_sum = tl.zeros([F.BLOCK], tl.float32)  # [F]
            v_square = tl.zeros([F.BLOCK], tl.float32)  # [F]
            for begin in range(first, last, CONFIG.BLOCK_S):
                at = begin + tl.arange(0, CONFIG.BLOCK_S)  # [BK]
                exists = tl.load(sample.valid + row * keys + at, mask=at < last, other=0.0) > 0  # [BK]
                z = load_piece(v_row, at, exists, n, F).to(tl.float32)  # [BK, F]
                z = tl.where(exists[:, None], z - v_first, 0.0)
                v_sum += tl.sum(z, 0)
                v_square += tl.sum(z * z, 0)
            f = n * F.BLOCK + tl.arange(0, F.BLOCK)  # [F]
            tl.store(moments.v_sum + slot * CONFIG.VALUE_WIDTH + f, v_sum)
            tl.store(moments.v_square + slot * CONFIG.VALUE_WIDTH + f, v_square)


@triton.jit
def set_clocks(number, sample, queries, keys, CONFIG: tl.constexpr):
    """Clocks of a block of keys by the rates at which they are drawn: the attention of a few queries. (row, block)"""
    blocks = (keys + CONFIG.BLOCK_RATE - 1) // CONFIG.BLOCK_RATE
    row = (number // blocks).to(tl.int64)
    at = number % blocks * CONFIG.BLOCK_RATE + tl.arange(0, CONFIG.BLOCK_RATE)  # [BK]
    inside = at < keys  # [BK]
    lane = tl.arange(0, FEW)  # [FEW]
    few = tl.minimum(queries, FEW)
    running_max = tl.full([FEW], -float("inf"), tl.float32)  # [FEW]
    running_sum = tl.zeros([FEW], tl.float32)  # [FEW]
    for begin in range(0, sample.blocks, 32):
        n = begin + tl.arange(0, 32)  # [32]
        slot = (row * sample.blocks + n)[:, None] * FEW + lane[None, :]  # [32, FEW]
        exists = (n < sample.blocks)[:, None]  # [32, 1]
        block_max = tl.load(sample.block_max + slot, mask=exists, other=-float("inf"))  # [32, FEW]
        block_sum = tl.load(sample.block_sum + slot, mask=exists, other=0.0)  # [32, FEW]
        running_max, rescale, p = softmax_step(running_max, block_max, None, "exp", True, 0)
        running_sum = running_sum * rescale + tl.sum(block_sum * p, 0)
    base = tl.where(running_max > -float("inf"), running_max, 0.0)  # [FEW]
    norm = tl.where(running_sum > 0, running_sum, 1.0)  # [FEW]
    slot = row * keys + at  # [BK]
    scores = sample.scores + slot[:, None] * FEW + lane[None, :]  # [BK, FEW]
    s = tl.load(scores, mask=inside[:, None], other=-float("inf"))  # [BK, FEW]
    share = tl.minimum(tl.exp(s - base[None, :]) / norm[None, :], MOST)  # [BK, FEW]
    share = tl.where((lane < few)[None, :], share, 0.0)
    rate = tl.sum(share, 1) / tl.maximum(few, 1) + EVEN / keys  # [BK]
    clock = tl.load(sample.clock + slot, mask=inside, other=0.0)  # [BK]
    valid = tl.load(sample.valid + slot, mask=inside, other=0.0) > 0  # [BK]
    tl.store(sample.clock + slot, tl.where(valid, clock / rate, float("inf")), mask=inside)


@triton.jit
def moments_kernel(some, sample, moments, queries, rows, CONFIG: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    """Moments of the sample, then the clocks of its keys: neither reads the other."""
    first = rows * moments.splits * (E.PIECES * E.PIECES)
    if tl.program_id(0) < first:
        add_moments(tl.program_id(0), some, sample, moments, CONFIG, E, F)
    else:
        set_clocks(tl.program_id(0) - first, sample, queries, some.keys, CONFIG)


@triton.jit
def covariance(moments, row, i, j, each, CONFIG: tl.constexpr):
    """Of features i and j of the keys: [len(i), len(j)]; `each`: 1 / their number."""
    width = CONFIG.WIDTH
    sums = moments.k_sum + row * moments.splits * width
    i_mean = parts_sum(sums, width, moments.splits, i) * each  # [len(i)]
    j_mean = parts_sum(sums, width, moments.splits, j) * each  # [len(j)]
    squares = moments.square + row * moments.splits * (width * width)
    both = parts_sum(squares, width * width, moments.splits, i[:, None] * width + j[None, :])  # [len(i), len(j)]
    return both * each - i_mean[:, None] * j_mean[None, :]


@triton.jit
def share_of_key(moments, row):
    """1 / the number of keys of the sample."""
    return 1 / tl.maximum(parts_sum(moments.number + row * moments.splits, 1, moments.splits, 0), 1.0)


@triton.jit
def add_metric(number, sample, moments, metrics, query_splits, queries, CONFIG: tl.constexpr):
    """The sums of q q^T of the weighted queries: `metrics` [R, splits, E, E]. Program (row, block of queries)."""
    row = (number // query_splits).to(tl.int64)
    block = number % query_splits
    each = share_of_key(moments, row)
    at = block * CONFIG.BLOCK_Q + tl.arange(0, CONFIG.BLOCK_Q)  # [BQ]
    q_row = sample.q + (row * queries + at)[:, None] * CONFIG.WIDTH
    exists = (at < queries)[:, None]  # [BQ, 1]
    variance = tl.zeros([CONFIG.BLOCK_Q], tl.float32)  # [BQ], of the scores of a query
    for a in range(0, CONFIG.WIDTH, CONFIG.D):
        i = a + tl.arange(0, CONFIG.D)  # [D]
        acc = tl.zeros([CONFIG.BLOCK_Q, CONFIG.D], tl.float32)  # [BQ, D]
        for b in range(0, CONFIG.WIDTH, CONFIG.D):
            j = b + tl.arange(0, CONFIG.D)  # [D]
            q_block = tl.load(q_row + j[None, :], mask=exists, other=0.0)  # [BQ, D]
            acc = product(q_block, covariance(moments, row, j, i, each, CONFIG), acc)
        variance += tl.sum(acc * tl.load(q_row + i[None, :], mask=exists, other=0.0), 1)
    weight = tl.rsqrt(1 + tl.maximum(variance, 0.0))[:, None]  # [BQ, 1]
    part = metrics + (row * query_splits + block) * (CONFIG.WIDTH * CONFIG.WIDTH)
    for a in range(0, CONFIG.WIDTH, CONFIG.D):
        i = a + tl.arange(0, CONFIG.D)  # [D]
        q_trans = tl.trans(weight * tl.load(q_row + i[None, :], mask=exists, other=0.0))  # [D, BQ]
        for b in range(0, CONFIG.WIDTH, CONFIG.D):
            j = b + tl.arange(0, CONFIG.D)  # [D]
            q_block = weight * tl.load(q_row + j[None, :], mask=exists, other=0.0)  # [BQ, D]
            acc = product(q_trans, q_block, tl.zeros([CONFIG.D, CONFIG.D], tl.float32))  # [D, D]
            tl.store(part + i[:, None] * CONFIG.WIDTH + j[None, :], acc)


@triton.jit
def choose_starts(row, sample, place, count, keys, CONFIG: tl.constexpr):
    """The `count` keys of the sample whose clocks ring first, ascending: `place` int32 [R, C]. Program: row."""
    lane = tl.arange(0, CONFIG.SAMPLED)  # [S]
    clock = tl.load(sample.clock + row * keys + lane, mask=lane < keys, other=float("inf"))  # [S]
    bits = clock.to(tl.int32, bitcast=True)  # in the order of the clocks, which are not negative
    last = tl.max(bits * 0, 0)
    for n in range(31):  # the largest number that has less than `count` below it, from its highest bit on
        trial = last + (1 << (30 - n))
        last = tl.where(tl.sum((bits < trial).to(tl.int32), 0) < count, trial, last)
    below = (bits < last).to(tl.int32)  # [S]
    equal = (bits == last).to(tl.int32)  # [S]
    chosen = (below > 0) | ((equal > 0) & (tl.cumsum(equal, 0) <= count - tl.sum(below, 0)))  # [S]
    slot = tl.cumsum(chosen.to(tl.int32), 0) - 1  # [S]
    tl.store(place + row * count + slot, lane, mask=chosen)


@triton.jit
def metric_kernel(sample, moments, metrics, query_splits, queries, place, count, keys, rows, CONFIG: tl.constexpr):
    """Parts of the metric, then where k-means starts: neither reads the other."""
    first = rows * query_splits
    if tl.program_id(0) < first:
        add_metric(tl.program_id(0), sample, moments, metrics, query_splits, queries, CONFIG)
    else:
        choose_starts((tl.program_id(0) - first).to(tl.int64), sample, place, count, keys, CONFIG)


@triton.jit
def space_kernel(
    some,
    sample,
    moments,
    metrics,
    query_splits,
    queries,
    space,
    CONFIG: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
):
    """Program (row, some rows of the metric); the first of a row has the values as well."""
    width = CONFIG.WIDTH
    row = (tl.program_id(0) // space.tiles).to(tl.int64)
    tile = tl.program_id(0) % space.tiles
    each = share_of_key(moments, row)
    i = tile * CONFIG.ROWS + tl.arange(0, CONFIG.ROWS)  # [ROWS]
    parts = metrics + row * query_splits * (width * width)
    spread = tl.zeros([CONFIG.ROWS], tl.float32)  # [ROWS]
    for b in range(0, width, CONFIG.D):
        j = b + tl.arange(0, CONFIG.D)  # [D]
        at = i[:, None] * width + j[None, :]  # [ROWS, D]
        metric = parts_sum(parts, width * width, query_splits, at) / tl.maximum(queries, 1)  # [ROWS, D]
        tl.store(space.metric + row * (width * width) + at, metric)
        spread += tl.sum(metric * covariance(moments, row, i, j, each, CONFIG), 1)
    tl.store(space.spread + row * space.tiles + tile, tl.sum(spread, 0))
    exists = (tl.load(sample.valid + row * some.keys + i * 0) > 0) & (i < E.SIZE)  # [ROWS]
    first = tl.load(some.k + row * some.keys * E.SIZE + i, mask=exists, other=0.0).to(tl.float32)  # [ROWS]
    mean = parts_sum(moments.k_sum + row * moments.splits * width, width, moments.splits, i) * each  # [ROWS]
    tl.store(space.k_mean + row * width + i, mean + first)
    if tile == 0:
        value_width = CONFIG.VALUE_WIDTH
        variance = tl.zeros([CONFIG.FD], tl.float32)  # [FD]
        for a in range(0, value_width, CONFIG.FD):
            f = a + tl.arange(0, CONFIG.FD)  # [FD]
            sums = row * moments.splits * value_width
            v_mean = parts_sum(moments.v_sum + sums, value_width, moments.splits, f) * each  # [FD]
            square = parts_sum(moments.v_square + sums, value_width, moments.splits, f) * each  # [FD]
            variance += square - v_mean * v_mean
            is_value = (tl.load(sample.valid + row * some.keys + f * 0) > 0) & (f < F.SIZE)  # [FD]
            value = tl.load(some.v + row * some.keys * F.SIZE + f, mask=is_value, other=0.0)  # [FD]
            tl.store(space.v_mean + row * value_width + f, v_mean + value.to(tl.float32))
        tl.store(space.variance + row, tl.maximum(tl.sum(variance, 0), 0.0))
