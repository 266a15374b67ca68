"""Metropolis-Hastings walks on a CPU: the keys visited, the share of steps accepted, and rhat of the scores."""

# Numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import math

import numba
import numpy as np

from .compiled import compiled, parallel
from .draw import find
from .noise import absorb, below
from .vectors import dot


@parallel
def walk_keys(
    q, k, modes, count, grid, strides, reach, rest, table, seed, scale, chains_per_mode, burn_in, begin, tasks, keys,
    logs, told,
):  # fmt: skip
    """Fill keys and logs for the points from `begin` on, and acceptance and rhat, told [2, P]."""
    size = min(len(keys), len(count) - begin)
    for task in numba.prange(tasks):
        for c in range(size * task // tasks, size * (task + 1) // tasks):
            accepted = _walk(
                q, k, modes, count[begin + c], grid, strides, rest, table, seed, scale, chains_per_mode, burn_in,
                begin + c, keys[c], logs[c],
            )  # fmt: skip
            told[0, begin + c] = accepted / len(keys[c])
            told[1, begin + c] = _rhat(logs[c], min(count[begin + c] * chains_per_mode, len(keys[c])))
            logs[c, :] = 0


@compiled
def _walk(
    q, k, modes, count, grid, strides, rest, table, seed, scale, chains_per_mode, burn_in, point, keys, scores
):  # fmt: skip
    """All walks of a query, one after the other: the state after each step that counts. Returns how many moved."""
    key_rows, mask, rows_per_mask, causal, queries = rest
    row = point // queries
    query, mask_row, samples = point - row * queries, row // rows_per_mask, len(keys)
    first, rank, number = key_rows[row] * (grid[0] * strides[0]), len(grid), scores.dtype.type
    chains, made, accepted = min(count * chains_per_mode, samples), 0, 0
    state = absorb(absorb(seed, row), query)
    for chain in range(chains):
        key = np.int64(modes[point, chain // chains_per_mode])
        a = number(scale * dot(q, point, k, first + key))
        length = samples // chains + (chain < samples % chains)
        chain_state = absorb(state, chain)
        for step in range(burn_in + length):
            noise = absorb(chain_state, step)
            left, to, there = key, np.int64(0), True
            for axis in range(rank):
                centre = left // strides[axis]
                left -= centre * strides[axis]
                place = centre + find(table, below(absorb(noise, axis), table[-1]))
                there = there and 0 <= place < grid[axis]
                to += place * strides[axis]
            move = there and to != key and not (causal and to > query)
            if move and (len(mask) == 0 or mask[mask_row, to]):
                b = number(scale * dot(q, point, k, first + to))
                u = number((number(absorb(noise, rank)) + number(0.5)) / number(4294967296.0))
                if b >= a or u < math.exp(b - a):
                    key, a = to, b
                    accepted += step >= burn_in
            if step >= burn_in:
                keys[made], scores[made] = key, a
                made += 1
    keys[made:] = -1
    return accepted


@compiled
def _rhat(scores, chains):
    """Of walks that lie one after the other, cut to the shortest; a single one is cut into halves."""
    samples = len(scores)
    if chains == 0 or (chains == 1 and samples < 2):
        return np.inf
    parts, length = (chains, samples // chains) if chains > 1 else (2, samples // 2)
    longer = samples % chains
    within, middle, spread, agree, first = 0.0, 0.0, 0.0, True, 0.0
    for part in range(parts):
        start = part * length + min(part, longer) if chains > 1 else part * (samples - length)
        origin, mean, square = np.float64(scores[start]), 0.0, 0.0
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
