"""`scram.explore`: attention of a whole grid as one HTML page."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

import torch
from torch import Tensor

from .. import __version__
from ..core import checks
from ..core.checks import explains
from ..core.precision import ignores_autocast
from ..core.resolve import as_search, default_search, default_tail
from ..core.tails.base import NO_TAIL
from ..core.tails.clusters import Clusters, Codebook
from ..functional import attend, cluster, route
from ..functional import search as search_keys
from ..images.files import replacing
from ..options import Auto, Impl, Panes
from ..quality.truth import Errors, Truth
from ..results import Matches, Routes
from ..settings import Score, Search
from ..spec.grid import Grid, coordinates, grid_of
from ..spec.schedule import tile_of, tile_shape
from ..spec.scoring import check_score, default_scale, prepare_key, prepare_query
from .contents import Attention, Channels, raster_width, stored, thinned
from .pack import Json
from .page import framed, read_back, written

MOST_POINTS = 1 << 18  # over all heads
COARSE = 0.2  # error of the scores by rounding from which fewer queries are shown
COARSEST = 0.4  # from which the whole grid is thinned
FEATURES_SHARE = 0.6  # of the budget, about, for queries and keys
FEWEST_POINTS = 1024  # that are never thinned
STRIDES = (1, 2, 3)  # of the queries that are shown
BUDGET = 12_000_000  # bytes of the file
CODE = 60_000  # bytes of a page without data, about
PANES = get_args(Panes)


@dataclass(frozen=True, eq=False)
class Explorer:
    """A page that shows attention, whole: the result of `explore`. A notebook shows it; `save` writes it.

    Args:
        html: the page, one file that needs no network.
        numbers: how good the approximation is, and what was thinned and rounded.
    """

    html: str
    numbers: Json

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page. A file of that name is replaced when the new one is whole."""
        with replacing(path) as temporary:
            temporary.write_text(self.html, encoding="utf-8")

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.html.encode())

    def _repr_html_(self) -> str:
        return framed(self.html)

    def __repr__(self) -> str:
        about = self.numbers
        grids = " x ".join(map(str, about["queries"]["grid"])), " x ".join(map(str, about["keys"]["grid"]))
        shown = f"{grids[0]} queries" if about["panes"] == 1 else f"{grids[0]} queries, {grids[1]} keys"
        parts = ["windows"] * (about["matches"] > 0) + ["routed keys"] * (about["routed_keys"] > 0)
        held = f", {' and '.join(parts)} hold {about['quality']['attended']:.1%}" if parts else ""
        return (
            f"Explorer({shown}, {len(about['heads'])} heads, {self.size / 1e6:.1f} MB{held}, output error "
            f"{about['quality']['output']:.3f})"
        )


