"""Algorithm 2 on a CPU: expand, weigh and mix for a block of queries at a time, in plain loops for the vector units."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..._compat.numba import SIMD_WIDTH
from ...core.calls import AttendCall
from ...results import Attended
from ...spec.grid import grid_of
from .compiled import inlined
from .layout import Array, Geometry, Routing, Windows, array, block_at, padded, row_states, tensor
from .noise import absorb
from .threads import in_one_pool, parallel, tasks_of, threads
from .vectors import add, dot, exp, narrow_dots
from .windows import SPARE, expand_block

BLOCK = 256  # queries that are taken together, fewer where they attend many keys
BLOCK_WEIGHTS = 1 << 15  # at most, so that they stay in the second cache
SOFTMAX, MEAN, RELU = range(3)
WEIGHTS = {"softmax": SOFTMAX, "mean": MEAN, "relu": RELU}


class AttendArrays(NamedTuple):
    """An AttendCall as the kernels read it. The extra keys of a row follow its M keys, with the numbers from M on."""

    q: Array  # [P, E]
    k: Array  # [B*Hk*(M + X), E]
    v: Array  # [B*Hk*(M + X), F]
    extras: int  # X
    windows: Windows
    geometry: Geometry
    scale: float
    weight: int
    seed: Array  # uint32 [R], the hash after the seed and the row
    threshold: int  # noise below it drops a key; 0 drops none
    boost: float  # of the weights that dropout keeps

    @staticmethod
    def of(call: AttendCall) -> AttendArrays:
        extras = 0 if call.k_extra is None else call.k_extra.shape[2]
        seed = np.zeros(0, np.uint32)
        threshold = 0
        if call.dropout_seed is not None:
            seed = row_states(call.dropout_seed, call.q, call.rows)
            threshold = int(call.dropout_p * 2**32)
        return AttendArrays(
            q=array(call.q),
            k=_joined(call.k, call.k_extra),
            v=_joined(call.v, call.v_extra),
            extras=extras,
            windows=Windows.of(call.index, call.radius, grid_of(call.k), Routing.of(call.q, call.label, call.routes)),
            geometry=Geometry.of(call.q, call.k, call.key_mask, call.causal),
            scale=call.scale,
            weight=WEIGHTS[call.weight],
            seed=seed,
            threshold=threshold,
            boost=1 / (1 - call.dropout_p),
        )


def _joined(x: Tensor, extra: Tensor | None) -> Array:
    """[B, Hk, *G, width] and [B, Hk, X, width] -> [B*Hk*(M + X), width]"""
    return array(x if extra is None else torch.cat([x.detach().flatten(2, -2), extra.detach()], 2))


class Scratch(NamedTuple):
    """Of each task."""

    keys: Array  # int32 [tasks, n + SPARE, size]
    weights: Array  # [tasks, n, size]
    places: Array  # int32 [tasks, kappa, rank, size], coordinates of the matches
    sums: Array  # [tasks, 2, size]: sum of the weights, highest score


@in_one_pool
def attend(call: AttendCall) -> Attended:
    """Algorithm 2."""
    arrays = AttendArrays.of(call)
    points = len(arrays.q)
    dtype = arrays.v.dtype
    out = np.empty((points, arrays.v.shape[1]), dtype)
    lse = np.empty(points, dtype)
    width = arrays.windows.slots + arrays.extras
    size = max(1, min(BLOCK, BLOCK_WEIGHTS // max(width, 1)))
    arrays = arrays._replace(q=padded(arrays.q), k=padded(arrays.k))
    with threads() as most_tasks:
        tasks = tasks_of(most_tasks, len(arrays.geometry.key_rows) * -(-arrays.geometry.queries // size))
        matches = arrays.windows.index.shape[1]
        rank = len(arrays.geometry.grid)
        scratch = Scratch(
            keys=np.empty((tasks, width + SPARE, size), np.int32),
            weights=np.empty((tasks, width, size), dtype),
            places=np.empty((tasks, matches, rank, size), np.int32),
            sums=np.empty((tasks, 2, size), dtype),
        )
        _attend(tasks, arrays, scratch, out, lse)
    return Attended(tensor(out, call.v.dtype, call.q), tensor(lse, None, call.q))


@parallel
def _attend(task, tasks, arrays, scratch, out, lse):
    """Blocks of points of one row, each written by one task."""
    geometry = arrays.geometry
    most = scratch.keys.shape[2]
    blocks = len(geometry.key_rows) * -(-geometry.queries // most)
    keys = scratch.keys[task]  # [n + SPARE, size]
    weights = scratch.weights[task]  # [n, size]
    sums = scratch.sums[task]  # [2, size]
    for number in range(blocks * task // tasks, blocks * (task + 1) // tasks):
        block = block_at(number, most, geometry, geometry.keys + arrays.extras)
        expand_block(arrays.windows, geometry, arrays.extras, block, keys, scratch.places[task])
        _score(arrays, block, keys, weights)
        _weigh(arrays, block, keys, weights, sums)
        _mix(arrays, block, keys, weights, sums, out, lse)


@inlined
def _score(arrays, block, keys, weights):
    """Scaled scores of the keys; of slots without one nothing that is used."""
    q = arrays.q
    k = arrays.k
    size = block.size
    number = weights.dtype.type
    any_key = keys[len(weights)]  # [size]
    for slot in range(len(weights)):
        for p in range(size):
            any_key[p] = max(keys[slot, p], np.int32(0))
        if q.shape[1] == SIMD_WIDTH:
            narrow_dots(q, block.first, k, block.first_key, any_key, weights[slot], size)
        else:
            for p in range(size):
                weights[slot, p] = dot(q, block.first + p, k, block.first_key + any_key[p])
        for p in range(size):
            weights[slot, p] = number(arrays.scale * weights[slot, p])


@inlined
def _weigh(arrays, block, keys, weights, sums):
    """Scores to weights before they are divided by their sum; sums[0] is that sum, sums[1] the highest score."""
    size = block.size
    slots = len(weights)
    number = weights.dtype.type
    total = sums[0]  # [size]
    top = sums[1]  # [size]
    zero = number(0)
    lowest = number(-np.inf)
    for p in range(size):
        total[p] = zero
        top[p] = lowest
    if arrays.weight == SOFTMAX:
        for slot in range(slots):
            for p in range(size):
                weights[slot, p] = weights[slot, p] if keys[slot, p] >= 0 else lowest
                top[p] = max(top[p], weights[slot, p])
        for slot in range(slots):
            for p in range(size):
                a = weights[slot, p] - (top[p] if top[p] > lowest else zero)
                weights[slot, p] = exp(a)
                total[p] += weights[slot, p]
    else:
        for slot in range(slots):
            for p in range(size):
                a = max(weights[slot, p], zero) if arrays.weight == RELU else weights[slot, p]
                weights[slot, p] = a if keys[slot, p] >= 0 else zero
                total[p] += keys[slot, p] >= 0
    if arrays.threshold:
        prefix = arrays.seed[block.row]
        for slot in range(slots):
            for p in range(size):
                keep = absorb(absorb(prefix, block.begin + p), keys[slot, p]) >= arrays.threshold
                weights[slot, p] = number(weights[slot, p] * arrays.boost) if keep else zero


@inlined
def _mix(arrays, block, keys, weights, sums, out, lse):
    """Write out [P, F] and lse [P] of a block."""
    for p in range(block.size):
        point = block.first + p
        attended = 0
        zero = out.dtype.type(0)
        for f in range(out.shape[1]):
            out[point, f] = zero
        for slot in range(len(weights)):
            if keys[slot, p] >= 0:
                add(out, point, weights[slot, p], arrays.v, block.first_key + keys[slot, p])
                attended += 1
        total = sums[0, p]
        top = sums[1, p]
        if attended == 0:
            lse[point] = -np.inf
            continue
        lse[point] = math.log(total) + (top if arrays.weight == SOFTMAX and top != -np.inf else zero)
        for f in range(out.shape[1]):
            out[point, f] /= total
