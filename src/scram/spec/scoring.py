"""Scores and weights of any non-local mean: features prepared for a score, and weights from scores."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import checks
from ..options import SCORES, WEIGHTS
from ..settings import Score


def check_score(value: object) -> None:
    """A name, or a callable."""
    if not callable(value):
        checks.one_of("score", value, SCORES, "; or pass a callable (q [..., E], k [..., E]) -> [...]")


def check_weight(value: object) -> None:
    checks.one_of("weight", value, WEIGHTS)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are kept in: float32, float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def prepare_query(q: Tensor, score: Score) -> Tensor:
    """q [..., E] -> features whose dot product with `prepare_key`'s is the score. float32 at least unless "dot"."""
    if score == "cosine":
        q = q.to(accumulator(q.dtype))
        unit = torch.nn.functional.normalize(q, dim=-1)
        # A vector of zeros has no direction: its gradient, divided by the least length, would overflow in 16 bits.
        return torch.where((q == 0).all(-1, keepdim=True), 0, unit)
    if score == "l2":
        q = q.to(accumulator(q.dtype))
        return torch.cat([2 * q, q.square().sum(-1, keepdim=True), torch.ones_like(q[..., :1])], -1)
    return q


def prepare_key(k: Tensor, score: Score) -> Tensor:
    """k [..., E] -> the other half: 2 q.k - |q|^2 - |k|^2 = [2q, |q|^2, 1] . [k, -1, -|k|^2] for "l2"."""
    if score == "cosine":
        return prepare_query(k, score)
    if score == "l2":
        k = k.to(accumulator(k.dtype))
        return torch.cat([k, -torch.ones_like(k[..., :1]), -k.square().sum(-1, keepdim=True)], -1)
    return k


def pair_score(q: Tensor, k: Tensor, score: Score | None) -> Tensor:
    """The score of broadcast pairs, prepared q [..., E] and k [..., E] -> [...], accumulated in float32 at least."""
    wide = accumulator(q.dtype)
    if callable(score):
        want = torch.broadcast_shapes(q.shape[:-1], k.shape[:-1])  # type: ignore[no-untyped-call]
        return checks.score_result(score(q, k), tuple(want)).to(wide)
    return (q.to(wide) * k.to(wide)).sum(-1)


def widened(score: Score | None, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Converted to the accumulator's dtype before gathering, so that gradients of shared keys are summed in it.

    A callable score gets q and k unconverted.
    """
    wide = accumulator(v.dtype)
    return (q, k, v.to(wide)) if callable(score) else (q.to(wide), k.to(wide), v.to(wide))


def default_scale(scale: float | None, width: int, score: Score, weight: str) -> float:
    """scale as given, or width**-0.5 for the dot product under softmax and 1 otherwise."""
    if scale is not None:
        return float(scale)
    return float(width) ** -0.5 if score == "dot" and weight == "softmax" else 1.0


def normalized_weights(a: Tensor, allowed: Tensor, weight: str) -> tuple[Tensor, Tensor]:
    """Scaled scores [..., S] to normalized weights [..., S], 0 where not allowed, and log normalizers [...]."""
    some = allowed.any(-1)  # [...]
    if weight != "softmax":
        f = a.relu() if weight == "relu" else a
        count = allowed.sum(-1).to(a.dtype)
        share = f.masked_fill(~allowed, 0) / count.clamp(min=1).unsqueeze(-1)
        return share, count.log()
    a = a.masked_fill(~allowed, -torch.inf)
    top = a.detach().amax(-1)
    top = torch.where(top == -torch.inf, 0, top)  # -inf - -inf is NaN
    e = (a - top.unsqueeze(-1)).exp()
    total = torch.where(some, e.sum(-1), 1)
    return e / total.unsqueeze(-1), torch.where(some, total.log() + top, -torch.inf)
