"""Algorithm 2 on a CPU: expand, weigh and mix for a block of queries at a time, in plain loops for the vector units."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from ..._compat.numba import SIMD_WIDTH
from ...calls import AttendCall
from ...grid import grid_of
from ...types import Attended
from .compiled import compiled, inlined, parallel
from .layout import Array, Geometry, Windows, array, padded
from .noise import absorb, seeded
from .threads import TASKS_PER_THREAD, threads
from .vectors import add, coordinates, dot, exp, narrow_dots

BLOCK = 256  # queries that are taken together, fewer where they attend many keys
BLOCK_WEIGHTS = 1 << 15  # at most, so that they stay in the second cache
SOFTMAX, MEAN, RELU = range(3)
WEIGHTS = {"softmax": SOFTMAX, "mean": MEAN, "relu": RELU}


class Dropout(NamedTuple):
    seed: np.uint32
    threshold: int  # noise below it drops a key; 0 drops none
    boost: float  # of what is kept


class AttendArrays(NamedTuple):
    """An AttendCall as the kernels read it."""

    q: Array  # [P, E]
    k: Array  # [B*Hk*M, E]
    v: Array  # [B*Hk*M, F]
    k_extra: Array  # [B*Hk*X, E]
    v_extra: Array  # [B*Hk*X, F]
    extras: int  # X
    windows: Windows
    geometry: Geometry
    scale: float
    weight: int
    dropout: Dropout

    @staticmethod
    def of(call: AttendCall) -> AttendArrays:
        q, k, v = (array(x) for x in (call.q, call.k, call.v))
        k_extra, v_extra = np.zeros((0, k.shape[1]), k.dtype), np.zeros((0, v.shape[1]), v.dtype)
        extras = 0
        if call.k_extra is not None and call.v_extra is not None:
            k_extra, v_extra, extras = array(call.k_extra), array(call.v_extra), call.k_extra.shape[2]
        seed = call.dropout_seed
        dropped = (0, 0) if seed is None else (seeded(int(seed)), int(call.dropout_p * 2**32))
        return AttendArrays(
            q, k, v, k_extra, v_extra, extras, Windows.of(call.index, call.radius, grid_of(call.k)),
            Geometry.of(call.q, call.k, call.key_mask, call.causal), call.scale, WEIGHTS[call.weight],
            Dropout(np.uint32(dropped[0]), dropped[1], 1 / (1 - call.dropout_p)),
        )  # fmt: skip


class Scratch(NamedTuple):
    """Of each task."""

    keys: Array  # int32 [tasks, slots + 1, size]
    weights: Array  # [tasks, slots + extras, size]
    places: Array  # int32 [tasks, kappa, rank, size], coordinates of the matches
    sums: Array  # [tasks, 2, size]


class Block(NamedTuple):
    """Points of one row that are taken together."""

    row: int
    begin: int  # the first as a query
    first: int  # and as a point
    first_key: int  # where the row's keys begin
    first_extra: int
    size: int


def attend(call: AttendCall) -> Attended:
    """Algorithm 2."""
    arrays = AttendArrays.of(call)
    points, dtype = len(arrays.q), arrays.v.dtype
    out, lse = np.empty((points, arrays.v.shape[1]), dtype), np.empty(points, dtype)
    matches, slots = arrays.windows.index.shape[1], arrays.windows.slots
    width = slots + arrays.extras
    size = max(1, min(BLOCK, BLOCK_WEIGHTS // max(width, 1)))
    arrays = arrays._replace(q=padded(arrays.q), k=padded(arrays.k), k_extra=padded(arrays.k_extra))
    with threads() as count:
        tasks = count * TASKS_PER_THREAD
        scratch = Scratch(
            np.empty((tasks, slots + 1, size), np.int32), np.empty((tasks, width, size), dtype),
            np.empty((tasks, matches, len(arrays.geometry.grid), size), np.int32), np.empty((tasks, 2, size), dtype),
        )  # fmt: skip
        _attend(tasks, arrays, scratch, out, lse)
    shape = call.q.shape[:-1]
    return Attended(
        torch.from_numpy(out).to(call.v.dtype).reshape(*shape, out.shape[1]), torch.from_numpy(lse).reshape(shape)
    )


@parallel
def _attend(task, tasks, arrays, scratch, out, lse):
    """Blocks of points of one row, each written by one task."""
    queries, block_size = arrays.geometry.queries, scratch.keys.shape[2]
    in_row = -(-queries // block_size)
    blocks = len(lse) // max(queries, 1) * in_row
    keys, weights, sums = scratch.keys[task], scratch.weights[task], scratch.sums[task]
    for number in range(blocks * task // tasks, blocks * (task + 1) // tasks):
        row = number // in_row
        begin, key_row = (number - row * in_row) * block_size, arrays.geometry.key_rows[row]
        first_key, first_extra = key_row * arrays.geometry.keys, key_row * arrays.extras
        size = min(block_size, queries - begin)
        block = Block(row, begin, row * queries + begin, first_key, first_extra, size)
        _expand(arrays.windows, arrays.geometry, block, keys, scratch.places[task])
        _score(arrays, block, keys, weights)
        _weigh(arrays, block, keys, weights, sums)
        _mix(arrays, block, keys, weights, sums, out, lse)


@inlined
def _expand(windows, geometry, block, keys, places):
    """For every slot of the windows and every point its key, or -1: off the grid, illegal, or in a window before."""
    grid, strides, reach, size = geometry.grid, geometry.strides, windows.reach, block.size
    rank, match, matches = len(grid), keys[len(keys) - 1], len(places)
    window = (len(keys) - 1) // max(matches, 1)
    for e in range(matches):
        for p in range(size):
            match[p] = windows.index[block.first + p, e]
        for axis in range(rank):
            coordinates(match, grid[axis], strides[axis], places[e, axis], size)
        for p in range(size):
            places[e, 0, p] = places[e, 0, p] if (match[p] >= 0) & (match[p] < geometry.keys) else -1
        for number in range(window):
            slot, rest, move = keys[e * window + number], number, 0
            for p in range(size):
                slot[p] = places[e, 0, p] >= 0
            for axis in range(rank - 1, -1, -1):
                side = 2 * reach[axis] + 1
                offset = np.int32(rest % side - reach[axis])
                rest //= side
                move += offset * strides[axis]
                for p in range(size):
                    at = places[e, axis, p] + offset
                    slot[p] &= (at >= 0) & (at < grid[axis])
            for p in range(size):
                slot[p] = match[p] + move if slot[p] else -1
            for before in range(e):
                _leave_out(slot, number, reach, places[e], places[before], size)
            if geometry.causal:
                for p in range(size):
                    slot[p] = slot[p] if slot[p] <= block.begin + p else -1
            if len(geometry.mask):
                allowed = geometry.mask[block.row // geometry.rows_per_mask]
                for p in range(size):
                    slot[p] = slot[p] if slot[p] >= 0 and allowed[slot[p]] else -1


@compiled
def _leave_out(slot, number, reach, places, before, size):
    """Set to -1 the keys of window slot `number` that lie in an earlier window too."""
    rank = len(reach)
    for p in range(size):
        covered, rest = before[0, p] >= 0, number
        for axis in range(rank - 1, -1, -1):
            side = 2 * reach[axis] + 1
            apart = places[axis, p] + rest % side - reach[axis] - before[axis, p]
            rest //= side
            covered &= (apart >= -reach[axis]) & (apart <= reach[axis])
        slot[p] = -1 if covered else slot[p]


@inlined
def _score(arrays, block, keys, weights):
    """Scaled scores of the keys; of slots without one nothing that is used."""
    q, k, size, slots = arrays.q, arrays.k, block.size, len(keys) - 1
    number, any_key = weights.dtype.type, keys[slots]
    for slot in range(slots):
        for p in range(size):
            any_key[p] = max(keys[slot, p], np.int32(0))
        if q.shape[1] == SIMD_WIDTH:
            narrow_dots(q, block.first, k, block.first_key, any_key, weights[slot], size)
        else:
            for p in range(size):
                weights[slot, p] = dot(q, block.first + p, k, block.first_key + any_key[p])
        for p in range(size):
            weights[slot, p] = number(arrays.scale * weights[slot, p])
    for x in range(arrays.extras):
        for p in range(size):
            score = dot(q, block.first + p, arrays.k_extra, block.first_extra + x)
            weights[slots + x, p] = number(arrays.scale * score)


@inlined
def _weigh(arrays, block, keys, weights, sums):
    """Scores to weights before they are divided by their sum; sums[0] is that sum, sums[1] the highest score."""
    size, slots, number, dropout = block.size, len(keys) - 1, weights.dtype.type, arrays.dropout
    total, top = sums[0], sums[1]
    zero, lowest, all_slots = number(0), number(-np.inf), slots + arrays.extras
    for p in range(size):
        total[p], top[p] = zero, lowest
    if arrays.weight == SOFTMAX:
        for slot in range(all_slots):
            for p in range(size):
                if slot < slots:
                    weights[slot, p] = weights[slot, p] if keys[slot, p] >= 0 else lowest
                top[p] = max(top[p], weights[slot, p])
        for slot in range(all_slots):
            for p in range(size):
                a = weights[slot, p] - (top[p] if top[p] > lowest else zero)
                weights[slot, p] = exp(a)
                total[p] += weights[slot, p]
    else:
        for slot in range(all_slots):
            for p in range(size):
                a = weights[slot, p]
                a = max(a, zero) if arrays.weight == RELU else a
                there = slot >= slots or keys[min(slot, slots), p] >= 0
                weights[slot, p] = a if there else zero
                total[p] += there
    if dropout.threshold:
        prefix = absorb(dropout.seed, block.row)
        for slot in range(all_slots):
            for p in range(size):
                name = keys[slot, p] if slot < slots else arrays.geometry.keys + slot - slots
                keep = absorb(absorb(prefix, block.begin + p), name) >= dropout.threshold
                weights[slot, p] = number(weights[slot, p] * dropout.boost) if keep else zero


@inlined
def _mix(arrays, block, keys, weights, sums, out, lse):
    slots, zero = len(keys) - 1, out.dtype.type(0)
    for p in range(block.size):
        point, found = block.first + p, arrays.extras
        for f in range(out.shape[1]):
            out[point, f] = zero
        for slot in range(slots):
            if keys[slot, p] >= 0:
                add(out, point, weights[slot, p], arrays.v, block.first_key + keys[slot, p])
                found += 1
        for x in range(arrays.extras):
            add(out, point, weights[slots + x, p], arrays.v_extra, block.first_extra + x)
        total, top = sums[0, p], sums[1, p]
        if found == 0:
            lse[point] = -np.inf
            continue
        lse[point] = math.log(total) + (top if arrays.weight == SOFTMAX and top != -np.inf else zero)
        for f in range(out.shape[1]):
            out[point, f] /= total
