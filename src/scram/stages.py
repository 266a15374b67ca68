"""The stages of a public call: validated arguments become calls, which an engine answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import _compat, calls, draws, errors, ops, places
from .calls import ScoreFunction
from .codebook import Codebook
from .engines import EngineSpec
from .estimators import Clusters, Estimate, Estimator, Hybrid
from .fitting import fitted
from .grid import AllowedKeys, grid_of
from .noise import draw_seed
from .options import Weight, Window
from .scoring import accumulator, prepare_key, prepare_query
from .types import Attended, Matches, Score, Search


class Shard(NamedTuple):
    """What part of a larger call a call is: noise is that of the larger one."""

    rows: Tensor | None  # int64 [B, H], the numbers of the rows of q in the larger call; None: b * H + head
    draw_seed: Callable[[], Tensor]  # a seed, int64 [], the same for all parts


WHOLE = Shard(None, draw_seed)


class Inputs(NamedTuple):
    """The tensors and options of a public call that every stage reads; features are prepared for the score."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_extra: Tensor | None
    v_extra: Tensor | None
    key_mask: Tensor | None
    causal: bool
    scale: float
    score: ScoreFunction | None
    shard: Shard
    dtype: torch.dtype  # of the output: that of the values as they were given

    @property
    def rows(self) -> Tensor | None:
        return self.shard.rows

    def level(self) -> Inputs:
        """Features as wide as the values: for what multiplies both by one unit."""
        dtype = self.v.dtype
        if self.q.dtype.itemsize >= dtype.itemsize:
            return self
        k_extra = None if self.k_extra is None else self.k_extra.to(dtype)
        return self._replace(q=self.q.to(dtype), k=self.k.to(dtype), k_extra=k_extra)

    def rounded(self, out: Tensor) -> Tensor:
        """An output in the dtype of the values that were given."""
        return out.to(self.dtype)


def prepare(
    spec: EngineSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extra: tuple[Tensor, Tensor] | None,
    score: Score,
    scale: float,
    causal: bool,
    key_mask: Tensor | None,
    shard: Shard = WHOLE,
) -> Inputs:
    """Features and values in the dtype that the engine takes: once for all stages of a call."""
    k_extra, v_extra = extra or (None, None)

    def ready(x: Tensor) -> Tensor:
        return x.to(accumulator(x.dtype)) if spec.wide_inputs else x

    return Inputs(
        q=ready(prepare_query(q, score)),
        k=ready(prepare_key(k, score)),
        v=ready(v),
        k_extra=None if k_extra is None else ready(prepare_key(k_extra, score)),
        v_extra=None if v_extra is None else ready(v_extra),
        key_mask=key_mask,
        causal=causal,
        scale=scale,
        score=score if callable(score) else None,
        shard=shard,
        dtype=v.dtype,
    )


def seed_of(settings: Search | Estimator, inputs: Inputs, otherwise: Tensor | None = None) -> Tensor:
    if settings.seed_tensor is not None:
        return settings.seed_tensor
    return inputs.shard.draw_seed() if otherwise is None else otherwise


def search_call(inputs: Inputs, search: Search, seed: Tensor, warm: Matches | None) -> calls.SearchCall:
    reach: tuple[int, ...] = ()
    starts = None
    if search.reach is not None:
        starts = places.starts(inputs.q, grid_of(inputs.k), None if warm is None else warm.index)
        reach = tuple([min(r, 2**31 - 1) for r in errors.radius(search.reach, inputs.q.ndim - 3, "reach")])
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
        score=inputs.score,
    )


def attend_call(
    inputs: Inputs, index: Tensor, radius: tuple[int, ...], weight: Weight, dropout_p: float, window: Window
) -> calls.AttendCall:
    inputs = inputs if window == "query" else inputs.level()
    return calls.AttendCall(
        q=inputs.q,
        k=inputs.k,
        v=inputs.v,
        index=index,
        key_mask=inputs.key_mask,
        k_extra=inputs.k_extra,
        v_extra=inputs.v_extra,
        dropout_seed=inputs.shard.draw_seed() if dropout_p else None,
        rows=inputs.rows,
        radius=radius,
        causal=inputs.causal,
        scale=inputs.scale,
        weight=weight,
        dropout_p=dropout_p,
        window=window,
        score=inputs.score,
    )