@explains
@ignores_autocast
@torch.no_grad()
def explore(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    search: Search | Auto | None = "auto",
    radius: int | Sequence[int] = 1,
    tail: Clusters | Auto | None = "auto",
    scale: float | None = None,
    score: Score = "dot",
    pictures: Tensor | Sequence[Tensor] = (),
    panes: Panes = "auto",
    title: str = "Attention",
    notes: Sequence[str] = (),
    batch: int = 0,
    num_queries: int = 256,
    seed: int = 0,
    budget: int = BUDGET,
    most_points: int = MOST_POINTS,
    impl: Impl = "auto",
) -> Explorer:
    """One HTML page on which every query of a grid shows where it attends: windows, routed keys, clusters, exactly.

    Clusters the keys, routes, searches with 0, 1, .. sweeps, and stores all of it with rounded features.

    Args:
        q, k, v: [B, H, *G, E], [B, Hk, *G', E], [B, Hk, *G', F].
        search, radius, scale, score, impl: as in `attention`, but never dense; no callable score. `search` None beside
            Clusters: no windows.
        tail: `Clusters` for the keys outside the windows, or None; "auto" is that of `attention`.
        pictures: what the points show: none, one [*G, 3] or [*G, 1] for queries and keys, or two, [*G, 3] and [*G', 3];
            numbers 0 to 1, or uint8. Without, features are shown as colors.
        panes: "one" for queries and keys in one picture (self-attention), "two"; "auto" is one where the grids are
            equal and there are not two pictures.
        title, notes: the heading of the page, and sentences to add to what it says about itself.
        batch: which sample of the batch is shown.
        num_queries: queries that are compared with exact attention, for the figures on top.
        seed: chooses those queries; and the search and the clusters, where the search has no seed of its own.
        budget: bytes that the file may have; features are rounded until it fits.
        most_points: keys over all heads; larger grids are thinned, every second, third, .. point of each axis. Queries
            are thinned by 2 or 3 too where features would be too coarse within the budget. The page says so.

    Returns:
        Explorer, with `save`, and shown by notebooks.

    >>> q = torch.randn(1, 2, 12, 16, 8)
    >>> page = scram.explore(q, q, q, search=scram.Search(seed=0), impl="reference")
    >>> page.numbers["queries"]["grid"], page.size < 200_000
    ([12, 16], True)
    """
    settings, chosen = _validated(
        q, k, v, search=search, radius=radius, tail=tail, scale=scale, score=score, panes=panes, batch=batch
    )
    for name, x in {"budget": budget, "most_points": most_points, "num_queries": num_queries}.items():
        checks.whole(name, x, 1)
    factor = default_scale(scale, q.shape[-1], score, "softmax")
    seed = checks.whole("seed", seed, 0)
    shown = _pictures(pictures, grid_of(q), grid_of(k))
    one = panes == "one" or (panes == "auto" and grid_of(q) == grid_of(k) and len(shown) < 2)
    if one and grid_of(q) != grid_of(k):
        raise ValueError(f'panes="one" needs equal grids of queries and keys, got {grid_of(q)} and {grid_of(k)}')
    whole = (grid_of(q), grid_of(k))
    samples = q.shape[0]
    part, stride, channels = _thin_enough(q[batch], k[batch], v[batch], score, factor, budget, most_points)
    q, k, v = (thinned(x[batch : batch + 1], stride, 2) for x in (q, k, v))
    shown = [thinned(x, stride, 0) for x in shown]
    if settings is not None and settings.seed is None:
        settings = replace(settings, seed=seed)
    codebook = None
    routes = None
    if chosen is not None:
        chosen = chosen if chosen.seed is not None else replace(chosen, seed=settings.seed if settings else seed)
        codebook = cluster(q, k, v, clusters=chosen, scale=factor, score=score, impl=impl)
        routes = route(q, k, codebook, impl=impl) if codebook.keys else None
    sweeps = _sweeps(q, k, settings, codebook, factor, score, impl)
    radii = checks.radius(radius, q.ndim - 3)
    attention = Attention(*part, sweeps, codebook, routes, [_colors(x) for x in shown])
    quality, rms = _quality(
        q,
        k,
        v,
        attention,
        radius=radii,
        scale=factor,
        score=score,
        impl=impl,
        num_queries=num_queries,
        seed=seed,
    )
    about = {
        "format": "scram.explorer",
        "version": 2,
        "scram": __version__,
        "title": str(title),
        "panes": 1 if one else 2,
        "keys": _grid(grid_of(k)),
        "group": attention.group,
        "radius": list(radii),
        "scale": factor,
        "score": score,
        "sweeps": 0 if settings is None else settings.sweeps,
        "matches": 0 if settings is None else settings.matches,
        "separation": 0 if settings is None else settings.separation,
        "clusters": 0 if codebook is None else codebook.sizes.shape[-1],
        "cluster_heads": 0 if codebook is None else codebook.sizes.shape[1],
        "routed_keys": 0 if routes is None or codebook is None else codebook.keys,
        "tile": list(tile_shape(q.ndim - 3)),
        "rms": rms,
        "quality": quality,
        "thinned": None if stride == 1 else {"stride": stride, "queries": list(whole[0]), "keys": list(whole[1])},
        "pictures": len(shown),
        "notes": [*map(str, notes), *[f"Sample {batch} of a batch of {samples}."] * (samples > 1)],
    }
    return _fitted(attention, channels, about, budget, most_points)


def _fitted(attention: Attention, channels: Channels, about: Json, budget: int, most_points: int) -> Explorer:
    """The page: features rounded more coarsely until it fits, with fewer queries where that would be too coarse."""
    most = (budget - CODE) * 3 // 4
    grid = tuple(attention.q.shape[1:-1])
    for _ in range(4):
        for stride in STRIDES:
            some = attention.every(stride, about["panes"] == 1)
            if math.prod(some.q.shape[:-1]) > most_points and stride < STRIDES[-1]:
                continue
            coarsest = COARSE if stride < STRIDES[-1] else math.inf
            contents = stored(some, channels.every(stride, grid), most, coarsest)
            if contents is not None:
                break
        assert contents is not None
        queries = {**_grid(tuple(some.q.shape[1:-1])), "stride": stride, "whole": list(grid)}
        page = written({**about, "queries": queries, **contents.about}, contents.packed)
        size = len(page.encode())
        if size <= budget:
            return Explorer(page, {name: x for name, x in read_back(page)[0].items() if name != "arrays"})
        most = int(most * budget / size * 0.98)
    raise ValueError(f"budget must be at least about {size} bytes for these tensors, got {budget}; or thin the grid")


