"""Heads for rows: every rank trades its shard of all heads for the whole grid of its share of the heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core.pipeline import run
from ..core.resolve import Request, goes_dense, resolve
from ..core.tails.base import NO_TAIL, Shard, as_tail, draw_seed
from .guard import guarded
from .mesh import Ranks, pack, packed_size, unpack
from .shards import Shards, public_mask

Rows = Sequence[int]


def fits(shards: Shards) -> bool:
    """Whether every rank gets as many heads of queries, and as many of keys."""
    return shards.k.shape[1] % shards.ranks.size == 0


def alone(ranks: Ranks, mode: str, q: Any, k: Any, request: Request) -> bool:
    """Whether `scram.attention` has the answer: on one rank, with points and without what several ranks refuse."""
    given = (request.matches, request.extra, request.warm)
    if ranks.size > 1 or mode not in ("auto", "heads") or request.dropout_p or any(x is not None for x in given):
        return False
    # Codebooks are refused or run elsewhere, and so are tails without a search that need one.
    tail = as_tail(request.tail, NO_TAIL, windows=False)
    if tail.codebook is not None or (request.search is None and tail is not NO_TAIL and not tail.stands_alone):
        return False
    return all(isinstance(x, Tensor) and x.device.type == ranks.device.type and x.numel() for x in (q, k))


def heads_attention(shards: Shards) -> Tensor:
    """out [B, H, queries of this rank, *, F]."""
    ranks = shards.ranks
    rows = (shards.queries, shards.keys, shards.keys)
    q, k, v = _Trade.apply(ranks, rows, True, shards.q, shards.k, shards.v)  # type: ignore[no-untyped-call]
    mask = _own_mask(shards, ranks.rank * q.shape[1], q.shape[1])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[2] == 0:
            return q.new_zeros((*q.shape[:-1], v.shape[-1])) + q.sum() + k[:0].sum() + v[:0].sum()
        return _local(shards, q, k, v, mask)

    out = guarded(ranks, attend, q, k, v)
    (back,) = _Trade.apply(ranks, rows[:1], False, out)  # type: ignore[no-untyped-call]
    whole: Tensor = back
    return whole


def _local(shards: Shards, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """The attention of this rank's heads, with the noise of their rows among all."""
    size = shards.ranks.size
    # Of all heads, as one process would choose.
    all_q, all_k, all_v = (x[:, :1].expand(-1, size * x.shape[1], *x.shape[2:]) for x in (q, k, v))
    search = shards.call.search
    tail = shards.call.tail.of_part(shards.tail_seed)
    if goes_dense(all_q, all_k, all_v, shards.call.given):
        request = shards.request._replace(search=None, tail=None, key_mask=mask)
    else:
        request = shards.request._replace(
            search=None if search is None else replace(search, seed=shards.seed),
            tail=None if tail is NO_TAIL else tail,
            key_mask=mask,
        )
    part = Shard(_rows(shards.ranks, q), draw_seed)
    return run(resolve(q, k, v, request), q, k, v, part).out


def _rows(ranks: Ranks, q: Tensor) -> Tensor | None:
    """The numbers of this rank's rows [B, H / ranks] among those of all; None: it has all."""
    if ranks.size == 1:
        return None
    batch, heads = q.shape[:2]
    device = q.device
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
        ctx.ranks = ranks
        ctx.rows = rows
        ctx.to_heads = to_heads
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
    own_rows = rows if to_heads else (rows[ranks.rank],) * ranks.size
    layouts = [[((batch, h, n, *rest), x.dtype)] for h, n in zip(share, own_rows, strict=True)]
    messages = [pack([part], packed_size([(tuple(part.shape), x.dtype)])) for part in given]
    received = ranks.all_to_all(messages, [packed_size(layout) for layout in layouts])
    parts = [unpack(message, layout)[0] for message, layout in zip(received, layouts, strict=True)]
    return torch.cat(parts, 2 if to_heads else 1)
