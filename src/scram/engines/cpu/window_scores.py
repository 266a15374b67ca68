"""Scores of the keys of one box per query on a CPU, and their gradients: free of races, the same on every run."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ...core.calls import WindowScores, WindowScoresCall, WindowScoresGrads
from ...spec.grid import Grid, grid_of
from .compiled import compiled
from .layout import Array, array, like, source_rows, strides, tensor
from .threads import TASKS_PER_THREAD, in_one_pool, parallel, threads
from .vectors import add, dot


class WindowArrays(NamedTuple):
    """A WindowScoresCall as the kernels read it. Tuples let the compiler know the rank."""

    q: Array  # [P, E]
    k: Array  # [B*Hk*M, E]
    corner: Array  # int32 [P, rank]
    sides: Grid
    lines: int  # of a box: its places on all axes but the last
    grid: Grid  # of keys
    strides: Grid  # in keys
    key_rows: Array  # int64 [R], the row of k that serves each row of q
    queries: int  # N
    keys: int  # M
    scale: float

    @staticmethod
    def of(call: WindowScoresCall) -> WindowArrays:
        grid = grid_of(call.k)
        return WindowArrays(
            q=array(call.q),
            k=array(call.k),
            corner=call.corner.reshape(-1, len(grid)).contiguous().numpy(),
            sides=tuple(call.sides),
            lines=math.prod(call.sides[:-1]),
            grid=grid,
            strides=strides(grid),
            key_rows=source_rows(call.q, call.k.shape[1]),
            queries=math.prod(grid_of(call.q)),
            keys=math.prod(grid),
            scale=call.scale,
        )


@in_one_pool
def window_scores(call: WindowScoresCall) -> WindowScores:
    arrays = WindowArrays.of(call)
    scores = np.empty((len(arrays.q), math.prod(call.sides)), arrays.q.dtype)
    with threads() as tasks:
        _score(tasks, arrays, scores)
    return WindowScores(tensor(scores, None, call.q))


@in_one_pool
def window_scores_backward(call: WindowScoresCall, grad_scores: Tensor) -> WindowScoresGrads:
    arrays = WindowArrays.of(call)
    above = array(grad_scores)  # [P, S]
    dq = np.zeros_like(arrays.q)
    dk = np.zeros_like(arrays.k)
    with threads() as tasks:
        _queries(tasks, arrays, above, dq)
        _keys(tasks // TASKS_PER_THREAD, arrays, above, dk)
    return WindowScoresGrads(like(dq, call.q), like(dk, call.k))


@compiled
def _line(arrays, point, number):
    """A line of the box of a query, along the last axis: its first place as a key, and from where to where it exists.

    The first place may lie beside the grid; of a line that does so altogether nothing exists.
    """
    rank = len(arrays.grid)
    last = np.int64(arrays.corner[point, rank - 1])
    side = arrays.sides[rank - 1]
    begin = max(np.int64(0), -last)
    end = min(np.int64(side), arrays.grid[rank - 1] - last)
    first = arrays.key_rows[point // arrays.queries] * arrays.keys + last
    rest = number
    for back in range(rank - 1):
        axis = rank - 2 - back
        place = np.int64(arrays.corner[point, axis]) + rest % arrays.sides[axis]
        rest //= arrays.sides[axis]
        first += place * arrays.strides[axis]
        end = end if 0 <= place < arrays.grid[axis] else np.int64(0)
    return first, begin, max(begin, end)


@parallel
def _score(task, tasks, arrays, scores):
    """The scores of some queries."""
    points = len(arrays.q)
    side = scores.shape[1] // arrays.lines
    number = scores.dtype.type
    for point in range(points * task // tasks, points * (task + 1) // tasks):
        for line in range(arrays.lines):
            first, begin, end = _line(arrays, point, line)
            for n in range(side):
                scores[point, line * side + n] = number(0)
            for n in range(begin, end):
                scores[point, line * side + n] = number(arrays.scale * dot(arrays.q, point, arrays.k, first + n))


@parallel
def _queries(task, tasks, arrays, above, dq):
    """The gradients of some queries."""
    points = len(arrays.q)
    side = above.shape[1] // arrays.lines
    number = above.dtype.type
    for point in range(points * task // tasks, points * (task + 1) // tasks):
        for line in range(arrays.lines):
            first, begin, end = _line(arrays, point, line)
            for n in range(begin, end):
                add(dq, point, number(arrays.scale * above[point, line * side + n]), arrays.k, first + n)


@parallel
def _keys(owner, owners, arrays, above, dk):
    """The gradients of the keys of one owner, a stretch of all: each adds up its queries in their order."""
    side = above.shape[1] // arrays.lines
    number = above.dtype.type
    low = len(arrays.k) * owner // owners
    high = len(arrays.k) * (owner + 1) // owners
    for point in range(len(arrays.q)):
        for line in range(arrays.lines):
            first, begin, end = _line(arrays, point, line)
            for n in range(max(begin, low - first), min(end, high - first)):
                add(dk, first + n, number(arrays.scale * above[point, line * side + n]), arrays.q, point)