def cluster_keys(
    spec: EngineSpec,
    inputs: Inputs,
    score: str,
    clusters: Clusters,
    seed: Tensor,
    warm: Codebook | None,
    index: Tensor | None,
    radius: tuple[int, ...] | None,
) -> Codebook:
    """Clusters of every key head; of every query head where their masks differ, or where they are fitted."""
    inputs = inputs.level()
    q, k, v, mask = inputs.q, inputs.k, inputs.v, inputs.key_mask
    each = q.shape[1] // k.shape[1]
    if each > 1 and mask is not None and mask.ndim == k.ndim - 1:
        k, v = (x.repeat_interleave(each, 1) for x in (k, v))
    made = ops.cluster(
        spec,
        calls.ClusterCall(
            q=q,
            k=k,
            v=v,
            key_mask=mask,
            warm_centres=None if warm is None else warm.centres,
            warm_values=None if warm is None else warm.values,
            seed=seed,
            rows=inputs.rows,
            count=clusters.count,
            steps=clusters.steps if warm is None else min(clusters.steps, 1),
            scale=inputs.scale,
        ),
    )
    book = Codebook(*made, score=score, scale=inputs.scale, key_mask=mask)
    if not clusters.fit:
        return book
    if torch.compiler.is_compiling() or _compat.transforms_active():
        raise errors.fit_is_eager()
    assert index is not None
    assert radius is not None
    return fitted(book, q, inputs.k, inputs.v, index, radius, clusters.fit, seed, inputs.rows)


def join_clusters(
    spec: EngineSpec,
    inputs: Inputs,
    index: Tensor,
    head: Attended,
    book: Codebook,
    radius: tuple[int, ...],
    dropout_p: float,
    window: Window,
) -> Attended:
    """The attention over the windows with clusters for all other keys."""
    inputs = inputs.level()
    call = calls.ClusterTailCall(
        q=inputs.q,
        index=index,
        label=book.label,
        centres=book.centres,
        values=book.values,
        sizes=book.sizes,
        gains=book.gains,
        head_out=head.out,
        head_lse=head.lse,
        dropout_seed=inputs.shard.draw_seed() if dropout_p else None,
        rows=inputs.rows,
        radius=radius,
        scale=inputs.scale,
        dropout_p=dropout_p,
        extras=0 if inputs.k_extra is None else inputs.k_extra.shape[2],
        window=window,
    )
    return ops.cluster_tail(spec, call)


def hybrid(
    spec: EngineSpec,
    inputs: Inputs,
    index: Tensor,
    method: Hybrid,
    radius: tuple[int, ...],
    seed: Tensor,
    dropout_p: float = 0.0,
    window: Window = "query",
) -> calls.DrawnTail:
    """The head by `attend`, then the tail on the keys that the queries of a row share; one seed of dropout for both."""
    inputs = inputs.level()
    head_call = attend_call(inputs, index, radius, "softmax", dropout_p, window)
    head = ops.attend(spec, head_call)
    call = calls.DrawnTailCall(
        q=inputs.q,
        k=inputs.k,
        v=inputs.v,
        index=index,
        key_mask=inputs.key_mask,
        head_out=head.out,
        head_lse=head.lse,
        seed=seed,
        dropout_seed=head_call.dropout_seed,
        rows=inputs.rows,
        samples=method.samples,
        stratified=method.stratified,
        radius=radius,
        causal=inputs.causal,
        scale=inputs.scale,
        dropout_p=dropout_p,
        window=window,
        score=inputs.score,
    )
    return ops.drawn_tail(spec, call)


def sample(spec: EngineSpec, inputs: Inputs, index: Tensor, method: Estimator) -> Estimate:
    """Keys of each query's own; extra keys are an exact head."""
    inputs = inputs.level()
    q, mask, key_grid, settings = inputs.q, inputs.key_mask, grid_of(inputs.k), method.sample_settings()
    legal = AllowedKeys.of(q, inputs.k, inputs.causal, inputs.key_mask)
    # A walk cannot begin at a key that it may not visit; a draw near such a key may be legal.
    modes, count = draws.modes(index, key_grid, legal if settings["method"] == "metropolis" else None)
    head_out = head_lse = None
    if inputs.k_extra is not None:
        nowhere = torch.full_like(index[..., :1], -1)
        head_out, head_lse = ops.attend(
            spec, attend_call(inputs, nowhere, (0,) * len(key_grid), "softmax", 0.0, "query")
        )
    call = calls.SampleCall(
        q=q,
        k=inputs.k,
        v=inputs.v,
        modes=modes,
        count=count,
        total=draws.allowed_counts(q, legal),
        order=None
        if legal.order is None or mask is None
        else legal.order.reshape(*mask.shape[: -len(key_grid)], legal.keys),
        key_mask=inputs.key_mask,
        head_out=head_out,
        head_lse=head_lse,
        seed=seed_of(method, inputs),
        table=draws.step_table(settings.pop("bandwidth"), key_grid, q.device),
        rows=inputs.rows,
        samples=method.samples,
        causal=inputs.causal,
        scale=inputs.scale,
        score=inputs.score,
        **settings,
    )
    return as_estimate(inputs, ops.sample(spec, call), method)


def as_estimate(inputs: Inputs, made: calls.DrawnTail | calls.Sampled | Attended, method: Estimator) -> Estimate:
    """The diagnostics that the method has; gradients pass through `out` and `lse` alone."""
    names = ("lse", "variance", "ess", "acceptance", "rhat")
    fields = {name: getattr(made, name) if name in method.reports else None for name in names}
    constants = {name: x.detach() for name, x in fields.items() if x is not None and name != "lse"}
    return Estimate(out=inputs.rounded(made.out), method=method, **{**fields, **constants})
