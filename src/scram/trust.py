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
from .codebook import Codebook, check_codebook
from .defaults import SEARCH, default_tail
from .estimators import Clusters, Hybrid
from .exact import _Dense
from .grid import grid_of
from .missed import Figures, Missed
from .precision import ignores_autocast
from .schedule import TILE_QUERIES, moves, offers
from .scoring import default_scale, prepare_query
from .statistics import Interval, mean, quantile
from .types import Matches, Score, Search

# What a verdict of "sparse" requires of every head, at the unfavourable end of the intervals.
LEAST_MASS = 0.9
MOST_ERROR = 0.1  # of a typical query; "tail" requires the same of clusters, whose error is measured
LEAST_RECALL = 0.9  # below it the search itself is to blame
MOST_DRAWN_ERROR = 0.25  # "tail" with drawn keys: the predicted error of a typical query
VERDICTS = ("sparse", "tail", "dense")  # from the cheapest on
ROWS_SHOWN = 16


class Cost(NamedTuple):
    """Keys scored per query, at most: by SCRAM's windows, with the tail (one per cluster), by dense attention."""

    sparse: int
    tail: int
    dense: int


@dataclass(frozen=True, eq=False)
class Trust:
    """What SCRAM missed, per batch and head, on a sample of queries; prints itself.

    Args:
        mass: share of the exact softmax that the windows hold, mean over the queries.
        recall: share of the best keys that were found, mean.
        median_error, p95_error: median and 95th percentile of a query's ||out - exact|| / ||exact||, windows alone.
        l2_error: ||out - exact|| / ||exact|| over all sampled queries, windows alone. A point value: few queries
            dominate it, so another sample may give another one.
        tail_median_error, tail_p95_error, tail_l2_error: the same for windows and tail. Measured for clusters; for
            drawn keys the error to expect of a plain draw; NaN without a tail.
        cost: keys scored per query.
        tail: what stands for the keys outside the windows, None for nothing.
        num_queries, queries: queries looked at, and queries in all.
        settings: what was run, in words.
    """

    mass: Interval
    recall: Interval
    median_error: Interval
    p95_error: Interval
    l2_error: Tensor
    tail_median_error: Interval
    tail_p95_error: Interval
    tail_l2_error: Tensor
    cost: Cost
    tail: Clusters | Codebook | Hybrid | None
    num_queries: int
    queries: int
    settings: str
    sample = renamed_attribute("sample", "num_queries")
    samples = renamed_attribute("samples", "tail.samples")
    tail_samples = renamed_attribute("tail_samples", "tail.samples")
    hybrid_error = renamed_attribute("hybrid_error", "tail_median_error.value")

    @property
    def verdicts(self) -> list[list[str]]:
        """For each batch and head "sparse", "tail" or "dense"."""
        sparse = (self.mass.low >= LEAST_MASS) & (self.median_error.high <= MOST_ERROR)
        grade = torch.where(sparse & (self.cost.sparse < self.cost.dense), 0, torch.where(self._tail_serves, 1, 2))
        return [[VERDICTS[n] for n in batch] for batch in grade.tolist()]

    @property
    def _tail_serves(self) -> Tensor:
        """In which heads windows and tail are near enough to exact attention, and score fewer keys: bool [B, H]."""
        error = self.tail_median_error
        near = error.value <= MOST_DRAWN_ERROR if isinstance(self.tail, Hybrid) else error.high <= MOST_ERROR
        return near & (self.cost.tail < self.cost.dense)

    @property
    def verdict(self) -> str:
        """The verdict for all heads together: that of the one that needs most."""
        return max((one for batch in self.verdicts for one in batch), key=VERDICTS.index, default=VERDICTS[0])

    @property
    def reason(self) -> str:
        """The verdict in words."""
        mass, error = 100 * float(self.mass.value.min()), 100 * float(self.median_error.value.max())
        heads = [one for batch in self.verdicts for one in batch]
        held = (
            f"in the worst head the windows hold {mass:.0f} % of the softmax and a typical query is {error:.1f} % off"
        )
        if self.verdict == "sparse":
            return f"sparse and coherent, SCRAM's windows suffice: {held}."
        dense = f"dense attention {self.cost.dense}"
        if self.cost.sparse >= self.cost.dense:
            return f"stay dense: on so small a grid SCRAM may score {self.cost.sparse} keys, {dense}."
        rest = f" {heads.count('sparse')} of {len(heads)} heads are sparse." if "sparse" in heads else ""
        best = float(self.recall.value.min())
        if best < LEAST_RECALL:
            rest += f" The search found {100 * best:.0f} % of the best keys: more sweeps may help."
        if self.tail is None:
            return f"stay dense, or use a tail: {held}.{rest}"
        off, words = 100 * float(self.tail_median_error.value.max()), _words(self.tail)
        drawn = isinstance(self.tail, Hybrid)
        tail = f"with {words} a typical query {'would be' if drawn else 'is'} {off:.1f} % off"
        if self.verdict == "tail":
            return f"diffuse, use a tail: {held}; {tail}.{rest}"
        dear = f", where SCRAM may score {self.cost.tail} keys, {dense}" if self.cost.tail >= self.cost.dense else ""
        return f"stay dense: {held}; {tail}{dear}.{rest}"

    def __str__(self) -> str:
        names = ["captured mass", "recall", "median error", "95th percentile"]
        intervals = [self.mass, self.recall, self.median_error, self.p95_error]
        with_tail = self.tail is not None
        after = [self.tail_median_error, self.tail_p95_error] if with_tail else []
        headings = [f"{name:20}" for name in names] + ["L2 error*"]
        if with_tail:
            headings += [f"{name:20}" for name in ("tail: median error", "tail: 95th perc.")] + ["tail: L2*"]
        lines = [
            f"SCRAM with {self.settings}, on {self.num_queries} of {self.queries} queries",
            "  ".join(["batch head", *headings, "verdict"]),
        ]
        batch, heads = self.l2_error.shape
        for row in range(min(batch * heads, ROWS_SHOWN)):
            at = row // heads, row % heads
            shown = [f"{x.cell(*at):20}" for x in intervals] + [f"{float(self.l2_error[at]):9.4f}"]
            if with_tail:
                shown += [f"{x.cell(*at):20}" for x in after] + [f"{float(self.tail_l2_error[at]):9.4f}"]
            lines.append("  ".join([f"{at[0]:5} {at[1]:4}", *shown, self.verdicts[at[0]][at[1]]]))
        if batch * heads > ROWS_SHOWN:
            lines.append(f"  ... and {batch * heads - ROWS_SHOWN} more")
        note = "* a point value, dominated by few queries; the others are with 95 % intervals"
        if isinstance(self.tail, Hybrid):
            note += "; the errors with drawn keys are predicted"
        cost = f"dense {self.cost.dense}, SCRAM's windows at most {self.cost.sparse}"
        cost += f", with the tail at most {self.cost.tail}" if with_tail else ""
        return "\n".join([*lines, note, f"keys scored per query: {cost}", f"verdict: {self.reason}"])

    __repr__ = __str__


