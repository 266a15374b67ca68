"""The public functions: each builds a `Request` and runs it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from inspect import signature
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor

from ._compat import ONE_THREAD
from .core import checks, dtensors, first_call, layout_hints, pipeline, resolve
from .core.bias import Bias, Extra, Pair
from .core.checks import explains, unknown_arguments
from .core.decoding import Cache, check_newest
from .core.decoding import decode as decode_newest
from .core.dense import attend_extra
from .core.exact import merge
from .core.pipeline import Result, execute
from .core.resolve import Explanation, Request, as_search, explanation
from .core.tails import sampled  # noqa: F401 - its classes are named in messages
from .core.tails.base import NO_TAIL, Tail, as_tail, tails_by_name
from .core.tails.clusters import Clusters, Codebook
from .core.tails.estimate import Estimate
from .engines import dispatch
from .options import Auto, Impl, Weight
from .results import Attended, Matches, Routes
from .settings import Score, Search
from .spec import draws
from .spec.grid import grid_of

__all__ = [
    "attend",
    "attention",
    "clear_caches",
    "cluster",
    "decode",
    "estimate",
    "explain",
    "local",
    "merge",
    "route",
    "search",
    "single_pool",
]
NO_DIAGNOSTICS = dict.fromkeys(("variance", "ess", "acceptance", "rhat"))


@explains
def search(
    q: Tensor,
    k: Tensor,
    *,
    search: Search = Search(),  # noqa: B008 - frozen
    causal: bool = False,
    key_mask: Tensor | None = None,
    score: Score = "dot",
    warm: Matches | None = None,
    codebook: Codebook | None = None,
    scale: float | None = None,
    bias: Bias | Pair | None = None,
    impl: Impl = "auto",
) -> Matches:
    """For every query the keys with the highest scores anywhere on the key grid, by randomized search.

    Args:
        q: queries [B, H, *G, E].
        k: keys [B, Hk, *G', E]; Hk divides H, the grids have equal rank and may differ in size.
        search: how to look; `Search.paper()` is the paper's Algorithm 1.
        causal: a query may attend keys up to itself in row-major order (equal grids).
        key_mask: bool [B, *G'] or [B, H, *G'], True = may be attended.
        score: "dot", "cosine", "l2" (negative squared distance), or a callable (q [..., E], k [..., E]) -> [...].
        warm: matches of an earlier search on the same shapes, index [B, H, *G, kappa], to start from; their kappa may
            differ.
        codebook: clusters with `keys`, from `cluster`: each query's first match starts at the best key of the clusters
            that its tile attends one by one. With it fewer sweeps find as much.
        scale: for which the codebook was made, and beside a bias; nothing else reads it.
        bias: (a [B or 1, H or 1, *G, r], b [B or 1, Hk or 1, *G', r]), or a `scram.bias.Bias`, for score="dot": query i
            and key j get <a_i, b_j> besides the scaled score.
        impl: "auto" or the name of an implementation; a name never falls back to another.

    Returns:
        Matches with index and score [B, H, *G, kappa], best first.

    >>> import scram
    >>> _ = torch.manual_seed(0)
    >>> q = torch.randn(1, 2, 16, 16, 8)
    >>> matches = scram.search(q, q, search=scram.Search(matches=2, seed=0))
    >>> matches
    Matches(512 queries on grid (16, 16), keys on grid (16, 16), kappa=2, batch=1, heads=2, found 100.0 %, cpu)
    """
    as_search(search)
    if codebook is not None:
        checks.instance("codebook", codebook, Codebook, "scram.Codebook", "; scram.cluster returns one")
    request = Request(
        search=search,
        tail=codebook,
        causal=causal,
        key_mask=key_mask,
        scale=scale,
        score=score,
        warm=warm,
        impl=impl,
        bias=bias,
        keeps_matches=True,
        hints=True,
    )
    return execute(pipeline.search, q, k, None, request)


@explains
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    matches: Matches | None,
    *,
    radius: int | Sequence[int] = 1,
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    score: Score = "dot",
    weight: Weight = "softmax",
    extra: Extra | None = None,
    bias: Bias | Pair | None = None,
    dropout_p: float = 0.0,
    tail: Tail | None = None,
    routes: Routes | None = None,
    impl: Impl = "auto",
) -> Attended:
    """Attention of every query over the windows around its matches: the union of them, each key once.

    With a `tail` all keys outside the windows count too, by clusters or by drawn keys; `lse` is then an estimate over
    all allowed keys.

    Differentiable in q, k, v and extra, through `out` and through `lse`; once, and in reverse mode. For second
    derivatives and forward mode use impl="reference".

    Args:
        q: queries [B, H, *G, E].
        k: keys [B, Hk, *G', E]; Hk divides H, the grids have equal rank and may differ in size.
        v: values [B, Hk, *G', F]. They may be float32 beside q and k of 16 bits, as for coordinates, which 16 bits
            would round; the output has v's dtype. Under autocast all take its dtype.
        matches: the centers of the windows, from `search`; index [B, H, *G, kappa]. None beside a `Codebook` or
            `Clusters`: no windows.
        radius: b, each match brings the (2b+1)^rank keys around it; an int or one per axis.
        causal: a query may attend keys up to itself in row-major order (equal grids).
        key_mask: bool [B, *G'] or [B, H, *G'], True = may be attended; other keys are left out of the windows.
        scale: factor on the score, > 0; default E**-0.5 for "dot" under "softmax", else 1.
        score: "dot", "cosine", "l2" (negative squared distance), or a callable (q [..., E], k [..., E]) -> [...].
        weight: "softmax"; "mean", the score itself over the number of keys; "relu", its positive part likewise.
            A search finds the highest scores: under "mean" large negative ones are missed.
        extra: (k_extra [B, Hk, X, E], v_extra [B, Hk, X, F]), keys off the grid that every query attends too. Beside a
            bias they have none, or with (k_extra, v_extra, b_extra [B or 1, Hk or 1, X, r]) theirs.
        bias: (a [B or 1, H or 1, *G, r], b [B or 1, Hk or 1, *G', r]), or a `scram.bias.Bias`, for score="dot": query i
            and key j get <a_i, b_j> besides the scaled score. Differentiable in both.
        dropout_p: probability in [0, 1) that a weight is dropped after the softmax; lse is without it. In force
            whenever > 0, so pass 0 when evaluating; `torch.manual_seed` governs it.
        tail: a `Codebook` from `cluster`, made with the same score, scale and mask, or `Clusters`, which make one; only
            for softmax. Gradients reach k and v through it too, where it has them. Dropout takes a
            cluster for a key. Or `DrawnKeys`, keys drawn, for softmax: dropout takes a drawn key for itself, whatever
            it stands for.
        routes: which clusters of the codebook each tile attends key by key, from `route`; None: it chooses them.
        impl: "auto" or the name of an implementation; a name never falls back to another.

    Returns:
        Attended(out [B, H, *G, F], lse [B, H, *G]).

    >>> import scram
    >>> _ = torch.manual_seed(0)
    >>> q, k, v = torch.randn(3, 1, 2, 16, 16, 8).unbind()
    >>> matches = scram.search(q, k, search=scram.Search(seed=0))
    >>> out, lse = scram.attend(q, k, v, matches, radius=2)
    >>> out.shape, lse.shape
    (torch.Size([1, 2, 16, 16, 8]), torch.Size([1, 2, 16, 16]))
    """
    if isinstance(tail, str):
        raise TypeError(f"tail must be None or settings such as scram.Clusters(), got {tail!r}")
    if matches is not None or not as_tail(tail, NO_TAIL).stands_alone:
        checks.instance("matches", matches, Matches, "scram.Matches", "; scram.search returns one")
    request = Request(
        search=None,
        tail=tail,
        radius=radius,
        causal=causal,
        key_mask=key_mask,
        scale=scale,
        score=score,
        weight=weight,
        extra=extra,
        dropout_p=dropout_p,
        impl=impl,
        bias=bias,
        matches=matches,
        routes=routes,
        hints=True,
    )
    return _attended(q, k, v, request)


@explains
def cluster(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    clusters: Clusters = Clusters(),  # noqa: B008 - frozen
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    score: Score = "dot",
    bias: Bias | Pair | None = None,
    warm: Codebook | None = None,
    impl: Impl = "auto",
) -> Codebook:
    """Keys grouped by content, as the queries and the values see it: what `attend(tail=...)` uses for far keys.

    Differentiable in k and v given the groups.

    Args:
        q: queries [B, H, *G, E].
        k: keys [B, Hk, *G', E]; Hk divides H, the grids have equal rank and may differ in size.
        v: values [B, Hk, *G', F].
        clusters: how many, and how they are found.
        causal: for calls in causal order: positions are cut into stretches (`Clusters(stretch=...)`), each with
            clusters of its own, which come from its own positions alone.
        key_mask: bool [B, *G'] or [B, H, *G'], True = may be attended; the clusters serve calls with the same mask,
            scale and score.
        scale: factor on the score, > 0; default E**-0.5 for "dot", else 1.
        score: "dot", "cosine" or "l2" (negative squared distance); no callable.
        bias: (a [B or 1, H or 1, *G, r], b [B or 1, Hk or 1, *G', r]), or a `scram.bias.Bias`, for score="dot": query i
            and key j get <a_i, b_j> besides the scaled score. Differentiable in both.
        warm: clusters to start from (the last frame, layer or step), as many, of keys and values as wide: centers
            [B, Hc, C, E'], values [B, Hc, C, F]; then k-means makes one step at most.
        impl: "auto" or the name of an implementation; a name never falls back to another.

    Returns:
        Codebook.

    >>> import scram
    >>> _ = torch.manual_seed(0)
    >>> q, k, v = torch.randn(3, 1, 2, 16, 16, 8).unbind()
    >>> matches = scram.search(q, k, search=scram.Search(seed=0))
    >>> codebook = scram.cluster(q, k, v, clusters=scram.Clusters(count=64, seed=0))
    >>> out, lse = scram.attend(q, k, v, matches, tail=codebook)
    >>> exact = scram.exact_attention(q, k, v).out
    >>> bool((out - exact).norm() < 0.5 * (scram.attend(q, k, v, matches).out - exact).norm())
    True
    """
    checks.instance("clusters", clusters, Clusters, "scram.Clusters", "; for example scram.Clusters(count=256)")
    request = Request(
        search=None,
        tail=clusters,
        causal=causal,
        key_mask=key_mask,
        scale=scale,
        score=score,
        impl=impl,
        bias=bias,
        warm_codebook=warm,
        hints=True,
    )
    return execute(pipeline.cluster, q, k, v, request)


@explains
def route(q: Tensor, k: Tensor, codebook: Codebook, *, bias: Bias | Pair | None = None, impl: Impl = "auto") -> Routes:
    """Which clusters of a codebook each tile of 64 queries attends key by key: those whose means are most wrong for it.

    `attention` and `attend` choose the same; pass the result to `attend(routes=...)` to keep a choice.

    Args:
        q: queries [B, H, *G, E].
        k: keys [B, Hk, *G', E], those of the codebook.
        codebook: from `cluster`, with its `keys`.
        bias: (a [B or 1, H or 1, *G, r], b [B or 1, Hk or 1, *G', r]), or a `scram.bias.Bias`, for score="dot": query i
            and key j get <a_i, b_j> besides the scaled score. Differentiable in both.
        impl: "auto" or the name of an implementation; a name never falls back to another.

    Returns:
        Routes of the T tiles of a head.

    >>> import scram
    >>> _ = torch.manual_seed(0)
    >>> q, k, v = torch.randn(3, 1, 2, 16, 16, 8).unbind()
    >>> codebook = scram.cluster(q, k, v, clusters=scram.Clusters(count=64, keys=32, seed=0))
    >>> scram.route(q, k, codebook).chosen.shape
    torch.Size([1, 2, 4, 64])
    """
    checks.instance("codebook", codebook, Codebook, "scram.Codebook", "; scram.cluster returns one")
    if codebook.grid is not None:
        raise ValueError("route takes no clusters under causal order: there each tile routes by queries before it")
    if not codebook.keys:
        raise ValueError("route needs a codebook with keys; make it with scram.Clusters(keys=512)")
    request = Request(
        search=None,
        tail=codebook,
        key_mask=codebook.key_mask,
        scale=codebook.scale,
        score=cast(Score, codebook.score),
        impl=impl,
        bias=bias,
        hints=True,
    )
    return execute(pipeline.route, q, k, None, request)


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    search: Search | Auto | None = "auto",
    radius: int | Sequence[int] = 1,
    tail: Tail | Auto | None = "auto",
    error: float | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    score: Score = "dot",
    weight: Weight = "softmax",
    extra: Extra | None = None,
    extra_mask: Tensor | None = None,
    bias: Bias | Pair | None = None,
    dropout_p: float = 0.0,
    warm: Matches | None = None,
    impl: Impl = "auto",
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    search: Search | Auto | None = "auto",
    radius: int | Sequence[int] = 1,
    tail: Tail | Auto | None = "auto",
    error: float | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    score: Score = "dot",
    weight: Weight = "softmax",
    extra: Extra | None = None,
    extra_mask: Tensor | None = None,
    bias: Bias | Pair | None = None,
    dropout_p: float = 0.0,
    warm: Matches | None = None,
    impl: Impl = "auto",
    return_lse: Literal[True],
) -> Attended: ...
@explains
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    search: Search | Auto | None = "auto",
    radius: int | Sequence[int] = 1,
    tail: Tail | Auto | None = "auto",
    error: float | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    score: Score = "dot",
    weight: Weight = "softmax",
    extra: Extra | None = None,
    extra_mask: Tensor | None = None,
    bias: Bias | Pair | None = None,
    dropout_p: float = 0.0,
    warm: Matches | None = None,
    impl: Impl = "auto",
    return_lse: bool = False,
) -> Tensor | Attended:
    """Attention on a grid in O(n log n): windows around the best keys of every query, all other keys by clusters.

    Stands where `F.scaled_dot_product_attention` stood; `q.unflatten(2, grid)` turns [B, H, N, E] into what it takes.
    With search, tail, warm and impl left alone it is dense attention by torch, exact, where that is faster, as on small
    grids. `explain` says what would run. The first searched call of a kind measures itself on 64 queries of each head,
    and warns where it is more than 25 % off (`AccuracyWarning`, `check_first_call`). Of DTensors, cut along batch or
    heads, each rank attends its part.

    Args:
        q: queries [B, H, *G, E].
        k: keys [B, Hk, *G', E]; Hk divides H, the grids have equal rank and may differ in size.
        v: values [B, Hk, *G', F].
        search: how to look; "auto" is few sweeps of `Search` from the best routed keys. A seed in it governs the tail
            too. None beside `Clusters` or a `Codebook`: no search and no windows; else dense attention.
        radius: b, each match brings the (2b+1)^rank keys around it; an int or one per axis.
        tail: what stands for the keys outside the windows: `Clusters`, a `Codebook` from `cluster`, `DrawnKeys` (keys
            drawn), or None, the paper's sparse attention: nothing does. "auto" is Clusters; None for weight="mean" or
            "relu" and callable scores. Clusters under causal order are those of stretches of positions; "auto" searches
            nothing there.
        error: a budget in place of search and tail, such as 0.05: the first call of a kind (shapes, dtypes, device,
            options) runs `tune` on its tensors, which takes as long as dozens of calls, and all later ones its plan.
            It is not measured again until `clear_plans`. To save a plan, to check it on other tensors or to compile
            it, call `tune` and the plan itself. None: the default, which promises no error.
        causal: a query may attend keys up to itself in row-major order (equal grids).
        key_mask: bool [B, *G'] or [B, H, *G'], True = may be attended.
        scale: factor on the score, > 0; default E**-0.5 for "dot" under "softmax", else 1.
        score: "dot", "cosine", "l2" (negative squared distance), or a callable (q [..., E], k [..., E]) -> [...].
        weight: "softmax"; "mean", the score itself over the number of keys; "relu", its positive part likewise.
        extra: (k_extra [B, Hk, X, E], v_extra [B, Hk, X, F]), keys off the grid that every query attends too. Beside a
            bias they have none, or with (k_extra, v_extra, b_extra [B or 1, Hk or 1, X, r]) theirs.
        extra_mask: bool [B, X], True = may be attended, as for padded text.
        bias: (a [B or 1, H or 1, *G, r], b [B or 1, Hk or 1, *G', r]), or a `scram.bias.Bias`, for score="dot": query i
            and key j get <a_i, b_j> besides the scaled score. Differentiable in both.
        dropout_p: probability in [0, 1) that a weight is dropped after the softmax. In force whenever > 0, so pass 0
            when evaluating; `torch.manual_seed` governs it.
        warm: matches of an earlier search on the same shapes, index [B, H, *G, kappa], to start from.
        impl: "auto" or the name of an implementation; a name never falls back to another.
        return_lse: whether the log of the normalizer is returned too, over all keys that count (by a tail: estimated).
            Where the call is dense attention it is computed apart, since torch does not return it.

    Returns:
        out [B, H, *G, F], or with `return_lse` Attended(out, lse [B, H, *G]).

    >>> import scram
    >>> _ = torch.manual_seed(0)
    >>> q, k, v = torch.randn(3, 1, 2, 256, 8).unbind()
    >>> grid = (16, 16)
    >>> out = scram.attention(q.unflatten(2, grid), k.unflatten(2, grid), v.unflatten(2, grid))
    >>> out.flatten(2, 3).shape
    torch.Size([1, 2, 256, 8])
    """
    if search is not None:
        as_search(search)
    checks.flag("return_lse", return_lse)
    as_tail(tail, NO_TAIL)
    request = Request(
        search=search,
        tail=tail,
        radius=radius,
        causal=causal,
        key_mask=key_mask,
        scale=scale,
        score=score,
        weight=weight,
        extra=extra,
        extra_mask=extra_mask,
        dropout_p=dropout_p,
        warm=warm,
        impl=impl,
        bias=bias,
        needs_lse=return_lse,
        hints=True,
        caller="attention",
    )
    if error is not None:
        from .quality.kept import kept_plan

        plan = kept_plan(q, k, v, request, error)
        request = plan.setting.applied_to(request)._replace(impl="auto" if plan.dense else impl, caller=None)
    if return_lse:
        return _attended(q, k, v, request)
    return execute(pipeline.run, q, k, v, request).out


def explain(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Explanation:
    """What `attention` would run with these arguments, why, and what it costs; nothing is computed.

    Args:
        q: queries [B, H, *G, E].
        k: keys [B, Hk, *G', E]; Hk divides H, the grids have equal rank and may differ in size.
        v: values [B, Hk, *G', F].
        arguments: options of `attention`, by name; not `error`, for which `tune` prints what it found.

    >>> import scram
    >>> q = torch.zeros(1, 1, 16, 16, 64)
    >>> print(scram.explain(q, q, q))
    dense attention, by torch
      on cpu the grid 16 x 16 with width 64 is too small for a search to be faster
      256 keys visited per query, 256 by dense attention; 0.0 MiB beyond inputs and outputs
    """
    known = {name: x for name, x in signature(attention).parameters.items() if name not in ("q", "k", "v", "error")}
    unknown = [name for name in arguments if name not in known]
    if unknown:
        raise unknown_arguments("explain", unknown, known)
    if arguments.get("search", "auto") is not None:
        as_search(arguments.get("search", "auto"))
    needs_lse = arguments.pop("return_lse", False)
    request = Request(**arguments, needs_lse=needs_lse)
    q, k, wide, request = resolve.without_bias(q, k, v, request)
    v = v if wide is None else wide
    return explanation(q, k, v, resolve.resolve(q, k, v, request))


@explains
def estimate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    matches: Matches,
    *,
    method: Tail,
    radius: int | Sequence[int] = 1,
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    score: Score = "dot",
    extra: Extra | None = None,
    bias: Bias | Pair | None = None,
    impl: Impl = "auto",
) -> Estimate:
    """Exact softmax attention estimated from a number of keys, with diagnostics; for attention that is not sparse.

    Differentiable in q, k, v and extra through `out` and `lse`; what was drawn, and how likely, carries no gradient.

    Args:
        q: queries [B, H, *G, E].
        k: keys [B, Hk, *G', E]; Hk divides H, the grids have equal rank and may differ in size.
        v: values [B, Hk, *G', F].
        matches: where each query's attention peaks, from `search`; index [B, H, *G, kappa].
        method: `Clusters`, `DrawnKeys`, `Snis` or `MetropolisHastings`, with the number of clusters or samples.
        radius: of the windows that `Clusters` and `DrawnKeys` attend exactly; the others do not use it.
        causal: a query may attend keys up to itself in row-major order (equal grids).
        key_mask: bool [B, *G'] or [B, H, *G'], True = may be attended.
        scale: factor on the score, > 0; default E**-0.5 for "dot", else 1.
        score: "dot", "cosine", "l2" (negative squared distance), or a callable (q [..., E], k [..., E]) -> [...].
            Clusters take no callable.
        extra: (k_extra [B, Hk, X, E], v_extra [B, Hk, X, F]), keys off the grid that every query attends too. Beside a
            bias they have none, or with (k_extra, v_extra, b_extra [B or 1, Hk or 1, X, r]) theirs. Not with
            MetropolisHastings.
        bias: (a [B or 1, H or 1, *G, r], b [B or 1, Hk or 1, *G', r]), or a `scram.bias.Bias`, for score="dot": query i
            and key j get <a_i, b_j> besides the scaled score. Differentiable in both.
        impl: "auto" or the name of an implementation; a name never falls back to another.

    Returns:
        Estimate: out and variance [B, H, *G, F]; lse, ess, acceptance and rhat [B, H, *G]. None where a method has
            none.

    >>> import scram
    >>> _ = torch.manual_seed(0)
    >>> q, k, v = torch.randn(3, 1, 2, 16, 16, 8).unbind()
    >>> matches = scram.search(q, k, search=scram.Search(matches=4, seed=0))
    >>> estimated = scram.estimate(q, k, v, matches, method=scram.DrawnKeys(samples=256, seed=0))
    >>> exact = scram.exact_attention(q, k, v)  # 256 samples are all keys
    >>> bool(torch.allclose(estimated.out, exact.out, atol=1e-5)), float(estimated.variance.max())
    (True, 0.0)
    """
    if not isinstance(method, Tail):
        names = ", ".join(f"scram.{name}" for name in tails_by_name())
        raise TypeError(f"method must be one of {names}, got {type(method).__name__}; for example scram.Clusters()")
    checks.instance("matches", matches, Matches, "scram.Matches", "; scram.search returns one")
    request = Request(
        search=None,
        tail=method,
        radius=radius,
        causal=causal,
        key_mask=key_mask,
        scale=scale,
        score=score,
        extra=extra,
        impl=impl,
        bias=bias,
        matches=matches,
        hints=True,
    )
    result = execute(pipeline.run, q, k, v, request)
    # Gradients pass through `out` and `lse` alone.
    diagnostics = {name: getattr(result.joined, name).detach() for name in method.reports if name != "lse"}
    lse = result.lse if "lse" in method.reports else None
    return Estimate(out=result.out, lse=lse, method=method, **{**NO_DIAGNOSTICS, **diagnostics})


@overload
def decode(
    q: Tensor, cache: Cache, *, extra: tuple[Tensor, Tensor] | None = None, return_lse: Literal[False] = False
) -> Tensor: ...
@overload
def decode(
    q: Tensor, cache: Cache, *, extra: tuple[Tensor, Tensor] | None = None, return_lse: Literal[True]
) -> Attended: ...
@explains
@torch.no_grad()
def decode(
    q: Tensor, cache: Cache, *, extra: tuple[Tensor, Tensor] | None = None, return_lse: bool = False
) -> Tensor | Attended:
    """Attention of the newest positions of a cache, as in the rows of the whole call under causal order.

    The call is `attention(..., causal=True)` on the whole grid with the tail of the cache. Inference only: the result
    has no gradients.

    Args:
        q: queries [B, H, n, E] of the last n positions that were appended, the same as there.
        cache: what came before, with these positions.
        extra: (k_extra [B, Hk, X, E], v_extra [B, Hk, X, F]), keys off the grid that every query attends too.
        return_lse: whether the log of the normalizer is returned too.

    Returns:
        out [B, H, n, F], or with `return_lse` Attended(out, lse [B, H, n]).

    >>> import scram
    >>> _ = torch.manual_seed(0)
    >>> cache = scram.Cache((28, 28))
    >>> for _ in range(3):
    ...     q, k, v = torch.randn(3, 1, 2, 1, 16).unbind()
    ...     cache.append(q, k, v)
    ...     out = scram.decode(q, cache)
    >>> out.shape
    torch.Size([1, 2, 1, 16])
    """
    checks.instance("cache", cache, Cache, "scram.Cache", "; append positions to it first")
    checks.flag("return_lse", return_lse)
    check_newest(cache, q)
    attended = decode_newest(cache, q)
    if extra is not None:
        checks.extra(q, *cache.heads_of_keys(q), extra)
        attended = merge(attended, attend_extra(q, extra, None, scale=cache.scale, score=cache.score))
    return attended if return_lse else attended.out


@explains
def local(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    radius: int | Sequence[int],
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    score: Score = "dot",
    weight: Weight = "softmax",
    extra: Extra | None = None,
    bias: Bias | Pair | None = None,
    dropout_p: float = 0.0,
    impl: Impl = "auto",
) -> Attended:
    """Attention of every query to the (2b+1)^rank keys around its own place, cut at the border. Exact: no search.

    On a key grid of other extents the own place is scaled to it, as `Matches.identity` does. Differentiable as `attend`
    is. A window at the border has fewer keys; NATTEN moves it inwards instead.

    Args:
        q: queries [B, H, *G, E].
        k: keys [B, Hk, *G', E]; Hk divides H, the grids have equal rank and may differ in size.
        v: values [B, Hk, *G', F].
        radius: b, an int or one per axis of the key grid.
        causal: a query may attend keys up to itself in row-major order (equal grids).
        key_mask: bool [B, *G'] or [B, H, *G'], True = may be attended.
        scale: factor on the score, > 0; default E**-0.5 for "dot" under "softmax", else 1.
        score: "dot", "cosine", "l2" (negative squared distance), or a callable (q [..., E], k [..., E]) -> [...].
        weight: "softmax"; "mean", the score itself over the number of keys; "relu", its positive part likewise.
        extra: (k_extra [B, Hk, X, E], v_extra [B, Hk, X, F]), keys off the grid that every query attends too. Beside a
            bias they have none, or with (k_extra, v_extra, b_extra [B or 1, Hk or 1, X, r]) theirs.
        bias: (a [B or 1, H or 1, *G, r], b [B or 1, Hk or 1, *G', r]), or a `scram.bias.Bias`, for score="dot": query i
            and key j get <a_i, b_j> besides the scaled score. Differentiable in both.
        dropout_p: probability in [0, 1) that a weight is dropped after the softmax; lse is without it. In force
            whenever > 0, so pass 0 when evaluating; `torch.manual_seed` governs it.
        impl: "auto" or the name of an implementation; a name never falls back to another.

    Returns:
        Attended(out [B, H, *G, F], lse [B, H, *G]).

    >>> import scram
    >>> _ = torch.manual_seed(0)
    >>> q, k, v = torch.randn(3, 1, 2, 16, 16, 8).unbind()
    >>> out, lse = scram.local(q, k, v, radius=2)
    >>> bool(torch.allclose(scram.local(q, k, v, radius=16).out, scram.exact_attention(q, k, v).out, atol=1e-5))
    True
    """
    checks.queries_keys(q, k)
    own = Matches.identity(grid_of(q), grid_of(k), batch=q.shape[0], heads=q.shape[1], device=q.device)
    request = Request(
        search=None,
        tail=None,
        radius=radius,
        causal=causal,
        key_mask=key_mask,
        scale=scale,
        score=score,
        weight=weight,
        extra=extra,
        dropout_p=dropout_p,
        impl=impl,
        bias=bias,
        matches=own,
        hints=True,
    )
    return _attended(q, k, v, request)


def _attended(q: Tensor, k: Tensor, v: Tensor, request: Request) -> Attended:
    result: Result = execute(pipeline.run, q, k, v, request)
    assert result.lse is not None
    return Attended(result.out, result.lse)


def single_pool() -> AbstractContextManager[None]:
    """A context in which torch's operators run on the calling thread; stages of SCRAM keep all threads.

    For models with SCRAM in their layers on a CPU that other programs use too. Each parallel region of torch ends when
    all its threads have run, so it waits for a core, for milliseconds; the tasks of SCRAM's own threads are done by
    those that run. A backward pass inside the context belongs to it. It is of one Python thread, and may be nested.

    >>> x = torch.randn(1, 1, 64, 64, 16)
    >>> with scram.single_pool():
    ...     torch.get_num_threads()
    1
    """
    return ONE_THREAD


def clear_caches() -> None:
    """Empty every cache of the package: kinds of calls that were valid, layouts warned about, what engines keep.

    The next call of a kind is validated again, and a GPU kernel is looked up again. Results never change.
    """
    resolve.clear_caches()
    dispatch.clear_caches()
    layout_hints.clear()
    first_call.clear()
    draws.cell_counts.cache_clear()
    dtensors.clear_caches()
