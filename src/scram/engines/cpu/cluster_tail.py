"""The clustered tail on a CPU: clusters of all keys outside of the windows, for a block of queries at a time.

Everything of a block is done by one thread and stays in its caches, the matrix products too: queries lie along the
vector units, clusters one below the other. Threads never wait for each other.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ...core.calls import ClusterTailCall
from ...results import Attended
from .compiled import compiled, inlined, parallel
from .layout import Array, Geometry, Windows, array, block_at, flat, tensor
from .noise import absorb, row_states
from .threads import TASKS_PER_THREAD, threads
from .vectors import add_guarded_product, add_product, exp
from .windows import expand_block

BLOCK = 192  # queries that are taken together, fewer where there are many clusters
BLOCK_WEIGHTS = 3 << 16  # at most
LEAST_BLOCK = 16
ALL_WEIGHTS = 1 << 24  # of all tasks: where blocks are large, there are fewer tasks
TASK_BLOCKS = 8  # at least: each task makes its own scratch
TOTAL, TOP, SHARE = range(3)


class ClusterTailArrays(NamedTuple):
    """A ClusterTailCall as the kernels read it."""

    q: Array  # [P, E]
    near_out: Array  # [P, F], of the windows
    near_lse: Array  # [P], of the windows
    label: Array  # int32 [Rc*M]
    centers: Array  # [Rc, C, E]
    values: Array  # [Rc, F, C]
    finite: bool  # all values
    sizes: Array  # int32 [Rc, C]
    gains: Array  # [Rc, C]
    windows: Windows
    geometry: Geometry
    scale: float
    seed: Array  # uint32 [R], the hash after the seed and the row
    threshold: int  # noise below it drops a cluster; 0 drops none
    boost: float  # of the weights that dropout keeps
    first_name: int

    @staticmethod
    def of(call: ClusterTailCall) -> ClusterTailArrays:
        wide = call.centers.dtype
        grid = call.label.shape[2:]
        seed = np.zeros(0, np.uint32)
        threshold = 0
        if call.dropout_seed is not None:
            seed = row_states(call.dropout_seed, call.q, call.rows)
            threshold = int(call.dropout_p * 2**32)
        sizes = by_row(call.sizes)
        gains = np.ones(sizes.shape, by_row(call.centers).dtype) if call.gains is None else by_row(call.gains)
        return ClusterTailArrays(
            q=array(call.q.to(wide)),
            near_out=array(call.near_out.to(wide)),
            near_lse=flat(call.near_lse.to(wide)),
            label=flat(call.label),
            centers=by_row(call.centers),
            values=by_row(call.values.mT),
            finite=bool(call.values.isfinite().all()),
            sizes=sizes,
            gains=gains,
            windows=Windows.of(call.index, call.radius, grid),
            geometry=Geometry.of(call.q, call.label.unsqueeze(-1), None, False),
            scale=call.scale,
            seed=seed,
            threshold=threshold,
            boost=1 / (1 - call.dropout_p),
            first_name=call.first_name,
        )


def by_row(x: Tensor) -> Array:
    """[B, Hc, ...] -> [Rc, ...]"""
    result: Array = x.detach().reshape(x.shape[0] * x.shape[1], *x.shape[2:]).contiguous().numpy()
    return result


class Scratch(NamedTuple):
    """Of each task."""

    keys: Array  # int32 [tasks, slots + 1, size], the last is spare
    places: Array  # int32 [tasks, kappa, rank, size], coordinates of the matches
    left: Array  # int32 [tasks, C, size], keys of each cluster outside of a query's windows
    weights: Array  # [tasks, C, size]
    features: Array  # [tasks, E, size]
    values: Array  # [tasks, F, size]
    sums: Array  # [tasks, 3, size]: weights' total, highest score, the windows' share

    @staticmethod
    def of(arrays: ClusterTailArrays, tasks: int, size: int) -> Scratch:
        matches = arrays.windows.index.shape[1]
        rank = len(arrays.geometry.grid)
        clusters = arrays.sizes.shape[1]
        dtype = arrays.centers.dtype
        return Scratch(
            keys=np.empty((tasks, arrays.windows.slots + 1, size), np.int32),
            places=np.empty((tasks, matches, rank, size), np.int32),
            left=np.empty((tasks, clusters, size), np.int32),
            weights=np.empty((tasks, clusters, size), dtype),
            features=np.empty((tasks, arrays.q.shape[1], size), dtype),
            values=np.empty((tasks, arrays.near_out.shape[1], size), dtype),
            sums=np.empty((tasks, 3, size), dtype),
        )


def block_size(clusters: int) -> int:
    """How many queries are taken together; no matter how many threads there are."""
    return min(BLOCK, max(LEAST_BLOCK, BLOCK_WEIGHTS // max(clusters, 1)))


def fewer(tasks: int, blocks: int, weights: int) -> int:
    """So many tasks that their scratch, `weights` each, is small beside the work; one for each thread at least."""
    return max(tasks // TASKS_PER_THREAD, min(tasks, blocks // TASK_BLOCKS, ALL_WEIGHTS // max(weights, 1)))


def cluster_tail(call: ClusterTailCall) -> Attended:
    arrays = ClusterTailArrays.of(call)
    out = np.empty_like(arrays.near_out)
    lse = np.empty_like(arrays.near_lse)
    clusters = arrays.sizes.shape[1]
    size = block_size(clusters)
    with threads() as tasks:
        tasks = fewer(tasks, len(out) // size, clusters * size)
        _join(tasks, arrays, Scratch.of(arrays, tasks, size), out, lse)
    return Attended(tensor(out, call.near_out.dtype, call.q), tensor(lse, None, call.q))


@parallel
def _join(task, tasks, arrays, scratch, out, lse):
    """Blocks of points of one row, each written by one task."""
    geometry = arrays.geometry
    most = scratch.left.shape[2]
    near_out = arrays.near_out
    blocks = len(geometry.key_rows) * -(-geometry.queries // most)
    weights = scratch.weights[task]  # [C, size]
    mixed = scratch.values[task]  # [F, size]
    sums = scratch.sums[task]  # [3, size]
    for number in range(blocks * task // tasks, blocks * (task + 1) // tasks):
        block = block_at(number, most, geometry, geometry.keys)
        weigh(arrays, block, scratch, task)
        if arrays.threshold:
            drop(arrays, block, weights)
        mixed[:] = 0
        if arrays.finite:
            add_product(arrays.values[geometry.key_rows[block.row]], weights, mixed, block.size)
        else:
            add_guarded_product(arrays.values[geometry.key_rows[block.row]], weights, mixed, block.size, False)
        for p in range(block.size):
            point = block.first + p
            total = sums[TOTAL, p]
            share = sums[SHARE, p]
            lse[point] = math.log(total) + sums[TOP, p]
            attends = arrays.near_lse[point] != -np.inf  # any key of its windows
            for f in range(out.shape[1]):
                whole = mixed[f, p] + share * near_out[point, f] if attends else mixed[f, p]
                out[point, f] = whole / total if total != 0 else whole


@inlined
def weigh(arrays, block, scratch, task):
    """Weights of the clusters, relative to the highest score, and the sums of each point."""
    keys = scratch.keys[task]  # [slots + 1, size]
    left = scratch.left[task]  # [C, size]
    weights = scratch.weights[task]  # [C, size]
    sums = scratch.sums[task]  # [3, size]
    size = block.size
    features = scratch.features[task]  # [E, size]
    row = arrays.geometry.key_rows[block.row]
    expand_block(arrays.windows, arrays.geometry, 0, block, keys, scratch.places[task])
    take(arrays.q, block, features)
    weights[:] = 0
    add_product(arrays.centers[row], features, weights, size)
    for c in range(len(left)):
        for p in range(size):
            left[c, p] = arrays.sizes[row, c]
    for slot in range(len(keys) - 1):
        for p in range(size):
            if keys[slot, p] >= 0:
                c = arrays.label[block.first_key + keys[slot, p]]
                if 0 <= c < len(left):
                    left[c, p] -= 1
    _to_weights(arrays, block, arrays.gains[row], left, weights, sums)


@compiled
def take(x, block, result):
    """A block's vectors of x [P, width] as columns of result [width, size]."""
    for p in range(block.size):
        for e in range(x.shape[1]):
            result[e, p] = x[block.first + p, e]


