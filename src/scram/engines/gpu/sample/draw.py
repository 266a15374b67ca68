"""Draws of importance sampling in Triton: one lane for each sample of each query."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..noise import Seed, absorb, below, row_state
from ..primitives import Geometry, KeyMask, divide, points, unmasked


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
def place_on(key, axis: tl.constexpr, geo):
    """The coordinate of flat keys on an axis."""
    for a in tl.static_range(len(geo.k) - 1, axis, -1):
        key = divide(key, geo.magic[a])
    return key - divide(key, geo.magic[axis]) * geo.k[axis] if axis > 0 else key


@triton.jit
def step_of(table, target, steps):
    """The step whose stretch of the table, running sums over `steps` steps, holds the target."""
    low = target * 0
    high = target * 0 + steps
    while tl.max(high - low) > 1:
        middle = (low + high) // 2
        right = tl.load(table + middle) <= target
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    return low - steps // 2


@triton.jit
def ends(table, center, extent, steps):
    """The running sums before and after the steps from a coordinate that stay on its axis."""
    reach = steps // 2
    low = tl.maximum(-center, -reach)
    high = tl.minimum(extent - 1 - center, reach)
    return tl.load(table + low + reach), tl.load(table + high + 1 + reach)


@triton.jit
def draw_kernel(proposal, chunk, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    """The keys of a chunk, -1 for one that may not be visited, and the logs of their weights."""
    geo = proposal.geo
    queries = points(geo.q)
    keys = points(geo.k)
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    exists = slot < tl.cast(chunk.size, tl.int64) * proposal.samples
    point = slot // proposal.samples + chunk.begin  # [BLOCK]
    t = (slot % proposal.samples).to(tl.int32)  # [BLOCK]
    row = (point // queries).to(tl.int32)  # [BLOCK]
    query = (point % queries).to(tl.int32)  # [BLOCK]
    mask_row = (row // proposal.masked.group).to(tl.int64)  # [BLOCK]
    noise = absorb(absorb(row_state(proposal.seed, row), query), t)  # [BLOCK]
    number = tl.load(proposal.count + point, mask=exists, other=0)  # [BLOCK]
    choices = tl.load(proposal.total + point, mask=exists, other=0)  # [BLOCK]
    which = absorb(noise, t * 0 + 1)  # [BLOCK]

    near = (number > 0) & (absorb(noise, t * 0) < tl.cast(proposal.threshold, tl.uint32))  # [BLOCK]
    uniform = below(which, choices)  # [BLOCK]
    if proposal.order is not None:
        uniform = tl.load(proposal.order + mask_row * keys + uniform, mask=exists & (choices > 0), other=0).to(tl.int32)
    mode = tl.load(
        proposal.modes + point * proposal.kappa + below(which, number), mask=exists & near, other=0
    )  # [BLOCK]
    key = t * 0  # [BLOCK]
    for a in tl.static_range(len(geo.k)):
        center = place_on(mode, a, geo)  # [BLOCK]
        before, after = ends(proposal.table, center, geo.k[a], proposal.steps)
        target = before + below(absorb(noise, t * 0 + 2 + a), after - before)  # [BLOCK]
        key = key * geo.k[a] + center + step_of(proposal.table, target, proposal.steps)
    key = tl.where(near, key, uniform)
    ok = exists & (near | (choices > 0))
    if CAUSAL:
        ok = ok & (key <= query)
    ok = unmasked(key, ok, mask_row, proposal.masked, geo)

    closeness = tl.zeros([BLOCK], tl.float32)  # [BLOCK]
    reach = proposal.steps // 2
    for m in range(proposal.kappa):
        is_mode = ok & (m < number)
        other = tl.load(proposal.modes + point * proposal.kappa + m, mask=is_mode, other=0)  # [BLOCK]
        g = tl.where(is_mode, 1.0, 0.0)  # [BLOCK]
        for a in tl.static_range(len(geo.k)):
            center = place_on(other, a, geo)  # [BLOCK]
            d = place_on(key, a, geo) - center  # [BLOCK]
            before, after = ends(proposal.table, center, geo.k[a], proposal.steps)
            within = is_mode & (tl.abs(d) <= reach)
            weight = tl.load(proposal.table + d + reach + 1, mask=within, other=0)  # [BLOCK]
            weight -= tl.load(proposal.table + d + reach, mask=within, other=0)
            g = g * weight.to(tl.float32) / (after - before).to(tl.float32)
        closeness += g
    share = tl.where(number > 0, proposal.alpha, 0.0)  # [BLOCK]
    r = share * closeness / tl.maximum(number, 1).to(tl.float32)
    r += (1 - share) / tl.maximum(choices, 1).to(tl.float32)
    tl.store(chunk.keys + slot, tl.where(ok, key, -1), mask=exists)
    tl.store(chunk.logs + slot, -tl.log(r * proposal.samples), mask=exists)
