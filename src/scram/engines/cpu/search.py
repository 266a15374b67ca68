"""Algorithm 1 on a CPU: blocks of points in parallel, each writing only its own.

A neighbor that has not changed since it was last read is not read again, and a candidate that is the current best is
not scored: neither could win, since a candidate is taken only when strictly better. So the result is the reference's.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from ..._compat.numba import SIMD_WIDTH
from ...core.calls import Found, SearchCall
from ...spec.grid import Grid, grid_of
from ...spec.schedule import moves, signs, widest
from .candidates import draw_around, follow, leave, leave_out, move, read_neighbors
from .compiled import compiled, inlined
from .layout import Array, Geometry, array, block_at, padded, row_states, strides, tensor
from .legal import Earlier, first_key, fresh, legal
from .noise import absorb, below
from .threads import in_one_pool, parallel, tasks_of, threads
from .vectors import coordinates, dot, narrow_dots

BLOCK = 256  # points that are visited together: their scratch fits the first cache
AXIS, STEP, TO_POINT, TO_KEY, LINE = range(5)  # columns of `_directions`
CHANGED = 1  # a point's key changed in the last sweep
CHANGED_BEFORE = 2  # it changed in the sweep before that


class Features(NamedTuple):
    q: Array  # [P, E]
    k: Array  # [B*Hk*M, E]


class Choices(NamedTuple):
    """What keys are drawn from: the unmasked keys, lists without elements where there is no mask; and warm keys."""

    order: Array  # int32 [R or B, M], the unmasked keys of a row of the mask, ascending
    count: Array  # type: ignore[assignment]  # int32 [R or B, M], how many come up to each key
    warm: Array  # int32 [P, any number]
    seed: Array  # uint32 [R], the hash after the seed and the row

    @staticmethod
    def of(call: SearchCall, mask: Array) -> Choices:
        order = np.zeros(mask.shape, np.int32)
        warm = np.zeros((0, 0), np.int32)
        for row in range(len(mask)):
            unmasked = np.flatnonzero(mask[row])
            order[row, : len(unmasked)] = unmasked
        if call.warm is not None:
            warm = call.warm.flatten(0, -2).contiguous().numpy()
        return Choices(order, mask.cumsum(1, dtype=np.int32), warm, row_states(call.seed, call.q, call.rows))


class Bounds(NamedTuple):
    """A match must be at most `reach` from one of the keys that its point starts from, on every axis."""

    starts: Array  # int32 [P, any number]; without elements: there is no such limit
    reach: Grid  # of each axis; without limit as far as the grid

    @staticmethod
    def of(call: SearchCall) -> Bounds:
        if call.starts is None:
            return Bounds(np.zeros((0, 0), np.int32), grid_of(call.k))
        return Bounds(call.starts.flatten(0, -2).contiguous().numpy(), call.reach)


class Sweep(NamedTuple):
    """One sweep over all points; number 0 is the start."""

    number: int
    moves: Array  # int64 [moves], by how many steps each key that a neighbor offers is moved
    memory: int  # CHANGED or more: how long a change is news
    gossip: int
    radius: int  # of random search, the largest
    directions: Array  # int64 [directions, 5], from `_directions`
    grid: Grid  # of queries
    strides: Grid  # of queries


class Field(NamedTuple):
    """What every point has and leaves for the next sweep, [P] each."""

    before: Array  # int32, keys at the end of the last sweep
    after: Array  # int32, keys at the end of this sweep
    offered: Array  # int32, those of `before` that are news, else -1
    offered_after: Array  # int32, those of `after` that are news, else -1
    flags: Array  # uint8, CHANGED and CHANGED_BEFORE
    best: Array  # scores of the keys


class Scratch(NamedTuple):
    """Of each task."""

    buffers: Array  # int32 [tasks, 5 + 3 rank + kappa, BLOCK]
    scores: Array  # [tasks, BLOCK]
    evaluations: Array  # int64 [tasks], scores computed


class Own(NamedTuple):
    """What the points of a block have, and room for their candidates' scores."""

    key: Array  # int32 [BLOCK]
    best: Array  # [size]
    chosen: Array  # int32 [BLOCK]
    scores: Array  # [BLOCK]
    barred: Array  # int32 [earlier matches that are no candidates, BLOCK]


