"""Tile search on a CPU: tiles in parallel, each writing only its own queries; products of four keys at a time.

With one match per query a key that a tile has scored in this sweep is not scored again: it could not win.
"""

import math
from typing import NamedTuple

import numpy as np
import torch

from ...calls import Found, SearchCall
from ...grid import grid_of
from ...schedule import KINDS, STOP, TILE_QUERIES, WINDOWS, offers, tile_shape, widest
from .compiled import compiled, inlined, parallel
from .layout import Array, Geometry, array, strides, tensor
from .legal import Bounds, Choices, Earlier, first_key, fresh, near, reached
from .noise import absorb, below
from .search import Features
from .threads import threads
from .vectors import dot

GOSSIP, RANDOM = KINDS["gossip"], KINDS["random"]  # other kinds are the moves of neighbours' keys
KIND, REACH, DRAW = range(3)  # columns of a table of offers
SEEN = 1 << 12  # slots of a tile's table of keys that it has scored


class Tiles(NamedTuple):
    """How the query grid is cut into tiles."""

    grid: Array  # of queries
    strides: Array
    sides: Array  # of a tile
    counts: Array  # of tiles along each axis


class Sweep(NamedTuple):
    number: int
    offers: Array  # int64 [offers, 3]
    limits: Earlier
    going: Array  # bool [R], rows that have not stopped
    before: Array  # int32 [P, kappa], the matches before the sweep
    took: Array  # int64 [R, tiles], how many queries of each tile took a key


class Scratch(NamedTuple):
    """Of each task; with a place for each query of a tile, TILE_QUERIES."""

    across: Array  # [tasks, E, TILE_QUERIES], the queries
    products: Array  # [tasks, TILE_QUERIES, TILE_QUERIES]
    made: Array  # int32 [tasks, offers, TILE_QUERIES], the keys offered
    lanes: Array  # int64 [tasks, TILE_QUERIES], the queries' numbers, -1 off the grid
    seen: Array  # int32 [tasks, SEEN]


