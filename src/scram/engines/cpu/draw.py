"""Draws of importance sampling on a CPU: keys near the modes or anywhere, and the logs of their weights."""

import math
from typing import NamedTuple

import numpy as np

from .compiled import compiled
from .layout import Array
from .noise import absorb, below
from .threads import parallel


class Draws(NamedTuple):
    """Where the keys are drawn from."""

    modes: Array  # int32 [P, kappa]
    count: Array  # type: ignore[assignment]  # int32 [P], modes that exist
    total: Array  # int32 [P], allowed keys
    order: Array  # int64 [R or B, M], the unmasked keys ascending; without elements: no mask
    table: Array  # int32 [2 R + 2], running sums of the weights of the steps -R..R
    seed: Array  # uint32 [R], the hash after the seed and the row
    alpha: float  # the share of draws near modes


@parallel
def draw_keys(task, tasks, geometry, draws, begin, keys, logs):
    """Fill keys and logs for the points from `begin` on; what may not be visited is left out, -1 follows the last."""
    grid = geometry.grid
    strides = geometry.strides
    mask = geometry.mask
    table = draws.table
    threshold = np.int64(draws.alpha * 2.0**32)
    samples = keys.shape[1]
    size = min(len(keys), len(draws.count) - begin)
    for c in range(size * task // tasks, size * (task + 1) // tasks):
        point = begin + c
        row = point // geometry.queries
        count = draws.count[point]
        total = draws.total[point]
        query = point - row * geometry.queries
        mask_row = row // geometry.rows_per_mask
        alpha = draws.alpha if count > 0 else 0.0
        state = absorb(draws.seed[row], query)
        seen = 0
        for t in range(samples):
            noise = absorb(state, t)
            which = absorb(noise, 1)
            if np.int64(absorb(noise, 0)) < threshold and count > 0:
                mode = np.int64(draws.modes[point, below(which, count)])
                key = np.int64(0)
                for axis in range(len(grid)):
                    center = mode // strides[axis]
                    mode -= center * strides[axis]
                    key += (center + _step(table, absorb(noise, 2 + axis), center, grid[axis])) * strides[axis]
            elif total > 0:
                key = below(which, total)
                if len(draws.order):
                    key = draws.order[mask_row, key]
            else:
                continue
            if (geometry.causal and key > query) or (len(mask) and not mask[mask_row, key]):
                continue
            r = (1 - alpha) / total
            if alpha > 0:
                r += alpha * _closeness(key, draws.modes[point, :count], table, grid, strides) / count
            keys[c, seen] = key
            logs[c, seen] = -math.log(r * samples)
            seen += 1
        keys[c, seen:] = -1


@compiled
def find(table, target):
    """The step whose stretch of the table holds the target."""
    low = 0
    high = len(table) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if table[middle] <= target:
            low = middle
        else:
            high = middle
    return low - (len(table) // 2 - 1)


@compiled
def _step(table, bits, center, extent):
    reach = len(table) // 2 - 1
    low = max(-center, -reach)
    high = min(extent - 1 - center, reach)
    start = np.int64(table[low + reach])
    return find(table, start + below(bits, table[high + 1 + reach] - start))


@compiled
def _closeness(key, modes, table, grid, strides):
    """The sum over the modes of the density of a step from there to the key."""
    reach = len(table) // 2 - 1
    total = 0.0
    for m in range(len(modes)):
        mode = np.int64(modes[m])
        rest = key
        g = 1.0
        for axis in range(len(grid)):
            center = mode // strides[axis]
            at = rest // strides[axis]
            mode -= center * strides[axis]
            rest -= at * strides[axis]
            d = at - center
            if not -reach <= d <= reach:
                g = 0.0
                break
            low = max(-center, -reach)
            high = min(grid[axis] - 1 - center, reach)
            g *= (table[d + reach + 1] - table[d + reach]) / (table[high + 1 + reach] - table[low + reach])
        total += g
    return total
