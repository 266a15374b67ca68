"""Algorithm 1 on a CPU: blocks of points in parallel, each writing only its own.

A neighbour that has not changed since it was last asked is not asked again, and a candidate that is the current best is
not scored: neither could win, since a candidate is taken only when strictly better. So the answer is the reference's.
"""

# Numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from ..grid import Grid, grid_of
from .compiled import compiled, parallel, threads
from .layout import Array, LegalArrays, array, key_rows, strides
from .noise import absorb, below, seeded

BLOCK = 256  # points that one task takes
SHIFT, STAY = 1, 2  # what a neighbour offers, as bits
AXIS, STEP, TO_POINT, TO_KEY, LINE = range(5)  # columns of `_directions`
CHANGED, CHANGED_BEFORE = 1, 2  # whether a point's key changed in the last sweep, and in the one before


def search(*tensors: Any, **settings: Any) -> tuple[Tensor, Tensor]:
    """q, k, seed, key_mask, warm as in `scram.ops` -> index int32 and score float32 [B, H, *G, kappa]."""
    index, score, _ = counted_search(*tensors, **settings)
    return index, score


def counted_search(
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
) -> tuple[Tensor, Tensor, int]:
    """As `search`, and how many scores were computed."""
    query_grid, key_grid = grid_of(q), grid_of(k)
    queries, points = math.prod(query_grid), math.prod(q.shape[:-1])
    queries_, keys_ = array(q), array(k)
    legal = LegalArrays.of(q, k, key_mask, listed=True)
    geometry = (
        query_grid,
        strides(query_grid),
        key_grid,
        strides(key_grid),
        key_rows(q, k),
        legal.rows_per_mask,
        causal,
    )
    shape = (*q.shape[:-1], matches)
    index, score = np.full((points, matches), -1, np.int32), np.full((points, matches), -np.inf, np.float32)
    start = np.zeros((0, 0), np.int32) if warm is None else warm.reshape(points, warm.shape[-1]).contiguous().numpy()
    blocks = -(-points // BLOCK)
    evaluations = np.zeros(blocks, np.int64)
    best = np.empty(points, queries_.dtype)
    key, key_after = np.empty(points, np.int32), np.empty(points, np.int32)
    flags, flags_after = np.empty(points, np.uint8), np.empty(points, np.uint8)
    offers = {"shift": (SHIFT, SHIFT), "stay": (STAY, STAY), "both": (SHIFT | STAY,) * 2, "turns": (STAY, SHIFT)}
    memory = CHANGED | CHANGED_BEFORE if propagate == "turns" else CHANGED
    all_scores = np.empty((points, matches), queries_.dtype)
    directions = _directions(jumps, query_grid, key_grid)
    coordinates = np.empty((blocks, 2, 8), np.int64)  # a cache line each
    asked = np.empty((blocks, len(directions)), np.int64)
    state = np.uint32(seeded(int(seed)))
    with threads():
        for run in range(matches):
            for sweep in range(sweeps + 1):
                offer = offers[propagate][sweep % 2]
                _sweep(
                    queries_, keys_, *geometry, (legal.mask, legal.order, legal.count), queries, state, run, sweep,
                    start, index, separation, directions, offer, memory, gossip,
                    key, key_after, flags, flags_after, best, evaluations, coordinates, asked,
                )  # fmt: skip
                key, key_after, flags, flags_after = key_after, key, flags_after, flags
            index[:, run], all_scores[:, run] = key, best
        _best_first(index, all_scores, score)
    total = int(evaluations.sum())
    return torch.from_numpy(index).reshape(shape), torch.from_numpy(score).reshape(shape), total


def _directions(jumps: tuple[int, ...], query_grid: Grid, key_grid: Grid) -> Array:
    """The neighbours in the order they are asked: a row of AXIS, STEP, TO_POINT, TO_KEY, LINE for each."""
    to_point, to_key = strides(query_grid), strides(key_grid)
    rows = [
        (axis, step, step * to_point[axis], step * to_key[axis], key_grid[axis] * to_key[axis])
        for jump in jumps
        for axis in range(len(key_grid))
        for step in (-jump, jump)
    ]
    return np.array(rows, np.int64).reshape(-1, 5)


@parallel
def _sweep(
    q, k, query_grid, query_strides, key_grid, key_strides, key_rows, rows_per_mask, causal, legal, queries, seed, run,
    sweep, start, earlier, separation, directions, offer, memory, gossip, before, after, flags_before, flags_after,
    best, evaluations, coordinates, asked,
):  # fmt: skip
    """Sweep number `sweep` of a run (0: the start), every block of points by one thread."""
    for block in numba.prange(len(evaluations)):
        geometry = (query_grid, query_strides, key_grid, key_strides, key_rows, rows_per_mask, causal)
        begin, end = block * BLOCK, min((block + 1) * BLOCK, len(best))
        if sweep == 0:
            evaluations[block] += _start(
                q, k, geometry, legal, queries, begin, end, seed, run, start, earlier, separation,
                after, flags_after, best,
            )  # fmt: skip
        else:
            evaluations[block] += _visit(
                q, k, geometry, legal, queries, begin, end, seed, run, sweep, earlier, separation, directions, offer,
                memory, gossip, before, after, flags_before, flags_after, best,
                coordinates[block, 0], coordinates[block, 1], asked[block],
            )  # fmt: skip


@compiled
def _start(
    q, k, geometry, legal, queries, begin, end, seed, run, start, earlier, separation, after, flags, best,
):  # fmt: skip
    """The warm key where it is legal, else a drawn one; kept whatever its score. Returns the scores computed."""
    keys, key_rows = _keys(geometry), geometry[4]
    count = 0
    for point in range(begin, end):
        row = point // queries
        query = point - row * queries
        key = np.int64(-1)
        if run < start.shape[1]:
            key = np.int64(start[point, run])
            if not 0 <= key < keys or not _legal(geometry, legal, row, query, point, key, run, earlier, separation):
                key = np.int64(-1)
        if key < 0:
            noise = absorb(absorb(absorb(absorb(absorb(seed, row), query), run), 0), 0)
            key = _fresh(geometry, legal, row, query, noise)
            if key >= 0 and not _legal(geometry, legal, row, query, point, key, run, earlier, separation):
                key = np.int64(-1)
        after[point], best[point], flags[point] = key, -np.inf, CHANGED
        if key >= 0:
            score = _dot(q, point, k, key_rows[row] * keys + key)
            count += 1
            if score == score:  # NaN counts as -inf
                best[point] = score
    return count


@compiled
def _visit(
    q, k, geometry, legal, queries, begin, end, seed, run, sweep, earlier, separation, directions, offer, memory,
    gossip, before, after, flags_before, flags_after, best, place, centre, asked,
):  # fmt: skip
    """One sweep of a block: propagate, gossip, random search. Returns the scores computed.

    Scratch: `place` and `centre`, the coordinates of the query and of its best key; `asked`, the neighbours with news;
    `near`, a key in each box around the best; `bits`, the draws of the boxes. They are filled in plain loops, for the
    vector units, before anything is decided.
    """
    query_grid, query_strides, key_grid, key_strides, key_rows, _, _ = geometry
    rank, keys, count = len(key_grid), _keys(geometry), 0
    widest = max(key_grid)
    for point in range(begin, end):
        row = point // queries
        query = point - row * queries
        noise = absorb(absorb(absorb(absorb(seed, row), query), run), sweep)
        first_key, first_point = key_rows[row] * keys, point - query
        key, top = np.int64(before[point]), best[point]
        _locate(query, query_strides, query_grid, place)
        news = 0
        for d in range(len(directions)):
            if 0 <= place[directions[d, AXIS]] + directions[d, STEP] < query_grid[directions[d, AXIS]]:
                neighbour = point + directions[d, TO_POINT]
                asked[news] = d
                news += (flags_before[neighbour] & memory != 0) & (before[neighbour] >= 0)
        for n in range(news):
            d = asked[n]
            theirs = np.int64(before[point + directions[d, TO_POINT]])
            moved = theirs - directions[d, TO_KEY]
            if offer & SHIFT and moved != key and _same_line(theirs, moved, directions[d, LINE]):
                score = _dot(q, point, k, first_key + moved)
                count += 1
                if score > top and _legal(geometry, legal, row, query, point, moved, run, earlier, separation):
                    key, top = moved, score
            if offer & STAY and theirs != key:
                score = _dot(q, point, k, first_key + theirs)
                count += 1
                if score > top and _legal(geometry, legal, row, query, point, theirs, run, earlier, separation):
                    key, top = theirs, score
        for draw in range(gossip):
            theirs = np.int64(before[first_point + below(absorb(noise, draw), queries)])
            if theirs >= 0 and theirs != key:
                score = _dot(q, point, k, first_key + theirs)
                count += 1
                if score > top and _legal(geometry, legal, row, query, point, theirs, run, earlier, separation):
                    key, top = theirs, score
        reach, draw = widest, gossip
        if key >= 0:
            _locate(key, key_strides, key_grid, centre)
        while reach >= 1:
            if key >= 0:
                near = np.int64(0)
                for axis in range(rank):
                    low, high = max(centre[axis] - reach, 0), min(centre[axis] + reach, key_grid[axis] - 1)
                    near += key_strides[axis] * (low + below(absorb(noise, draw + axis), high - low + 1))
            else:
                near = _fresh(geometry, legal, row, query, absorb(noise, draw + rank))
            if near != key:
                score = _dot(q, point, k, first_key + near)
                count += 1
                if score > top and _legal(geometry, legal, row, query, point, near, run, earlier, separation):
                    key, top = near, score
                    _locate(key, key_strides, key_grid, centre)
            reach //= 2
            draw += rank + 1
        changed = np.uint8(key != before[point])
        flags_after[point] = changed | np.uint8((flags_before[point] & CHANGED) << 1)
        after[point], best[point] = key, top
    return count


@compiled
def _same_line(key, moved, line):
    """Whether a key moved along an axis is still on the grid; `line` is that axis' extent times its stride."""
    rest = np.int64(np.uint32(key) % np.uint32(line))
    return 0 <= rest + moved - key < line


@compiled
def _locate(index, strides, grid, coordinates):
    for axis in range(len(grid)):
        coordinates[axis] = index // strides[axis]
        index -= coordinates[axis] * strides[axis]


@compiled
def _keys(geometry):
    return geometry[2][0] * geometry[3][0]


@compiled
def _dot(q, point, k, key):
    total = q.dtype.type(0)
    for e in range(q.shape[1]):
        total += q[point, e] * k[key, e]
    return total


@compiled
def _fresh(geometry, legal, row, query, bits):
    """A key drawn from the legal ones, -1 if there is none."""
    _, order, count = legal
    last = query if geometry[6] else _keys(geometry) - 1
    if len(count) == 0:
        return below(bits, last + 1)
    mask_row = row // geometry[5]
    choices = count[mask_row, last]
    if choices == 0:
        return np.int64(-1)
    return np.int64(order[mask_row, below(bits, choices)])


@compiled
def _legal(geometry, legal, row, query, point, key, run, earlier, separation):
    """Whether a key on the grid may be taken: by mask, by order, and farther than L from earlier matches."""
    _, _, key_grid, key_strides, _, rows_per_mask, causal = geometry
    if causal and key > query:
        return False
    if len(legal[0]) and not legal[0][row // rows_per_mask, key]:
        return False
    for match in range(run):
        other = np.int64(earlier[point, match])
        if other < 0:
            continue
        near = True
        for axis in range(len(key_grid)):
            apart = key // key_strides[axis] % key_grid[axis] - other // key_strides[axis] % key_grid[axis]
            near = near and -separation <= apart <= separation
        if near:
            return False
    return True


@parallel
def _best_first(index, score, rounded):
    """Sort each point's matches by score, equal ones in run order, -1 last; scores also rounded to float32."""
    for point in numba.prange(len(index)):
        for run in range(1, index.shape[1]):
            key, value, place = index[point, run], score[point, run], run
            while place > 0 and key >= 0 and (index[point, place - 1] < 0 or score[point, place - 1] < value):
                index[point, place], score[point, place] = index[point, place - 1], score[point, place - 1]
                place -= 1
            index[point, place], score[point, place] = key, value
        for run in range(index.shape[1]):
            rounded[point, run] = score[point, run]
