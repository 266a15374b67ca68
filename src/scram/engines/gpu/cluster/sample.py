"""Some keys and queries of each row that k-means reads, in Triton, laid side by side."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..attend.cells import WIDEN
from ..drawn_tail.shared_keys import blocks_of
from ..noise import Seed, absorb, below, row_state
from ..primitives import KeyMask


class Source(NamedTuple):
    """Rows of keys, as kernels take them."""

    k: Tensor  # [R, n, E]
    v: Tensor  # [R, n, F]
    masked: KeyMask  # rows of the mask by rows of keys
    order: Tensor | None  # int64 [rows of the mask, n], their legal keys first
    total: Tensor | None  # int64 [rows of the mask, n], running count of the legal keys
    keys: int  # n


class Drawn(NamedTuple):
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


class SampleMode(NamedTuple):
    """What `sample_kernel` is compiled for."""

    BLOCK_S: int  # keys or queries of a block
    GATHER: bool  # the sample is drawn, not all keys


@triton.jit
def wide(x):
    """Triton's interpreter multiplies no bfloat16."""
    return x.to(tl.float32) if WIDEN and x.dtype == tl.bfloat16 else x


@triton.jit
def place_of_part(part, number, total, state):
    """`clustering.strides`: a place in 0..total-1 for the part `part` of `number`. All int64."""
    begin, end = part * total // number, (part + 1) * total // number
    return begin + below(absorb(state, part), tl.maximum(end - begin, 1)).to(tl.int64)


@triton.jit
def drawn_keys(part, number, draw, row, source, by):
    """The keys [len(part)] drawn from `number` parts of the row's legal keys, and whether the row has any."""
    state, mask_row = absorb(row_state(by.seed, (row * by.group).to(tl.int32)), draw), row // source.masked.heads
    total = tl.cast(source.keys, tl.int64)
    if source.total is not None:
        total = tl.load(source.total + mask_row * source.keys + source.keys - 1)
    place = place_of_part(part.to(tl.int64), tl.cast(number, tl.int64), total, state)
    there = part < tl.minimum(total, 1) * number
    if source.order is not None:
        place = tl.load(source.order + mask_row * source.keys + place, mask=there, other=0)
    return place, there


@triton.jit
def all_finite(pieces):
    """Which rows have nothing that is not finite."""
    ok = tl.min(tl.where(tl.abs(pieces[0].to(tl.float32)) < float("inf"), 1, 0), 1) > 0
    for n in tl.static_range(1, len(pieces)):
        ok = ok & (tl.min(tl.where(tl.abs(pieces[n].to(tl.float32)) < float("inf"), 1, 0), 1) > 0)
    return ok


@triton.jit
def put_rows(base, slot, pieces, there, ROW: tl.constexpr):
    """Pieces to rows `slot` of the width of the data."""
    for n in tl.static_range(len(pieces)):
        e = (n * ROW.W + tl.arange(0, ROW.W))[None, :]
        tl.store(base + slot[:, None] * ROW.E + e, pieces[n], mask=there[:, None] & (e < ROW.E))


