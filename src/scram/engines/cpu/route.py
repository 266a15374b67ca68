"""Which clusters each tile of queries attends key by key, and the best of their keys, on a CPU (`spec.routing`).

The queries of a tile lie along the vector units, clusters or keys one below the other. A tile is one item of work.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from ..._compat.numba import turn
from ...core.calls import Found, RouteCall, Routed, RoutedStartCall
from ...spec.routing import EVEN, MOST_SPREAD
from ...spec.schedule import TILE_QUERIES
from ...spec.scoring import accumulator
from .compiled import compiled
from .layout import Array, Routing, aligned, array, by_row, source_rows, tensor
from .products import multiply
from .threads import in_one_pool, parallel, threads, turns, workers_of
from .tiles import members, routed_keys, take
from .vectors import exp

TOP, COUNTS, INVERSE, SUMS = range(4)  # rows of the numbers of a tile
BLOCK_KEYS = 256  # that are scored at a time


class RouteArrays(NamedTuple):
    """A RouteCall as the kernel reads it."""

    q: Array  # [P, E]
    centers: Array  # [Rc*C, E]
    sizes: Array  # int32 [Rc, C]
    logs: Array  # [Rc, C], of the sizes
    variance: Array  # [Rc, E]
    spreads: Array  # [Rc, C]
    every: Array  # int32 [C], 0, 1, ..
    rows: Array  # int64 [R], the row of clusters that serves each row of q
    grids: Array  # int64 [3, rank], as in `tiles`
    queries: int  # N
    keys: int
    scale: float


@in_one_pool
def route(call: RouteCall) -> Routed:
    q = call.q
    centers = array(call.centers)
    dtype = centers.dtype
    sizes = by_row(call.sizes)
    clusters = sizes.shape[1]
    grids = Routing.of(q, None, None).grids
    with np.errstate(divide="ignore"):
        logs = np.log(sizes.astype(dtype))
    arrays = RouteArrays(
        q=array(q.to(call.centers.dtype)),
        centers=centers,
        sizes=sizes,
        logs=logs,
        variance=by_row(call.variance),
        spreads=by_row(call.spreads),
        every=np.arange(clusters, dtype=np.int32),
        rows=source_rows(q, call.sizes.shape[1]),
        grids=grids,
        queries=math.prod(q.shape[2:-1]),
        keys=call.keys,
        scale=call.scale,
    )
    shape = (q.shape[0] * q.shape[1], math.prod(grids[2].tolist()))
    words = np.zeros((*shape, call.words), np.int32)
    number = np.zeros(shape, np.int32)
    lse = np.empty((shape[0], arrays.queries), dtype)
    with threads() as tasks:
        workers = workers_of(tasks, math.prod(shape))
        lanes = aligned((workers, q.shape[-1] + clusters, TILE_QUERIES), dtype)
        sums = aligned((workers, SUMS, TILE_QUERIES), dtype)
        importance = np.empty((workers, clusters), dtype)
        queries = np.empty((workers, TILE_QUERIES), np.int32)
        _route(workers, turns(workers), arrays, lanes, sums, importance, queries, words, number, lse)
    routes, counts = (torch.from_numpy(x).reshape(*q.shape[:2], *x.shape[1:]) for x in (words, number))
    return Routed(routes, counts, torch.from_numpy(lse).reshape(q.shape[:-1]))


@parallel
def _route(worker, workers, turns, arrays, all_lanes, all_sums, all_importance, all_queries, words, number, lse):
    """The tiles whose turn it is."""
    tiles = number.shape[1]
    clusters = arrays.sizes.shape[1]
    width = arrays.q.shape[1]
    lanes = all_lanes[worker]  # [E + C, 64]
    sums = all_sums[worker]  # [SUMS, 64]
    importance = all_importance[worker]  # [C]
    queries = all_queries[worker]  # [64]
    none = np.int64(0)  # a constant would be compiled for itself
    while True:
        item = turn(turns, worker, workers)
        if item >= number.size:
            break
        row = item // tiles
        tile = item - row * tiles
        source = arrays.rows[row]
        size = members(arrays.grids, tile, queries)
        spread = _take(arrays, row, source, queries, size, lanes, sums)
        multiply(arrays.centers, source * clusters, arrays.every, none, clusters, lanes, none, lanes, width)
        _weigh(arrays, source, lanes, sums, spread, importance)
        for p in range(size):
            inverse = sums[INVERSE, p]
            lse[row, queries[p]] = sums[TOP, p] - math.log(inverse) if inverse > 0 else -np.inf
        number[row, tile] = _choose(arrays.sizes[source], importance, arrays.keys, words[row, tile])


@compiled
def _take(arrays, row, source, queries, size, lanes, sums):
    """Scaled queries as columns, 0 for those that are not finite; returns the spread of scores at their mean."""
    number = lanes.dtype.type
    width = arrays.q.shape[1]
    counts = sums[COUNTS]  # [64]
    take(arrays.q, row * arrays.queries, queries, size, arrays.scale, lanes, np.int64(0))
    for p in range(TILE_QUERIES):
        counts[p] = number(0) if p < size else number(np.nan)
    for e in range(width):
        for p in range(TILE_QUERIES):
            counts[p] += 0 * lanes[e, p]
    counted = 0
    for p in range(TILE_QUERIES):
        counted += counts[p] == 0
        counts[p] = counts[p] == 0
    for e in range(width if counted < size else 0):
        for p in range(TILE_QUERIES):
            lanes[e, p] = lanes[e, p] if counts[p] != 0 else number(0)
    spread = number(0)
    for e in range(width):
        mean = number(0)
        for p in range(TILE_QUERIES):
            mean += lanes[e, p]
        mean /= max(counted, 1)
        spread += mean * mean * arrays.variance[source, e]
    return spread


@compiled
def _weigh(arrays, source, lanes, sums, spread, importance):
    """Products with the centers to the importance of a key of each cluster."""
    number = lanes.dtype.type
    zero = number(0)
    one = number(1)
    most = number(MOST_SPREAD)
    even = number(EVEN)
    top = sums[TOP]  # [64]
    counts = sums[COUNTS]  # [64]
    inverse = sums[INVERSE]  # [64]
    begin = arrays.q.shape[1]
    counted = zero
    for p in range(TILE_QUERIES):
        top[p] = number(-np.inf)
        inverse[p] = zero
        counted += counts[p]
    for c in range(len(importance)):
        log = arrays.logs[source, c]
        a = lanes[begin + c]  # [64]
        for p in range(TILE_QUERIES):
            a[p] += log
            top[p] = a[p] if a[p] > top[p] else top[p]
    for p in range(TILE_QUERIES):
        top[p] = top[p] if abs(top[p]) < np.inf else zero
    for c in range(len(importance)):
        a = lanes[begin + c]  # [64]
        for p in range(TILE_QUERIES):
            a[p] = exp(a[p] - top[p])
            inverse[p] += a[p]
    for p in range(TILE_QUERIES):
        inverse[p] = counts[p] / inverse[p] if inverse[p] > 0 else zero
    each = one / max(counted, one)
    for c in range(len(importance)):
        a = lanes[begin + c]  # [64]
        squares = zero
        for p in range(TILE_QUERIES):
            share = a[p] * inverse[p]
            squares += share * share
        apart = math.exp(min(spread * arrays.spreads[source, c], most)) - one + even
        importance[c] = math.sqrt(squares * each) * apart / number(max(arrays.sizes[source, c], 1))


@compiled
def _choose(sizes, importance, keys, words):
    """Set the bits of the clusters of highest importance whose keys fit; return the number of these keys."""
    left = keys
    while True:
        best = importance.dtype.type(0)
        for c in range(len(sizes)):
            fits = (sizes[c] > 0) & (sizes[c] <= left) & (importance[c] > best)
            best = importance[c] if fits else best
        if not best > 0:
            return keys - left
        for c in range(len(sizes)):
            if importance[c] == best and 0 < sizes[c] <= left:
                words[c >> 5] |= np.int32(1) << np.int32(c & 31)
                left -= sizes[c]
                importance[c] = 0
                break


class StartArrays(NamedTuple):
    """A RoutedStartCall as the kernel reads it."""

    q: Array  # [P, E]
    k: Array  # [B*Hk*M, E]
    order: Array  # int32 [Rc, M]
    sizes: Array  # int32 [Rc, C]
    words: Array  # int32 [R, T, W]
    rows: Array  # int64 [2, R], the row of clusters and the row of keys that serve each row of q
    grids: Array  # int64 [3, rank], as in `tiles`
    queries: int  # N


@in_one_pool
def routed_start(call: RoutedStartCall) -> Found:
    q = call.q
    wide = accumulator(q.dtype)
    arrays = StartArrays(
        q=array(q.to(wide)),
        k=array(call.k.to(wide)),
        order=by_row(call.order),
        sizes=by_row(call.sizes),
        words=by_row(call.routes),
        rows=np.stack([source_rows(q, x.shape[1]) for x in (call.sizes, call.k)]),
        grids=Routing.of(q, None, None).grids,
        queries=math.prod(q.shape[2:-1]),
    )
    index = np.empty((len(arrays.q), 1), np.int32)
    score = np.empty((len(arrays.q), 1), arrays.q.dtype)
    with threads() as tasks:
        workers = workers_of(tasks, arrays.words.shape[0] * arrays.words.shape[1])
        lanes = aligned((workers, 1 + q.shape[-1] + BLOCK_KEYS, TILE_QUERIES), score.dtype)
        which = aligned((workers, 2, TILE_QUERIES), np.int32)
        lists = np.empty((workers, arrays.order.shape[1]), np.int32)
        _best(workers, turns(workers), arrays, lanes, which, lists, index, score)
    return Found(tensor(index, None, q), tensor(score, torch.float32, q))


@parallel
def _best(worker, workers, turns, arrays, all_lanes, all_which, all_lists, index, score):
    """The tiles whose turn it is: their routed keys, some at a time."""
    tiles = arrays.words.shape[1]
    width = arrays.q.shape[1]
    lanes = all_lanes[worker]  # [1 + E + BLOCK_KEYS, 64], the highest score first
    lists = all_lists[worker]  # [M]
    best = lanes[0]  # [64]
    which = all_which[worker, 0]  # [64]
    queries = all_which[worker, 1]  # [64]
    first = np.int64(1)  # constants would be compiled for themselves
    while True:
        item = turn(turns, worker, workers)
        if item >= arrays.words.shape[0] * tiles:
            break
        row = item // tiles
        tile = item - row * tiles
        source = arrays.rows[0, row]
        size = members(arrays.grids, tile, queries)
        keys = routed_keys(arrays.words, row, tile, arrays.sizes, source, arrays.order, lists, first - 1, len(lists))
        take(arrays.q, row * arrays.queries, queries, size, 1.0, lanes, first)
        for p in range(TILE_QUERIES):
            best[p] = -np.inf
            which[p] = -1
        for begin in range(0, keys, BLOCK_KEYS):
            number = min(BLOCK_KEYS, keys - begin)
            first_key = arrays.rows[1, row] * arrays.order.shape[1]
            multiply(arrays.k, first_key, lists, begin, number, lanes, first, lanes, first + width)
            for n in range(number):
                key = lists[begin + n]
                s = lanes[1 + width + n]  # [64]
                for p in range(TILE_QUERIES):
                    better = (s[p] > best[p]) | ((s[p] == best[p]) & (key < which[p]))
                    best[p] = s[p] if better else best[p]
                    which[p] = key if better else which[p]
        for p in range(size):
            index[row * arrays.queries + queries[p], 0] = which[p]
            score[row * arrays.queries + queries[p], 0] = best[p]
