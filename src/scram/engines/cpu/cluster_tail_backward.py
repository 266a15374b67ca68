"""Gradients of the clustered tail on a CPU: the same on every run and any number of threads.

Tiles are taken in chunks. First each tile, in parallel: the weights of its clusters and keys and the gradients of their
scores stay in memory, and what belongs to its queries is done. Then each group of clusters, in parallel: tile after
tile adds to the gradients of their centers and values, and to those of their keys where the tile routed them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..._compat.numba import turn
from ...core.calls import ClusterTailCall, ClusterTailGrads
from ...spec.routing import MOST_RAISED
from ...spec.schedule import TILE_QUERIES
from .cluster_tail import (
    ALONG,
    FIRST_ORDER,
    MEAN,
    NEAR,
    SHARE,
    SPREAD,
    TOTAL,
    ClusterTailArrays,
    Scratch,
    add_up,
    drop,
    first_order,
    weigh,
)
from .compiled import compiled
from .layout import Array, aligned, array, flat, like, whole_lanes
from .products import add_columns, add_guarded_columns, add_guarded_rows, add_rows, multiply
from .threads import in_one_pool, parallel, threads, turns, workers_of
from .tiles import is_chosen, take

CHUNK_TILES = 32  # at least, or as many as there are workers
TILES_PER_WORKER = 4
GROUP = 16  # clusters whose sums one worker makes


class Gradients(NamedTuple):
    """What is read and what is written; arrays without rows stand for what the call does not have."""

    out: Array  # [P, F]
    lse: Array  # [P]
    to_q: Array  # [P, E]
    to_k: Array  # [Rc*M, E']
    to_v: Array  # [Rc*M, F']
    to_centers: Array  # [Rc*C, E']
    to_values: Array  # [Rc*C, F']
    to_slope: Array  # [Rc*E, F']
    to_near_out: Array  # [P, F]
    to_near_lse: Array  # [P]
    finite: bool  # all centers

    @staticmethod
    def of(call: ClusterTailCall, arrays: ClusterTailArrays, grad_out: Tensor, grad_lse: Tensor) -> Gradients:
        dtype = arrays.values.dtype
        width = whole_lanes(arrays.q.shape[1])
        value_width = whole_lanes(arrays.values.shape[1])
        keys = arrays.order.size
        return Gradients(
            out=array(grad_out.to(call.centers.dtype)),
            lse=flat(grad_lse.to(call.centers.dtype)),
            to_q=np.empty_like(arrays.q),
            to_k=aligned((keys, width), dtype, zeros=True),
            to_v=aligned((keys, value_width), dtype, zeros=True),
            to_centers=aligned((len(arrays.centers), width), dtype, zeros=True),
            to_values=aligned((len(arrays.values), value_width), dtype, zeros=True),
            to_slope=aligned((len(arrays.slope), value_width), dtype, zeros=True),
            to_near_out=np.empty_like(arrays.near_out),
            to_near_lse=np.empty_like(arrays.near_lse),
            finite=bool(np.isfinite(arrays.centers).all()),
        )


class Chunk(NamedTuple):
    """What some tiles leave for the sums of clusters and keys."""

    lanes: Array  # [tiles, rows, 64], of each tile as in Scratch, then the slopes
    lines: Array  # [tiles, 64, E' + F'], scaled queries and gradients of out
    counts: Array  # int64 [tiles, 3]: queries, keys, and whether all of `lines` is finite
    slopes: int  # C + most rows of lanes begin here
    to_q: int  # and E rows, gradients of the scaled queries


@in_one_pool
def cluster_tail_backward(
    call: ClusterTailCall, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor
) -> ClusterTailGrads:
    """Gradients of all that is differentiable from those of out and lse."""
    arrays = ClusterTailArrays.of(call)
    grads = Gradients.of(call, arrays, grad_out, grad_lse)
    tiles = arrays.tiles
    clusters = arrays.sizes.shape[1]
    with threads() as tasks:
        workers = workers_of(tasks, tiles)
        size = min(tiles, max(CHUNK_TILES, TILES_PER_WORKER * workers))
        places, scratch = Scratch.of(arrays, workers, call.keys)
        slopes = scratch.lanes.shape[1]
        to_q = 2 * slopes - places.weights
        chunk = Chunk(
            lanes=aligned((size, to_q + arrays.q.shape[1], TILE_QUERIES), arrays.values.dtype),
            lines=aligned((size, TILE_QUERIES, grads.to_centers.shape[1] + grads.to_values.shape[1]), arrays.q.dtype),
            counts=np.empty((size, 3), np.int64),
            slopes=slopes,
            to_q=to_q,
        )
        every = np.arange(max(clusters, arrays.q.shape[1]), dtype=np.int32)
        for first in range(0, tiles, max(size, 1)):
            last = min(first + size, tiles)
            _tiles(workers, turns(workers), first, last, arrays, places, scratch, chunk, grads)
            _sums(workers, turns(workers), first, last, arrays, places, chunk, grads, every)
    return _as_tensors(call, grads)


def _as_tensors(call: ClusterTailCall, grads: Gradients) -> ClusterTailGrads:
    return ClusterTailGrads(
        q=like(grads.to_q, call.q),
        k=None if call.k is None else _of_keys(grads.to_k, call.k, call.label.shape[1]),
        v=None if call.v is None else _of_keys(grads.to_v, call.v, call.label.shape[1]),
        centers=_cut(grads.to_centers, call.centers),
        values=_cut(grads.to_values, call.values),
        slope=None if call.slope is None else _cut(grads.to_slope, call.slope),
        near_out=None if call.near_out is None else like(grads.to_near_out, call.near_out),
        near_lse=None if call.near_lse is None else like(grads.to_near_lse, call.near_lse),
    )


def _cut(grad: Array, x: Tensor) -> Tensor:
    """[n, padded width], a gradient of x."""
    return like(grad[:, : x.shape[-1]], x)


def _of_keys(grad: Array, x: Tensor, heads: int) -> Tensor:
    """[B * heads * M, padded width], a gradient of x [B, Hk, *G, width], whose heads each have a part of it."""
    batch, key_heads = x.shape[:2]
    keys = math.prod(x.shape[2:-1])
    parts = torch.from_numpy(grad).reshape(batch, key_heads, heads // max(key_heads, 1), keys, grad.shape[1])
    total = parts[:, :, 0]  # [B, Hk, M, padded width]
    for n in range(1, parts.shape[2]):
        total = total + parts[:, :, n]
    return total[..., : x.shape[-1]].to(x.dtype).reshape(x.shape).contiguous()


@parallel
def _tiles(worker, workers, turns, first, last, arrays, places, scratch, chunk, grads):
    """The tiles whose turn it is: what belongs to their queries."""
    taken = scratch.taken[worker]  # [C + 1, 64]
    lists = scratch.lists[worker]
    queries = taken[len(taken) - 1]  # int32 [64]
    sums = scratch.sums[worker]  # [SUMS, 64]
    tiles = arrays.routes.shape[1]
    while True:
        slot = turn(turns, worker, workers)
        if first + slot >= last:
            break
        row = (first + slot) // tiles
        tile = first + slot - row * tiles
        lanes = chunk.lanes[slot]  # [rows, 64]
        size, keys = weigh(arrays, places, row, tile, lanes, sums, taken, lists, scratch.line[worker])
        take(grads.out, row * arrays.queries, queries, size, 1.0, lanes, places.values)
        chunk.counts[slot, 0] = size
        chunk.counts[slot, 1] = keys
        chunk.counts[slot, 2] = _lines(arrays, places, size, lanes, grads.to_centers.shape[1], chunk.lines[slot])
        _products(arrays, places, chunk, row, keys, lanes, sums, lists)
        if arrays.threshold:
            drop(arrays, places, row, size, keys, lanes, chunk.slopes, taken, lists)
        _slopes(arrays, grads, places, chunk, row, size, keys, lanes, sums, taken)
        if arrays.threshold:
            drop(arrays, places, row, size, keys, lanes, places.weights, taken, lists)
        add_up(arrays, lanes, places.weights, row, sums)
        first_order(lanes, places, sums)
        _through_spread(arrays, places, chunk, row, lanes, sums)
        _to_queries(arrays, grads, places, chunk, row, size, keys, lanes, sums, taken, lists)


@compiled
def _lines(arrays, places, size, lanes, begin, lines):
    """Columns of q and of the gradient of out as rows, the latter from `begin` on; whether all are finite."""
    check = lines.dtype.type(0)
    for p in range(size):
        for e in range(lines.shape[1]):
            lines[p, e] = 0
        for e in range(arrays.q.shape[1]):
            lines[p, e] = lanes[places.q + e, p]
            check += 0 * lines[p, e]
        for f in range(arrays.values.shape[1]):
            lines[p, begin + f] = lanes[places.values + f, p]
            check += 0 * lines[p, begin + f]
    return check == 0


@compiled
def _products(arrays, places, chunk, row, keys, lanes, sums, lists):
    """The gradient of out times the values of clusters and keys, and times the slope."""
    source = arrays.rows[0, row]
    clusters = arrays.sizes.shape[1]
    width = arrays.q.shape[1]
    slopes = chunk.slopes
    begin = np.int64(0)  # a constant would be compiled for itself
    multiply(arrays.values, source * clusters, lists, begin, clusters, lanes, places.values, lanes, slopes)
    first_key = arrays.rows[1, row] * arrays.order.shape[1]
    multiply(arrays.v, first_key, lists, places.routed, keys, lanes, places.values, lanes, slopes + clusters)
    some = width if len(arrays.slope) else 0
    multiply(arrays.slope, source * width, lists, begin, some, lanes, places.values, lanes, chunk.to_q)
    for e in range(some, width):
        for p in range(TILE_QUERIES):
            lanes[chunk.to_q + e, p] = 0
    along = sums[ALONG]  # [64]
    for p in range(TILE_QUERIES):
        along[p] = 0
    for e in range(some):
        for p in range(TILE_QUERIES):
            along[p] += lanes[places.q + e, p] * lanes[chunk.to_q + e, p]
    for p in range(TILE_QUERIES):
        along[p] /= lanes.dtype.type(1) + sums[SPREAD, p]
    for c in range(clusters):
        own = arrays.slope_weights[source, c]
        for p in range(TILE_QUERIES):
            lanes[slopes + c, p] += own * along[p]


@compiled
def _slopes(arrays, grads, places, chunk, row, size, keys, lanes, sums, taken):
    """Weights add up to 1 with the windows' share; slopes become d loss / d score."""
    number = lanes.dtype.type
    zero = number(0)
    clusters = len(taken) - 1
    share = sums[SHARE]  # [64]
    inverse = sums[TOTAL]  # [64]
    mean = sums[MEAN]  # [64]
    for p in range(TILE_QUERIES):
        point = row * arrays.queries + taken[clusters, p]
        inverse[p] = number(1) / inverse[p] if inverse[p] != 0 else zero
        share[p] *= inverse[p]
        near = zero
        if p < size and len(arrays.near_lse) and arrays.near_lse[point] != -np.inf:
            for f in range(grads.out.shape[1]):
                near += grads.out[point, f] * arrays.near_out[point, f]
        sums[NEAR, p] = near
        mean[p] = share[p] * near
    for n in range(clusters + keys):
        w = lanes[places.weights + n]  # [64]
        slope = lanes[chunk.slopes + n]  # [64]
        for p in range(TILE_QUERIES):
            w[p] *= inverse[p]
            mean[p] += w[p] * slope[p] if w[p] != 0 else zero
    for p in range(size):
        mean[p] -= grads.lse[row * arrays.queries + taken[clusters, p]]
    for n in range(clusters + keys):
        w = lanes[places.weights + n]  # [64]
        slope = lanes[chunk.slopes + n]  # [64]
        for p in range(TILE_QUERIES):
            # What has no weight may have a NaN in its value.
            slope[p] = w[p] * (slope[p] - mean[p]) if w[p] != 0 else zero


