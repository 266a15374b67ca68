"""Algorithm 1 on a CPU: blocks of points in parallel, each writing only its own.

A neighbour that has not changed since it was last asked is not asked again, and a candidate that is the current best is
not scored: neither could win, since a candidate is taken only when strictly better. So the answer is the reference's.
"""

# Numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...grid import Grid, grid_of
from .candidates import ask, draw_around, follow, leave, leave_out, shift
from .compiled import TASKS_PER_THREAD, compiled, launcher, threads
from .layout import Array, LegalArrays, array, key_rows, padded, strides
from .noise import absorb, below, seeded
from .tasks import each_task
from .vectors import LANES, coordinates, dot, narrow_dots

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
    queries, points, keys = math.prod(query_grid), math.prod(q.shape[:-1]), math.prod(key_grid)
    queries_, keys_ = padded(array(q)), padded(array(k))
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
    index = np.full((points, matches), -1, np.int32)
    start = np.zeros((0, 0), np.int32) if warm is None else warm.reshape(points, warm.shape[-1]).contiguous().numpy()
    best = np.empty(points, queries_.dtype)
    key, key_after = np.empty(points, np.int32), np.empty(points, np.int32)
    offered, offered_after = np.empty(points, np.int32), np.empty(points, np.int32)
    flags = np.empty(points, np.uint8)
    offers = {"shift": (SHIFT, SHIFT), "stay": (STAY, STAY), "both": (SHIFT | STAY,) * 2, "turns": (STAY, SHIFT)}
    memory = CHANGED | CHANGED_BEFORE if propagate == "turns" else CHANGED
    all_scores = np.full((points, matches), -np.inf, queries_.dtype)
    directions = _directions(jumps, query_grid, key_grid)
    state = np.uint32(seeded(int(seed)))
    with threads() as count:
        tasks = count * TASKS_PER_THREAD
        scratch = np.empty((tasks, 5 + 3 * len(key_grid) + matches, BLOCK), np.int32)
        scores = np.empty((tasks, BLOCK), queries_.dtype)
        evaluations = np.zeros(tasks, np.int64)
        for run in range(matches):
            if run >= keys and (index[:, :run] >= 0).sum(1).min(initial=keys) == keys:
                break  # every key is a match already
            for sweep in range(sweeps + 1):
                offer = offers[propagate][sweep % 2]
                _sweep(
                    tasks, queries_, keys_, geometry, (legal.mask, legal.order, legal.count), queries, state, run,
                    sweep, start, index, separation, directions, offer, memory, gossip,
                    key, key_after, offered, offered_after, flags, best, evaluations, scratch, scores,
                )  # fmt: skip
                key, key_after, offered, offered_after = key_after, key, offered_after, offered
            index[:, run], all_scores[:, run] = key, best
        if matches > 1:
            _best_first(tasks, index, all_scores)
    score = all_scores.astype(np.float32, copy=False)
    total = int(evaluations.sum())
    return torch.from_numpy(index).reshape(shape), torch.from_numpy(score).reshape(shape), total


def _directions(jumps: tuple[int, ...], query_grid: Grid, key_grid: Grid) -> Array:
    """The neighbours in the order they are asked: a row of AXIS, STEP, TO_POINT, TO_KEY, LINE for each."""
    to_point, to_key = strides(query_grid), strides(key_grid)

    def row(axis: int, step: int) -> tuple[int, ...]:
        own, other = query_grid[axis], key_grid[axis]  # farther steps leave the grid as well, and need more bits
        to_other = max(-other, min(step, other)) * to_key[axis]
        return axis, max(-own, min(step, own)), step * to_point[axis], to_other, other * to_key[axis]

    rows = [row(axis, step) for jump in jumps for axis in range(len(key_grid)) for step in (-jump, jump)]
    return np.array(rows, np.int64).reshape(-1, 5)


@launcher
def _sweep(tasks, *arguments):
    """Sweep number `sweep` of a run (0: the start)."""
    each_task(_some_blocks, tasks, arguments)


