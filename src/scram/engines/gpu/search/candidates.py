"""Candidates of a search in Triton: where they come from, which keys are legal, what they score."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ....calls import SearchCall
from ....grid import LegalKeys
from ..noise import absorb, below
from ..primitives import divide, dot, lane_place, load_float32, near


class AllowedKeys(NamedTuple):
    """The keys that a mask allows, as kernels take them; no mask, no tensors."""

    mask: Any  # bool [rows of the mask, M]
    order: Any  # int64 [rows of the mask, M], the unmasked keys ascending
    count: Any  # int64 [rows of the mask, M], how many come up to a key
    group: int  # rows of queries that share a row of the mask


ANY_KEY = AllowedKeys(None, None, None, 1)


class Starts(NamedTuple):
    """Keys that a match must be near, as kernels take them; without a limit, no tensor."""

    index: Any  # int32 [P, count]
    count: int
    reach: tuple[int, ...]  # how near, one per axis


class Limits(NamedTuple):
    """What decides in a row of queries whether a key is legal, in a kernel."""

    allowed: Any  # AllowedKeys
    mask_row: Any  # int64
    keys: Any  # of a row
    earlier: Any  # int32 [runs, P], the matches of the runs before this one
    plane: Any  # P
    run: Any
    separation: Any
    starts: Any  # Starts


class Rules(NamedTuple):
    """Which limits there are, known when compiling."""

    CAUSAL: bool
    SEPARATED: bool  # earlier matches keep others at a distance, not only from themselves
    EARLIER: bool  # there may be earlier runs


def allowed_argument(q: Tensor, k: Tensor, causal: bool, key_mask: Tensor | None) -> AllowedKeys:
    """q [B, H, *G, E], k [B, Hk, *G', E], key_mask bool [B, *G'] or [B, H, *G']."""
    if key_mask is None:
        return ANY_KEY
    keys = LegalKeys.of(q, k, causal, key_mask.contiguous())
    assert keys.order is not None
    return AllowedKeys(keys.mask, keys.order.contiguous(), keys.count, keys.heads_per_row)


def starts_argument(call: SearchCall) -> Starts:
    if call.starts is None:
        return Starts(None, 1, (0,) * (call.k.ndim - 3))
    return Starts(call.starts.contiguous(), call.starts.shape[-1], call.reach)


@triton.jit
def at_axis(axis, x):
    """x[axis], for an axis known at run time."""
    chosen = axis * 0 + x[0]
    for a in tl.static_range(1, len(x)):
        chosen = tl.where(axis == a, x[a], chosen)
    return chosen


@triton.jit
def along(axis, corner, geo, B: tl.constexpr):
    """On an axis known at run time: the queries' places [BQ], the extents and the strides of queries and keys."""
    place = lane_place(corner, 0, B)  # [BQ]
    q_stride = axis * 0 + 1
    k_stride = axis * 0 + 1
    for a in tl.static_range(1, len(geo.q)):
        place = tl.where(axis == a, lane_place(corner, a, B), place)
        q_stride = tl.where(axis < a, q_stride * geo.q[a], q_stride)
        k_stride = tl.where(axis < a, k_stride * geo.k[a], k_stride)
    return place, at_axis(axis, geo.q), at_axis(axis, geo.k), q_stride, k_stride


@triton.jit
def coordinate(key, axis, geo):
    """The coordinate of flat keys on an axis known at run time."""
    rest = key
    place = key
    for a in tl.static_range(len(geo.k) - 1, 0, -1):
        up = divide(rest, geo.magic[a])
        place = tl.where(axis == a, rest - up * geo.k[a], place)
        rest = up
    return tl.where(axis == 0, rest, place)


@triton.jit
def around(draws, draw, key, radius, starts, geo):
    """A key [BQ] drawn from the box of that radius around `key`, cut at the border and to the reach."""
    rest = tl.maximum(key, 0)
    drawn = key * 0
    stride = 1
    for a in tl.static_range(len(geo.k) - 1, -1, -1):
        up = divide(rest, geo.magic[a]) if a > 0 else rest * 0
        place = rest - up * geo.k[a]
        far = radius if starts.index is None else tl.minimum(radius, starts.reach[a])
        low = tl.maximum(place - far, 0)
        high = place + tl.minimum(far, geo.k[a] - 1 - place)
        drawn += (low + below(absorb(draws, draw + a), high - low + 1)) * stride
        rest = up
        stride = stride * geo.k[a]
    return drawn


@triton.jit
def draw_allowed(bits, query, allowed, mask_row, keys, CAUSAL: tl.constexpr):
    """A key [BQ] drawn from the allowed ones of each query, and whether there is any."""
    last = query if CAUSAL else query * 0 + (keys - 1)
    if allowed.count is None:
        choices = last + 1
        key = below(bits, choices)
    else:
        choices = tl.load(allowed.count + mask_row * keys + last).to(tl.int32)
        key = tl.load(allowed.order + mask_row * keys + below(bits, choices), mask=choices > 0, other=0).to(tl.int32)
    return key, choices > 0


@triton.jit
def near_start(draws, draw, point, number, exists, starts, geo):
    """A key [BQ] drawn from those near the start of that number of each query."""
    start = tl.load(starts.index + point * starts.count + number % starts.count, mask=exists, other=0)  # [BQ]
    return around(draws, draw, start, 2**31 - 1, starts, geo)


@triton.jit
def legal(key, ok, query, point, limits, geo, RULES: tl.constexpr):
    """Where `ok` also holds whether `key` [BQ], on the grid, is legal: mask, order, starts, earlier matches."""
    starts = limits.starts
    if RULES.CAUSAL:
        ok = ok & (key <= query)
    if limits.allowed.mask is not None:
        ok = ok & (tl.load(limits.allowed.mask + limits.mask_row * limits.keys + key, mask=ok, other=0) != 0)
    if starts.index is not None:
        close = ok & ~ok
        for n in range(tl.where(tl.max(ok.to(tl.int32), axis=0) > 0, starts.count, 0)):
            start = tl.load(starts.index + point * starts.count + n, mask=ok, other=0)  # [BQ]
            close = close | near(key, start, starts.reach, geo)
        ok = ok & close
    if RULES.EARLIER:
        reach = ()
        for _ in tl.static_range(len(geo.k)):
            reach += (limits.separation,)
        # Most candidates lose for every query, then no earlier match is read.
        for e in range(tl.where(tl.max(ok.to(tl.int32), axis=0) > 0, limits.run, 0)):
            match = tl.load(limits.earlier + e * limits.plane + point, mask=ok, other=-1)  # [BQ]
            close = (match >= 0) & near(key, tl.maximum(match, 0), reach, geo) if RULES.SEPARATED else match == key
            ok = ok & ~close
    return ok


@triton.jit
def score_of(q_block, k_row, key, wanted, E: tl.constexpr):
    """The score [BQ] of one key per query, NaN as -inf; keys that are not wanted are not read."""
    s = dot(q_block, load_float32(k_row, key, wanted, E))  # [BQ]
    return tl.where(s == s, s, -float("inf"))
