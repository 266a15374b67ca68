"""The hybrid's tail on a CPU: scores and mixtures as matrix products over the keys that a row shares.

A query takes its own head's keys out of them: it walks its windows and looks each key up among the shared ones.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...calls import DrawnTail, DrawnTailCall, TailGrads
from ...draws import NONE, by_heads, legal_counts, ranked_keys, shared_tail, tail_rows, tail_values
from ...grid import LegalKeys, grid_of
from ...scoring import accumulator
from .compiled import compiled, inlined, parallel
from .layout import Array, Geometry, Windows, flat
from .noise import absorb, row_states
from .threads import threads
from .windows import expand

CHUNK_SCORES = 1 << 20  # of one row at a time: they stay in the cache between the products


class Head(NamedTuple):
    """The windows that the head attends, and its lse."""

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
        q, k, v, self.call = call.q, call.k, call.v, call
        key_grid, legal = grid_of(k), LegalKeys.of(q, k, call.causal, call.key_mask)
        ranked = ranked_keys(q, legal, call.seed, call.rows)
        self.names, self.represents = shared_tail(ranked, key_grid, call.samples, call.stratified)
        self.geometry = Geometry.of(q, k, call.key_mask, call.causal)
        self.windows = Windows.of(call.index, call.radius, key_grid)
        self.rows, self.queries = q.shape[0] * q.shape[1], self.geometry.queries
        self.wide = accumulator(v.dtype)
        self.at = tail_rows(self.names, q.shape[1], k.shape[1], self.geometry.keys)
        self.k, self.v = (tail_values(x.detach(), self.names, q.shape[1]).to(self.wide) for x in (k, v))
        self.q, self.head_out = (self.matrix(x) for x in (q, call.head_out))
        self.head_lse = flat(call.head_lse.to(self.wide))
        self.total = flat(legal_counts(q, legal))
        self.dropout = (np.zeros(0, np.uint32), 0, 1.0)
        if call.dropout_seed is not None:
            seed = row_states(call.dropout_seed, q, call.rows)
            self.dropout = (seed, int(call.dropout_p * 2**32), 1 / (1 - call.dropout_p))
        plain = torch.zeros(self.names.shape, dtype=self.wide, device="cpu")
        self.logs = (plain if self.represents is None else self.represents.to(self.wide).log()).numpy()

    def matrix(self, x: Tensor) -> Tensor:
        """[B, H, *G, width] -> [R, N, width]"""
        return x.detach().to(self.wide).reshape(self.rows, self.queries, x.shape[-1])

    def head(self, tasks: int) -> Head:
        keys = np.empty((tasks, self.windows.slots), np.int32)
        return Head(self.windows, self.geometry, self.head_lse, keys, self.windows.places(tasks))

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
        return Chunk(rows.start, queries.start, slot, names, drawn, self.logs[rows], self.call.scale, *self.dropout)


def drawn_tail(call: DrawnTailCall) -> DrawnTail:
    tail = TailTensors(call)
    shape = (tail.rows, tail.queries)
    out = torch.empty(*shape, call.v.shape[-1], dtype=tail.wide, device="cpu")
    variance = torch.empty_like(out)
    numbers = [torch.empty(shape, dtype=tail.wide, device="cpu") for _ in range(5)]
    lse, offset, share, seen, left = numbers
    with threads() as tasks:
        head = tail.head(tasks)
        for rows, queries in tail.chunks():
            p = tail.q[rows, queries] @ tail.k[rows].mT
            _weigh(tasks, p.numpy(), tail.chunk(rows, queries), head, call.stratified, tail.total, *map(flat, numbers))
            own, values = share[rows, queries].unsqueeze(-1), tail.v[rows]
            # A head of no key has out 0; what is not there is not multiplied.
            theirs = torch.where(own == 0, 0, own * tail.head_out[rows, queries])
            answer = _mix(p, values, call.causal) + theirs
            out[rows, queries] = answer
            counts = (x[rows, queries].unsqueeze(-1) for x in (seen, left))
            known = call.dropout_seed is None
            variance[rows, queries] = _variance(p, values, answer, *counts) if known else torch.inf
    points = call.q.shape[:-1]
    full = (*points, out.shape[-1])
    return DrawnTail(
        out.to(call.v.dtype).reshape(full), lse.reshape(points), variance.reshape(full), offset.reshape(points),
        *by_heads(call.q, tail.names, tail.represents),
    )  # fmt: skip


def drawn_tail_backward(
    call: DrawnTailCall, offset: Tensor, names: Tensor, represents: Tensor, grad_out: Tensor, grad_lse: Tensor
) -> TailGrads:
    """Gradients of q, k, v, head_out, head_lse from those of out and lse. The keys are drawn again."""
    tail = TailTensors(call)
    wide, shape = tail.wide, (tail.rows, tail.queries)
    d_out = tail.matrix(grad_out)
    d_lse, head_lse = (x.detach().to(wide).reshape(shape) for x in (grad_lse, call.head_lse))
    dq, dk, dv = torch.empty_like(tail.q), torch.zeros_like(tail.k), torch.zeros_like(tail.v)
    to_head = torch.where(head_lse == -torch.inf, 0, (d_out * tail.head_out).sum(-1))
    share, delta = (torch.empty(shape, dtype=wide, device="cpu") for _ in range(2))
    numbers = [flat(x) for x in (offset.to(wide), d_lse, to_head, share, delta)]
    with threads() as tasks:
        head = tail.head(tasks)
        for rows, queries in tail.chunks():
            p = tail.q[rows, queries] @ tail.k[rows].mT
            slopes = d_out[rows, queries] @ tail.v[rows].mT
            _slopes(tasks, p.numpy(), slopes.numpy(), tail.chunk(rows, queries), head, *numbers)
            dq[rows, queries] = _mix(slopes, tail.k[rows], call.causal)
            dk[rows] += _mix(slopes.mT, tail.q[rows, queries], True)
            dv[rows] += p.mT @ d_out[rows, queries]
    at = tail.at.flatten()
    shapes = [(math.prod(x.shape[:-1]), x.shape[-1]) for x in (call.k, call.v)]
    d_k, d_v = (torch.zeros(shape, dtype=wide, device="cpu") for shape in shapes)
    d_k.index_add_(0, at, dk.flatten(0, 1))
    d_v.index_add_(0, at, dv.flatten(0, 1))
    made = TailGrads(dq, d_k, d_v, share.unsqueeze(-1) * d_out, torch.where(share == 0, 0, share * (to_head - delta)))
    given = ((grad, getattr(call, name)) for name, grad in made._asdict().items())
    return TailGrads(*(grad.to(x.dtype).reshape(x.shape) for grad, x in given))


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


@inlined
def _tail_of(all_scores, chunk, head, task, c):
    """The scores of query `c` of the chunk, those of the head's keys set to -inf; and the query as a point.

    Then how many shared keys come up to the query, |S_i|, and how many shared keys are the head's.
    """
    geometry, r, keys = head.geometry, c // all_scores.shape[1], head.keys[task]
    row, query = chunk.row + r, chunk.begin + c - r * all_scores.shape[1]
    scores, point, limit, gone = all_scores[r, query - chunk.begin], row * geometry.queries + query, chunk.drawn[r], 0
    found = expand(head.windows, geometry, row, point, keys, head.places[task])
    if geometry.causal:
        while limit > 0 and chunk.names[r, limit - 1] > query:
            limit -= 1
    for n in range(found):
        at = chunk.slot[r, keys[n]]
        if at >= 0:
            scores[at] = -np.inf
            gone += 1
    return scores, point, limit, found, gone


@inlined
def _add_logs(scores, chunk, r, offset, limit, top):
    """Scaled scores with the logs of what each key represents. Returns the highest, or `top`."""
    logs, scale = chunk.logs[r], scores.dtype.type(chunk.scale)
    for j in range(limit):
        if scores[j] != -np.inf:  # the scale may be 0 in float32, and 0 * -inf is NaN
            scores[j] = scale * scores[j] + (logs[j] + offset)
        top = max(top, scores[j]) if scores[j] == scores[j] else top
    return top


@compiled
def _drop(numbers, chunk, head, point, limit):
    """Dropout: each number of a shared key is 0, NaN too, or grows."""
    number, row = numbers.dtype.type, point // head.geometry.queries
    prefix, names = absorb(chunk.seed[row], point - row * head.geometry.queries), chunk.names[row - chunk.row]
    for j in range(limit):
        kept = absorb(prefix, names[j]) >= chunk.threshold
        numbers[j] = number(numbers[j] * chunk.boost) if kept else number(0)


@parallel
def _weigh(task, tasks, all_scores, chunk, head, stratified, total, lse, offsets, shares, seen, lefts):
    """Scores [R, C, m] become weights; of each point lse, the offset of its logs, and the head's share, [P].

    `seen` takes m_i, the shared keys of its tail, and `lefts` M_i - |S_i|, all keys of its tail.
    """
    size, number = all_scores.shape[0] * all_scores.shape[1], all_scores.dtype.type
    for c in range(size * task // tasks, size * (task + 1) // tasks):
        scores, point, limit, found, gone = _tail_of(all_scores, chunk, head, task, c)
        counted, left, head_lse, offset = limit - gone, total[point] - found, head.lse[point], number(0)
        if not stratified and counted > 0:
            offset = number(math.log(left / counted))
        seen[point], lefts[point], offsets[point] = counted, left, offset
        top = _add_logs(scores, chunk, c // all_scores.shape[1], offset, limit, head_lse)
        if counted == 0 and head_lse == -np.inf:
            scores[:] = 0
            lse[point], shares[point] = -np.inf, 0
            continue
        share = number(math.exp(head_lse - top))
        whole = share
        for j in range(limit):
            scores[j] = math.exp(scores[j] - top)
            whole += scores[j]
        for j in range(limit):
            scores[j] /= whole
        if chunk.threshold:
            _drop(scores, chunk, head, point, limit)
        scores[limit:] = 0
        lse[point], shares[point] = math.log(whole) + top, share / whole


@parallel
def _slopes(task, tasks, all_scores, all_slopes, chunk, head, offset, d_lse, to_head, shares, deltas):
    """Scores become weights, <grad_out, v_j> become d loss / d (q.k), [R, C, m].

    Of each point: `to_head` is <grad_out, head_out>; the head's share and delta, the mean of <grad_out, v_j> less the
    gradient of lse, are written.
    """
    size, number, queries = all_scores.shape[0] * all_scores.shape[1], all_scores.dtype.type, all_scores.shape[1]
    for c in range(size * task // tasks, size * (task + 1) // tasks):
        scores, point, limit, _, _ = _tail_of(all_scores, chunk, head, task, c)
        slopes, head_lse = all_slopes[c // queries, c % queries], head.lse[point]
        if chunk.threshold:
            _drop(slopes, chunk, head, point, limit)
        top = _add_logs(scores, chunk, c // queries, offset[point], limit, head_lse)
        if top == -np.inf:
            top = number(0)  # -inf - -inf is NaN
        # The normaliser is made anew: from lse, rounded, the weights would not add up to 1 where scores are large.
        share = number(math.exp(head_lse - top))
        whole, mean = share, number(0)
        if share != 0:
            mean = share * to_head[point]
        for j in range(limit):
            scores[j] = math.exp(scores[j] - top)
            if scores[j] != 0:  # a head's key has weight 0, and perhaps a NaN in its value
                whole += scores[j]
                mean += scores[j] * slopes[j]
        if whole == 0:
            whole = number(1)
        delta = mean / whole - d_lse[point]
        shares[point], deltas[point] = share / whole, delta
        for j in range(limit):
            scores[j] /= whole
            slopes[j] = number(chunk.scale) * scores[j] * (slopes[j] - delta) if scores[j] != 0 else number(0)
        if chunk.threshold:
            _drop(scores, chunk, head, point, limit)
        scores[limit:] = 0
        slopes[limit:] = 0