@compiled
def _some_blocks(
    task, q, k, geometry, legal, queries, seed, run, sweep, start, earlier, separation, directions, offer, memory,
    gossip, before, after, offered, offered_after, flags, best, evaluations, scratch, scores,
):  # fmt: skip
    """Blocks of points of one row, each written by one task."""
    tasks, in_row = len(scratch), -(-queries // BLOCK)
    blocks = len(best) // max(queries, 1) * in_row
    for block in range(blocks * task // tasks, blocks * (task + 1) // tasks):
        row = block // in_row
        begin = (block - row * in_row) * BLOCK
        end = min(begin + BLOCK, queries)
        if sweep == 0:
            evaluations[task] += _start(
                q, k, geometry, legal, queries, row, begin, end, seed, run, start, earlier, separation,
                after, offered_after, flags, best,
            )  # fmt: skip
        else:
            evaluations[task] += _visit(
                q, k, geometry, legal, queries, row, begin, end, seed, run, sweep, earlier, separation, directions,
                offer, memory, gossip, before, after, offered, offered_after, flags, best,
                scratch[task], scores[task],
            )  # fmt: skip


@compiled
def _start(
    q, k, geometry, legal, queries, row, begin, end, seed, run, start, earlier, separation, after, offered, flags,
    best,
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
        after[point], offered[point], best[point], flags[point] = key, key, -np.inf, CHANGED
        if key >= 0:
            score = dot(q, point, k, key_rows[row] * keys + key)
            count += 1
            if score == score:  # NaN counts as -inf
                best[point] = score
    return count


@compiled
def _visit(
    q, k, geometry, legal, queries, row, begin, end, seed, run, sweep, earlier, separation, directions, offer, memory,
    gossip, before, after, offered, offered_after, flags, all_best, scratch, scores,
):  # fmt: skip
    """One sweep of a block of points of one row: propagate, gossip, random search. Returns the scores computed.

    One candidate (-1: none) is made for every point of the block in a plain loop, for the vector units; then `_weigh`
    takes those that win. Slices of the block, since a loop over sums of indices would not be vectorised.
    """
    query_grid, query_strides, key_grid, key_strides, key_rows = geometry[:5]
    rank, size, count = len(key_grid), end - begin, 0
    key, candidate, theirs, chosen, noise = scratch[0], scratch[1], scratch[2], scratch[3], scratch[4]
    place, centre, rest = scratch[5 : 5 + rank], scratch[5 + rank : 5 + 2 * rank], scratch[5 + 2 * rank :]
    drawn, barred = rest[:rank], rest[rank : rank + (0 if separation else run)]
    row_point, row_key, prefix = row * queries, key_rows[row] * _keys(geometry), absorb(seed, row)
    first, last = row_point + begin, row_point + end
    key_before, best = before[first:last], all_best[first:last]
    where, others = (row, begin, first, row_key, run, size), (earlier, separation, barred)
    for p in range(size):
        noise[p] = absorb(absorb(absorb(prefix, begin + p), run), sweep)
        key[p] = key_before[p]
    for match in range(len(barred)):
        for p in range(size):
            barred[match, p] = earlier[first + p, match]
    for axis in range(rank):
        for p in range(size):
            candidate[p] = begin + p
        coordinates(candidate, query_grid[axis], query_strides[axis], place[axis], size)
    for d in range(len(directions)):
        axis, step, to_point = directions[d, AXIS], directions[d, STEP], directions[d, TO_POINT]
        if not ask(offered, row_point, begin, to_point, queries, place[axis], step, query_grid[axis], theirs, size):
            continue
        if offer & SHIFT:
            shift(theirs, directions[d, TO_KEY], directions[d, LINE], candidate, size)
            count += _weigh(q, k, geometry, legal, where, others, candidate, key, best, chosen, scores)
        if offer & STAY:
            count += _weigh(q, k, geometry, legal, where, others, theirs, key, best, chosen, scores)
    for draw in range(gossip):
        for p in range(size):
            chosen[p] = below(absorb(noise[p], draw), queries)
        for p in range(size):
            candidate[p] = before[row_point + chosen[p]]
        count += _weigh(q, k, geometry, legal, where, others, candidate, key, best, chosen, scores)
    keyless = 0
    for p in range(size):
        keyless += key[p] < 0
    for axis in range(rank):
        coordinates(key, key_grid[axis], key_strides[axis], centre[axis], size)
    reach, draw = max(key_grid), gossip
    while reach >= 1:
        for p in range(size):
            candidate[p] = 0
        for axis in range(rank):
            draw_around(noise, draw + axis, centre[axis], reach, key_grid[axis], drawn[axis], size)
            for p in range(size):
                candidate[p] += key_strides[axis] * drawn[axis, p]
        for p in range(size if keyless else 0):
            if key[p] < 0:
                candidate[p] = _fresh(geometry, legal, row, begin + p, absorb(noise[p], draw + rank))
                for axis in range(rank):
                    drawn[axis, p] = candidate[p] // key_strides[axis] % key_grid[axis]
        count += _weigh(q, k, geometry, legal, where, others, candidate, key, best, chosen, scores)
        for axis in range(rank):
            follow(key, candidate, drawn[axis], centre[axis], size)
        reach //= 2
        draw += rank + 1
    leave(key, key_before, memory, after[first:last], offered_after[first:last], flags[first:last])
    return count


@compiled
def _weigh(q, k, geometry, legal, where, others, candidate, key, best, chosen, scores):
    """Take each point's candidate where it is strictly better and legal. Returns the scores computed.

    Without separation a candidate that is an earlier match is left out at once; distances are asked of winners only.
    """
    for match in range(len(others[2])):
        leave_out(candidate, others[2][match], where[5])
    count = _score(q, k, where, candidate, key, chosen, scores)
    if count:
        _take(geometry, legal, where, others, candidate, key, best, scores)
    return count


@compiled
def _score(q, k, where, candidate, key, chosen, scores):
    """Score each point's candidate, -inf where there is none. Returns how many were new."""
    _, _, first, row_key, _, size = where
    count = 0
    if q.shape[1] == LANES:  # all are scored, without asking: that is quicker than a list
        new = np.int32(0)
        for p in range(size):
            new = np.int32(new + ((candidate[p] >= 0) & (candidate[p] != key[p])))
            chosen[p] = max(candidate[p], np.int32(0))
        narrow_dots(q, first, k, row_key, chosen, scores, size if new else 0)
        return np.int64(new)
    for p in range(size):  # what is left, in a list: no branch to guess wrong
        chosen[count] = p
        scores[p] = -np.inf
        count += (candidate[p] >= 0) & (candidate[p] != key[p])
    for n in range(count):  # nothing is decided here: many loads are under way at once
        scores[chosen[n]] = dot(q, first + chosen[n], k, row_key + candidate[chosen[n]])
    return count


@compiled
def _take(geometry, legal, where, others, candidate, key, best, scores):
    row, begin, first, _, run, size = where
    earlier, separation, _ = others
    if geometry[6] or len(legal[0]) or (run and separation):
        for p in range(size):
            if scores[p] > best[p] and candidate[p] >= 0:
                new = np.int64(candidate[p])
                if not _legal(geometry, legal, row, begin + p, first + p, new, run, earlier, separation):
                    scores[p] = -np.inf
    for p in range(size):  # every load before the choice, or the compiler would branch
        new, old, score, least = candidate[p], key[p], scores[p], best[p]
        better = (score > least) & (new >= 0)
        key[p] = new if better else old
        best[p] = score if better else least


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
        near = other == key
        if separation and other >= 0:
            near = True
            for axis in range(len(key_grid)):
                apart = key // key_strides[axis] % key_grid[axis] - other // key_strides[axis] % key_grid[axis]
                near = near and -separation <= apart <= separation
        if near:
            return False
    return True


@launcher
def _best_first(tasks, index, score):
    """Sort each point's matches by score, equal ones in run order, -1 last."""
    each_task(_sort_some, tasks, (tasks, index, score))


@compiled
def _sort_some(task, tasks, index, score):
    for point in range(len(index) * task // tasks, len(index) * (task + 1) // tasks):
        for run in range(1, index.shape[1]):
            key, value, place = index[point, run], score[point, run], run
            while place > 0 and key >= 0 and (index[point, place - 1] < 0 or score[point, place - 1] < value):
                index[point, place], score[point, place] = index[point, place - 1], score[point, place - 1]
                place -= 1
            index[point, place], score[point, place] = key, value
