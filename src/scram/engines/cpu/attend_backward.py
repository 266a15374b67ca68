"""Gradients of attend on a CPU: parallel, free of races and the same on every run and any number of threads.

First every query, in parallel: its keys, their weights and the gradients of its scores go to a list of pairs, and dq is
done. Then every thread walks that list for the keys that it owns: a key's sum is made in the order of the list. The
queries are taken in chunks, so that the list is bounded.
"""

# Numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .attend import Problem
from .compiled import TASKS_PER_THREAD, compiled, launcher, threads
from .layout import array
from .noise import absorb
from .tasks import each_task
from .vectors import add, dot
from .windows import expand

CHUNK_PAIRS = 1 << 22
STRETCH = 8  # log2 of how many neighbouring keys have one owner


def attend_backward(grad_out: Tensor, grad_lse: Tensor, *tensors: Any, **settings: Any) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, k_extra, v_extra (None without extra keys) from those of out and lse."""
    inputs = tensors[:-2]  # without out and lse
    problem = Problem(*inputs, **settings)
    q, k, v = problem.tensors
    d_out, d_lse = array(grad_out), grad_lse.detach().reshape(-1).contiguous().numpy()
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    dk_extra, dv_extra = (np.zeros_like(x) for x in problem.extra)
    width = problem.slots + problem.extras
    size = max(1, min(problem.points, CHUNK_PAIRS // max(width, 1)))
    pairs = (np.empty((size, width), np.int32), np.empty((size, width), v.dtype), np.empty((size, width), v.dtype))
    geometry = (*problem.grid, *problem.rest)
    with threads() as count:
        places = np.empty((count * TASKS_PER_THREAD, problem.index.shape[1] + 1, len(problem.grid[0])), np.int64)
        for begin in range(0, problem.points, size):
            _queries(
                len(places), *problem.tensors, *problem.extra, problem.index, geometry, problem.how,
                places, begin, d_out, d_lse, dq, *pairs,
            )  # fmt: skip
            _keys(count, q, d_out, geometry, problem.how, begin, count, *pairs, dk, dv, dk_extra, dv_extra)
    shaped = (
        torch.from_numpy(grad).to(x.dtype).reshape(x.shape) if x is not None else None
        for grad, x in zip((dq, dk, dv, dk_extra, dv_extra), (*inputs[:3], *inputs[5:7]), strict=True)
    )
    return tuple(shaped)


@launcher
def _queries(tasks, *arguments):
    each_task(_some_queries, tasks, arguments)


@compiled
def _some_queries(
    task, q, k, v, k_extra, v_extra, index, geometry, how, all_places, begin, d_out, d_lse, dq, keys, weights, slopes,
):  # fmt: skip
    """dq, and for each pair the key (after the grid's the extra ones, -1: none), its weight and d loss / d (q.k)."""
    scale, weight, extras, seed, dropped, boost = how
    queries, key_rows = geometry[7], geometry[3]
    total_keys = geometry[0][0] * geometry[1][0]
    zero = weights.dtype.type(0)
    tasks, size, places = len(all_places), min(len(keys), len(d_lse) - begin), all_places[task]
    for slot_row in range(size * task // tasks, size * (task + 1) // tasks):
        point = begin + slot_row
        row = point // queries
        noise = absorb(absorb(seed, row), point - row * queries)
        found = expand(index, geometry, row, point, keys[slot_row], places)
        first_key, first_extra = key_rows[row] * total_keys, key_rows[row] * extras
        mean, total, top = zero, zero, weights.dtype.type(-np.inf)
        for slot in range(found + extras):
            grid_key = slot < found
            key = first_key + keys[slot_row, slot] if grid_key else first_extra + slot - found
            score = dot(q, point, k, key) if grid_key else dot(q, point, k_extra, key)
            weights[slot_row, slot] = scale * score
            top = max(top, weights[slot_row, slot])
        for slot in range(found + extras):
            grid_key = slot < found
            key = first_key + keys[slot_row, slot] if grid_key else first_extra + slot - found
            a = weights[slot_row, slot]
            d_p = dot(d_out, point, v, key) if grid_key else dot(d_out, point, v_extra, key)
            if not grid_key:
                keys[slot_row, slot] = total_keys + slot - found
            kept = dropped == 0 or absorb(noise, keys[slot_row, slot]) >= dropped
            d_p = weights.dtype.type(d_p * boost) if kept else zero  # what is dropped is zero, NaN too
            if weight == 0:
                p = math.exp(a - top)  # from lse, rounded, they would not add up to 1 where scores are large
                total += p
                mean += p * d_p
                slopes[slot_row, slot] = p * d_p + p * d_lse[point]
                weights[slot_row, slot] = p
            else:
                p = (max(a, zero) if weight == 2 else a) / (found + extras)
                weights[slot_row, slot] = p * boost if kept else zero
                slopes[slot_row, slot] = zero if weight == 2 and a <= 0 else d_p / (found + extras)
        for slot in range(found + extras):
            grid_key = slot < found
            key = first_key + keys[slot_row, slot] if grid_key else first_extra + slot - found
            if weight == 0:
                weights[slot_row, slot] /= total
                slopes[slot_row, slot] = slopes[slot_row, slot] / total - weights[slot_row, slot] * (mean / total)
                if dropped:
                    kept = absorb(noise, keys[slot_row, slot]) >= dropped
                    weights[slot_row, slot] = weights[slot_row, slot] * boost if kept else zero
            slopes[slot_row, slot] *= scale
            if grid_key:
                add(dq, point, slopes[slot_row, slot], k, key)
            else:
                add(dq, point, slopes[slot_row, slot], k_extra, key)
        keys[slot_row, found + extras :] = -1


@launcher
def _keys(owners, *arguments):
    each_task(_some_keys, owners, arguments)


@compiled
def _some_keys(
    owner, q, d_out, geometry, how, begin, owners, keys, weights, slopes, dk, dv, dk_extra, dv_extra
):  # fmt: skip
    """dk and dv of the keys of one owner: stretches of neighbouring keys in turn, and the extra keys in turn."""
    queries, key_rows, extras = geometry[7], geometry[3], how[2]
    total_keys = geometry[0][0] * geometry[1][0]
    for slot_row in range(min(len(keys), len(q) - begin)):
        point = begin + slot_row
        row = key_rows[point // queries]
        for slot in range(keys.shape[1]):
            key = keys[slot_row, slot]
            if key < 0:
                break
            if key < total_keys:
                if (key >> STRETCH) % owners == owner:
                    add(dk, row * total_keys + key, slopes[slot_row, slot], q, point)
                    add(dv, row * total_keys + key, weights[slot_row, slot], d_out, point)
            elif key % owners == owner:
                add(dk_extra, row * extras + key - total_keys, slopes[slot_row, slot], q, point)
                add(dv_extra, row * extras + key - total_keys, weights[slot_row, slot], d_out, point)
