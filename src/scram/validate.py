"""Whether a call's arguments fit together, as the public functions ask it; the errors are in `errors`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from . import dispatch, errors, ops
from .types import Matches, Score, Search

MOST_SOUND = 1000  # kinds of calls that are remembered


def scores(q: Tensor, k: Tensor, causal: bool, key_mask: Tensor | None, score: Score) -> None:
    """What every function takes."""
    errors.queries_keys(q, k)
    errors.order(q, k, causal)
    errors.key_mask(q, k, key_mask)
    errors.score(score)


def search(q: Tensor, k: Tensor, settings: Search, warm: Matches | None) -> None:
    """What `search` takes besides."""
    errors.settings(settings, Search)
    errors.enough_keys(q, k, settings.matches)
    if warm is not None:
        errors.matches("warm", q, k, warm)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    radius: int | Sequence[int],
    scale: float | None,
    weight: str,
    extra: tuple[Tensor, Tensor] | None,
    dropout_p: float,
    window: str = "query",
) -> tuple[int, ...]:
    """What `attend` takes besides; returns the radius of each axis."""
    errors.values(q, k, v)
    errors.scale(scale)
    errors.weight(weight)
    errors.extra(q, k, v, extra)
    errors.dropout(dropout_p)
    errors.one_of("window", window, errors.WINDOWS)
    return errors.radius(radius, q.ndim - 3)


# By what a sound call was judged -> its radii and implementations. To check a call takes longer than to search a small
# grid, so what was found sound once is not checked again.
_sound: dict[tuple[Any, ...], tuple[tuple[int, ...], str, str]] = {}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    key_mask: Tensor | None,
    score: Score,
    radius: int | Sequence[int],
    scale: float | None,
    weight: str,
    extra: tuple[Tensor, Tensor] | None,
    dropout_p: float,
    window: str,
    impl: str,
) -> tuple[tuple[int, ...], str, str]:
    """`scores` and `attend` for the whole; returns the radius of each axis and who searches and who attends."""
    kind = None
    # A callable is not kept: it may hold tensors.
    if (
        key_mask is None
        and extra is None
        and score.__class__ is str
        and radius.__class__ is int
        and ops.idle((q, k, v))
    ):
        shapes, dtypes = (q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype)
        places = (q.device, k.device, v.device, q.layout, k.layout, v.layout)
        options = (causal, score, radius, scale, weight, dropout_p, window, impl)
        kind = (*shapes, *dtypes, *places, *options, *[x.__class__ for x in options])  # 1 == True
        try:
            known = _sound.get(kind)
        except TypeError:  # an option that is not hashable is not sound either
            known = kind = None
        if known is not None:
            return known
    scores(q, k, causal, key_mask, score)
    radii = attend(q, k, v, radius, scale, weight, extra, dropout_p, window)
    attends = dispatch.choose(impl, q.device, q.dtype, score, window)
    found = radii, dispatch.choose(impl, q.device, q.dtype, score), attends
    if kind is not None:
        if len(_sound) >= MOST_SOUND:
            _sound.clear()
        _sound[kind] = found
    return found