@compiled
def _through_spread(arrays, places, chunk, row, lanes, sums):
    """What the spread of a query's scores gets, by raised scores and by the first-order term, for each of q^2."""
    number = lanes.dtype.type
    zero = number(0)
    most = number(MOST_RAISED)
    source = arrays.rows[0, row]
    spread = sums[SPREAD]  # [64]
    factor = sums[FIRST_ORDER]  # [64]
    to_spread = sums[ALONG]  # [64]
    for p in range(TILE_QUERIES):
        to_spread[p] = number(-2) * factor[p] * to_spread[p] if factor[p] != 0 else zero
    for c in range(arrays.sizes.shape[1]):
        own = arrays.spreads[source, c]
        slope = lanes[chunk.slopes + c]  # [64]
        for p in range(TILE_QUERIES):
            to_spread[p] += own * slope[p] if spread[p] * own <= most else zero
    for e in range(arrays.q.shape[1]):
        variance = arrays.variance[source, e]
        for p in range(TILE_QUERIES):
            by_spread = to_spread[p] * variance * lanes[places.q + e, p] if to_spread[p] != 0 else zero
            by_slope = factor[p] * lanes[chunk.to_q + e, p] if factor[p] != 0 else zero
            lanes[chunk.to_q + e, p] = by_spread + by_slope


