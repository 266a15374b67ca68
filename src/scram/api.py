"""The public functions: check, pick, call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import dispatch, draws, errors, estimate_ops, ops, validate
from .engines import reference
from .estimators import Estimate, Estimator, Hybrid, MetropolisHastings, Snis
from .grid import LegalKeys, grid_of
from .noise import draw_seed
from .precision import follows_autocast
from .scoring import accumulator, default_scale, prepare_key, prepare_query
from .types import Attended, Matches, Score, Search


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
    impl: str = "auto",
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
    validate.scores(q, k, causal, key_mask, score)
    validate.search(q, k, search, warm)
    chosen = dispatch.choose(impl, q.device, q.dtype, score)
    found = _search(_Features(chosen, score, q, k, None, None), search, causal, key_mask, warm)
    return Matches(*found, grid_of(k))


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
    weight: str = "softmax",
    extra: tuple[Tensor, Tensor] | None = None,
    dropout_p: float = 0.0,
    window: str = "query",
    impl: str = "auto",
) -> Attended:
    """Attention of every query over the windows around its matches: the union of them, each key once.

    Differentiable in q, k, v and extra, through `out` and through `lse`; once, and in reverse mode. For second
    derivatives and forward mode use impl="reference".

    Args:
        q, k, v: [B, H, *G, E], [B, Hk, *G', E], [B, Hk, *G', F].
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
    validate.scores(q, k, causal, key_mask, score)
    radii = validate.attend(q, k, v, radius, scale, weight, extra, dropout_p, window)
    errors.matches("matches", q, k, matches)
    chosen = dispatch.choose(impl, q.device, q.dtype, score, window)
    features = _Features(chosen, score, q, k, v, extra)
    return _attend(features, matches.index, radii, causal, key_mask, scale, weight, dropout_p, window)


@follows_autocast
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    search: Search = Search(),  # noqa: B008 - frozen
    radius: int | Sequence[int] = 1,
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    score: Score = "dot",
    weight: str = "softmax",
    extra: tuple[Tensor, Tensor] | None = None,
    dropout_p: float = 0.0,
    warm: Matches | None = None,
    window: str = "query",
    impl: str = "auto",
) -> Tensor:
    """Attention on a grid in O(n log n): search the best keys of every query, then attend to the windows around them.

    Stands where `F.scaled_dot_product_attention` stood; `q.unflatten(2, grid)` turns [B, H, N, E] into what it takes.
    The arguments are those of `search` and `attend`.

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
    validate.search(q, k, search, warm)
    radii, searches, attends = validate.attention(
        q, k, v, causal, key_mask, score, radius, scale, weight, extra, dropout_p, window, impl
    )
    features = _Features(searches, score, q, k, v, extra)  # prepared once for both stages
    index, _ = _search(features, search, causal, key_mask, warm)
    features.impl = attends
    return _attend(features, index, radii, causal, key_mask, scale, weight, dropout_p, window).out


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
    impl: str = "auto",
) -> Estimate:
    """Exact softmax attention estimated from a number of keys, with diagnostics; for attention that is not sparse.

    Differentiable in q, k, v and extra through `out` and `lse`; what was drawn, and how likely, carries no gradient.

    Args:
        q, k, v: [B, H, *G, E], [B, Hk, *G', E], [B, Hk, *G', F].
        matches: where each query's attention peaks, from `search`.
        method: `Hybrid`, `Snis` or `MetropolisHastings`, with the number of samples.
        radius: of the windows that `Hybrid` attends exactly; the others do not use it.
        causal, key_mask, scale, score, extra, impl: as in `attend`. MetropolisHastings takes no extra.

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
    validate.scores(q, k, causal, key_mask, score)
    radii = validate.attend(q, k, v, radius, scale, "softmax", extra, 0.0)
    errors.matches("matches", q, k, matches)
    errors.estimator(method, extra)
    chosen = dispatch.choose(impl, q.device, q.dtype, score)
    features = _Features(chosen, score, q, k, v, extra)
    if isinstance(method, Hybrid):
        return _hybrid(features, matches, method, radii, causal, key_mask, scale)
    return _sampled(features, matches, method, causal, key_mask, scale)


class _Features:
    """The tensors of a call, prepared for its score and for the implementation that was picked."""

    def __init__(
        self, impl: str, score: Score, q: Tensor, k: Tensor, v: Tensor | None, extra: tuple[Tensor, Tensor] | None
    ) -> None:
        self.impl, self.score, self.width, self.v = impl, score, q.shape[-1], v
        self.q, self.k = prepare_query(q, score), prepare_key(k, score)
        self.extra = None if extra is None else (prepare_key(extra[0], score), extra[1])
        if impl == "numba":  # it reads float32 and float64 only: converted here, once for search and attend
            wide = accumulator(q.dtype)
            self.q, self.k = self.q.to(wide), self.k.to(wide)
            self.extra = None if self.extra is None else (self.extra[0].to(wide), self.extra[1])


