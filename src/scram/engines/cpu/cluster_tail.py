"""The clustered tail on a CPU: keys of routed clusters one by one, other clusters by their centers, tile by tile.

A tile of queries is one item of work. Everything of it is done by one thread and stays in its caches, the matrix
products too: queries lie along the vector units, clusters and then keys one below the other.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from ..._compat.numba import turn
from ...core.calls import ClusterTailCall
from ...results import Attended
from ...spec.grid import grid_of
from ...spec.routing import MOST_RAISED
from ...spec.schedule import TILE_QUERIES
from .compiled import compiled, inlined
from .layout import Array, Routing, aligned, array, by_row, flat, row_states, source_rows, strides, tensor
from .noise import absorb
from .products import add_columns, add_guarded_columns, fetch_row, multiply, to_rows
from .threads import in_one_pool, parallel, threads, turns, workers_of
from .tiles import is_chosen, members, routed_keys, take
from .vectors import exp
from .windows import union

KEY_GRID, STRIDES, REACH = range(3, 6)  # rows of `grids`, after those of `tiles`
# Rows of the numbers of a tile.
TOP, TOTAL, SHARE, TAIL, SPREAD, FIRST_ORDER, MEAN, NEAR, ALONG, SUMS = range(10)


class ClusterTailArrays(NamedTuple):
    """A ClusterTailCall as the kernels read it; arrays without rows stand for what it does not have."""

    q: Array  # [P, E]
    k: Array  # [B*Hk*M, E]
    v: Array  # [B*Hk*M, F]
    near_out: Array  # [P, F], of the windows
    near_lse: Array  # [P], of the windows
    centers: Array  # [Rc*C, E]
    values: Array  # [Rc*C, F]
    slope: Array  # [Rc*E, F]
    sizes: Array  # int32 [Rc, C]
    variance: Array  # [Rc, E]
    spreads: Array  # [Rc, C]
    slope_weights: Array  # [Rc, C], of a cluster in the first-order term
    label: Array  # int32 [Rc, M]
    order: Array  # int32 [Rc, M], keys by cluster
    routes: Array  # int32 [R, T, W]
    index: Array  # type: ignore[assignment]  # int32 [P, kappa]
    rows: Array  # int64 [2, R], the row of clusters and the row of keys that serve each row of q
    grids: Array  # int64 [6, rank], as in `tiles` and above
    seed: Array  # uint32 [R], the hash after the seed and the row
    queries: int  # N
    finite: bool  # all values and the slope
    scale: float
    threshold: int  # noise below it drops a key or a cluster; 0 drops none
    boost: float  # of the weights that dropout keeps
    first_name: int

    @staticmethod
    def of(call: ClusterTailCall) -> ClusterTailArrays:
        q = call.q
        wide = call.centers.dtype
        key_grid = tuple(call.label.shape[2:])
        values = array(call.values)
        dtype = values.dtype
        routing = Routing.of(q, call.label, call.routes)
        reach = tuple(min(b, extent - 1) for b, extent in zip(call.radius, key_grid, strict=True))
        none = torch.empty(0, dtype=wide, device="cpu")
        slope = array(none.reshape(0, values.shape[1]) if call.slope is None else call.slope)
        k = none.reshape(0, q.shape[-1]) if call.k is None else call.k
        v = none.reshape(0, values.shape[1]) if call.v is None else call.v
        near_out = none.reshape(0, values.shape[1]) if call.near_out is None else call.near_out
        index = call.label.new_empty(len(none), 0) if call.index is None else call.index
        sizes = by_row(call.sizes)
        spreads = None if call.spreads is None else by_row(call.spreads)
        tiles = math.prod(routing.grids[2].tolist())
        no_routes = np.zeros((q.shape[0] * q.shape[1], tiles, 0), np.int32)
        seed = np.zeros(0, np.uint32)
        if call.dropout_seed is not None:
            seed = row_states(call.dropout_seed, q, call.rows)
        heads = call.label.shape[1]
        return ClusterTailArrays(
            q=array(q.to(wide)),
            k=array(k.to(wide)),
            v=array(v.to(wide)),
            near_out=array(near_out.to(wide)),
            near_lse=flat((none if call.near_lse is None else call.near_lse).to(wide)),
            centers=array(call.centers),
            values=values,
            slope=slope,
            sizes=sizes,
            variance=by_row(call.variance),
            spreads=np.zeros(sizes.shape, dtype) if spreads is None else spreads,
            slope_weights=np.ones(sizes.shape, dtype) if spreads is None else spreads,
            label=by_row(call.label.flatten(2)),
            order=np.zeros((len(sizes), 0), np.int32) if call.order is None else by_row(call.order),
            routes=no_routes if call.routes is None else routing.words,
            index=index.reshape(math.prod(index.shape[:-1]), index.shape[-1]).contiguous().numpy(),
            rows=np.stack([source_rows(q, n) for n in (heads, heads if call.k is None else call.k.shape[1])]),
            grids=np.concatenate([routing.grids, np.array([key_grid, strides(key_grid), reach], np.int64)]),
            seed=seed,
            queries=math.prod(grid_of(q)),
            finite=bool(np.isfinite(values).all() and np.isfinite(slope).all()),
            scale=call.scale,
            threshold=int(call.dropout_p * 2**32) if call.dropout_seed is not None else 0,
            boost=1 / (1 - call.dropout_p),
            first_name=call.first_name,
        )

    @property
    def tiles(self) -> int:
        """Of all rows."""
        return int(self.routes.shape[0] * self.routes.shape[1])


class Places(NamedTuple):
    """Which rows of `Scratch.lanes` hold what, and which elements of `Scratch.lists`; each begins where it says."""

    q: int  # E rows, scaled
    first: int  # E rows, what the slope is multiplied with
    values: int  # F rows
    weights: int  # C + most rows
    routed: int  # element of the lists; before it 0, 1, ..
    slots: int  # element of the lists, keys in the windows of a query
    touched: int  # element of the lists, places in `taken` that are not 0


class Scratch(NamedTuple):
    """Of each worker."""

    lanes: Array  # [workers, rows, 64], as Places say
    sums: Array  # [workers, SUMS, 64], numbers of each query
    taken: Array  # int32 [workers, C + 1, 64], keys of each cluster in a query's windows; the last: the tile's queries
    lists: Array  # int32 [workers, n]
    line: Array  # int64 [workers, kappa + 1, rank], for `union`

    @staticmethod
    def of(arrays: ClusterTailArrays, workers: int, keys: int) -> tuple[Places, Scratch]:
        clusters = arrays.sizes.shape[1]
        width = arrays.q.shape[1]
        value_width = arrays.values.shape[1]
        most = min(keys, arrays.order.shape[1])
        matches, rank = arrays.index.shape[1], arrays.grids.shape[1]
        slots = matches * math.prod((2 * arrays.grids[REACH] + 1).tolist())
        routed = max(clusters, width)
        values = 2 * width
        places = Places(
            q=0,
            first=width,
            values=values,
            weights=values + value_width,
            routed=routed,
            slots=routed + most,
            touched=routed + most + slots,
        )
        lists = np.empty((workers, places.touched + slots * TILE_QUERIES), np.int32)
        lists[:, :routed] = np.arange(routed)
        return places, Scratch(
            lanes=aligned((workers, places.weights + clusters + most, TILE_QUERIES), arrays.values.dtype),
            sums=aligned((workers, SUMS, TILE_QUERIES), arrays.values.dtype),
            taken=aligned((workers, clusters + 1, TILE_QUERIES), np.int32, zeros=True),
            lists=lists,
            line=np.empty((workers, matches + 1, rank), np.int64),
        )


@in_one_pool
def cluster_tail(call: ClusterTailCall) -> Attended:
    arrays = ClusterTailArrays.of(call)
    out = np.empty((len(arrays.q), arrays.values.shape[1]), arrays.values.dtype)
    lse = np.empty(len(arrays.q), arrays.values.dtype)
    with threads() as tasks:
        workers = workers_of(tasks, arrays.tiles)
        places, scratch = Scratch.of(arrays, workers, call.keys)
        _tiles(workers, turns(workers), arrays, places, scratch, out, lse)
    return Attended(tensor(out, call.out_dtype, call.q), tensor(lse, None, call.q))


@parallel
def _tiles(worker, workers, turns, arrays, places, scratch, out, lse):
    """The tiles whose turn it is."""
    lanes = scratch.lanes[worker]  # [rows, 64]
    sums = scratch.sums[worker]  # [SUMS, 64]
    taken = scratch.taken[worker]  # [C + 1, 64]
    lists = scratch.lists[worker]
    tiles = arrays.routes.shape[1]
    while True:
        item = turn(turns, worker, workers)
        if item >= arrays.routes.shape[0] * tiles:
            break
        row = item // tiles
        size, keys = weigh(arrays, places, row, item - row * tiles, lanes, sums, taken, lists, scratch.line[worker])
        if arrays.threshold:
            drop(arrays, places, row, size, keys, lanes, places.weights, taken, lists)
            add_up(arrays, lanes, places.weights, row, sums)
        first_order(lanes, places, sums)
        _mix(arrays, places, row, keys, lanes, lists)
        _write(arrays, places.values, row, size, lanes, sums, taken, out, lse)


@compiled
def _write(arrays, begin, row, size, lanes, sums, taken, out, lse):
    """Sums of values divided by those of weights, with the windows' part."""
    number = lanes.dtype.type
    queries = taken[len(taken) - 1]  # int32 [64]
    total = sums[TOTAL]  # [64]
    first = row * arrays.queries
    for p in range(size):
        lse[first + queries[p]] = math.log(total[p]) + sums[TOP, p]
    for p in range(TILE_QUERIES):
        total[p] = number(1) / total[p] if total[p] != 0 else number(1)
    for f in range(begin, begin + out.shape[1]):
        for p in range(TILE_QUERIES):
            lanes[f, p] *= total[p]
    to_rows(lanes, begin, out, first, queries, np.int64(0), size)
    for p in range(size if len(arrays.near_lse) else 0):
        point = first + queries[p]
        if arrays.near_lse[point] != -np.inf:  # any key of its windows
            share = sums[SHARE, p] * total[p]
            for f in range(out.shape[1]):
                out[point, f] += share * arrays.near_out[point, f]


