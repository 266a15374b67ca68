"""An error budget instead of settings: the fastest way to compute attention that keeps it, measured on the tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..core import checks
from ..core.bias import Bias, Extra, Pair
from ..core.checks import explains
from ..core.cost import keys_visited
from ..core.layout_hints import warn_about_layout
from ..core.pipeline import run
from ..core.precision import follows_autocast
from ..core.resolve import Request, default_search, default_tail, resolve, without_bias
from ..core.statistics import queries_needed, shared
from ..core.tails.base import NO_TAIL, Tail, as_tail
from ..core.tails.clusters import Clusters
from ..core.tails.drawn import DrawnKeys
from ..options import Impl
from ..settings import Score, Search
from ..spec.grid import grid_of
from . import modes, timing
from .baseline import Baseline, dense_baseline, yardstick
from .plan import GIVEN, LEAST_SPEEDUP, Plan, Rung, Setting
from .timing import Believed, believed
from .truth import SHARE, Errors, Truth

# The upper end of the interval is then an order statistic below the 96.5th percentile, shared over two looks at each of
# eleven rungs. A second look at eight times as many queries is taken where the first leaves open whether a rung serves:
# on grids up to 128 x 128 these are all.
NUM_QUERIES = queries_needed(SHARE, 22, 0.015)
SECOND_LOOK = 8
TOLERANCE = 1.15  # a rung that cannot be this many times faster than what was found is not tried
# Clusters and keys of a tile that are tried: without a search and, but for the last two, with one.
TAILS = ((128, 256), (256, 512), (512, 1024), (1024, 2048), (1024, 4096), (1024, 6144))
CAUSAL_TAILS = ((32, 256), (64, 512), (128, 1024))  # clusters of every stretch


@explains
@follows_autocast
@torch.no_grad()
def tune(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    error: float = 0.05,
    radius: int | Sequence[int] = 1,
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    score: Score = "dot",
    extra: Extra | None = None,
    extra_mask: Tensor | None = None,
    bias: Bias | Pair | None = None,
    impl: Impl = "auto",
    num_queries: int = NUM_QUERIES,
    seed: int = 0,
) -> Plan:
    """The fastest settings whose error stays within a budget, or dense attention: measured on these tensors.

    A ladder of settings is tried from cheap to dear: windows only, clusters without a search from few to many, the same
    with a search and windows, more matches, dense attention. Each runs on all queries and is timed; its output is
    compared with dense attention on a sample. A rung is not tried where it cannot be faster than what was found, or may
    visit as many keys as there are.

    The promise: in every head the 95th percentile over queries of |out - exact| / RMS |exact| is at most `error`. What
    must be below it is the upper end of an interval by order statistics, at confidence 95 % shared over the rungs.

    Before and after each run a little dense attention is timed, and times are ratios to that: other programs slow down
    both. A plan that was measured beside them says so; `plan.check` measures it again.

    Args:
        q, k, v: [B, H, *G, E], [B, Hk, *G', E], [B, Hk, *G', F], as the calls to come will have them.
        error: the budget; 0 leaves dense attention.
        radius, causal, key_mask, scale, score, extra, extra_mask, bias, impl: as in `attention`; softmax and no
            dropout.
        num_queries: queries of a head to compare, and eight times as many where these leave it open whether a setting
            keeps the budget; all of them where there are not more.
        seed: of the sample, of the searches and of the clusters; the plan keeps it, since intervals cover the sample of
            queries and no other seed.

    Returns:
        Plan: prints its table, is called like `attention`, saves as JSON, checks itself on other tensors.

    >>> _ = torch.manual_seed(0)
    >>> q, k, v = torch.randn(3, 1, 1, 16, 16, 8).unbind()
    >>> plan = scram.tune(q, k, v, error=0.05)
    >>> plan.dense, plan(q, k, v).shape
    (True, torch.Size([1, 1, 16, 16, 8]))
    """
    request = Request(
        search=None,
        tail=None,
        radius=radius,
        causal=causal,
        key_mask=key_mask,
        scale=scale,
        score=score,
        extra=extra,
        extra_mask=extra_mask,
        bias=bias,
        impl=impl,
    )
    given = tuple(name for name in GIVEN if getattr(request, name) is not None)
    given_q, given_k, given_v = q, k, v
    q, k, wide_v, request = without_bias(q, k, v, request)
    v = v if wide_v is None else wide_v
    radii = resolve(q, k, v, request).radius
    warn_about_layout(q.shape, k.shape)
    checks.some_queries(q)
    checks.finite_but_for_masked(q, k, v, key_mask)
    checks.real("error", error, 0.0, math.inf, "[0, inf)", "; 0.05 is 5 % of a typical output")
    num_queries = checks.whole("num_queries", num_queries, 1)
    settings = ladder(q, k, radius=radii, causal=causal, score=score, seed=seed)
    climb = _Climb(
        q,
        k,
        v,
        request,
        error=error,
        confidence=shared(2 * len(settings)),
        num_queries=num_queries,
        seed=seed,
    )
    rungs = [climb.rung(setting) for setting in settings]
    dense = Rung(
        setting=Setting(),
        keys=math.prod(grid_of(k)),
        seconds=climb.dense,
        error=(0.0, 0.0, 0.0),
        output_error=0.0,
        keeps=True,
        note=climb.dense_note,
    )
    rungs.append(dense)
    chosen = climb.choose(rungs)
    tensors = {"q": given_q, "k": given_k, "v": given_v}
    shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in tensors.items())
    return Plan(
        error=float(error),
        rungs=tuple(rungs),
        chosen=chosen,
        causal=causal,
        scale=scale,
        score=score,
        impl=impl,
        num_queries=len(climb.truth.queries),
        queries=climb.truth.points,
        seed=seed,
        confidence=climb.confidence,
        tensors=f"{shapes}, {str(q.dtype).removeprefix('torch.')} on {q.device.type}",
        given=given,
        grouped=given_q.shape[1] != given_k.shape[1],
        busy=climb.beside.busy,
        split=modes.split_share(
            q, k, climb.truth.queries, causal=causal, key_mask=key_mask, scale=request.scale, score=score
        ),
    )


def ladder(
    q: Tensor,
    k: Tensor,
    *,
    radius: tuple[int, ...],
    causal: bool = False,
    score: Score = "dot",
    seed: int = 0,
) -> list[Setting]:
    """The settings to try, from cheap to dear, without dense attention; what the call takes, see `default_tail`."""
    device = q.device.type
    family = default_tail(device, "softmax", causal, score)
    keys = math.prod(grid_of(k))
    one, four, many = (Search(matches=n, separation=2 * (n > 1), seed=seed) for n in (1, 4, 16))
    pairs: list[tuple[Search | None, Tail | None]] = [(one, None)]
    if isinstance(family, Clusters) and causal:
        pairs += [(one, DrawnKeys(samples)) for samples in DrawnKeys.tuned_sizes[:2]]
        tails = [replace(family, count=n, keys=m, seed=seed).in_order(keys) for n, m in CAUSAL_TAILS]
        pairs += [*((None, tail) for tail in tails), (four, tails[-1])]
    elif isinstance(family, Clusters):
        tails = [replace(family, count=count, keys=budget, seed=seed) for count, budget in TAILS]
        few, several = (replace(search, sweeps=default_search(device, family).sweeps) for search in (one, four))
        _, small, middle, large, more, most = tails
        pairs += [(None, tail) for tail in tails[:3]]
        pairs += [(few, small), (few, middle), (None, large), (few, large)]
        pairs += [(None, more), (None, most), (several, large)]
    elif family.tuned_sizes:
        little, some, lots = (family.resized(samples) for samples in family.tuned_sizes)
        pairs += [(one, little), (one, some), (one, lots), (four, some), (four, lots)]
    else:
        pairs += [(four, None), (many, None)]
    flat: int | tuple[int, ...] = radius[0] if len(set(radius)) == 1 else radius
    pairs = [(search, tail) for search, tail in pairs if tail is None or tail.visited(1, keys) < keys]
    return [Setting(search, tail, flat) for search, tail in pairs]


class _Climb:
    """The rungs that were tried so far, and what they are compared with."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        request: Request,
        *,
        error: float,
        confidence: float,
        num_queries: int,
        seed: int,
    ) -> None:
        self.tensors = (q, k, v)
        self.request = request
        self.error = error
        self.confidence = confidence
        self.seed = seed
        self.beside = yardstick(q, k, v, causal=request.causal, key_mask=request.key_mask, scale=request.scale)
        dense = self.time_dense()
        part = f"time from {dense.timed} of {dense.queries} queries" if dense.continued else ""
        self.dense = dense.seconds
        self.dense_note = "; ".join(filter(None, [part, _doubt(dense.steady)]))
        self.truth = self.sampled(num_queries)
        self.first_look = num_queries
        self.best = self.dense
        self.times: dict[Work, float] = {}

    def time_dense(self) -> Baseline:
        """The time of dense attention."""
        q, k, v = self.tensors
        return dense_baseline(
            q,
            k,
            v,
            timer=partial(believed, beside=self.beside),
            causal=self.request.causal,
            key_mask=self.request.key_mask,
            scale=self.request.scale,
            score=self.request.score,
            extra=self.request.extra_pair(),
            extra_mask=self.request.extra_mask,
        )

    def sampled(self, num_queries: int) -> Truth:
        """Exact attention of so many queries."""
        q, k, v = self.tensors
        return Truth.of(
            q,
            k,
            v,
            causal=self.request.causal,
            key_mask=self.request.key_mask,
            scale=self.request.scale,
            score=self.request.score,
            extra=self.request.extra_pair(),
            extra_mask=self.request.extra_mask,
            num_queries=num_queries,
            seed=self.seed,
        )

    def rung(self, setting: Setting) -> Rung:
        """Tries a setting, unless it cannot help."""
        q, k, _ = self.tensors
        radius = checks.radius(setting.radius, q.ndim - 3)
        work = Work.of(setting)
        keys = keys_visited(
            q, k, setting.search, radius, as_tail(setting.tail, NO_TAIL), self.request.score, self.request.causal
        ).tail
        if why := self._too_many(keys) or self._why_not(work):
            return Rung(setting, keys, note=f"not tried: {why}")
        (seconds, steady), out = self._run(setting)
        measured = self._errors(out)
        self.times = {other: min(t, seconds) if other.within(work) else t for other, t in self.times.items()}
        self.times[work] = seconds
        keeps = measured.keeps(self.error)
        if keeps:
            self.best = min(self.best, seconds)
        output_error = float(measured.output.nan_to_num(0.0).max())
        return Rung(setting, keys, seconds, measured.worst, output_error, keeps, _doubt(steady))

    def _run(self, setting: Setting) -> tuple[Believed, Tensor]:
        """The time of a setting and its output [B, H, *G, F]."""
        q, k, v = self.tensors
        resolved = resolve(q, k, v, setting.applied_to(self.request))
        time, result = believed(partial(run, resolved, q, k, v), q.device, self.best, self.beside)
        return time, result.out

    def choose(self, rungs: list[Rung]) -> int:
        """The fastest rung that keeps the budget; dense attention, the last, where that takes nearly as long.

        Before another is chosen, both are timed again: the machine may have been busy at the first time. The faster of
        both times counts, and is written into `rungs`.
        """
        again: set[int] = set()
        while True:
            chosen = min((n for n, rung in enumerate(rungs) if rung.keeps), key=lambda n: rungs[n].seconds or math.inf)
            if LEAST_SPEEDUP * (rungs[chosen].seconds or 0.0) > (rungs[-1].seconds or 0.0):
                return len(rungs) - 1  # exact attention for nearly the same time
            if chosen in again or rungs[chosen].setting.dense:
                return chosen
            if not again:
                rungs[-1] = _sooner(rungs[-1], self.time_dense().seconds)
            rungs[chosen] = _sooner(rungs[chosen], self._run(rungs[chosen].setting)[0].seconds)
            again.add(chosen)

    def _too_many(self, keys: int) -> str:
        """Why a setting that visits so many keys cannot help, "" where it can."""
        total = math.prod(grid_of(self.tensors[1]))
        return f"it may visit {keys} keys, there are {total}" if keys >= total else ""

    def _errors(self, out: Tensor) -> Errors:
        """Of an output [B, H, *G, F]; with more queries where it is open whether it keeps the budget."""
        measured = self.truth.errors(out, self.confidence)
        open_ = not measured.keeps(self.error) and not bool((measured.p95.low > self.error).any())
        if open_ and len(self.truth.queries) == self.first_look:
            self.truth = self.sampled(SECOND_LOOK * self.first_look)
            measured = self.truth.errors(out, self.confidence)
        return measured

    def _why_not(self, work: Work) -> str:
        """Why a setting cannot help, "" where it can: it is exact that is wanted, or it is no faster."""
        if self.error == 0:
            return "only dense attention is exact"
        least = self._least_seconds(work)
        if least * TOLERANCE >= self.best:
            return f"{1e3 * least:.3g} ms or more"
        return ""

    def _least_seconds(self, work: Work) -> float:
        """Seconds that a setting takes at least: those of settings that do less."""
        return max((t for other, t in self.times.items() if other.within(work)), default=0.0)


def _sooner(rung: Rung, seconds: float) -> Rung:
    return replace(rung, seconds=min(rung.seconds or math.inf, seconds))


class Work(NamedTuple):
    """What a setting does: more of anything takes longer."""

    matches: int
    sweeps: int
    tail: int  # clusters or drawn keys
    keys: int  # of a tile

    @staticmethod
    def of(setting: Setting) -> Work:
        tail = as_tail(setting.tail, NO_TAIL)
        search = setting.search
        return Work(
            0 if search is None else search.matches, 0 if search is None else search.sweeps, tail.samples, tail.keys
        )

    def within(self, other: Work) -> bool:
        return all(a <= b for a, b in zip(self, other, strict=True))


def _doubt(steady: bool) -> str:
    return "" if steady else f"its times differ by more than {timing.AGREE - 1:.0%}"
