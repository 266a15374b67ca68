"""Algorithm 2 on a CPU: expand, weigh and mix in one pass over each query's keys, with a running softmax."""

# Numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from ..grid import grid_of
from .compiled import TASKS_PER_THREAD, compiled, parallel, threads
from .layout import Array, LegalArrays, array, key_rows, strides
from .noise import absorb, seeded
from .vectors import add, dot

WEIGHTS = {"softmax": 0, "mean": 1, "relu": 2}


class Problem:
    """The tensors and settings of `attend` and its backward pass as the kernels take them."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: Tensor,
        key_mask: Tensor | None,
        k_extra: Tensor | None,
        v_extra: Tensor | None,
        seed: Tensor | None,
        *,
        radius: tuple[int, ...],
        causal: bool,
        scale: float,
        weight: str,
        dropout_p: float,
    ) -> None:
        key_grid = grid_of(k)
        self.points, self.queries = math.prod(q.shape[:-1]), math.prod(grid_of(q))
        self.index = index.reshape(self.points, index.shape[-1]).contiguous().numpy()
        legal = LegalArrays.of(q, k, key_mask, listed=False)
        reach = tuple(min(b, extent - 1) for b, extent in zip(radius, key_grid, strict=True))
        self.grid = (key_grid, strides(key_grid), reach)
        self.rest = (key_rows(q, k), legal.mask, legal.rows_per_mask, causal, self.queries)
        self.slots = self.index.shape[1] * math.prod(2 * b + 1 for b in reach)
        self.extras = 0 if k_extra is None else k_extra.shape[2]
        self.tensors = (array(q), array(k), array(v))
        wide = self.tensors[2].dtype
        if k_extra is None or v_extra is None:
            self.extra = (np.zeros((0, q.shape[-1]), self.tensors[1].dtype), np.zeros((0, v.shape[-1]), wide))
        else:
            self.extra = (array(k_extra), array(v_extra))
        dropped = 0 if seed is None else int(dropout_p * 2**32)
        noise = np.uint32(0 if seed is None else seeded(int(seed)))
        self.how = (scale, WEIGHTS[weight], self.extras, noise, dropped, 1 / (1 - dropout_p))

    def scratch(self, tasks: int) -> tuple[Array, Array]:
        """For each task the keys of one query, and the coordinates of its matches and of one more point."""
        rank = len(self.grid[0])
        return np.empty((tasks, self.slots), np.int32), np.empty((tasks, self.index.shape[1] + 1, rank), np.int64)


def attend(*tensors: Any, **settings: Any) -> tuple[Tensor, Tensor]:
    """q, k, v, index, key_mask, k_extra, v_extra, seed as in `scram.ops` -> out [B, H, *G, F], lse [B, H, *G]."""
    q, v = tensors[0], tensors[2]
    problem = Problem(*tensors, **settings)
    out = np.empty((problem.points, v.shape[-1]), problem.tensors[2].dtype)
    lse = np.empty(problem.points, out.dtype)
    with threads() as count:
        _attend(
            *problem.tensors, *problem.extra, problem.index, *problem.grid, problem.rest, problem.how,
            *problem.scratch(count * TASKS_PER_THREAD), out, lse,
        )  # fmt: skip
    out_shape = (*q.shape[:-1], v.shape[-1])
    return torch.from_numpy(out).to(v.dtype).reshape(out_shape), torch.from_numpy(lse).reshape(q.shape[:-1])


@parallel
def _attend(q, k, v, k_extra, v_extra, index, grid, strides, reach, rest, how, keys, places, out, lse):
    tasks = len(keys)
    for task in numba.prange(tasks):
        geometry = (grid, strides, reach, *rest)
        begin, end = len(lse) * task // tasks, len(lse) * (task + 1) // tasks
        _attend_some(q, k, v, k_extra, v_extra, index, geometry, how, begin, end, keys[task], places[task], out, lse)


@compiled
def _attend_some(
    q, k, v, k_extra, v_extra, index, geometry, how, begin, end, keys, places, out, lse
):  # fmt: skip
    scale, weight, extras, seed, dropped, boost = how
    queries, key_rows = geometry[7], geometry[3]
    total_keys = geometry[0][0] * geometry[1][0]
    zero = out.dtype.type(0)
    for point in range(begin, end):
        row = point // queries
        noise = absorb(absorb(seed, row), point - row * queries)
        found = expand(index, geometry, row, point, keys, places)
        first_key, first_extra = key_rows[row] * total_keys, key_rows[row] * extras
        for f in range(out.shape[1]):
            out[point, f] = zero
        top, total = out.dtype.type(-np.inf), zero
        for slot in range(found + extras):
            grid_key = slot < found
            key = first_key + keys[slot] if grid_key else first_extra + slot - found
            score = dot(q, point, k, key) if grid_key else dot(q, point, k_extra, key)
            a = out.dtype.type(scale * score)
            if weight != 0:
                p = max(a, zero) if weight == 2 else a
                total += 1
            elif a == -np.inf:
                continue
            else:
                if a > top:
                    shrink = math.exp(top - a)
                    total *= shrink
                    for f in range(out.shape[1]):
                        out[point, f] *= shrink
                    top = a
                p = out.dtype.type(math.exp(a - top))
                total += p
            if dropped:
                name = keys[slot] if grid_key else total_keys + slot - found
                p = p * boost if absorb(noise, name) >= dropped else zero
            if grid_key:
                add(out, point, p, v, key)
            else:
                add(out, point, p, v_extra, key)
        if found + extras == 0:
            lse[point] = -np.inf
            continue
        lse[point] = math.log(total) + (top if weight == 0 and top != -np.inf else zero)
        for f in range(out.shape[1]):
            out[point, f] /= total


@compiled
def expand(index, geometry, row, point, keys, places):
    """Write the legal keys in the union of the windows around a point's matches to `keys`, each once; return how many.

    `places` holds the matches' coordinates, its last row those of the line of keys at hand: windows are walked line by
    line along the last axis, and a key is new when no earlier window holds it.
    """
    grid, strides, reach, _, mask, rows_per_mask, causal, queries = geometry
    rank, total_keys = len(grid), grid[0] * strides[0]
    query, mask_row, found = point - row * queries, row // rows_per_mask, 0
    last = rank - 1
    lines = 1
    for axis in range(last):
        lines *= 2 * reach[axis] + 1
    line = places[index.shape[1]]
    for e in range(index.shape[1]):
        match = np.int64(index[point, e])
        if not 0 <= match < total_keys:
            places[e, 0] = -1
            continue
        for axis in range(rank):
            places[e, axis] = match // strides[axis]
            match -= places[e, axis] * strides[axis]
        for number in range(lines):
            rest, first, there = number, np.int64(0), True
            for axis in range(last - 1, -1, -1):
                side = 2 * reach[axis] + 1
                line[axis] = places[e, axis] + rest % side - reach[axis]
                rest //= side
                there = there and 0 <= line[axis] < grid[axis]
                first += line[axis] * strides[axis]
            if not there:
                continue
            low, high = max(places[e, last] - reach[last], 0), min(places[e, last] + reach[last], grid[last] - 1)
            for at in range(low, high + 1):
                key = first + at
                if causal and key > query:
                    break
                if len(mask) and not mask[mask_row, key]:
                    continue
                line[last] = at
                if _new(e, places, line, reach):
                    keys[found] = key
                    found += 1
    return found


@compiled
def _new(e, places, place, reach):
    for before in range(e):
        if places[before, 0] < 0:
            continue
        covered = True
        for axis in range(len(reach)):
            covered = covered and -reach[axis] <= place[axis] - places[before, axis] <= reach[axis]
        if covered:
            return False
    return True
