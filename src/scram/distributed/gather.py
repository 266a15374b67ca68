"""Queries stay, keys and values of all ranks come together on each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..api import attend
from ..codebook import Codebook
from ..defaults import goes_dense
from ..dense import dense_attention
from ..estimators import Clusters, Hybrid
from ..scoring import accumulator
from ..types import Matches
from .clusters import are_joint, clusters_of_all, joined, joint_clusters
from .guard import guarded
from .halo import exchanged, halo_rows, search_shard
from .mesh import pack, packed_size, unpack
from .shards import Shards, public_mask, shard_seed


def gather_attention(shards: Shards) -> Tensor:
    """out [B, H, queries of this rank, *, F]."""
    call, q = shards.call, shards.q
    dense = call.automatic and _goes_dense(shards)
    rows = 0 if dense else halo_rows(shards)
    halo, warm = exchanged(shards, q, rows), _warm(shards, rows)
    k, v, mask, book = _gathered(shards, not dense and are_joint(shards))
    book = call.book if book is None else book
    clusters, first = [] if book is None else [book.centres, book.values], shards.first_query(shards.ranks.rank)

    def run(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        means, extra = rest[: len(clusters)], rest[len(clusters) :]
        if q.shape[2] == 0:
            return _nothing(q, v, k, *rest)
        pair = (extra[0], extra[1]) if extra else None
        with shards.dropping(first):
            if dense:
                options: dict[str, Any] = {"scale": call.scale, "score": call.score, "dropout_p": call.dropout_p}
                return dense_attention(q, k, v, key_mask=mask, extra=pair, **options)
            own = None if book is None else replace(book, centres=means[0], values=means[1])
            return _local(shards, matches(k), q, k, v, mask, own, pair)

    def matches(k: Tensor) -> Matches:
        if call.matches is not None:
            return call.matches
        return search_shard(shards, halo, shard_seed(shards.seed, first), q, k, mask, warm)

    return guarded(shards.ranks, run, q, k, v, *clusters, *(call.extra or ()))


def _warm(shards: Shards, rows: int) -> Matches | None:
    """Matches to start from, with those of the halo."""
    warm = shards.call.warm
    halo = None if warm is None else exchanged(shards, warm.index, rows)
    if warm is None or halo is None:
        return warm
    index = halo.around(warm.index)
    return Matches(index, torch.zeros_like(index, dtype=torch.float32), warm.key_grid)  # scores are computed anew


def _local(
    shards: Shards, matches: Matches, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, book: Codebook | None,
    extra: tuple[Tensor, Tensor] | None,
) -> Tensor:  # fmt: skip
    call, tail = shards.call, cast(Any, book)
    if isinstance(call.tail, Hybrid):
        tail = replace(call.tail, seed=shards.tail_seed)  # drawn for a row, whichever rank has its queries
    elif isinstance(call.tail, Clusters) and book is None:
        tail = clusters_of_all(shards, q, k, v, mask)
    options: dict[str, Any] = {"scale": call.scale, "score": call.score, "weight": call.weight, "impl": call.impl}
    options |= {"radius": call.radius, "window": call.window, "extra": extra, "dropout_p": call.dropout_p}
    return attend(q, k, v, matches, key_mask=mask, tail=tail, **options).out


def _goes_dense(shards: Shards) -> bool:
    """By the largest shard of queries, so that all ranks choose alike."""
    q, k, v = (
        x.detach().new_empty(1).expand(*x.shape[:2], rows, *x.shape[3:])
        for x, rows in zip(
            (shards.q, shards.k, shards.v), (max(shards.queries), sum(shards.keys), sum(shards.keys)), strict=True
        )
    )
    return goes_dense(q, k, v, shards.call.weight, shards.call.score)


def _nothing(q: Tensor, v: Tensor, *parts: Tensor) -> Tensor:
    """The output of no queries, in the graph: the backward pass of other ranks needs this one's."""
    reach = sum((x[:0].sum().to(q.dtype) for x in (v, *parts)), q.sum())
    return q.new_zeros((*q.shape[:-1], v.shape[-1])) + reach


def _gathered(shards: Shards, joint: bool) -> tuple[Tensor, Tensor, Tensor | None, Codebook | None]:
    """Keys, values, mask, and where they are made jointly clusters, of the whole key grid."""
    if joint:
        mine = joint_clusters(shards)
    else:
        shards = replace(shards, call=replace(shards.call, tail=None))
        mine = shards.travelling(None)
    k, v, *rest = _Gather.apply(shards, *mine)  # type: ignore[no-untyped-call]
    if not joint:
        return k, v, public_mask(rest[0]) if rest else None, None
    centres, values, *constants, label, sizes = rest
    mask = public_mask(constants[0]) if constants else None
    centres, values, sizes = joined(shards, centres, values, sizes)
    book = Codebook(centres, values, sizes, label, str(shards.call.score), shards.call.scale, mask)
    return k, v, mask, book


class _Gather(torch.autograd.Function):
    """Tensors of all ranks, joined along axis 2; gradients are summed over ranks in float32 at least."""

    @staticmethod
    def forward(ctx: Any, shards: Shards, *mine: Tensor) -> tuple[Tensor, ...]:
        ranks, count = shards.ranks, shards.differentiable
        messages = ranks.all_gather(pack(mine, shards.message_size))
        parts = [unpack(message, shards.layout(rank)) for rank, message in enumerate(messages)]
        whole = tuple(torch.cat(tensors, 2) for tensors in zip(*parts, strict=True))
        ctx.ranks, ctx.kinds = ranks, [x.dtype for x in mine[:count]]
        ctx.layouts = [[(s, accumulator(kind)) for s, kind in shards.layout(n)[:count]] for n in range(ranks.size)]
        ctx.mark_non_differentiable(*whole[count:])
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layouts, wide = ctx.layouts, ctx.layouts[0][0][1]
        own = [x.to(wide) for x in grads[: len(ctx.kinds)]]
        splits = [torch.split(x, [layout[n][0][2] for layout in layouts], 2) for n, x in enumerate(own)]
        size = max(packed_size(layout) for layout in layouts)
        messages = torch.stack([pack(parts, size).view(wide) for parts in zip(*splits, strict=True)])
        summed = ctx.ranks.reduce_scatter(messages).view(torch.uint8)
        found = unpack(summed, layouts[ctx.ranks.rank])
        rest = [None] * (len(grads) - len(found))
        return None, *[x.to(kind) for x, kind in zip(found, ctx.kinds, strict=True)], *rest
