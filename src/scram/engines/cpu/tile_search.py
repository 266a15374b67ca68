"""Tile search on a CPU: tiles in parallel, each writing only its own queries; products of four keys at a time.

With one match per query a key that a tile has scored in this sweep is not scored again: it could not win.
"""

# Numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import math

import numba
import numpy as np
import torch
from torch import Tensor

from ...grid import grid_of
from ...schedule import KINDS, LANES, STOP, WINDOWS, offers, tile_shape
from .compiled import TASKS_PER_THREAD, compiled, parallel, threads
from .layout import LegalArrays, array, key_rows, strides
from .noise import absorb, below, seeded
from .search import _fresh, _legal
from .vectors import dot

SHIFT, GOSSIP, RANDOM = (KINDS[kind] for kind in ("shift", "gossip", "random"))
SEEN = 1 << 12  # slots of a tile's table of keys that it has scored


def tile_search(
    q: Tensor,
    k: Tensor,
    seed: Tensor,
    key_mask: Tensor | None,
    warm: Tensor | None,
    *,
    matches: int,
    separation: int,
    sweeps: int,
    jumps: tuple[int, ...],
    propagate: str,
    gossip: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """q, k, seed, key_mask, warm as in `scram.ops` -> index int32 and score float32 [B, H, *G, kappa]."""
    query_grid, key_grid = grid_of(q), grid_of(k)
    queries, points = math.prod(query_grid), math.prod(q.shape[:-1])
    queries_, keys_ = array(q), array(k)
    legal = LegalArrays.of(q, k, key_mask, listed=True)
    lists = (legal.mask, legal.order, legal.count)
    # Arrays, not tuples as in `search`: one compiled kernel serves every rank, and most of the time goes into products.
    geometry = (
        np.array(query_grid),
        np.array(strides(query_grid)),
        np.array(key_grid),
        np.array(strides(key_grid)),
        key_rows(q, k),
        legal.rows_per_mask,
        causal,
    )
    index, score = np.full((points, matches), -1, np.int32), np.full((points, matches), -np.inf, queries_.dtype)
    start = np.zeros((points, 0), np.int32) if warm is None else warm.reshape(points, -1).contiguous().numpy()
    sides = np.array(tile_shape(len(query_grid)))
    counts = -(-geometry[0] // sides)
    state = np.uint32(seeded(int(seed)))
    going = np.ones(points // queries, np.bool_)
    with threads() as count:
        tasks = count * TASKS_PER_THREAD
        given = 1 if warm is None else min(matches, start.shape[1])
        _start(queries_, keys_, *geometry, lists, queries, state, start, given, separation, index, score, tasks)
        for sweep in range(1, sweeps + 1):
            made = offers(sweep, jumps, propagate, gossip, key_grid)
            table = np.array([(KINDS[o.kind], o.reach, o.draw) for o in made], np.int64).reshape(-1, 3)
            took = np.zeros((len(going), int(counts.prod())), np.int64)
            _sweep(
                queries_, keys_, *geometry, lists, queries, state, sweep, table, separation, sides, counts, going,
                index.copy(), index, score, took, tasks,
            )  # fmt: skip
            going &= took.sum(1) * STOP >= queries
            if not going.any():
                break
    shape = (*q.shape[:-1], matches)
    return torch.from_numpy(index).reshape(shape), torch.from_numpy(score.astype(np.float32)).reshape(shape)


@parallel
def _start(
    q, k, query_grid, query_strides, key_grid, key_strides, key_rows, rows_per_mask, causal, legal, queries, seed,
    start, given, separation, index, score, tasks,
):  # fmt: skip
    """Sweep 0: warm keys where they are legal, else draws; kept whatever their scores."""
    keys = key_grid[0] * key_strides[0]
    for task in numba.prange(tasks):
        geometry = (query_grid, query_strides, key_grid, key_strides, key_rows, rows_per_mask, causal)
        for point in range(len(q) * task // tasks, len(q) * (task + 1) // tasks):
            row = point // queries
            query = point - row * queries
            filled = 0
            for entry in range(given):
                noise = absorb(absorb(absorb(absorb(absorb(seed, row), query), entry), 0), 0)
                key = np.int64(-1)
                if entry < start.shape[1]:
                    key = np.int64(start[point, entry])
                    on_grid = 0 <= key < keys
                    if not on_grid or not _legal(geometry, legal, row, query, point, key, filled, index, separation):
                        key = np.int64(-1)
                if key < 0:
                    key = _fresh(geometry, legal, row, query, noise)
                    if key >= 0 and not _legal(geometry, legal, row, query, point, key, filled, index, separation):
                        key = np.int64(-1)
                if key >= 0:
                    s = dot(q, point, k, key_rows[row] * keys + key)
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
def _sweep(
    q, k, query_grid, query_strides, key_grid, key_strides, key_rows, rows_per_mask, causal, legal, queries, seed,
    sweep, table, separation, sides, counts, going, before, index, score, took, tasks,
):  # fmt: skip
    """One sweep: each tile makes its offers from the state before, then weighs them."""
    in_row = took.shape[1]
    for task in numba.prange(tasks):
        geometry = (query_grid, query_strides, key_grid, key_strides, key_rows, rows_per_mask, causal)
        across = np.empty((q.shape[1], LANES), q.dtype)
        products = np.empty((LANES, LANES), q.dtype)
        made = np.empty((len(table), LANES), np.int32)
        lanes = np.empty(LANES, np.int64)
        seen = np.empty(SEEN, np.int32)
        for tile in range(took.size * task // tasks, took.size * (task + 1) // tasks):
            row = tile // in_row
            if not going[row]:
                continue
            _queries_of(tile - row * in_row, sides, counts, query_grid, query_strides, lanes)
            _offer(geometry, legal, queries, seed, row, sweep, table, sides, lanes, before, made)
            for lane in range(LANES):
                for e in range(q.shape[1]):
                    across[e, lane] = q[row * queries + lanes[lane], e] if lanes[lane] >= 0 else 0
            first_key = key_rows[row] * key_grid[0] * key_strides[0]
            keys = k[first_key : first_key + key_grid[0] * key_strides[0]]
            first = row * queries
            if index.shape[1] == 1:
                took[row, tile - row * in_row] = _weigh_one(
                    across, keys, lanes, made, products, seen, causal, index[first : first + queries, 0],
                    score[first : first + queries, 0],
                )  # fmt: skip
            else:
                took[row, tile - row * in_row] = _weigh(
                    across, keys, lanes, made, products, causal, key_grid, key_strides, separation,
                    index[first : first + queries], score[first : first + queries],
                )  # fmt: skip


@compiled
def _queries_of(tile, sides, counts, query_grid, query_strides, lanes):
    """The queries of a tile, -1 where it sticks out of the grid."""
    rank = len(query_grid)
    for lane in range(LANES):
        rest_tile, rest_lane, query = tile, lane, np.int64(0)
        for back in range(rank):
            axis = rank - 1 - back
            place = (rest_tile % counts[axis]) * sides[axis] + rest_lane % sides[axis]
            rest_tile, rest_lane = rest_tile // counts[axis], rest_lane // sides[axis]
            query = query + place * query_strides[axis] if query >= 0 and place < query_grid[axis] else np.int64(-1)
        lanes[lane] = query


@compiled
def _offer(geometry, legal, queries, seed, row, sweep, table, sides, lanes, before, made):
    """What each query of a tile offers, -1 for nothing."""
    query_grid, query_strides, key_grid, key_strides, _, rows_per_mask, _ = geometry
    rank, kappa, prefix = len(key_grid), before.shape[1], absorb(seed, row)
    for lane in range(LANES):
        query = lanes[lane]
        if query < 0:
            made[:, lane] = made[:, 0]
            continue
        noise = absorb(absorb(absorb(prefix, query), 0), sweep)
        diagonal = 0
        for axis in range(rank):
            diagonal += query // query_strides[axis] % query_grid[axis]
        for n in range(len(table)):
            kind, reach, draw = table[n, 0], table[n, 1], table[n, 2]
            entry = (query + n + sweep) % kappa if sweep > 1 else 0
            if kind == GOSSIP:
                found = np.int64(before[row * queries + below(absorb(noise, draw), queries), entry])
            elif kind == RANDOM:
                own = np.int64(before[row * queries + query, entry])
                if own < 0:
                    found = _fresh(geometry, legal, row, query, absorb(noise, draw + rank))
                else:
                    found = np.int64(0)
                    for axis in range(rank):
                        at = own // key_strides[axis] % key_grid[axis]
                        low, high = max(at - reach, 0), min(at + reach, key_grid[axis] - 1)
                        found += key_strides[axis] * (low + below(absorb(noise, draw + axis), high - low + 1))
            else:
                direction = (diagonal + sweep + draw) % (2 * rank)
                axis = direction // 2
                far = reach if kind == SHIFT else reach * sides[axis]
                step = -far if direction % 2 == 0 else far
                at = query // query_strides[axis] % query_grid[axis] + step
                found = np.int64(-1)
                if 0 <= at < query_grid[axis]:
                    found = np.int64(before[row * queries + query + step * query_strides[axis], entry])
                if kind == SHIFT and found >= 0:
                    moved = found // key_strides[axis] % key_grid[axis] - step
                    found = found - step * key_strides[axis] if 0 <= moved < key_grid[axis] else np.int64(-1)
            if found < 0 or (len(legal[0]) and not legal[0][row // rows_per_mask, found]):
                own = before[row * queries + query]
                found = np.int64(own[entry] if own[entry] >= 0 else own[0])
            made[n, lane] = found


@compiled
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
                    for lane in range(LANES):
                        to[lane] += one[e] * across[e, lane]
            return
        p0[:], p1[:], p2[:], p3[:] = 0, 0, 0, 0
        for e in range(0, whole, 4):
            x0, x1, x2, x3 = across[e], across[e + 1], across[e + 2], across[e + 3]
            for lane in range(LANES):
                a, b, c, d = x0[lane], x1[lane], x2[lane], x3[lane]
                p0[lane] += k0[e] * a + k0[e + 1] * b + k0[e + 2] * c + k0[e + 3] * d
                p1[lane] += k1[e] * a + k1[e + 1] * b + k1[e + 2] * c + k1[e + 3] * d
                p2[lane] += k2[e] * a + k2[e + 1] * b + k2[e + 2] * c + k2[e + 3] * d
                p3[lane] += k3[e] * a + k3[e + 1] * b + k3[e + 2] * c + k3[e + 3] * d
        for e in range(whole, width):
            for lane in range(LANES):
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


@compiled
def _weigh_one(across, keys, lanes, made, products, seen, causal, index, score):
    """One match per query: of each offer the best key, of equal ones the lowest. Returns how many queries took one."""
    key, best = np.empty(LANES, np.int32), np.empty(LANES, across.dtype)
    old = np.empty(LANES, np.int32)
    for lane in range(LANES):
        key[lane] = index[lanes[lane]] if lanes[lane] >= 0 else -1
        best[lane] = score[lanes[lane]] if lanes[lane] >= 0 else np.inf
        old[lane] = key[lane]
    seen[:] = -1
    some = np.empty(LANES, np.int32)
    for n in range(made.shape[0]):
        count = 0
        for offered in range(LANES):
            new = made[n, offered]
            if new >= 0:
                slot = np.uint32(np.uint32(new) * np.uint32(0x9E3779B1)) >> np.uint32(20)
                if seen[slot] != new:
                    seen[slot] = new
                    _sort_in(some, count, new)
                    count += 1
        _multiply(across, keys, some, count, products)
        for m in range(count):
            new = some[m]
            for lane in range(LANES):
                better = (products[m, lane] > best[lane]) & ((not causal) | (new <= lanes[lane]))
                best[lane] = products[m, lane] if better else best[lane]
                key[lane] = new if better else key[lane]
    changed = 0
    for lane in range(LANES):
        if lanes[lane] >= 0:
            index[lanes[lane]], score[lanes[lane]] = key[lane], best[lane]
            changed += key[lane] != old[lane]
    return changed


@compiled
def _weigh(across, keys, lanes, made, products, causal, key_grid, key_strides, separation, index, score):
    """Several matches per query: of each window its best key enters where it may. Returns how many queries took one."""
    took = np.zeros(LANES, np.bool_)
    some, top, first = np.empty(LANES, np.int32), np.empty(LANES, across.dtype), np.empty(LANES, np.int32)
    for n in range(made.shape[0]):
        for window in range(WINDOWS):
            count = 0
            for offered in range(LANES):
                if offered // 2 % WINDOWS == window and made[n, offered] >= 0:
                    _sort_in(some, count, made[n, offered])
                    count += 1
            if count == 0:
                continue
            _multiply(across, keys, some, count, products)
            top[:] = -np.inf
            for m in range(count):
                for lane in range(LANES):
                    better = (products[m, lane] > top[lane]) & ((not causal) | (some[m] <= lanes[lane]))
                    top[lane] = products[m, lane] if better else top[lane]
                    first[lane] = some[m] if better else first[lane]
            for lane in range(LANES):
                if lanes[lane] >= 0 and top[lane] > score[lanes[lane], -1]:
                    own, its = index[lanes[lane]], score[lanes[lane]]
                    took[lane] |= _enter(own, its, first[lane], top[lane], key_grid, key_strides, separation)
    return took.sum()


@compiled
def _enter(index, score, key, value, key_grid, key_strides, separation):
    """Let a key in that beats the last match, unless a better one is near; near ones that are worse go."""
    kept = 0
    for m in range(len(index)):
        if index[m] >= 0 and score[m] >= value and _near(index[m], key, key_grid, key_strides, separation):
            return False
    for m in range(len(index)):
        if index[m] >= 0 and not _near(index[m], key, key_grid, key_strides, separation):
            index[kept], score[kept] = index[m], score[m]
            kept += 1
    for m in range(kept, len(index)):
        index[m], score[m] = -1, -np.inf
    _insert(index, score, min(kept, len(index) - 1), key, value)
    return True


@compiled
def _near(key, other, key_grid, key_strides, separation):
    for axis in range(len(key_grid)):
        apart = key // key_strides[axis] % key_grid[axis] - other // key_strides[axis] % key_grid[axis]
        if not -separation <= apart <= separation:
            return False
    return True
