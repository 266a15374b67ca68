"""The time of dense attention, which speed-ups are measured against: of all queries, or continued from a part."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..core.dense import every_key
from ..settings import Score
from ..spec.grid import grid_of
from .timing import Yardstick

# Pairs of queries and keys that dense attention is timed on; beyond, a part of the queries stands for all.
DENSE_PAIRS = {"cpu": 1 << 27, "cuda": 1 << 36}
YARDSTICK_PAIRS = {"cpu": 1 << 23, "cuda": 1 << 28}
LEAST_QUERIES = 256  # of a part
LEAST_CAUSAL = 1024  # queries and keys of a part under causal order


class Measured(Protocol):
    """What a timer returns: `timing.Timing` or `timing.Believed`."""

    @property
    def seconds(self) -> float: ...

    @property
    def steady(self) -> bool: ...


Timer = Callable[[Callable[[], Tensor], torch.device], tuple[Measured, Tensor]]


class Baseline(NamedTuple):
    """The time of dense attention.

    Args:
        seconds: of all queries.
        timed: queries that were timed.
        queries: queries in all.
        steady: whether its runs agreed.
    """

    seconds: float
    timed: int
    queries: int
    steady: bool

    @property
    def continued(self) -> bool:
        """Whether the time of a part stands for all."""
        return self.timed < self.queries


def dense_baseline(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    timer: Timer,
    longest: float = 0.0,
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    score: Score = "dot",
    extra: tuple[Tensor, Tensor] | None = None,
    extra_mask: Tensor | None = None,
) -> Baseline:
    """Times dense attention by torch.

    Args:
        q, k, v: [B, H, *G, E], [B, Hk, *G', E], [B, Hk, *G', F].
        timer: `timing.believed` or `timing.clock`.
        longest: seconds. Where all pairs are more than `DENSE_PAIRS`, a part is timed; its time is continued to all
            queries where these would take longer than that.
        causal, key_mask, scale, score, extra, extra_mask: as in `attention`.
    """
    queries = math.prod(grid_of(q))
    keys = math.prod(grid_of(k))
    rows = q.shape[0] * q.shape[1]
    attend = partial(every_key, causal=causal, scale=scale, score=score, extra=extra, extra_mask=extra_mask)
    most = DENSE_PAIRS.get(q.device.type, DENSE_PAIRS["cpu"])
    if rows * queries * keys > most:
        part = _part(q, k, v, key_mask, causal, most)
        if part.queries < queries:
            time, _ = timer(partial(attend, part.q, part.k, part.v, key_mask=part.key_mask), q.device)
            if time.seconds * part.factor > longest:
                return Baseline(time.seconds * part.factor, part.queries, queries, time.steady)
    time, _ = timer(partial(attend, q, k, v, key_mask=key_mask), q.device)
    return Baseline(time.seconds, queries, queries, time.steady)


def yardstick(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_mask: Tensor | None = None, scale: float | None = None
) -> Yardstick:
    """Dense attention of so few queries that it takes some milliseconds; arguments as in `dense_baseline`."""
    part = _part(q, k, v, key_mask, causal, YARDSTICK_PAIRS.get(q.device.type, YARDSTICK_PAIRS["cpu"]))
    return Yardstick(
        partial(every_key, part.q, part.k, part.v, causal=causal, scale=scale, key_mask=part.key_mask), q.device
    )


class _Part(NamedTuple):
    """A part of a call that is timed in place of all of it."""

    q: Tensor  # [B, H, n, E]
    k: Tensor  # [B, Hk, m, E]
    v: Tensor  # [B, Hk, m, F]
    key_mask: Tensor | None  # bool [B, m] or [B, H, m]
    factor: float  # how many times as long all queries take

    @property
    def queries(self) -> int:
        return self.q.shape[2]


def _part(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, causal: bool, most: int) -> _Part:
    """The first queries, so many that they have at most about `most` pairs; arguments as in `dense_baseline`."""
    rows = q.shape[0] * q.shape[1]
    flat_q, flat_k, flat_v = (x.flatten(2, -2) for x in (q, k, v))  # [B, H, N, E], [B, Hk, M, E], [B, Hk, M, F]
    queries = flat_q.shape[2]
    mask = None
    if key_mask is not None:
        mask = key_mask.flatten(key_mask.ndim - (k.ndim - 3))  # [B, M] or [B, H, M]
    if causal:  # the first queries have few keys: a smaller problem stands for it
        part = min(queries, max(LEAST_CAUSAL, math.isqrt(most // rows)))
        flat_k = flat_k[:, :, :part]
        flat_v = flat_v[:, :, :part]
        mask = None if mask is None else mask[..., :part]
        factor = (queries / part) ** 2
    else:
        part = min(queries, max(LEAST_QUERIES, most // (rows * flat_k.shape[2])))
        factor = queries / part
    return _Part(flat_q[:, :, :part], flat_k, flat_v, mask, factor)
