"""Keys that each query visits on its own, drawn or walked to, on a CPU; then attention over them, and its gradients.

Queries are taken in chunks. Their keys and the logs of the keys' weights go to a list first, which both samplers fill
and both passes read: the backward pass draws the same keys again.
"""

# Numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from ...grid import grid_of
from .attend_backward import _keys
from .compiled import TASKS_PER_THREAD, compiled, parallel, threads
from .draw import draw_keys
from .layout import Array, array, key_rows, strides
from .noise import seeded
from .vectors import add, dot
from .walk import walk_keys

CHUNK_PAIRS = 1 << 21


class _Problem:
    """The tensors and settings of `sample` and its backward pass as the kernels take them."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        modes: Tensor,
        count: Tensor,
        total: Tensor,
        order: Tensor | None,
        key_mask: Tensor | None,
        head_out: Tensor | None,
        head_lse: Tensor | None,
        seed: Tensor,
        table: Tensor,
        *,
        method: str,
        samples: int,
        alpha: float,
        chains_per_mode: int,
        burn_in: int,
        causal: bool,
        scale: float,
    ) -> None:
        key_grid = grid_of(k)
        self.points, self.samples, self.walks = math.prod(q.shape[:-1]), samples, method == "metropolis"
        self.tensors = (array(q), array(k), array(v))
        keys = math.prod(key_grid)
        mask = np.zeros((0, 0), np.bool_) if key_mask is None else key_mask.contiguous().reshape(-1, keys).numpy()
        listed = np.zeros((0, 0), np.int64) if order is None else order.contiguous().numpy()
        shared = key_mask is not None and key_mask.ndim == len(key_grid) + 1
        # As `expand` and the sums over keys know it; windows have no part in this.
        reach = (0,) * len(key_grid)
        self.grid = (key_grid, strides(key_grid), reach)
        self.rest = (key_rows(q, k), mask, q.shape[1] if shared else 1, causal, math.prod(grid_of(q)))
        self.rows = (self.rest[0], keys, self.rest[4])
        self.modes = modes.contiguous().reshape(self.points, modes.shape[-1]).numpy()
        self.count, self.total = (x.contiguous().reshape(-1).numpy() for x in (count, total))
        self.order, self.table, self.scale = listed, table.contiguous().numpy(), scale
        self.seed, self.alpha = np.uint32(seeded(int(seed))), alpha
        self.chains_per_mode, self.burn_in = chains_per_mode, burn_in
        wide = self.tensors[2].dtype
        self.told = np.zeros((2, self.points), wide)  # acceptance and rhat of walks
        self.head_out = np.zeros((0, v.shape[-1]), wide) if head_out is None else array(head_out)
        self.head_lse = np.zeros(0, wide) if head_lse is None else head_lse.detach().contiguous().reshape(-1).numpy()

    def chunks(self, tasks: int) -> Iterator[tuple[int, Array, Array]]:
        """First point, the keys visited [C, T] with -1 after the last, and the logs of their weights."""
        size = max(1, min(self.points, CHUNK_PAIRS // self.samples))
        wide = self.tensors[2].dtype
        keys, logs = np.empty((size, self.samples), np.int32), np.empty((size, self.samples), wide)
        for begin in range(0, self.points, size):
            if self.walks:
                walk_keys(
                    *self.tensors[:2], self.modes, self.count, *self.grid, self.rest, self.table, self.seed, self.scale,
                    self.chains_per_mode, self.burn_in, begin, tasks, keys, logs, self.told,
                )  # fmt: skip
            else:
                draw_keys(
                    self.modes, self.count, self.total, self.order, *self.grid, self.rest, self.table, self.seed,
                    self.alpha, begin, tasks, keys, logs,
                )  # fmt: skip
            yield begin, keys, logs


def sample(*tensors: Any, **settings: Any) -> tuple[Tensor, ...]:
    """The tensors of `scram.estimate_ops` -> out, lse, variance, ess, acceptance, rhat."""
    q, v = tensors[0], tensors[2]
    problem = _Problem(*tensors, **settings)
    wide = problem.tensors[2].dtype
    out, variance = (np.empty((problem.points, v.shape[-1]), wide) for _ in range(2))
    lse, ess = np.empty(problem.points, wide), np.empty(problem.points, wide)
    with threads() as count:
        tasks = count * TASKS_PER_THREAD
        for begin, keys, logs in problem.chunks(tasks):
            _mix(
                *problem.tensors, *problem.rows, problem.scale, problem.walks, problem.head_out, problem.head_lse,
                begin, tasks, keys, logs, out, lse, variance, ess,
            )  # fmt: skip
    shape = (*q.shape[:-1], v.shape[-1])
    numbers = (torch.from_numpy(x).reshape(q.shape[:-1]) for x in (ess, *problem.told))
    shaped = (torch.from_numpy(out).to(v.dtype).reshape(shape), torch.from_numpy(lse).reshape(q.shape[:-1]))
    return *shaped, torch.from_numpy(variance).reshape(shape), *numbers


def sample_backward(grad_out: Tensor, grad_lse: Tensor, *tensors: Any, **settings: Any) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, and of head_out and head_lse where there is a head."""
    problem = _Problem(*tensors, **settings)
    q, k, v = problem.tensors
    d_out, d_lse = array(grad_out), grad_lse.detach().contiguous().reshape(-1).numpy()
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    d_head, d_head_lse = np.zeros_like(problem.head_out), np.zeros_like(problem.head_lse)
    no_extra = (np.zeros((0, q.shape[1]), k.dtype), np.zeros((0, v.shape[1]), v.dtype))
    with threads() as count:
        tasks = count * TASKS_PER_THREAD
        weights = None
        for begin, keys, logs in problem.chunks(tasks):
            weights = np.empty_like(logs) if weights is None else weights
            _slopes(
                q, k, v, *problem.rows, problem.scale, problem.walks, problem.head_out, problem.head_lse, begin,
                tasks, keys, logs, d_out, d_lse, dq, weights, d_head, d_head_lse,
            )  # fmt: skip
            # The sums over keys need no grid: for them the keys lie in a line, which saves compiling for each rank.
            line = ((problem.rows[1],), (1,), (0,), *problem.rest)
            how = (problem.scale, 0, 0, np.uint32(0), 0, 1.0)
            _keys(count, q, d_out, line, how, begin, count, keys, weights, logs, dk, dv, *no_extra)
    made = (dq, dk, dv, d_head, d_head_lse)
    given = (*tensors[:3], *tensors[8:10])
    return tuple(
        None if x is None else torch.from_numpy(grad).to(x.dtype).reshape(x.shape)
        for grad, x in zip(made, given, strict=True)
    )