def _validated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    search: Search | Auto | None,
    radius: int | Sequence[int],
    tail: Any,
    scale: float | None,
    score: Score,
    panes: str,
    batch: int,
) -> tuple[Search | None, Clusters | None]:
    checks.queries_keys(q, k)
    checks.some_queries(q)
    checks.values(q, k, v)
    checks.scale(scale)
    checks.finite_but_for_masked(q, k, v, None)
    checks.radius(radius, q.ndim - 3)
    if not isinstance(score, str):
        raise ValueError('score must be "dot", "cosine" or "l2": a page cannot hold a callable score')
    check_score(score)
    checks.one_of("panes", panes, PANES)
    if checks.whole("batch", batch, 0) >= q.shape[0]:
        raise ValueError(f"batch must be below the {q.shape[0]} samples of q, got {batch}")
    chosen = default_tail(q.device.type, "softmax", False, score) if tail == "auto" else tail
    if chosen is not None:
        checks.instance("tail", chosen, Clusters, "scram.Clusters", ', "auto" or None')
    if search is None:
        if tail is None or tail == "auto":
            raise ValueError(f"search=None beside tail={tail!r} is dense attention; pass tail=scram.Clusters()")
        return None, cast(Clusters, chosen)
    return as_search(search, default_search(q.device.type, chosen or NO_TAIL)), cast("Clusters | None", chosen)


def _sweeps(
    q: Tensor,
    k: Tensor,
    search: Search | None,
    codebook: Codebook | None,
    scale: float,
    score: Score,
    impl: Impl,
) -> list[Matches]:
    """The matches after 0, 1, .. sweeps; none without a search."""
    if search is None:
        return []
    return [
        search_keys(q, k, search=replace(search, sweeps=t), score=score, codebook=codebook, scale=scale, impl=impl)
        for t in range(search.sweeps + 1)
    ]


def _pictures(pictures: Tensor | Sequence[Tensor], grid: Grid, key_grid: Grid) -> list[Tensor]:
    given = [pictures] if isinstance(pictures, Tensor) else list(pictures)
    grids = (grid, key_grid)[: len(given)]
    for picture, own in zip(given, grids, strict=False):
        if len(given) > 2 or not isinstance(picture, Tensor) or picture.shape not in ((*own, 3), (*own, 1)):
            got = [tuple(getattr(x, "shape", ())) for x in given]
            raise ValueError(f"pictures must be [*G, 3] or [*G, 1] of grid {grid}, then one of {key_grid}, got {got}")
    if len(given) == 1 and grid != key_grid:
        raise ValueError(f"pictures must be two, as the grids {grid} and {key_grid} differ")
    return given


def _colors(picture: Tensor) -> Tensor:
    """uint8 [*G, 3]."""
    x = picture.detach().cpu()
    x = x if x.dtype == torch.uint8 else (x.float().nan_to_num(0).clamp(0, 1) * 255).round().byte()
    return x.expand(*x.shape[:-1], 3)


def _thin_enough(
    q: Tensor, k: Tensor, v: Tensor, score: Score, scale: float, budget: int, most_points: int
) -> tuple[tuple[Tensor, Tensor, Tensor], int, Channels]:
    """Tensors [H, *G, E] as `Attention` has them, and every how manyth point of each axis was kept.

    So many that there are not too many keys, nor queries that can be thinned more, and that rounded features fit.
    """
    rank = q.ndim - 2
    stride = 0
    while True:
        stride += 1
        less = [thinned(x, stride, 1) for x in (q, k, v)]
        points = [math.prod(x.shape[:-1]) for x in less]
        if points[1] > most_points or points[0] > STRIDES[-1] ** rank * most_points:
            continue
        part = (
            prepare_query(less[0], score).cpu().double() * scale,
            prepare_key(less[1], score).cpu().double().flatten(1, -2),
            less[2].cpu().double().flatten(1, -2),
        )
        channels = Channels.of(*part)
        few = channels.every(STRIDES[-1], tuple(less[0].shape[1:-1]))
        if few.score_bytes(COARSEST) <= FEATURES_SHARE * 0.75 * budget or max(points) <= FEWEST_POINTS:
            return part, stride, channels


