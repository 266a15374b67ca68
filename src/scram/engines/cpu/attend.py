"""Algorithm 2 on a CPU: expand, weigh and mix for a block of queries at a time, in plain loops for the vector units."""

# Numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...grid import grid_of
from .compiled import TASKS_PER_THREAD, compiled, launcher, threads
from .layout import LegalArrays, array, key_rows, padded, strides
from .noise import absorb, seeded
from .tasks import each_task
from .vectors import LANES, add, coordinates, dot, exp, narrow_dots

BLOCK = 256  # queries that are taken together, fewer where they attend many keys
BLOCK_WEIGHTS = 1 << 15  # at most, so that they stay in the second cache
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


def attend(*tensors: Any, **settings: Any) -> tuple[Tensor, Tensor]:
    """q, k, v, index, key_mask, k_extra, v_extra, seed as in `scram.ops` -> out [B, H, *G, F], lse [B, H, *G]."""
    q, v = tensors[0], tensors[2]
    problem = Problem(*tensors, **settings)
    (queries, keys, values), (keys_extra, values_extra) = problem.tensors, problem.extra
    out = np.empty((problem.points, v.shape[-1]), values.dtype)
    lse = np.empty(problem.points, out.dtype)
    width = problem.slots + problem.extras
    size = max(1, min(BLOCK, BLOCK_WEIGHTS // max(width, 1)))
    with threads() as count:
        tasks = count * TASKS_PER_THREAD
        _attend(
            tasks, padded(queries), padded(keys), padded(keys_extra), values, values_extra, problem.index,
            (*problem.grid, *problem.rest), problem.how, np.empty((tasks, problem.slots + 1, size), np.int32),
            np.empty((tasks, width, size), out.dtype),
            np.empty((tasks, problem.index.shape[1], len(problem.grid[0]), size), np.int32),
            np.empty((tasks, 2, size), out.dtype), out, lse,
        )  # fmt: skip
    out_shape = (*q.shape[:-1], v.shape[-1])
    return torch.from_numpy(out).to(v.dtype).reshape(out_shape), torch.from_numpy(lse).reshape(q.shape[:-1])


@launcher
def _attend(tasks, *arguments):
    each_task(_some_blocks, tasks, arguments)


@compiled
def _some_blocks(
    task, q, k, k_extra, v, v_extra, index, geometry, how, keys, weights, places, sums, out, lse
):  # fmt: skip
    """Blocks of points of one row, each written by one task."""
    tasks, queries, block_size = len(keys), geometry[7], keys.shape[2]
    in_row = -(-queries // block_size)
    blocks = len(lse) // max(queries, 1) * in_row
    for block in range(blocks * task // tasks, blocks * (task + 1) // tasks):
        row = block // in_row
        begin = (block - row * in_row) * block_size
        where = (row, begin, min(block_size, queries - begin))
        _expand(index, geometry, where, keys[task], places[task])
        _score(q, k, k_extra, geometry, how, where, keys[task], weights[task])
        _weigh(geometry, how, where, keys[task], weights[task], sums[task])
        _mix(v, v_extra, geometry, how, where, keys[task], weights[task], sums[task], out, lse)


@compiled
def _expand(index, geometry, where, keys, places):
    """For every slot of the windows and every point its key, or -1: off the grid, illegal, or in a window before."""
    grid, strides, reach, _, mask, rows_per_mask, causal, queries = geometry
    row, begin, size = where
    rank, total_keys, first = len(grid), grid[0] * strides[0], row * queries + begin
    match, matches = keys[len(keys) - 1], len(places)
    window = (len(keys) - 1) // max(matches, 1)
    for e in range(matches):
        for p in range(size):
            match[p] = index[first + p, e]
        for axis in range(rank):
            coordinates(match, grid[axis], strides[axis], places[e, axis], size)
        for p in range(size):
            places[e, 0, p] = places[e, 0, p] if (match[p] >= 0) & (match[p] < total_keys) else -1
        for number in range(window):
            slot, rest, move = keys[e * window + number], number, 0
            for p in range(size):
                slot[p] = places[e, 0, p] >= 0
            for axis in range(rank - 1, -1, -1):
                side = 2 * reach[axis] + 1
                offset = np.int32(rest % side - reach[axis])
                rest //= side
                move += offset * strides[axis]
                for p in range(size):
                    at = places[e, axis, p] + offset
                    slot[p] &= (at >= 0) & (at < grid[axis])
            for p in range(size):
                slot[p] = match[p] + move if slot[p] else -1
            for before in range(e):
                _leave_out(slot, number, reach, places[e], places[before], size)
            if causal:
                for p in range(size):
                    slot[p] = slot[p] if slot[p] <= begin + p else -1
            if len(mask):
                allowed = mask[row // rows_per_mask]
                for p in range(size):
                    slot[p] = slot[p] if slot[p] >= 0 and allowed[slot[p]] else -1


@compiled
def _leave_out(slot, number, reach, places, before, size):
    """Set to -1 the keys of window slot `number` that lie in an earlier window too."""
    rank = len(reach)
    for p in range(size):
        covered, rest = before[0, p] >= 0, number
        for axis in range(rank - 1, -1, -1):
            side = 2 * reach[axis] + 1
            apart = places[axis, p] + rest % side - reach[axis] - before[axis, p]
            rest //= side
            covered &= (apart >= -reach[axis]) & (apart <= reach[axis])
        slot[p] = -1 if covered else slot[p]


@compiled
def _score(q, k, k_extra, geometry, how, where, keys, weights):
    """Scaled scores of the keys; of slots without one nothing that is used."""
    row, begin, size = where
    scale, extras, slots = how[0], how[2], len(keys) - 1
    first = row * geometry[7] + begin
    first_key, first_extra = geometry[3][row] * geometry[0][0] * geometry[1][0], geometry[3][row] * extras
    number, any_key = weights.dtype.type, keys[slots]
    for slot in range(slots):
        for p in range(size):
            any_key[p] = max(keys[slot, p], np.int32(0))
        if q.shape[1] == LANES:
            narrow_dots(q, first, k, first_key, any_key, weights[slot], size)
        else:
            for p in range(size):
                weights[slot, p] = dot(q, first + p, k, first_key + any_key[p])
        for p in range(size):
            weights[slot, p] = number(scale * weights[slot, p])
    for x in range(extras):
        for p in range(size):
            weights[slots + x, p] = number(scale * dot(q, first + p, k_extra, first_extra + x))


@compiled
def _weigh(geometry, how, where, keys, weights, sums):
    """Scores to weights before they are divided by their sum; sums[0] is that sum, sums[1] the highest score."""
    row, begin, size = where
    _, weight, extras, seed, dropped, boost = how
    slots, number = len(keys) - 1, weights.dtype.type
    total, top = sums[0], sums[1]
    zero, lowest = number(0), number(-np.inf)
    for p in range(size):
        total[p], top[p] = zero, lowest
    if weight == 0:
        for slot in range(slots + extras):
            for p in range(size):
                if slot < slots:
                    weights[slot, p] = weights[slot, p] if keys[slot, p] >= 0 else lowest
                top[p] = max(top[p], weights[slot, p])
        for slot in range(slots + extras):
            for p in range(size):
                a = weights[slot, p] - (top[p] if top[p] > lowest else zero)
                weights[slot, p] = exp(a)
                total[p] += weights[slot, p]
    else:
        for slot in range(slots + extras):
            for p in range(size):
                a = weights[slot, p]
                a = max(a, zero) if weight == 2 else a
                there = slot >= slots or keys[min(slot, slots), p] >= 0
                weights[slot, p] = a if there else zero
                total[p] += there
    if dropped:
        prefix, total_keys = absorb(seed, row), geometry[0][0] * geometry[1][0]
        for slot in range(slots + extras):
            for p in range(size):
                name = keys[slot, p] if slot < slots else total_keys + slot - slots
                keep = absorb(absorb(prefix, begin + p), name) >= dropped
                weights[slot, p] = number(weights[slot, p] * boost) if keep else zero


@compiled
def _mix(v, v_extra, geometry, how, where, keys, weights, sums, out, lse):
    row, begin, size = where
    extras, slots, first = how[2], len(keys) - 1, row * geometry[7] + begin
    first_key, first_extra = geometry[3][row] * geometry[0][0] * geometry[1][0], geometry[3][row] * extras
    zero = out.dtype.type(0)
    for p in range(size):
        point, found = first + p, extras
        for f in range(out.shape[1]):
            out[point, f] = zero
        for slot in range(slots):
            if keys[slot, p] >= 0:
                add(out, point, weights[slot, p], v, first_key + keys[slot, p])
                found += 1
        for x in range(extras):
            add(out, point, weights[slots + x, p], v_extra, first_extra + x)
        total, top = sums[0, p], sums[1, p]
        if found == 0:
            lse[point] = -np.inf
            continue
        lse[point] = math.log(total) + (top if how[1] == 0 and top != -np.inf else zero)
        for f in range(out.shape[1]):
            out[point, f] /= total
