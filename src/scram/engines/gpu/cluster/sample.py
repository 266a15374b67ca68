"""Some keys and queries of each row that k-means reads, in Triton, laid side by side."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..noise import Seed, absorb, below, row_state
from ..primitives import KeyMask, all_finite, load_pieces, store_pieces


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
    """Some keys and queries of each row, side by side; widths are whole pieces."""

    joint: Tensor  # float32 [R, S, E + F + 1]: key and value less `first`, and 1; all 0 for no key, or not finite
    first: Tensor  # float32 [R, E + F], a key and its value: what all keys have in common costs no digits
    clock: Tensor  # float32 [R, S], -log of a random number in (0, 1); inf for the second of two equal keys
    q: Tensor  # float32 [R, Q, E], times scale; 0 for a query that is not finite
    blocks: int  # of the keys
    query_blocks: int


class SampleConfig(NamedTuple):
    """What `sample_kernel` is compiled for."""

    BLOCK_S: int  # keys or queries of a block
    GATHER: bool  # the sample is drawn, not all keys


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
def sample_keys(number, source, some, draws, sample, CONFIG: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    """A block of the sample: its keys side by side where they are drawn, NaN for what is no key, and `Sample.joint`."""
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
        if source.masked.mask is not None:
            place = source.masked.mask + row // source.masked.group * source.keys + key
            exists = exists & (tl.load(place, mask=exists, other=0) != 0)
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
    ok = exists & all_finite(k_block) & all_finite(v_block)  # [BK]
    width = E.BLOCK * E.PIECES
    value_width = F.BLOCK * F.PIECES
    one, any_key = drawn_keys(tl.arange(0, 1), some.keys, 0, row, source, draws)  # [1]
    first_k = load_pieces(source.k + row * source.keys * E.SIZE, one, any_key, E)  # [1, E]
    first_v = load_pieces(source.v + row * source.keys * F.SIZE, one, any_key, F)  # [1, F]
    usable = (any_key & all_finite(first_k) & all_finite(first_v))[:, None]  # [1, 1]
    first_row = sample.first + row * (width + value_width)
    joint_row = sample.joint + slot[:, None] * (width + value_width + 1)
    for n in tl.static_range(len(k_block)):
        e = (n * E.BLOCK + tl.arange(0, E.BLOCK))[None, :]  # [1, E]
        first = tl.where(usable, first_k[n].to(tl.float32), 0.0)  # [1, E]
        tl.store(first_row + e, first, mask=e + block * width < width)
        tl.store(joint_row + e, tl.where(ok[:, None], k_block[n].to(tl.float32) - first, 0.0), mask=inside[:, None])
    for n in tl.static_range(len(v_block)):
        f = (n * F.BLOCK + tl.arange(0, F.BLOCK))[None, :]  # [1, F]
        first = tl.where(usable, first_v[n].to(tl.float32), 0.0)  # [1, F]
        tl.store(first_row + width + f, first, mask=f + block * value_width < value_width)
        shifted = tl.where(ok[:, None], v_block[n].to(tl.float32) - first, 0.0)  # [BK, F]
        tl.store(joint_row + width + f, shifted, mask=inside[:, None])
    last = sample.joint + slot * (width + value_width + 1) + width + value_width
    tl.store(last, ok.to(tl.float32), mask=inside)
    bits = absorb(absorb(row_state(draws.seed, (row * draws.group).to(tl.int32)), 1), at)  # [BK]
    clock = -tl.log(((bits >> 8).to(tl.float32) + 0.5) / 16777216.0)
    tl.store(sample.clock + slot, tl.where(is_new, clock, float("inf")), mask=inside)


@triton.jit
def sample_queries(number, q, queries, parts, scale, draws, sample, CONFIG: tl.constexpr, E: tl.constexpr):
    """A block of the queries drawn for a row of keys, of `queries` that read it: `Sample.q`."""
    row = (number // sample.query_blocks).to(tl.int64)
    block = number % sample.query_blocks
    state = absorb(row_state(draws.seed, (row * draws.group).to(tl.int32)), 2)
    part = block * CONFIG.BLOCK_S + tl.arange(0, CONFIG.BLOCK_S)  # [BQ]
    exists = part < parts
    at = place_of_part(part.to(tl.int64), tl.cast(parts, tl.int64), tl.cast(queries, tl.int64), state)  # [BQ]
    q_block = load_pieces(q + row * queries * E.SIZE, tl.where(exists, at, 0), exists, E)  # [BQ, E]
    ok = exists & all_finite(q_block)  # [BQ]
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
        sample_keys(tl.program_id(0), source, some, draws, sample, CONFIG, E, F)
    else:
        sample_queries(tl.program_id(0) - first, q, queries, parts, scale, draws, sample, CONFIG, E)