@inlined
def weigh(arrays, places, row, tile, lanes, sums, taken, lists, line):
    """Weights of the clusters and routed keys of a tile, relative to the highest score, and the sums of each query.

    Returns the number of queries and that of keys. Lanes without a query hold anything.
    """
    clusters = len(taken) - 1
    source = arrays.rows[0, row]
    queries = taken[clusters]  # int32 [64]
    size = members(arrays.grids, tile, queries)
    keys = routed_keys(arrays.routes, row, tile, arrays.sizes, source, arrays.order, lists, places.routed, places.slots)
    take(arrays.q, row * arrays.queries, queries, size, arrays.scale, lanes, places.q)
    touched = 0
    if arrays.index.shape[1]:
        touched = _count(arrays, places, row, size, taken, lists, line)
    begin = np.int64(0)  # a constant would be compiled for itself
    multiply(arrays.centers, source * clusters, lists, begin, clusters, lanes, places.q, lanes, places.weights)
    first_key = arrays.rows[1, row] * arrays.order.shape[1]
    multiply(arrays.k, first_key, lists, places.routed, keys, lanes, places.q, lanes, places.weights + clusters)
    _near(arrays, row, queries, size, sums)
    _raise(arrays, source, row, tile, lanes, places, sums, taken)
    _to_weights(arrays, places, source, row, tile, keys, lanes, sums, taken, lists)
    for n in range(places.touched, places.touched + touched):
        taken[lists[n] >> 6, lists[n] & 63] = 0
    return size, keys


