"""Whether SCRAM is right for these tensors: what one setting misses on a sample of queries, and what to use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import checks, pipeline
from ..core.bias import Bias, Extra, Pair, widened
from ..core.checks import explains
from ..core.cost import Cost, keys_visited
from ..core.pipeline import execute
from ..core.precision import ignores_autocast
from ..core.resolve import Request, as_search, resolve
from ..core.statistics import Interval, mean
from ..core.tails.base import NO_TAIL, Tail, as_tail
from ..options import Auto, Impl
from ..results import Matches
from ..settings import Score, Search
from . import measure, modes
from .plan import Setting
from .tables import of_heads, percent
from .truth import Errors, Truth

LEAST_RECALL = 0.9  # below it more sweeps are tried too
LEAST_GAIN = 0.9  # of the error: what is not below it is no better
VERDICTS = ("sparse", "tail", "dense")  # from the cheapest on


@dataclass(frozen=True, eq=False)
class Trust:
    """What SCRAM missed, per batch and head, on a sample of queries; prints itself.

    Args:
        output_error: ||out - exact|| / ||exact|| over all sampled queries, windows alone. A point value: few queries
            dominate it, so another sample may give another one.
        p95_error, median_error: 95th percentile and median over queries of |out - exact| / RMS |exact| of the head, as
            in `tune`, windows alone.
        tail_output_error, tail_p95_error, tail_median_error: the same for windows and tail; NaN without a tail.
        mass: share of the exact softmax that the windows hold, mean over the queries.
        recall: share of the best keys that were found, mean.
        cost: keys visited per query.
        setting: what was run; its tail stands for the keys outside the windows, None for nothing.
        arguments: of the call: causal, scale, score, impl, which other tensors it has, and whether heads are grouped.
        error: the budget of the verdict.
        better: a setting with twice the sweeps, and its errors with the same tail, where it was tried and is better.
        num_queries, queries: queries looked at, and queries in all.
        split: the share of the queries whose weight two separate places share, in the head where it is largest.
    """

    output_error: Tensor
    p95_error: Interval
    median_error: Interval
    tail_output_error: Tensor
    tail_p95_error: Interval
    tail_median_error: Interval
    mass: Interval
    recall: Interval
    cost: Cost
    setting: Setting
    arguments: dict[str, Any]
    error: float
    better: tuple[Setting, Errors] | None
    num_queries: int
    queries: int
    split: float

    @property
    def tail(self) -> Tail | None:
        """What stands for the keys outside the windows."""
        return self.setting.tail

    @property
    def settings(self) -> str:
        """What was run, in words."""
        assert self.setting.search is not None
        return f"{self.setting}, radius {self.setting.radius}, {self.setting.search.sweeps} sweeps"

    @property
    def verdicts(self) -> list[list[str]]:
        """For each batch and head "sparse", "tail" or "dense": the cheapest that keeps the budget."""
        sparse = self._keeps(self.p95_error, self.cost.sparse)
        tail = self._keeps(self.tail_p95_error, self.cost.tail)
        grade = torch.where(sparse, 0, torch.where(tail, 1, 2))
        return [[VERDICTS[n] for n in batch] for batch in grade.tolist()]

    def _keeps(self, p95: Interval, keys: int) -> Tensor:
        """In which heads the upper end of the 95th percentile is within the budget, with fewer keys than dense has."""
        nothing = p95.high.isnan() & self.mass.value.isnan()  # a head without an allowed key misses nothing
        return ((p95.high <= self.error) | nothing) & (keys < self.cost.dense)

    @property
    def verdict(self) -> str:
        """The verdict for all heads together: that of the one that needs most."""
        return max((one for batch in self.verdicts for one in batch), key=VERDICTS.index, default=VERDICTS[0])

    @property
    def code(self) -> str:
        """A line of Python to use in place of what was run: its error is within the budget, or it is exact."""
        longer = self.better is not None and self.better[1].keeps(self.error)
        dense = self.better[0] if self.better is not None and longer else Setting()
        settings = {"sparse": replace(self.setting, tail=None), "tail": self.setting, "dense": dense}
        return settings[self.verdict].code(**self.arguments)

    @property
    def reason(self) -> str:
        """The verdict in words."""
        heads = [one for batch in self.verdicts for one in batch]
        whole, tail_whole = (percent(_most(x)) for x in (self.output_error, self.tail_output_error))
        p95, tail_p95 = (percent(_most(x.value)) for x in (self.p95_error, self.tail_p95_error))
        words = f"in the worst head output error {whole}, 95th percentile of the queries {p95}, with the windows alone"
        if self.tail is not None:
            words += f"; {tail_whole} and {tail_p95} with {self._tail_words}"
        if self.verdict == "sparse":
            return f"windows suffice: {words}."
        if self.verdict == "tail":
            rest = f" For {heads.count('sparse')} of {len(heads)} heads windows suffice." if "sparse" in heads else ""
            return f"use the tail: {words}.{rest}"
        keys = self.cost.tail if self.tail is not None else self.cost.sparse
        if keys >= self.cost.dense:
            small = f"on so small a grid SCRAM may visit {keys} keys, dense attention {self.cost.dense}"
            return f"stay dense: {small}."
        rest = (
            f" {len(heads) - heads.count('dense')} of {len(heads)} heads do not need it."
            if set(heads) > {"dense"}
            else ""
        )
        if self.better is None:
            tune = f" Other settings may keep {self.error:g}: scram.tune(q, k, v, error={self.error:g})."
            return f"stay dense: {words}.{rest}{tune}"
        setting, measured = self.better
        keeps = measured.keeps(self.error)
        what = "search longer" if keeps else "stay dense"
        rest += f" With twice the sweeps the 95th percentile is {percent(measured.worst[0])}"
        return f"{what}: {words}.{rest}{'.' if keeps else f': {setting.code(**self.arguments)}.'}"

    @property
    def _tail_words(self) -> str:
        return str(self.setting).split(", ", 1)[1]

    def __str__(self) -> str:
        with_tail = self.tail is not None
        columns: dict[str, Interval | Tensor] = {}
        if with_tail:
            columns = {
                "output error*": self.tail_output_error,
                "95th percentile": self.tail_p95_error,
                "median": self.tail_median_error,
            }
        windows = "windows: " * with_tail
        columns |= {
            f"{windows}output error*": self.output_error,
            f"{windows}95th perc." if with_tail else "95th percentile": self.p95_error,
            f"{windows}median": self.median_error,
            "captured mass": self.mass,
            "recall@1": self.recall,
        }
        lines = [f"SCRAM with {self.settings}, on {self.num_queries} of {self.queries} queries"]
        lines += of_heads(columns, {"verdict": self.verdicts})
        cost = f"dense {self.cost.dense}, SCRAM's windows at most {self.cost.sparse}"
        cost += f", with the tail at most {self.cost.tail}" if with_tail else ""
        lines += [f"keys visited per query: {cost}", f"verdict: {self.reason}", f"use: {self.code}"]
        return "\n".join([*lines, *filter(None, [modes.note(self.split)])])

    __repr__ = __str__


def _most(x: Tensor) -> float:
    """The largest, NaN left out."""
    return float(x.nan_to_num(nan=0.0, posinf=torch.inf).max())


@explains
@ignores_autocast
@torch.no_grad()
def trust(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    search: Search | Auto = "auto",
    radius: int | Sequence[int] = 1,
    tail: Tail | Auto | None = "auto",
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    score: Score = "dot",
    extra: Extra | None = None,
    bias: Bias | Pair | None = None,
    matches: Matches | None = None,
    error: float = 0.1,
    num_queries: int = 512,
    seed: int = 0,
    impl: Impl = "auto",
) -> Trust:
    """What one setting would miss on these tensors, on a seeded sample of queries: O(num_queries x M).

    Windows alone and windows with the tail both run, and are compared with dense attention. `tune` tries many settings.

    Args:
        q, k, v: [B, H, *G, E], [B, Hk, *G', E], [B, Hk, *G', F].
        search, radius, tail, causal, key_mask, scale, score, extra, bias, impl: as in `attention`, but always searched.
        matches: what a search found; None searches.
        error: the budget of the verdict, as in `tune`: of the 95th percentile, in every head.
        num_queries: queries to look at; all of them where there are not more.
        seed: chooses the sample; and clusters or drawn keys, where neither they nor the search have a seed. Intervals
            hold for the queries that were not sampled, with these seeds; other seeds of the search are not covered.

    Returns:
        Trust, with `verdict` "sparse" (windows alone keep the budget), "tail" (windows with the tail do) or "dense".

    >>> _ = torch.manual_seed(0)
    >>> k = torch.randn(1, 1, 32, 32, 64)
    >>> settings = {"search": scram.Search(seed=0), "tail": scram.Clusters(count=64, keys=128)}
    >>> [trust(sharpness * k, k, k + 1, **settings).verdict for sharpness in (4, 0.1)]
    ['sparse', 'tail']
    """
    if search is None:
        raise ValueError("trust looks at what windows miss, so it searches; scram.tune tries tails without a search")
    as_search(search)
    options = {
        "causal": causal,
        "scale": scale,
        "score": score,
        "impl": impl,
        "tensors": [x for x, given in (("key_mask", key_mask), ("extra", extra), ("bias", bias)) if given is not None],
    }
    pair: Pair | None = None
    if bias is None:
        pair = extra  # type: ignore[assignment]  # checked below
    else:
        options["grouped"] = q.shape[1] != k.shape[1]
        wide = widened(q, k, v, bias, scale=scale, score=score, causal=causal, extra=extra)
        assert wide.v is not None
        q, k, v, pair, scale = wide.q, wide.k, wide.v, wide.extra, wide.scale
    request = Request(
        search=search,
        tail=tail,
        radius=radius,
        causal=causal,
        key_mask=key_mask,
        scale=scale,
        score=score,
        extra=pair,
        impl=impl,
        matches=matches,
        keeps_matches=True,
    )
    as_tail(tail, NO_TAIL)
    resolved = resolve(q, k, v, request)
    checks.some_queries(q)
    checks.finite_but_for_masked(q, k, v, key_mask)
    checks.real("error", error, 0.0, torch.inf, "[0, inf)")
    num_queries = checks.whole("num_queries", num_queries, 1)
    settings = resolved.search
    assert settings is not None
    chosen = None if resolved.tail is NO_TAIL else resolved.tail
    window = resolved.radius
    kappa = None if matches is None else matches.index.shape[-1]
    run = _Run(q, k, v, request, seed)
    setting = Setting(settings, chosen, radius if isinstance(radius, int) else window)
    truth = Truth.of(
        q,
        k,
        v,
        causal=causal,
        key_mask=key_mask,
        scale=scale,
        score=score,
        extra=pair,
        num_queries=num_queries,
        seed=seed,
        with_lse=True,
    )
    figures = run.figures(setting, truth, matches)
    split = modes.split_share(q, k, truth.queries, causal=causal, key_mask=key_mask, scale=scale, score=score)
    summary = _summary(
        figures,
        truth.points,
        split=split,
        setting=setting,
        error=float(error),
        better=None,
        arguments={"grouped": q.shape[1] != k.shape[1], **options},
        cost=keys_visited(q, k, settings, window, resolved.tail, score, causal, kappa),
    )
    if summary.verdict == "dense" and _least(summary.recall.value) < LEAST_RECALL:
        return replace(summary, better=run.with_more_sweeps(summary, truth))
    return summary


def _least(x: Tensor) -> float:
    return float(x.nan_to_num(nan=1.0).min())


class Figures(NamedTuple):
    """Of every sampled query, [B, H, n]; NaN for a query without a key."""

    mass: Tensor  # share of the softmax that the windows hold
    recall: Tensor  # share of its best keys that were found
    square: Tensor  # |out - exact|^2, out from the windows alone
    tail_square: Tensor  # the same with the tail; NaN for none
    size: Tensor  # |exact|^2


class _Run(NamedTuple):
    """The tensors and options of a call, which settings run on."""

    q: Tensor
    k: Tensor
    v: Tensor
    request: Request
    seed: int

    def figures(self, setting: Setting, truth: Truth, matches: Matches | None = None) -> Figures:
        """What a setting misses of the sampled queries."""
        assert setting.search is not None
        request = self.request._replace(search=setting.search, tail=None, matches=matches)
        whole = None
        if setting.tail is not None:
            with_tail = request._replace(tail=self._seeded(setting))
            whole = execute(pipeline.run, self.q, self.k, self.v, with_tail)
            matches = whole.matches or matches
        if matches is None:
            matches = execute(pipeline.search, self.q, self.k, None, request)
        windows = execute(pipeline.run, self.q, self.k, self.v, request._replace(matches=matches))
        assert windows.lse is not None
        each = measure.recall_of_each(
            self.q,
            self.k,
            matches,
            separation=setting.search.separation,
            num_queries=len(truth.queries),
            seed=self.seed,
            causal=request.causal,
            key_mask=request.key_mask,
            score=request.score,
        )
        mass = (windows.lse.flatten(2)[..., truth.queries].to(truth.lse.dtype) - truth.lse).exp()
        tail_square = torch.full_like(mass, torch.nan) if whole is None else truth.square(whole.out)
        some = truth.lse > -torch.inf
        return Figures(torch.where(some, mass, torch.nan), each, truth.square(windows.out), tail_square, truth.size)

    def _seeded(self, setting: Setting) -> Tail:
        """The tail with its own seed, that of the search, or that of the sample."""
        assert setting.search is not None
        tail = as_tail(setting.tail, NO_TAIL)
        if tail.seed_tensor is not None:
            return tail
        return tail.of_part(self.seed if setting.search.seed_tensor is None else setting.search.seed_tensor)

    def with_more_sweeps(self, before: Trust, truth: Truth) -> tuple[Setting, Errors] | None:
        """Twice the sweeps with the same tail, where that is measured to be better."""
        assert before.setting.search is not None
        search = replace(before.setting.search, sweeps=max(2 * before.setting.search.sweeps, 1))
        setting = replace(before.setting, search=search)
        figures = self.figures(setting, truth)
        square = figures.square if setting.tail is None else figures.tail_square
        measured = Errors.of(square, figures.size, truth.points)
        old = before.p95_error if setting.tail is None else before.tail_p95_error
        return (setting, measured) if measured.worst[0] < LEAST_GAIN * _most(old.value) else None


def _summary(figures: Figures, points: int, **rest: Any) -> Trust:
    """From figures of single queries, all [B, H, n], of `points` queries in all, and the other fields."""
    mass, recall, square, tail_square, size = figures
    windows = Errors.of(square, size, points)
    none = rest["setting"].tail is None
    tail = Errors.of(tail_square, torch.full_like(size, torch.nan) if none else size, points)
    return Trust(
        mass=mean(mass, points),
        recall=mean(recall, points),
        median_error=windows.median,
        p95_error=windows.p95,
        output_error=windows.output,
        tail_median_error=tail.median,
        tail_p95_error=tail.p95,
        tail_output_error=tail.output,
        num_queries=mass.shape[-1],
        queries=points,
        **rest,
    )
