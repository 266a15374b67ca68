"""Draws of importance sampling in Triton: one lane for each sample of each query."""

# Kernels carry no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
from __future__ import annotations

import triton
import triton.language as tl

from .grid import GEOMETRY, divide, points
from .noise import absorb, below, row_state

SETTINGS = ("low", "high", "mask_heads", "group", "kappa", "samples", "threshold", "steps", "begin", "size", *GEOMETRY)


@triton.jit
def place_of(key, axis: tl.constexpr, KG, MAGIC, RANK: tl.constexpr):
    """The coordinate of flat keys on an axis."""
    for a in tl.static_range(RANK - 1, axis, -1):
        key = divide(key, MAGIC[a])
    return key - divide(key, MAGIC[axis]) * KG[axis] if axis > 0 else key


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


@triton.jit(do_not_specialize=SETTINGS)
def draw_kernel(
    modes, count, total, order, mask, table, SEED, low, high, mask_heads, group, kappa, samples, threshold, steps,
    begin, size, q0, q1, q2, q3, k0, k1, k2, k3, m1, m2, m3, alpha,
    keys_out, logs_out,
    RANK: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keys [C, T], -1 where it may not be visited, and the logs of their weights, of `size` points from `begin` on."""
    QG, KG, MAGIC = (q0, q1, q2, q3), (k0, k1, k2, k3), (m1, m1, m2, m3)
    queries, keys = points(QG, RANK), points(KG, RANK)
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = slot < size.to(tl.int64) * samples
    point, t = slot // samples + begin, (slot % samples).to(tl.int32)
    row, query = (point // queries).to(tl.int32), (point % queries).to(tl.int32)
    mask_row = (row // mask_heads).to(tl.int64)
    noise = absorb(absorb(row_state(SEED, low, high, row), query), t)
    number = tl.load(count + point, mask=valid, other=0)
    choices = tl.load(total + point, mask=valid, other=0)
    which = absorb(noise, t * 0 + 1)

    near = (number > 0) & (absorb(noise, t * 0) < threshold.to(tl.uint32))
    uniform = below(which, choices)
    if order is not None:
        uniform = tl.load(order + mask_row * keys + uniform, mask=valid & (choices > 0), other=0).to(tl.int32)
    mode = tl.load(modes + point * kappa + below(which, number), mask=valid & near, other=0)
    key = t * 0
    for a in tl.static_range(RANK):
        centre = place_of(mode, a, KG, MAGIC, RANK)
        before, after = ends(table, centre, KG[a], steps)
        key = key * KG[a] + centre + find(table, before + below(absorb(noise, t * 0 + 2 + a), after - before), steps)
    key = tl.where(near, key, uniform)
    ok = valid & (near | (choices > 0))
    if CAUSAL:
        ok = ok & (key <= query)
    if mask is not None:
        ok = ok & (tl.load(mask + mask_row * keys + key, mask=ok, other=0) != 0)

    closeness = tl.zeros([BLOCK], tl.float32)
    reach = steps // 2
    for m in range(kappa):
        there = ok & (m < number)
        other = tl.load(modes + point * kappa + m, mask=there, other=0)
        g = tl.where(there, 1.0, 0.0)
        for a in tl.static_range(RANK):
            centre = place_of(other, a, KG, MAGIC, RANK)
            d = place_of(key, a, KG, MAGIC, RANK) - centre
            before, after = ends(table, centre, KG[a], steps)
            within = there & (tl.abs(d) <= reach)
            weight = tl.load(table + d + reach + 1, mask=within, other=0)
            weight -= tl.load(table + d + reach, mask=within, other=0)
            g = g * weight.to(tl.float32) / (after - before).to(tl.float32)
        closeness += g
    share = tl.where(number > 0, alpha, 0.0)
    r = share * closeness / tl.maximum(number, 1).to(tl.float32)
    r += (1 - share) / tl.maximum(choices, 1).to(tl.float32)
    tl.store(keys_out + slot, tl.where(ok, key, -1), mask=valid)
    tl.store(logs_out + slot, -tl.log(r * samples), mask=valid)
