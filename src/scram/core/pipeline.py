"""Runs what `resolve` decided: search, then windows and tail, or dense attention. Every entry point ends here."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import _compat
from ..results import Attended, Matches
from ..settings import Search
from ..spec import places
from ..spec.grid import grid_of
from ..spec.scoring import accumulator, prepare_key, prepare_query
from . import calls, checks, ops
from .dense import attend_every_key, every_key
from .dtensors import is_dtensor
from .inputs import WHOLE, Inputs, Shard
from .precision import autocast_device, autocast_inputs
from .resolve import Request, Resolved, resolve
from .tails.base import Joined, Tail
from .tails.codebook import Codebook

R = TypeVar("R")
Stage = Callable[[Resolved, Tensor, Tensor, Tensor | None, Shard], R]


class Result(NamedTuple):
    """What a call computed."""

    out: Tensor  # [B, H, *G, F]
    joined: Joined | None  # lse and diagnostics; None: of dense attention nobody asked for the lse
    searched: calls.Found | None  # by the search
    key_grid: tuple[int, ...]
    tail: Tail | None  # as it was prepared

    @property
    def lse(self) -> Tensor | None:
        """[B, H, *G], log of the normalizer."""
        return None if self.joined is None else self.joined.lse

    @property
    def matches(self) -> Matches | None:
        """What the search found; None without a search."""
        return None if self.searched is None else Matches(self.searched.index, self.searched.score, self.key_grid)

    @property
    def codebook(self) -> Codebook | None:
        """The clusters, where the tail has some."""
        return None if self.tail is None else self.tail.codebook


def execute(stage: Stage[R], q: Tensor, k: Tensor, v: Tensor | None, request: Request) -> R:
    """Resolve a request and run a stage of it: `run`, `search` or `cluster`. Of DTensors each rank runs what it holds.

    Under autocast floats become its dtype, as in torch's own attention.
    """
    autocast = autocast_device(q) if _compat.autocast_active() else None
    if autocast is not None:
        with torch.autocast(autocast, enabled=False):  # inside, accumulators stay float32
            q, k, v, extra = autocast_inputs(autocast, q, k, v, request.extra)
            return execute(stage, q, k, v, request._replace(extra=extra))
    if q.__class__ is not Tensor and is_dtensor(q):
        from ..distributed.dtensor import call_parts

        parts: R = call_parts(stage, q, k, v, request)
        return parts
    return stage(resolve(q, k, v, request, attends=stage is not search), q, k, v, WHOLE)


def run(resolved: Resolved, q: Tensor, k: Tensor, v: Tensor | None, shard: Shard = WHOLE) -> Result:
    """Attention of q [B, H, *G, E] over k [B, Hk, *G', E] and v [B, Hk, *G', F]."""
    assert v is not None
    request = resolved.request
    key_grid = grid_of(k)
    if resolved.dense:
        out = every_key(
            q,
            k,
            v,
            causal=request.causal,
            key_mask=request.key_mask,
            scale=resolved.scale,
            score=request.score,
            weight=request.weight,
            extra=request.extra,
            dropout_p=request.dropout_p,
        )
        attended = Attended(out, _dense_lse(resolved, q, k, v)) if request.needs_lse else None
        return Result(out, attended, None, key_grid, None)
    inputs = prepare(resolved, q, k, v, shard)
    searched, seed = _found(resolved, inputs)
    index = _index(resolved, searched)
    tail = resolved.tail.prepare(inputs, index, seed, request.warm_codebook)
    joined = tail.join(inputs, index, seed)
    return Result(inputs.rounded(joined.out), joined, searched, key_grid, tail)


def _dense_lse(resolved: Resolved, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The log of the normalizer over every key [B, H, *G], which torch's attention does not return."""
    request = resolved.request
    extra = None if request.extra is None else (request.extra[0], request.extra[1][..., :1])
    return attend_every_key(
        q,
        k,
        v[..., :1],
        causal=request.causal,
        key_mask=request.key_mask,
        scale=resolved.scale,
        score=request.score,
        weight=request.weight,
        extra=extra,
    ).lse


