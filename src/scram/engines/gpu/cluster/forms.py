"""Centers of clusters, in Triton, and the forms by which keys are compared with them."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..primitives import LOWEST, all_finite, finite, load_padded, load_piece, load_pieces, product
from .segments import cluster_segments, segment_sum
from .space import value_weight

ABSENT = LOWEST  # the bias of what is no cluster: finite, so that no score of a key that is finite is NaN


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


class GivenStart(NamedTuple):
    """Centers and values to start from."""

    k: Tensor  # [R, C, E]
    v: Tensor  # [R, C, F]


class DrawnStart(NamedTuple):
    """Keys of the sample to start from."""

    place: Tensor  # int [R, C]
    clock: Tensor  # `Sample.clock`, inf for what is no start


@triton.jit
def starts(
    at,
    row,
    start,
    some,
    starting,
    segments,
    far,
    forms,
    places,
    FROM: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
):
    """Centers and values of the clusters `at` in pieces [BC, E], [BC, F], and which of them there are.

    FROM "given": those of `start`; "drawn": the keys of its places; "means": of the keys that were assigned to them,
    for an empty cluster a far key.
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
        exists = exists & (tl.load(start.clock + row * some.keys + place, mask=exists, other=0.0) < float("inf"))
        k_block = load_pieces(some.k + row * some.keys * E.SIZE, place, exists, E)  # [BC, E]
        v_block = load_pieces(some.v + row * some.keys * F.SIZE, place, exists, F)  # [BC, F]
    else:
        number, first, last = cluster_segments(at, row, starting, some.keys, segments.splits, count)
        place = tl.load(far + row * places + at % places)  # [BC]
        replaced = exists & (number == 0) & (place >= 0)  # [BC]
        divisor = tl.maximum(number, 1).to(tl.float32)[:, None]  # [BC, 1]
        slot = row * forms.padded + at  # [BC]
        for n in tl.static_range(tl.constexpr(E.PIECES)):
            total = segment_sum(segments.k, at, row, first, last, segments, count, n, E)  # [BC, E]
            mean = load_padded(forms.k, slot, n, E) + total / divisor  # [BC, E]
            key = load_piece(some.k + row * some.keys * E.SIZE, place, replaced, n, E).to(tl.float32)  # [BC, E]
            k_block += (tl.where(replaced[:, None], key, mean),)
        for n in tl.static_range(tl.constexpr(F.PIECES)):
            total = segment_sum(segments.v, at, row, first, last, segments, count, n, F)  # [BC, F]
            mean = load_padded(forms.v, slot, n, F) + total / divisor  # [BC, F]
            value = load_piece(some.v + row * some.keys * F.SIZE, place, replaced, n, F).to(tl.float32)  # [BC, F]
            v_block += (tl.where(replaced[:, None], value, mean),)
        exists = exists & ((number > 0) | replaced)
    exists = exists & all_finite(k_block) & all_finite(v_block)
    return k_block, v_block, exists


@triton.jit
def forms_kernel(
    start,
    some,
    starting,
    segments,
    far,
    space,
    forms,
    places,
    FROM: tl.constexpr,
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
    k_block, v_block, exists = starts(at, row, start, some, starting, segments, far, forms, places, FROM, E, F)
    slot = row * forms.padded + at  # [BC]
    bias = tl.zeros([BLOCK_C], tl.float32)  # [BC]
    weight, _ = value_weight(space, row)
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
    tl.store(forms.bias + slot, tl.where(exists & (tl.abs(bias) < float("inf")), bias, ABSENT))