@compiled
def _count(arrays, places, row, size, taken, lists, line):
    """Count the keys in the windows of each query by their clusters; return how many counts are not 0 now."""
    clusters = len(taken) - 1
    source = arrays.rows[0, row]
    label = arrays.label
    grids = arrays.grids
    slots = lists[places.slots :]
    touched = 0
    for p in range(size):
        point = row * arrays.queries + taken[clusters, p]
        number = union(arrays.index, point, label.shape[1], grids[KEY_GRID], grids[STRIDES], grids[REACH], slots, line)
        for n in range(number):
            c = label[source, slots[n]]
            if 0 <= c < clusters:
                lists[places.touched + touched] = c << 6 | p
                touched += taken[c, p] == 0
                taken[c, p] += 1
    return touched


@compiled
def _near(arrays, row, queries, size, sums):
    """The scores of the windows, -inf for none, are the highest so far."""
    number = sums.dtype.type
    for p in range(TILE_QUERIES):
        near = number(-np.inf)
        if len(arrays.near_lse) and p < size:
            near = arrays.near_lse[row * arrays.queries + queries[p]]
        sums[SHARE, p] = near
        sums[TOP, p] = near
        sums[SPREAD, p] = number(0)


@compiled
def _raise(arrays, source, row, tile, lanes, places, sums, taken):
    """The spread of each query's scores; products with centers become scores, raised by half of their own spread."""
    number = lanes.dtype.type
    most = number(MOST_RAISED)
    half = number(0.5)
    top = sums[TOP]  # [64]
    spread = sums[SPREAD]  # [64]
    for e in range(arrays.variance.shape[1]):
        variance = arrays.variance[source, e]
        q = lanes[places.q + e]  # [64]
        for p in range(TILE_QUERIES):
            spread[p] += q[p] * q[p] * variance
    for c in range(len(taken) - 1):
        if is_chosen(arrays.routes, row, tile, c):
            continue
        own = arrays.spreads[source, c]
        each = arrays.sizes[source, c]
        a = lanes[places.weights + c]  # [64]
        gone = taken[c]  # [64]
        for p in range(TILE_QUERIES):
            raised = spread[p] * own
            a[p] += half * (raised if raised < most else most)
            top[p] = a[p] if (a[p] > top[p]) & (gone[p] < each) else top[p]


