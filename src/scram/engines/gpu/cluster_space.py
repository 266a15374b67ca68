"""Where keys are clustered, in Triton: some keys and queries of each row, means of clusters, and the forms of centres.

Sums over many keys are made in splits by programs of their own and added in order: the bits are the same every time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...clustering import START_EVEN, START_MOST, START_QUERIES, VALUE_WEIGHT
from .cells import WIDEN
from .grid import KeyMask
from .noise import Seed, absorb, below, row_state
from .shared_keys import block_of, blocks_of, finite, product


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

    joint: Tensor  # float32 [R, S, E + F + 1]: key, value and 1; all 0 for what is not finite or no key
    clock: Tensor  # float32 [R, S], -log of a random number in (0, 1); inf for the second of two equal keys
    q: Tensor  # float32 [R, Q, E], times scale; 0 for a query that is not finite
    blocks: int  # of the keys
    query_blocks: int


class Space(NamedTuple):
    """Distances of each row, `clustering.Space`; widths are whole pieces."""

    metric: Tensor  # float32 [R, E, E]
    k_mean: Tensor  # float32 [R, E]
    v_mean: Tensor  # float32 [R, F]
    weight: Tensor  # float32 [R]
    least: Tensor  # float32 [R], squared distance above which a key is far from its centre


class Forms(NamedTuple):
    """Of every centre, `clustering.LinearForms`, and the centres themselves; whole blocks of clusters and pieces."""

    a: Tensor  # [R, padded, E]
    b: Tensor  # [R, padded, F]
    bias: Tensor  # float32 [R, padded]
    units: Tensor | None  # float32 [R, 2], of a and b, where float16 does not hold all numbers
    k: Tensor  # float32 [R, padded, E]
    v: Tensor  # float32 [R, padded, F]
    count: int  # clusters of a row
    padded: int


class Parts(NamedTuple):
    """Sums of the keys of each cluster, in splits of the keys."""

    k: Tensor  # float32 [splits, R C, E]
    v: Tensor  # float32 [splits, R C, F]
    number: Tensor  # float32 [splits, R C]
    splits: int


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
    to = sample.joint + slot[:, None] * (width + value_width + 1)
    for n in tl.static_range(len(k)):
        x = tl.where(ok[:, None], k[n].to(tl.float32), 0.0)
        tl.store(to + n * ROW.W + tl.arange(0, ROW.W)[None, :], x, mask=inside[:, None])
    for n in tl.static_range(len(v)):
        x = tl.where(ok[:, None], v[n].to(tl.float32), 0.0)
        tl.store(to + width + n * VROW.W + tl.arange(0, VROW.W)[None, :], x, mask=inside[:, None])
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


def _splits(number: int) -> int:
    """Into how many parts a sum over so many is cut: one program for each."""
    return next(splits for splits in (64, 32, 16, 8, 4, 2, 1) if number % splits == 0)


def _gram(x: Tensor) -> Tensor:
    """x^T x of every row of x [R, n, W]: a long sum of small products is slow unless it is cut."""
    rows, number, width = x.shape
    parts = x.reshape(rows * _splits(number), -1, width)
    return (parts.mT @ parts).view(rows, -1, width, width).sum(1)


def space_of(sample: Sample, wide: int) -> Space:
    """`clustering.Space.of` of every row; `wide`: width of the keys in whole pieces."""
    rows, keys, width = sample.joint.shape
    total = sample.joint.view(rows, _splits(keys), -1, width).sum(2).sum(1)
    number = total[:, -1:].clamp(min=1)
    mean = total[:, :-1] / number
    away = (sample.joint[..., :-1] - mean.unsqueeze(1)) * sample.joint[..., -1:]
    both = _gram(away) / number.unsqueeze(-1)
    covariance = both[:, :wide, :wide]
    variance = both.diagonal(dim1=1, dim2=2)[:, wide:].sum(1)
    q = sample.q / (1 + ((sample.q @ covariance) * sample.q).sum(-1, keepdim=True))
    metric = _gram(q) / q.shape[1]
    spread = (metric * covariance).sum((1, 2))
    share = torch.where(spread > 0, VALUE_WEIGHT * spread, 1)
    weight = torch.where(variance > 0, share / variance, 0)
    means = mean[:, :wide].contiguous(), mean[:, wide:].contiguous()
    return Space(metric, *means, weight, 1e-6 * (spread + weight * variance))


def drawn_starts(sample: Sample, wide: int, count: int, widths: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Keys [R C, E] and values [R C, F] drawn by the attention that some queries pay them; NaN where there are none."""
    rows, some, width = sample.joint.shape
    there = sample.joint[..., -1]
    few = sample.q[:, :: max(1, sample.q.shape[1] // START_QUERIES)][:, :START_QUERIES]
    absent = (there - 1).mul_(1e30).unsqueeze(1)
    paid = torch.baddbmm(absent, few, sample.joint[..., :wide].mT).softmax(-1).clamp_(max=START_MOST).sum(1)
    rate = paid.div_(few.shape[1]).add_(START_EVEN / some).mul_(there)
    at = (sample.clock / rate).topk(count, largest=False).indices
    at = (at + torch.arange(0, rows * some, some, device=at.device).unsqueeze(1)).flatten()
    found = sample.joint.view(rows * some, width).index_select(0, at)
    found = torch.where(found[:, -1:] > 0, found, torch.nan)
    k, v = found[:, : widths[0]], found[:, wide : wide + widths[1]]
    return k.contiguous(), v.contiguous()


@triton.jit
def part_sums(base, slot, there, parts, stride, piece, MANY: tl.constexpr, ROW: tl.constexpr):
    """Sum over the splits of base [splits, stride, E], rows `slot`: [len(slot), W]. MANY are loaded at a time."""
    total = tl.zeros([slot.shape[0], ROW.W], tl.float32)
    e = piece * ROW.W + tl.arange(0, ROW.W)
    at = base + slot[:, None] * ROW.E + e[None, :]
    for begin in range(0, parts.splits, MANY):
        for n in tl.static_range(MANY):
            further = (begin + n) * tl.cast(stride, tl.int64) * ROW.E
            inside = (there & (slot * 0 + begin + n < parts.splits))[:, None] & (e < ROW.E)[None, :]
            total += tl.load(at + further, mask=inside, other=0.0)
    return total


@triton.jit
def part_numbers(slot, there, parts, stride):
    """How many keys the clusters at `slot` have: int32."""
    total = tl.zeros([64, slot.shape[0]], tl.int32)
    for begin in range(0, parts.splits, 64):
        n = begin + tl.arange(0, 64)
        at = (n.to(tl.int64) * stride)[:, None] + slot[None, :]
        total += tl.load(parts.number + at, mask=(n < parts.splits)[:, None] & there[None, :], other=0.0).to(tl.int32)
    return tl.sum(total, 0)


@triton.jit
def means_kernel(
    parts, centres, values, sizes, every, MANY: tl.constexpr, BLOCK_C: tl.constexpr, ROW: tl.constexpr,
    VROW: tl.constexpr,
):  # fmt: skip
    """The mean key, mean value and number of keys of `every` cluster. Program: block of clusters of all rows."""
    at = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    there = at < every
    number = part_numbers(at, there, parts, every)
    tl.store(sizes + at, number, mask=there)
    each = tl.maximum(number, 1).to(tl.float32)[:, None]
    for n in tl.static_range(tl.constexpr(ROW.PIECES)):
        e = (n * ROW.W + tl.arange(0, ROW.W))[None, :]
        mean = part_sums(parts.k, at, there, parts, every, n, MANY, ROW) / each
        tl.store(centres + at[:, None] * ROW.E + e, mean, mask=there[:, None] & (e < ROW.E))
    for n in tl.static_range(tl.constexpr(VROW.PIECES)):
        f = (n * VROW.W + tl.arange(0, VROW.W))[None, :]
        mean = part_sums(parts.v, at, there, parts, every, n, MANY, VROW) / each
        tl.store(values + at[:, None] * VROW.E + f, mean, mask=there[:, None] & (f < VROW.E))


@triton.jit
def starts(at, row, parts, start_k, start_v, some, far, forms, blocks, FROM: tl.constexpr, MANY: tl.constexpr,
           ROW: tl.constexpr, VROW: tl.constexpr):  # fmt: skip
    """Centres and values of the clusters `at` in pieces, and which of them there are.

    FROM "given": those of start_k and start_v; "parts": the means, for an empty cluster a far key.
    """
    count, there, k, v = forms.count, at < forms.count, (), ()
    if FROM == "given":
        k = blocks_of(start_k + row * count * ROW.E, at, there, ROW)
        v = blocks_of(start_v + row * count * VROW.E, at, there, VROW)
    else:
        slot, every = row * count + at, (tl.num_programs(0) // (forms.padded // at.shape[0])).to(tl.int64) * count
        number = part_numbers(slot, there, parts, every)
        place = tl.load(far + row * blocks + at % blocks)
        anew, each = there & (number == 0) & (place >= 0), tl.maximum(number, 1).to(tl.float32)[:, None]
        for n in tl.static_range(tl.constexpr(ROW.PIECES)):
            mean = part_sums(parts.k, slot, there, parts, every, n, MANY, ROW) / each
            key = block_of(some.k + row * some.keys * ROW.E, place, anew, n, ROW).to(tl.float32)
            k += (tl.where(anew[:, None], key, mean),)
        for n in tl.static_range(tl.constexpr(VROW.PIECES)):
            mean = part_sums(parts.v, slot, there, parts, every, n, MANY, VROW) / each
            value = block_of(some.v + row * some.keys * VROW.E, place, anew, n, VROW).to(tl.float32)
            v += (tl.where(anew[:, None], value, mean),)
        there = there & ((number > 0) | anew)
    there = there & all_finite(k) & all_finite(v)
    return k, v, there


@triton.jit
def forms_kernel(
    parts, start_k, start_v, some, far, space, forms, blocks, FROM: tl.constexpr, MANY: tl.constexpr,
    BLOCK_C: tl.constexpr, ROW: tl.constexpr, VROW: tl.constexpr,
):  # fmt: skip
    """Program (row, block of clusters). The bias is that of the rounded forms, so that only what a key is away from the
    mean is multiplied by what rounding left of them."""
    width, value_width = ROW.W * ROW.PIECES, VROW.W * VROW.PIECES
    programs = forms.padded // BLOCK_C
    row = (tl.program_id(0) // programs).to(tl.int64)
    at = tl.program_id(0) % programs * BLOCK_C + tl.arange(0, BLOCK_C)
    k, v, there = starts(
        at, row, parts, start_k, start_v, some, far, forms, blocks, FROM, MANY, ROW, VROW
    )  # fmt: skip
    slot, bias, apart = row * forms.padded + at, tl.zeros([BLOCK_C], tl.float32), ()
    weight, unit, value_unit = tl.load(space.weight + row), 1.0, 1.0
    if forms.units is not None:  # no number of a metric is larger than the largest of its diagonal
        for n in tl.static_range(tl.constexpr(ROW.PIECES)):
            e = n * ROW.W + tl.arange(0, ROW.W)
            unit = tl.maximum(unit if n > 0 else 0.0, tl.max(tl.load(space.metric + (row * width + e) * width + e), 0))
        unit, value_unit = tl.where(unit > 0, unit, 1.0), tl.where(weight > 0, weight, 1.0)
        tl.store(forms.units + row * 2, unit)
        tl.store(forms.units + row * 2 + 1, value_unit)
    for n in tl.static_range(tl.constexpr(ROW.PIECES)):
        e = n * ROW.W + tl.arange(0, ROW.W)
        x = finite(k[n].to(tl.float32))
        tl.store(forms.k + slot[:, None] * width + e[None, :], x)
        apart += (tl.where(there[:, None], x - tl.load(space.k_mean + row * width + e)[None, :], 0.0),)
    for n in tl.static_range(tl.constexpr(ROW.PIECES)):
        e = n * ROW.W + tl.arange(0, ROW.W)
        a = tl.zeros([BLOCK_C, ROW.W], tl.float32)
        for m in tl.static_range(tl.constexpr(ROW.PIECES)):
            i = m * ROW.W + tl.arange(0, ROW.W)
            a = product(apart[m], tl.load(space.metric + (row * width + i)[:, None] * width + e[None, :]), a)
        rounded = (a / unit).to(forms.a.dtype.element_ty)
        tl.store(forms.a + slot[:, None] * width + e[None, :], rounded)
        mean = tl.load(space.k_mean + row * width + e)[None, :]
        bias -= tl.sum(rounded.to(tl.float32) * unit * mean + a * apart[n] / 2, 1)
    for n in tl.static_range(tl.constexpr(VROW.PIECES)):
        f = n * VROW.W + tl.arange(0, VROW.W)
        x, mean = finite(v[n].to(tl.float32)), tl.load(space.v_mean + row * value_width + f)[None, :]
        tl.store(forms.v + slot[:, None] * value_width + f[None, :], x)
        away = tl.where(there[:, None], x - mean, 0.0)
        rounded = (weight / value_unit * away).to(forms.b.dtype.element_ty)
        tl.store(forms.b + slot[:, None] * value_width + f[None, :], rounded)
        bias -= tl.sum(rounded.to(tl.float32) * value_unit * mean + weight * away * away / 2, 1)
    tl.store(forms.bias + slot, tl.where(there & (tl.abs(bias) < float("inf")), bias, -float("inf")))
