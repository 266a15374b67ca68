"""Queries stay, keys and values of all ranks come together on each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core import pipeline
from ..core.pipeline import execute
from ..core.resolve import goes_dense
from ..core.tails.base import NO_TAIL, Tail
from ..core.tails.clusters import Codebook, with_tensors
from ..results import Matches
from ..spec.scoring import accumulator
from .clusters import are_joint, clusters_of_all, codebook_of, joined, joint_clusters
from .guard import guarded
from .halo import exchanged, halo_rows, search_shard
from .mesh import pack, packed_size, unpack
from .shards import Shards, shard_seed

MEANS = ("centers", "values", "slope")  # of a codebook, that carry gradients


def gather_attention(shards: Shards) -> Tensor:
    """out [B, H, queries of this rank, *, F]."""
    q = shards.q
    dense = _goes_dense(shards)
    rows = 0 if dense else halo_rows(shards)
    halo = exchanged(shards, q, rows)
    warm = _warm(shards, rows)
    k, v, mask, book = _gathered(shards, not dense and are_joint(shards))
    given = shards.call.codebook
    if book is None and given is not None:
        book = given.ordered()
    names = [] if book is None else [name for name in MEANS if getattr(book, name) is not None]
    means = [getattr(book, name) for name in names]
    first = shards.first_query(shards.ranks.rank)

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        if q.shape[2] == 0:
            return _nothing(q, v, k, *rest)
        extra = rest[len(means) :]
        request = shards.request._replace(key_mask=mask, warm=None, extra=(extra[0], extra[1]) if extra else None)
        with shards.dropping(first):
            if dense:
                request = request._replace(search=None, tail=None, matches=None)
            else:
                if book is None:
                    tail = _tail(shards, q, k, v, mask)
                else:
                    tail = with_tensors(book, dict(zip(names, rest, strict=False)))
                request = request._replace(
                    search=None, matches=matches(k, tail), tail=None if tail is NO_TAIL else tail
                )
            return execute(pipeline.run, q, k, v, request).out

    def matches(k: Tensor, tail: Tail) -> Matches | None:
        if shards.request.matches is not None:
            return shards.request.matches
        return search_shard(shards, halo, shard_seed(shards.seed, first), q, k, mask, tail.codebook, warm)

    return guarded(shards.ranks, attend, q, k, v, *means, *(shards.request.extra or ()))


def _warm(shards: Shards, rows: int) -> Matches | None:
    """Matches to start from, with those of the halo."""
    warm = shards.request.warm
    halo = None if warm is None else exchanged(shards, warm.index, rows)
    if warm is None or halo is None:
        return warm
    index = halo.around(warm.index)
    return Matches(index, torch.zeros_like(index, dtype=torch.float32), warm.key_grid)  # scores are computed anew


def _tail(shards: Shards, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tail:
    """The tail of this rank's queries and all keys, where no clusters are there yet."""
    if shards.call.clusters is not None:
        return clusters_of_all(shards, q, k, v, mask)
    return shards.call.tail.of_part(shards.tail_seed)  # drawn for a row, whichever rank has its queries


def _goes_dense(shards: Shards) -> bool:
    """By the largest shard of queries, so that all ranks choose alike."""
    q, k, v = (
        x.detach().new_empty(1).expand(*x.shape[:2], rows, *x.shape[3:])
        for x, rows in zip(
            (shards.q, shards.k, shards.v), (max(shards.queries), sum(shards.keys), sum(shards.keys)), strict=True
        )
    )
    return goes_dense(q, k, v, shards.call.given)


def _nothing(q: Tensor, v: Tensor, *parts: Tensor) -> Tensor:
    """The output of no queries, in the graph: the backward pass of other ranks needs this one's."""
    reach = sum((x[:0].sum().to(q.dtype) for x in (v, *parts)), q.sum())
    return q.new_zeros((*q.shape[:-1], v.shape[-1])) + reach


def _gathered(shards: Shards, joint: bool) -> tuple[Tensor, Tensor, Tensor | None, Codebook | None]:
    """Keys, values, mask, and where they are made jointly clusters, of the whole key grid."""
    if not joint:
        shards = shards.without_tail()
        k, v, mask, _ = shards.arrived(_Gather.apply(shards, *shards.traveling(None)))  # type: ignore[no-untyped-call]
        return k, v, mask, None
    local, metric = joint_clusters(shards)
    k, v, mask, parts = shards.arrived(_Gather.apply(shards, *local))  # type: ignore[no-untyped-call]
    assert shards.call.clusters is not None
    return k, v, mask, codebook_of(shards, joined(shards, parts, metric), mask, shards.call.clusters.keys)


class _Gather(torch.autograd.Function):
    """Tensors of all ranks, joined along axis 2; gradients are summed over ranks in float32 at least."""

    @staticmethod
    def forward(ctx: Any, shards: Shards, *local: Tensor) -> tuple[Tensor, ...]:
        ranks = shards.ranks
        count = shards.differentiable
        messages = ranks.all_gather(pack(local, shards.message_size))
        parts = [unpack(message, shards.layout(rank)) for rank, message in enumerate(messages)]
        whole = tuple(torch.cat(tensors, 2) for tensors in zip(*parts, strict=True))
        ctx.ranks = ranks
        ctx.kinds = [x.dtype for x in local[:count]]
        ctx.layouts = [[(s, accumulator(kind)) for s, kind in shards.layout(n)[:count]] for n in range(ranks.size)]
        ctx.mark_non_differentiable(*whole[count:])
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layouts = ctx.layouts
        wide = ctx.layouts[0][0][1]
        own = [x.to(wide) for x in grads[: len(ctx.kinds)]]
        splits = [torch.split(x, [layout[n][0][2] for layout in layouts], 2) for n, x in enumerate(own)]
        size = max(packed_size(layout) for layout in layouts)
        messages = torch.stack([pack(parts, size).view(wide) for parts in zip(*splits, strict=True)])
        summed = ctx.ranks.reduce_scatter(messages).view(torch.uint8)
        local_grads = unpack(summed, layouts[ctx.ranks.rank])
        rest = [None] * (len(grads) - len(local_grads))
        return None, *[x.to(kind) for x, kind in zip(local_grads, ctx.kinds, strict=True)], *rest
