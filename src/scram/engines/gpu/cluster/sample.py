"""Some keys and queries of each row that k-means reads, in Triton, laid side by side."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ....spec.clustering import START_QUERIES
from ..noise import Seed, absorb, below, row_state
from ..primitives import KeyMask, all_finite, for_product, load_pieces, product, store_pieces

FEW = tl.constexpr(START_QUERIES)


class Source(NamedTuple):
    """Rows of keys, as kernels take them."""

    k: Tensor  # [R, n, E]
    v: Tensor  # [R, n, F]
    masked: KeyMask  # rows of the mask by rows of keys
    order: Tensor | None  # int64 [rows of the mask, n], their allowed keys first
    total: Tensor | None  # int64 [rows of the mask, n], running count of the allowed keys
    keys: int  # n


class Draws(NamedTuple):
    """What draws are made with."""

    seed: Seed
    group: int  # rows of queries that read a row of keys


class Sample(NamedTuple):
    """Some keys and queries of each row; the keys themselves are in a `Source`."""

    valid: Tensor  # float32 [R, S], 1; 0 for no key, or not finite
    clock: Tensor  # float32 [R, S], -log of a random number in (0, 1); inf for the second of two equal keys
    q: Tensor  # float32 [R, Q, E], times scale, in whole pieces; 0 for a query that is not finite
    scores: Tensor  # float32 [R, S, START_QUERIES], of the keys with a few queries; -inf for no key
    block_max: Tensor  # float32 [R, blocks, START_QUERIES], largest score of a block of keys
    block_sum: Tensor  # float32 [R, blocks, START_QUERIES], sum of exp(score - block_max)
    blocks: int  # of the keys
    query_blocks: int


class SampleConfig(NamedTuple):
    """What `sample_kernel` is compiled for."""

    BLOCK_S: int  # keys or queries of a block
    GATHER: bool  # the sample is drawn, not all keys
    SCORES: bool  # k-means starts at keys that are drawn by their scores


@triton.jit
def place_of_part(part, number, total, state):
    """`clustering.strides`: a place in 0..total-1 for the part `part` of `number`. All int64."""
    begin = part * total // number
    end = (part + 1) * total // number
    return begin + below(absorb(state, part), tl.maximum(end - begin, 1)).to(tl.int64)


@triton.jit
def drawn_keys(part, number, draw, row, source, draws):
    """The keys [len(part)] drawn from `number` parts of the row's allowed keys, and whether the row has any."""
    state = absorb(row_state(draws.seed, (row * draws.group).to(tl.int32)), draw)
    mask_row = row // source.masked.group
    total = tl.cast(source.keys, tl.int64)
    if source.total is not None:
        total = tl.load(source.total + mask_row * source.keys + source.keys - 1)
    key = place_of_part(part.to(tl.int64), tl.cast(number, tl.int64), total, state)  # [len(part)]
    exists = part < tl.minimum(total, 1) * number
    if source.order is not None:
        key = tl.load(source.order + mask_row * source.keys + key, mask=exists, other=0)
    return key, exists


@triton.jit
def drawn_queries(part, exists, q, queries, parts, row, draws, E: tl.constexpr):
    """Queries in pieces [len(part), E] of the parts of `queries` that read a row of keys, and which are finite."""
    state = absorb(row_state(draws.seed, (row * draws.group).to(tl.int32)), 2)
    number = tl.maximum(tl.cast(parts, tl.int64), 1)
    at = place_of_part(part.to(tl.int64), number, tl.cast(queries, tl.int64), state)  # [BQ]
    q_block = load_pieces(q + row * queries * E.SIZE, tl.where(exists, at, 0), exists, E)  # [BQ, E]
    return q_block, exists & all_finite(q_block)