def _grid(grid: Grid) -> Json:
    return {"grid": list(grid), "width": raster_width(grid), "points": math.prod(grid)}


def _quality(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention: Attention,
    *,
    radius: tuple[int, ...],
    scale: float,
    score: Score,
    impl: Impl,
    num_queries: int,
    seed: int,
) -> tuple[Json, list[float]]:
    """Against exact attention of some queries; and the root mean square of the exact outputs of each head."""
    truth = Truth.of(q, k, v, scale=scale, score=score, num_queries=num_queries, seed=seed, with_lse=True)
    sweeps = attention.sweeps
    codebook = attention.codebook
    routes = attention.routes
    grown = []
    for matches in sweeps:
        windows = attend(q, k, v, matches, radius=radius, scale=scale, score=score, impl=impl)
        share = (windows.lse.flatten(2)[..., truth.queries].to(truth.lse.dtype) - truth.lse).exp()
        grown.append(share.mean(-1)[0].tolist())
    last = sweeps[-1] if sweeps else None
    out = attend(q, k, v, last, radius=radius, scale=scale, score=score, tail=codebook, routes=routes, impl=impl).out
    off = truth.errors(out)
    every = Errors.of(truth.square(out).flatten(1)[:, None], truth.size.flatten(1)[:, None], truth.points)
    held = torch.tensor(grown[-1] if grown else [0.0] * q.shape[1], dtype=torch.float64, device="cpu")
    more = 0.0 if routes is None else _routed_share(attention, routes, truth, radius)
    quality = {
        "queries": len(truth.queries),
        "mass": float(held.mean()),
        "attended": float((held + more).mean()),
        "sweeps": grown,
        "output": _number(every.output),
        "median": _number(every.median.value),
        "p95": _number(every.p95.value),
        "heads": [
            {
                "output": _number(off.output[0, h]),
                "median": _number(off.median.value[0, h]),
                "p95": _number(off.p95.value[0, h]),
            }
            for h in range(q.shape[1])
        ],
    }
    rms = truth.size.mean(-1)[0].sqrt()
    return quality, [max(float(x), 1e-30) for x in rms]


def _routed_share(attention: Attention, routes: Routes, truth: Truth, radius: tuple[int, ...]) -> Tensor:
    """The share of the exact attention that lies in routed keys outside the windows [H], mean over the queries."""
    book = attention.codebook
    assert book is not None
    heads = len(attention.q)
    q = attention.q.flatten(1, -2)  # [H, N, E]
    label = book.label[0].flatten(1).cpu().long()  # [Hc, M]
    chosen = routes.chosen[0].cpu()  # [H, T, C]
    queries = truth.queries.cpu()
    tiles = tile_of(queries, routes.grid)
    lse = truth.lse[0].cpu().double()  # [H, n]
    index = attention.sweeps[-1].index[0].flatten(1, -2).cpu().long() if attention.sweeps else None  # [H, N, kappa]
    share = torch.zeros_like(lse)
    for head in range(heads):
        own = label[head * len(label) // heads]
        for n, (query, tile) in enumerate(zip(queries.tolist(), tiles.tolist(), strict=True)):
            keys = ((own >= 0) & chosen[head, tile][own.clamp(min=0)]).nonzero().squeeze(1)
            if index is not None:
                keys = keys[~_in_windows(keys, index[head, query], book.key_grid, radius)]
            logits = attention.k[head // attention.group, keys] @ q[head, query]
            share[head, n] = (logits - lse[head, n]).exp().sum()
    return share.mean(-1)


def _in_windows(keys: Tensor, matches: Tensor, grid: Grid, radius: tuple[int, ...]) -> Tensor:
    """Whether keys [n] lie in the window of a match [kappa], -1 for none: bool [n]."""
    pairs = zip(coordinates(keys, grid), coordinates(matches.clamp(min=0), grid), radius, strict=True)
    near = [(key.unsqueeze(1) - match).abs() <= reach for key, match, reach in pairs]
    return (torch.stack(near).all(0) & (matches >= 0)).any(1)


def _number(x: Tensor) -> float:
    """For JSON, which has no infinity."""
    return float(x.nan_to_num(nan=0.0, posinf=1e30).max())
