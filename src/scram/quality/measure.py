"""How good a search or an attention was: one definition for tests, benchmarks and figures.

Each function compares with the exact answer, for all queries or `num_queries` of them drawn with `seed`, and returns
one number per batch and head, [B, H]. Queries without an allowed key are left out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core import checks
from ..core.exact import exact_attention, exact_search
from ..options import Weight
from ..results import Attended, Matches, check_attended, check_matches
from ..settings import Score
from ..spec.grid import AllowedKeys, coordinates, grid_of, key_row, rows, within
from ..spec.scoring import accumulator, default_scale, pair_score, prepare_key, prepare_query

RECALL_TOLERANCE = 1e-5


def sample_queries(q: Tensor, num_queries: int | None, seed: int = 0) -> Tensor:
    """Flat indices of `num_queries` queries of q [B, H, *G, E], ascending, without repetition; all for None.

    >>> sample_queries(torch.zeros(1, 1, 10, 4), 3)
    tensor([1, 4, 7])
    """
    points = math.prod(grid_of(q))
    if num_queries is None or checks.whole("num_queries", num_queries, 1) >= points:
        return torch.arange(points, device=q.device)
    generator = torch.Generator().manual_seed(checks.whole("seed", seed, 0))
    drawn = torch.randperm(points, generator=generator, device="cpu")[:num_queries]
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
    num_queries: int | None = None,
    seed: int = 0,
) -> Tensor:
    """How many of the best keys were found.

    separation 0: the share of the kappa keys whose score reaches the exact kappa-th best, less 1e-5 relative.
    More: the share of the exact modes with a returned key within `separation`.

    >>> q = k = torch.eye(4).reshape(1, 1, 2, 2, 4)
    >>> recall(q, k, exact_search(q, k))
    tensor([[1.]])
    """
    each = recall_of_each(
        q,
        k,
        matches,
        separation=separation,
        causal=causal,
        key_mask=key_mask,
        score=score,
        num_queries=num_queries,
        seed=seed,
    )
    return _mean(each, ~each.isnan())


@torch.no_grad()
def recall_of_each(
    q: Tensor,
    k: Tensor,
    matches: Matches,
    *,
    separation: int = 0,
    causal: bool = False,
    key_mask: Tensor | None = None,
    score: Score = "dot",
    num_queries: int | None = None,
    seed: int = 0,
) -> Tensor:
    """As `recall`, with its arguments, of each query: [B, H, n]; NaN without an allowed key.

    >>> q = k = torch.eye(4).reshape(1, 1, 2, 2, 4)
    >>> recall_of_each(q, k, exact_search(q, k))
    tensor([[[1., 1., 1., 1.]]])
    """
    pairs = _Pairs(q, k, matches, separation, num_queries, seed, causal=causal, key_mask=key_mask, score=score)
    if separation > 0:
        exact_place = coordinates(pairs.exact_key.clamp(0), pairs.key_grid)
        found_place = coordinates(pairs.found_key.clamp(0), pairs.key_grid)
        near = within([c.unsqueeze(-1) for c in exact_place], [c.unsqueeze(-2) for c in found_place], separation)
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
    num_queries: int | None = None,
    seed: int = 0,
) -> Tensor:
    """By how much the found scores fall short of the exact ones of the same rank, in nats: mean of scale * difference.

    Ranks at which either has no key are left out.

    >>> q = k = torch.eye(4).reshape(1, 1, 2, 2, 4)
    >>> score_gap(q, k, exact_search(q, k))
    tensor([[0.]])
    """
    checks.scale(scale)
    pairs = _Pairs(q, k, matches, separation, num_queries, seed, causal=causal, key_mask=key_mask, score=score)
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
    num_queries: int | None = None,
    seed: int = 0,
) -> Tensor:
    """The share of the exact softmax that the attended keys hold: mean of exp(lse_S - lse_all).

    `attended` must come from weight="softmax" and no extra keys: they are not in the exact softmax over the grid.

    >>> q = k = torch.eye(4).reshape(1, 1, 2, 2, 4)
    >>> captured_mass(q, k, exact_attention(q, k, k))
    tensor([[1.]])
    """
    checks.queries_keys(q, k)
    check_attended("attended", q, attended)
    wanted = sample_queries(q, num_queries, seed)
    truth = exact_attention(
        q, k, k[..., :1], causal=causal, key_mask=key_mask, scale=scale, score=score, queries=wanted
    )
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
    num_queries: int | None = None,
    seed: int = 0,
) -> Tensor:
    """||out - exact|| / ||exact|| over the queries of a head.

    >>> q = k = torch.eye(4).reshape(1, 1, 2, 2, 4)
    >>> output_error(q, k, k, exact_attention(q, k, k))
    tensor([[0.]])
    """
    checks.queries_keys(q, k)
    checks.values(q, k, v)
    check_attended("attended", q, attended, v.shape[-1])
    wanted = sample_queries(q, num_queries, seed)
    truth = exact_attention(
        q, k, v, causal=causal, key_mask=key_mask, scale=scale, score=score, weight=weight, queries=wanted
    )
    wide = accumulator(q.dtype)
    has_key = (truth.lse > -torch.inf).unsqueeze(-1)  # [B, H, n, 1]
    sampled = attended.out.flatten(2, -2)[:, :, wanted]  # [B, H, n, F]
    out = torch.where(has_key, sampled.to(wide), 0).flatten(2)
    exact = torch.where(has_key, truth.out.to(wide), 0).flatten(2)
    distance = (out - exact).square().sum(-1).sqrt()
    size = exact.square().sum(-1).sqrt()
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
        num_queries: int | None,
        seed: int,
        causal: bool = False,
        key_mask: Tensor | None = None,
        score: Score = "dot",
    ) -> None:
        checks.queries_keys(q, k)
        check_matches("matches", q, k, matches)
        wanted = sample_queries(q, num_queries, seed)
        kappa = matches.index.shape[-1]
        self.key_grid = matches.key_grid
        exact = exact_search(
            q,
            k,
            matches=kappa,
            separation=separation,
            causal=causal,
            key_mask=key_mask,
            score=score,
            queries=wanted,
        )
        shape = (*q.shape[:2], len(wanted), kappa)
        self.exact_key = exact.index.reshape(shape).long()
        q_rows = rows(prepare_query(q, score))  # [B * H, N, E]
        k_rows = rows(prepare_key(k, score))  # [B * Hk, M, E]
        row = torch.arange(q_rows.shape[0], device=q.device)
        index = matches.index.flatten(2, -2)[:, :, wanted].long()
        on_grid = index.clamp(0, math.prod(self.key_grid) - 1)
        allowed_keys = AllowedKeys.of(q, k, causal, key_mask)
        allowed = allowed_keys.allows(row.reshape(*q.shape[:2], 1, 1), wanted.unsqueeze(-1), on_grid)
        self.found_key = torch.where((index == on_grid) & allowed, index, -1)  # off the grid or not allowed is none
        source = key_row(row, q.shape[1], k.shape[1]).reshape(-1, 1, 1)

        def scores(key: Tensor) -> Tensor:
            chosen = key.clamp(0).reshape(len(row), len(wanted), kappa)
            parts = (slice(at, at + 1024) for at in range(0, len(wanted), 1024))
            each = [pair_score(q_rows[:, wanted[at], None], k_rows[source, chosen[:, at]], score) for at in parts]
            return torch.cat(each, 1).reshape(shape)

        self.exact_score = scores(self.exact_key)
        self.found_score = scores(self.found_key)