@triton.jit
def start_scores(
    k_block,
    valid,
    slot,
    inside,
    place,
    q,
    queries,
    parts,
    scale,
    row,
    draws,
    sample,
    CONFIG: tl.constexpr,
    E: tl.constexpr,
):
    """Scores of a block of keys with a few queries, their largest and the sum of their powers, at `place` of blocks."""
    lane = tl.arange(0, FEW)  # [FEW]
    exists = lane < parts  # [FEW]
    part = lane * tl.maximum(parts // FEW, 1)  # [FEW]
    q_block, is_query = drawn_queries(part, exists, q, queries, parts, row, draws, E)  # [FEW, E]
    s = tl.zeros([CONFIG.BLOCK_S, FEW], tl.float32)  # [BK, FEW]
    for n in tl.static_range(len(k_block)):
        few = tl.where(is_query[:, None], q_block[n], 0.0).to(k_block[n].dtype)  # [FEW, E]
        known = tl.where(valid[:, None], k_block[n], 0.0).to(k_block[n].dtype)  # [BK, E]
        s = product(for_product(known), tl.trans(for_product(few)), s)
    s = tl.where(valid[:, None], s * scale, -float("inf"))
    tl.store(sample.scores + slot[:, None] * FEW + lane[None, :], s, mask=inside[:, None])
    block_max = tl.max(s, 0)  # [FEW]
    p = tl.exp(s - tl.where(block_max > -float("inf"), block_max, 0.0)[None, :])  # [BK, FEW]
    tl.store(sample.block_max + place * FEW + lane, block_max)
    tl.store(sample.block_sum + place * FEW + lane, tl.sum(p, 0))


@triton.jit
def sample_keys(
    number,
    source,
    some,
    q,
    queries,
    parts,
    scale,
    draws,
    sample,
    CONFIG: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
):
    """A block of the sample: its keys side by side where they are drawn, NaN for what is no key; clocks and scores."""
    row = (number // sample.blocks).to(tl.int64)
    block = number % sample.blocks
    at = block * CONFIG.BLOCK_S + tl.arange(0, CONFIG.BLOCK_S)  # [BK]
    is_new = at >= 0  # [BK]
    if CONFIG.GATHER:
        key, exists = drawn_keys(at, some.keys, 0, row, source, draws)
        if source.order is not None:  # fewer allowed keys than parts
            before, _ = drawn_keys(tl.maximum(at - 1, 0), some.keys, 0, row, source, draws)
            is_new = (key != before) | (at == 0)
    else:
        key = at.to(tl.int64)  # [BK]
        exists = at < source.keys  # [BK]
    k_block = load_pieces(source.k + row * source.keys * E.SIZE, key, exists, E)  # [BK, E]
    v_block = load_pieces(source.v + row * source.keys * F.SIZE, key, exists, F)  # [BK, F]
    slot = row * some.keys + at  # [BK]
    inside = at < some.keys  # [BK]
    if CONFIG.GATHER:
        marked = ()
        for n in tl.static_range(len(k_block)):
            marked += (tl.where(exists[:, None], k_block[n].to(tl.float32), float("nan")).to(k_block[n].dtype),)
        store_pieces(some.k, slot, marked, inside, E)
        store_pieces(some.v, slot, v_block, inside, F)
    valid = exists & inside & all_finite(k_block) & all_finite(v_block)  # [BK]
    tl.store(sample.valid + slot, valid.to(tl.float32), mask=inside)
    if CONFIG.SCORES:
        bits = absorb(absorb(row_state(draws.seed, (row * draws.group).to(tl.int32)), 1), at)  # [BK]
        clock = -tl.log(((bits >> 8).to(tl.float32) + 0.5) / 16777216.0)
        tl.store(sample.clock + slot, tl.where(is_new, clock, float("inf")), mask=inside)
        place = row * sample.blocks + block
        start_scores(k_block, valid, slot, inside, place, q, queries, parts, scale, row, draws, sample, CONFIG, E)


@triton.jit
def sample_queries(number, q, queries, parts, scale, draws, sample, CONFIG: tl.constexpr, E: tl.constexpr):
    """A block of the queries drawn for a row of keys, of `queries` that read it: `Sample.q`."""
    row = (number // sample.query_blocks).to(tl.int64)
    block = number % sample.query_blocks
    part = block * CONFIG.BLOCK_S + tl.arange(0, CONFIG.BLOCK_S)  # [BQ]
    exists = part < parts
    q_block, ok = drawn_queries(part, exists, q, queries, parts, row, draws, E)  # [BQ, E]
    q_row = sample.q + (row * parts + part)[:, None] * (E.BLOCK * E.PIECES)
    for n in tl.static_range(len(q_block)):
        x = tl.where(ok[:, None], q_block[n].to(tl.float32) * scale, 0.0)  # [BQ, E]
        tl.store(q_row + n * E.BLOCK + tl.arange(0, E.BLOCK)[None, :], x, mask=exists[:, None])


@triton.jit
def sample_kernel(
    source,
    some,
    q,
    queries,
    parts,
    scale,
    draws,
    sample,
    rows,
    CONFIG: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
):
    """Programs (row, block of the sample of keys), then (row, block of the sample of queries)."""
    first = rows * sample.blocks
    if tl.program_id(0) < first:
        sample_keys(tl.program_id(0), source, some, q, queries, parts, scale, draws, sample, CONFIG, E, F)
    else:
        sample_queries(tl.program_id(0) - first, q, queries, parts, scale, draws, sample, CONFIG, E)
