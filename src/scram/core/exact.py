"""The truth: dense attention and brute-force search, in chunks of queries; and the exact union of two results."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from .._compat import recomputed
from ..options import Weight
from ..results import Attended, Matches, check_mergeable
from ..settings import Score
from ..spec.grid import AllowedKeys, coordinates, grid_of, key_row, rows, within
from ..spec.scoring import (
    accumulator,
    check_score,
    check_weight,
    default_scale,
    normalized_weights,
    pair_score,
    prepare_key,
    prepare_query,
)
from . import checks
from .bias import Bias, Pair, widened
from .checks import explains
from .precision import ignores_autocast

CHUNK_ELEMENTS = 1 << 23  # of the score matrix at a time


@explains
@ignores_autocast
def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    score: Score = "dot",
    weight: Weight = "softmax",
    bias: Bias | Pair | None = None,
    queries: Tensor | None = None,
) -> Attended:
    """Dense attention of every query over every allowed key, the truth that SCRAM approximates.

    Never holds an N x M matrix. Differentiable; the backward pass recomputes chunk by chunk. Transforms of `torch.func`
    cannot recompute: they keep all chunks. Under causal order a key that is not finite makes NaN of the queries from it
    on, as its value does of the components; earlier ones keep their bits.

    Args:
        q, k, v: [B, H, *G, E], [B, Hk, *G', E], [B, Hk, *G', F].
        causal, key_mask, scale, score, weight, bias: as in `attention`.
        queries: int64 [n], flat indices of the queries wanted; None for all.

    Returns:
        out [B, H, *G, F] and lse [B, H, *G]; [B, H, n, F] and [B, H, n] where `queries` are given.

    >>> q = k = v = torch.eye(4).reshape(1, 1, 2, 2, 4)
    >>> exact_attention(q, k, v, scale=1.0).lse[0, 0]
    tensor([[1.7437, 1.7437],
            [1.7437, 1.7437]])
    """
    checks.queries_keys(q, k)
    checks.values(q, k, v)
    check_weight(weight)
    checks.scale(scale)
    if bias is not None:
        q, k, wide_v, _, scale = widened(q, k, v, bias, scale=scale, score=score, weight=weight, causal=causal)
        assert wide_v is not None
        v = wide_v
    dense = _Dense(q, k, causal, key_mask, score, queries)
    values = rows(v)  # [B * Hk, M, F]
    factor = default_scale(scale, q.shape[-1], score, weight)

    def chunk(q_rows: Tensor, k_rows: Tensor, values: Tensor, row: int, at: Tensor) -> tuple[Tensor, Tensor]:
        source = dense.key_row(row)
        allowed = dense.allowed(row, at)
        k_row = dense.shown(k_rows[source], row)  # [M, E]
        v_row = dense.shown(values[source], row)  # [M, F]
        if not causal:
            p, lse = normalized_weights(factor * dense.scores(q_rows[row, at], k_row), allowed, weight)
            return p @ v_row.to(p.dtype), lse
        # What is not finite is no factor of a later key's weight of 0: it is put where it belongs afterwards.
        a = dense.scores(q_rows[row, at], finite(k_row))
        a = torch.where(k_row.isfinite().all(-1), a, torch.nan)
        p, lse = normalized_weights(factor * a, allowed, weight)
        spoiled = at.unsqueeze(-1) >= first_not_finite(v_row)  # [C, F]
        return torch.where(spoiled, torch.nan, p @ finite(v_row).to(p.dtype)), lse

    differentiates = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    run = partial(recomputed, chunk) if differentiates else chunk
    parts = [run(dense.q, dense.k, values, row, at) for row, at in dense.chunks()]
    shape = q.shape[:-1] if queries is None else (*q.shape[:2], len(queries))
    if not parts:
        reach = q.sum() + k.sum() + v.sum()  # no element holds it; the gradients are empty, not missing
        lse = q.new_zeros(shape, dtype=accumulator(q.dtype))
        return Attended(v.new_zeros(*shape, v.shape[-1]) + reach, lse + reach)
    out, lse = (torch.cat(part) for part in zip(*parts, strict=True))
    return Attended(out.to(v.dtype).reshape(*shape, v.shape[-1]), lse.reshape(shape))


@explains
@ignores_autocast
@torch.no_grad()
def exact_search(
    q: Tensor,
    k: Tensor,
    *,
    matches: int = 1,
    separation: int = 0,
    causal: bool = False,
    key_mask: Tensor | None = None,
    score: Score = "dot",
    bias: Bias | Pair | None = None,
    scale: float | None = None,
    queries: Tensor | None = None,
) -> Matches:
    """The best keys of every query by brute force: greedily the best, then the best farther than `separation`.

    Ties go to the lower index. `scale` is read beside a bias only. With `queries` (int64 [n]) the result has the query
    grid (n, 1, ..).

    >>> q = k = torch.eye(4).reshape(1, 1, 2, 2, 4)
    >>> exact_search(q, k).index[..., 0]
    tensor([[[[0, 1],
              [2, 3]]]], dtype=torch.int32)
    """
    checks.queries_keys(q, k)
    matches = checks.whole("matches", matches, 1)
    separation = checks.count("separation", separation)
    checks.enough_keys(q, k, matches)
    if bias is not None:
        q, k, *_ = widened(q, k, None, bias, scale=scale, score=score, causal=causal)
    dense = _Dense(q, k, causal, key_mask, score, queries)
    key_grid = grid_of(k)
    place = coordinates(torch.arange(dense.keys, device=q.device), key_grid)
    parts = []
    for row, at in dense.chunks():
        a = dense.scores(dense.q[row, at], dense.k[dense.key_row(row)])
        # Below -inf there is nothing, so that an allowed key of score -inf or NaN still comes before none at all.
        a = torch.where(a.isnan(), -torch.inf, a)
        open_ = dense.allowed(row, at)
        keys = []
        scores = []
        for _ in range(matches):
            some = open_.any(-1)
            masked = a.masked_fill(~open_, -torch.inf)
            key = masked.argmax(-1)
            lowest = open_.int().argmax(-1)  # where all that is open scores -inf
            key = torch.where(open_.gather(-1, key.unsqueeze(-1)).squeeze(-1), key, lowest)
            keys.append(torch.where(some, key, -1))
            scores.append(torch.where(some, masked.gather(-1, key.unsqueeze(-1)).squeeze(-1), -torch.inf))
            center = [c.unsqueeze(-1) for c in coordinates(key, key_grid)]
            open_ = open_ & ~(within(place, center, separation) & some.unsqueeze(-1))
        parts.append((torch.stack(keys, -1), torch.stack(scores, -1)))
    shape = q.shape[:-1] if queries is None else (*q.shape[:2], len(queries), *[1] * (len(key_grid) - 1))
    if not parts:
        nothing = torch.full((*shape, matches), -1, dtype=torch.int32, device=q.device)
        return Matches(nothing, nothing.float(), key_grid)
    index, best = (torch.cat(part) for part in zip(*parts, strict=True))
    return Matches(index.to(torch.int32).reshape(*shape, matches), best.float().reshape(*shape, matches), key_grid)


def finite(x: Tensor) -> Tensor:
    """x with zeros for what is not finite."""
    return torch.where(x.isfinite(), x, 0)


def first_not_finite(x: Tensor) -> Tensor:
    """x [.., M, width] -> int64 [.., width], the first place that is not finite in each column; M where all are."""
    place = torch.arange(x.shape[-2], device=x.device).unsqueeze(-1)  # [M, 1]
    return torch.where(x.isfinite(), x.shape[-2], place).amin(-2)


def merge(a: Attended, b: Attended) -> Attended:
    """The exact attention over the union of two disjoint key sets, from the results over each.

    >>> one = Attended(torch.tensor([[1.0]]), torch.tensor([0.0]))
    >>> merge(one, Attended(torch.tensor([[4.0]]), torch.tensor([0.0]))).out
    tensor([[2.5000]])
    """
    check_mergeable(a, b)
    top = torch.maximum(a.lse, b.lse).detach()
    top = torch.where(top == -torch.inf, 0, top)  # -inf - -inf is NaN
    mass_a = (a.lse - top).exp()
    mass_b = (b.lse - top).exp()
    total = mass_a + mass_b
    empty = total == 0
    safe = torch.where(empty, 1, total)
    out = (mass_a / safe).unsqueeze(-1) * a.out + (mass_b / safe).unsqueeze(-1) * b.out
    return Attended(out.to(a.out.dtype), torch.where(empty, -torch.inf, safe.log() + top))


class _Dense:
    """Chunks of the score matrix: some queries of one row against all its keys."""

    def __init__(
        self, q: Tensor, k: Tensor, causal: bool, key_mask: Tensor | None, score: Score, queries: Tensor | None
    ) -> None:
        checks.order(q, k, causal)
        checks.key_mask(q, k, key_mask)
        check_score(score)
        points = math.prod(grid_of(q))
        checks.query_sample(queries, points)
        self.keys = math.prod(grid_of(k))
        self.heads = q.shape[1]
        self.key_heads = k.shape[1]
        self.score = score
        self.wanted = torch.arange(points, device=q.device) if queries is None else queries.to(q.device)
        self.allowed_keys = AllowedKeys.of(q, k, causal, key_mask)
        self.q = rows(prepare_query(q, score))  # [B * H, N, E]
        self.k = rows(prepare_key(k, score))  # [B * Hk, M, E]

    def chunks(self) -> Iterator[tuple[int, Tensor]]:
        width = self.q.shape[-1] if callable(self.score) else 1
        size = max(1, CHUNK_ELEMENTS // (self.keys * width))
        for row in range(self.q.shape[0]):
            yield from ((row, self.wanted[begin : begin + size]) for begin in range(0, len(self.wanted), size))

    def key_row(self, row: int) -> int:
        return int(key_row(torch.tensor(row, dtype=torch.int64, device="cpu"), self.heads, self.key_heads))

    def allowed(self, row: int, at: Tensor) -> Tensor:
        everywhere = torch.arange(self.keys, device=at.device).expand(len(at), -1)
        return self.allowed_keys.allows(torch.full_like(at, row).unsqueeze(-1), at.unsqueeze(-1), everywhere)

    def shown(self, x: Tensor, row: int) -> Tensor:
        """Keys or values [M, width] of a row with the masked ones zeroed: 0 * NaN is NaN."""
        mask = self.allowed_keys.mask
        return x if mask is None else torch.where(mask[row // self.allowed_keys.heads_per_row].unsqueeze(-1), x, 0)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """q [C, E] and k [M, E] -> [C, M]."""
        if callable(self.score):
            return pair_score(q.unsqueeze(1), k.unsqueeze(0), self.score)
        wide = accumulator(q.dtype)
        return q.to(wide) @ k.to(wide).T
