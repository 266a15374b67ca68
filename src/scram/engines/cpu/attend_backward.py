"""Gradients of attend on a CPU: parallel, free of races and the same on every run and any number of threads.

First every query, in parallel: its keys, their weights and the gradients of its scores go to a list of pairs, and dq is
done. Then every thread walks that list for the keys that it owns: a key's sum is made in the order of the list. The
queries are taken in chunks, so that the list is bounded.
"""

import math
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ...calls import AttendCall, AttendGrads
from .attend import RELU, SOFTMAX, AttendArrays
from .compiled import inlined, parallel
from .layout import Array, Rows, array, flat, like
from .noise import absorb
from .threads import TASKS_PER_THREAD, threads
from .vectors import add, dot
from .windows import expand

CHUNK_PAIRS = 1 << 22
STRETCH = 8  # log2 of how many neighbouring keys have one owner


class Pairs(NamedTuple):
    """Of each query of a chunk its keys (after the grid's the extra ones, -1 after the last), a row for each query."""

    keys: Array  # int32 [C, n]
    weights: Array  # [C, n]
    slopes: Array  # [C, n], d loss / d (q.k)


class KeyGrads(NamedTuple):
    k: Array
    v: Array
    k_extra: Array
    v_extra: Array


def attend_backward(call: AttendCall, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor) -> AttendGrads:
    """Gradients of q, k, v, k_extra, v_extra (None without extra keys) from those of out and lse."""
    arrays = AttendArrays.of(call)
    d_out, d_lse, dq = array(grad_out), flat(grad_lse), np.zeros_like(arrays.q)
    grads = KeyGrads(*(np.zeros_like(x) for x in (arrays.k, arrays.v, arrays.k_extra, arrays.v_extra)))
    points, width = len(arrays.q), arrays.windows.slots + arrays.extras
    size = max(1, min(points, CHUNK_PAIRS // max(width, 1)))
    dtype = arrays.v.dtype
    pairs = Pairs(np.empty((size, width), np.int32), np.empty((size, width), dtype), np.empty((size, width), dtype))
    with threads() as count:
        places = arrays.windows.places(count * TASKS_PER_THREAD)
        for begin in range(0, points, size):
            _queries(len(places), arrays, places, begin, d_out, d_lse, dq, pairs)
            add_to_keys(count, arrays.q, d_out, Rows.of(arrays.geometry), arrays.extras, begin, pairs, grads)
    extra = [
        None if x is None else like(d, x) for d, x in ((grads.k_extra, call.k_extra), (grads.v_extra, call.v_extra))
    ]
    return AttendGrads(like(dq, call.q), like(grads.k, call.k), like(grads.v, call.v), *extra)


@parallel
def _queries(task, tasks, arrays, places, begin, d_out, d_lse, dq, pairs):
    """dq, and the pairs of some queries of the chunk."""
    size = min(len(pairs.keys), len(d_lse) - begin)
    geometry, dropout = arrays.geometry, arrays.dropout
    for c in range(size * task // tasks, size * (task + 1) // tasks):
        point = begin + c
        row = point // geometry.queries
        noise = absorb(absorb(dropout.seed, row), point - row * geometry.queries)
        keys, weights, slopes = pairs.keys[c], pairs.weights[c], pairs.slopes[c]
        found = expand(arrays.windows, geometry, row, point, keys, places[task])
        for x in range(arrays.extras):
            keys[found + x] = geometry.keys + x
        keys[found + arrays.extras :] = -1
        _slopes(arrays, geometry.key_rows[row], point, noise, found, d_out, d_lse[point], keys, weights, slopes)
        for slot in range(found + arrays.extras):
            if slot < found:
                add(dq, point, slopes[slot], arrays.k, geometry.key_rows[row] * geometry.keys + keys[slot])
            else:
                add(dq, point, slopes[slot], arrays.k_extra, geometry.key_rows[row] * arrays.extras + slot - found)


@inlined
def _pair_dot(a, point, b, first, b_extra, first_extra, keys, slot, found):
    """<a[point], b of the key in that slot>, an extra key's after the `found` first."""
    if slot < found:
        return dot(a, point, b, first + keys[slot])
    return dot(a, point, b_extra, first_extra + slot - found)


@inlined
def _slopes(arrays, key_row, point, noise, found, d_out, d_lse, keys, weights, slopes):
    """Weight and slope of every key of a query."""
    first, first_extra, all_found = key_row * arrays.geometry.keys, key_row * arrays.extras, found + arrays.extras
    number, weight, dropout = weights.dtype.type, arrays.weight, arrays.dropout
    zero, boost = number(0), dropout.boost
    mean, total, top = zero, zero, number(-np.inf)
    for slot in range(all_found):
        score = _pair_dot(arrays.q, point, arrays.k, first, arrays.k_extra, first_extra, keys, slot, found)
        weights[slot] = arrays.scale * score
        top = max(top, weights[slot])
    for slot in range(all_found):
        a = weights[slot]
        d_p = _pair_dot(d_out, point, arrays.v, first, arrays.v_extra, first_extra, keys, slot, found)
        kept = dropout.threshold == 0 or absorb(noise, keys[slot]) >= dropout.threshold
        d_p = number(d_p * boost) if kept else zero  # what is dropped is zero, NaN too
        if weight == SOFTMAX:
            p = math.exp(a - top)  # from lse, rounded, they would not add up to 1 where scores are large
            total += p
            mean += p * d_p
            slopes[slot] = p * d_p + p * d_lse
            weights[slot] = p
        else:
            p = (max(a, zero) if weight == RELU else a) / all_found
            weights[slot] = p * boost if kept else zero
            slopes[slot] = zero if weight == RELU and a <= 0 else d_p / all_found
    for slot in range(all_found):
        if weight == SOFTMAX:
            weights[slot] /= total
            slopes[slot] = slopes[slot] / total - weights[slot] * (mean / total)
            if dropout.threshold:
                kept = absorb(noise, keys[slot]) >= dropout.threshold
                weights[slot] = weights[slot] * boost if kept else zero
        slopes[slot] *= arrays.scale


@parallel
def add_to_keys(owner, owners, q, d_out, rows, extras, begin, pairs, grads):
    """Add what the pairs of the queries from `begin` on give to the keys of one owner.

    It owns stretches of neighbouring keys in turn, and extra keys in turn.
    """
    for c in range(min(len(pairs.keys), len(q) - begin)):
        point = begin + c
        row = rows.key_rows[point // rows.queries]
        for slot in range(pairs.keys.shape[1]):
            key = pairs.keys[c, slot]
            if key < 0:
                break
            if key < rows.keys:
                if (key >> STRETCH) % owners == owner:
                    add(grads.k, row * rows.keys + key, pairs.slopes[c, slot], q, point)
                    add(grads.v, row * rows.keys + key, pairs.weights[c, slot], d_out, point)
            elif key % owners == owner:
                add(grads.k_extra, row * extras + key - rows.keys, pairs.slopes[c, slot], q, point)
                add(grads.v_extra, row * extras + key - rows.keys, pairs.weights[c, slot], d_out, point)
