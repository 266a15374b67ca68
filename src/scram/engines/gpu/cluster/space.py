"""Where keys are clustered, in Triton: `clustering.Space` of every row, and the keys that k-means starts from.

Moments of the sample are one product of torch, in splits; kernels add them up, in the same order every time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....clustering import START_EVEN, START_MOST, START_QUERIES, VALUE_WEIGHT
from ..cluster.sample import Sample
from ..drawn_tail.shared_keys import product

MOST_SPLITS = 16  # of the sample of a row, so that its moments are many products that run at the same time
WEIGHT, MOST, EVEN, FEW = (tl.constexpr(x) for x in (VALUE_WEIGHT, START_MOST, START_EVEN, START_QUERIES))


class Space(NamedTuple):
    """Distances of each row, `clustering.Space`; widths are whole pieces."""

    metric: Tensor  # float32 [R, E, E]
    k_mean: Tensor  # float32 [R, E]
    v_mean: Tensor  # float32 [R, F]
    weight: Tensor  # float32 [R]
    least: Tensor  # float32 [R], squared distance above which a key is far from its centre


class SpaceMode(NamedTuple):
    """What the kernels here are compiled for. Widths are whole multiples of D and FD."""

    WIDTH: int  # of the keys
    D: int  # features of one product
    VALUE_WIDTH: int
    FD: int
    BLOCK_S: int  # keys or queries of a block


class Paid(NamedTuple):
    """Of the attention of a few queries to the sample: by blocks of keys, float32 [R, blocks, START_QUERIES]."""

    top: Tensor  # largest score
    total: Tensor  # sum of exp(score - top)


def moments_of(sample: Sample, rows: int) -> Tensor:
    """Sums of the products of all columns of `Sample.joint`, in splits: float32 [R, splits, width, width]."""
    keys, width = sample.joint.shape[1:]
    most = max(1, min(MOST_SPLITS, 64 // rows))
    splits = next(n for n in (16, 8, 4, 2, 1) if n <= most and keys % n == 0)
    parts = sample.joint.view(rows * splits, keys // splits, width)
    return torch.bmm(parts.mT, parts).view(rows, splits, width, width)


@triton.jit
def moment(moments, splits, row, i, j, MODE: tl.constexpr):
    """The sums of columns i times columns j, over all splits."""
    width = MODE.WIDTH + MODE.VALUE_WIDTH + 1
    at = moments + row * splits * (width * width) + i * width + j
    total = tl.load(at)
    for split in range(1, splits):
        total += tl.load(at + split * (width * width))
    return total


@triton.jit
def covariance(moments, splits, row, i, j, each, MODE: tl.constexpr):
    """Of features i and j of the keys: [len(i), len(j)]; `each`: 1 / their number."""
    last = MODE.WIDTH + MODE.VALUE_WIDTH
    own = moment(moments, splits, row, i, last, MODE) * each
    other = moment(moments, splits, row, j, last, MODE) * each
    both = moment(moments, splits, row, i[:, None], j[None, :], MODE) * each
    return both - own[:, None] * other[None, :]


@triton.jit
def metric_kernel(moments, splits, sample, parts, queries, MODE: tl.constexpr):
    """The sums of q q^T of the weighted queries: `parts` [R, blocks, E, E]. Program (row, block of queries)."""
    blocks, last = sample.query_blocks, MODE.WIDTH + MODE.VALUE_WIDTH
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    each = 1 / tl.maximum(moment(moments, splits, row, last, last, MODE), 1.0)
    at = block * MODE.BLOCK_S + tl.arange(0, MODE.BLOCK_S)
    q, there = sample.q + (row * queries + at)[:, None] * MODE.WIDTH, (at < queries)[:, None]
    spread = tl.zeros([MODE.BLOCK_S], tl.float32)
    for a in range(0, MODE.WIDTH, MODE.D):
        i = a + tl.arange(0, MODE.D)
        total = tl.zeros([MODE.BLOCK_S, MODE.D], tl.float32)
        for b in range(0, MODE.WIDTH, MODE.D):
            j = b + tl.arange(0, MODE.D)
            theirs = tl.load(q + j[None, :], mask=there, other=0.0)
            total = product(theirs, covariance(moments, splits, row, j, i, each, MODE), total)
        spread += tl.sum(total * tl.load(q + i[None, :], mask=there, other=0.0), 1)
    weight = (1 / (1 + tl.maximum(spread, 0.0)))[:, None]
    to = parts + (row * blocks + block) * (MODE.WIDTH * MODE.WIDTH)
    for a in range(0, MODE.WIDTH, MODE.D):
        i = a + tl.arange(0, MODE.D)
        mine = tl.trans(weight * tl.load(q + i[None, :], mask=there, other=0.0))
        for b in range(0, MODE.WIDTH, MODE.D):
            j = b + tl.arange(0, MODE.D)
            theirs = weight * tl.load(q + j[None, :], mask=there, other=0.0)
            total = product(mine, theirs, tl.zeros([MODE.D, MODE.D], tl.float32))
            tl.store(to + i[:, None] * MODE.WIDTH + j[None, :], total)


@triton.jit
def space_kernel(moments, splits, sample, parts, queries, space, MODE: tl.constexpr):
    """Program: row."""
    row, last = tl.program_id(0).to(tl.int64), MODE.WIDTH + MODE.VALUE_WIDTH
    each = 1 / tl.maximum(moment(moments, splits, row, last, last, MODE), 1.0)
    spread, variance = tl.zeros([MODE.D], tl.float32), tl.zeros([MODE.FD], tl.float32)
    blocks, whole = sample.query_blocks, MODE.WIDTH * MODE.WIDTH
    for a in range(0, MODE.WIDTH, MODE.D):
        i = a + tl.arange(0, MODE.D)
        mean = moment(moments, splits, row, i, last, MODE) * each
        tl.store(space.k_mean + row * MODE.WIDTH + i, mean + tl.load(sample.first + row * last + i))
        for b in range(0, MODE.WIDTH, MODE.D):
            j = b + tl.arange(0, MODE.D)
            metric, at = tl.zeros([MODE.D, MODE.D], tl.float32), i[:, None] * MODE.WIDTH + j[None, :]
            for block in range(blocks):
                metric += tl.load(parts + (row * blocks + block) * whole + at)
            metric = metric / queries
            tl.store(space.metric + row * whole + at, metric)
            spread += tl.sum(metric * covariance(moments, splits, row, i, j, each, MODE), 1)
    for a in range(0, MODE.VALUE_WIDTH, MODE.FD):
        f = a + tl.arange(0, MODE.FD)
        at = MODE.WIDTH + f
        mean = moment(moments, splits, row, at, last, MODE) * each
        variance += moment(moments, splits, row, at, at, MODE) * each - mean * mean
        tl.store(space.v_mean + row * MODE.VALUE_WIDTH + f, mean + tl.load(sample.first + row * last + at))
    by_scores, by_values = tl.maximum(tl.sum(spread, 0), 0.0), tl.maximum(tl.sum(variance, 0), 0.0)
    share = tl.where(by_scores > 0, WEIGHT * by_scores, 1.0)  # values alone where all scores are equal
    weight = tl.where(by_values > 0, share / tl.where(by_values > 0, by_values, 1.0), 0.0)
    tl.store(space.weight + row, weight)
    tl.store(space.least + row, 1e-6 * (by_scores + weight * by_values))


@triton.jit
def paid_kernel(sample, paid, queries, keys, MODE: tl.constexpr, LAST: tl.constexpr):
    """Of the attention that a few queries pay a block of keys, its largest score and sum; with LAST, when all blocks
    have theirs, the clocks of the keys by the rates at which they are drawn. Program (row, block of keys)."""
    row, block = (tl.program_id(0) // sample.blocks).to(tl.int64), tl.program_id(0) % sample.blocks
    at, lane, few = block * MODE.BLOCK_S + tl.arange(0, MODE.BLOCK_S), tl.arange(0, FEW), tl.minimum(queries, FEW)
    width = MODE.WIDTH + MODE.VALUE_WIDTH + 1
    some, mine, inside = lane < few, row * queries + lane * tl.maximum(queries // FEW, 1), at < keys
    theirs = sample.joint + (row * keys + at) * width
    there = tl.load(theirs + width - 1, mask=inside, other=0.0) > 0
    s = tl.zeros([FEW, MODE.BLOCK_S], tl.float32)
    for a in range(0, MODE.WIDTH, MODE.D):
        e = (a + tl.arange(0, MODE.D))[None, :]
        q = tl.load(sample.q + mine[:, None] * MODE.WIDTH + e, mask=some[:, None], other=0.0)
        s = product(q, tl.trans(tl.load(theirs[:, None] + e, mask=inside[:, None], other=0.0)), s)
    s = tl.where(there[None, :], s, -float("inf"))
    if not LAST:
        top = tl.max(s, 1)
        slot = (row * sample.blocks + block) * FEW + lane
        tl.store(paid.top + slot, top)
        tl.store(paid.total + slot, tl.sum(tl.exp(s - tl.where(top > -float("inf"), top, 0.0)[:, None]), 1))
    else:
        top, total = tl.full([FEW], -float("inf"), tl.float32), tl.zeros([FEW], tl.float32)
        for begin in range(0, sample.blocks, 32):
            n = begin + tl.arange(0, 32)
            slot = (row * sample.blocks + n)[:, None] * FEW + lane[None, :]
            found = tl.load(paid.top + slot, mask=(n < sample.blocks)[:, None], other=-float("inf"))
            sums = tl.load(paid.total + slot, mask=(n < sample.blocks)[:, None], other=0.0)
            higher = tl.maximum(top, tl.max(found, 0))
            base = tl.where(higher > -float("inf"), higher, 0.0)
            total = total * tl.exp(top - base) + tl.sum(sums * tl.exp(found - base[None, :]), 0)
            top = higher
        base, total = tl.where(top > -float("inf"), top, 0.0), tl.where(total > 0, total, 1.0)
        share = tl.minimum(tl.exp(s - base[:, None]) / total[:, None], MOST)
        rate = tl.sum(tl.where(some[:, None] & there[None, :], share, 0.0), 0) / few + EVEN / keys
        slot = row * keys + at
        clock = tl.load(sample.clock + slot, mask=inside, other=0.0)
        tl.store(sample.clock + slot, tl.where(there, clock / rate, float("inf")), mask=inside)
