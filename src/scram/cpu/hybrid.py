"""The hybrid's tail on a CPU: scores and mixtures as matrix products over the keys that a row shares.

A query takes its own head's keys out of them: it walks its windows and looks each key up among the shared ones.
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

from ..draws import NONE, legal_counts, ranked_keys, shared_tail, tail_rows, tail_values
from ..grid import LegalKeys, grid_of
from ..scoring import accumulator
from .attend import expand
from .compiled import TASKS_PER_THREAD, compiled, parallel, threads
from .layout import Array, strides

CHUNK_SCORES = 1 << 20  # of one row at a time: they stay in the cache between the products


class _Problem:
    """The tensors of `tail` and its backward pass as matrices of one row each, and the geometry of the windows."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: Tensor,
        key_mask: Tensor | None,
        head_out: Tensor,
        head_lse: Tensor,
        seed: Tensor,
        *,
        samples: int,
        stratified: bool,
        radius: tuple[int, ...],
        causal: bool,
        scale: float,
    ) -> None:
        key_grid = grid_of(k)
        legal = LegalKeys.of(q, k, causal, key_mask)
        self.shared, self.for_keys = shared_tail(ranked_keys(q, legal, seed), key_grid, samples, stratified)
        self.rows, self.queries, self.keys = q.shape[0] * q.shape[1], math.prod(grid_of(q)), math.prod(key_grid)
        self.wide, self.scale, self.causal = accumulator(v.dtype), scale, causal
        self.at = tail_rows(self.shared, q.shape[1], k.shape[1], self.keys)
        self.k, self.v = (tail_values(x.detach(), self.shared, q.shape[1]).to(self.wide) for x in (k, v))
        self.q, self.head_out = (
            x.detach().to(self.wide).reshape(self.rows, self.queries, x.shape[-1]) for x in (q, head_out)
        )
        self.head_lse = head_lse.detach().to(self.wide).contiguous().reshape(-1).numpy()
        self.index = index.reshape(self.rows * self.queries, index.shape[-1]).contiguous().numpy()
        self.total = legal_counts(q, legal).contiguous().reshape(-1).numpy()
        self.names = self.shared.numpy()
        plain = torch.zeros(self.shared.shape, dtype=self.wide)
        self.logs = (plain if self.for_keys is None else self.for_keys.to(self.wide).log()).numpy()
        self.stratified = stratified
        mask = np.zeros((0, 0), np.bool_) if key_mask is None else key_mask.contiguous().reshape(-1, self.keys).numpy()
        shared = key_mask is not None and key_mask.ndim == len(key_grid) + 1
        reach = tuple(min(b, extent - 1) for b, extent in zip(radius, key_grid, strict=True))
        self.grid = (key_grid, strides(key_grid), reach)
        self.rest = (np.zeros(0, np.int64), mask, q.shape[1] if shared else 1, causal, self.queries)
        self.slots = self.index.shape[1] * math.prod(2 * b + 1 for b in reach)

    def scratch(self, tasks: int) -> tuple[Array, Array]:
        rank = len(self.grid[0])
        return np.empty((tasks, self.slots), np.int32), np.empty((tasks, self.index.shape[1] + 1, rank), np.int64)

    def chunks(self) -> Iterator[tuple[int, slice, slice, tuple[Array, Array, int]]]:
        """Row, its queries, the same as points, and the row's shared keys: slot of each key, names, how many."""
        size = max(1, CHUNK_SCORES // max(self.names.shape[1], 1))
        for row in range(self.rows):
            drawn = int((self.names[row] != NONE).sum())
            slot = np.full(self.keys, -1, np.int32)
            slot[self.names[row, :drawn]] = np.arange(drawn, dtype=np.int32)
            for begin in range(0, self.queries, size):
                end = min(begin + size, self.queries)
                first = row * self.queries
                yield row, slice(begin, end), slice(first + begin, first + end), (slot, self.names[row], drawn)


def tail(*tensors: Any, **settings: Any) -> tuple[Tensor, ...]:
    """The tensors of `scram.estimate_ops` -> out, lse, variance, offset, names, for_keys."""
    q, v = tensors[0], tensors[2]
    problem = _Problem(*tensors, **settings)
    points, width = math.prod(q.shape[:-1]), v.shape[-1]
    out = torch.empty(points, width, dtype=problem.wide)
    variance = torch.empty_like(out)
    lse, offset, share, seen, left = (np.empty(points, problem.head_lse.dtype) for _ in range(5))
    with threads() as count:
        scratch = problem.scratch(count * TASKS_PER_THREAD)
        for row, queries, at, shared in problem.chunks():
            scores = problem.q[row, queries] @ problem.k[row].T
            _weigh(
                scores.numpy(), problem.index, *problem.grid, problem.rest, row, at.start, *shared, problem.logs[row],
                problem.stratified, problem.scale, problem.total, problem.head_lse, *scratch,
                lse, offset, share, seen, left,
            )  # fmt: skip
            p, values = scores, problem.v[row]
            head = torch.from_numpy(share[at]).unsqueeze(1)
            # A head of no key has out 0; what is not there is not multiplied.
            out[at] = _mix(p, values, problem.causal) + torch.where(head == 0, 0, head * problem.head_out[row, queries])
            numbers = (torch.from_numpy(x[at]).unsqueeze(1) for x in (seen, left))
            variance[at] = _variance(p, values, out[at], *numbers)
    shape = (*q.shape[:-1], width)
    made = (torch.from_numpy(x).reshape(q.shape[:-1]) for x in (lse, offset))
    for_keys = torch.empty(0) if problem.for_keys is None else problem.for_keys
    return out.to(v.dtype).reshape(shape), next(made), variance.reshape(shape), next(made), problem.shared, for_keys


def tail_backward(grad_out: Tensor, grad_lse: Tensor, *tensors: Any, **settings: Any) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, head_out, head_lse from those of out and lse."""
    *inputs, lse, offset, _, _ = tensors  # the keys are drawn again
    problem = _Problem(*inputs, **settings)
    wide = problem.wide
    d_out = grad_out.detach().to(wide).reshape(problem.rows, problem.queries, grad_out.shape[-1])
    d_lse = grad_lse.detach().to(wide).contiguous().reshape(-1)
    norm, add = (x.contiguous().reshape(-1).numpy() for x in (lse, offset))
    share = torch.where(lse == -torch.inf, 0, (inputs[6].detach().to(wide) - lse).exp()).reshape(-1, 1)
    dq, dk, dv = torch.empty_like(problem.q), torch.zeros_like(problem.k), torch.zeros_like(problem.v)
    to_head = torch.where(share == 0, 0, (d_out * problem.head_out).sum(-1).reshape(-1, 1))
    shift = (share * to_head).squeeze(1).contiguous()
    with threads() as count:
        scratch = problem.scratch(count * TASKS_PER_THREAD)
        for row, queries, at, shared in problem.chunks():
            scores = problem.q[row, queries] @ problem.k[row].T
            slopes = d_out[row, queries] @ problem.v[row].T
            _slopes(
                scores.numpy(), slopes.numpy(), problem.index, *problem.grid, problem.rest, row, at.start, *shared,
                problem.logs[row], problem.scale, norm, add, d_lse.numpy(), *scratch, shift.numpy(),
            )  # fmt: skip
            dq[row, queries] = _mix(slopes, problem.k[row], problem.causal)
            dk[row] += _mix(slopes.T, problem.q[row, queries], True)
            dv[row] += scores.T @ d_out[row, queries]
    d_head_out = share * d_out.reshape(-1, d_out.shape[-1])
    d_head_lse = share * (to_head - (shift - d_lse).unsqueeze(1))
    full = (
        torch.zeros(math.prod(x.shape[:-1]), x.shape[-1], dtype=wide).index_add_(
            0, problem.at.flatten(), d.flatten(0, 1)
        )
        for x, d in ((inputs[1], dk), (inputs[2], dv))
    )
    grads = (dq, *full, d_head_out, d_head_lse)
    given = (*inputs[:3], *inputs[5:7])
    return tuple(grad.to(x.dtype).reshape(x.shape) for grad, x in zip(grads, given, strict=True))


def _mix(p: Tensor, x: Tensor, guarded: bool) -> Tensor:
    """p [n, m] @ x [m, width], where a weight of 0 lets no NaN of x through."""
    if not guarded or bool(x.isfinite().all()):
        return p @ x
    bad = ~x.isfinite()
    touched = (p != 0).to(p.dtype) @ bad.to(p.dtype)
    return torch.where(touched > 0, torch.nan, p @ x.masked_fill(bad, 0))


def _variance(p: Tensor, v: Tensor, out: Tensor, seen: Tensor, left: Tensor) -> Tensor:
    """Of each component of out; values are centred first, so that little cancels in the sums of squares."""
    centre = v.mean(0) if len(v) else v.new_zeros(v.shape[1])
    v, out = v - centre, out - centre
    squares = p.square()
    r = p @ v - out * p.sum(1, keepdim=True)
    r_squares = squares @ v.square() - 2 * out * (squares @ v) + out.square() * squares.sum(1, keepdim=True)
    spread = (r_squares - r.square() / seen.clamp(min=1)).clamp(min=0)
    factor = (1 - seen / left.clamp(min=1)) * seen / (seen - 1)
    known = torch.where(seen >= 2, factor * spread, torch.inf)
    return torch.where(seen == left, 0, known)


@parallel
def _weigh(
    scores, index, grid, strides, reach, rest, row, first, slot, names, drawn, logs, stratified, scale, total, head_lse,
    keys, places, lse, offset, share, seen, left,
):  # fmt: skip
    """Scores [C, m] of the points from `first` on become weights; lse, offset, the head's share, m_i, M_i - |S_i|."""
    tasks = len(keys)
    for task in numba.prange(tasks):
        geometry = (grid, strides, reach, *rest)
        for c in range(len(scores) * task // tasks, len(scores) * (task + 1) // tasks):
            _weigh_one(
                scores[c], index, geometry, row, first + c, slot, names, drawn, logs, stratified, scale, total,
                head_lse, keys[task], places[task], lse, offset, share, seen, left,
            )  # fmt: skip


@compiled
def _weigh_one(
    scores, index, geometry, row, point, slot, names, drawn, logs, stratified, scale, total, head_lse, keys, places,
    lse, offset, share, seen, left,
):  # fmt: skip
    limit, found, gone = _open(scores, index, geometry, row, point, slot, names, drawn, keys, places)
    number = scores.dtype.type
    counted, rest = limit - gone, total[point] - found
    seen[point], left[point] = counted, rest
    add = number(0)
    if not stratified and counted > 0:
        add = number(math.log(rest / counted))
    offset[point] = add
    top = head_lse[point]
    for j in range(limit):
        scores[j] = number(scale) * scores[j] + (logs[j] + add)
        top = max(top, scores[j]) if scores[j] == scores[j] else top
    if counted == 0 and head_lse[point] == -np.inf:
        scores[:] = 0
        lse[point], share[point] = -np.inf, 0
        return
    whole = number(math.exp(head_lse[point] - top))
    for j in range(limit):
        scores[j] = math.exp(scores[j] - top)
        whole += scores[j]
    for j in range(limit):
        scores[j] /= whole
    scores[limit:] = 0
    lse[point] = math.log(whole) + top
    share[point] = math.exp(head_lse[point] - lse[point])


@compiled
def _open(scores, index, geometry, row, point, slot, names, drawn, keys, places):
    """Set the scores of the head's keys to -inf. Returns how many shared keys come up to the query, |S_i|, and how many
    shared keys are the head's."""
    query, found = point - row * geometry[7], expand(index, geometry, row, point, keys, places)
    limit, gone = drawn, 0
    if geometry[6]:
        while limit > 0 and names[limit - 1] > query:
            limit -= 1
    for n in range(found):
        at = slot[keys[n]]
        if at >= 0:
            scores[at] = -np.inf
            gone += 1
    return limit, found, gone


@parallel
def _slopes(
    scores, slopes, index, grid, strides, reach, rest, row, first, slot, names, drawn, logs, scale, lse, offset, d_lse,
    keys, places, shift,
):  # fmt: skip
    """Scores become weights, <grad_out, v_j> become d loss / d (q.k); `shift` begins with the head's part of delta."""
    tasks = len(keys)
    for task in numba.prange(tasks):
        geometry = (grid, strides, reach, *rest)
        for c in range(len(scores) * task // tasks, len(scores) * (task + 1) // tasks):
            _slopes_one(
                scores[c], slopes[c], index, geometry, row, first + c, slot, names, drawn, logs, scale, lse, offset,
                d_lse, keys[task], places[task], shift,
            )  # fmt: skip


@compiled
def _slopes_one(
    scores, slopes, index, geometry, row, point, slot, names, drawn, logs, scale, lse, offset, d_lse, keys, places,
    shift,
):  # fmt: skip
    limit, _, _ = _open(scores, index, geometry, row, point, slot, names, drawn, keys, places)
    number = scores.dtype.type
    for j in range(limit):
        if scores[j] == -np.inf:
            scores[j] = 0
        else:
            scores[j] = math.exp(number(scale) * scores[j] + (logs[j] + offset[point]) - lse[point])
            shift[point] += scores[j] * slopes[j]
    less = shift[point] - d_lse[point]
    for j in range(limit):
        # A head's key has weight 0, and perhaps a NaN in its value.
        slopes[j] = number(scale) * scores[j] * (slopes[j] - less) if scores[j] != 0 else number(0)
    scores[limit:] = 0
    slopes[limit:] = 0