def search(resolved: Resolved, q: Tensor, k: Tensor, v: Tensor | None = None, shard: Shard = WHOLE) -> Matches:
    """The search alone."""
    searched, _ = _found(resolved, prepare(resolved, q, k, q[..., :0], shard))
    assert searched is not None
    return Matches(searched.index, searched.score, grid_of(k))


def cluster(resolved: Resolved, q: Tensor, k: Tensor, v: Tensor | None, shard: Shard = WHOLE) -> Codebook:
    """The clusters alone; the matches are those of the request."""
    assert v is not None
    request = resolved.request
    index = None if request.matches is None else request.matches.index
    inputs = prepare(resolved, q, k, v, shard)
    codebook = resolved.tail.prepare(inputs, index, None, request.warm_codebook).codebook
    assert codebook is not None
    return codebook


def prepare(resolved: Resolved, q: Tensor, k: Tensor, v: Tensor, shard: Shard = WHOLE) -> Inputs:
    """Features and values in the dtype that the engines take: once for all stages of a call."""
    request = resolved.request
    score = request.score
    k_extra, v_extra = request.extra or (None, None)
    wide = resolved.engine.wide_inputs or (resolved.search is not None and resolved.search_engine.wide_inputs)
    return Inputs(
        engine=resolved.engine,
        q=_widened(prepare_query(q, score), wide),
        k=_widened(prepare_key(k, score), wide),
        v=_widened(v, wide),
        k_extra=None if k_extra is None else _widened(prepare_key(k_extra, score), wide),
        v_extra=None if v_extra is None else _widened(v_extra, wide),
        key_mask=request.key_mask,
        radius=resolved.radius,
        causal=request.causal,
        scale=resolved.scale,
        score=score,
        weight=request.weight,
        dropout_p=request.dropout_p,
        window=request.window,
        shard=shard,
        dtype=v.dtype,
    )


def _widened(x: Tensor, wide: bool) -> Tensor:
    return x.to(accumulator(x.dtype)) if wide else x


def _found(resolved: Resolved, inputs: Inputs) -> tuple[calls.Found | None, Tensor | None]:
    """What the search found, and its seed; nothing where the matches are given."""
    if resolved.search is None or resolved.request.matches is not None:
        return None, None
    seed = resolved.search.seed_tensor
    if seed is None:
        seed = inputs.shard.draw_seed()
    search_call = _search_call(inputs, resolved.search, seed, resolved.request.warm)
    return ops.search(resolved.search_engine, search_call), seed


def _index(resolved: Resolved, searched: calls.Found | None) -> Tensor:
    """int32 [B, H, *G, kappa]."""
    if searched is not None:
        return searched.index
    if resolved.request.matches is None:
        raise ValueError("windows need matches: pass search=scram.Search(...), or matches from scram.search")
    return resolved.request.matches.index


def _search_call(inputs: Inputs, search: Search, seed: Tensor, warm: Matches | None) -> calls.SearchCall:
    reach: tuple[int, ...] = ()
    starts = None
    if search.reach is not None:
        starts = places.starts(inputs.q, grid_of(inputs.k), None if warm is None else warm.index)
        reach = tuple([min(r, 2**31 - 1) for r in checks.radius(search.reach, inputs.q.ndim - 3, "reach")])
    return calls.SearchCall(
        q=inputs.q,
        k=inputs.k,
        seed=seed,
        key_mask=inputs.key_mask,
        warm=None if warm is None else warm.index,
        rows=inputs.rows,
        starts=starts,
        method=search.resolved_method(inputs.q),
        matches=search.matches,
        separation=search.separation,
        sweeps=search.sweeps,
        jumps=search.jumps,
        propagate=search.propagate,
        gossip=search.gossip,
        reach=reach,
        random=search.random,
        causal=inputs.causal,
        score=inputs.score_function,
    )
