"""Runs what `resolve` decided: search, then windows and tail, or dense attention. Every entry point ends here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import _compat
from ..results import Attended, Matches, Routes
from ..settings import Search
from ..spec import places
from ..spec.grid import AllowedKeys, grid_of
from ..spec.routing import LEAST_WINDOW
from ..spec.schedule import method_of
from ..spec.scoring import accumulator, prepare_key, prepare_query
from . import calls, checks, first_call, ops
from .dense import attend_every_key, every_key, without_masked
from .dtensors import is_dtensor
from .precision import autocast_device, autocast_inputs
from .resolve import Request, Resolved, resolve, without_bias
from .tails.base import NO_TAIL, WHOLE, Inputs, Joined, Shard, Tail
from .tails.clusters import Codebook

R = TypeVar("R")
Stage = Callable[[Resolved, Tensor, Tensor, Tensor | None, Shard], R]


class Result(NamedTuple):
    """What a call computed."""

    out: Tensor  # [B, H, *G, F]
    joined: Joined | None  # lse and diagnostics; None: of dense attention nobody asked for the lse
    searched: calls.Found | None  # by the search
    key_grid: tuple[int, ...]
    tail: Tail | None  # as it was prepared
    routes: Tensor | None = None  # int32 [B, H, T, W], of the tail

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
            extra = request.extra
            q, k, v, pair = autocast_inputs(autocast, q, k, v, None if extra is None else extra[:2])
            if extra is not None:
                extra = (*pair, *extra[2:])  # a bias stays as it is
            return execute(stage, q, k, v, request._replace(extra=extra))
    if request.bias is not None:
        q, k, v, request = without_bias(q, k, v, request)
    if q.__class__ is not Tensor and is_dtensor(q):
        from ..distributed.dtensor import call_parts

        parts: R = call_parts(stage, q, k, v, request)
        return parts
    resolved = resolve(q, k, v, request, attends=stage not in (search, route))
    has_threads = resolved.engine.wide_inputs and (resolved.search is None or resolved.search_engine.wide_inputs)
    if has_threads and not resolved.dense and _compat.plain_eager():
        with _compat.ONE_THREAD:  # the engine has threads of its own; those of operators between would be in their way
            result = stage(resolved, q, k, v, WHOLE)
    else:
        result = stage(resolved, q, k, v, WHOLE)
    if request.caller is not None and v is not None and isinstance(result, Result) and not resolved.dense:
        _measure_first(resolved, q, k, v, result.out)
    return result


def _measure_first(resolved: Resolved, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """The first searched call of a kind says how far it is off."""
    if ops.bypasses_dispatcher((q, k, v)):
        kind = resolved.kind(q, k, v)
        if kind not in first_call.known_kinds or first_call.pending:
            first_call.measure(resolved, kind, q, k, v, out)


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
            extra=request.extra_pair,
            extra_mask=request.extra_mask,
            dropout_p=request.dropout_p,
        )
        attended = Attended(out, _dense_lse(resolved, q, k, v)) if request.needs_lse else None
        return Result(out, attended, None, key_grid, None)
    inputs = every = prepare(resolved, q, k, v, shard)
    if request.extra_mask is not None:
        inputs = every._replace(k_extra=None, v_extra=None)  # they are joined at the end
    seed = _search_seed(resolved, shard)
    first, inputs = inputs.twice() if resolved.tail.codebook is None else (inputs, inputs)
    tail = resolved.tail.prepare(first, seed, request.warm_codebook)
    routed = tail.route(inputs) if request.routes is None else None
    routes = _bits(request, routed)
    searched = _searched(resolved, inputs, seed, tail, routes)
    joined = tail.join(inputs, _index(inputs, resolved, searched, routed), seed, routes)
    if request.extra_mask is not None:
        joined = _with_extra(every, joined, request.extra_mask)
    return Result(inputs.rounded(joined.out), joined, searched, key_grid, tail, routes)


def _with_extra(inputs: Inputs, joined: Joined, mask: Tensor) -> Attended:
    """What was joined, and the extra keys that the mask [B, X] shows: each is a cluster of one key, or of none."""
    inputs = inputs.level()
    assert inputs.k_extra is not None
    assert inputs.v_extra is not None
    wide = accumulator(inputs.v.dtype)
    k, v = (x.to(wide) for x in without_masked((inputs.k_extra, inputs.v_extra), mask))
    sizes = mask.to(torch.int32).unsqueeze(1).repeat(1, k.shape[1], 1)
    shown = Codebook(
        centers=k,
        values=v,
        sizes=sizes,
        label=torch.full(inputs.k.shape[:-1], -1, dtype=torch.int32, device=k.device),
        variance=k.new_zeros(*k.shape[:2], k.shape[-1]),
        spreads=torch.zeros_like(sizes, dtype=wide),
        score="dot",  # of prepared features
        scale=inputs.scale,
        second_order=False,
    )
    near = Attended(joined.out.to(inputs.v.dtype), joined.lse)
    return shown.beside(near, inputs._replace(k_extra=None, v_extra=None))


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
        extra_mask=request.extra_mask,
    ).lse


def search(resolved: Resolved, q: Tensor, k: Tensor, v: Tensor | None = None, shard: Shard = WHOLE) -> Matches:
    """The search alone; it starts from the keys that a codebook of the request routes."""
    inputs = prepare(resolved, q, k, q[..., :0], shard)
    seed = _search_seed(resolved, shard)
    tail = NO_TAIL if resolved.tail.codebook is None else resolved.tail.prepare(inputs, seed)
    routed = tail.route(inputs) if resolved.search is not None and resolved.search.start != "drawn" else None
    searched = _searched(resolved, inputs, seed, tail, _bits(resolved.request, routed))
    assert searched is not None
    return Matches(searched.index, searched.score, grid_of(k))


def route(resolved: Resolved, q: Tensor, k: Tensor, v: Tensor | None = None, shard: Shard = WHOLE) -> Routes:
    """The routes that the clusters of the request choose, alone."""
    routed = resolved.tail.route(prepare(resolved, q, k, q[..., :0], shard))
    assert routed is not None
    return Routes(routed.routes, grid_of(q), resolved.tail.samples)


def cluster(resolved: Resolved, q: Tensor, k: Tensor, v: Tensor | None, shard: Shard = WHOLE) -> Codebook:
    """The clusters alone."""
    assert v is not None
    inputs = prepare(resolved, q, k, v, shard)
    codebook = resolved.tail.prepare(inputs, None, resolved.request.warm_codebook).codebook
    assert codebook is not None
    return codebook


def prepare(resolved: Resolved, q: Tensor, k: Tensor, v: Tensor, shard: Shard = WHOLE) -> Inputs:
    """Features and values in the dtype that the engines take: once for all stages of a call."""
    request = resolved.request
    score = request.score
    k_extra, v_extra = request.extra_pair or (None, None)
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
        shard=shard,
        dtype=v.dtype,
    )


def _widened(x: Tensor, wide: bool) -> Tensor:
    """In one piece too: each stage would copy it again."""
    return x.to(accumulator(x.dtype)).contiguous() if wide else x


def _search_seed(resolved: Resolved, shard: Shard) -> Tensor | None:
    """The seed of the search, int64 []; None where there is no search."""
    if resolved.search is None or resolved.request.matches is not None:
        return None
    seed = resolved.search.seed_tensor
    return shard.draw_seed() if seed is None else seed


def _searched(
    resolved: Resolved, inputs: Inputs, seed: Tensor | None, tail: Tail, routes: Tensor | None
) -> calls.Found | None:
    """What the search finds; None where the matches are given, or where there is none."""
    if seed is None or resolved.search is None:
        return None
    warm = None if resolved.request.warm is None else resolved.request.warm.index
    search = resolved.search
    starts_routed = search.start == "routed" or (search.start == "auto" and search.reach is None)
    if starts_routed and routes is not None:
        start = tail.start(inputs, routes)
        if warm is not None:
            first = warm[..., :1]  # int32 [B, H, *G, 1]
            warm = torch.cat([torch.where(_is_allowed(inputs, first), first, start), warm[..., 1:]], -1)
        else:
            warm = start
    return ops.search(resolved.search_engine, _search_call(inputs, search, seed, warm))


def _is_allowed(inputs: Inputs, key: Tensor) -> Tensor:
    """Whether each query may attend its key, int32 [B, H, *G, 1] of any value: bool [B, H, *G, 1]."""
    keys = math.prod(grid_of(inputs.k))
    each = key.flatten(0, 1).flatten(1).long()  # [R, N]
    on_grid = (each >= 0) & (each < keys)
    row = torch.arange(each.shape[0], device=key.device).unsqueeze(1)  # [R, 1]
    query = torch.arange(each.shape[1], device=key.device)  # [N]
    allowed = AllowedKeys.of(inputs.q, inputs.k, inputs.causal, inputs.key_mask)
    return (on_grid & allowed.allows(row, query, torch.where(on_grid, each, 0))).reshape(key.shape)


def _bits(request: Request, routed: calls.Routed | None) -> Tensor | None:
    """The routes of a request, or those that were chosen: int32 [B, H, T, W]."""
    if request.routes is not None:
        return request.routes.bits
    return None if routed is None else routed.routes


def _index(
    inputs: Inputs, resolved: Resolved, searched: calls.Found | None, routed: calls.Routed | None
) -> Tensor | None:
    """The matches whose windows are attended, int32 [B, H, *G, kappa]; None where there are no windows.

    A window that holds hardly any of a query's attention, by what its clusters say, is left to them: they describe all
    their keys better than all but some.
    """
    if searched is not None:
        if routed is None:
            return searched.index
        size = math.prod([2 * b + 1 for b in inputs.radius])
        least = routed.lse.float().unsqueeze(-1) + math.log(LEAST_WINDOW / size)
        return torch.where(inputs.scale * searched.score < least, -1, searched.index)
    return None if resolved.request.matches is None else resolved.request.matches.index


def _search_call(inputs: Inputs, search: Search, seed: Tensor, warm: Tensor | None) -> calls.SearchCall:
    reach: tuple[int, ...] = ()
    starts = None
    if search.reach is not None:
        starts = places.starts(inputs.q, grid_of(inputs.k), warm)
        reach = tuple([min(r, 2**31 - 1) for r in checks.radius(search.reach, inputs.q.ndim - 3, "reach")])
    return calls.SearchCall(
        q=inputs.q,
        k=inputs.k,
        seed=seed,
        key_mask=inputs.key_mask,
        warm=warm,
        rows=inputs.rows,
        starts=starts,
        method=method_of(search, inputs.q, inputs.causal),
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
