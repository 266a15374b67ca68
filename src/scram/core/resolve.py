"""From the options of a call to what runs: checked once, decided once.

`resolve` makes a `Resolved` of a `Request`. It alone decides whether a call is dense attention, what "auto" means, and
which engines run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..engines import EngineSpec, dispatch
from ..options import Auto, Impl, Weight
from ..results import Matches, Routes, check_matches, check_routes
from ..settings import Score, Search
from ..spec.schedule import TILE_QUERIES
from ..spec.scoring import accumulator, check_score, check_weight, default_scale
from . import checks, ops
from .bias import Bias, Extra, Pair, widened
from .cost import keys_visited
from .layout_hints import warn_about_layout
from .tails.base import NO_TAIL, Kind, MadeFor, Tail, as_tail
from .tails.clusters import Clusters, Codebook, check_budget

# By device: what "auto" means. Sweeps start from routed keys.
# On a GPU every key that is offered is read for all queries of a tile: fewer of them, where it costs least.
SEARCHES = {"cpu": Search(sweeps=2), "cuda": Search(sweeps=2, propagate="shift", gossip=4)}
CLUSTERS = {"cpu": Clusters(count=512, keys=1152), "cuda": Clusters(count=384, keys=768)}
CAUSAL_CLUSTERS = {"cpu": Clusters(count=64, keys=512), "cuda": Clusters(count=64, keys=512)}  # no search beside
MOST_REMEMBERED = 1000  # kinds of calls


class Request(NamedTuple):
    """The options of a call, as its user gave them; all arguments of `attention` but q, k and v, and a few more.

    Args:
        search: None searches nothing. Without matches that is dense attention, or a tail of its own that stands alone.
        matches: in place of a search.
        routes: in place of those that the tail chooses.
        warm_codebook: clusters to start from.
        keeps_matches: whether the caller reads the matches, so that there must be a search.
        needs_lse: whether the caller reads the log of the normalizer.
        hints: whether tensors that are probably in another layout get a warning, as from public functions.
        bias: is made part of q and k before anything else: see `without_bias`.
        caller: who calls; the first searched call of a kind by each measures itself. None: none does.
    """

    search: Search | Auto | None = "auto"
    tail: Tail | Auto | None = "auto"
    radius: int | Sequence[int] = 1
    causal: bool = False
    key_mask: Tensor | None = None  # bool [B, *G'] or [B, H, *G']
    scale: float | None = None
    score: Score = "dot"
    weight: Weight = "softmax"
    extra: Extra | None = None  # [B, Hk, X, E] and [B, Hk, X, F]; beside a bias perhaps its b of them
    extra_mask: Tensor | None = None  # bool [B, X]
    dropout_p: float = 0.0
    warm: Matches | None = None
    impl: Impl = "auto"
    matches: Matches | None = None
    routes: Routes | None = None
    warm_codebook: Codebook | None = None
    keeps_matches: bool = False
    needs_lse: bool = False
    hints: bool = False
    bias: Bias | Pair | None = None
    caller: str | int | None = None

    @property
    def extra_pair(self) -> Pair | None:
        """Keys and values off the grid, of a call without a bias."""
        return None if self.extra is None else (self.extra[0], self.extra[1])

    @property
    def is_automatic(self) -> bool:
        """Whether nothing is said of search, tail, matches and engine: then the call may be dense attention."""
        unsaid = isinstance(self.search, str) and isinstance(self.tail, str) and self.impl == "auto"
        return unsaid and self.warm is None and self.matches is None and not self.keeps_matches

    @property
    def searches(self) -> bool:
        """Whether a search was asked for, or matches were given: not where "auto" decides."""
        given = not (self.search is None or isinstance(self.search, str))
        return given or self.matches is not None or self.warm is not None or self.keeps_matches


def without_bias(
    q: Tensor, k: Tensor, v: Tensor | None, request: Request
) -> tuple[Tensor, Tensor, Tensor | None, Request]:
    """A call that means the same and has no bias: q and k are wider by its features."""
    if request.bias is None:
        return q, k, v, request
    wide = widened(
        q,
        k,
        v,
        request.bias,
        scale=request.scale,
        score=request.score,
        weight=request.weight,
        causal=request.causal,
        extra=request.extra,
    )
    return wide.q, wide.k, wide.v, request._replace(bias=None, scale=wide.scale, extra=wide.extra)


class Resolved(NamedTuple):
    """A call that was checked, and what runs it. `pipeline` runs it, on the tensors or on parts of them."""

    request: Request
    dense: bool  # attention over every key, by torch
    search: Search | None  # None: no search
    tail: Tail
    radius: tuple[int, ...]  # of windows, one per axis
    scale: float
    search_engine: EngineSpec
    engine: EngineSpec  # of all other stages

    def kind(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
        """Equal for calls that are alike: who calls, shapes, dtypes, device, score, order, how much is searched."""
        request = self.request
        search = self.search
        return (
            request.caller,
            *(q.shape, k.shape, v.shape),
            *(q.dtype, v.dtype, q.device),
            *(request.causal, request.score, self.radius, self.scale),
            None if search is None else (search.matches, search.sweeps, search.method),
            (self.tail.__class__, self.tail.samples, self.tail.keys),
        )


# --- what is cheaper ---


class DeviceCost(NamedTuple):
    """What dense attention and a search with clusters take on a device."""

    least: float  # us that a search takes however small the grid is: the host's time
    row: float  # us of each row
    query: float  # ns of each query, besides
    feature: float  # ns of each query and feature of key and value, besides
    pair: float  # ps of each query and key of dense attention
    pair_feature: float  # ps of each query, key and feature, besides


# By device and whether numbers have 16 bits. CPU: 2 cores, float32, 24 to 128 points a side, E = 16 to 64, 1 to 8
# heads; both grow alike with fewer cores. CUDA: H200, bfloat16, 256 to 1024 points a side, E = 64 and 128, beside
# cuDNN; 32 bits are not measured but taken for eight times as slow. docs/measurements.md, section 13, has the figures.
COSTS = {
    ("cpu", False): DeviceCost(0, 3300, 1500, 31, 250, 10.9),
    ("cpu", True): DeviceCost(0, 3300, 1500, 31, 250, 10.9),
    ("cuda", True): DeviceCost(1600, 0, 1.5, 0.037, 0, 0.004),
    ("cuda", False): DeviceCost(1600, 0, 3, 0.074, 0, 0.032),
}
CAUSAL_PAIRS = 0.5  # of dense attention
CAUSAL_CLUSTERS_COST = 0.7  # clusters of stretches beside a search with clusters, measured on a CPU


def dense_is_cheaper(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> bool:
    """Whether dense attention takes less time than a search with clusters, by what was measured for such tensors.

    Under causal order there is half of the pairs, and no search.
    """
    cost = COSTS.get((q.device.type, q.dtype.itemsize == 2))
    if cost is None:
        return True  # a device without an engine of its own: the reference is far slower than torch
    rows = q.shape[0] * q.shape[1]
    queries = q.shape[2:-1].numel()
    keys = k.shape[2:-1].numel()
    width = q.shape[-1] + v.shape[-1]
    dense = rows * queries * keys * (cost.pair + cost.pair_feature * width) * 1e-6
    searched = rows * (cost.row + queries * (cost.query + cost.feature * width) * 1e-3)
    if causal:
        dense *= CAUSAL_PAIRS
        searched *= CAUSAL_CLUSTERS_COST
    return bool(dense <= max(cost.least, searched))


def goes_dense(q: Tensor, k: Tensor, v: Tensor, request: Request) -> bool:
    """Whether a call of which nothing is said is dense attention: torch has it, and it is cheaper. Shapes decide."""
    has_dense = request.weight == "softmax" and not callable(request.score)
    return has_dense and request.is_automatic and dense_is_cheaper(q, k, v, request.causal)


def default_tail(device: str, weight: Weight, causal: bool, score: Score) -> Tail:
    """Clusters for softmax; no tail for other weights and callable scores."""
    if weight != "softmax" or callable(score):
        return NO_TAIL
    by_device = CAUSAL_CLUSTERS if causal else CLUSTERS
    return by_device.get(device, by_device["cpu"])


def default_search(device: str, tail: Tail) -> Search:
    """Few sweeps where a search starts from routed keys; `Search()` elsewhere."""
    return SEARCHES.get(device, SEARCHES["cpu"]) if tail.keys else Search()


# --- what a call is ---


class _Checked(NamedTuple):
    """What checking a call yields, but for its search and its tail."""

    radius: tuple[int, ...]
    scale: float
    search_engine: EngineSpec
    engine: EngineSpec
    default_tail: Tail
    goes_dense: bool


# To check a call takes longer than to search a small grid, so a kind of call that was valid is not checked again.
_valid: dict[tuple[Any, ...], _Checked] = {}


def resolve(q: Tensor, k: Tensor, v: Tensor | None, request: Request, *, attends: bool = True) -> Resolved:
    """What runs for q [B, H, *G, E], k [B, Hk, *G', E] and v [B, Hk, *G', F]; a search alone attends nothing."""
    if attends and v is None:
        checks.queries_keys(q, k)
        checks.values(q, k, v)
    as_tail(request.tail, NO_TAIL, windows=False)
    search = _checked_search(q, k, request)
    checked = _checked(q, k, v, request, search)
    if request.matches is not None:
        check_matches("matches", q, k, request.matches)
    has_windows = search is not None or request.matches is not None
    tail = as_tail(request.tail, checked.default_tail, windows=False)
    if tail is not checked.default_tail:
        tail.check(tail_kind(request))
        call = MadeFor(checked.radius, checked.scale, request.score, request.key_mask)
        tail.check_tensors("tail", q, k, v, call)
    _check_routing(q, search, tail, request)
    asks_dense = request.search is None and request.matches is None and (request.tail is None or request.tail == "auto")
    dense = v is not None and (asks_dense or checked.goes_dense)
    tail = tail.in_order(q.shape[2:-1].numel()) if request.causal else tail
    if v is not None and not (dense or has_windows or tail.stands_alone):
        raise ValueError("windows need matches: pass search=scram.Search(...), or matches from scram.search")
    return Resolved(
        request=request,
        dense=dense,
        search=search,
        tail=tail,
        radius=checked.radius,
        scale=checked.scale,
        search_engine=checked.search_engine,
        engine=checked.engine,
    )


def _check_routing(q: Tensor, search: Search | None, tail: Tail, request: Request) -> None:
    """Routes and starts that a call names need a tail that has them."""
    check_start(search, tail)
    if search is not None and search.start == "routed" and request.causal:
        raise ValueError(
            "Search(start='routed') is of calls without causal order: there each tile routes by queries before it; "
            "pass start='auto'"
        )
    if request.routes is not None and request.causal:
        raise ValueError("routes are of calls without causal order: there each tile routes by queries before it")
    if request.routes is not None:
        check_routes(q, None if tail.codebook is None else tail.codebook.samples, request.routes)
        if tail.codebook is not None:
            check_budget(tail.codebook, request.routes)


def check_start(search: Search | None, tail: Tail) -> None:
    """Raise where a search is to start from routed keys and there are none."""
    if search is not None and search.start == "routed" and not tail.keys:
        raise ValueError(
            "Search(start='routed') needs clusters with keys to start from: pass tail=scram.Clusters(keys=512), or "
            "codebook= to scram.search"
        )


def tail_kind(request: Request) -> Kind:
    """What a tail is checked against."""
    has_extra = request.extra is not None
    return Kind(request.weight, request.causal, request.score, has_extra, request.dropout_p)


def automatic_search(device: str, tail: Tail, request: Request) -> Search | None:
    """What search="auto" means beside a tail: none beside clusters under causal order, where it was not asked for."""
    if request.causal and tail.orders_alone and not request.searches:
        return None
    return default_search(device, tail)


def as_search(value: Search | Auto | None, default: Search = Search()) -> Search:  # noqa: B008 - frozen
    """The settings of a search; "auto" is the default."""
    if isinstance(value, str):
        checks.one_of("search", value, ("auto",), "; or pass scram.Search(...), such as scram.Search.paper()")
        return default
    checks.instance("search", value, Search, "scram.Search", "; for example scram.Search(matches=4)")
    return cast(Search, value)


def _checked_search(q: Tensor, k: Tensor, request: Request) -> Search | None:
    """The settings of the search, with "auto" replaced."""
    if request.search is None:
        check_warm_matches(request)
        return None
    search = as_search(request.search)
    if isinstance(request.search, str) and isinstance(q, Tensor):
        default = default_tail(q.device.type, request.weight, request.causal, request.score)
        tail = as_tail(request.tail, default, windows=False)
        automatic = automatic_search(q.device.type, tail, request)
        if automatic is None:
            return None
        search = automatic
    checks.enough_keys(q, k, search.matches)
    checks.search_order(search.method, request.causal)
    if search.reach is not None:
        checks.queries_keys(q, k)
        checks.radius(search.reach, q.ndim - 3, "reach")
    if request.warm is not None:
        checks.queries_keys(q, k)
        check_matches("warm", q, k, request.warm)
    return search


def check_warm_matches(request: Request) -> None:
    """Raise where there are matches to start from, and no search that could."""
    if request.search is None and request.warm is not None:
        raise ValueError(
            "warm needs a search that starts from it, got search=None; pass search=scram.Search(...), or leave out warm"
        )


def _checked(q: Tensor, k: Tensor, v: Tensor | None, request: Request, search: Search | None) -> _Checked:
    """The checks of `_check`, once for each kind of call."""
    kind = _kind(q, k, v, request, search)
    if kind is None:
        return _check(q, k, v, request, search)
    try:
        known = _valid.get(kind)
    except TypeError:  # an option that is not hashable is not valid either
        return _check(q, k, v, request, search)
    if known is None:
        known = _check(q, k, v, request, search)
        _expect(q, request, search, known)
        if len(_valid) >= MOST_REMEMBERED:
            _valid.clear()
        _valid[kind] = known
    return known


def _expect(q: Tensor, request: Request, search: Search | None, checked: _Checked) -> None:
    """Tell the engine that a new kind of call begins, where it has a search and routed keys."""
    tail = as_tail(request.tail, checked.default_tail, windows=False)
    if search is not None and tail.keys and not checked.goes_dense:
        gradients = torch.is_grad_enabled() and q.requires_grad
        dispatch.engine(checked.engine.name).expect(q.ndim - 3, accumulator(q.dtype), gradients)


def _kind(q: Tensor, k: Tensor, v: Tensor | None, request: Request, search: Search | None) -> tuple[Any, ...] | None:
    """All that the checks read of a call; None where it holds more tensors, or where torch traces."""
    # A callable is not kept: it may hold tensors.
    simple = (
        request.key_mask is None
        and request.extra is None
        and request.extra_mask is None
        and request.score.__class__ is str
        and request.radius.__class__ is int
    )
    tensors_only = isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    if not simple or not tensors_only or not ops.bypasses_dispatcher((q, k, v)):
        return None
    assert v is not None
    if q.is_nested or k.is_nested or v.is_nested:  # some have no shape
        return None
    tensors = (
        *(q.shape, k.shape, v.shape),
        *(q.dtype, k.dtype, v.dtype),
        *(q.device, k.device, v.device),
        *(q.layout, k.layout, v.layout),
    )
    options = (
        request.causal,
        request.score,
        request.radius,
        request.scale,
        request.weight,
        request.dropout_p,
        request.impl,
        request.is_automatic,
        request.searches,
        request.hints,
    )
    tile_matches = search.matches if search is not None and search.method == "tile" else 0
    return (*tensors, *options, *[x.__class__ for x in options], tile_matches)  # 1 == True


def _check(q: Tensor, k: Tensor, v: Tensor | None, request: Request, search: Search | None) -> _Checked:
    """Every option that is not the search, its warm matches, the matches or the tail."""
    checks.queries_keys(q, k)
    checks.order(q, k, request.causal)
    checks.key_mask(q, k, request.key_mask)
    check_score(request.score)
    check_weight(request.weight)
    if request.hints:
        warn_about_layout(q.shape, k.shape)
    if v is not None:
        checks.values(q, k, v)
        checks.scale(request.scale)
        checks.extra(q, k, v, request.extra)
        checks.extra_mask(q, request.extra, request.extra_mask, request.weight, request.score)
        checks.dropout(request.dropout_p)
    radius = checks.radius(request.radius, q.ndim - 3)
    # A tile search keeps a number of matches that an engine may not take.
    tile_matches = search.matches if search is not None and search.method == "tile" else 0
    choice = (request.impl, q.device, q.dtype, request.score)
    default = default_tail(q.device.type, request.weight, request.causal, request.score)
    return _Checked(
        radius=radius,
        scale=default_scale(request.scale, q.shape[-1], request.score, request.weight),
        search_engine=dispatch.choose(*choice, tile_matches=tile_matches),
        engine=dispatch.choose(*choice),
        default_tail=default,
        goes_dense=v is not None and goes_dense(q, k, v, request),
    )


def clear_caches() -> None:
    _valid.clear()


# --- what a call is, in words ---


@dataclass(frozen=True)
class Explanation:
    """What a call of `scram.attention` would run, why, and what it costs. Prints itself.

    Args:
        dense: whether it is dense attention.
        engine: the implementation that runs it.
        search, radius, tail: the settings in force; None where it is dense, or where there is none.
        reasons: why, in words.
        scores: keys visited per query, at most; `dense_scores`: by dense attention.
        memory: bytes beyond inputs and outputs, about.
    """

    dense: bool
    engine: str
    search: Search | None
    radius: tuple[int, ...] | None
    tail: Tail | None
    reasons: tuple[str, ...]
    scores: int
    dense_scores: int
    memory: int

    def __str__(self) -> str:
        parts = ["search + windows"] * (self.search is not None) + [str(self.tail)] * (self.tail is not None)
        what = "dense attention" if self.dense else " + ".join(parts)
        lines = [f"{what}, by {self.engine}", *self.reasons]
        if self.search is not None:
            lines.append(f"{self.search}, radius {self.radius}")
        lines.append(
            f"{self.scores} keys visited per query, {self.dense_scores} by dense attention; "
            f"{self.memory / 2**20:.1f} MiB beyond inputs and outputs"
        )
        return "\n  ".join(lines)


def explanation(q: Tensor, k: Tensor, v: Tensor, resolved: Resolved) -> Explanation:
    """Of a call of q [B, H, *G, E], k [B, Hk, *G', E] and v [B, Hk, *G', F]."""
    keys = k.shape[2:-1].numel()
    queries = q.shape[:-1].numel()
    size = " x ".join(map(str, q.shape[2:-1]))
    if resolved.dense:
        why = f"on {q.device.type} the grid {size} with width {q.shape[-1]} is too small for a search to be faster"
        if all(device != q.device.type for device, _ in COSTS):
            why = f"{q.device.type} has no engine that is faster than torch"
        return Explanation(
            dense=True,
            engine="torch",
            search=None,
            radius=None,
            tail=None,
            reasons=(why,),
            scores=keys,
            dense_scores=keys,
            memory=0,
        )
    reasons = ["search, tail, warm or impl was given"]
    if resolved.request.is_automatic:
        only_softmax = "torch's attention has softmax and scores by name only"
        what = "a search is" if resolved.search is not None else "clusters are"
        is_dense_cheaper = dense_is_cheaper(q, k, v, resolved.request.causal)
        reasons = [only_softmax if is_dense_cheaper else f"for the grid {size} {what} cheaper"]
    tail = None if resolved.tail is NO_TAIL else resolved.tail
    if tail is None:
        reasons.append("no tail: keys outside the windows count nothing")
    matches = 0 if resolved.search is None else resolved.search.matches
    memory = queries * matches * 8 * 2 + (0 if tail is None else k.shape[:-1].numel() * 8)
    memory += queries // TILE_QUERIES * (0 if tail is None else tail.keys) * 4
    request = resolved.request
    visited = keys_visited(q, k, resolved.search, resolved.radius, resolved.tail, request.score, request.causal)
    return Explanation(
        dense=False,
        engine=resolved.engine.name,
        search=resolved.search,
        radius=resolved.radius,
        tail=tail,
        reasons=tuple(reasons),
        scores=visited.tail,
        dense_scores=keys,
        memory=memory,
    )