@parallel
def _mix(
    q, k, v, key_rows, total_keys, queries, scale, flat, head_out, head_lse, begin, tasks, keys, logs, out, lse,
    variance, ess,
):  # fmt: skip
    size = min(len(keys), len(lse) - begin)
    for task in numba.prange(tasks):
        for c in range(size * task // tasks, size * (task + 1) // tasks):
            first = key_rows[(begin + c) // queries] * total_keys
            _mix_one(
                q, k, v, scale, flat, head_out, head_lse, begin + c, first, keys[c], logs[c], out, lse, variance, ess
            )


@compiled
def _mix_one(q, k, v, scale, flat, head_out, head_lse, point, first, keys, logs, out, lse, variance, ess):
    number = out.dtype.type
    zero, samples, width = number(0), len(keys), out.shape[1]
    seen, head = 0, head_lse[point] if len(head_lse) else number(-np.inf)
    top, highest = head, number(-np.inf)
    while seen < samples and keys[seen] >= 0:
        a = number(scale * dot(q, point, k, first + keys[seen]))
        logs[seen] = a - a if flat else a + logs[seen]  # a - a keeps a NaN
        if logs[seen] == logs[seen]:
            highest = max(highest, logs[seen])
        seen += 1
    top = max(top, highest)
    for f in range(width):
        out[point, f] = zero
    ess[point] = zero
    if seen == 0 and head == -np.inf:
        lse[point] = -np.inf
        variance[point, :] = np.inf
        return
    whole = number(math.exp(head - top))
    plain, squares = zero, zero
    for t in range(seen):
        p = number(math.exp(logs[t] - top))
        whole += p
        share = number(math.exp(logs[t] - highest))
        plain += share
        squares += share * share
        logs[t] = p
        add(out, point, p, v, first + keys[t])
    if head != -np.inf:
        add(out, point, number(math.exp(head - top)), head_out, point)
    for f in range(width):
        out[point, f] /= whole
    lse[point] = math.log(whole) + top
    if seen == 0:
        variance[point, :] = np.inf
        return
    ess[point] = plain * plain / squares
    for f in range(width):
        total, square = zero, zero
        for t in range(seen):
            r = logs[t] / whole * (v[first + keys[t], f] - out[point, f])
            total += r
            square += r * r
        variance[point, f] = max(square - total * total / samples, zero)


@parallel
def _slopes(
    q, k, v, key_rows, total_keys, queries, scale, flat, head_out, head_lse, begin, tasks, keys, logs, d_out, d_lse,
    dq, weights, d_head, d_head_lse,
):  # fmt: skip
    size = min(len(keys), len(d_lse) - begin)
    for task in numba.prange(tasks):
        for c in range(size * task // tasks, size * (task + 1) // tasks):
            first = key_rows[(begin + c) // queries] * total_keys
            _slopes_one(
                q, k, v, scale, flat, head_out, head_lse, begin + c, first, keys[c], logs[c], d_out, d_lse, dq,
                weights[c], d_head, d_head_lse,
            )  # fmt: skip


@compiled
def _slopes_one(
    q, k, v, scale, flat, head_out, head_lse, point, first, keys, logs, d_out, d_lse, dq, weights, d_head,
    d_head_lse,
):  # fmt: skip
    """dq and the head's gradients; the list of logs becomes that of d loss / d (q.k), beside the weights."""
    number = weights.dtype.type
    seen, head = 0, head_lse[point] if len(head_lse) else number(-np.inf)
    top = head
    while seen < len(keys) and keys[seen] >= 0:
        a = number(scale * dot(q, point, k, first + keys[seen]))
        weights[seen] = a - a if flat else a + logs[seen]
        if weights[seen] == weights[seen]:
            top = max(top, weights[seen])
        seen += 1
    # The normaliser is made anew: from lse, rounded, the weights would not add up to 1 where scores are large.
    # Slopes are measured from one of them, so that equal ones leave nothing.
    whole, mean, base = number(0), number(0), number(0)
    if head != -np.inf:
        base = dot(d_out, point, head_out, point)
        whole = number(math.exp(head - top))
    elif seen:
        base = dot(d_out, point, v, first + keys[0])
    share = whole
    for t in range(seen):
        weights[t] = math.exp(weights[t] - top)
        logs[t] = dot(d_out, point, v, first + keys[t]) - base
        whole += weights[t]
        mean += weights[t] * logs[t]
    if seen or head != -np.inf:
        mean, share = mean / whole, share / whole
    if head != -np.inf:
        add(d_head, point, share, d_out, point)
        d_head_lse[point] = share * (d_lse[point] - mean)
    for t in range(seen):
        weights[t] /= whole
        logs[t] = scale * weights[t] * (logs[t] - mean + d_lse[point])
        add(dq, point, logs[t], k, first + keys[t])