def _seed(settings: Search | Estimator) -> Tensor:
    return draw_seed() if settings.seed_tensor is None else settings.seed_tensor


def _search(
    features: _Features, settings: Search, causal: bool, key_mask: Tensor | None, warm: Matches | None
) -> tuple[Tensor, Tensor]:
    """The fields index and score of the matches."""
    q, k = features.q, features.k
    seed = _seed(settings)
    asked = settings.resolved(q)
    if features.impl == "triton":
        errors.tile_matches(asked)
    if features.impl != "reference":
        return ops.search(
            q,
            k,
            asked,
            seed=seed,
            causal=causal,
            key_mask=key_mask,
            score=features.score,
            warm=warm,
            impl=features.impl,
        )
    with torch.no_grad():  # a callable score may hold parameters
        run = reference.tile_search if asked.method == "tile" else reference.search
        found = run(
            q.detach(), k.detach(), asked, seed=seed, causal=causal, key_mask=key_mask, score=features.score, warm=warm
        )
    return found.index, found.score


def _attend(
    features: _Features,
    index: Tensor,
    radius: tuple[int, ...],
    causal: bool,
    key_mask: Tensor | None,
    scale: float | None,
    weight: str,
    dropout_p: float,
    window: str = "query",
) -> Attended:
    run: Callable[..., Attended] = partial(ops.attend, window=window, impl=features.impl)
    if features.impl == "reference":
        run = reference.tile_attend if window == "tile" else reference.attend
    assert features.v is not None
    return run(
        features.q,
        features.k,
        features.v,
        index,
        radius=radius,
        causal=causal,
        key_mask=key_mask,
        scale=default_scale(scale, features.width, features.score, weight),
        score=features.score,
        weight=weight,
        extra=features.extra,
        dropout_p=dropout_p,
        dropout_seed=draw_seed() if dropout_p else None,
    )


def _hybrid(
    features: _Features,
    matches: Matches,
    method: Hybrid,
    radius: tuple[int, ...],
    causal: bool,
    key_mask: Tensor | None,
    scale: float | None,
) -> Estimate:
    """The head by `attend`, then the tail on the keys that the queries of a row share."""
    q, k, v = features.q, features.k, features.v
    assert v is not None
    head = _attend(features, matches.index, radius, causal, key_mask, scale, "softmax", 0.0)
    how: dict[str, Any] = {
        "seed": _seed(method),
        "samples": method.samples,
        "stratified": method.stratified,
        "radius": radius,
        "scale": default_scale(scale, features.width, features.score, "softmax"),
    }
    if features.impl == "reference":
        how |= {"legal": LegalKeys.of(q, k, causal, key_mask), "score": features.score}
        out, lse, variance = reference.tail(q, k, v, matches.index, *head, **how)
    else:
        how |= {"key_mask": key_mask, "causal": causal, "impl": features.impl}
        out, lse, variance = estimate_ops.tail(q, k, v, matches.index, *head, **how)
    return Estimate(out, lse, variance, None, None, None, method)


def _sampled(
    features: _Features,
    matches: Matches,
    method: Snis | MetropolisHastings,
    causal: bool,
    key_mask: Tensor | None,
    scale: float | None,
) -> Estimate:
    """Keys of each query's own; extra keys are an exact head."""
    q, k, v = features.q, features.k, features.v
    assert v is not None
    legal = LegalKeys.of(q, k, causal, key_mask)
    # A walk cannot begin at a key that it may not visit; a draw near such a key may be legal.
    walks = isinstance(method, MetropolisHastings)
    modes, count = draws.modes(matches.index, matches.key_grid, legal if walks else None)
    factor = default_scale(scale, features.width, features.score, "softmax")
    how: dict[str, Any] = {
        "seed": _seed(method),
        "table": draws.step_table(float(method.bandwidth), matches.key_grid, q.device),
        "samples": method.samples,
        "scale": factor,
    }
    how |= (
        {"score": features.score, "legal": legal}
        if features.impl == "reference"
        else {
            "total": draws.legal_counts(q, legal),
            "order": legal.order,
            "key_mask": key_mask,
            "causal": causal,
            "impl": features.impl,
        }
    )
    run = reference if features.impl == "reference" else estimate_ops
    if isinstance(method, MetropolisHastings):
        out, acceptance, rhat = run.metropolis(
            q, k, v, modes, count, chains_per_mode=method.chains_per_mode, burn_in=method.burn_in, **how
        )
        return Estimate(out, None, None, None, acceptance, rhat, method)
    head: tuple[Tensor | None, Tensor | None] = (None, None)
    if features.extra is not None:
        nowhere = torch.full_like(matches.index[..., :1], -1)
        head = _attend(features, nowhere, (0,) * (q.ndim - 3), causal, key_mask, scale, "softmax", 0.0)
    out, lse, variance, ess = run.snis(q, k, v, modes, count, *head, alpha=float(method.alpha), **how)
    return Estimate(out, lse, variance, ess, None, None, method)
