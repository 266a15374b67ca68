"""Where keys are clustered, in Triton: `clustering.Space` of every row, and the keys that k-means starts from.

Moments of the sample are one product of torch, in splits; kernels add them up, in the same order every time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....spec.clustering import START_EVEN, START_MOST, START_QUERIES, VALUE_WEIGHT
from ..primitives import product, softmax_step
from .sample import Sample

MOST_SPLITS = 16  # of the sample of a row, so that its moments are many products that run at the same time
WEIGHT = tl.constexpr(VALUE_WEIGHT)
MOST = tl.constexpr(START_MOST)
EVEN = tl.constexpr(START_EVEN)
FEW = tl.constexpr(START_QUERIES)


class Space(NamedTuple):
    """Distances of each row, `clustering.Space`; widths are whole pieces."""

    metric: Tensor  # float32 [R, E, E]
    k_mean: Tensor  # float32 [R, E]
    v_mean: Tensor  # float32 [R, F]
    weight: Tensor  # float32 [R]
    least: Tensor  # float32 [R], squared distance above which a key is far from its center


class SpaceConfig(NamedTuple):
    """What the kernels here are compiled for. Widths are whole multiples of D and FD."""

    WIDTH: int  # of the keys
    D: int  # features of one product
    VALUE_WIDTH: int
    FD: int
    BLOCK_S: int  # keys or queries of a block


class StartScores(NamedTuple):
    """Of the attention of a few queries to the sample: by blocks of keys, float32 [R, blocks, START_QUERIES]."""

    running_max: Tensor  # largest score
    running_sum: Tensor  # sum of exp(score - running_max)


def moments_of(sample: Sample, rows: int) -> Tensor:
    """Sums of the products of all columns of `Sample.joint`, in splits: float32 [R, splits, width, width]."""
    keys, width = sample.joint.shape[1:]
    most = max(1, min(MOST_SPLITS, 64 // rows))
    splits = next(n for n in (16, 8, 4, 2, 1) if n <= most and keys % n == 0)
    parts = sample.joint.view(rows * splits, keys // splits, width)
    return torch.bmm(parts.mT, parts).view(rows, splits, width, width)


@triton.jit
def moment(moments, splits, row, i, j, CONFIG: tl.constexpr):
    """The sums of columns i times columns j, over all splits."""
    width = CONFIG.WIDTH + CONFIG.VALUE_WIDTH + 1
    place = moments + row * splits * (width * width) + i * width + j
    total = tl.load(place)
    for split in range(1, splits):
        total += tl.load(place + split * (width * width))
    return total


@triton.jit
def covariance(moments, splits, row, i, j, each, CONFIG: tl.constexpr):
    """Of features i and j of the keys: [len(i), len(j)]; `each`: 1 / their number."""
    last = CONFIG.WIDTH + CONFIG.VALUE_WIDTH
    i_mean = moment(moments, splits, row, i, last, CONFIG) * each  # [len(i)]
    j_mean = moment(moments, splits, row, j, last, CONFIG) * each  # [len(j)]
    both = moment(moments, splits, row, i[:, None], j[None, :], CONFIG) * each  # [len(i), len(j)]
    return both - i_mean[:, None] * j_mean[None, :]


@triton.jit
def metric_kernel(moments, splits, sample, parts, queries, CONFIG: tl.constexpr):
    """The sums of q q^T of the weighted queries: `parts` [R, blocks, E, E]. Program (row, block of queries)."""
    blocks = sample.query_blocks
    last = CONFIG.WIDTH + CONFIG.VALUE_WIDTH
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    each = 1 / tl.maximum(moment(moments, splits, row, last, last, CONFIG), 1.0)
    at = block * CONFIG.BLOCK_S + tl.arange(0, CONFIG.BLOCK_S)  # [BQ]
    q_row = sample.q + (row * queries + at)[:, None] * CONFIG.WIDTH
    exists = (at < queries)[:, None]  # [BQ, 1]
    variance = tl.zeros([CONFIG.BLOCK_S], tl.float32)  # [BQ], of the scores of a query
    for a in range(0, CONFIG.WIDTH, CONFIG.D):
        i = a + tl.arange(0, CONFIG.D)  # [D]
        acc = tl.zeros([CONFIG.BLOCK_S, CONFIG.D], tl.float32)  # [BQ, D]
        for b in range(0, CONFIG.WIDTH, CONFIG.D):
            j = b + tl.arange(0, CONFIG.D)  # [D]
            q_block = tl.load(q_row + j[None, :], mask=exists, other=0.0)  # [BQ, D]
            acc = product(q_block, covariance(moments, splits, row, j, i, each, CONFIG), acc)
        variance += tl.sum(acc * tl.load(q_row + i[None, :], mask=exists, other=0.0), 1)
    weight = (1 / (1 + tl.maximum(variance, 0.0)))[:, None]  # [BQ, 1]
    part = parts + (row * blocks + block) * (CONFIG.WIDTH * CONFIG.WIDTH)
    for a in range(0, CONFIG.WIDTH, CONFIG.D):
        i = a + tl.arange(0, CONFIG.D)  # [D]
        q_trans = tl.trans(weight * tl.load(q_row + i[None, :], mask=exists, other=0.0))  # [D, BQ]
        for b in range(0, CONFIG.WIDTH, CONFIG.D):
            j = b + tl.arange(0, CONFIG.D)  # [D]
            q_block = weight * tl.load(q_row + j[None, :], mask=exists, other=0.0)  # [BQ, D]
            acc = product(q_trans, q_block, tl.zeros([CONFIG.D, CONFIG.D], tl.float32))  # [D, D]
            tl.store(part + i[:, None] * CONFIG.WIDTH + j[None, :], acc)


@triton.jit
def space_kernel(moments, splits, sample, parts, queries, space, CONFIG: tl.constexpr):
    """Program: row."""
    row = tl.program_id(0).to(tl.int64)
    last = CONFIG.WIDTH + CONFIG.VALUE_WIDTH
    each = 1 / tl.maximum(moment(moments, splits, row, last, last, CONFIG), 1.0)
    score_variance = tl.zeros([CONFIG.D], tl.float32)  # [D]
    value_variance = tl.zeros([CONFIG.FD], tl.float32)  # [FD]
    blocks = sample.query_blocks
    square = CONFIG.WIDTH * CONFIG.WIDTH
    for a in range(0, CONFIG.WIDTH, CONFIG.D):
        i = a + tl.arange(0, CONFIG.D)  # [D]
        mean = moment(moments, splits, row, i, last, CONFIG) * each  # [D]
        tl.store(space.k_mean + row * CONFIG.WIDTH + i, mean + tl.load(sample.first + row * last + i))
        for b in range(0, CONFIG.WIDTH, CONFIG.D):
            j = b + tl.arange(0, CONFIG.D)  # [D]
            metric = tl.zeros([CONFIG.D, CONFIG.D], tl.float32)  # [D, D]
            at = i[:, None] * CONFIG.WIDTH + j[None, :]  # [D, D]
            for block in range(blocks):
                metric += tl.load(parts + (row * blocks + block) * square + at)
            metric = metric / queries
            tl.store(space.metric + row * square + at, metric)
            score_variance += tl.sum(metric * covariance(moments, splits, row, i, j, each, CONFIG), 1)
    for a in range(0, CONFIG.VALUE_WIDTH, CONFIG.FD):
        f = a + tl.arange(0, CONFIG.FD)  # [FD]
        at = CONFIG.WIDTH + f
        mean = moment(moments, splits, row, at, last, CONFIG) * each  # [FD]
        value_variance += moment(moments, splits, row, at, at, CONFIG) * each - mean * mean
        tl.store(space.v_mean + row * CONFIG.VALUE_WIDTH + f, mean + tl.load(sample.first + row * last + at))
    by_scores = tl.maximum(tl.sum(score_variance, 0), 0.0)
    by_values = tl.maximum(tl.sum(value_variance, 0), 0.0)
    share = tl.where(by_scores > 0, WEIGHT * by_scores, 1.0)  # values alone where all scores are equal
    weight = tl.where(by_values > 0, share / tl.where(by_values > 0, by_values, 1.0), 0.0)
    tl.store(space.weight + row, weight)
    tl.store(space.least + row, 1e-6 * (by_scores + weight * by_values))


@triton.jit
def start_scores_kernel(sample, start_scores, queries, keys, CONFIG: tl.constexpr, LAST: tl.constexpr):
    """Of the attention that a few queries pay a block of keys, its largest score and sum; with LAST, when all blocks
    have theirs, the clocks of the keys by the rates at which they are drawn. Program (row, block of keys)."""
    row = (tl.program_id(0) // sample.blocks).to(tl.int64)
    block = tl.program_id(0) % sample.blocks
    at = block * CONFIG.BLOCK_S + tl.arange(0, CONFIG.BLOCK_S)  # [BK]
    lane = tl.arange(0, FEW)  # [FEW]
    few = tl.minimum(queries, FEW)
    width = CONFIG.WIDTH + CONFIG.VALUE_WIDTH + 1
    is_query = lane < few  # [FEW]
    query = row * queries + lane * tl.maximum(queries // FEW, 1)  # [FEW]
    inside = at < keys  # [BK]
    k_row = sample.joint + (row * keys + at) * width  # [BK]
    is_key = tl.load(k_row + width - 1, mask=inside, other=0.0) > 0  # [BK]
    s = tl.zeros([FEW, CONFIG.BLOCK_S], tl.float32)  # [FEW, BK]
    for a in range(0, CONFIG.WIDTH, CONFIG.D):
        e = (a + tl.arange(0, CONFIG.D))[None, :]  # [1, D]
        q_block = tl.load(sample.q + query[:, None] * CONFIG.WIDTH + e, mask=is_query[:, None], other=0.0)  # [FEW, D]
        k_block = tl.load(k_row[:, None] + e, mask=inside[:, None], other=0.0)  # [BK, D]
        s = product(q_block, tl.trans(k_block), s)
    s = tl.where(is_key[None, :], s, -float("inf"))
    if not LAST:
        block_max = tl.max(s, 1)  # [FEW]
        slot = (row * sample.blocks + block) * FEW + lane  # [FEW]
        tl.store(start_scores.running_max + slot, block_max)
        p = tl.exp(s - tl.where(block_max > -float("inf"), block_max, 0.0)[:, None])  # [FEW, BK]
        tl.store(start_scores.running_sum + slot, tl.sum(p, 1))
    else:
        running_max = tl.full([FEW], -float("inf"), tl.float32)  # [FEW]
        running_sum = tl.zeros([FEW], tl.float32)  # [FEW]
        for begin in range(0, sample.blocks, 32):
            n = begin + tl.arange(0, 32)  # [32]
            slot = (row * sample.blocks + n)[:, None] * FEW + lane[None, :]  # [32, FEW]
            exists = (n < sample.blocks)[:, None]  # [32, 1]
            block_max = tl.load(start_scores.running_max + slot, mask=exists, other=-float("inf"))  # [32, FEW]
            block_sum = tl.load(start_scores.running_sum + slot, mask=exists, other=0.0)  # [32, FEW]
            running_max, rescale, p = softmax_step(running_max, block_max, None, "exp", True, 0)
            running_sum = running_sum * rescale + tl.sum(block_sum * p, 0)
        base = tl.where(running_max > -float("inf"), running_max, 0.0)  # [FEW]
        norm = tl.where(running_sum > 0, running_sum, 1.0)  # [FEW]
        share = tl.minimum(tl.exp(s - base[:, None]) / norm[:, None], MOST)  # [FEW, BK]
        rate = tl.sum(tl.where(is_query[:, None] & is_key[None, :], share, 0.0), 0) / few + EVEN / keys  # [BK]
        slot = row * keys + at  # [BK]
        clock = tl.load(sample.clock + slot, mask=inside, other=0.0)  # [BK]
        tl.store(sample.clock + slot, tl.where(is_key, clock / rate, float("inf")), mask=inside)