@compiled
def _to_queries(arrays, grads, places, chunk, row, size, keys, lanes, sums, taken, lists):
    """Gradients of q and of the windows' out and lse."""
    source = arrays.rows[0, row]
    clusters = len(taken) - 1
    begin = np.int64(0)  # a constant would be compiled for itself
    to_q = chunk.to_q
    if grads.finite:
        add_columns(arrays.centers, source * clusters, lists, begin, clusters, lanes, chunk.slopes, lanes, to_q)
    else:
        add_guarded_columns(arrays.centers, source * clusters, lists, begin, clusters, lanes, chunk.slopes, lanes, to_q)
    first_key = arrays.rows[1, row] * arrays.order.shape[1]
    add_columns(arrays.k, first_key, lists, places.routed, keys, lanes, chunk.slopes + clusters, lanes, to_q)
    for p in range(size):
        point = row * arrays.queries + taken[clusters, p]
        for e in range(arrays.q.shape[1]):
            grads.to_q[point, e] = arrays.scale * lanes[to_q + e, p]
        if len(arrays.near_lse):
            attends = arrays.near_lse[point] != -np.inf  # any key of its windows
            share = sums[SHARE, p]
            grads.to_near_lse[point] = share * (sums[NEAR, p] - sums[MEAN, p]) if attends else 0
            for f in range(grads.out.shape[1]):
                grads.to_near_out[point, f] = share * grads.out[point, f] if attends else 0


