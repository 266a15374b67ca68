"""Metropolis-Hastings walks on a CPU: the keys visited, the share of steps accepted, and rhat of the scores."""

import math
from typing import NamedTuple

import numpy as np

from .compiled import inlined
from .draw import find
from .layout import Array
from .noise import absorb, below
from .threads import parallel
from .vectors import dot


class Walks(NamedTuple):
    """Where the walks of a point begin, and how they step."""

    modes: Array  # int32 [P, kappa]
    count: Array  # type: ignore[assignment]  # int32 [P], modes that exist
    table: Array  # int32 [2 R + 2], running sums of the weights of the steps -R..R
    seed: Array  # uint32 [R], the hash after the seed and the row
    scale: float
    chains_per_mode: int
    burn_in: int


@parallel
def walk_keys(task, tasks, q, k, geometry, walks, begin, keys, logs, diagnostics):
    """Fill keys and logs for the points from `begin` on, and acceptance and rhat, diagnostics [2, P]."""
    size = min(len(keys), len(walks.count) - begin)
    for c in range(size * task // tasks, size * (task + 1) // tasks):
        point = begin + c
        samples = keys.shape[1]
        chains = min(walks.count[point] * walks.chains_per_mode, samples)
        accepted = _walk(q, k, geometry, walks, chains, point, keys[c], logs[c])
        diagnostics[0, point] = accepted / samples
        diagnostics[1, point] = _rhat(logs[c], chains)
        logs[c, :] = 0


@inlined
def _walk(q, k, geometry, walks, chains, point, keys, scores):
    """All walks of a query, one after the other: the state after each step that counts. Returns how many moved."""
    grid = geometry.grid
    strides = geometry.strides
    mask = geometry.mask
    table = walks.table
    row = point // geometry.queries
    samples = len(keys)
    number = scores.dtype.type
    query = point - row * geometry.queries
    mask_row = row // geometry.rows_per_mask
    first = geometry.key_rows[row] * geometry.keys
    rank = len(grid)
    filled = 0
    accepted = 0
    state = absorb(walks.seed[row], query)
    for chain in range(chains):
        key = np.int64(walks.modes[point, chain // walks.chains_per_mode])
        a = number(walks.scale * dot(q, point, k, first + key))
        length = samples // chains + (chain < samples % chains)
        chain_state = absorb(state, chain)
        for step in range(walks.burn_in + length):
            noise = absorb(chain_state, step)
            left = key
            to = np.int64(0)
            on_grid = True
            for axis in range(rank):
                center = left // strides[axis]
                left -= center * strides[axis]
                place = center + find(table, below(absorb(noise, axis), table[-1]))
                on_grid = on_grid and 0 <= place < grid[axis]
                to += place * strides[axis]
            move = on_grid and to != key and not (geometry.causal and to > query)
            if move and (len(mask) == 0 or mask[mask_row, to]):
                b = number(walks.scale * dot(q, point, k, first + to))
                u = number((number(absorb(noise, rank)) + number(0.5)) / number(4294967296.0))
                if b >= a or u < math.exp(b - a):
                    key = to
                    a = b
                    accepted += step >= walks.burn_in
            if step >= walks.burn_in:
                keys[filled] = key
                scores[filled] = a
                filled += 1
    keys[filled:] = -1
    return accepted


@inlined
def _rhat(scores, chains):
    """Of walks that lie one after the other, cut to the shortest; a single one is cut into halves."""
    samples = len(scores)
    if chains == 0 or (chains == 1 and samples < 2):
        return np.inf
    parts, length = (chains, samples // chains) if chains > 1 else (2, samples // 2)
    longer = samples % chains
    within = 0.0
    middle = 0.0
    spread = 0.0
    agree = True
    first = 0.0
    for part in range(parts):
        start = part * length + min(part, longer) if chains > 1 else part * (samples - length)
        origin = np.float64(scores[start])
        mean = 0.0
        square = 0.0
        for t in range(start, start + length):
            mean += scores[t] - origin
        mean = mean / length
        for t in range(start, start + length):
            square += (scores[t] - origin - mean) ** 2
        within += square / max(length - 1, 1) / parts
        mean += origin
        if part == 0:
            first = mean
        agree = agree and mean == first
        gap = mean - middle
        middle += gap / (part + 1)
        spread += gap * (mean - middle)
    if within == 0:
        return 1.0 if agree else np.inf
    return math.sqrt(((length - 1) / length * within + spread / (parts - 1)) / within)
