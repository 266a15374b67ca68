"""Draws of importance sampling on a CPU: keys near the modes or anywhere, and the logs of their weights."""

# Numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import math

import numba
import numpy as np

from .compiled import compiled, parallel
from .noise import absorb, below


@parallel
def draw_keys(
    modes, count, total, order, grid, strides, reach, rest, table, seed, alpha, begin, tasks, keys, logs
):  # fmt: skip
    """Fill keys and logs for the points from `begin` on; what may not be visited is left out, -1 follows the last."""
    size = min(len(keys), len(count) - begin)
    for task in numba.prange(tasks):
        for c in range(size * task // tasks, size * (task + 1) // tasks):
            _draw_one(modes, count, total, order, grid, strides, rest, table, seed, alpha, begin + c, keys[c], logs[c])


@compiled
def _draw_one(modes, count, total, order, grid, strides, rest, table, seed, alpha, point, keys, logs):
    _, mask, rows_per_mask, causal, queries = rest
    row = point // queries
    query, mask_row, samples = point - row * queries, row // rows_per_mask, len(keys)
    near = alpha if count[point] > 0 else 0.0
    threshold = np.int64(alpha * 4294967296.0)
    state, seen = absorb(absorb(seed, row), query), 0
    for t in range(samples):
        noise = absorb(state, t)
        which = absorb(noise, 1)
        if np.int64(absorb(noise, 0)) < threshold and count[point] > 0:
            mode, key = np.int64(modes[point, below(which, count[point])]), np.int64(0)
            for axis in range(len(grid)):
                centre = mode // strides[axis]
                mode -= centre * strides[axis]
                key += (centre + _step(table, absorb(noise, 2 + axis), centre, grid[axis])) * strides[axis]
        elif total[point] > 0:
            key = below(which, total[point])
            if len(order):
                key = order[mask_row, key]
        else:
            continue
        if (causal and key > query) or (len(mask) and not mask[mask_row, key]):
            continue
        r = (1 - near) / total[point]
        if near > 0:
            r += near * _closeness(key, modes, count[point], point, table, grid, strides) / count[point]
        keys[seen], logs[seen] = key, -math.log(r * samples)
        seen += 1
    keys[seen:] = -1


@compiled
def find(table, target):
    """The step whose stretch of the table holds the target."""
    low, high = 0, len(table) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if table[middle] <= target:
            low = middle
        else:
            high = middle
    return low - (len(table) // 2 - 1)


@compiled
def _step(table, bits, centre, extent):
    reach = len(table) // 2 - 1
    low, high = max(-centre, -reach), min(extent - 1 - centre, reach)
    start = np.int64(table[low + reach])
    return find(table, start + below(bits, table[high + 1 + reach] - start))


@compiled
def _closeness(key, modes, count, point, table, grid, strides):
    """The sum over the modes of the density of a step from there to the key."""
    reach, total = len(table) // 2 - 1, 0.0
    for m in range(count):
        mode, rest, g = np.int64(modes[point, m]), key, 1.0
        for axis in range(len(grid)):
            centre, at = mode // strides[axis], rest // strides[axis]
            mode -= centre * strides[axis]
            rest -= at * strides[axis]
            d = at - centre
            if not -reach <= d <= reach:
                g = 0.0
                break
            low, high = max(-centre, -reach), min(grid[axis] - 1 - centre, reach)
            g *= (table[d + reach + 1] - table[d + reach]) / (table[high + 1 + reach] - table[low + reach])
        total += g
    return total
