"""The non-local block of Wang et al., "Non-local Neural Networks" (2018)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor, nn

from ..core import checks
from ..core.bias import Bias, Pair
from ..core.checks import explains
from ..core.decoding import Cache
from ..core.resolve import Request, as_search
from ..core.tails.base import Tail
from ..functional import decode
from ..options import Auto, Form, Impl, Weight
from ..results import Matches
from ..settings import Search
from . import validate as fits
from .searching import Searching

_CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


class NonLocalBlock(Searching):
    """The residual non-local block of Wang et al. (2018), channels first: x [B, C, *G] -> x + W y, rank 1 to 3.

    The block starts as the identity. Every form sums over the keys that SCRAM found, and divides by their softmax or by
    their number. The search looks for the highest scores: of "dot_product" it misses the large negative ones. In causal
    order a position sees those up to itself, and `decode` takes one position after another.

    Args:
        channels: C.
        inner_channels: width of the embeddings; default half of C.
        rank: axes of the grid.
        form: "embedded_gaussian", exp(theta.phi); "gaussian", exp(x.x); "dot_product", theta.phi; "concatenation",
            relu(w.[theta, phi]).
        norm: batch normalization after the last convolution; not in causal order, since it reads every position.
        causal: as in `scram.attention`.
        search, radius, keep_matches, warm_search, tail, impl: as in `GridAttention`; the tail is for the forms
            with softmax.

    >>> x = torch.randn(2, 16, 12, 12)
    >>> bool((NonLocalBlock(16)(x) == x).all())
    True
    """

    FORMS = get_args(Form)

    @explains
    def __init__(
        self,
        channels: int,
        inner_channels: int | None = None,
        *,
        rank: int = 2,
        form: Form = "embedded_gaussian",
        norm: bool = True,
        causal: bool = False,
        search: Search | Auto = "auto",
        radius: int | Sequence[int] = 1,
        keep_matches: bool = False,
        warm_search: Search | None = None,
        tail: Tail | Auto | None = "auto",
        impl: Impl = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        as_search(search)
        super().__init__(
            search=search,
            warm_search=warm_search,
            radius=radius,
            keep_matches=keep_matches,
            tail=tail,
            impl=impl,
        )
        self.channels = checks.whole("channels", channels, 1)
        inner = max(channels // 2, 1) if inner_channels is None else checks.whole("inner_channels", inner_channels, 1)
        self.form = checks.one_of("form", form, self.FORMS)
        self.rank = checks.whole("rank", rank, 1)
        if rank not in _CONV:
            raise ValueError(f"rank must be {', '.join(map(str, _CONV))}: torch has no other convolution, got {rank}")
        self.causal = checks.flag("causal", causal)
        if causal and norm:
            raise ValueError("batch normalization reads every position, later ones too: pass norm=False beside causal")
        conv = _CONV[rank]
        embedded = form != "gaussian"
        self.theta = conv(channels, inner, 1, device=device, dtype=dtype) if embedded else None
        self.phi = conv(channels, inner, 1, device=device, dtype=dtype) if embedded else None
        self.g = conv(channels, inner, 1, device=device, dtype=dtype)
        self.pair = conv(2 * inner, 1, 1, bias=False, device=device, dtype=dtype) if form == "concatenation" else None
        self.out = conv(inner, channels, 1, device=device, dtype=dtype)
        self.norm = _NORM[rank](channels, device=device, dtype=dtype) if checks.flag("norm", norm) else None
        for parameter in (self.out if self.norm is None else self.norm).parameters():
            nn.init.zeros_(parameter)

    @explains
    def forward(
        self,
        x: Tensor,
        *,
        key_mask: Tensor | None = None,
        bias: Bias | Pair | None = None,
        warm: Matches | None = None,
    ) -> Tensor:
        """x [B, C, *G] -> [B, C, *G].

        Args:
            x: features, channels first.
            key_mask: bool [B, *G], True = may be attended.
            bias: (a [B or 1, 1, *G, r], b [B or 1, 1, *G, r]), as in `attention`.
            warm: matches to start the search from.
        """
        fits.channels_first(x, self.channels, self.rank)
        q, k, weight = self._pair(x)
        v = self._last(self.g(x))
        request = Request(causal=self.causal, key_mask=key_mask, scale=1.0, weight=weight, warm=warm, bias=bias)
        y = self._run(q, k, v, request).out
        change: Tensor = self.out(y.squeeze(1).movedim(-1, 1))
        return x + (change if self.norm is None else self.norm(change))

    def cache(self, grid: Sequence[int], *, half: bool = False) -> Cache:
        """An empty cache for `decode`, with the settings of the block: causal order, softmax and no search.

        Args:
            grid: the extents of the final grid.
            half: as in `scram.Cache`.
        """
        if self.form not in ("embedded_gaussian", "gaussian"):
            raise ValueError(f"decoding needs a form with softmax, got form={self.form!r}; use 'embedded_gaussian'")
        return self._cache(grid, Request(causal=self.causal, scale=1.0), half)

    @explains
    @torch.no_grad()
    def decode(self, x: Tensor, cache: Cache) -> Tensor:
        """The next positions alone: those of the whole call of the block, without gradients.

        Args:
            x: [B, C, n], the next n positions in row-major order.
            cache: of this block, from `cache`; the positions are added to it.

        Returns:
            [B, C, n].

        >>> block = NonLocalBlock(8, norm=False, causal=True).eval()
        >>> x = torch.randn(2, 8, 6, 6)
        >>> cache = block.cache((6, 6))
        >>> rows = [block.decode(one, cache) for one in x.flatten(2).split(1, dim=2)]
        >>> bool(torch.allclose(torch.cat(rows, 2), block(x).flatten(2), atol=1e-5))
        True
        """
        checks.instance("cache", cache, Cache, "scram.Cache", "; block.cache(grid) makes one")
        fits.channels_first(x, self.channels, 1)
        line = x.reshape(*x.shape[:2], *[1] * (self.rank - 1), x.shape[2])  # on a grid of one line
        q, k, _ = self._pair(line)
        new = [y.flatten(2, -2) for y in (q, k, self._last(self.g(line)))]
        cache.append(*new)
        y = decode(new[0], cache).reshape(*q.shape[:-1], -1)  # [B, 1, 1, .., n, F]
        change: Tensor = self.out(y.squeeze(1).movedim(-1, 1))
        return x + change.reshape(x.shape)

    def _pair(self, x: Tensor) -> tuple[Tensor, Tensor, Weight]:
        """q and k [B, 1, *G, E] whose dot product is the score of the form, and its weight."""
        if self.theta is None or self.phi is None:
            return self._last(x), self._last(x), "softmax"
        q = self._last(self.theta(x))
        k = self._last(self.phi(x))
        if self.pair is None:
            return q, k, "mean" if self.form == "dot_product" else "softmax"
        w_q, w_k = self.pair.weight.flatten().chunk(2)
        q = (q * w_q.to(q)).sum(-1, keepdim=True)
        k = (k * w_k.to(k)).sum(-1, keepdim=True)
        return torch.cat([q, torch.ones_like(q)], -1), torch.cat([torch.ones_like(k), k], -1), "relu"

    @staticmethod
    def _last(x: Tensor) -> Tensor:
        """[B, C, *G] -> [B, 1, *G, C]."""
        return x.movedim(1, -1).unsqueeze(1)

    def extra_repr(self) -> str:
        order = ", causal=True" if self.causal else ""
        return f"form={self.form!r}{order}, radius={self.radius}, search={self.search}, tail={self.tail}"