def _words(tail: Clusters | Codebook | Hybrid | None) -> str:
    """The tail in words."""
    if tail is None:
        return "no tail"
    return f"{tail.samples} drawn keys" if isinstance(tail, Hybrid) else f"{_size(tail)} clusters"


def _size(tail: Clusters | Codebook | Hybrid | None) -> int:
    """Number of clusters or of drawn keys."""
    if isinstance(tail, Codebook):
        return tail.sizes.shape[-1]
    return 0 if tail is None else tail.samples


def _drawn(samples: int) -> Hybrid:
    """What the old arguments meant."""
    return Hybrid(samples=samples)


@renamed(sample="num_queries", samples=("tail", _drawn), tail_samples=("tail", _drawn))
@explains
@ignores_autocast
@torch.no_grad()
def trust(
    q: Tensor, k: Tensor, v: Tensor, *, search: Search | str = "auto", radius: int | Sequence[int] = 1,
    tail: Clusters | Codebook | Hybrid | str | None = "auto",
    causal: bool = False, key_mask: Tensor | None = None, scale: float | None = None, score: Score = "dot",
    extra: tuple[Tensor, Tensor] | None = None, matches: Matches | None = None,
    num_queries: int = 512, seed: int = 0, impl: str = "auto",
) -> Trust:  # fmt: skip
    """What SCRAM would miss on these tensors, exactly, on a seeded sample of queries: O(num_queries x M).

    Windows alone and windows with the tail are both compared with dense attention.

    Args:
        q, k, v: [B, H, *G, E], [B, Hk, *G', E], [B, Hk, *G', F].
        search, radius, tail, causal, key_mask, scale, score, extra, impl: as in `attention`, but always searched.
        matches: what a search found; None searches.
        num_queries: queries to look at; all of them where there are not more.
        seed: chooses the sample; and the clusters, where neither they nor the search have a seed.

    Returns:
        Trust, with `verdict` "sparse" (windows alone suffice), "tail" (diffuse: windows with the tail) or "dense".

    >>> _ = torch.manual_seed(0)
    >>> k = torch.randn(1, 1, 32, 32, 64)
    >>> [trust(sharpness * k, k, k + 1, search=scram.Search(seed=0)).verdict for sharpness in (4, 0.1)]
    ['sparse', 'tail']
    """
    errors.queries_keys(q, k)
    errors.some_queries(q)
    errors.values(q, k, v)
    errors.finite(q=q, **({} if key_mask is not None else {"k": k, "v": v}))  # a masked key may be anything
    errors.extra(q, k, v, extra)
    errors.scale(scale)
    errors.tail(tail)
    settings = errors.search_settings(search, SEARCH)
    window = errors.radius(radius, q.ndim - 3)
    num_queries = errors.whole("num_queries", num_queries, 1)
    how: dict[str, Any] = {"causal": causal, "key_mask": key_mask, "score": score}
    wanted = measure.sample_queries(q, num_queries, seed)
    dense = _Dense(q, k, causal, key_mask, score, wanted)
    factor = default_scale(scale, q.shape[-1], score, "softmax")
    chosen = default_tail("softmax", causal, score, 0.0, "query") if isinstance(tail, str) else tail
    if isinstance(chosen, (Clusters, Codebook)):
        errors.clusters_only("softmax", causal, score)
    if isinstance(chosen, Codebook):
        check_codebook("tail", q, k, v, dense.k.shape[-1], score, factor, key_mask, window, chosen)
    if matches is None:
        matches = api.search(q, k, search=settings, impl=impl, **how)
    else:
        errors.matches("matches", q, k, matches)
    if isinstance(chosen, Clusters):
        own = next((x for x in (chosen.seed_tensor, settings.seed_tensor) if x is not None), seed)
        rest: Codebook | Hybrid | None = api.cluster(
            q, k, v, clusters=replace(chosen, seed=own), matches=matches, radius=radius, key_mask=key_mask,
            scale=scale, score=score, impl=impl,
        )  # fmt: skip
    else:
        rest = chosen
    found = measure.recall_of_each(q, k, matches, separation=settings.separation, sample=num_queries, seed=seed, **how)
    return _summary(
        Missed(dense, v, extra, matches, window, factor, rest).figures(),
        found,
        math.prod(grid_of(q)),
        cost=_cost(settings, matches, window, q, k, score, _size(chosen)),
        tail=chosen,
        settings=f"matches={matches.index.shape[-1]}, radius={radius}, sweeps={settings.sweeps}, {_words(chosen)}",
    )