@inlined
def _to_weights(arrays, block, gains, left, weights, sums):
    """Products with the centers become left * gain * exp(score - top), exactly 0 where nothing is left."""
    total = sums[TOTAL]  # [size]
    top = sums[TOP]  # [size]
    share = sums[SHARE]  # [size]
    size = block.size
    number = weights.dtype.type
    zero = number(0)
    lowest = number(-np.inf)
    scale = number(arrays.scale)
    for p in range(size):
        top[p] = arrays.near_lse[block.first + p]
    for c in range(len(weights)):
        if gains[c] > 0:
            for p in range(size):
                weights[c, p] = scale * weights[c, p]
                a = weights[c, p] if left[c, p] > 0 else lowest
                top[p] = a if a > top[p] else top[p]
    for p in range(size):
        top[p] = zero if top[p] == lowest else top[p]  # -inf - -inf is NaN
        share[p] = math.exp(arrays.near_lse[block.first + p] - top[p])
        total[p] = share[p]
    for c in range(len(weights)):
        gain = gains[c]
        for p in range(size):
            w = exp(weights[c, p] - top[p]) * (gain * number(left[c, p]))
            weights[c, p] = w if (left[c, p] > 0) & (gain > 0) else zero
            total[p] += weights[c, p]


@compiled
def drop(arrays, block, weights):
    """Dropout: each number of a cluster is 0 or grows."""
    number = weights.dtype.type
    prefix = arrays.seed[block.row]
    for c in range(len(weights)):
        for p in range(block.size):
            keep = absorb(absorb(prefix, block.begin + p), arrays.first_name + c) >= arrays.threshold
            weights[c, p] = number(weights[c, p] * arrays.boost) if keep else number(0)