@triton.jit
def sample_keys(
    number, source, some, by, sample, MODE: tl.constexpr, ROW: tl.constexpr, VROW: tl.constexpr
):  # fmt: skip
    """A block of the sample: its keys side by side where they are drawn, NaN for what is no key, and `Sample.joint`."""
    row, block = (number // sample.blocks).to(tl.int64), number % sample.blocks
    at = block * MODE.BLOCK_S + tl.arange(0, MODE.BLOCK_S)
    new = at >= 0
    if MODE.GATHER:
        key, there = drawn_keys(at, some.keys, 0, row, source, by)
        if source.order is not None:  # fewer legal keys than parts
            before, _ = drawn_keys(tl.maximum(at - 1, 0), some.keys, 0, row, source, by)
            new = (key != before) | (at == 0)
    else:
        key, there = at.to(tl.int64), at < source.keys
        if source.masked.mask is not None:
            place = source.masked.mask + row // source.masked.heads * source.keys + key
            there = there & (tl.load(place, mask=there, other=0) != 0)
    k = blocks_of(source.k + row * source.keys * ROW.E, key, there, ROW)
    v = blocks_of(source.v + row * source.keys * VROW.E, key, there, VROW)
    slot, inside = row * some.keys + at, at < some.keys
    if MODE.GATHER:
        marked = ()
        for n in tl.static_range(len(k)):
            marked += (tl.where(there[:, None], k[n].to(tl.float32), float("nan")).to(k[n].dtype),)
        put_rows(some.k, slot, marked, inside, ROW)
        put_rows(some.v, slot, v, inside, VROW)
    ok = there & all_finite(k) & all_finite(v)
    width, value_width = ROW.W * ROW.PIECES, VROW.W * VROW.PIECES
    one, any_key = drawn_keys(tl.arange(0, 1), some.keys, 0, row, source, by)
    first_k = blocks_of(source.k + row * source.keys * ROW.E, one, any_key, ROW)
    first_v = blocks_of(source.v + row * source.keys * VROW.E, one, any_key, VROW)
    usable = (any_key & all_finite(first_k) & all_finite(first_v))[:, None]
    origin = sample.first + row * (width + value_width)
    to = sample.joint + slot[:, None] * (width + value_width + 1)
    for n in tl.static_range(len(k)):
        e, first = (n * ROW.W + tl.arange(0, ROW.W))[None, :], tl.where(usable, first_k[n].to(tl.float32), 0.0)
        tl.store(origin + e, first, mask=e + block * width < width)
        tl.store(to + e, tl.where(ok[:, None], k[n].to(tl.float32) - first, 0.0), mask=inside[:, None])
    for n in tl.static_range(len(v)):
        f, first = (n * VROW.W + tl.arange(0, VROW.W))[None, :], tl.where(usable, first_v[n].to(tl.float32), 0.0)
        tl.store(origin + width + f, first, mask=f + block * value_width < value_width)
        tl.store(to + width + f, tl.where(ok[:, None], v[n].to(tl.float32) - first, 0.0), mask=inside[:, None])
    last = sample.joint + slot * (width + value_width + 1) + width + value_width
    tl.store(last, ok.to(tl.float32), mask=inside)
    bits = absorb(absorb(row_state(by.seed, (row * by.group).to(tl.int32)), 1), at)
    clock = -tl.log(((bits >> 8).to(tl.float32) + 0.5) / 16777216.0)
    tl.store(sample.clock + slot, tl.where(new, clock, float("inf")), mask=inside)


@triton.jit
def sample_queries(number, q, queries, parts, scale, by, sample, MODE: tl.constexpr, ROW: tl.constexpr):
    """A block of the queries drawn for a row of keys, of `queries` that read it: `Sample.q`."""
    row, block = (number // sample.query_blocks).to(tl.int64), number % sample.query_blocks
    state = absorb(row_state(by.seed, (row * by.group).to(tl.int32)), 2)
    part = block * MODE.BLOCK_S + tl.arange(0, MODE.BLOCK_S)
    there = part < parts
    at = place_of_part(part.to(tl.int64), tl.cast(parts, tl.int64), tl.cast(queries, tl.int64), state)
    pieces = blocks_of(q + row * queries * ROW.E, tl.where(there, at, 0), there, ROW)
    ok = there & all_finite(pieces)
    to = sample.q + (row * parts + part)[:, None] * (ROW.W * ROW.PIECES)
    for n in tl.static_range(len(pieces)):
        x = tl.where(ok[:, None], pieces[n].to(tl.float32) * scale, 0.0)
        tl.store(to + n * ROW.W + tl.arange(0, ROW.W)[None, :], x, mask=there[:, None])


@triton.jit
def sample_kernel(
    source, some, q, queries, parts, scale, by, sample, rows, MODE: tl.constexpr, ROW: tl.constexpr,
    VROW: tl.constexpr,
):  # fmt: skip
    """Programs (row, block of the sample of keys), then (row, block of the sample of queries)."""
    first = rows * sample.blocks
    if tl.program_id(0) < first:
        sample_keys(tl.program_id(0), source, some, by, sample, MODE, ROW, VROW)
    else:
        sample_queries(tl.program_id(0) - first, q, queries, parts, scale, by, sample, MODE, ROW)
