"""Keys grouped by content: k-means in the metric that matters to the queries and the values, in plain torch.

The distance of a key and value (k, v) from a center (c, w) is E[(scale <q, k - c>)^2] + weight |v - w|^2: how far the
scores of the queries are off, and the value. A query whose scores have the variance s counts as q / sqrt(1 + s): much
of sharp attention is the part of windows and routed keys. The weight makes the second spread VALUE_WEIGHT times the
first. Both are quadratic, so that the nearest center is the one with the largest <k, a> + <v, b> + bias for some a, b
and bias of each center (`LinearForms`). Steps start at keys that are drawn evenly for the most part, the others in
proportion to the attention that a few queries pay them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.calls import ClusterCall, Clustered, ClusterGrads
from .grid import rows
from .noise import below, noise
from .scoring import accumulator

# Errors below are geometric means over 17 heads, one match (docs/measurements.md, section 13).
SAMPLED_KEYS = 8192  # of a row, that the steps read; the last assignment reads all: 2 % more error than all keys
SAMPLED_QUERIES = 1024  # of a key head, for the metric: 1 % more error than 4096
VALUE_WEIGHT = 0.3  # spread of the values to that of the scores: error .050; .1 and 1 have .052
START_QUERIES = 32  # of a key head, whose attention says where some steps start; 256 gain nothing
START_MOST = 1 / 64  # that a query's attention to one key counts there
START_EVEN = 3.0  # that all keys have in equal parts there, beside the attention of a query, which sums to 1 at most
CHUNK_ELEMENTS = 1 << 22  # of the scores of keys and centers at a time


def cluster(call: ClusterCall) -> Clustered:
    """The clusters of every row of keys, differentiable in k and v given the labels."""
    k = call.k
    v = call.v
    key_rows = k.shape[0] * k.shape[1]
    wide = accumulator(v.dtype)
    keys = math.prod(k.shape[2:-1])
    k_rows = rows(k).to(wide)  # [B*Hk, M, E]
    v_rows = rows(v).to(wide)  # [B*Hk, M, F]
    with torch.no_grad():
        usable = usable_keys(call, k_rows, v_rows)  # [B*Hk, M]
        label = torch.where(usable, torch.arange(keys, device=k.device), -1)
        metric = k_rows.new_zeros(key_rows, k.shape[-1])  # [B*Hk, E]
        if call.clusters < keys and key_rows:
            parts = [labels_of(call, row, k_rows[row], v_rows[row], usable[row]) for row in range(key_rows)]
            label, metric = (torch.stack(part) for part in zip(*parts, strict=True))
    centers, values, sizes = means(k_rows, v_rows, label, call.clusters)
    slope, variance, spreads = moments(k_rows, v_rows, label, centers, values, sizes, metric)
    int_label = label.to(torch.int32).reshape(k.shape[:-1])
    heads = k.shape[:2]

    def by_head(x: Tensor) -> Tensor:
        return x.reshape(*heads, *x.shape[1:]).contiguous()  # centers and values are parts of one tensor

    return Clustered(
        centers=by_head(centers),
        values=by_head(values),
        slope=by_head(slope),
        sizes=by_head(sizes.to(torch.int32)),
        label=int_label,
        order=order_of(int_label),
        variance=by_head(variance),
        spreads=by_head(spreads),
    )


def order_of(label: Tensor) -> Tensor:
    """The keys by label, ascending, those without one last: int32 [B, Hc, *G'] -> int32 [B, Hc, M]."""
    last = torch.iinfo(torch.int32).max
    flat_label = label.flatten(2)
    return torch.where(flat_label < 0, last, flat_label).argsort(dim=-1, stable=True).to(torch.int32)


def moments(
    k_rows: Tensor, v_rows: Tensor, label: Tensor, centers: Tensor, values: Tensor, sizes: Tensor, metric: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """How keys lie around their centers: slope [R, E, F], variance [R, E] and spreads [R, C] of `Clustered`.

    Args:
        k_rows, v_rows: [R, M, E], [R, M, F].
        label: int64 [R, M], -1 for none.
        centers, values, sizes: [R, C, E], [R, C, F], [R, C].
        metric: [R, E], what the squared distance of a score counts on each axis.
    """
    row = torch.arange(len(label), device=label.device).unsqueeze(1)
    has_label = (label >= 0).unsqueeze(-1)
    name = label.clamp(min=0)
    k_apart = torch.where(has_label, k_rows, 0) - torch.where(has_label, centers[row, name], 0)  # [R, M, E]
    v_apart = torch.where(has_label, v_rows, 0) - torch.where(has_label, values[row, name], 0)  # [R, M, F]
    number = (label >= 0).sum(1).clamp(min=1)  # [R]
    slope = k_apart.mT @ v_apart / number.reshape(-1, 1, 1)
    with torch.no_grad():
        square = k_apart.square()  # [R, M, E]
        variance = square.sum(1) / number.unsqueeze(1)  # [R, E]
        each = (square @ metric.unsqueeze(-1)).squeeze(-1)  # [R, M]
        sums = torch.zeros_like(centers[..., 0]).scatter_add(1, name, each)  # [R, C]
        mean = each.sum(1, keepdim=True) / number.unsqueeze(1)  # [R, 1]
        spreads = torch.where(mean > 0, sums / sizes.clamp(min=1) / torch.where(mean > 0, mean, 1), 0)
    return slope, variance, spreads


def cluster_backward(
    call: ClusterCall,
    centers: Tensor,
    values: Tensor,
    sizes: Tensor,
    label: Tensor,
    grad_centers: Tensor,
    grad_values: Tensor,
    grad_slope: Tensor,
) -> ClusterGrads:
    """A key has 1 / size of the gradient of its cluster, and its part of the slope; one in no cluster has none."""
    wide = centers.dtype
    flat_label = label.flatten(0, 1).flatten(1)  # [R, M]
    has_label = (flat_label >= 0).unsqueeze(-1)
    row = torch.arange(flat_label.shape[0], device=label.device).unsqueeze(1)
    name = flat_label.clamp(min=0).long()
    share = sizes.flatten(0, 1).clamp(min=1).unsqueeze(-1)  # [R, C, 1]
    number = (flat_label >= 0).sum(1).clamp(min=1).reshape(-1, 1, 1)  # [R, 1, 1]
    d_slope = grad_slope.flatten(0, 1) / number  # [R, E, F]

    def spread(x: Tensor, grad: Tensor, other: Tensor, other_mean: Tensor, d_other: Tensor) -> Tensor:
        each = (grad.flatten(0, 1) / share)[row, name]  # [R, M, width]
        apart = torch.where(has_label, rows(other).to(wide) - other_mean.flatten(0, 1)[row, name], 0)
        return torch.where(has_label, each + apart @ d_other, 0).to(x.dtype).reshape(x.shape)

    return ClusterGrads(
        spread(call.k, grad_centers, call.v, values, d_slope.mT), spread(call.v, grad_values, call.k, centers, d_slope)
    )


def usable_keys(call: ClusterCall, k_rows: Tensor, v_rows: Tensor) -> Tensor:
    """Keys that belong to a cluster, bool [key rows, M]: not masked, and all of the key and of the value finite."""
    finite = k_rows.isfinite().all(-1) & v_rows.isfinite().all(-1)
    if call.key_mask is None:
        return finite
    shared = call.key_mask.ndim == call.k.ndim - 2
    mask = call.key_mask.unsqueeze(1).expand(call.k.shape[:-1]) if shared else call.key_mask
    return finite & mask.reshape(finite.shape)


def means(k_rows: Tensor, v_rows: Tensor, label: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean key [R, C, E], mean value [R, C, F] and number of keys [R, C] of each label [R, M], -1 for none."""
    number = len(label)
    width = k_rows.shape[-1]
    joint = torch.where((label >= 0).unsqueeze(-1), torch.cat([k_rows, v_rows], -1), 0)  # [R, M, E + F]
    row = torch.arange(number, device=label.device).unsqueeze(1)
    at = (row * count + label.clamp(min=0)).flatten()
    sums = joint.new_zeros(number * count, joint.shape[-1]).index_add(0, at, joint.flatten(0, 1))
    sizes = at.new_zeros(number * count).index_add(0, at, (label >= 0).flatten().long())
    both = (sums / sizes.clamp(min=1).unsqueeze(-1)).reshape(number, count, joint.shape[-1])
    return both[..., :width], both[..., width:], sizes.reshape(number, count)


def labels_of(call: ClusterCall, row: int, k: Tensor, v: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
    """The cluster of each key of one row, keys [M, E] and values [M, F]: int64 [M], -1 for a key that is not usable.

    And what a squared distance counts on each axis of the keys [E].
    """
    k, v = (torch.where(usable.unsqueeze(-1), x, 0) for x in (k, v))
    start = Start.of(call, row, k, v, usable)
    centers = start.centers
    values = start.values
    sizes = torch.ones_like(centers[:, 0], dtype=torch.int64)
    for step in range(call.steps):
        best, score = nearest(start.space.forms(centers, values, sizes), start.k, start.v)
        centers, values, sizes = (x[0] for x in means(start.k[None], start.v[None], best[None], call.clusters))
        centers, values, sizes = start.placed_anew(call, step, score, centers, values, sizes)
    best, _ = nearest(start.space.forms(centers, values, sizes), k, v)
    return torch.where(usable, best, -1), start.space.metric.diagonal()


def metric_of(call: ClusterCall) -> Tensor:
    """What a squared distance counts on each axis of the keys of every row, [B, Hk, E]: `spreads` are measured so."""
    wide = accumulator(call.v.dtype)
    k_rows = rows(call.k).to(wide)  # [R, M, E]
    v_rows = rows(call.v).to(wide)  # [R, M, F]
    usable = usable_keys(call, k_rows, v_rows)  # [R, M]
    metric = k_rows.new_zeros(len(k_rows), k_rows.shape[-1])
    for row in range(len(metric)):
        k, v = (torch.where(usable[row].unsqueeze(-1), x[row], 0) for x in (k_rows, v_rows))
        metric[row] = Start.of(call, row, k, v, usable[row]).space.metric.diagonal()
    return metric.reshape(*call.k.shape[:2], metric.shape[-1])


class Start(NamedTuple):
    """Where k-means of a row starts."""

    space: Space
    k: Tensor  # [S, E], keys of the sample; 0 for one that is not finite
    v: Tensor  # [S, F]
    centers: Tensor  # [C, E]
    values: Tensor  # [C, F]
    noise_row: Tensor | int  # the number of the first row of queries that reads the row of keys

    @staticmethod
    def of(call: ClusterCall, row: int, k: Tensor, v: Tensor, usable: Tensor | None) -> Start:
        """From keys [M, E], values [M, F] and which of them are usable [M]; None: all that are finite."""
        first = noise_row(call, row)
        number = min(len(k), max(SAMPLED_KEYS, call.clusters))
        total = torch.tensor(len(k), dtype=torch.int64, device=k.device) if usable is None else usable.sum()
        some = strides(call.seed, first, 0, number, total)
        if usable is not None:
            place = torch.where(usable, usable.long().cumsum(0) - 1, len(usable))
            order = torch.zeros(len(usable) + 1, dtype=torch.int64, device=k.device)
            some = order.scatter(0, place, torch.arange(len(usable), device=k.device))[some]  # the usable keys first
        k_some = k[some]  # [S, E]
        v_some = v[some]  # [S, F]
        q_some = queries_of(call, row).to(k)
        finite = (k_some.sum(-1, keepdim=True) + v_some.sum(-1, keepdim=True)).isfinite()  # or too large to add
        k_some = torch.where(finite, k_some, 0)
        v_some = torch.where(finite, v_some, 0)
        space = Space.of(call.scale * q_some, k_some, v_some)
        if call.warm_centers is not None and call.warm_values is not None:
            centers, values = (x.flatten(0, 1)[row].to(k) for x in (call.warm_centers, call.warm_values))
            return Start(space, k_some, v_some, centers, values, first)
        queries = torch.tensor(len(q_some), dtype=torch.int64, device=k.device)
        at = strides(call.seed, first, 3, min(START_QUERIES, len(q_some)), queries)
        rate = attention_paid(call.scale * q_some[at], k_some)
        new = some != some.roll(1)  # a key of several parts, where keys are few, has one rate
        rate = torch.where(new & finite.squeeze(-1), rate, 0)
        at = drawn(noise(call.seed, first, 1, torch.arange(number, device=k.device)), rate)[: call.clusters]
        return Start(space, k_some, v_some, k_some[at], v_some[at], first)

    def placed_anew(
        self, call: ClusterCall, step: int, score: Tensor, centers: Tensor, values: Tensor, sizes: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Clusters without keys start at keys drawn in proportion to their squared distances from their centers.

        `score`: the form of each key of the sample with its center [S].
        """
        spread = self.space.spread(self.k, self.v)
        distance = (spread - 2 * score).clamp(min=0)  # [S]
        far = distance > 1e-6 * spread.mean()
        bits = noise(call.seed, self.noise_row, 4 + step, torch.arange(len(score), device=score.device))
        place = drawn(bits, torch.where(far, distance, 0))
        turn = (sizes == 0).long().cumsum(0) - 1  # [C], the number of each empty cluster
        anew = (sizes == 0) & (turn < far.sum())
        at = place[turn.clamp(min=0, max=len(score) - 1)]
        centers = torch.where(anew.unsqueeze(-1), self.k[at], centers)
        values = torch.where(anew.unsqueeze(-1), self.v[at], values)
        return centers, values, torch.where(anew, 1, sizes)


def noise_row(call: ClusterCall, row: int) -> Tensor | int:
    """What the noise of a row of keys is keyed by: the number of the first row of queries that reads it."""
    first = row * (call.q.shape[1] // call.k.shape[1])
    return first if call.rows is None else call.rows.flatten()[first]


def queries_of(call: ClusterCall, row: int) -> Tensor:
    """Some queries [S, E] of those that read a row of keys; 0 in place of one that is not finite."""
    heads_each = call.q.shape[1] // call.k.shape[1]
    q = rows(call.q)[row * heads_each : (row + 1) * heads_each].flatten(0, 1)
    total = torch.tensor(len(q), dtype=torch.int64, device=q.device)
    q = q[strides(call.seed, noise_row(call, row), 2, min(SAMPLED_QUERIES, len(q)), total)]
    return torch.where(q.isfinite().all(-1, keepdim=True), q, 0)


def attention_paid(q: Tensor, k: Tensor) -> Tensor:
    """Attention that queries [Q, E], times scale, pay each key [S, E] on average, and an even part: [S]."""
    paid = (q @ k.T).softmax(-1).clamp(max=START_MOST)
    return paid.sum(0) / max(len(q), 1) + START_EVEN / len(k)


def drawn(bits: Tensor, rate: Tensor) -> Tensor:
    """All places in the order of draws in proportion to `rate` without repetition; those of rate 0 come last.

    Each has a clock, exponential with its rate, from 32 random bits; the first to ring is the first drawn.
    """
    clock = -((bits.float() + 0.5) / 2**32).log().to(rate) / torch.where(rate > 0, rate, 1)
    return torch.where(rate > 0, clock, torch.inf).argsort()


def strides(seed: Tensor, row: Tensor | int, draw: int, number: int, total: Tensor) -> Tensor:
    """`number` places in 0..total-1, one drawn from each of as many equal parts; where there are fewer, all of them."""
    part = torch.arange(number, device=total.device)
    begin = part * total // number
    end = (part + 1) * total // number
    return begin + below(noise(seed, row, draw, part), (end - begin).clamp(min=1))


class LinearForms(NamedTuple):
    """The nearest center of (k, v) is the one with the largest <k, a> + <v, b> + bias."""

    a: Tensor  # [C, E]
    b: Tensor  # [C, F]
    bias: Tensor  # [C], -inf for a cluster that takes no key


class Space(NamedTuple):
    """Where distances are measured, around the means of keys and values."""

    metric: Tensor  # [E, E], E[q q^T] of the weighted queries
    value_weight: Tensor  # []
    k_mean: Tensor  # [E]
    v_mean: Tensor  # [F]

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor) -> Space:
        """The space of a row of keys, from some queries [Q, E], times scale, keys [S, E] and values [S, F]."""
        k_mean = k.mean(0)
        v_mean = v.mean(0)
        covariance = (k - k_mean).T @ (k - k_mean) / len(k)  # [E, E]
        q = q / (1 + ((q @ covariance) * q).sum(-1, keepdim=True).clamp(min=0)).sqrt()
        metric = q.T @ q / max(len(q), 1)
        spread = (metric * covariance).sum()
        variance = (v - v_mean).square().sum(-1).mean()
        share = torch.where(spread > 0, VALUE_WEIGHT * spread, 1)  # values alone where all scores are equal
        weight = share / variance
        usable = (variance > 0) & weight.isfinite()  # values near the least number have no part
        return Space(metric, torch.where(usable, weight, 0), k_mean, v_mean)

    def forms(self, centers: Tensor, values: Tensor, sizes: Tensor) -> LinearForms:
        k = centers - self.k_mean
        v = values - self.v_mean
        a = k @ self.metric
        b = self.value_weight * v
        bias = -a @ self.k_mean - b @ self.v_mean - (a * k).sum(-1) / 2 - (b * v).sum(-1) / 2
        return LinearForms(a, b, torch.where(sizes > 0, bias, -torch.inf))

    def spread(self, k: Tensor, v: Tensor) -> Tensor:
        """Squared distance of keys and values from their means."""
        k = k - self.k_mean
        v = v - self.v_mean
        return ((k @ self.metric) * k).sum(-1) + self.value_weight * v.square().sum(-1)


def nearest(forms: LinearForms, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest center of keys [S, E] and values [S, F], int64 [S], and its form [S]."""
    size = max(1, CHUNK_ELEMENTS // len(forms.bias))
    chunks = []
    for begin in range(0, len(k), size):
        some = slice(begin, begin + size)
        score, best = (k[some] @ forms.a.T + v[some] @ forms.b.T + forms.bias).max(-1)
        chunks.append((best, score))
    best, score = (torch.cat(part) for part in zip(*chunks, strict=True))
    return best, score
