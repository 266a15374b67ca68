"""The public functions: validate the arguments, make a call of them, give it to an engine."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

from torch import Tensor

from . import dispatch, draws, dtensors, errors, layout_hints, ops, stages, validate
from .arguments import explains, unknown_arguments
from .codebook import Codebook, check_codebook, check_warm
from .defaults import SEARCH, Explanation, explanation
from .dense import dense_attention
from .dtensors import takes_dtensors
from .estimators import Clusters, Estimate, Estimator, Hybrid
from .grid import grid_of
from .options import Auto, Impl, Weight, Window
from .precision import follows_autocast
from .scoring import default_scale, prepare_key
from .stages import WHOLE, Shard
from .types import Attended, Matches, Score, Search


@takes_dtensors
@explains
@follows_autocast
def search(
    q: Tensor,
    k: Tensor,
    *,
    search: Search = Search(),  # noqa: B008 - frozen
    causal: bool = False,
    key_mask: Tensor | None = None,
    score: Score = "dot",
    warm: Matches | None = None,
    impl: Impl = "auto",
    _shard: Shard = WHOLE,
) -> Matches:
    """For every query the keys with the highest scores anywhere on the key grid, by randomized search.

    Args:
        q: queries [B, H, *G, E].
        k: keys [B, Hk, *G', E]; Hk divides H, the grids have equal rank and may differ in size.
        search: how to look; `Search.paper()` is the paper's Algorithm 1.
        causal: a query may attend keys up to itself in row-major order (equal grids).
        key_mask: bool [B, *G'] or [B, H, *G'], True = may be attended.
        score: "dot", "cosine", "l2" (negative squared distance), or a callable (q [..., E], k [..., E]) -> [...].
        warm: matches of an earlier search on the same shapes, to start from; their kappa may differ.
        impl: "auto" or the name of an implementation; a name never falls back to another.

    Returns:
        Matches with index and score [B, H, *G, kappa], best first.

    >>> import scram
    >>> _ = torch.manual_seed(0)
    >>> q = torch.randn(1, 2, 16, 16, 8)
    >>> found = scram.search(q, q, search=scram.Search(matches=2, seed=0))
    >>> found
    Matches(512 queries on grid (16, 16), keys on grid (16, 16), kappa=2, batch=1, heads=2, found 100.0 %, cpu)
    """
    validate.pairs(q, k, causal, key_mask, score)
    validate.search(q, k, search, warm)
    spec = validate.search_engine(impl, q, score, search)
    inputs = stages.prepare(spec, q, k, q[..., :0], None, score, 1.0, causal, key_mask, _shard)
    found = ops.search(spec, stages.search_call(inputs, search, stages.seed_of(search, inputs), warm))
    return Matches(found.index, found.score, grid_of(k))


@takes_dtensors
@explains
@follows_autocast
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    matches: Matches,
    *,
    radius: int | Sequence[int] = 1,
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    score: Score = "dot",
    weight: Weight = "softmax",
    extra: tuple[Tensor, Tensor] | None = None,
    dropout_p: float = 0.0,
    window: Window = "query",
    tail: Codebook | Hybrid | None = None,
    impl: Impl = "auto",
    _shard: Shard = WHOLE,
) -> Attended:
    """Attention of every query over the windows around its matches: the union of them, each key once.

    With a `tail` all keys outside the windows count too, by clusters or by drawn keys; `lse` is then an estimate over
    all legal keys.

    Differentiable in q, k, v and extra, through `out` and through `lse`; once, and in reverse mode. For second
    derivatives and forward mode use impl="reference".

    Args:
        q, k, v: [B, H, *G, E], [B, Hk, *G', E], [B, Hk, *G', F]. v may be float32 beside q and k of 16 bits, as for
            coordinates, which 16 bits would round; the output has v's dtype. Under autocast all take its dtype.
        matches: the centres of the windows, from `search`.
        radius: b, each match brings the (2b+1)^rank keys around it; an int or one per axis.
        causal, key_mask: as in `search`; what they forbid is left out of the windows.
        scale: factor on the score, > 0; default E**-0.5 for "dot" under "softmax", else 1.
        score: as in `search`.
        weight: "softmax"; "mean", the score itself over the number of keys; "relu", its positive part likewise.
            A search finds the highest scores: under "mean" large negative ones are missed.
        extra: (k_extra [B, Hk, X, E], v_extra [B, Hk, X, F]), keys off the grid that every query attends too.
        dropout_p: probability in [0, 1) that a weight is dropped after the softmax; lse is without it. In force
            whenever > 0, so pass 0 when evaluating; `torch.manual_seed` governs it.
        window: whose windows a query attends: "query", its own; "tile", those of all 64 queries of its tile, rounded up
            to cells of keys. That is nearer to exact attention, and on a GPU faster with several matches or gradients;
            on a CPU the reference runs it, tens of times slower than "query".
        tail: clusters of the keys from `cluster`, made with the same score, scale and mask; only for softmax without
            causal order. Gradients reach k and v through it too, where it has them. Dropout takes a cluster for a key.
            Or `Hybrid`, keys drawn, for softmax: dropout takes a drawn key for itself, whatever it stands for.
        impl: as in `search`.

    Returns:
        Attended(out [B, H, *G, F], lse [B, H, *G]).

    >>> import scram
    >>> _ = torch.manual_seed(0)
    >>> q, k, v = torch.randn(3, 1, 2, 16, 16, 8).unbind()
    >>> found = scram.search(q, k, search=scram.Search(seed=0))
    >>> out, lse = scram.attend(q, k, v, found, radius=2)
    >>> out.shape, lse.shape
    (torch.Size([1, 2, 16, 16, 8]), torch.Size([1, 2, 16, 16]))
    """
    validate.pairs(q, k, causal, key_mask, score)
    radii = validate.attend(q, k, v, radius, scale, weight, extra, dropout_p, window)
    errors.matches("matches", q, k, matches)
    spec = dispatch.choose(impl, q.device, q.dtype, score, window)
    scale = default_scale(scale, q.shape[-1], score, weight)
    inputs = stages.prepare(spec, q, k, v, extra, score, scale, causal, key_mask, _shard)
    if isinstance(tail, Hybrid):
        errors.hybrid_only(weight)
        made = stages.hybrid(spec, inputs, matches.index, tail, radii, stages.seed_of(tail, inputs), dropout_p, window)
        return Attended(inputs.rounded(made.out), made.lse)
    if tail is not None:
        errors.clusters_only(weight, causal, score)
        check_codebook("tail", q, k, v, inputs.k.shape[-1], score, scale, key_mask, radii, tail)
    head = ops.attend(spec, stages.attend_call(inputs, matches.index, radii, weight, dropout_p, window))
    if tail is not None:
        head = stages.join_clusters(spec, inputs, matches.index, head, tail, radii, dropout_p, window)
    return Attended(inputs.rounded(head.out), head.lse)


@takes_dtensors
@explains
@follows_autocast
def cluster(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    clusters: Clusters = Clusters(),  # noqa: B008 - frozen
    matches: Matches | None = None,
    radius: int | Sequence[int] | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    score: Score = "dot",
    warm: Codebook | None = None,
    impl: Impl = "auto",
    _shard: Shard = WHOLE,
) -> Codebook:
    """Keys grouped by content, as the queries and the values see it: what `attend(tail=...)` uses for far keys.

    Differentiable in k and v given the groups; the centres and values of a fit are constants.

    Args:
        q, k, v: [B, H, *G, E], [B, Hk, *G', E], [B, Hk, *G', F].
        clusters: how many, and how they are found.
        matches, radius: those that `attend` will use; needed for `clusters.fit` alone, which fits what windows leave.
        key_mask, scale, score: as in `attend`; the clusters serve calls with the same. No callable score.
        warm: clusters to start from (the last frame, layer or step), as many, of keys and values as wide; then k-means
            makes one step at most.
        impl: as in `search`.

    Returns:
        Codebook.

    >>> import scram
    >>> _ = torch.manual_seed(0)
    >>> q, k, v = torch.randn(3, 1, 2, 16, 16, 8).unbind()
    >>> found = scram.search(q, k, search=scram.Search(seed=0))
    >>> codebook = scram.cluster(q, k, v, clusters=scram.Clusters(count=64, seed=0))
    >>> out, lse = scram.attend(q, k, v, found, tail=codebook)
    >>> exact = scram.exact_attention(q, k, v).out
    >>> bool((out - exact).norm() < 0.5 * (scram.attend(q, k, v, found).out - exact).norm())
    True
    """
    validate.pairs(q, k, False, key_mask, score)
    validate.attend(q, k, v, 1, scale, "softmax", None, 0.0)
    errors.instance("clusters", clusters, Clusters, "scram.Clusters", "; for example scram.Clusters(count=256)")
    errors.clusters_only("softmax", False, score)
    spec = dispatch.choose(impl, q.device, q.dtype, score)
    factor = default_scale(scale, q.shape[-1], score, "softmax")
    inputs = stages.prepare(spec, q, k, v, None, score, factor, False, key_mask, _shard)
    if warm is not None:
        check_warm(q, k, v, inputs.k.shape[-1], clusters.count, warm)
    index = radii = None
    if clusters.fit:
        if matches is None or radius is None:
            raise ValueError(
                "clusters.fit needs matches= and radius=, those of the attend call that the clusters are for"
            )
        errors.matches("matches", q, k, matches)
        index, radii = matches.index, errors.radius(radius, q.ndim - 3)
    return stages.cluster_keys(spec, inputs, str(score), clusters, stages.seed_of(clusters, inputs), warm, index, radii)


@takes_dtensors
@explains
@follows_autocast
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    search: Search | Auto = "auto",
    radius: int | Sequence[int] = 1,
    tail: Clusters | Codebook | Hybrid | Auto | None = "auto",
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    score: Score = "dot",
    weight: Weight = "softmax",
    extra: tuple[Tensor, Tensor] | None = None,
    dropout_p: float = 0.0,
    warm: Matches | None = None,
    window: Window = "query",
    impl: Impl = "auto",
    _shard: Shard = WHOLE,
) -> Tensor:
    """Attention on a grid in O(n log n): windows around the best keys of every query, all other keys by clusters.

    Stands where `F.scaled_dot_product_attention` stood; `q.unflatten(2, grid)` turns [B, H, N, E] into what it takes.
    With search, tail, warm and impl left alone it is dense attention by torch, exact, where that is faster, as on small
    grids. `explain` says what would run. Of DTensors, cut along batch or heads, each rank attends its part.

    Args:
        search: how to look; "auto" is `Search()`. A seed in it governs the tail too.
        tail: what stands for the keys outside the windows: `Clusters`, a `Codebook` from `cluster`, `Hybrid` (keys
            drawn), or None, the paper's sparse attention: nothing does. "auto" is Clusters, and Hybrid under causal
            order; None for weight="mean" or "relu" and callable scores.
        q, k, v, radius, causal, key_mask, scale, score, weight, extra, dropout_p, warm, window, impl: as in `search`
            and `attend`.

    Returns:
        out [B, H, *G, F].

    >>> import scram
    >>> _ = torch.manual_seed(0)
    >>> q, k, v = torch.randn(3, 1, 2, 256, 8).unbind()
    >>> grid = (16, 16)
    >>> out = scram.attention(q.unflatten(2, grid), k.unflatten(2, grid), v.unflatten(2, grid))
    >>> out.flatten(2, 3).shape
    torch.Size([1, 2, 256, 8])
    """
    settings, rest, plan = _plan(
        q, k, v, search, radius, tail, causal, key_mask, scale, score, weight, extra, dropout_p, warm, window, impl
    )
    if plan.dense:
        return dense_attention(
            q, k, v, causal=causal, key_mask=key_mask, scale=scale, score=score, extra=extra, dropout_p=dropout_p
        )
    scale = default_scale(scale, q.shape[-1], score, weight)
    inputs = stages.prepare(plan.search, q, k, v, extra, score, scale, causal, key_mask, _shard)  # once for all stages
    seed = stages.seed_of(settings, inputs)
    index = ops.search(plan.search, stages.search_call(inputs, settings, seed, warm)).index
    spec = plan.attend
    if isinstance(rest, Hybrid):
        own = stages.seed_of(rest, inputs, seed)
        return inputs.rounded(stages.hybrid(spec, inputs, index, rest, plan.radius, own, dropout_p, window).out)
    if isinstance(rest, Clusters):
        own = stages.seed_of(rest, inputs, seed)
        rest = stages.cluster_keys(spec, inputs, str(score), rest, own, None, index, plan.radius)
    head = ops.attend(spec, stages.attend_call(inputs, index, plan.radius, weight, dropout_p, window))
    if isinstance(rest, Codebook):
        head = stages.join_clusters(spec, inputs, index, head, rest, plan.radius, dropout_p, window)
    return inputs.rounded(head.out)


def explain(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Explanation:
    """What `attention` would run with these arguments, why, and what it costs; nothing is computed.

    >>> import scram
    >>> q = torch.zeros(1, 1, 16, 16, 64)
    >>> print(scram.explain(q, q, q))
    dense attention, by torch
      on cpu the grid 16 x 16 with width 64 is too small for a search to be faster
      256 keys visited per query, 256 by dense attention; 0.0 MiB beyond inputs and outputs
    """
    known = signature(attention).parameters
    unknown = [name for name in arguments if name not in known]
    if unknown:
        raise unknown_arguments("explain", unknown, known)
    given = {name: known[name].default for name in known if name not in ("q", "k", "v")} | arguments
    settings, tail, plan = _plan(q, k, v, **given)
    return explanation(
        q, k, v, plan.dense, plan.automatic, plan.attend.name, settings, plan.radius, tail, given["score"]
    )


def _plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    search: Search | Auto,
    radius: int | Sequence[int],
    tail: Clusters | Codebook | Hybrid | Auto | None,
    causal: bool,
    key_mask: Tensor | None,
    scale: float | None,
    score: Score,
    weight: Weight,
    extra: tuple[Tensor, Tensor] | None,
    dropout_p: float,
    warm: Matches | None,
    window: Window,
    impl: Impl,
) -> tuple[Search, Estimator | Codebook | None, validate.Plan]:
    """The settings of the search, the tail, and what else validating a call of `attention` yields."""
    if not all([isinstance(x, Tensor) for x in (q, k, v)]):  # noqa: C419 - a list is faster
        errors.queries_keys(q, k)
        errors.values(q, k, v)
    errors.tail(tail)
    settings = errors.search_settings(search, SEARCH)
    validate.search(q, k, settings, warm)
    automatic = search.__class__ is str and tail.__class__ is str and warm is None and impl == "auto"
    plan = validate.attention(
        q, k, v, settings, causal, key_mask, score, radius, scale, weight, extra, dropout_p, window, impl, automatic
    )
    if isinstance(tail, str):
        return settings, plan.tail, plan
    if isinstance(tail, Hybrid):
        errors.hybrid_only(weight)
    elif tail is not None:
        errors.clusters_only(weight, causal, score)
        if isinstance(tail, Codebook):
            width = prepare_key(k[:1, :1, ..., :1, :], score).shape[-1] if score != "dot" else k.shape[-1]
            factor = default_scale(scale, q.shape[-1], score, weight)
            check_codebook("tail", q, k, v, width, score, factor, key_mask, plan.radius, tail)
    return settings, tail, plan


@takes_dtensors
@explains
@follows_autocast
def estimate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    matches: Matches,
    *,
    method: Estimator,
    radius: int | Sequence[int] = 1,
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    score: Score = "dot",
    extra: tuple[Tensor, Tensor] | None = None,
    impl: Impl = "auto",
    _shard: Shard = WHOLE,
) -> Estimate:
    """Exact softmax attention estimated from a number of keys, with diagnostics; for attention that is not sparse.

    Differentiable in q, k, v and extra through `out` and `lse`; what was drawn, and how likely, carries no gradient.

    Args:
        q, k, v: [B, H, *G, E], [B, Hk, *G', E], [B, Hk, *G', F].
        matches: where each query's attention peaks, from `search`.
        method: `Clusters`, `Hybrid`, `Snis` or `MetropolisHastings`, with the number of clusters or samples.
        radius: of the windows that `Clusters` and `Hybrid` attend exactly; the others do not use it.
        causal, key_mask, scale, score, extra, impl: as in `attend`. MetropolisHastings takes no extra, Clusters no
            causal order and no callable score.

    Returns:
        Estimate(out [B, H, *G, F], lse, variance, ess, acceptance, rhat), None where a method has none.

    >>> import scram
    >>> _ = torch.manual_seed(0)
    >>> q, k, v = torch.randn(3, 1, 2, 16, 16, 8).unbind()
    >>> found = scram.search(q, k, search=scram.Search(matches=4, seed=0))
    >>> made = scram.estimate(q, k, v, found, method=scram.Hybrid(samples=256, seed=0))
    >>> exact = scram.exact_attention(q, k, v)  # 256 samples are all keys
    >>> bool(torch.allclose(made.out, exact.out, atol=1e-5)), float(made.variance.max())
    (True, 0.0)
    """
    validate.pairs(q, k, causal, key_mask, score)
    radii = validate.attend(q, k, v, radius, scale, "softmax", extra, 0.0)
    errors.matches("matches", q, k, matches)
    errors.estimator(method, extra)
    spec = dispatch.choose(impl, q.device, q.dtype, score)
    scale = default_scale(scale, q.shape[-1], score, "softmax")
    inputs = stages.prepare(spec, q, k, v, extra, score, scale, causal, key_mask, _shard)
    if isinstance(method, Hybrid):
        made = stages.hybrid(spec, inputs, matches.index, method, radii, stages.seed_of(method, inputs))
        return stages.as_estimate(inputs, made, method)
    if isinstance(method, Clusters):
        errors.clusters_only("softmax", causal, score)
        seed = stages.seed_of(method, inputs)
        book = stages.cluster_keys(spec, inputs, str(score), method, seed, None, matches.index, radii)
        head = ops.attend(spec, stages.attend_call(inputs, matches.index, radii, "softmax", 0.0, "query"))
        joined = stages.join_clusters(spec, inputs, matches.index, head, book, radii, 0.0, "query")
        return stages.as_estimate(inputs, joined, method)
    return stages.sample(spec, inputs, matches.index, method)


def clear_caches() -> None:
    """Empty every cache of the package: kinds of calls that were valid, layouts warned about, what engines keep.

    The next call of a kind is validated again, and a GPU kernel is looked up again. Results never change.
    """
    validate.clear_caches()
    dispatch.clear_caches()
    layout_hints.clear()
    draws.cell_counts.cache_clear()
    dtensors.clear_caches()
