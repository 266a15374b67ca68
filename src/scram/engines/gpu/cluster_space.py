"""Where keys are clustered, in Triton: some keys and queries of each row, the metric, and the forms of centres.

Sums over many keys are made in splits by programs of their own and added in order: the bits are the same every time.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...clustering import VALUE_WEIGHT
from .cells import WIDEN
from .grid import KeyMask
from .noise import Seed, absorb, below, row_state
from .shared_keys import block_of, blocks_of, finite, product

WEIGHT = tl.constexpr(float(VALUE_WEIGHT))


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


class Sums(NamedTuple):
    """Of a sample, in blocks of keys and in splits of queries; widths are whole pieces."""

    k: Tensor  # float32 [R, blocks, E]
    v: Tensor  # float32 [R, blocks, F]
    squares: Tensor  # float32 [R, blocks], of the distances of values from their block's mean
    number: Tensor  # float32 [R, blocks], keys that count
    metric: Tensor  # float32 [R, splits, E, E], of q q^T
    queries: Tensor  # float32 [R, splits]
    blocks: int


class Space(NamedTuple):
    """Distances of each row, `clustering.Space`; widths are whole pieces."""

    metric: Tensor  # float32 [R, E, E]
    k_mean: Tensor  # float32 [R, E]
    v_mean: Tensor  # float32 [R, F]
    weight: Tensor  # float32 [R]


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


class SpaceMode(NamedTuple):
    """What the kernels of a space are compiled for."""

    BLOCK_S: int  # keys of a block
    BLOCK_Q: int  # queries of a product
    GATHER: bool  # the sample is drawn, not all keys
    MANY: int  # blocks that are loaded at a time
    SPLITS: int  # of queries


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
    number, source, some, by, sums, MODE: tl.constexpr, ROW: tl.constexpr, VROW: tl.constexpr
):  # fmt: skip
    """A block of the sample: its keys side by side where they are drawn, its sums. What is no key is NaN."""
    row, block = (number // sums.blocks).to(tl.int64), number % sums.blocks
    at = block * MODE.BLOCK_S + tl.arange(0, MODE.BLOCK_S)
    if MODE.GATHER:
        key, there = drawn_keys(at, some.keys, 0, row, source, by)
    else:
        key, there = at.to(tl.int64), at < source.keys
        if source.masked.mask is not None:
            place = source.masked.mask + row // source.masked.heads * source.keys + key
            there = there & (tl.load(place, mask=there, other=0) != 0)
    k = blocks_of(source.k + row * source.keys * ROW.E, key, there, ROW)
    v = blocks_of(source.v + row * source.keys * VROW.E, key, there, VROW)
    if MODE.GATHER:
        slot, inside = row * some.keys + at, at < some.keys
        marked = ()
        for n in tl.static_range(len(k)):
            marked += (tl.where(there[:, None], k[n].to(tl.float32), float("nan")).to(k[n].dtype),)
        put_rows(some.k, slot, marked, inside, ROW)
        put_rows(some.v, slot, v, inside, VROW)
    ok = there & all_finite(k) & all_finite(v)
    count, squares = tl.sum(ok.to(tl.float32), 0), 0.0
    for n in tl.static_range(len(k)):
        x = tl.where(ok[:, None], k[n].to(tl.float32), 0.0)
        tl.store(sums.k + number.to(tl.int64) * (ROW.W * ROW.PIECES) + n * ROW.W + tl.arange(0, ROW.W), tl.sum(x, 0))
    for n in tl.static_range(len(v)):
        x = tl.where(ok[:, None], v[n].to(tl.float32), 0.0)
        whole = tl.sum(x, 0)
        away = tl.where(ok[:, None], x - (whole / tl.maximum(count, 1.0))[None, :], 0.0)
        squares += tl.sum(tl.sum(away * away, 1), 0)
        tl.store(sums.v + number.to(tl.int64) * (VROW.W * VROW.PIECES) + n * VROW.W + tl.arange(0, VROW.W), whole)
    tl.store(sums.number + number, count)
    tl.store(sums.squares + number, squares)


@triton.jit
def sample_queries(number, q, queries, parts, by, sums, MODE: tl.constexpr, ROW: tl.constexpr):
    """Program (row, split, piece, piece): q q^T over a split of the queries drawn; `queries` of a row of keys."""
    right, rest = number % ROW.PIECES, number // ROW.PIECES
    left, rest = rest % ROW.PIECES, rest // ROW.PIECES
    row, split = (rest // MODE.SPLITS).to(tl.int64), rest % MODE.SPLITS
    state = absorb(row_state(by.seed, (row * by.group).to(tl.int32)), 2)
    total, found = tl.zeros([ROW.W, ROW.W], tl.float32), tl.zeros([MODE.BLOCK_Q], tl.float32)
    q_row = q + row * queries * ROW.E
    for begin in range(split * MODE.BLOCK_Q, parts, MODE.SPLITS * MODE.BLOCK_Q):
        part = begin + tl.arange(0, MODE.BLOCK_Q)
        there = part < parts
        at = place_of_part(part.to(tl.int64), tl.cast(parts, tl.int64), tl.cast(queries, tl.int64), state)
        at = tl.where(there, at, 0)
        pieces = blocks_of(q_row, at, there, ROW)
        ok = there & all_finite(pieces)
        a, b = pieces[0], pieces[0]
        if ROW.PIECES > 1:
            a, b = block_of(q_row, at, there, left, ROW), block_of(q_row, at, there, right, ROW)
        a, b = wide(tl.where(ok[:, None], a, 0.0).to(a.dtype)), wide(tl.where(ok[:, None], b, 0.0).to(b.dtype))
        total = product(tl.trans(a), b, total)
        found += ok.to(tl.float32)
    width, e = ROW.W * ROW.PIECES, tl.arange(0, ROW.W)
    to = sums.metric + (row * MODE.SPLITS + split) * (width * width)
    tl.store(to + (left * ROW.W + e)[:, None] * width + (right * ROW.W + e)[None, :], total)
    if left + right == 0:
        tl.store(sums.queries + row * MODE.SPLITS + split, tl.sum(found, 0))


@triton.jit
def sample_kernel(
    source, some, q, queries, parts, by, sums, rows, MODE: tl.constexpr, ROW: tl.constexpr, VROW: tl.constexpr
):  # fmt: skip
    """Programs (row, block of the sample of keys), then those of `sample_queries`."""
    first = rows * sums.blocks
    if tl.program_id(0) < first:
        sample_keys(tl.program_id(0), source, some, by, sums, MODE, ROW, VROW)
    else:
        sample_queries(tl.program_id(0) - first, q, queries, parts, by, sums, MODE, ROW)


@triton.jit
def block_sums(base, row, blocks, width, e, MANY: tl.constexpr):
    """Sum over the blocks of a row of base [R, blocks, width], columns e."""
    total = tl.zeros([MANY, e.shape[0]], tl.float32)
    for begin in range(0, blocks, MANY):
        n = begin + tl.arange(0, MANY)
        at = ((row * blocks + n) * width)[:, None] + e[None, :]
        total += tl.load(base + at, mask=(n < blocks)[:, None], other=0.0)
    return tl.sum(total, 0)


@triton.jit
def space_kernel(
    sums, space, scale, rows, MODE: tl.constexpr, BLOCK_A: tl.constexpr, ROW: tl.constexpr, VROW: tl.constexpr
):  # fmt: skip
    """Programs (row, BLOCK_A rows of the metric), then one for the means of each row."""
    width, value_width = ROW.W * ROW.PIECES, VROW.W * VROW.PIECES
    strips = width // BLOCK_A
    number = tl.program_id(0)
    if number < rows * strips:
        row, i = (number // strips).to(tl.int64), number % strips * BLOCK_A + tl.arange(0, BLOCK_A)
        count = tl.sum(tl.load(sums.queries + row * MODE.SPLITS + tl.arange(0, MODE.SPLITS)), 0)
        factor = scale * scale / tl.maximum(count, 1.0)
        for piece in range(ROW.PIECES):
            e = piece * ROW.W + tl.arange(0, ROW.W)
            total = tl.zeros([BLOCK_A, ROW.W], tl.float32)
            for split in tl.static_range(tl.constexpr(MODE.SPLITS)):
                at = (row * MODE.SPLITS + split) * (width * width) + (i * width)[:, None] + e[None, :]
                total += tl.load(sums.metric + at)
            to = space.metric + row * (width * width) + (i * width)[:, None] + e[None, :]
            tl.store(to, total * factor)
    else:
        row = (number - rows * strips).to(tl.int64)
        one = tl.arange(0, 1)
        count = tl.maximum(tl.sum(block_sums(sums.number, row, sums.blocks, 1, one, MODE.MANY), 0), 1.0)
        squares = tl.sum(block_sums(sums.squares, row, sums.blocks, 1, one, MODE.MANY), 0)
        for piece in range(ROW.PIECES):
            e = piece * ROW.W + tl.arange(0, ROW.W)
            tl.store(space.k_mean + row * width + e, block_sums(sums.k, row, sums.blocks, width, e, MODE.MANY) / count)
        for piece in range(VROW.PIECES):
            f = piece * VROW.W + tl.arange(0, VROW.W)
            mean = block_sums(sums.v, row, sums.blocks, value_width, f, MODE.MANY) / count
            tl.store(space.v_mean + row * value_width + f, mean)
            for begin in range(0, sums.blocks, MODE.MANY):
                n = begin + tl.arange(0, MODE.MANY)
                slot, here = row * sums.blocks + n, n < sums.blocks
                own = tl.load(sums.number + slot, mask=here, other=0.0)
                x = tl.load(sums.v + (slot * value_width)[:, None] + f[None, :], mask=here[:, None], other=0.0)
                away = x / tl.maximum(own, 1.0)[:, None] - mean[None, :]
                squares += tl.sum(own * tl.sum(away * away, 1), 0)
        tl.store(space.weight + row, tl.where(squares > 0, WEIGHT * count / tl.where(squares > 0, squares, 1.0), 0.0))


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
def starts(at, row, source, parts, warm_k, warm_v, some, far, by, forms, blocks, FROM: tl.constexpr, MANY: tl.constexpr,
           ROW: tl.constexpr, VROW: tl.constexpr):  # fmt: skip
    """Centres and values of the clusters `at` in pieces, and which of them there are.

    FROM "keys": keys drawn for it; "warm": those given; "parts": the means, for an empty cluster a far key.
    """
    count, there, k, v = forms.count, at < forms.count, (), ()
    if FROM == "keys":
        key, there = drawn_keys(at, count, 1, row, source, by)
        k = blocks_of(source.k + row * source.keys * ROW.E, key, there, ROW)
        v = blocks_of(source.v + row * source.keys * VROW.E, key, there, VROW)
    elif FROM == "warm":
        k = blocks_of(warm_k + row * count * ROW.E, at, there, ROW)
        v = blocks_of(warm_v + row * count * VROW.E, at, there, VROW)
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
    source, parts, warm_k, warm_v, some, far, by, space, forms, blocks, FROM: tl.constexpr, MANY: tl.constexpr,
    BLOCK_C: tl.constexpr, ROW: tl.constexpr, VROW: tl.constexpr,
):  # fmt: skip
    """Program (row, block of clusters). The bias is that of the rounded forms, so that only what a key is away from the
    mean is multiplied by what rounding left of them."""
    width, value_width = ROW.W * ROW.PIECES, VROW.W * VROW.PIECES
    programs = forms.padded // BLOCK_C
    row = (tl.program_id(0) // programs).to(tl.int64)
    at = tl.program_id(0) % programs * BLOCK_C + tl.arange(0, BLOCK_C)
    k, v, there = starts(
        at, row, source, parts, warm_k, warm_v, some, far, by, forms, blocks, FROM, MANY, ROW, VROW
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
