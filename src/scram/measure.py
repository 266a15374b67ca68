"""How good a search or an attention was: one definition for tests, benchmarks and figures.

Each function compares with the exact answer, for all queries or for `sample` of them drawn with `seed`, and returns
one number per batch and head, [B, H]. Queries without a legal key are left out.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import errors
from .exact import exact_attention, exact_search
from .grid import AllowedKeys, coordinates, grid_of, key_row, rows, within
from .options import Weight
from .scoring import accumulator, default_scale, pair_score, prepare_key, prepare_query
from .types import Attended, Matches, Score, check_attended, check_matches

RECALL_TOLERANCE = 1e-5


def sample_queries(q: Tensor, sample: int | None, seed: int = 0) -> Tensor:
    """Flat indices of `sample` queries of q [B, H, *G, E], ascending, without repetition; all for None.

    >>> sample_queries(torch.zeros(1, 1, 10, 4), 3)
    tensor([1, 4, 7])
    """
    points = math.prod(grid_of(q))
    if sample is None or errors.whole("sample", sample, 1) >= points:
        return torch.arange(points, device=q.device)
    generator = torch.Generator().manual_seed(errors.whole("seed", seed, 0))
    drawn = torch.randperm(points, generator=generator, device="cpu")[:sample]
    return drawn.sort().values.to(q.device)


@torch.no_grad()
def recall(
    q: Tensor,
    k: Tensor,
    matches: Matches,
    *,
    separation: int = 0,
    causal: bool = False,
    key_mask: Tensor | None = None,
    score: Score = "dot",
    sample: int | None = None,
    seed: int = 0,
) -> Tensor:
    """How many of the best keys were found.

    separation 0: the share of the kappa keys whose score reaches the exact kappa-th best, less 1e-5 relative.
    More: the share of the exact modes with a returned key within `separation`.

    >>> q = k = torch.eye(4).reshape(1, 1, 2, 2, 4)
    >>> recall(q, k, exact_search(q, k))
    tensor([[1.]])
    """
    how: dict[str, Any] = {"separation": separation, "causal": causal, "key_mask": key_mask, "score": score}
    each = recall_of_each(q, k, matches, sample=sample, seed=seed, **how)
    return _mean(each, ~each.isnan())


@torch.no_grad()
def recall_of_each(
    q: Tensor, k: Tensor, matches: Matches, *, separation: int = 0, sample: int | None = None, seed: int = 0, **how: Any
) -> Tensor:
    """As `recall`, with its arguments, of each query: [B, H, n]; NaN without a legal key.

    >>> q = k = torch.eye(4).reshape(1, 1, 2, 2, 4)
    >>> recall_of_each(q, k, exact_search(q, k))
    tensor([[[1., 1., 1., 1.]]])
    """
    pairs = _Pairs(q, k, matches, separation, sample, seed, **how)
    if separation > 0:
        exact, found = (coordinates(x.clamp(0), pairs.key_grid) for x in (pairs.exact_key, pairs.found_key))
        near = within([c.unsqueeze(-1) for c in exact], [c.unsqueeze(-2) for c in found], separation)
        hit = (near & (pairs.found_key >= 0).unsqueeze(-2)).any(-1) & (pairs.exact_key >= 0)
    else:
        worst = pairs.exact_score.masked_fill(pairs.exact_key < 0, torch.inf).amin(-1, keepdim=True)
        reached = pairs.found_score >= worst - RECALL_TOLERANCE * worst.abs()
        same = pairs.found_key.unsqueeze(-1) == pairs.found_key.unsqueeze(-2)
        repeated = same.tril(-1).any(-1)
        hit = reached & (pairs.found_key >= 0) & ~repeated
    wanted = (pairs.exact_key >= 0).sum(-1)
    return torch.where(wanted > 0, hit.sum(-1, dtype=torch.float32) / wanted.clamp(min=1), torch.nan)


@torch.no_grad()
def score_gap(
    q: Tensor,
    k: Tensor,
    matches: Matches,
    *,
    scale: float | None = None,
    separation: int = 0,
    causal: bool = False,
    key_mask: Tensor | None = None,
    score: Score = "dot",
    sample: int | None = None,
    seed: int = 0,
) -> Tensor:
    """By how much the found scores fall short of the exact ones of the same rank, in nats: mean of scale * difference.

    Ranks at which either has no key are left out.

    >>> q = k = torch.eye(4).reshape(1, 1, 2, 2, 4)
    >>> score_gap(q, k, exact_search(q, k))
    tensor([[0.]])
    """
    errors.scale(scale)
    pairs = _Pairs(q, k, matches, separation, sample, seed, causal=causal, key_mask=key_mask, score=score)
    both = (pairs.exact_key >= 0) & (pairs.found_key >= 0)
    gap = torch.where(both, pairs.exact_score - pairs.found_score, 0)
    factor = default_scale(scale, q.shape[-1], score, "softmax")
    return _mean((factor * gap).flatten(2), both.flatten(2))


@torch.no_grad()
def captured_mass(
    q: Tensor,
    k: Tensor,
    attended: Attended,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    score: Score = "dot",
    sample: int | None = None,
    seed: int = 0,
) -> Tensor:
    """The share of the exact softmax that the attended keys hold: mean of exp(lse_S - lse_all).

    `attended` must come from weight="softmax" and no extra keys: they are not in the exact softmax over the grid.

    >>> q = k = torch.eye(4).reshape(1, 1, 2, 2, 4)
    >>> captured_mass(q, k, exact_attention(q, k, k))
    tensor([[1.]])
    """
    errors.queries_keys(q, k)
    check_attended("attended", q, attended)
    wanted = sample_queries(q, sample, seed)
    how: dict[str, Any] = {"causal": causal, "key_mask": key_mask, "scale": scale, "score": score}
    truth = exact_attention(q, k, k[..., :1], queries=wanted, **how)
    lse = attended.lse.flatten(2)[..., wanted]
    return _mean((lse - truth.lse).exp(), truth.lse > -torch.inf)


@torch.no_grad()
def output_error(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attended: Attended,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    score: Score = "dot",
    weight: Weight = "softmax",
    sample: int | None = None,
    seed: int = 0,
) -> Tensor:
    """||out - exact|| / ||exact|| over the queries of a head.

    >>> q = k = torch.eye(4).reshape(1, 1, 2, 2, 4)
    >>> output_error(q, k, k, exact_attention(q, k, k))
    tensor([[0.]])
    """
    errors.queries_keys(q, k)
    errors.values(q, k, v)
    check_attended("attended", q, attended, v.shape[-1])
    wanted = sample_queries(q, sample, seed)
    how: dict[str, Any] = {"causal": causal, "key_mask": key_mask, "scale": scale, "score": score}
    truth = exact_attention(q, k, v, weight=weight, queries=wanted, **how)
    outs = (attended.out.flatten(2, -2)[:, :, wanted], truth.out)
    some = (truth.lse > -torch.inf).unsqueeze(-1)
    found, exact = (torch.where(some, out.to(accumulator(q.dtype)), 0).flatten(2) for out in outs)
    distance, size = (x.square().sum(-1).sqrt() for x in (found - exact, exact))
    return distance / size


def _mean(x: Tensor, counted: Tensor) -> Tensor:
    """[B, H, n] -> [B, H], over what is counted; NaN where nothing is."""
    return torch.where(counted, x, 0).sum(-1) / counted.sum(-1)


class _Pairs:
    """Exact and found keys of the sampled queries, [B, H, n, kappa], with their exact scores."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        matches: Matches,
        separation: int,
        sample: int | None,
        seed: int,
        causal: bool = False,
        key_mask: Tensor | None = None,
        score: Score = "dot",
    ) -> None:
        errors.queries_keys(q, k)
        check_matches("matches", q, k, matches)
        wanted = sample_queries(q, sample, seed)
        kappa, self.key_grid = matches.index.shape[-1], matches.key_grid
        how: dict[str, Any] = {"causal": causal, "key_mask": key_mask, "score": score, "queries": wanted}
        exact = exact_search(q, k, matches=kappa, separation=separation, **how)
        shape = (*q.shape[:2], len(wanted), kappa)
        self.exact_key = exact.index.reshape(shape).long()
        q_rows, k_rows = rows(prepare_query(q, score)), rows(prepare_key(k, score))
        row = torch.arange(q_rows.shape[0], device=q.device)
        found = matches.index.flatten(2, -2)[:, :, wanted].long()
        on_grid = found.clamp(0, math.prod(self.key_grid) - 1)
        legal = AllowedKeys.of(q, k, causal, key_mask)
        allowed = legal.allows(row.reshape(*q.shape[:2], 1, 1), wanted.unsqueeze(-1), on_grid)
        self.found_key = torch.where((found == on_grid) & allowed, found, -1)  # off the grid or illegal is none
        source = key_row(row, q.shape[1], k.shape[1]).reshape(-1, 1, 1)

        def scores(key: Tensor) -> Tensor:
            chosen = key.clamp(0).reshape(len(row), len(wanted), kappa)
            parts = (slice(at, at + 1024) for at in range(0, len(wanted), 1024))
            found = [pair_score(q_rows[:, wanted[at], None], k_rows[source, chosen[:, at]], score) for at in parts]
            return torch.cat(found, 1).reshape(shape)

        self.exact_score, self.found_score = scores(self.exact_key), scores(self.found_key)
