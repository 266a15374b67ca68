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
from .compiled import TASKS_PER_THREAD, compiled, parallel, threads
from .layout import Array, LegalArrays, array, key_rows, strides
from .noise import absorb, below, seeded
from .vectors import dot

BLOCK = 256  # points that are visited together: their scratch fits the first cache
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
    best = np.empty(points, queries_.dtype)
    key, key_after = np.empty(points, np.int32), np.empty(points, np.int32)
    flags, flags_after = np.empty(points, np.uint8), np.empty(points, np.uint8)
    offers = {"shift": (SHIFT, SHIFT), "stay": (STAY, STAY), "both": (SHIFT | STAY,) * 2, "turns": (STAY, SHIFT)}
    memory = CHANGED | CHANGED_BEFORE if propagate == "turns" else CHANGED
    all_scores = np.empty((points, matches), queries_.dtype)
    directions = _directions(jumps, query_grid, key_grid)
    state = np.uint32(seeded(int(seed)))
    with threads() as count:
        tasks = count * TASKS_PER_THREAD
        scratch = np.empty((tasks, 5 + 2 * len(key_grid), BLOCK), np.int32)
        scores = np.empty((tasks, BLOCK), queries_.dtype)
        evaluations = np.zeros(tasks, np.int64)
        for run in range(matches):
            for sweep in range(sweeps + 1):
                offer = offers[propagate][sweep % 2]
                _sweep(
                    queries_, keys_, *geometry, (legal.mask, legal.order, legal.count), queries, state, run, sweep,
                    start, index, separation, directions, offer, memory, gossip,
                    key, key_after, flags, flags_after, best, evaluations, scratch, scores,
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
    best, evaluations, scratch, scores,
):  # fmt: skip
    """Sweep number `sweep` of a run (0: the start). Blocks of points of one row, each written by one thread."""
    tasks, in_row = len(scratch), -(-queries // BLOCK)
    blocks = len(best) // max(queries, 1) * in_row
    for task in numba.prange(tasks):
        geometry = (query_grid, query_strides, key_grid, key_strides, key_rows, rows_per_mask, causal)
        for block in range(blocks * task // tasks, blocks * (task + 1) // tasks):
            row = block // in_row
            begin = (block - row * in_row) * BLOCK
            end = min(begin + BLOCK, queries)
            if sweep == 0:
                evaluations[task] += _start(
                    q, k, geometry, legal, queries, row, begin, end, seed, run, start, earlier, separation,
                    after, flags_after, best,
                )  # fmt: skip
            else:
                evaluations[task] += _visit(
                    q, k, geometry, legal, queries, row, begin, end, seed, run, sweep, earlier, separation, directions,
                    offer, memory, gossip, before, after, flags_before, flags_after, best, scratch[task], scores[task],
                )  # fmt: skip


@compiled
def _start(
    q, k, geometry, legal, queries, row, begin, end, seed, run, start, earlier, separation, after, flags, best,
):  # fmt: skip
    """The warm key where it is legal, else a drawn one; kept whatever its score. Returns the scores computed."""
    keys, key_rows = _keys(geometry), geometry[4]
    count = 0
    for query in range(begin, end):
        point = row * queries + query
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
            score = dot(q, point, k, key_rows[row] * keys + key)
            count += 1
            if score == score:  # NaN counts as -inf
                best[point] = score
    return count


@compiled
def _visit(
    q, k, geometry, legal, queries, row, begin, end, seed, run, sweep, earlier, separation, directions, offer, memory,
    gossip, before, after, flags_before, flags_after, best, scratch, scores,
):  # fmt: skip
    """One sweep of a block of points of one row: propagate, gossip, random search. Returns the scores computed.

    One candidate (-1: none) is made for every point of the block in a plain loop, for the vector units; then `_weigh`
    takes those that win.
    """
    query_grid, query_strides, key_grid, key_strides, key_rows, _, _ = geometry
    rank, size, count = len(key_grid), end - begin, 0
    key, candidate, theirs, chosen, noise = scratch[0], scratch[1], scratch[2], scratch[3], scratch[4]
    place, centre = scratch[5 : 5 + rank], scratch[5 + rank :]  # coordinates of the queries and of their best keys
    row_point, row_key, prefix = row * queries, key_rows[row] * _keys(geometry), absorb(seed, row)
    first = row_point + begin
    where = (row, begin, first, row_key, run)
    for p in range(size):
        noise[p] = absorb(absorb(absorb(prefix, begin + p), run), sweep)
        key[p] = before[first + p]
    for p in range(size):
        _locate(begin + p, query_strides, query_grid, place, p)
        _locate(max(key[p], 0), key_strides, key_grid, centre, p)
    for d in range(len(directions)):
        axis, step, to_point = directions[d, AXIS], directions[d, STEP], directions[d, TO_POINT]
        news = 0
        for p in range(size):
            there = (place[axis, p] + step >= 0) & (place[axis, p] + step < query_grid[axis])
            neighbour = first + p + (to_point if there else 0)
            fresh = there & (flags_before[neighbour] & memory != 0)
            theirs[p] = before[neighbour] if fresh else -1
            news += fresh
        if news and offer & SHIFT:
            to_key, line = directions[d, TO_KEY], directions[d, LINE]
            for p in range(size):
                on_grid = theirs[p] >= 0 and _same_line(theirs[p], theirs[p] - to_key, line)
                candidate[p] = theirs[p] - to_key if on_grid else -1
            count += _weigh(
                q, k, geometry, legal, where, size, candidate, chosen, scores, earlier, separation, key, best, centre
            )
        if news and offer & STAY:
            count += _weigh(
                q, k, geometry, legal, where, size, theirs, chosen, scores, earlier, separation, key, best, centre
            )
    for draw in range(gossip):
        for p in range(size):
            candidate[p] = before[row_point + below(absorb(noise[p], draw), queries)]
        count += _weigh(
            q, k, geometry, legal, where, size, candidate, chosen, scores, earlier, separation, key, best, centre
        )
    reach, draw = max(key_grid), gossip
    while reach >= 1:
        for p in range(size):
            candidate[p] = 0
        for axis in range(rank):
            extent, stride = key_grid[axis], key_strides[axis]
            for p in range(size):
                low, high = max(centre[axis, p] - reach, 0), min(centre[axis, p] + reach, extent - 1)
                candidate[p] += stride * (low + below(absorb(noise[p], draw + axis), high - low + 1))
        for p in range(size):
            if key[p] < 0:
                candidate[p] = _fresh(geometry, legal, row, begin + p, absorb(noise[p], draw + rank))
        count += _weigh(
            q, k, geometry, legal, where, size, candidate, chosen, scores, earlier, separation, key, best, centre
        )
        reach //= 2
        draw += rank + 1
    for p in range(size):
        after[first + p] = key[p]
        changed = np.uint8(key[p] != before[first + p])
        flags_after[first + p] = changed | np.uint8((flags_before[first + p] & CHANGED) << 1)
    return count


@compiled
def _weigh(q, k, geometry, legal, where, size, candidate, chosen, scores, earlier, separation, key, best, centre):
    """Take each point's candidate where it is strictly better and legal. Returns the scores computed."""
    row, begin, first, row_key, run = where
    count = 0
    for p in range(size):  # what is left, in a list: no branch to guess wrong
        chosen[count] = p
        count += (candidate[p] >= 0) & (candidate[p] != key[p])
    for n in range(count):  # nothing is decided here: many loads are under way at once
        scores[n] = dot(q, first + chosen[n], k, row_key + candidate[chosen[n]])
    for n in range(count):
        p = chosen[n]
        if scores[n] > best[first + p]:
            new = np.int64(candidate[p])
            if _legal(geometry, legal, row, begin + p, first + p, new, run, earlier, separation):
                key[p], best[first + p] = new, scores[n]
                _locate(new, geometry[3], geometry[2], centre, p)
    return count


@compiled
def _same_line(key, moved, line):
    """Whether a key moved along an axis is still on the grid; `line` is that axis' extent times its stride."""
    rest = np.int64(np.uint32(key) % np.uint32(line))
    return 0 <= rest + moved - key < line


@compiled
def _locate(index, strides, grid, coordinates, p):
    """Write the coordinates of a point of a grid to column p."""
    for axis in range(len(grid)):
        coordinates[axis, p] = np.uint32(index) // np.uint32(strides[axis])
        index -= coordinates[axis, p] * strides[axis]


@compiled
def _keys(geometry):
    return geometry[2][0] * geometry[3][0]


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
