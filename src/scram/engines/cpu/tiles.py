"""Tiles of queries (`spec.schedule`) and the clusters that they route, in Numba.

`grids` is int64 [.., rank], by the names below: arrays, so that one compiled kernel serves all ranks.
"""

import numpy as np

from ...spec.schedule import TILE_QUERIES
from .compiled import compiled
from .products import to_columns
from .vectors import coordinates

GRID, SHAPE, ACROSS = range(3)  # of the queries, of a tile, how many tiles


@compiled
def members(grids, tile, queries):
    """Write the queries of a tile, flat indices, to `queries`; return how many there are."""
    count = 0
    for lane in range(TILE_QUERIES):
        rest_lane = lane
        rest_tile = tile
        stride = 1
        query = 0
        inside = True
        for axis in range(grids.shape[1] - 1, -1, -1):
            extent = grids[GRID, axis]
            side = grids[SHAPE, axis]
            across = grids[ACROSS, axis]
            place = rest_tile % across * side + rest_lane % side
            rest_lane //= side
            rest_tile //= across
            inside &= place < extent
            query += place * stride
            stride *= extent
        if inside:
            queries[count] = query
            count += 1
    return count


@compiled
def take(x, first, queries, size, scale, lanes, row):
    """Vectors of x [P, width], times scale, as columns from `row` on; 0 where there is no query."""
    to_columns(x, first, queries, np.int64(0), size, lanes, row)
    if scale != 1:
        for e in range(row, row + x.shape[1]):
            for p in range(TILE_QUERIES):
                lanes[e, p] *= scale


@compiled
def tile_of(grids, query):
    """The tile of one query."""
    stride = 1
    tile = 0
    rest = query
    for axis in range(grids.shape[1] - 1, -1, -1):
        extent = grids[GRID, axis]
        tile += rest % extent // grids[SHAPE, axis] * stride
        rest //= extent
        stride *= grids[ACROSS, axis]
    return tile


@compiled
def tiles_of(grids, begin, size, tile, query, place):
    """The tiles of the queries begin, begin + 1, .., int32 [size]; `query` and `place`: scratch like it."""
    stride = 1
    across = 1
    for p in range(size):
        query[p] = begin + p
        tile[p] = 0
    for axis in range(grids.shape[1] - 1, -1, -1):
        each = np.float64(across)
        inverse = 1.0 / grids[SHAPE, axis]
        coordinates(query, grids[GRID, axis], stride, place, size)
        for p in range(size):
            tile[p] += np.int32(np.floor((place[p] + 0.5) * inverse) * each)
        stride *= grids[GRID, axis]
        across *= grids[ACROSS, axis]


@compiled
def is_routed(routing, row, tile, key, keys):
    """Whether a tile of a row of queries routes the cluster of a key; each row of labels has `keys` of them."""
    cluster = routing.label[routing.rows[row] * keys + key]
    word = cluster >> 5
    if cluster < 0 or word >= routing.words.shape[2]:
        return False
    return (routing.words[row, tile, word] >> (cluster & 31)) & 1 == 1


@compiled
def is_chosen(words, row, tile, cluster):
    """Whether a tile of a row of queries routes a cluster."""
    return words.shape[2] > 0 and (words[row, tile, cluster >> 5] >> (cluster & 31)) & 1 == 1


@compiled
def routed_keys(words, row, tile, sizes, source, order, keys, begin, end):
    """Write the keys of the clusters that a tile routes to `keys`, from `begin` to `end` at most; return how many.

    `order` [Rc, M] holds the keys of cluster after cluster, as many as `sizes` [Rc, C] say.
    """
    count = begin
    at = 0
    for c in range(sizes.shape[1] if words.shape[2] else 0):
        size = sizes[source, c]
        if is_chosen(words, row, tile, c):
            for n in range(at, min(at + size, order.shape[1])):
                if count < end:
                    keys[count] = order[source, n]
                    count += 1
        at += size
    return count - begin
