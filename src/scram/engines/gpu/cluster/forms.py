"""Centers of clusters, in Triton: their means, and the forms by which keys are compared with them.

Sums over many keys are made in splits by programs of their own and added in order: the bits are the same every time.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..primitives import all_finite, finite, load_piece, load_pieces, product


class Forms(NamedTuple):
    """Of every center, `clustering.LinearForms`, and the centers themselves; whole blocks of clusters and pieces."""

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


class GivenStart(NamedTuple):
    """Centers and values to start from."""

    k: Tensor  # [R, C, E]
    v: Tensor  # [R, C, F]


class DrawnStart(NamedTuple):
    """Keys of the sample to start from."""

    place: Tensor  # int64 [R, C]
    clock: Tensor  # `Sample.clock`, inf for what is no start


@triton.jit
def part_sums(base, slot, exists, parts, stride, piece, MANY: tl.constexpr, E: tl.constexpr):
    """Sum over the splits of base [splits, stride, E], vectors `slot`: [len(slot), E]. MANY are loaded at a time."""
    total = tl.zeros([slot.shape[0], E.BLOCK], tl.float32)  # [BC, E]
    e = piece * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
    place = base + slot[:, None] * E.SIZE + e[None, :]  # [BC, E]
    for begin in range(0, parts.splits, MANY):
        for n in tl.static_range(MANY):
            further = (begin + n) * tl.cast(stride, tl.int64) * E.SIZE
            inside = (exists & (slot * 0 + begin + n < parts.splits))[:, None] & (e < E.SIZE)[None, :]
            total += tl.load(place + further, mask=inside, other=0.0)
    return total


@triton.jit
def part_numbers(slot, exists, parts, stride):
    """How many keys the clusters at `slot` have: int32 [BC]."""
    total = tl.zeros([64, slot.shape[0]], tl.int32)  # [64, BC]
    for begin in range(0, parts.splits, 64):
        n = begin + tl.arange(0, 64)  # [64]
        at = (n.to(tl.int64) * stride)[:, None] + slot[None, :]  # [64, BC]
        inside = (n < parts.splits)[:, None] & exists[None, :]
        total += tl.load(parts.number + at, mask=inside, other=0.0).to(tl.int32)
    return tl.sum(total, 0)


@triton.jit
def means_kernel(
    parts,
    centers,
    values,
    sizes,
    all_clusters,
    MANY: tl.constexpr,
    BLOCK_C: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
):
    """The mean key, mean value and number of keys of every cluster. Program: block of clusters of all rows."""
    at = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)  # [BC]
    exists = at < all_clusters
    number = part_numbers(at, exists, parts, all_clusters)  # [BC]
    tl.store(sizes + at, number, mask=exists)
    divisor = tl.maximum(number, 1).to(tl.float32)[:, None]  # [BC, 1]
    for n in tl.static_range(tl.constexpr(E.PIECES)):
        e = (n * E.BLOCK + tl.arange(0, E.BLOCK))[None, :]  # [1, E]
        mean = part_sums(parts.k, at, exists, parts, all_clusters, n, MANY, E) / divisor  # [BC, E]
        tl.store(centers + at[:, None] * E.SIZE + e, mean, mask=exists[:, None] & (e < E.SIZE))
    for n in tl.static_range(tl.constexpr(F.PIECES)):
        f = (n * F.BLOCK + tl.arange(0, F.BLOCK))[None, :]  # [1, F]
        mean = part_sums(parts.v, at, exists, parts, all_clusters, n, MANY, F) / divisor  # [BC, F]
        tl.store(values + at[:, None] * F.SIZE + f, mean, mask=exists[:, None] & (f < F.SIZE))


@triton.jit
def starts(
    at,
    row,
    parts,
    start,
    some,
    far,
    forms,
    blocks,
    FROM: tl.constexpr,
    MANY: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
):
    """Centers and values of the clusters `at` in pieces [BC, E], [BC, F], and which of them there are.

    FROM "given": those of `start`; "drawn": the keys of its places; "parts": the means, for an empty cluster a far key.
    """
    count = forms.count
    exists = at < forms.count  # [BC]
    k_block = ()
    v_block = ()
    if FROM == "given":
        k_block = load_pieces(start.k + row * count * E.SIZE, at, exists, E)  # [BC, E]
        v_block = load_pieces(start.v + row * count * F.SIZE, at, exists, F)  # [BC, F]
    elif FROM == "drawn":
        place = tl.load(start.place + row * count + at, mask=exists, other=0)  # [BC]
        exists = exists & (tl.load(start.clock + row * some.keys + place) < float("inf"))
        k_block = load_pieces(some.k + row * some.keys * E.SIZE, place, exists, E)  # [BC, E]
        v_block = load_pieces(some.v + row * some.keys * F.SIZE, place, exists, F)  # [BC, F]
    else:
        slot = row * count + at  # [BC]
        all_clusters = (tl.num_programs(0) // (forms.padded // at.shape[0])).to(tl.int64) * count
        number = part_numbers(slot, exists, parts, all_clusters)  # [BC]
        place = tl.load(far + row * blocks + at % blocks)  # [BC]
        replaced = exists & (number == 0) & (place >= 0)  # [BC]
        divisor = tl.maximum(number, 1).to(tl.float32)[:, None]  # [BC, 1]
        for n in tl.static_range(tl.constexpr(E.PIECES)):
            mean = part_sums(parts.k, slot, exists, parts, all_clusters, n, MANY, E) / divisor  # [BC, E]
            key = load_piece(some.k + row * some.keys * E.SIZE, place, replaced, n, E).to(tl.float32)  # [BC, E]
            k_block += (tl.where(replaced[:, None], key, mean),)
        for n in tl.static_range(tl.constexpr(F.PIECES)):
            mean = part_sums(parts.v, slot, exists, parts, all_clusters, n, MANY, F) / divisor  # [BC, F]
            value = load_piece(some.v + row * some.keys * F.SIZE, place, replaced, n, F).to(tl.float32)  # [BC, F]
            v_block += (tl.where(replaced[:, None], value, mean),)
        exists = exists & ((number > 0) | replaced)
    exists = exists & all_finite(k_block) & all_finite(v_block)
    return k_block, v_block, exists


@triton.jit
def forms_kernel(
    parts,
    start,
    some,
    far,
    space,
    forms,
    blocks,
    FROM: tl.constexpr,
    MANY: tl.constexpr,
    BLOCK_C: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
):
    """Program (row, block of clusters). The bias is that of the rounded forms, so that only what a key is away from the
    mean is multiplied by what rounding left of them."""
    width = E.BLOCK * E.PIECES
    value_width = F.BLOCK * F.PIECES
    programs = forms.padded // BLOCK_C
    row = (tl.program_id(0) // programs).to(tl.int64)
    at = tl.program_id(0) % programs * BLOCK_C + tl.arange(0, BLOCK_C)  # [BC]
    k_block, v_block, exists = starts(at, row, parts, start, some, far, forms, blocks, FROM, MANY, E, F)
    slot = row * forms.padded + at  # [BC]
    bias = tl.zeros([BLOCK_C], tl.float32)  # [BC]
    weight = tl.load(space.weight + row)
    unit = 1.0
    value_unit = 1.0
    if forms.units is not None:  # no number of a metric is larger than the largest of its diagonal
        for n in tl.static_range(tl.constexpr(E.PIECES)):
            e = n * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
            unit = tl.maximum(unit if n > 0 else 0.0, tl.max(tl.load(space.metric + (row * width + e) * width + e), 0))
        unit = tl.where(unit > 0, unit, 1.0)
        value_unit = tl.where(weight > 0, weight, 1.0)
        tl.store(forms.units + row * 2, unit)
        tl.store(forms.units + row * 2 + 1, value_unit)
    apart = ()  # [BC, E] each, centers less the mean
    for n in tl.static_range(tl.constexpr(E.PIECES)):
        e = n * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
        x = finite(k_block[n].to(tl.float32))  # [BC, E]
        tl.store(forms.k + slot[:, None] * width + e[None, :], x)
        apart += (tl.where(exists[:, None], x - tl.load(space.k_mean + row * width + e)[None, :], 0.0),)
    for n in tl.static_range(tl.constexpr(E.PIECES)):
        e = n * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
        acc = tl.zeros([BLOCK_C, E.BLOCK], tl.float32)  # [BC, E]
        for m in tl.static_range(tl.constexpr(E.PIECES)):
            i = m * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
            metric = tl.load(space.metric + (row * width + i)[:, None] * width + e[None, :])  # [E, E]
            acc = product(apart[m], metric, acc)
        rounded = (acc / unit).to(forms.a.dtype.element_ty)  # [BC, E]
        tl.store(forms.a + slot[:, None] * width + e[None, :], rounded)
        mean = tl.load(space.k_mean + row * width + e)[None, :]  # [1, E]
        bias -= tl.sum(rounded.to(tl.float32) * unit * mean + acc * apart[n] / 2, 1)
    for n in tl.static_range(tl.constexpr(F.PIECES)):
        f = n * F.BLOCK + tl.arange(0, F.BLOCK)  # [F]
        x = finite(v_block[n].to(tl.float32))  # [BC, F]
        mean = tl.load(space.v_mean + row * value_width + f)[None, :]  # [1, F]
        tl.store(forms.v + slot[:, None] * value_width + f[None, :], x)
        away = tl.where(exists[:, None], x - mean, 0.0)  # [BC, F]
        rounded = (weight / value_unit * away).to(forms.b.dtype.element_ty)  # [BC, F]
        tl.store(forms.b + slot[:, None] * value_width + f[None, :], rounded)
        bias -= tl.sum(rounded.to(tl.float32) * value_unit * mean + weight * away * away / 2, 1)
    tl.store(forms.bias + slot, tl.where(exists & (tl.abs(bias) < float("inf")), bias, -float("inf")))