def tile_search(call: SearchCall) -> Found:
    """The tile search. Grids are arrays, not tuples: one compiled kernel serves every rank, and most of the time goes
    into products."""
    q, k, matches = call.q, call.k, call.matches
    query_grid, key_grid, points = grid_of(q), grid_of(k), math.prod(q.shape[:-1])
    features, geometry = Features(array(q), array(k)), Geometry.of(q, k, call.key_mask, call.causal)
    choices, bounds, dtype = Choices.of(call, geometry.mask), Bounds.of(call), features.q.dtype
    radius = widest(key_grid, call.reach, call.random)
    geometry = geometry._replace(grid=np.array(key_grid), strides=np.array(geometry.strides))  # type: ignore[arg-type]
    index, score = np.full((points, matches), -1, np.int32), np.full((points, matches), -np.inf, dtype)
    sides = np.array(tile_shape(len(query_grid)))
    tiles = Tiles(np.array(query_grid), np.array(strides(query_grid)), sides, -(-np.array(query_grid) // sides))
    going = np.ones(points // geometry.queries, np.bool_)
    limits = Earlier(index, 0, call.separation, bounds.starts, np.array(bounds.reach))  # type: ignore[arg-type]
    with threads() as tasks:
        given = 1 if call.warm is None else min(matches, call.warm.shape[-1])
        _start(tasks, features, geometry, choices, given, limits, index, score)
        for number in range(1, call.sweeps + 1):
            made = offers(number, call.jumps, call.propagate, call.gossip, len(key_grid), radius)
            table = np.array([(KINDS[o.kind], o.reach, o.draw) for o in made], np.int64).reshape(-1, 3)
            took = np.zeros((len(going), int(tiles.counts.prod())), np.int64)
            sweep = Sweep(number, table, limits, going, index.copy(), took)
            scratch = Scratch(
                np.empty((tasks, features.q.shape[1], TILE_QUERIES), dtype),
                np.empty((tasks, TILE_QUERIES, TILE_QUERIES), dtype),
                np.empty((tasks, len(table), TILE_QUERIES), np.int32), np.empty((tasks, TILE_QUERIES), np.int64),
                np.empty((tasks, SEEN), np.int32),
            )  # fmt: skip
            _sweep(tasks, features, geometry, choices, tiles, sweep, index, score, scratch)
            going &= took.sum(1) * STOP >= geometry.queries
            if not going.any():
                break
    return Found(tensor(index, None, q), tensor(score, torch.float32, q))


@parallel
def _start(task, tasks, features, geometry, choices, given, limits, index, score):
    """Sweep 0: warm keys where they are legal, else draws; kept whatever their scores."""
    points = len(features.q)
    for point in range(points * task // tasks, points * (task + 1) // tasks):
        row = point // geometry.queries
        query, filled = point - row * geometry.queries, 0
        for entry in range(given):
            earlier = Earlier(index, filled, limits.separation, limits.starts, limits.reach)
            key = first_key(geometry, choices, earlier, entry, row, query)
            if key >= 0:
                s = dot(features.q, point, features.k, geometry.key_rows[row] * geometry.keys + key)
                _insert(index[point], score[point], filled, np.int32(key), s if s == s else -np.inf)
                filled += 1


@compiled
def _insert(index, score, filled, key, value):
    """Put a match into its place among the `filled` first: by score, equal scores by key."""
    place = filled
    while place > 0 and (score[place - 1] < value or (score[place - 1] == value and index[place - 1] > key)):
        index[place], score[place] = index[place - 1], score[place - 1]
        place -= 1
    index[place], score[place] = key, value


@parallel
def _sweep(task, tasks, features, geometry, choices, tiles, sweep, index, score, scratch):
    """Some tiles: each makes its offers from the state before, then takes the best."""
    q, queries, in_row = features.q, geometry.queries, sweep.took.shape[1]
    lanes, across, made = scratch.lanes[task], scratch.across[task], scratch.made[task]
    for number in range(sweep.took.size * task // tasks, sweep.took.size * (task + 1) // tasks):
        row = number // in_row
        if not sweep.going[row]:
            continue
        _queries_of(tiles, number - row * in_row, lanes)
        _offer(geometry, choices, tiles, sweep, row, lanes, made)
        for lane in range(TILE_QUERIES):
            for e in range(q.shape[1]):
                across[e, lane] = q[row * queries + lanes[lane], e] if lanes[lane] >= 0 else 0
        row_key, first = geometry.key_rows[row] * geometry.keys, row * queries
        keys, own = features.k[row_key : row_key + geometry.keys], slice(first, first + queries)
        if index.shape[1] == 1:
            took = _take_best(geometry, sweep.limits, scratch, task, first, keys, index[own], score[own])
        else:
            took = _take_several(geometry, sweep.limits, scratch, task, first, keys, index[own], score[own])
        sweep.took[row, number - row * in_row] = took


@inlined
def _queries_of(tiles, number, lanes):
    """The queries of a tile, -1 where it sticks out of the grid."""
    for lane in range(TILE_QUERIES):
        rest_tile, rest_lane, query = number, lane, np.int64(0)
        for axis in range(len(tiles.grid) - 1, -1, -1):
            count, side = tiles.counts[axis], tiles.sides[axis]
            place = (rest_tile % count) * side + rest_lane % side
            rest_tile, rest_lane = rest_tile // count, rest_lane // side
            query = query + place * tiles.strides[axis] if query >= 0 and place < tiles.grid[axis] else np.int64(-1)
        lanes[lane] = query


@inlined
def _offer(geometry, choices, tiles, sweep, row, lanes, made):
    """What each query of a tile offers, -1 for nothing."""
    kappa, prefix, queries = sweep.before.shape[1], choices.seed[row], geometry.queries
    before, mask_row = sweep.before[row * queries : (row + 1) * queries], row // geometry.rows_per_mask
    for lane in range(TILE_QUERIES):
        query = lanes[lane]
        if query < 0:
            made[:, lane] = made[:, 0]
            continue
        noise = absorb(absorb(absorb(prefix, query), 0), sweep.number)
        diagonal = 0
        for axis in range(len(tiles.grid)):
            diagonal += query // tiles.strides[axis] % tiles.grid[axis]
        for n in range(len(sweep.offers)):
            kind, reach, draw = sweep.offers[n, KIND], sweep.offers[n, REACH], sweep.offers[n, DRAW]
            entry = (query + n + sweep.number) % kappa if sweep.number > 1 else 0
            if kind == GOSSIP:
                found = np.int64(before[below(absorb(noise, draw), queries), entry])
            elif kind == RANDOM:
                own_key = before[query, entry]
                if own_key < 0:
                    last = draw + len(tiles.grid)
                    found = fresh(geometry, choices, sweep.limits, entry, row, query, noise, draw, last)
                else:
                    found = _offer_near(geometry, sweep.limits, own_key, noise, draw, reach)
            else:
                direction = diagonal + sweep.number + draw
                found = _offer_neighbour(geometry, tiles, before, query, entry, direction, kind, reach)
            if found < 0 or (len(geometry.mask) and not geometry.mask[mask_row, found]):
                own = before[query]
                found = np.int64(own[entry] if own[entry] >= 0 else own[0])
            made[n, lane] = found


@inlined
def _offer_near(geometry, limits, own, noise, draw, radius):
    """A key at most `radius` from the query's own, and no farther than a match may lie from its start."""
    found = np.int64(0)
    for axis in range(len(geometry.grid)):
        extent, stride, far = geometry.grid[axis], geometry.strides[axis], min(radius, limits.reach[axis])
        at = own // stride % extent
        low, high = max(at - far, 0), min(at + far, extent - 1)
        found += stride * (low + below(absorb(noise, draw + axis), high - low + 1))
    return found


@inlined
def _offer_neighbour(geometry, tiles, before, query, entry, direction, move, reach):
    """The match of the neighbour in a direction, moved or as it is; -1 off the grid."""
    direction %= 2 * len(tiles.grid)
    axis = direction // 2
    far = reach if move else reach * tiles.sides[axis]
    step = -far if direction % 2 == 0 else far
    if not 0 <= query // tiles.strides[axis] % tiles.grid[axis] + step < tiles.grid[axis]:
        return np.int64(-1)
    found = np.int64(before[query + step * tiles.strides[axis], entry])
    if move == 0 or found < 0:
        return found
    extent, stride, to = geometry.grid[axis], geometry.strides[axis], move * step
    return found + to * stride if 0 <= found // stride % extent + to < extent else np.int64(-1)


@inlined
def _multiply(across, keys, some, count, products):
    """products[n, lane] = <query of the lane, keys[some[n]]> for n < count; four keys and four features at a time."""
    width = across.shape[0]
    whole = width // 4 * 4
    for n in range(0, count, 4):
        k0, k1 = keys[some[n]], keys[some[min(n + 1, count - 1)]]
        k2, k3 = keys[some[min(n + 2, count - 1)]], keys[some[min(n + 3, count - 1)]]
        p0, p1 = products[n], products[min(n + 1, count - 1)]
        p2, p3 = products[min(n + 2, count - 1)], products[min(n + 3, count - 1)]
        if n + 3 >= count:  # the last few one by one: no row is written twice
            for m in range(n, count):
                one, to = keys[some[m]], products[m]
                to[:] = 0
                for e in range(width):
                    for lane in range(TILE_QUERIES):
                        to[lane] += one[e] * across[e, lane]
            return
        p0[:], p1[:], p2[:], p3[:] = 0, 0, 0, 0
        for e in range(0, whole, 4):
            x0, x1, x2, x3 = across[e], across[e + 1], across[e + 2], across[e + 3]
            for lane in range(TILE_QUERIES):
                a, b, c, d = x0[lane], x1[lane], x2[lane], x3[lane]
                p0[lane] += k0[e] * a + k0[e + 1] * b + k0[e + 2] * c + k0[e + 3] * d
                p1[lane] += k1[e] * a + k1[e + 1] * b + k1[e + 2] * c + k1[e + 3] * d
                p2[lane] += k2[e] * a + k2[e + 1] * b + k2[e + 2] * c + k2[e + 3] * d
                p3[lane] += k3[e] * a + k3[e + 1] * b + k3[e + 2] * c + k3[e + 3] * d
        for e in range(whole, width):
            for lane in range(TILE_QUERIES):
                x = across[e, lane]
                p0[lane] += k0[e] * x
                p1[lane] += k1[e] * x
                p2[lane] += k2[e] * x
                p3[lane] += k3[e] * x


@compiled
def _sort_in(some, count, key):
    """Put a key into its place among the `count` first, ascending: of equal scores the first seen is the lowest key."""
    while count > 0 and some[count - 1] > key:
        some[count] = some[count - 1]
        count -= 1
    some[count] = key


@inlined
def _take_best(geometry, limits, scratch, task, first, keys, index, score):
    """One match per query: of each offer the best key, of equal ones the lowest. Returns how many queries took one."""
    lanes, products, made, seen = scratch.lanes[task], scratch.products[task], scratch.made[task], scratch.seen[task]
    # Arrays of its own: the compiler knows that they overlap with no other.
    key, some = np.empty(TILE_QUERIES, np.int32), np.empty(TILE_QUERIES, np.int32)
    best = np.empty(TILE_QUERIES, score.dtype)
    for lane in range(TILE_QUERIES):
        key[lane] = index[lanes[lane], 0] if lanes[lane] >= 0 else -1
        best[lane] = score[lanes[lane], 0] if lanes[lane] >= 0 else np.inf
    seen[:] = -1
    for n in range(len(made)):
        count = 0
        for offered in range(TILE_QUERIES):
            new = made[n, offered]
            if new >= 0:
                slot = np.uint32(np.uint32(new) * np.uint32(0x9E3779B1)) >> np.uint32(20)
                if seen[slot] != new:
                    seen[slot] = new
                    _sort_in(some, count, new)
                    count += 1
        _multiply(scratch.across[task], keys, some, count, products)
        for m in range(count):
            _leave_far(geometry, limits, first, lanes, some[m], products[m])
            _keep_better(products[m], some[m], geometry.causal, lanes, best, key)
    changed = 0
    for lane in range(TILE_QUERIES):
        if lanes[lane] >= 0:
            changed += key[lane] != index[lanes[lane], 0]
            index[lanes[lane], 0], score[lanes[lane], 0] = key[lane], best[lane]
    return changed


@inlined
def _leave_far(geometry, limits, first, lanes, key, products):
    """A key scores nothing for queries (their points begin at `first`) whose starts are all too far from it."""
    if len(limits.starts):
        for lane in range(TILE_QUERIES):
            if lanes[lane] >= 0 and not reached(geometry, limits, first + lanes[lane], np.int64(key)):
                products[lane] = -np.inf


@inlined
def _keep_better(products, new, causal, lanes, best, key):
    """Where a key's score is higher and the key legal, it takes the place of the best."""
    for lane in range(TILE_QUERIES):
        better = (products[lane] > best[lane]) & ((not causal) | (new <= lanes[lane]))
        best[lane] = products[lane] if better else best[lane]
        key[lane] = new if better else key[lane]


@inlined
def _take_several(geometry, limits, scratch, task, first, keys, index, score):
    """Several matches per query: of each window its best key enters where it may. Returns how many queries took one."""
    lanes, products, made = scratch.lanes[task], scratch.products[task], scratch.made[task]
    key, some = np.empty(TILE_QUERIES, np.int32), np.empty(TILE_QUERIES, np.int32)
    best = np.empty(TILE_QUERIES, score.dtype)
    took = np.uint64(0)  # a bit for each query
    for n in range(len(made)):
        for window in range(WINDOWS):
            count = 0
            for offered in range(TILE_QUERIES):
                if offered // 2 % WINDOWS == window and made[n, offered] >= 0:
                    _sort_in(some, count, made[n, offered])
                    count += 1
            if count == 0:
                continue
            _multiply(scratch.across[task], keys, some, count, products)
            best[:] = -np.inf
            for m in range(count):
                _leave_far(geometry, limits, first, lanes, some[m], products[m])
                _keep_better(products[m], some[m], geometry.causal, lanes, best, key)
            for lane in range(TILE_QUERIES):
                if lanes[lane] >= 0 and best[lane] > score[lanes[lane], -1]:
                    own, its = index[lanes[lane]], score[lanes[lane]]
                    entered = _enter(geometry, limits.separation, own, its, key[lane], best[lane])
                    took |= np.uint64(entered) << np.uint64(lane)
    changed = 0
    for lane in range(TILE_QUERIES):
        changed += (took >> np.uint64(lane)) & np.uint64(1) != 0
    return changed


@compiled
def _enter(geometry, separation, index, score, key, value):
    """Let a key in that beats the last match, unless a better one is near; near ones that are worse go."""
    kept = 0
    for m in range(len(index)):
        if index[m] >= 0 and score[m] >= value and near(geometry, index[m], key, separation):
            return False
    for m in range(len(index)):
        if index[m] >= 0 and not near(geometry, index[m], key, separation):
            index[kept], score[kept] = index[m], score[m]
            kept += 1
    for m in range(kept, len(index)):
        index[m], score[m] = -1, -np.inf
    _insert(index, score, min(kept, len(index) - 1), key, value)
    return True