def _summary(figures: Figures, recall: Tensor, points: int, **rest: Any) -> Trust:
    """From figures and recall of single queries, all [B, H, n], of `points` queries in all, and the other fields."""
    mass, square, tail_square, size = figures
    some = mass.isfinite()
    error, tail_error = ((x / size).sqrt() for x in (square, tail_square))
    total, *squares = (torch.where(some, x, 0).sum(-1) for x in (size, square, tail_square))
    l2, tail_l2 = ((x / total).sqrt() for x in squares)
    return Trust(
        mass=mean(mass, points),
        recall=mean(recall, points),
        median_error=quantile(error, 0.5, points),
        p95_error=quantile(error, 0.95, points),
        l2_error=l2,
        tail_median_error=quantile(tail_error, 0.5, points),
        tail_p95_error=quantile(tail_error, 0.95, points),
        tail_l2_error=tail_l2,
        num_queries=mass.shape[-1],
        queries=points,
        **rest,
    )


def _cost(
    search: Search, matches: Matches, radius: tuple[int, ...], q: Tensor, k: Tensor, score: Score, tail: int
) -> Cost:
    """By the formulas of DESIGN, sections 8 and 14; `tail` is the number of clusters or of drawn keys."""
    rank, kappa, grid = k.ndim - 3, matches.index.shape[-1], grid_of(k)
    if (
        search.resolved_method(prepare_query(q[:0], score)) == "tile"
    ):  # a query scores what all queries of its tile offer
        made = [offers(n + 1, search.jumps, search.propagate, search.gossip, grid) for n in range(search.sweeps)]
        looked = kappa + TILE_QUERIES * sum(len(list(sweep)) for sweep in made)
    else:
        offered = len(moves(search.propagate, 1)) * 2 * rank * len(search.jumps)
        looked = kappa * (1 + search.sweeps * (offered + search.gossip + max(grid).bit_length()))
    window = kappa * math.prod(min(2 * b + 1, extent) for b, extent in zip(radius, grid, strict=True))
    keys = math.prod(grid)
    return Cost(looked + window, looked + window + min(tail, keys), keys)
