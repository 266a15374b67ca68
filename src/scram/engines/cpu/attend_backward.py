"""Gradients of attend on a CPU: parallel, free of races and the same on every run and any number of threads.

First every query, in parallel: its keys, their weights and the gradients of its scores go to a list of pairs, and dq is
done. Then every thread walks that list for the keys that it owns: a key's sum is made in the order of the list. The
queries are taken in chunks, so that the list is bounded.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike
from torch import Tensor

from ...core.calls import AttendCall, AttendGrads
from ...spec.grid import grid_of
from .attend import RELU, SOFTMAX, AttendArrays
from .compiled import inlined
from .layout import Array, array, flat, like
from .noise import absorb
from .threads import TASKS_PER_THREAD, in_one_pool, parallel, threads
from .vectors import add, dot
from .windows import expand

CHUNK_PAIRS = 1 << 22
STRETCH = 8  # log2 of how many neighboring keys have one owner


class Pairs(NamedTuple):
    """Of each query of a chunk its keys (after the grid's the extra ones, -1 after the last)."""

    keys: Array  # int32 [C, n]
    weights: Array  # [C, n]
    slopes: Array  # [C, n], d loss / d (q.k)

    @staticmethod
    def empty(queries: int, width: int, dtype: DTypeLike) -> Pairs:
        shape = (queries, width)
        return Pairs(np.empty(shape, np.int32), np.empty(shape, dtype), np.empty(shape, dtype))


@in_one_pool
def attend_backward(call: AttendCall, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor) -> AttendGrads:
    """Gradients of q, k, v, k_extra, v_extra (None without extra keys) from those of out and lse."""
    arrays = AttendArrays.of(call)
    d_out = array(grad_out)  # [P, F]
    d_lse = flat(grad_lse)  # [P]
    dq, dk, dv = (np.zeros_like(x) for x in (arrays.q, arrays.k, arrays.v))
    points = len(arrays.q)
    width = arrays.windows.slots + arrays.extras
    rows = (arrays.geometry.key_rows, arrays.geometry.queries, arrays.geometry.keys, arrays.extras)
    pairs = Pairs.empty(max(1, min(points, CHUNK_PAIRS // max(width, 1))), width, arrays.v.dtype)
    with threads() as tasks:
        places = arrays.windows.places(tasks)
        for begin in range(0, points, len(pairs.keys)):
            _queries(tasks, arrays, places, begin, d_out, d_lse, dq, pairs)
            add_to_keys(tasks // TASKS_PER_THREAD, arrays.q, d_out, *rows, begin, pairs, dk, dv)
    k, k_extra = _apart(dk, call.k, call.k_extra)
    v, v_extra = _apart(dv, call.v, call.v_extra)
    return AttendGrads(like(dq, call.q), k, v, k_extra, v_extra)


def _apart(grad: Array, x: Tensor, extra: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """[B*Hk*(M + X), width] -> [B, Hk, *G, width] and [B, Hk, X, width]"""
    if extra is None:
        return like(grad, x), None
    keys = math.prod(grid_of(x))
    grad = grad.reshape(*x.shape[:2], keys + extra.shape[2], x.shape[-1])
    return like(grad[:, :, :keys], x), like(grad[:, :, keys:], extra)


@parallel
def _queries(task, tasks, arrays, places, begin, d_out, d_lse, dq, pairs):
    """dq, and the pairs of some queries of the chunk."""
    size = min(len(pairs.keys), len(d_lse) - begin)
    geometry = arrays.geometry
    for c in range(size * task // tasks, size * (task + 1) // tasks):
        point = begin + c
        row = point // geometry.queries
        noise = absorb(arrays.seed[row], point - row * geometry.queries) if arrays.threshold else np.uint32(0)
        keys = pairs.keys[c]  # [n]
        slopes = pairs.slopes[c]  # [n]
        first = geometry.key_rows[row] * (geometry.keys + arrays.extras)
        attended = expand(arrays.windows, geometry, row, point, keys, places[task])
        for x in range(arrays.extras):
            keys[attended] = geometry.keys + x
            attended += 1
        keys[attended:] = -1
        _slopes(arrays, first, point, noise, d_out, d_lse[point], keys[:attended], pairs.weights[c], slopes)
        for slot in range(attended):
            add(dq, point, slopes[slot], arrays.k, first + keys[slot])


@inlined
def _slopes(arrays, first, point, noise, d_out, d_lse, keys, weights, slopes):
    """Weight and slope of every key of a query."""
    number = weights.dtype.type
    weight = arrays.weight
    boost = arrays.boost
    attended = len(keys)
    zero = number(0)
    mean = number(0)
    total = number(0)
    top = number(-np.inf)
    for slot in range(attended):
        weights[slot] = arrays.scale * dot(arrays.q, point, arrays.k, first + keys[slot])
        top = max(top, weights[slot])
    for slot in range(attended):
        a = weights[slot]
        d_p = dot(d_out, point, arrays.v, first + keys[slot])
        kept = arrays.threshold == 0 or absorb(noise, keys[slot]) >= arrays.threshold
        d_p = number(d_p * boost) if kept else zero  # what is dropped is zero, NaN too
        if weight == SOFTMAX:
            p = math.exp(a - top)  # from lse, rounded, they would not add up to 1 where scores are large
            total += p
            mean += p * d_p
            slopes[slot] = p * d_p + p * d_lse
            weights[slot] = p
        else:
            p = (max(a, zero) if weight == RELU else a) / attended
            weights[slot] = p * boost if kept else zero
            slopes[slot] = zero if weight == RELU and a <= 0 else d_p / attended
    for slot in range(attended):
        if weight == SOFTMAX:
            weights[slot] /= total
            slopes[slot] = slopes[slot] / total - weights[slot] * (mean / total)
            if arrays.threshold:
                kept = absorb(noise, keys[slot]) >= arrays.threshold
                weights[slot] = weights[slot] * boost if kept else zero
        slopes[slot] *= arrays.scale


@parallel
def add_to_keys(owner, owners, q, d_out, key_rows, queries, keys, extras, begin, pairs, dk, dv):
    """Add what the pairs of the queries from `begin` on give to the keys of one owner.

    It owns stretches of neighboring keys in turn, and extra keys in turn. Rank-free: one compiled kernel serves all.
    """
    for c in range(min(len(pairs.keys), len(q) - begin)):
        point = begin + c
        first = key_rows[point // queries] * (keys + extras)
        for slot in range(pairs.keys.shape[1]):
            key = pairs.keys[c, slot]
            if key < 0:
                break
            if (key >> STRETCH if key < keys else key) % owners == owner:
                add(dk, first + key, pairs.slopes[c, slot], q, point)
                add(dv, first + key, pairs.weights[c, slot], d_out, point)
