"""Heads for rows: every rank trades its shard of all heads for the whole grid of its share of the heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..api import attention
from ..codebook import Codebook
from ..defaults import goes_dense
from ..dense import dense_attention
from ..estimators import Clusters
from ..noise import draw_seed
from ..stages import Shard
from .guard import guarded
from .mesh import Ranks, pack, packed_size, unpack
from .shards import Shards, public_mask

Rows = Sequence[int]


def fits(shards: Shards) -> bool:
    """Whether every rank gets as many heads of queries, and as many of keys."""
    return shards.k.shape[1] % shards.ranks.size == 0


def alone(ranks: Ranks, mode: str, q: Any, k: Any, tail: Any) -> bool:
    """Whether `scram.attention` has the answer: on one rank, with points and without what several ranks refuse."""
    if ranks.size > 1 or mode not in ("auto", "heads") or isinstance(tail, Codebook):
        return False
    fit = isinstance(tail, Clusters) and tail.fit
    return not fit and all(isinstance(x, Tensor) and x.device.type == ranks.device.type and x.numel() for x in (q, k))


def heads_attention(shards: Shards) -> Tensor:
    """out [B, H, queries of this rank, *, F]."""
    ranks, rows = shards.ranks, (shards.queries, shards.keys, shards.keys)
    q, k, v = _Trade.apply(ranks, rows, True, shards.q, shards.k, shards.v)  # type: ignore[no-untyped-call]
    mask = _own_mask(shards, ranks.rank * q.shape[1], q.shape[1])

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[2] == 0:
            return q.new_zeros((*q.shape[:-1], v.shape[-1])) + q.sum() + k[:0].sum() + v[:0].sum()
        return _local(shards, q, k, v, mask)

    out = guarded(ranks, run, q, k, v)
    (back,) = _Trade.apply(ranks, rows[:1], False, out)  # type: ignore[no-untyped-call]
    whole: Tensor = back
    return whole


def _local(shards: Shards, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """The attention of this rank's heads, with the noise of their rows among all."""
    call, size = shards.call, shards.ranks.size
    options: dict[str, Any] = {"scale": call.scale, "score": call.score, "causal": call.causal, "key_mask": mask}
    # Of all heads, as one process would choose.
    all_q, all_k, all_v = (x[:, :1].expand(-1, size * x.shape[1], *x.shape[2:]) for x in (q, k, v))
    if call.automatic and goes_dense(all_q, all_k, all_v, call.weight, call.score):
        return dense_attention(q, k, v, **options)
    search = replace(call.search, seed=shards.seed)
    tail = None if call.tail is None else replace(call.tail, seed=shards.tail_seed)
    options |= {"radius": call.radius, "weight": call.weight, "window": call.window, "impl": call.impl}
    return attention(q, k, v, search=search, tail=tail, **options, _shard=Shard(_rows(shards.ranks, q), draw_seed))


def _rows(ranks: Ranks, q: Tensor) -> Tensor | None:
    """The numbers of this rank's rows [B, H / ranks] among those of all; None: it has all."""
    if ranks.size == 1:
        return None
    (batch, heads), device = q.shape[:2], q.device
    head = ranks.rank * heads + torch.arange(heads, device=device)
    return torch.arange(batch, device=device).unsqueeze(1) * (heads * ranks.size) + head


def _own_mask(shards: Shards, first: int, heads: int) -> Tensor | None:
    """The mask of the whole key grid for some heads."""
    mask = shards.key_mask
    if mask is None:
        return None
    layouts = [[((*mask.shape[:2], rows, *mask.shape[3:]), torch.bool)] for rows in shards.keys]
    messages = shards.ranks.all_gather(pack([mask], max(packed_size(layout) for layout in layouts)))
    whole = torch.cat([unpack(message, layout)[0] for message, layout in zip(messages, layouts, strict=True)], 2)
    # One head with a mask of its own is no mask of all heads: the axis stays where it stands for heads.
    return whole[:, first : first + heads] if mask.shape[1] > 1 else public_mask(whole)


class _Trade(torch.autograd.Function):
    """[B, H, own rows, *] -> [B, H / ranks, all rows, *] for each tensor, or the other way."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, rows: Sequence[Rows], to_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.rows, ctx.to_heads = ranks, rows, to_heads
        return tuple(_trade(ranks, own, to_heads, x) for own, x in zip(rows, tensors, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        given = zip(ctx.rows, grads, strict=True)
        return None, None, None, *[_trade(ctx.ranks, own, not ctx.to_heads, x) for own, x in given]


def _trade(ranks: Ranks, rows: Rows, to_heads: bool, x: Tensor) -> Tensor:
    batch, heads, _, *rest = x.shape
    given = x.chunk(ranks.size, 1) if to_heads else torch.split(x, list(rows), 2)
    share = (heads // ranks.size,) * ranks.size if to_heads else (heads,) * ranks.size
    mine = rows if to_heads else (rows[ranks.rank],) * ranks.size
    layouts = [[((batch, h, n, *rest), x.dtype)] for h, n in zip(share, mine, strict=True)]
    messages = [pack([part], packed_size([(tuple(part.shape), x.dtype)])) for part in given]
    found = ranks.all_to_all(messages, [packed_size(layout) for layout in layouts])
    parts = [unpack(message, layout)[0] for message, layout in zip(found, layouts, strict=True)]
    return torch.cat(parts, 2 if to_heads else 1)
