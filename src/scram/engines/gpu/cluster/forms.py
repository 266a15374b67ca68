"""Centres of clusters, in Triton: their means, and the forms by which keys are compared with them.

Sums over many keys are made in splits by programs of their own and added in order: the bits are the same every time.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..cluster.sample import all_finite
from ..drawn_tail.shared_keys import block_of, blocks_of, finite, product


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


class Given(NamedTuple):
    """Centres and values to start from."""

    k: Tensor  # [R, C, E]
    v: Tensor  # [R, C, F]


class Places(NamedTuple):
    """Keys of the sample to start from."""

    place: Tensor  # int64 [R, C]
    clock: Tensor  # `Sample.clock`, inf for what is no start


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
def starts(at, row, parts, start, some, far, forms, blocks, FROM: tl.constexpr, MANY: tl.constexpr,
           ROW: tl.constexpr, VROW: tl.constexpr):  # fmt: skip
    """Centres and values of the clusters `at` in pieces, and which of them there are.

    FROM "given": those of `start`; "drawn": the keys of its places; "parts": the means, for an empty cluster a far key.
    """
    count, there, k, v = forms.count, at < forms.count, (), ()
    if FROM == "given":
        k = blocks_of(start.k + row * count * ROW.E, at, there, ROW)
        v = blocks_of(start.v + row * count * VROW.E, at, there, VROW)
    elif FROM == "drawn":
        place = tl.load(start.place + row * count + at, mask=there, other=0)
        there = there & (tl.load(start.clock + row * some.keys + place) < float("inf"))
        k = blocks_of(some.k + row * some.keys * ROW.E, place, there, ROW)
        v = blocks_of(some.v + row * some.keys * VROW.E, place, there, VROW)
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
    parts, start, some, far, space, forms, blocks, FROM: tl.constexpr, MANY: tl.constexpr,
    BLOCK_C: tl.constexpr, ROW: tl.constexpr, VROW: tl.constexpr,
):  # fmt: skip
    """Program (row, block of clusters). The bias is that of the rounded forms, so that only what a key is away from the
    mean is multiplied by what rounding left of them."""
    width, value_width = ROW.W * ROW.PIECES, VROW.W * VROW.PIECES
    programs = forms.padded // BLOCK_C
    row = (tl.program_id(0) // programs).to(tl.int64)
    at = tl.program_id(0) % programs * BLOCK_C + tl.arange(0, BLOCK_C)
    k, v, there = starts(
        at, row, parts, start, some, far, forms, blocks, FROM, MANY, ROW, VROW
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