@parallel
def _sums(worker, workers, turns, first, last, arrays, places, chunk, grads, every):
    """Groups of clusters of the rows whose tiles the chunk has; the last of a row is its slope."""
    tiles = arrays.routes.shape[1]
    clusters = arrays.sizes.shape[1]
    groups = -(-clusters // GROUP) + 1
    lowest = arrays.rows[0, first // tiles]
    highest = arrays.rows[0, (last - 1) // tiles]
    while True:
        item = turn(turns, worker, workers)
        source = lowest + item // groups
        if source > highest:
            break
        group = item % groups
        for slot in range(last - first):
            row = (first + slot) // tiles
            if arrays.rows[0, row] != source:
                continue
            if group == groups - 1:
                _to_slope(arrays, grads, places, chunk, slot, source, every)
            else:
                tile = first + slot - row * tiles
                _to_clusters(arrays, grads, places, chunk, slot, row, tile, source, group * GROUP, every)


@compiled
def _to_slope(arrays, grads, places, chunk, slot, source, every):
    """Add what a tile gives to the slope of its row of clusters."""
    width = arrays.q.shape[1] if len(arrays.slope) else 0
    begin = np.int64(0)  # a constant would be compiled for itself
    _add(chunk, slot, places.first, grads.to_centers.shape[1], grads.to_slope, source * width, every, begin, width)


@compiled
def _to_clusters(arrays, grads, places, chunk, slot, row, tile, source, first, every):
    """Add what a tile gives to some clusters, and to their keys where it routed them."""
    clusters = arrays.sizes.shape[1]
    number = min(GROUP, clusters - first)
    queries = np.int64(0)  # the columns of the lines that hold them
    out = grads.to_centers.shape[1]
    at = source * clusters
    _add(chunk, slot, chunk.slopes + first, queries, grads.to_centers, at, every, first, number)
    _add(chunk, slot, places.weights + first, out, grads.to_values, at, every, first, number)
    if arrays.routes.shape[2] == 0:
        return
    order = arrays.order[source]  # [M]
    at = source * len(order)
    begin = np.int64(0)  # of the cluster's keys
    place = clusters  # and of their weights
    for c in range(first + number):
        size = np.int64(arrays.sizes[source, c])
        if is_chosen(arrays.routes, row, tile, c):
            some = min(size, clusters + chunk.counts[slot, 1] - place)
            if c >= first:
                _add(chunk, slot, chunk.slopes + place, queries, grads.to_k, at, order, begin, some)
                _add(chunk, slot, places.weights + place, out, grads.to_v, at, order, begin, some)
            place += size
        begin += size


@compiled
def _add(chunk, slot, begin, column, sums, first, at, at_begin, number):
    """Rows of the lanes of a tile, from `begin` on, times its lines, from `column` on."""
    lanes = chunk.lanes[slot]  # [rows, 64]
    lines = chunk.lines[slot]  # [64, E' + F']
    depth = chunk.counts[slot, 0]
    if chunk.counts[slot, 2]:
        add_rows(lanes, begin, depth, lines, column, sums, first, at, at_begin, number)
    else:
        add_guarded_rows(lanes, begin, depth, lines, column, sums, first, at, at_begin, number)
