"""The time of dense attention, which speed-ups are measured against: of all queries, or continued from a part."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .dense import every_key
from .grid import grid_of

# Pairs of queries and keys that dense attention is timed on; beyond, a part of the queries stands for all.
DENSE_PAIRS = {"cpu": 1 << 27, "cuda": 1 << 36}
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


def dense_baseline(q: Tensor, k: Tensor, v: Tensor, *, timer: Timer, longest: float = 0.0, **how: Any) -> Baseline:
    """Times dense attention by torch.

    Args:
        q, k, v: [B, H, *G, E], [B, Hk, *G', E], [B, Hk, *G', F].
        timer: `timing.believed` or `timing.clock`.
        longest: seconds. Where all pairs are more than `DENSE_PAIRS`, a part is timed; its time is continued to all
            queries where these would take longer than that.
        how: causal, key_mask, scale, score and extra, as in `attention`.
    """
    queries = math.prod(grid_of(q))
    keys = math.prod(grid_of(k))
    rows = q.shape[0] * q.shape[1]
    most = DENSE_PAIRS.get(q.device.type, DENSE_PAIRS["cpu"])
    if rows * queries * keys > most:
        part, factor, call = _part(q, k, v, most, how)
        if part < queries:
            found, _ = timer(call, q.device)
            if found.seconds * factor > longest:
                return Baseline(found.seconds * factor, part, queries, found.steady)
    found, _ = timer(partial(every_key, q, k, v, **how), q.device)
    return Baseline(found.seconds, queries, queries, found.steady)


def _part(q: Tensor, k: Tensor, v: Tensor, most: int, how: dict[str, Any]) -> tuple[int, float, Callable[[], Tensor]]:
    """Queries of a part of at most about `most` pairs, how many times as long all take, and the call."""
    rows = q.shape[0] * q.shape[1]
    flat_q, flat_k, flat_v = (x.flatten(2, -2) for x in (q, k, v))  # [B, H, N, E], [B, Hk, M, E], [B, Hk, M, F]
    queries, keys = flat_q.shape[2], flat_k.shape[2]
    mask = how.get("key_mask")
    if mask is not None:
        mask = mask.flatten(mask.ndim - (k.ndim - 3))  # [B, M] or [B, H, M]
    if how.get("causal"):  # the first queries have few keys: a smaller problem stands for it
        part = min(queries, max(LEAST_CAUSAL, math.isqrt(most // rows)))
        flat_k, flat_v = flat_k[:, :, :part], flat_v[:, :, :part]
        mask = None if mask is None else mask[..., :part]
        factor = (queries / part) ** 2
    else:
        part = min(queries, max(LEAST_QUERIES, most // (rows * keys)))
        factor = queries / part
    call = partial(every_key, flat_q[:, :, :part], flat_k, flat_v, **{**how, "key_mask": mask})
    return part, factor, call
