"""The hybrid's tail on a CPU: scores and mixtures as matrix products over the keys that a row shares.

A query takes the keys in its windows out of them: it walks its windows and looks each key up among the shared ones.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.calls import DrawnTail, DrawnTailCall, TailGrads
from ...spec.draws import (
    NONE,
    allowed_counts,
    by_heads,
    ranked_keys,
    shared_tail,
    tail_rows,
    tail_values,
    unmasked_later,
)
from ...spec.grid import AllowedKeys, grid_of
from ...spec.scoring import accumulator
from .compiled import compiled, inlined
from .layout import Array, Geometry, Routing, Windows, flat, row_states
from .noise import absorb
from .threads import in_one_pool, parallel, threads
from .windows import expand

CHUNK_SCORES = 1 << 20  # of one row at a time: they stay in the cache between the products


class Near(NamedTuple):
    """The windows, and the lse of attention over them."""

    windows: Windows
    geometry: Geometry
    lse: Array  # [P]
    keys: Array  # int32 [tasks, slots], scratch
    places: Array  # int64 [tasks, kappa + 1, rank], scratch


class Chunk(NamedTuple):
    """Queries `begin`.. of rows `row`.., and the keys that the queries of each row share."""

    row: int
    begin: int
    slot: Array  # int32 [R, M], the place of each key among the shared ones, -1 for none
    names: Array  # int32 [R, m]
    drawn: Array  # int64 [R], how many there are
    logs: Array  # [R, m], of how many keys each represents
    scale: float
    seed: Array  # uint32 [all rows], of dropout: the hash after the seed and the row
    threshold: int  # noise below it drops a key; 0 drops none
    boost: float  # of the weights that dropout keeps


class TailTensors:
    """A DrawnTailCall with one matrix for each row, and what the kernels read."""

    def __init__(self, call: DrawnTailCall) -> None:
        q = call.q
        k = call.k
        v = call.v
        self.call = call
        key_grid = grid_of(k)
        allowed = AllowedKeys.of(q, k, call.causal, call.key_mask)
        ranked = ranked_keys(q, allowed, call.seed, call.rows)
        unmasked = unmasked_later(allowed)
        self.names, self.represents = shared_tail(ranked, key_grid, call.samples, call.stratified, unmasked)
        self.geometry = Geometry.of(q, k, call.key_mask, call.causal)
        self.windows = Windows.of(call.index, call.radius, key_grid, Routing.of(call.q, None, None))
        self.rows = q.shape[0] * q.shape[1]
        self.queries = self.geometry.queries
        self.wide = accumulator(v.dtype)
        self.at = tail_rows(self.names, q.shape[1], k.shape[1], self.geometry.keys)  # [R, m]
        self.k, self.v = (tail_values(x.detach(), self.names, q.shape[1]).to(self.wide) for x in (k, v))
        self.q = self.matrix(q)  # [R, N, E]
        self.near_out = self.matrix(call.near_out)  # [R, N, F]
        self.near_lse = flat(call.near_lse.to(self.wide))
        self.total = flat(allowed_counts(q, allowed))
        self.dropout = (np.zeros(0, np.uint32), 0, 1.0)
        if call.dropout_seed is not None:
            seed = row_states(call.dropout_seed, q, call.rows)
            self.dropout = (seed, int(call.dropout_p * 2**32), 1 / (1 - call.dropout_p))
        plain = torch.zeros(self.names.shape, dtype=self.wide, device="cpu")
        self.logs = (plain if self.represents is None else self.represents.to(self.wide).log()).numpy()

    def matrix(self, x: Tensor) -> Tensor:
        """[B, H, *G, width] -> [R, N, width]"""
        return x.detach().to(self.wide).reshape(self.rows, self.queries, x.shape[-1])

    def near(self, tasks: int) -> Near:
        keys = np.empty((tasks, self.windows.slots), np.int32)
        return Near(self.windows, self.geometry, self.near_lse, keys, self.windows.places(tasks))

    def chunks(self) -> Iterator[tuple[slice, slice]]:
        """Several whole rows at a time, or some queries of one."""
        most = max(1, CHUNK_SCORES // max(self.names.shape[1], 1))
        together = max(1, most // max(self.queries, 1))
        for row in range(0, self.rows, together):
            for begin in range(0, self.queries, most if together == 1 else self.queries):
                end = min(begin + most, self.queries) if together == 1 else self.queries
                yield slice(row, min(row + together, self.rows)), slice(begin, end)

    def chunk(self, rows: slice, queries: slice) -> Chunk:
        names = self.names.numpy()[rows]
        drawn = (names != NONE).sum(1)
        slot = np.full((len(names), self.geometry.keys), -1, np.int32)
        for row, number in enumerate(drawn):
            slot[row, names[row, :number]] = np.arange(number, dtype=np.int32)
        seed, threshold, boost = self.dropout
        return Chunk(
            row=rows.start,
            begin=queries.start,
            slot=slot,
            names=names,
            drawn=drawn,
            logs=self.logs[rows],
            scale=self.call.scale,
            seed=seed,
            threshold=threshold,
            boost=boost,
        )


@in_one_pool
def drawn_tail(call: DrawnTailCall) -> DrawnTail:
    tail = TailTensors(call)
    shape = (tail.rows, tail.queries)
    out = torch.empty(*shape, call.v.shape[-1], dtype=tail.wide, device="cpu")
    variance = torch.empty_like(out)
    numbers = [torch.empty(shape, dtype=tail.wide, device="cpu") for _ in range(5)]
    lse, offset, share, seen, left = numbers
    with threads() as tasks:
        near = tail.near(tasks)
        for rows, queries in tail.chunks():
            p = tail.q[rows, queries] @ tail.k[rows].mT  # [R, n, m]
            _weigh(tasks, p.numpy(), tail.chunk(rows, queries), near, call.stratified, tail.total, *map(flat, numbers))
            near_share = share[rows, queries].unsqueeze(-1)  # [R, n, 1]
            values = tail.v[rows]  # [R, m, F]
            # Windows without a key have out 0; what has no share is not multiplied.
            near_part = torch.where(near_share == 0, 0, near_share * tail.near_out[rows, queries])
            joined = _mix(p, values, call.causal) + near_part  # [R, n, F]
            out[rows, queries] = joined
            counts = (x[rows, queries].unsqueeze(-1) for x in (seen, left))
            known = call.dropout_seed is None
            variance[rows, queries] = _variance(p, values, joined, *counts, causal=call.causal) if known else torch.inf
    points = call.q.shape[:-1]
    full = (*points, out.shape[-1])
    return DrawnTail(
        out.to(call.v.dtype).reshape(full),
        lse.reshape(points),
        variance.reshape(full),
        offset.reshape(points),
        *by_heads(call.q, tail.names, tail.represents),
    )


@in_one_pool
def drawn_tail_backward(
    call: DrawnTailCall, offset: Tensor, names: Tensor, represents: Tensor, grad_out: Tensor, grad_lse: Tensor
) -> TailGrads:
    """Gradients of q, k, v, near_out, near_lse from those of out and lse. The keys are drawn again."""
    tail = TailTensors(call)
    wide = tail.wide
    shape = (tail.rows, tail.queries)
    d_out = tail.matrix(grad_out)
    d_lse, near_lse = (x.detach().to(wide).reshape(shape) for x in (grad_lse, call.near_lse))
    dq = torch.empty_like(tail.q)
    dk = torch.zeros_like(tail.k)
    dv = torch.zeros_like(tail.v)
    to_near = torch.where(near_lse == -torch.inf, 0, (d_out * tail.near_out).sum(-1))
    share = torch.empty(shape, dtype=wide, device="cpu")
    delta = torch.empty(shape, dtype=wide, device="cpu")
    numbers = [flat(x) for x in (offset.to(wide), d_lse, to_near, share, delta)]
    with threads() as tasks:
        near = tail.near(tasks)
        for rows, queries in tail.chunks():
            p = tail.q[rows, queries] @ tail.k[rows].mT  # [R, n, m]
            slopes = d_out[rows, queries] @ tail.v[rows].mT  # [R, n, m]
            _slopes(tasks, p.numpy(), slopes.numpy(), tail.chunk(rows, queries), near, *numbers)
            dq[rows, queries] = _mix(slopes, tail.k[rows], call.causal)
            dk[rows] += _mix(slopes.mT, tail.q[rows, queries], True)
            dv[rows] += p.mT @ d_out[rows, queries]
    at = tail.at.flatten()
    d_k, d_v = (
        torch.zeros(math.prod(x.shape[:-1]), x.shape[-1], dtype=wide, device="cpu").index_add_(0, at, d.flatten(0, 1))
        for x, d in ((call.k, dk), (call.v, dv))
    )
    to_near_out = share.unsqueeze(-1) * d_out
    to_near_lse = torch.where(share == 0, 0, share * (to_near - delta))
    grads = (dq, d_k, d_v, to_near_out, to_near_lse)
    inputs = (call.q, call.k, call.v, call.near_out, call.near_lse)
    return TailGrads(*(grad.to(x.dtype).reshape(x.shape) for grad, x in zip(grads, inputs, strict=True)))


def _mix(p: Tensor, x: Tensor, guarded: bool) -> Tensor:
    """p [R, n, m] @ x [R, m, width], where a weight of 0 lets no NaN of x through."""
    if not guarded or bool(x.isfinite().all()):
        return p @ x
    bad = ~x.isfinite()
    touched = (p != 0).to(p.dtype) @ bad.to(p.dtype)
    return torch.where(touched > 0, torch.nan, p @ x.masked_fill(bad, 0))


def _variance(p: Tensor, v: Tensor, out: Tensor, seen: Tensor, left: Tensor, *, causal: bool) -> Tensor:
    """Of each component of out; values are centered first, so that little cancels in the sums of squares.

    Under causal order they are centered by the first, which later ones do not change, and all have finite squares.
    """
    if causal:
        v = torch.where(v.isfinite(), v, 0)
        center = v[:, :1]
        most = torch.finfo(v.dtype).max ** 0.5 / 4
        v = (v - center).clamp(-most, most)
    else:
        center = v.mean(1, keepdim=True)
        v = v - center
    out = out - center
    squares = p.square()
    r = p @ v - out * p.sum(-1, keepdim=True)
    r_squares = squares @ v.square() - 2 * out * (squares @ v) + out.square() * squares.sum(-1, keepdim=True)
    spread = (r_squares - r.square() / seen.clamp(min=1)).clamp(min=0)
    factor = (1 - seen / left.clamp(min=1)) * seen / (seen - 1)
    known = torch.where(seen >= 2, factor * spread, torch.inf)
    return torch.where(seen == left, 0, known)


@inlined
def _tail_of(all_scores, chunk, near, task, c):
    """The scores of query `c` of the chunk, those of keys in its windows set to -inf; and the query as a point.

    Then how many shared keys come up to the query, |S_i|, and how many shared keys lie in the windows.
    """
    geometry = near.geometry
    r = c // all_scores.shape[1]
    keys = near.keys[task]
    row = chunk.row + r
    query = chunk.begin + c - r * all_scores.shape[1]
    scores = all_scores[r, query - chunk.begin]
    point = row * geometry.queries + query
    limit = chunk.drawn[r]
    gone = 0
    attended = expand(near.windows, geometry, row, point, keys, near.places[task])
    if geometry.causal:
        while limit > 0 and chunk.names[r, limit - 1] > query:
            limit -= 1
    for n in range(attended):
        at = chunk.slot[r, keys[n]]
        if at >= 0:
            scores[at] = -np.inf
            gone += 1
    return scores, point, limit, attended, gone


@inlined
def _add_logs(scores, chunk, r, offset, limit, top):
    """Scaled scores with the logs of what each key represents. Returns the highest, or `top`."""
    logs = chunk.logs[r]
    scale = scores.dtype.type(chunk.scale)
    for j in range(limit):
        if scores[j] != -np.inf:  # the scale may be 0 in float32, and 0 * -inf is NaN
            scores[j] = scale * scores[j] + (logs[j] + offset)
        top = max(top, scores[j]) if scores[j] == scores[j] else top
    return top


@compiled
def _drop(numbers, chunk, near, point, limit):
    """Dropout: each number of a shared key is 0, NaN too, or grows."""
    number = numbers.dtype.type
    row = point // near.geometry.queries
    prefix = absorb(chunk.seed[row], point - row * near.geometry.queries)
    names = chunk.names[row - chunk.row]
    for j in range(limit):
        kept = absorb(prefix, names[j]) >= chunk.threshold
        numbers[j] = number(numbers[j] * chunk.boost) if kept else number(0)


@parallel
def _weigh(task, tasks, all_scores, chunk, near, stratified, total, lse, offsets, shares, seen, lefts):
    """Scores [R, C, m] become weights; of each point lse, the offset of its logs, and the windows' share, [P].

    `seen` takes m_i, the shared keys of its tail, and `lefts` M_i - |S_i|, all keys of its tail.
    """
    size = all_scores.shape[0] * all_scores.shape[1]
    number = all_scores.dtype.type
    for c in range(size * task // tasks, size * (task + 1) // tasks):
        scores, point, limit, attended, gone = _tail_of(all_scores, chunk, near, task, c)
        counted = limit - gone
        left = total[point] - attended
        near_lse = near.lse[point]
        offset = number(0)
        if not stratified and counted > 0:
            offset = number(math.log(left / counted))
        seen[point] = counted
        lefts[point] = left
        offsets[point] = offset
        top = _add_logs(scores, chunk, c // all_scores.shape[1], offset, limit, near_lse)
        if counted == 0 and near_lse == -np.inf:
            scores[:] = 0
            lse[point] = -np.inf
            shares[point] = 0
            continue
        share = number(math.exp(near_lse - top))
        whole = share
        for j in range(limit):
            scores[j] = math.exp(scores[j] - top)
            whole += scores[j]
        for j in range(limit):
            scores[j] /= whole
        if chunk.threshold:
            _drop(scores, chunk, near, point, limit)
        scores[limit:] = 0
        lse[point] = math.log(whole) + top
        shares[point] = share / whole


@parallel
def _slopes(task, tasks, all_scores, all_slopes, chunk, near, offset, d_lse, to_near, shares, deltas):
    """Scores become weights, <grad_out, v_j> become d loss / d (q.k), [R, C, m].

    Of each point: `to_near` is <grad_out, near_out>; the windows' share and delta, the mean of <grad_out, v_j> less the
    gradient of lse, are written.
    """
    size = all_scores.shape[0] * all_scores.shape[1]
    number = all_scores.dtype.type
    queries = all_scores.shape[1]
    for c in range(size * task // tasks, size * (task + 1) // tasks):
        scores, point, limit, _, _ = _tail_of(all_scores, chunk, near, task, c)
        slopes = all_slopes[c // queries, c % queries]
        near_lse = near.lse[point]
        if chunk.threshold:
            _drop(slopes, chunk, near, point, limit)
        top = _add_logs(scores, chunk, c // queries, offset[point], limit, near_lse)
        if top == -np.inf:
            top = number(0)  # -inf - -inf is NaN
        # The normalizer is made anew: from lse, rounded, the weights would not add up to 1 where scores are large.
        share = number(math.exp(near_lse - top))
        whole = share
        mean = number(0)
        if share != 0:
            mean = share * to_near[point]
        for j in range(limit):
            scores[j] = math.exp(scores[j] - top)
            if scores[j] != 0:  # a key in the windows has weight 0, and perhaps a NaN in its value
                whole += scores[j]
                mean += scores[j] * slopes[j]
        if whole == 0:
            whole = number(1)
        delta = mean / whole - d_lse[point]
        shares[point] = share / whole
        deltas[point] = delta
        for j in range(limit):
            scores[j] /= whole
            slopes[j] = number(chunk.scale) * scores[j] * (slopes[j] - delta) if scores[j] != 0 else number(0)
        if chunk.threshold:
            _drop(scores, chunk, near, point, limit)
        scores[limit:] = 0
        slopes[limit:] = 0
