"""Clusters of keys that lie on many ranks.

In a ring every rank clusters its own keys, which are attended apart from all others. Where all keys come together,
clusters are those of the whole grid: one k-means on a sample of the keys of all ranks, as it is in one process, then
every rank assigns its own keys, and the means of all ranks are joined.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..core import pipeline
from ..core.pipeline import execute
from ..core.tails.clusters import Clusters
from ..core.tails.codebook import Codebook
from ..spec.clustering import SAMPLED_KEYS, SAMPLED_QUERIES
from ..spec.noise import noise
from .mesh import Layout, pack, packed_size, unpack
from .shards import Shards, public_mask, shard_seed


def own_clusters(shards: Shards) -> list[Tensor]:
    """What travels of this rank's keys, with their own clusters."""
    clusters = shards.call.clusters
    rank = shards.ranks.rank
    if clusters is None or shards.keys[rank] == 0:
        return shards.traveling(None)
    q = shards.q if shards.queries[rank] else shards.q.new_ones((*shards.q.shape[:2], 1, *shards.q.shape[3:]))
    settings = replace(clusters, seed=shard_seed(shards.tail_seed, shards.first_key(rank)))
    return shards.traveling(_clustered(shards, settings, q, shards.k, shards.v, shards.key_mask))


def are_joint(shards: Shards) -> bool:
    """Whether ranks share the work: each has as many keys as clusters are wanted, or none. Else each does it all."""
    clusters = shards.call.clusters
    row = shards.k.shape[3:-1].numel()
    if clusters is None or shards.ranks.size == 1:
        return False
    return all(n == 0 or n * row >= clusters.count for n in shards.keys)


def joint_clusters(shards: Shards) -> list[Tensor]:
    """What travels of this rank's keys, with their part of the clusters of the whole grid; all ranks call it."""
    ranks = shards.ranks
    clusters = shards.call.clusters
    assert clusters is not None
    with ranks.together():
        local = samples(shards)
    q, k, v, *rest = exchanged_samples(shards, local)
    mask = rest[0] if rest else None
    settings = replace(clusters, seed=shards.tail_seed)
    with ranks.together():
        start = _clustered(shards, settings, q, k, v, mask)
        book = None
        if shards.keys[ranks.rank]:
            assign = replace(settings, steps=0)
            book = _clustered(shards, assign, q, shards.k, shards.v, shards.key_mask, start)
        return shards.traveling(book)


def joined(shards: Shards, centers: Tensor, values: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Means [B, Hc, C, E], [B, Hc, C, F] and sizes [B, Hc, C] of clusters, from those of each rank, C after C."""
    assert shards.call.clusters is not None
    count = shards.call.clusters.count
    each = (sizes.shape[2] // count, count)
    parts = sizes.reshape(*sizes.shape[:2], *each)
    whole = parts.sum(2).to(sizes.dtype)
    weight = (parts.to(centers.dtype) / whole.clamp(min=1).unsqueeze(2)).unsqueeze(-1)
    k, v = ((x.reshape(*x.shape[:2], *each, x.shape[-1]) * weight).sum(2) for x in (centers, values))
    return k, v, whole


def clusters_of_all(shards: Shards, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Codebook:
    """Clusters of the keys of all ranks k [B, Hk, *G', E], made on this one."""
    assert shards.call.clusters is not None
    return _clustered(shards, replace(shards.call.clusters, seed=shards.tail_seed), q, k, v, mask)


def samples(shards: Shards) -> list[Tensor]:
    """This rank's part of the queries, keys, values and mask that k-means reads, each [B, heads, n, 1, .., width]."""
    seed = shard_seed(shards.tail_seed, shards.first_key(shards.ranks.rank))
    numbers = _sample_sizes(shards, shards.ranks.rank)
    axes = shards.q.ndim - 4
    q, k, v = (x.detach().flatten(2, -2) for x in (shards.q, shards.k, shards.v))
    total = torch.tensor(k.shape[2], dtype=torch.int64, device=k.device)
    at = _places(seed, 1, numbers[1], total)
    mask = None if shards.key_mask is None else shards.key_mask.flatten(2)
    queries = torch.tensor(q.shape[2], dtype=torch.int64, device=q.device)
    sampled = [q[:, :, _places(seed, 0, numbers[0], queries)]]
    if mask is None:
        sampled += [k[:, :, at], v[:, :, at]]
    else:
        if mask.shape[1] > 1:
            k, v = (x.repeat_interleave(mask.shape[1] // k.shape[1], 1) for x in (k, v))
        order = (~mask).to(torch.uint8).argsort(dim=-1, stable=True)  # the keys that may be attended first
        at = order.gather(-1, _places(seed, 1, numbers[1], mask.sum(-1, keepdim=True)))
        every = at.expand(-1, k.shape[1], -1)
        sampled += [x.gather(2, every.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1])) for x in (k, v)]
        sampled.append(mask.gather(-1, at).unsqueeze(-1))
    return [x.reshape(*x.shape[:3], *[1] * axes, x.shape[-1]) for x in sampled]


def _sample_sizes(shards: Shards, rank: int) -> tuple[int, int]:
    """Queries and keys that a rank gives, by its share of all."""
    assert shards.call.clusters is not None
    most = SAMPLED_QUERIES, max(SAMPLED_KEYS, shards.call.clusters.count)
    queries, keys = (
        min(n[rank] * x.shape[3:-1].numel(), -(-wanted * n[rank] // max(sum(n), 1)))
        for n, x, wanted in zip((shards.queries, shards.keys), (shards.q, shards.k), most, strict=True)
    )
    return queries, keys


def _places(seed: Tensor, draw: int, number: int, total: Tensor) -> Tensor:
    """`number` of 0..total-1, one drawn from each of as many equal parts; total [..., 1] -> int64 [..., number]."""
    part = torch.arange(number, device=total.device)
    drawn = (part + noise(seed.to(total.device), 0, draw, part).float() / 2**32) / max(number, 1)
    return (drawn * total).long().clamp(min=0).minimum((total - 1).clamp(min=0))


def exchanged_samples(shards: Shards, local: list[Tensor]) -> list[Tensor]:
    """The samples of all ranks, joined along axis 2."""

    def layout(rank: int) -> Layout:
        queries, keys = _sample_sizes(shards, rank)
        numbers = [queries, *[keys] * (len(local) - 1)]
        return [((*x.shape[:2], n, *x.shape[3:]), x.dtype) for x, n in zip(local, numbers, strict=True)]

    layouts = [layout(rank) for rank in range(shards.ranks.size)]
    messages = shards.ranks.all_gather(pack(local, max(packed_size(one) for one in layouts)))
    parts = [unpack(message, one) for message, one in zip(messages, layouts, strict=True)]
    q, *rest = (torch.cat(tensors, 2) for tensors in zip(*parts, strict=True))
    if q.shape[2] == 0:
        q = q.new_ones((*q.shape[:2], 1, *q.shape[3:]))
    if len(rest) == 3:
        rest[2] = rest[2].squeeze(-1)
    return [q, *rest]


def _clustered(
    shards: Shards,
    settings: Clusters,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    warm: Codebook | None = None,
) -> Codebook:
    request = shards.request._replace(
        search=None,
        tail=settings,
        key_mask=public_mask(mask),
        extra=None,
        dropout_p=0.0,
        warm=None,
        matches=None,
        warm_codebook=warm,
    )
    return execute(pipeline.cluster, q.detach(), k, v, request)
