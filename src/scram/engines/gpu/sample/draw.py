"""Draws of importance sampling in Triton: one lane for each sample of each query."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..attend.windows import unmasked
from ..noise import Seed, absorb, below, row_state
from ..primitives import Geometry, KeyMask, divide, points


class Proposal(NamedTuple):
    """What the keys of a SampleCall are drawn from, as kernels take it."""

    modes: Tensor  # int32 [B, H, *G, kappa]
    count: Tensor  # int32 [B, H, *G]
    total: Tensor  # int32 [B, H, *G]
    order: Tensor | None  # int64 [rows of the mask, M]
    table: Tensor  # int32 [steps + 1]
    masked: KeyMask
    seed: Seed
    geo: Geometry
    kappa: int  # modes of a query
    samples: int
    steps: int  # of the table
    threshold: int  # draws near a mode lie below
    alpha: float


class Chunk(NamedTuple):
    """The keys of some points."""

    keys: Tensor  # int32 [C, T], -1 for none
    logs: Tensor  # float32 [C, T], the logs of their weights
    begin: int  # the first point
    size: int  # how many points


@triton.jit
def place_of(key, axis: tl.constexpr, geo):
    """The coordinate of flat keys on an axis."""
    for a in tl.static_range(len(geo.k) - 1, axis, -1):
        key = divide(key, geo.magic[a])
    return key - divide(key, geo.magic[axis]) * geo.k[axis] if axis > 0 else key


@triton.jit
def find(table, target, steps):
    """The step whose stretch of the table, running sums over `steps` steps, holds the target."""
    low, high = target * 0, target * 0 + steps
    while tl.max(high - low) > 1:
        middle = (low + high) // 2
        right = tl.load(table + middle) <= target
        low, high = tl.where(right, middle, low), tl.where(right, high, middle)
    return low - steps // 2


@triton.jit
def ends(table, centre, extent, steps):
    """The running sums before and after the steps from a coordinate that stay on its axis."""
    reach = steps // 2
    low, high = tl.maximum(-centre, -reach), tl.minimum(extent - 1 - centre, reach)
    return tl.load(table + low + reach), tl.load(table + high + 1 + reach)


@triton.jit
def draw_kernel(x, chunk, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    """The keys of a chunk, -1 for one that may not be visited, and the logs of their weights."""
    queries, keys, geo = points(x.geo.q), points(x.geo.k), x.geo
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = slot < tl.cast(chunk.size, tl.int64) * x.samples
    point, t = slot // x.samples + chunk.begin, (slot % x.samples).to(tl.int32)
    row, query = (point // queries).to(tl.int32), (point % queries).to(tl.int32)
    mask_row = (row // x.masked.heads).to(tl.int64)
    noise = absorb(absorb(row_state(x.seed, row), query), t)
    number = tl.load(x.count + point, mask=valid, other=0)
    choices = tl.load(x.total + point, mask=valid, other=0)
    which = absorb(noise, t * 0 + 1)

    near = (number > 0) & (absorb(noise, t * 0) < tl.cast(x.threshold, tl.uint32))
    uniform = below(which, choices)
    if x.order is not None:
        uniform = tl.load(x.order + mask_row * keys + uniform, mask=valid & (choices > 0), other=0).to(tl.int32)
    mode = tl.load(x.modes + point * x.kappa + below(which, number), mask=valid & near, other=0)
    key = t * 0
    for a in tl.static_range(len(geo.k)):
        centre = place_of(mode, a, geo)
        before, after = ends(x.table, centre, geo.k[a], x.steps)
        target = before + below(absorb(noise, t * 0 + 2 + a), after - before)
        key = key * geo.k[a] + centre + find(x.table, target, x.steps)
    key = tl.where(near, key, uniform)
    ok = valid & (near | (choices > 0))
    if CAUSAL:
        ok = ok & (key <= query)
    ok = unmasked(key, ok, mask_row, x)

    closeness = tl.zeros([BLOCK], tl.float32)
    reach = x.steps // 2
    for m in range(x.kappa):
        there = ok & (m < number)
        other = tl.load(x.modes + point * x.kappa + m, mask=there, other=0)
        g = tl.where(there, 1.0, 0.0)
        for a in tl.static_range(len(geo.k)):
            centre = place_of(other, a, geo)
            d = place_of(key, a, geo) - centre
            before, after = ends(x.table, centre, geo.k[a], x.steps)
            within = there & (tl.abs(d) <= reach)
            weight = tl.load(x.table + d + reach + 1, mask=within, other=0)
            weight -= tl.load(x.table + d + reach, mask=within, other=0)
            g = g * weight.to(tl.float32) / (after - before).to(tl.float32)
        closeness += g
    share = tl.where(number > 0, x.alpha, 0.0)
    r = share * closeness / tl.maximum(number, 1).to(tl.float32)
    r += (1 - share) / tl.maximum(choices, 1).to(tl.float32)
    tl.store(chunk.keys + slot, tl.where(ok, key, -1), mask=valid)
    tl.store(chunk.logs + slot, -tl.log(r * x.samples), mask=valid)