@compiled
def _to_weights(arrays, places, source, row, tile, keys, lanes, sums, taken, lists):
    """Scores become left * exp(score - top), exactly 0 where nothing is left; left is 1 for a key and the windows."""
    number = lanes.dtype.type
    zero = number(0)
    lowest = number(-np.inf)
    clusters = len(taken) - 1
    begin = places.weights
    first_key = arrays.rows[1, row] * arrays.order.shape[1]
    top = sums[TOP]  # [64]
    total = sums[TOTAL]  # [64]
    share = sums[SHARE]  # [64]
    tail = sums[TAIL]  # [64]
    for n in range(clusters, clusters + keys):
        a = lanes[begin + n]  # [64]
        for p in range(TILE_QUERIES):
            top[p] = a[p] if a[p] > top[p] else top[p]
    for p in range(TILE_QUERIES):
        top[p] = zero if top[p] == lowest else top[p]  # -inf - -inf is NaN
        share[p] = exp(share[p] - top[p])
        total[p] = share[p]
        tail[p] = zero
    for n in range(clusters + keys):
        a = lanes[begin + n]  # [64]
        if n < clusters:
            each = np.int32(0) if is_chosen(arrays.routes, row, tile, n) else arrays.sizes[source, n]
            gone = taken[n]  # [64]
            own = arrays.slope_weights[source, n]
            for p in range(TILE_QUERIES):
                left = each - gone[p]
                w = exp(a[p] - top[p]) * number(left)  # before the choice: vector units take it so
                a[p] = w if left > 0 else zero
                total[p] += a[p]
                tail[p] += own * a[p]
        else:
            fetch_row(arrays.v, first_key + lists[places.routed + n - clusters])  # its turn comes after all weights
            for p in range(TILE_QUERIES):
                a[p] = exp(a[p] - top[p])
                total[p] += a[p]


@compiled
def drop(arrays, places, row, size, keys, lanes, begin, taken, lists):
    """Dropout: each number of a cluster or key, in the rows from `begin` on, is 0 or grows."""
    number = lanes.dtype.type
    clusters = len(taken) - 1
    for n in range(clusters + keys):
        name = arrays.first_name + n if n < clusters else np.int64(lists[places.routed + n - clusters])
        for p in range(size):
            keep = absorb(absorb(arrays.seed[row], taken[clusters, p]), name) >= arrays.threshold
            lanes[begin + n, p] = number(lanes[begin + n, p] * arrays.boost) if keep else number(0)


@compiled
def add_up(arrays, lanes, begin, row, sums):
    """The clusters' share of each query in the first-order term, after dropout."""
    source = arrays.rows[0, row]
    for p in range(TILE_QUERIES):
        sums[TAIL, p] = 0
    for c in range(arrays.sizes.shape[1]):
        own = arrays.slope_weights[source, c]
        for p in range(TILE_QUERIES):
            sums[TAIL, p] += own * lanes[begin + c, p]


@compiled
def first_order(lanes, places, sums):
    """What the slope is multiplied with: q, times the clusters' share, where they have one."""
    number = lanes.dtype.type
    for p in range(TILE_QUERIES):
        tail = sums[TAIL, p]
        sums[FIRST_ORDER, p] = tail / (number(1) + sums[SPREAD, p]) if tail > 0 else number(0)
    for e in range(places.values - places.first):
        for p in range(TILE_QUERIES):
            factor = sums[FIRST_ORDER, p]
            lanes[places.first + e, p] = factor * lanes[places.q + e, p] if factor != 0 else number(0)


@compiled
def _mix(arrays, places, row, keys, lanes, lists):
    """Sums of the values by their weights, and the first-order term."""
    source = arrays.rows[0, row]
    clusters = arrays.sizes.shape[1]
    width = arrays.q.shape[1] if len(arrays.slope) else 0
    to = places.values
    begin = np.int64(0)  # a constant would be compiled for itself
    for f in range(arrays.values.shape[1]):
        for p in range(TILE_QUERIES):
            lanes[to + f, p] = 0
    if arrays.finite:
        add_columns(arrays.values, source * clusters, lists, begin, clusters, lanes, places.weights, lanes, to)
        add_columns(arrays.slope, source * width, lists, begin, width, lanes, places.first, lanes, to)
    else:
        add_guarded_columns(arrays.values, source * clusters, lists, begin, clusters, lanes, places.weights, lanes, to)
        add_guarded_columns(arrays.slope, source * width, lists, begin, width, lanes, places.first, lanes, to)
    first_key = arrays.rows[1, row] * arrays.order.shape[1]
    add_columns(arrays.v, first_key, lists, places.routed, keys, lanes, places.weights + clusters, lanes, to)
