"""Multi-head attention over grids with the parameters of `nn.MultiheadAttention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core import checks, pipeline
from ..core.bias import Bias, Pair
from ..core.checks import explains
from ..core.decoding import Cache
from ..core.layout_hints import warn_about_tokens
from ..core.pipeline import execute
from ..core.resolve import Request
from ..core.tails.base import Kind, Tail
from ..functional import decode
from ..options import Auto, Impl
from ..results import Matches
from ..settings import Score, Search
from ..spec.scoring import check_score
from . import validate as fits
from .searching import Searching


class GridAttention(Searching):
    """Multi-head attention between the points of grids, [B, *G, C] in and out; the grid has rank 1 to 4.

    The parameters have the names and shapes of `nn.MultiheadAttention`: its state dict loads as it is, and
    `GridAttention.from_mha` turns one into the other. Always batch first, channels last, and the result is a tensor.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, device, dtype:
            as in `nn.MultiheadAttention`; dropout acts on the weights, in training mode only.
        batch_first: True; there is no other order.
        search: how to look for keys; "auto" as in `scram.attention`. None attends densely, with the same weights, to
            compare or to train; beside tail=`Clusters` or a `Codebook` it is these alone: no search and no windows.
        radius, causal, scale, score: as in `scram.attention`.
        keep_matches: in evaluation mode each call starts from the matches and clusters of the call before, where the
            shapes agree (video frames, denoising steps). They are not part of the state dict; `reset()` forgets them.
        warm_search: settings for calls that start from matches, such as fewer sweeps; None: those of `search`.
        tail: what stands for the keys outside the windows, as in `scram.attention`: of `Clusters` some keys one by one
            (routed keys), all others by their clusters. `Snis` and `MetropolisHastings` too (`scram.estimate`), without
            dropout.
        impl: as in `scram.attention`.

    >>> _ = torch.manual_seed(0)
    >>> layer = GridAttention(32, num_heads=4, radius=2)
    >>> layer(torch.randn(2, 16, 16, 32)).shape
    torch.Size([2, 16, 16, 32])
    """

    @explains
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        *,
        search: Search | Auto | None = "auto",
        radius: int | Sequence[int] = 1,
        causal: bool = False,
        scale: float | None = None,
        score: Score = "dot",
        keep_matches: bool = False,
        warm_search: Search | None = None,
        tail: Tail | Auto | None = "auto",
        impl: Impl = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            search=search,
            warm_search=warm_search,
            radius=radius,
            keep_matches=keep_matches,
            tail=tail,
            impl=impl,
        )
        fits.layout(embed_dim, num_heads, batch_first)
        checks.dropout(dropout)
        checks.scale(scale)
        check_score(score)
        kind = Kind("softmax", causal, score, extra=False, dropout_p=dropout)
        fits.tail(tail, search, kind)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.dropout = dropout
        self.kdim = embed_dim if kdim is None else checks.whole("kdim", kdim, 1)
        self.vdim = embed_dim if vdim is None else checks.whole("vdim", vdim, 1)
        self.causal = checks.flag("causal", causal)
        self.scale = scale
        self.score = score
        self.add_zero_attn = checks.flag("add_zero_attn", add_zero_attn)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        one = self.kdim == self.vdim == embed_dim
        self.in_proj_weight = parameter(3 * embed_dim, embed_dim) if one else None
        self.q_proj_weight = None if one else parameter(embed_dim, embed_dim)
        self.k_proj_weight = None if one else parameter(embed_dim, self.kdim)
        self.v_proj_weight = None if one else parameter(embed_dim, self.vdim)
        self.in_proj_bias = parameter(3 * embed_dim) if checks.flag("bias", bias) else None
        self.bias_k = parameter(1, 1, embed_dim) if checks.flag("add_bias_kv", add_bias_kv) else None
        self.bias_v = parameter(1, 1, embed_dim) if add_bias_kv else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `nn.MultiheadAttention` starts."""
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        if self.bias_k is not None and self.bias_v is not None:
            nn.init.xavier_normal_(self.bias_k)
            nn.init.xavier_normal_(self.bias_v)

    @classmethod
    def from_mha(cls, mha: nn.MultiheadAttention, **settings: Any) -> GridAttention:
        """The same weights in a GridAttention; `settings` are its own arguments, such as search and radius.

        >>> mha = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        >>> GridAttention.from_mha(mha, radius=2).num_heads
        4
        """
        checks.instance("mha", mha, nn.MultiheadAttention, "torch.nn.MultiheadAttention")
        names = ("embed_dim", "num_heads", "dropout", "add_zero_attn", "kdim", "vdim")
        same = {name: getattr(mha, name) for name in names}
        same |= {"bias": mha.in_proj_bias is not None, "add_bias_kv": mha.bias_k is not None}
        same |= {"device": mha.out_proj.weight.device, "dtype": mha.out_proj.weight.dtype}
        layer = cls(**same, **settings)
        layer.load_state_dict(mha.state_dict())
        return layer.train(mha.training)

    @explains
    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        tokens: Tensor | None = None,
        key_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        bias: Bias | Pair | None = None,
        warm: Matches | None = None,
    ) -> Tensor:
        """Attention of every point of the query grid.

        Args:
            query: [B, *G, embed_dim].
            key: [B, *G', kdim], a grid of the same rank; None is self-attention.
            value: [B, *G', vdim]; None takes the key.
            tokens: [B, X, kdim], keys and values off the grid that every query attends too (class tokens, text).
                `read` is their own turn.
            key_mask: bool [B, *G'] or [B, H, *G'], True = may be attended.
            key_padding_mask: bool [B, *G'], the opposite, as in `nn.MultiheadAttention`: True = is left out.
            bias: (a [B or 1, H or 1, *G, r], b [B or 1, H or 1, *G', r]), as in `attention`; tokens have none.
            warm: matches to start the search from.

        Returns:
            [B, *G, embed_dim].
        """
        key = query if key is None else key
        fits.channels_last("query", query, self.embed_dim)
        value, mask = self._keys(key, value, key_mask, key_padding_mask)
        warn_about_tokens(query.shape, key.shape)
        q, k, v = self._project(query, key, value)
        extra = self._extra(tokens, query.shape[0])  # len() would be a constant to torch.export
        request = Request(
            causal=self.causal,
            key_mask=mask,
            scale=self.scale,
            score=self.score,
            extra=extra,
            dropout_p=self._dropout(),
            warm=warm,
            bias=bias,
        )
        return self._join(self._run(q, k, v, request).out)

    def read(
        self,
        tokens: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Dense attention of tokens [B, X, embed_dim] over themselves and the grid [B, *G', kdim] -> [B, X, embed_dim].

        With it `layer(x, tokens=t)` and `layer.read(t, x)` are what dense attention over tokens and grid would be.
        """
        value, mask = self._keys(key, value, key_mask, key_padding_mask)
        fits.tokens(tokens, key.shape[0], self.embed_dim)
        q, k, v = self._project(tokens, key, value)
        k = k.flatten(2, -2)  # [B, H, M, E]: the tokens are on no grid
        v = v.flatten(2, -2)
        request = Request(
            search=None,
            tail=None,
            key_mask=None if mask is None else mask.flatten(mask.ndim - (key.ndim - 2)),
            scale=self.scale,
            score=self.score,
            extra=self._extra(tokens, tokens.shape[0]),
            dropout_p=self._dropout(),
        )
        return self._join(execute(pipeline.run, q, k, v, request).out)

    def cache(self, grid: Sequence[int], *, half: bool = False) -> Cache:
        """An empty cache for `decode`, with the settings of the layer, which has causal order and no search.

        Args:
            grid: the extents of the final grid.
            half: as in `scram.Cache`.
        """
        return self._cache(grid, Request(causal=self.causal, scale=self.scale, score=self.score), half)

    @explains
    @torch.no_grad()
    def decode(self, x: Tensor, cache: Cache, *, tokens: Tensor | None = None) -> Tensor:
        """The next positions alone: the rows of the whole call of the layer, without gradients.

        Args:
            x: [B, n, embed_dim], the next n positions in row-major order.
            cache: of this layer, from `cache`; the positions are added to it.
            tokens: [B, X, kdim], as in the whole call.

        Returns:
            [B, n, embed_dim].

        >>> layer = GridAttention(32, num_heads=4, causal=True).eval()
        >>> x = torch.randn(2, 8, 8, 32)
        >>> cache = layer.cache((8, 8))
        >>> rows = [layer.decode(one, cache) for one in x.flatten(1, 2).split(1, dim=1)]
        >>> bool(torch.allclose(torch.cat(rows, 1), layer(x).flatten(1, 2), atol=1e-5))
        True
        """
        checks.instance("cache", cache, Cache, "scram.Cache", "; layer.cache(grid) makes one")
        fits.tokens(x, x.shape[0], self.embed_dim)
        q, k, v = self._project(x, x, x)
        cache.append(q, k, v)
        return self._join(decode(q, cache, extra=self._extra(tokens, x.shape[0])))

    def _keys(
        self, key: Tensor, value: Tensor | None, key_mask: Tensor | None, ignored: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The values of a key grid, and one mask of the two."""
        value = key if value is None else value
        fits.channels_last("key", key, self.kdim)
        fits.channels_last("value", value, self.vdim)
        return value, fits.padding(ignored, key_mask, key)

    def _dropout(self) -> float:
        return self.dropout if self.training else 0.0

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-> q [B, H, *G, E], k and v [B, H, *G', E]."""
        if self.in_proj_weight is not None and query is key is value:
            q, k, v = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
            return self._split(q), self._split(k), self._split(v)
        return self._linear(query, 0), self._linear(key, 1), self._linear(value, 2)

    def _linear(self, x: Tensor, part: int) -> Tensor:
        """As query (0), key (1) or value (2): [B, *G, C] -> [B, H, *G, E]."""
        apart = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weight = apart[part] if self.in_proj_weight is None else self.in_proj_weight.chunk(3)[part]
        assert weight is not None
        return self._split(F.linear(x, weight, None if self.in_proj_bias is None else self.in_proj_bias.chunk(3)[part]))

    def _split(self, x: Tensor) -> Tensor:
        """[B, *G, C] -> [B, H, *G, E]."""
        return x.reshape(*x.shape[:-1], self.num_heads, self.embed_dim // self.num_heads).movedim(-2, 1)

    def _join(self, out: Tensor) -> Tensor:
        """[B, H, *G, E] -> [B, *G, C], projected."""
        return self.out_proj(out.movedim(1, -2).flatten(-2))  # type: ignore[no-any-return]

    def _extra(self, tokens: Tensor | None, batch: int) -> tuple[Tensor, Tensor] | None:
        """Keys and values off the grid: the tokens, the learned key and the zero key of `nn.MultiheadAttention`."""
        keys = []
        values = []
        if tokens is not None:
            fits.tokens(tokens, batch, self.kdim, self.vdim)
            keys = [self._linear(tokens, 1)]
            values = [self._linear(tokens, 2)]
        if self.bias_k is not None and self.bias_v is not None:
            keys.append(self._split(self.bias_k.expand(batch, -1, -1)))
            values.append(self._split(self.bias_v.expand(batch, -1, -1)))
        if self.add_zero_attn:
            none = self.out_proj.weight.new_zeros(batch, self.num_heads, 1, self.embed_dim // self.num_heads)
            keys = [*keys, none]
            values = [*values, none]
        if not keys:
            return None
        dtype = keys[0].dtype  # the projections' under autocast
        return torch.cat([k.to(dtype) for k in keys], 2), torch.cat([v.to(dtype) for v in values], 2)

    def extra_repr(self) -> str:
        looked = f"radius={self.radius}, search={self.search}, tail={self.tail}"
        looked = "dense" if self.is_dense else looked
        return f"{self.embed_dim}, num_heads={self.num_heads}, causal={self.causal}, {looked}"
