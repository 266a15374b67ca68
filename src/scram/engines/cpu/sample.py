"""Keys that each query visits on its own, drawn or walked to, on a CPU; then attention over them, and its gradients.

Queries are taken in chunks. Their keys and the logs of the keys' weights go to a list first, which both samplers fill
and both passes read: the backward pass draws the same keys again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ...core.calls import SampleCall, Sampled, TailGrads
from .attend_backward import Pairs, add_to_keys
from .compiled import compiled
from .draw import Draws, draw_keys
from .layout import Array, Geometry, array, flat, like, row_states, tensor
from .threads import TASKS_PER_THREAD, in_one_pool, parallel, threads
from .vectors import add, dot
from .walk import Walks, walk_keys

CHUNK_PAIRS = 1 << 21


class SampleArrays(NamedTuple):
    """A SampleCall as the kernels read it once the keys are drawn: independent of the rank."""

    q: Array  # [P, E]
    k: Array  # [B*Hk*M, E]
    v: Array  # [B*Hk*M, F]
    key_rows: Array  # int64 [R], the row of k that serves each row of q
    queries: int  # N
    keys: int  # M
    scale: float
    equal: bool  # all weights are equal, as after walks
    extra_out: Array  # [P, F], attention over the extra keys; [0, F] without any
    extra_lse: Array  # [P]; [0] without any

    @staticmethod
    def of(call: SampleCall) -> SampleArrays:
        q, k, v = (array(x) for x in (call.q, call.k, call.v))
        extra_out = np.zeros((0, v.shape[1]), v.dtype) if call.near_out is None else array(call.near_out)
        extra_lse = np.zeros(0, v.dtype) if call.near_lse is None else flat(call.near_lse)
        geometry = Geometry.of(call.q, call.k, None, call.causal)
        return SampleArrays(
            q=q,
            k=k,
            v=v,
            key_rows=geometry.key_rows,
            queries=geometry.queries,
            keys=geometry.keys,
            scale=call.scale,
            equal=call.method == "metropolis",
            extra_out=extra_out,
            extra_lse=extra_lse,
        )


def _chunks(call: SampleCall, arrays: SampleArrays, diagnostics: Array, tasks: int) -> Iterator[tuple[int, Pairs]]:
    """First point, and the keys visited with the logs of their weights as slopes.

    `diagnostics` [2, P] takes acceptance and rhat of walks.
    """
    points = len(arrays.q)
    geometry = Geometry.of(call.q, call.k, call.key_mask, call.causal)
    modes = call.modes.contiguous().reshape(points, call.modes.shape[-1]).numpy()  # [P, kappa]
    count = flat(call.count)  # [P]
    total = flat(call.total)  # [P]
    table = flat(call.table)  # [2 R + 2]
    order = np.zeros((0, 0), np.int64) if call.order is None else call.order.flatten(0, -2).contiguous().numpy()
    seed = row_states(call.seed, call.q, call.rows)
    pairs = Pairs.empty(max(1, min(points, CHUNK_PAIRS // call.samples)), call.samples, arrays.v.dtype)
    for begin in range(0, points, len(pairs.keys)):
        if call.method == "metropolis":
            walks = Walks(modes, count, table, seed, call.scale, call.chains_per_mode, call.burn_in)
            walk_keys(tasks, arrays.q, arrays.k, geometry, walks, begin, pairs.keys, pairs.slopes, diagnostics)
        else:
            draws = Draws(modes, count, total, order, table, seed, call.alpha)
            draw_keys(tasks, geometry, draws, begin, pairs.keys, pairs.slopes)
        yield begin, pairs


@in_one_pool
def sample(call: SampleCall) -> Sampled:
    arrays = SampleArrays.of(call)
    points = len(arrays.q)
    dtype = arrays.v.dtype
    lse = np.empty(points, dtype)
    ess = np.empty(points, dtype)
    diagnostics = np.zeros((2, points), dtype)
    out = np.empty((points, arrays.v.shape[1]), dtype)
    variance = np.empty_like(out)
    with threads() as tasks:
        for begin, pairs in _chunks(call, arrays, diagnostics, tasks):
            _mix(tasks, arrays, begin, pairs.keys, pairs.slopes, out, lse, variance, ess)
    rest = (tensor(x, None, call.q) for x in (lse, variance, ess, *diagnostics))
    return Sampled(tensor(out, call.v.dtype, call.q), *rest)


@in_one_pool
def sample_backward(call: SampleCall, grad_out: Tensor, grad_lse: Tensor) -> TailGrads:
    """Gradients of q, k, v, and of near_out and near_lse where the call has them. The keys are drawn again."""
    arrays = SampleArrays.of(call)
    q = arrays.q
    k = arrays.k
    v = arrays.v
    d_out = array(grad_out)
    d_lse = flat(grad_lse)
    diagnostics = np.zeros((2, len(q)), v.dtype)
    dq, dk, dv, to_out, to_lse = (np.zeros_like(x) for x in (q, k, v, arrays.extra_out, arrays.extra_lse))
    rows = (arrays.key_rows, arrays.queries, arrays.keys, 0)
    with threads() as tasks:
        for begin, pairs in _chunks(call, arrays, diagnostics, tasks):
            _slopes(tasks, arrays, begin, pairs, d_out, d_lse, dq, to_out, to_lse)
            add_to_keys(tasks // TASKS_PER_THREAD, q, d_out, *rows, begin, pairs, dk, dv)
    near_out = None if call.near_out is None else like(to_out, call.near_out)
    near_lse = None if call.near_lse is None else like(to_lse, call.near_lse)
    return TailGrads(like(dq, call.q), like(dk, call.k), like(dv, call.v), near_out, near_lse)


@compiled
def _score(arrays, point, first, keys, logs, scores):
    """Scores with the logs of their weights. Returns how many keys there are, and the highest score, -inf for none."""
    seen = 0
    highest = scores.dtype.type(-np.inf)
    while seen < len(keys) and keys[seen] >= 0:
        a = scores.dtype.type(arrays.scale * dot(arrays.q, point, arrays.k, first + keys[seen]))
        scores[seen] = a - a if arrays.equal else a + logs[seen]  # a - a keeps a NaN
        if scores[seen] == scores[seen]:
            highest = max(highest, scores[seen])
        seen += 1
    return seen, highest


@parallel
def _mix(task, tasks, arrays, begin, keys, logs, out, lse, variance, ess):
    """Attention over the keys visited by the points from `begin` on."""
    size = min(len(keys), len(lse) - begin)
    samples = keys.shape[1]
    width = out.shape[1]
    v = arrays.v
    number = out.dtype.type
    zero = out.dtype.type(0)
    for c in range(size * task // tasks, size * (task + 1) // tasks):
        point = begin + c
        visited = keys[c]  # [T]
        log = logs[c]  # [T]
        first = arrays.key_rows[point // arrays.queries] * arrays.keys
        extra_lse = arrays.extra_lse[point] if len(arrays.extra_lse) else number(-np.inf)
        seen, highest = _score(arrays, point, first, visited, log, log)
        top = max(extra_lse, highest)
        for f in range(width):
            out[point, f] = zero
        ess[point] = zero
        if seen == 0 and extra_lse == -np.inf:
            lse[point] = -np.inf
            variance[point, :] = np.inf
            continue
        whole = number(math.exp(extra_lse - top))
        plain = zero
        squares = zero
        for t in range(seen):
            p = number(math.exp(log[t] - top))
            whole += p
            share = number(math.exp(log[t] - highest))
            plain += share
            squares += share * share
            log[t] = p
            add(out, point, p, v, first + visited[t])
        if extra_lse != -np.inf:
            add(out, point, number(math.exp(extra_lse - top)), arrays.extra_out, point)
        for f in range(width):
            out[point, f] /= whole
        lse[point] = math.log(whole) + top
        if seen == 0:
            variance[point, :] = np.inf
            continue
        ess[point] = plain * plain / squares
        for f in range(width):
            total = zero
            square = zero
            for t in range(seen):
                r = log[t] / whole * (v[first + visited[t], f] - out[point, f])
                total += r
                square += r * r
            variance[point, f] = max(square - total * total / samples, zero)


@parallel
def _slopes(task, tasks, arrays, begin, pairs, d_out, d_lse, dq, to_out, to_lse):
    """dq and the gradients of the extra keys' out and lse; the logs in pairs.slopes become d loss / d (q.k)."""
    v = arrays.v
    number = pairs.weights.dtype.type
    size = min(len(pairs.keys), len(d_lse) - begin)
    for c in range(size * task // tasks, size * (task + 1) // tasks):
        keys = pairs.keys[c]  # [T]
        weights = pairs.weights[c]  # [T]
        slopes = pairs.slopes[c]  # [T]
        point = begin + c
        first = arrays.key_rows[point // arrays.queries] * arrays.keys
        from_lse = d_lse[point]
        extra_lse = arrays.extra_lse[point] if len(arrays.extra_lse) else number(-np.inf)
        seen, highest = _score(arrays, point, first, keys, slopes, weights)
        top = max(extra_lse, highest)
        # The normalizer is made anew: from lse, rounded, the weights would not add up to 1 where scores are large.
        # Slopes are measured from one of them, so that equal ones leave nothing.
        whole = number(0)
        mean = number(0)
        base = number(0)
        if extra_lse != -np.inf:
            base = dot(d_out, point, arrays.extra_out, point)
            whole = number(math.exp(extra_lse - top))
        elif seen:
            base = dot(d_out, point, v, first + keys[0])
        share = whole
        for t in range(seen):
            weights[t] = math.exp(weights[t] - top)
            slopes[t] = dot(d_out, point, v, first + keys[t]) - base
            whole += weights[t]
            mean += weights[t] * slopes[t]
        if seen or extra_lse != -np.inf:
            mean = mean / whole
            share = share / whole
        if extra_lse != -np.inf:
            add(to_out, point, share, d_out, point)
            to_lse[point] = share * (from_lse - mean)
        for t in range(seen):
            weights[t] /= whole
            slopes[t] = arrays.scale * weights[t] * (slopes[t] - mean + from_lse)
            add(dq, point, slopes[t], arrays.k, first + keys[t])
