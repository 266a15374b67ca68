"""Whether SCRAM is right for these tensors: what it missed on a sample of queries, with intervals, and a verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import api, errors, measure
from .arguments import explains, renamed, renamed_attribute
from .exact import _Dense
from .grid import coordinates, grid_of, rows, within
from .precision import ignores_autocast
from .schedule import TILE_QUERIES, moves, offers
from .scoring import default_scale, normalized_weights, prepare_key, prepare_query
from .types import Matches, Score, Search

# What a verdict of "sparse" requires of every head, at the unfavourable end of the intervals.
LEAST_MASS = 0.9
MOST_ERROR = 0.1
LEAST_RECALL = 0.9  # below it the search itself is to blame
# What "hybrid" requires: the predicted error of a typical query.
MOST_HYBRID_ERROR = 0.25
VERDICTS = ("sparse", "hybrid", "dense")  # from the cheapest on
NORMAL = 1.959964  # the quantile of a 95 % interval
ROWS_SHOWN = 16


class Interval(NamedTuple):
    """An estimate from the sampled queries and its 95 % interval for all of them, each [B, H]."""

    value: Tensor
    low: Tensor
    high: Tensor


class Cost(NamedTuple):
    """Keys scored per query, at most: by SCRAM, by SCRAM with a drawn tail, by dense attention."""

    sparse: int
    hybrid: int
    dense: int


@dataclass(frozen=True, eq=False)
class Trust:
    """What SCRAM missed, per batch and head, on a sample of queries; prints itself.

    Args:
        mass: captured share of the exact softmax, mean over the queries.
        recall: share of the best keys that were found, mean.
        median_error, p95_error: median and 95th percentile of a query's ||out - exact|| / ||exact||.
        l2_error: ||out - exact|| / ||exact|| over all sampled queries. A point value: few queries dominate it, so
            another sample may give another one.
        hybrid_error: median predicted error of a query if the missed keys were estimated from `tail_samples` drawn
            ones.
        cost: keys scored per query.
        num_queries, queries: queries looked at, and queries in all.
        settings: what was run, in words.
    """

    mass: Interval
    recall: Interval
    median_error: Interval
    p95_error: Interval
    l2_error: Tensor
    hybrid_error: Tensor
    cost: Cost
    tail_samples: int
    num_queries: int
    queries: int
    settings: str
    samples = renamed_attribute("samples", "tail_samples")
    sample = renamed_attribute("sample", "num_queries")

    @property
    def verdicts(self) -> list[list[str]]:
        """For each batch and head "sparse", "hybrid" or "dense"."""
        cheaper = self.cost.sparse < self.cost.dense, self.cost.hybrid < self.cost.dense
        sparse = (self.mass.low >= LEAST_MASS) & (self.median_error.high <= MOST_ERROR) & cheaper[0]
        hybrid = (self.hybrid_error <= MOST_HYBRID_ERROR) & cheaper[1]
        grade = torch.where(sparse, 0, torch.where(hybrid, 1, 2))
        return [[VERDICTS[n] for n in batch] for batch in grade.tolist()]

    @property
    def verdict(self) -> str:
        """The verdict for all heads together: that of the one that needs most."""
        return max((one for batch in self.verdicts for one in batch), key=VERDICTS.index, default=VERDICTS[0])

    @property
    def reason(self) -> str:
        """The verdict in words."""
        mass, error = 100 * float(self.mass.value.min()), 100 * float(self.median_error.value.max())
        drawn = 100 * float(self.hybrid_error.max())
        heads = [one for batch in self.verdicts for one in batch]
        held = f"in the worst head SCRAM holds {mass:.0f} % of the softmax and a typical query is {error:.1f} % off"
        if self.verdict == "sparse":
            return f"sparse and coherent, use SCRAM: {held}."
        if self.cost.sparse >= self.cost.dense:
            keys = f"{self.cost.sparse} keys, dense attention {self.cost.dense}"
            return f"stay dense: on so small a grid SCRAM may score {keys}."
        tail = f"{self.tail_samples} drawn keys per query would leave a typical query {drawn:.0f} % off"
        hint = f" {heads.count('sparse')} of {len(heads)} heads are sparse." if "sparse" in heads else ""
        best = float(self.recall.value.min())
        if best < LEAST_RECALL:
            hint += f" The search found {100 * best:.0f} % of the best keys: more sweeps may help."
        if self.verdict == "hybrid":
            return f"diffuse, use the hybrid estimator: {held}; {tail}.{hint}"
        return f"stay dense: {held}, and {tail}.{hint}"

    def __str__(self) -> str:
        names = ("captured mass", "recall", "median error", "95th percentile")
        intervals = (self.mass, self.recall, self.median_error, self.p95_error)
        lines = [
            f"SCRAM with {self.settings}, on {self.num_queries} of {self.queries} queries",
            "batch head  " + "  ".join(f"{name:20}" for name in names) + "  L2 error*  verdict",
        ]
        batch, heads = self.l2_error.shape
        for row in range(min(batch * heads, ROWS_SHOWN)):
            at = row // heads, row % heads
            each = [[float(x[at]) for x in interval] for interval in intervals]
            shown = "  ".join(f"{value:.3f} [{low:.3f}, {high:.3f}]" for value, low, high in each)
            verdict = self.verdicts[at[0]][at[1]]
            lines.append(f"{at[0]:5} {at[1]:4}  {shown}  {float(self.l2_error[at]):9.4f}  {verdict}")
        if batch * heads > ROWS_SHOWN:
            lines.append(f"  ... and {batch * heads - ROWS_SHOWN} more")
        cost = f"dense {self.cost.dense}, SCRAM at most {self.cost.sparse}, hybrid at most {self.cost.hybrid}"
        note = "* a point value, dominated by few queries; the others are with 95 % intervals"
        return "\n".join([*lines, note, f"keys scored per query: {cost}", f"verdict: {self.reason}"])

    __repr__ = __str__


@renamed(samples="tail_samples", sample="num_queries")
@explains
@ignores_autocast
@torch.no_grad()
def trust(
    q: Tensor, k: Tensor, v: Tensor, *, search: Search = Search(), radius: int | Sequence[int] = 1,  # noqa: B008 - frozen
    causal: bool = False, key_mask: Tensor | None = None, scale: float | None = None, score: Score = "dot",
    extra: tuple[Tensor, Tensor] | None = None, matches: Matches | None = None,
    tail_samples: int = 512, num_queries: int = 512, seed: int = 0, impl: str = "auto",
) -> Trust:  # fmt: skip
    """What SCRAM would miss on these tensors, exactly, on a seeded sample of queries: O(num_queries x M).

    Args:
        q, k, v, search, radius, causal, key_mask, scale, score, extra, impl: as in `attention`.
        matches: what a search found; None searches.
        tail_samples: keys that the hybrid estimator would draw per query.
        num_queries: queries to look at; all of them where there are not more.
        seed: chooses the sample.

    Returns:
        Trust, with `verdict` "sparse" (use SCRAM), "hybrid" (diffuse: estimate the rest from drawn keys) or "dense".

    >>> _ = torch.manual_seed(0)
    >>> k = torch.randn(1, 1, 32, 32, 64)
    >>> [trust(sharpness * k, k, k, search=scram.Search(seed=0)).verdict for sharpness in (4, 0.1)]
    ['sparse', 'dense']
    """
    errors.queries_keys(q, k)
    errors.some_queries(q)
    errors.values(q, k, v)
    errors.finite(q=q, **({} if key_mask is not None else {"k": k, "v": v}))  # a masked key may be anything
    errors.extra(q, k, v, extra)
    errors.scale(scale)
    window = errors.radius(radius, q.ndim - 3)
    tail_samples = errors.whole("tail_samples", tail_samples, 1)
    num_queries = errors.whole("num_queries", num_queries, 1)
    how: dict[str, Any] = {"causal": causal, "key_mask": key_mask, "score": score}
    if matches is None:
        matches = api.search(q, k, search=search, impl=impl, **how)
    else:
        errors.matches("matches", q, k, matches)
    wanted = measure.sample_queries(q, num_queries, seed)
    found = measure.recall_of_each(q, k, matches, separation=search.separation, sample=num_queries, seed=seed, **how)
    factor = default_scale(scale, q.shape[-1], score, "softmax")
    missed = _Missed(_Dense(q, k, causal, key_mask, score, wanted), v, extra, matches, window, factor, tail_samples)
    parts = zip(*(missed.of_each(row, at) for row, at in missed.dense.chunks()), strict=True)
    mass, error, square, size, hybrid = (torch.cat(x).reshape(*q.shape[:2], len(wanted)) for x in parts)
    points, some = math.prod(grid_of(q)), mass.isfinite()
    settings = replace(search, method=search.resolved_method(prepare_query(q[:0], score)))
    return Trust(
        mass=_mean(mass, points),
        recall=_mean(found, points),
        median_error=_quantile(error, 0.5, points),
        p95_error=_quantile(error, 0.95, points),
        l2_error=(torch.where(some, square, 0).sum(-1) / torch.where(some, size, 0).sum(-1)).sqrt(),
        hybrid_error=hybrid.nanmedian(-1).values,
        cost=_cost(settings, matches, window, k, tail_samples),
        tail_samples=tail_samples,
        num_queries=len(wanted),
        queries=points,
        settings=f"matches={matches.index.shape[-1]}, radius={radius}, sweeps={search.sweeps}",
    )


class _Missed:
    """Exact attention of the sampled queries, split into the keys that SCRAM attends and the rest."""

    def __init__(
        self, dense: _Dense, v: Tensor, extra: tuple[Tensor, Tensor] | None, matches: Matches,
        radius: tuple[int, ...], scale: float, samples: int,
    ) -> None:  # fmt: skip
        self.dense, self.values, self.radius, self.scale, self.samples = dense, rows(v), radius, scale, samples
        self.extra = None if extra is None else (rows(prepare_key(extra[0], dense.score)), rows(extra[1]))
        self.index, self.key_grid = matches.index.flatten(0, 1).flatten(1, -2), matches.key_grid
        self.place = coordinates(torch.arange(dense.keys, device=v.device), matches.key_grid)

    def of_each(self, row: int, at: Tensor) -> tuple[Tensor, ...]:
        """Mass, relative error, squared error, squared size of the output, and predicted error of the hybrid: [C]."""
        dense, source = self.dense, self.dense.key_row(row)
        legal, inside = dense.legal(row, at), self._inside(row, at)
        keys, values = dense.shown(dense.k[source], row), dense.shown(self.values[source], row)
        if self.extra is not None:
            keys, values = (torch.cat([x, more[source]]) for x, more in zip((keys, values), self.extra, strict=True))
            more = legal.new_ones(len(at), len(keys) - dense.keys)
            legal, inside = torch.cat([legal, more], 1), torch.cat([inside, more], 1)
        p, lse = normalized_weights(self.scale * dense.scores(dense.q[row, at], keys), legal, "softmax")
        values = values.to(p.dtype)
        exact, near = p @ values, torch.where(inside, p, 0)
        mass = near.sum(-1)
        out = near @ values / mass.clamp(min=torch.finfo(p.dtype).tiny).unsqueeze(-1)
        square, size = (out - exact).square().sum(-1), exact.square().sum(-1)
        hybrid = self._hybrid(p - near, values, exact, (legal & ~inside).sum(-1)) / size.sqrt()
        none = lse == -torch.inf
        return tuple(torch.where(none, torch.nan, x) for x in (mass, (square / size).sqrt(), square, size, hybrid))

    def _inside(self, row: int, at: Tensor) -> Tensor:
        """Which keys lie in the windows of the queries: [C, M]."""
        inside = torch.zeros(len(at), self.dense.keys, dtype=torch.bool, device=at.device)
        for match in self.index[row, at].long().unbind(-1):
            some = (match >= 0) & (match < self.dense.keys)
            centre = [c.unsqueeze(-1) for c in coordinates(match, self.key_grid)]
            inside |= within(self.place, centre, self.radius) & some.unsqueeze(-1)
        return inside

    def _hybrid(self, p: Tensor, values: Tensor, exact: Tensor, left: Tensor) -> Tensor:
        """Standard error of the output if the tail, of weights p, is estimated from a uniform draw without repetition.

        With r_j = p_j (v_j - out), T keys left and m drawn, the variance is T^2 (1/m - 1/T) times that of r.
        """
        squares = p.square()
        second = squares @ values.square().sum(-1) - 2 * ((squares @ values) * exact).sum(-1)
        second = second + squares.sum(-1) * exact.square().sum(-1)
        first = p @ values - p.sum(-1, keepdim=True) * exact
        count = left.clamp(min=1).to(p.dtype)
        spread = (second / count - first.square().sum(-1) / count.square()).clamp(min=0)
        drawn = count.clamp(max=self.samples)
        return (count.square() * (1 / drawn - 1 / count) * spread).sqrt()


def _mean(x: Tensor, points: int) -> Interval:
    """The mean of shares in 0..1 [B, H, n], NaN left out.

    Wilson's interval with the variance that was seen, then moved out by what one more query of share 0 or 1 would move
    the mean: where nearly all shares are near 1, the few that are not may be missing from a sample.
    """
    some = x.isfinite()
    n = some.sum(-1).clamp(min=1).to(x.dtype)
    mean = torch.where(some.any(-1), torch.where(some, x, 0).sum(-1) / n, torch.nan)
    variance = torch.where(some, (x - mean.unsqueeze(-1)).square(), 0).sum(-1) / (n - 1).clamp(min=1)
    most = mean * (1 - mean)  # of a share that is 0 or 1, which the interval was made for
    ratio = torch.where((variance > 0) & (most > 0), variance / most.clamp(min=1e-12), 1).clamp(max=1)
    rest = max(1 - x.shape[-1] / points, 0.0)  # a sample of everything leaves nothing open
    z2 = NORMAL**2 * ratio * rest / n
    centre, half = (mean + z2 / 2) / (1 + z2), (z2 * most + z2.square() / 4).sqrt() / (1 + z2)
    low = (centre - half - rest * mean / (n + 1)).minimum(mean)
    high = (centre + half + rest * (1 - mean) / (n + 1)).maximum(mean)
    return Interval(mean, low.clamp(min=0), high.clamp(max=1))


def _quantile(x: Tensor, share: float, points: int) -> Interval:
    """A quantile of [B, H, n], NaN left out, between the order statistics that enclose it in 95 % of the samples."""
    value = x.nanquantile(share, -1)
    if x.shape[-1] >= points:
        return Interval(value, value, value)
    ordered = torch.where(x.isfinite(), x, torch.nan).sort(-1).values  # NaN last
    low, high = torch.empty_like(value), torch.empty_like(value)
    for at in [(b, h) for b in range(x.shape[0]) for h in range(x.shape[1])]:
        n = int(x[at].isfinite().sum())
        low[at], high[at] = ordered[at][list(_ranks(n, share))]  # NaN where n is 0
    return Interval(value, low, high)


def _ranks(n: int, share: float) -> tuple[int, int]:
    """The order statistics of n, counted from 0, that leave at most 2.5 % of a binomial law on either side.

    >>> _ranks(512, 0.5), _ranks(512, 0.95)
    ((233, 278), (475, 496))
    """
    counts = torch.arange(n + 1, dtype=torch.float64)
    law = torch.lgamma(torch.tensor(n + 1.0, dtype=torch.float64)) - torch.lgamma(counts + 1)
    law = (law - torch.lgamma(n - counts + 1) + counts * math.log(share) + (n - counts) * math.log1p(-share)).exp()
    below = law.cumsum(0)
    first, last = int((below <= 0.025).sum()) - 1, int((below < 0.975).sum())
    return max(first, 0), min(last, max(n - 1, 0))


def _cost(search: Search, matches: Matches, radius: tuple[int, ...], k: Tensor, samples: int) -> Cost:
    """By the formulas of DESIGN, sections 8 and 14; `search` is resolved."""
    rank, kappa, grid = k.ndim - 3, matches.index.shape[-1], grid_of(k)
    if search.method == "tile":  # a query scores what all queries of its tile offer
        made = [offers(n + 1, search.jumps, search.propagate, search.gossip, grid) for n in range(search.sweeps)]
        looked = kappa + TILE_QUERIES * sum(len(list(sweep)) for sweep in made)
    else:
        offered = len(moves(search.propagate, 1)) * 2 * rank * len(search.jumps)
        looked = kappa * (1 + search.sweeps * (offered + search.gossip + max(grid).bit_length()))
    window = kappa * math.prod(min(2 * b + 1, extent) for b, extent in zip(radius, grid, strict=True))
    keys = math.prod(grid)
    return Cost(looked + window, looked + window + min(samples, keys), keys)
