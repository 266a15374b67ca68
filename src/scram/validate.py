"""Checks of whole calls, as the public functions need them. Checks of single arguments are in `errors`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from . import dispatch, errors, ops
from .defaults import default_tail, goes_dense
from .engines import EngineSpec
from .estimators import Estimator
from .layout_hints import warn_about_layout
from .options import Impl, Weight, Window
from .types import Matches, Score, Search

MOST_REMEMBERED = 1000  # kinds of calls


def pairs(q: Tensor, k: Tensor, causal: bool, key_mask: Tensor | None, score: Score) -> None:
    """What every function takes."""
    errors.queries_keys(q, k)
    errors.order(q, k, causal)
    errors.key_mask(q, k, key_mask)
    errors.score(score)
    warn_about_layout(q.shape, k.shape)


def search(q: Tensor, k: Tensor, settings: Search, warm: Matches | None) -> None:
    """What `search` takes besides."""
    errors.settings(settings, Search)
    errors.enough_keys(q, k, settings.matches)
    if settings.reach is not None:
        errors.queries_keys(q, k)
        errors.radius(settings.reach, q.ndim - 3, "reach")
    if warm is not None:
        errors.matches("warm", q, k, warm)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    radius: int | Sequence[int],
    scale: float | None,
    weight: Weight,
    extra: tuple[Tensor, Tensor] | None,
    dropout_p: float,
    window: Window = "query",
) -> tuple[int, ...]:
    """What `attend` takes besides; returns the radius of each axis."""
    errors.values(q, k, v)
    errors.scale(scale)
    errors.weight(weight)
    errors.extra(q, k, v, extra)
    errors.dropout(dropout_p)
    errors.one_of("window", window, errors.WINDOWS)
    return errors.radius(radius, q.ndim - 3)


class Plan(NamedTuple):
    """What validating a call of `attention` yields."""

    radius: tuple[int, ...]  # of each axis
    search: EngineSpec
    attend: EngineSpec
    tail: Estimator | None  # where nothing is said of it
    automatic: bool  # nothing is said of search, tail, warm and engine
    dense: bool  # then: is it cheaper to attend every key?


# To check a call takes longer than to search a small grid, so a kind of call that was valid is not checked again.
_valid: dict[tuple[Any, ...], Plan] = {}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    settings: Search,
    causal: bool,
    key_mask: Tensor | None,
    score: Score,
    radius: int | Sequence[int],
    scale: float | None,
    weight: Weight,
    extra: tuple[Tensor, Tensor] | None,
    dropout_p: float,
    window: Window,
    impl: Impl,
    automatic: bool,
) -> Plan:
    """`pairs` and `attend` together, and which engines search and attend; `automatic`: it may be dense."""
    kind = None
    # A callable is not kept: it may hold tensors.
    simple = key_mask is None and extra is None and score.__class__ is str and radius.__class__ is int
    if simple and ops.bypasses_dispatcher((q, k, v)):
        shapes, dtypes = (q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype)
        places = (q.device, k.device, v.device, q.layout, k.layout, v.layout)
        options = (causal, score, radius, scale, weight, dropout_p, window, impl, automatic)
        tile = settings.matches if settings.method == "tile" else 0
        kind = (*shapes, *dtypes, *places, *options, *[x.__class__ for x in options], tile)  # 1 == True
        try:
            known = _valid.get(kind)
        except TypeError:  # an option that is not hashable is not valid either
            known = kind = None
        if known is not None:
            return known
    pairs(q, k, causal, key_mask, score)
    radii = attend(q, k, v, radius, scale, weight, extra, dropout_p, window)
    attends = dispatch.choose(impl, q.device, q.dtype, score, window)
    tail = default_tail(weight, causal, score)
    dense = automatic and goes_dense(q, k, v, weight, score)
    plan = Plan(radii, search_engine(impl, q, score, settings), attends, tail, automatic, dense)
    if kind is not None:
        if len(_valid) >= MOST_REMEMBERED:
            _valid.clear()
        _valid[kind] = plan
    return plan


def search_engine(impl: Impl, q: Tensor, score: Score, settings: Search) -> EngineSpec:
    """The engine that searches; a tile search keeps a number of matches that an engine may not take."""
    tile_matches = settings.matches if settings.method == "tile" else 0
    return dispatch.choose(impl, q.device, q.dtype, score, tile_matches=tile_matches)


def clear_caches() -> None:
    _valid.clear()
