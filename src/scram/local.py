"""Attention to the window around each query's own place: no search, no parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from . import errors
from .api import attend
from .arguments import explains
from .grid import grid_of
from .options import Impl, Weight
from .types import Attended, Matches, Score


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
    extra: tuple[Tensor, Tensor] | None = None,
    dropout_p: float = 0.0,
    impl: Impl = "auto",
) -> Attended:
    """Attention of every query to the (2b+1)^rank keys around its own place, cut at the border. Exact: no search.

    On a key grid of other extents the own place is scaled to it, as `Matches.identity` does. Differentiable as `attend`
    is. A window at the border has fewer keys; NATTEN moves it inwards instead.

    Args:
        q, k, v: [B, H, *G, E], [B, Hk, *G', E], [B, Hk, *G', F].
        radius: b, an int or one per axis of the key grid.
        causal, key_mask, scale, score, weight, extra, dropout_p, impl: as in `attend`.

    Returns:
        Attended(out [B, H, *G, F], lse [B, H, *G]).

    >>> import torch
    >>> import scram
    >>> _ = torch.manual_seed(0)
    >>> q, k, v = torch.randn(3, 1, 2, 16, 16, 8).unbind()
    >>> out, lse = scram.local(q, k, v, radius=2)
    >>> bool(torch.allclose(scram.local(q, k, v, radius=16).out, scram.exact_attention(q, k, v).out, atol=1e-5))
    True
    """
    errors.queries_keys(q, k)
    own = Matches.identity(grid_of(q), grid_of(k), batch=q.shape[0], heads=q.shape[1], device=q.device)
    options: dict[str, Any] = {"causal": causal, "key_mask": key_mask, "scale": scale, "score": score, "weight": weight}
    return attend(q, k, v, own, radius=radius, extra=extra, dropout_p=dropout_p, impl=impl, **options)
