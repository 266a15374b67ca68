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

from ...draws import NONE, legal_counts, ranked_keys, shared_tail, tail_rows, tail_values
from ...grid import LegalKeys, grid_of
from ...scoring import accumulator
from .compiled import TASKS_PER_THREAD, compiled, parallel, threads
from .layout import Array, strides
from .windows import expand

CHUNK_SCORES = 1 << 20  # of one row at a time: they stay in the cache between the products


class _Problem:
    """The tensors of `tail` and its backward pass as one matrix for each row, and the geometry of the windows."""

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

    def chunks(self) -> Iterator[tuple[slice, slice]]:
        """Several whole rows at a time, or some queries of one."""
        most = max(1, CHUNK_SCORES // max(self.names.shape[1], 1))
        together = max(1, most // max(self.queries, 1))
        for row in range(0, self.rows, together):
            for begin in range(0, self.queries, most if together == 1 else self.queries):
                end = min(begin + most, self.queries) if together == 1 else self.queries
                yield slice(row, min(row + together, self.rows)), slice(begin, end)

    def shared_keys(self, rows: slice) -> tuple[Array, Array, Array, Array]:
        """Of some rows: the place of each key among the shared ones, -1 for none; their names, number and logs."""
        names = self.names[rows]
        drawn = (names != NONE).sum(1)
        slot = np.full((len(names), self.keys), -1, np.int32)
        for row, number in enumerate(drawn):
            slot[row, names[row, :number]] = np.arange(number, dtype=np.int32)
        return slot, names, drawn, self.logs[rows]


def tail(*tensors: Any, **settings: Any) -> tuple[Tensor, ...]:
    """The tensors of `scram.estimate_ops` -> out, lse, variance, offset, names, for_keys."""
    q, v = tensors[0], tensors[2]
    problem = _Problem(*tensors, **settings)
    width = v.shape[-1]
    out = torch.empty(problem.rows, problem.queries, width, dtype=problem.wide)
    variance = torch.empty_like(out)
    numbers = tuple(torch.empty(problem.rows, problem.queries, dtype=problem.wide) for _ in range(5))
    lse, offset, share, seen, left = numbers
    with threads() as count:
        scratch = problem.scratch(count * TASKS_PER_THREAD)
        for rows, queries in problem.chunks():
            p = problem.q[rows, queries] @ problem.k[rows].mT
            _weigh(
                p.numpy(), problem.index, *problem.grid, problem.rest, rows.start, queries.start,
                *problem.shared_keys(rows), problem.stratified, problem.scale, problem.total, problem.head_lse,
                *scratch, *(x.view(-1).numpy() for x in numbers),
            )  # fmt: skip
            head, values = share[rows, queries].unsqueeze(-1), problem.v[rows]
            # A head of no key has out 0; what is not there is not multiplied.
            theirs = torch.where(head == 0, 0, head * problem.head_out[rows, queries])
            answer = _mix(p, values, problem.causal) + theirs
            out[rows, queries] = answer
            counts = (x[rows, queries].unsqueeze(-1) for x in (seen, left))
            variance[rows, queries] = _variance(p, values, answer, *counts)
    shape = (*q.shape[:-1], width)
    for_keys = torch.empty(0) if problem.for_keys is None else problem.for_keys
    each = (lse.reshape(shape[:-1]), variance.reshape(shape), offset.reshape(shape[:-1]))
    return out.to(v.dtype).reshape(shape), *each, problem.shared, for_keys


def tail_backward(grad_out: Tensor, grad_lse: Tensor, *tensors: Any, **settings: Any) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, head_out, head_lse from those of out and lse."""
    *inputs, offset, _, _ = tensors  # the keys are drawn again
    problem = _Problem(*inputs, **settings)
    wide, shape = problem.wide, (problem.rows, problem.queries)
    d_out = grad_out.detach().to(wide).reshape(*shape, grad_out.shape[-1])
    d_lse, add = (x.detach().to(wide).contiguous().reshape(shape) for x in (grad_lse, offset))
    dq, dk, dv = torch.empty_like(problem.q), torch.zeros_like(problem.k), torch.zeros_like(problem.v)
    head_lse = torch.from_numpy(problem.head_lse).reshape(shape)
    to_head = torch.where(head_lse == -torch.inf, 0, (d_out * problem.head_out).sum(-1))
    share, shift = torch.empty(shape, dtype=wide), torch.empty(shape, dtype=wide)
    with threads() as count:
        scratch = problem.scratch(count * TASKS_PER_THREAD)
        for rows, queries in problem.chunks():
            p = problem.q[rows, queries] @ problem.k[rows].mT
            slopes = d_out[rows, queries] @ problem.v[rows].mT
            _slopes(
                p.numpy(), slopes.numpy(), problem.index, *problem.grid, problem.rest, rows.start, queries.start,
                *problem.shared_keys(rows), problem.scale, problem.head_lse,
                *(x.view(-1).numpy() for x in (add, d_lse, to_head)), *scratch,
                *(x.view(-1).numpy() for x in (share, shift)),
            )  # fmt: skip
            dq[rows, queries] = _mix(slopes, problem.k[rows], problem.causal)
            dk[rows] += _mix(slopes.mT, problem.q[rows, queries], True)
            dv[rows] += p.mT @ d_out[rows, queries]
    at = problem.at.flatten()
    full = (
        torch.zeros(math.prod(x.shape[:-1]), x.shape[-1], dtype=wide).index_add_(0, at, d.flatten(0, 1))
        for x, d in ((inputs[1], dk), (inputs[2], dv))
    )
    d_head_lse = torch.where(share == 0, 0, share * (to_head - shift))
    grads = (dq, *full, share.unsqueeze(-1) * d_out, d_head_lse)
    given = (*inputs[:3], *inputs[5:7])
    return tuple(grad.to(x.dtype).reshape(x.shape) for grad, x in zip(grads, given, strict=True))


def _mix(p: Tensor, x: Tensor, guarded: bool) -> Tensor:
    """p [R, n, m] @ x [R, m, width], where a weight of 0 lets no NaN of x through."""
    if not guarded or bool(x.isfinite().all()):
        return p @ x
    bad = ~x.isfinite()
    touched = (p != 0).to(p.dtype) @ bad.to(p.dtype)
    return torch.where(touched > 0, torch.nan, p @ x.masked_fill(bad, 0))


def _variance(p: Tensor, v: Tensor, out: Tensor, seen: Tensor, left: Tensor) -> Tensor:
    """Of each component of out; values are centred first, so that little cancels in the sums of squares."""
    centre = v.mean(1, keepdim=True)
    v, out = v - centre, out - centre
    squares = p.square()
    r = p @ v - out * p.sum(-1, keepdim=True)
    r_squares = squares @ v.square() - 2 * out * (squares @ v) + out.square() * squares.sum(-1, keepdim=True)
    spread = (r_squares - r.square() / seen.clamp(min=1)).clamp(min=0)
    factor = (1 - seen / left.clamp(min=1)) * seen / (seen - 1)
    known = torch.where(seen >= 2, factor * spread, torch.inf)
    return torch.where(seen == left, 0, known)


@parallel
def _weigh(
    scores, index, grid, strides, reach, rest, row, begin, slot, names, drawn, logs, stratified, scale, total, head_lse,
    keys, places, lse, offset, share, seen, left,
):  # fmt: skip
    """Scores [R, C, m] of queries `begin`.. of rows `row`.. become weights; lse, offset, the head's share, m_i and
    M_i - |S_i| of each point."""
    tasks, size = len(keys), scores.shape[0] * scores.shape[1]
    for task in numba.prange(tasks):
        geometry = (grid, strides, reach, *rest)
        for c in range(size * task // tasks, size * (task + 1) // tasks):
            r = c // scores.shape[1]
            query = c - r * scores.shape[1]
            _weigh_one(
                scores[r, query], index, geometry, row + r, (row + r) * rest[4] + begin + query, slot[r], names[r],
                drawn[r], logs[r], stratified, scale, total, head_lse, keys[task], places[task], lse, offset, share,
                seen, left,
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
    head = number(math.exp(head_lse[point] - top))
    whole = head
    for j in range(limit):
        scores[j] = math.exp(scores[j] - top)
        whole += scores[j]
    for j in range(limit):
        scores[j] /= whole
    scores[limit:] = 0
    lse[point] = math.log(whole) + top
    share[point] = head / whole


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
    scores, slopes, index, grid, strides, reach, rest, row, begin, slot, names, drawn, logs, scale, head_lse, offset,
    d_lse, to_head, keys, places, share, shift,
):  # fmt: skip
    """Scores become weights, <grad_out, v_j> become d loss / d (q.k); the head's share, and what is taken from each
    <grad_out, v_j>: their mean less the gradient of lse."""
    tasks, size = len(keys), scores.shape[0] * scores.shape[1]
    for task in numba.prange(tasks):
        geometry = (grid, strides, reach, *rest)
        for c in range(size * task // tasks, size * (task + 1) // tasks):
            r = c // scores.shape[1]
            query = c - r * scores.shape[1]
            _slopes_one(
                scores[r, query], slopes[r, query], index, geometry, row + r, (row + r) * rest[4] + begin + query,
                slot[r], names[r], drawn[r], logs[r], scale, head_lse, offset, d_lse, to_head, keys[task],
                places[task], share, shift,
            )  # fmt: skip


@compiled
def _slopes_one(
    scores, slopes, index, geometry, row, point, slot, names, drawn, logs, scale, head_lse, offset, d_lse, to_head,
    keys, places, share, shift,
):  # fmt: skip
    limit, _, _ = _open(scores, index, geometry, row, point, slot, names, drawn, keys, places)
    number = scores.dtype.type
    top = head_lse[point]
    for j in range(limit):
        scores[j] = number(scale) * scores[j] + (logs[j] + offset[point])
        top = max(top, scores[j]) if scores[j] == scores[j] else top
    if top == -np.inf:
        top = number(0)  # -inf - -inf is NaN
    # The normaliser is made anew: from lse, rounded, the weights would not add up to 1 where scores are large.
    head = number(math.exp(head_lse[point] - top))
    whole, mean = head, number(0)
    if head != 0:
        mean = head * to_head[point]
    for j in range(limit):
        scores[j] = math.exp(scores[j] - top)
        if scores[j] != 0:  # a head's key has weight 0, and perhaps a NaN in its value
            whole += scores[j]
            mean += scores[j] * slopes[j]
    if whole == 0:
        whole = number(1)
    share[point], shift[point] = head / whole, mean / whole - d_lse[point]
    for j in range(limit):
        scores[j] /= whole
        slopes[j] = number(scale) * scores[j] * (slopes[j] - shift[point]) if scores[j] != 0 else number(0)
    scores[limit:] = 0
    slopes[limit:] = 0