@in_one_pool
def search(call: SearchCall) -> Found:
    """Algorithm 1."""
    return counted_search(call)[0]


def counted_search(call: SearchCall) -> tuple[Found, int]:
    """As `search`, and how many scores were computed."""
    q = call.q
    k = call.k
    matches = call.matches
    query_grid = grid_of(q)
    key_grid = grid_of(k)
    points = math.prod(q.shape[:-1])
    features = Features(padded(array(q)), padded(array(k)))
    geometry = Geometry.of(q, k, call.key_mask, call.causal)
    choices = Choices.of(call, geometry.mask)
    bounds = Bounds.of(call)
    index = np.full((points, matches), -1, np.int32)
    scores = np.full((points, matches), -np.inf, features.q.dtype)
    before, after, offered, offered_after = (np.empty(points, np.int32) for _ in range(4))
    flags = np.empty(points, np.uint8)
    best = np.empty(points, features.q.dtype)
    by_turn = [np.array(moves(call.propagate, sweep), np.int64) for sweep in (0, 1)]
    memory = CHANGED if np.array_equal(by_turn[0], by_turn[1]) else CHANGED | CHANGED_BEFORE
    radius = widest(key_grid, call.reach, call.random)
    directions = _directions(call.jumps, signs(call.causal), query_grid, key_grid)
    query_strides = strides(query_grid)
    with threads() as most_tasks:
        tasks = tasks_of(most_tasks, len(geometry.key_rows) * -(-geometry.queries // BLOCK))
        scratch = Scratch(
            buffers=np.empty((tasks, 5 + 3 * len(key_grid) + matches, BLOCK), np.int32),
            scores=np.empty((tasks, BLOCK), best.dtype),
            evaluations=np.zeros(tasks, np.int64),
        )
        for run in range(matches):
            if run >= geometry.keys and (index[:, :run] >= 0).sum(1).min(initial=geometry.keys) == geometry.keys:
                break  # every key is a match already
            for number in range(call.sweeps + 1):
                sweep = Sweep(
                    number=number,
                    moves=by_turn[number % 2],
                    memory=memory,
                    gossip=call.gossip,
                    radius=radius,
                    directions=directions,
                    grid=query_grid,
                    strides=query_strides,
                )
                field = Field(before, after, offered, offered_after, flags, best)
                earlier = Earlier(index, run, call.separation, *bounds)
                parts = (features, geometry, choices, earlier, sweep, field, scratch)
                _sweep(tasks, *map(tuple, parts))  # Numba recognizes plain tuples sooner
                before, after = after, before
                offered, offered_after = offered_after, offered
            index[:, run] = before
            scores[:, run] = best
        if matches > 1:
            _best_first(tasks, index, scores)
    return Found(tensor(index, None, q), tensor(scores, torch.float32, q)), int(scratch.evaluations.sum())


def _directions(jumps: tuple[int, ...], sides: tuple[int, ...], query_grid: Grid, key_grid: Grid) -> Array:
    """The neighbors in the order they are read: AXIS, STEP, TO_POINT, TO_KEY, LINE of each."""
    to_point = strides(query_grid)
    to_key = strides(key_grid)

    def direction(axis: int, step: int) -> tuple[int, ...]:
        # Farther steps leave the grid as well, and need more bits.
        extent = query_grid[axis]
        key_extent = key_grid[axis]
        query_step = max(-extent, min(step, extent))
        key_step = max(-key_extent, min(step, key_extent))
        return axis, query_step, step * to_point[axis], key_step * to_key[axis], key_extent * to_key[axis]

    directions = [direction(axis, side * jump) for jump in jumps for axis in range(len(key_grid)) for side in sides]
    return np.array(directions, np.int64).reshape(-1, 5)


@parallel
def _sweep(task, tasks, features, geometry, choices, earlier, sweep, field, scratch):
    """Blocks of points of one row, each written by one task. The arguments come as plain tuples."""
    features = Features(*features)
    geometry = Geometry(*geometry)
    choices = Choices(*choices)
    earlier = Earlier(*earlier)
    sweep = Sweep(*sweep)
    field = Field(*field)
    scratch = Scratch(*scratch)
    blocks = len(geometry.key_rows) * -(-geometry.queries // BLOCK)
    for number in range(blocks * task // tasks, blocks * (task + 1) // tasks):
        block = block_at(number, BLOCK, geometry, geometry.keys)
        if sweep.number == 0:
            count = _start(features, geometry, choices, earlier, field, block)
        else:
            buffers = scratch.buffers[task]
            scores = scratch.scores[task]
            count = _visit(features, geometry, choices, earlier, sweep, field, block, buffers, scores)
        scratch.evaluations[task] += count


@inlined
def _start(features, geometry, choices, earlier, field, block):
    """The first key of every point, kept whatever its score. Returns the scores computed."""
    count = 0
    for p in range(block.size):
        point = block.first + p
        key = first_key(geometry, choices, earlier, earlier.run, block.row, block.begin + p)
        field.after[point] = key
        field.offered_after[point] = key
        field.best[point] = -np.inf
        field.flags[point] = CHANGED
        if key >= 0:
            score = dot(features.q, point, features.k, block.first_key + key)
            count += 1
            if score == score:  # NaN counts as -inf
                field.best[point] = score
    return count


@inlined
def _visit(features, geometry, choices, earlier, sweep, field, block, buffers, scores):
    """One sweep of a block of points of one row: propagate, gossip, random search. Returns the scores computed.

    One candidate (-1: none) is made for every point of the block in a plain loop, for the vector units; then
    `_try_candidates` takes those that win. Slices of the block, since a loop over sums of indices would not be
    vectorised.
    """
    rank = len(geometry.grid)
    size = block.size
    begin = block.begin
    first = block.first
    count = 0
    key = buffers[0]  # [BLOCK]
    candidate = buffers[1]  # [BLOCK]
    offers = buffers[2]  # [BLOCK]
    chosen = buffers[3]  # [BLOCK]
    noise = buffers[4]  # [BLOCK]
    place = buffers[5 : 5 + rank]  # [rank, BLOCK], of the queries
    center = buffers[5 + rank : 5 + 2 * rank]  # [rank, BLOCK], of the keys
    rest = buffers[5 + 2 * rank :]
    around = rest[:rank]  # [rank, BLOCK], of the keys drawn
    barred = rest[rank : rank + (0 if earlier.separation else earlier.run)]
    row_point = first - begin
    prefix = choices.seed[block.row]
    key_before = field.before[first : first + size]
    best = field.best[first : first + size]
    for p in range(size):
        noise[p] = absorb(absorb(absorb(prefix, begin + p), earlier.run), sweep.number)
        key[p] = key_before[p]
    for match in range(len(barred)):
        for p in range(size):
            barred[match, p] = earlier.index[first + p, match]
    for axis in range(rank):
        for p in range(size):
            candidate[p] = begin + p
        coordinates(candidate, sweep.grid[axis], sweep.strides[axis], place[axis], size)
    own = Own(key, best, chosen, scores, barred)
    for d in range(len(sweep.directions)):
        direction = sweep.directions[d]
        axis = direction[AXIS]
        extent = sweep.grid[axis]
        offered = field.offered
        to_point = direction[TO_POINT]
        step = direction[STEP]
        if not read_neighbors(offered, block, geometry.queries, to_point, place[axis], step, extent, offers):
            continue
        for m in range(len(sweep.moves)):
            if sweep.moves[m]:
                move(offers, -sweep.moves[m] * direction[TO_KEY], direction[LINE], candidate, size)
            else:
                for p in range(size):
                    candidate[p] = offers[p]
            count += _try_candidates(features, geometry, earlier, block, own, candidate)
    for draw in range(sweep.gossip):
        for p in range(size):
            others = begin + p + 1 if geometry.causal else geometry.queries
            chosen[p] = below(absorb(noise[p], draw), others)
        for p in range(size):
            candidate[p] = field.before[row_point + chosen[p]]
        count += _try_candidates(features, geometry, earlier, block, own, candidate)
    keyless = 0
    for p in range(size):
        keyless += key[p] < 0
    for axis in range(rank):
        coordinates(key, geometry.grid[axis], geometry.strides[axis], center[axis], size)
    radius = sweep.radius
    draw = sweep.gossip
    while radius >= 1:
        for p in range(size):
            candidate[p] = 0
        for axis in range(rank):
            far = min(radius, earlier.reach[axis])
            draw_around(noise, draw + axis, center[axis], far, geometry.grid[axis], around[axis], size)
            for p in range(size):
                candidate[p] += geometry.strides[axis] * around[axis, p]
        for p in range(size if keyless else 0):
            if key[p] < 0:
                number = earlier.run
                query = begin + p
                candidate[p] = fresh(geometry, choices, earlier, number, block.row, query, noise[p], draw, draw + rank)
                for axis in range(rank):
                    around[axis, p] = candidate[p] // geometry.strides[axis] % geometry.grid[axis]
        count += _try_candidates(features, geometry, earlier, block, own, candidate)
        for axis in range(rank):
            follow(key, candidate, around[axis], center[axis], size)
        radius //= 2
        draw += rank + 1
    after = field.after[first : first + size]
    offered = field.offered_after[first : first + size]
    leave(key, key_before, sweep.memory, after, offered, field.flags[first : first + size])
    return count


@compiled
def _try_candidates(features, geometry, earlier, block, own, candidate):
    """Take each point's candidate where it is strictly better and legal. Returns the scores computed.

    Without separation a candidate that is an earlier match is left out at once; distances are computed for winners
    only.
    """
    for match in range(len(own.barred)):
        leave_out(candidate, own.barred[match], block.size)
    count = _score(features, block, own, candidate)
    if count:
        _take(geometry, earlier, block, own, candidate)
    return count


@compiled
def _score(features, block, own, candidate):
    """Score each point's candidate, -inf where there is none. Returns how many were new."""
    key = own.key
    chosen = own.chosen
    scores = own.scores
    size = block.size
    count = 0
    if features.q.shape[1] == SIMD_WIDTH:  # all are scored: that is quicker than a list
        new = np.int32(0)
        for p in range(size):
            new = np.int32(new + ((candidate[p] >= 0) & (candidate[p] != key[p])))
            chosen[p] = max(candidate[p], np.int32(0))
        narrow_dots(features.q, block.first, features.k, block.first_key, chosen, scores, size if new else 0)
        return np.int64(new)
    for p in range(size):  # what is left, in a list: no branch to guess wrong
        chosen[count] = p
        scores[p] = -np.inf
        count += (candidate[p] >= 0) & (candidate[p] != key[p])
    for n in range(count):  # nothing is decided here: many loads are under way at once
        p = chosen[n]
        scores[p] = dot(features.q, block.first + p, features.k, block.first_key + candidate[p])
    return count


@compiled
def _take(geometry, earlier, block, own, candidate):
    key = own.key
    best = own.best
    scores = own.scores
    near = earlier.run and earlier.separation
    if geometry.causal or len(geometry.mask) or near or len(earlier.starts):
        for p in range(block.size):
            if scores[p] > best[p] and candidate[p] >= 0:
                new = np.int64(candidate[p])
                if not legal(geometry, earlier, block.row, block.begin + p, block.first + p, new):
                    scores[p] = -np.inf
    for p in range(block.size):  # every load before the choice, or the compiler would branch
        new = candidate[p]
        old = key[p]
        score = scores[p]
        least = best[p]
        better = (score > least) & (new >= 0)
        key[p] = new if better else old
        best[p] = score if better else least


@parallel
def _best_first(task, tasks, index, score):
    """Sort each point's matches by score, equal ones in run order, -1 last."""
    for point in range(len(index) * task // tasks, len(index) * (task + 1) // tasks):
        for run in range(1, index.shape[1]):
            key = index[point, run]
            value = score[point, run]
            place = run
            while place > 0 and key >= 0 and (index[point, place - 1] < 0 or score[point, place - 1] < value):
                index[point, place] = index[point, place - 1]
                score[point, place] = score[point, place - 1]
                place -= 1
            index[point, place] = key
            score[point, place] = value
