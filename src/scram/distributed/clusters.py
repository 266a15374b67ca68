"""Clusters of keys that lie on many ranks.

In a ring every rank clusters its own keys, which are attended apart from all others. Where all keys come together,
clusters are those of the whole grid: one k-means on a sample of the keys of all ranks, as it is in one process, then
every rank assigns its own keys, and the means of all ranks are joined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..core import pipeline
from ..core.pipeline import execute
from ..core.resolve import Request, resolve
from ..core.tails.clusters import Clusters, Codebook
from ..spec.clustering import CHUNK_ELEMENTS, SAMPLED_KEYS, SAMPLED_QUERIES
from ..spec.noise import noise
from ..spec.scoring import prepare_key
from .mesh import Layout, pack, packed_size, unpack
from .shards import Shards, public_mask, shard_seed


def own_clusters(shards: Shards) -> list[Tensor]:
    """What travels of this rank's keys, with their own clusters."""
    clusters = shards.call.clusters
    rank = shards.ranks.rank
    if clusters is None or shards.keys[rank] == 0:
        return shards.traveling(None)
    q = shards.q if shards.queries[rank] else shards.q.new_ones((*shards.q.shape[:2], 1, *shards.q.shape[3:]))
    settings = part_of(shards, rank)
    return shards.traveling(_clustered(shards, settings, q, shards.k, shards.v, shards.key_mask))


def part_of(shards: Shards, rank: int) -> Clusters:
    """The settings for that rank's keys: the part of clusters and of routed keys that they need."""
    assert shards.call.clusters is not None
    seed = shard_seed(shards.tail_seed, shards.first_key(rank))
    return shards.call.clusters.of_part(seed, shards.share(rank))


def codebook_of(shards: Shards, tensors: Mapping[str, Tensor], mask: Tensor | None, keys: int) -> Codebook:
    """Clusters from the tensors that traveled, by name."""
    assert shards.call.clusters is not None
    score = shards.request.score
    return Codebook(
        **tensors,
        grid=None,
        score=str(score),
        scale=shards.scale,
        key_mask=mask,
        keys=keys,
        second_order=shards.call.clusters.raises_weights(score),
    ).ordered()


def are_joint(shards: Shards) -> bool:
    """Whether ranks share the work: each has more keys than clusters are wanted, or none. Else each does it all."""
    clusters = shards.call.clusters
    row = shards.k.shape[3:-1].numel()
    if clusters is None or shards.ranks.size == 1:
        return False
    return all(n == 0 or n * row > clusters.count for n in shards.keys)


def joint_clusters(shards: Shards) -> tuple[list[Tensor], Tensor]:
    """What travels of this rank's keys, with their part of the clusters of the whole grid; all ranks call it.

    In place of spreads their sums travel, in one metric [B, Hc, E] for all ranks, which is returned too.
    """
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
        resolved = resolve(q, k, v, _request(shards, settings, mask))
        metric = settings.metric(pipeline.prepare(resolved, q, k, v))
        book = None
        if shards.keys[ranks.rank]:
            assign = replace(settings, steps=0)
            book = _clustered(shards, assign, q, shards.k, shards.v, shards.key_mask, start)
            book = replace(book, spreads=_spread_sums(shards, book, metric))
        return shards.traveling(book), metric


def _spread_sums(shards: Shards, book: Codebook, metric: Tensor) -> Tensor:
    """Squared distances of this rank's keys from their centers, summed over each cluster: [B, Hc, C]."""
    k = prepare_key(shards.k.detach(), shards.request.score).flatten(2, -2)  # [B, Hk, m, E]
    batch, heads, count = book.sizes.shape
    k = k.repeat_interleave(heads // k.shape[1], 1)
    label = book.label.flatten(2)  # [B, Hc, m]
    centers = book.centers.detach()
    sums = torch.zeros_like(centers[..., 0]).flatten()
    first = count * torch.arange(batch * heads, device=k.device).reshape(batch, heads, 1)
    step = max(1, CHUNK_ELEMENTS // max(batch * heads * k.shape[-1], 1))
    for begin in range(0, k.shape[2], step):
        name = label[:, :, begin : begin + step].long()
        at = (first + name.clamp(min=0)).flatten()
        apart = k[:, :, begin : begin + step].to(centers.dtype) - centers.flatten(0, 2)[at].reshape(*name.shape, -1)
        apart = torch.where((name >= 0).unsqueeze(-1), apart, 0)
        sums.index_add_(0, at, (apart.square() @ metric.unsqueeze(-1)).flatten())
    return sums.reshape(batch, heads, count)


def joined(shards: Shards, parts: Mapping[str, Tensor], metric: Tensor) -> dict[str, Tensor]:
    """Clusters of all ranks from those of each rank that has keys, which stand one after the other along axis 2.

    A sum of squares or products around the joint means is that around the means of a rank, and how far these are from
    the joint ones. So slope, variance and spreads are those of all keys, to rounding.

    Args:
        parts: centers, values, slope, sizes, label, variance, and for spreads their sums.
        metric: [B, Hc, E], of the spreads.
    """
    assert shards.call.clusters is not None
    count = shards.call.clusters.count

    def by_rank(name: str, size: int) -> Tensor:
        x = parts[name]
        return x.reshape(*x.shape[:2], x.shape[2] // size, size, *x.shape[3:])

    counts = by_rank("sizes", count)
    sizes = counts.sum(2)  # [B, Hc, C]
    each = counts.to(metric.dtype)  # [B, Hc, P, C]
    share = each / sizes.sum(-1).clamp(min=1)[..., None, None]  # of all keys
    ranks = share.sum(-1, keepdim=True)  # [B, Hc, P, 1]
    weight = (each / sizes.clamp(min=1).unsqueeze(2)).unsqueeze(-1)
    k = by_rank("centers", count)  # [B, Hc, P, C, E]
    v = by_rank("values", count)  # [B, Hc, P, C, F]
    centers = (k * weight).sum(2)
    values = (v * weight).sum(2)
    k_apart = k - centers.unsqueeze(2)
    v_apart = v - values.unsqueeze(2)
    whole = {"centers": centers, "values": values, "sizes": sizes.to(torch.int32), "label": parts["label"]}
    if "slope" in parts:
        own = (by_rank("slope", k.shape[-1]) * ranks.unsqueeze(-1)).sum(2)
        between = (k_apart * share.unsqueeze(-1)).flatten(2, 3).mT @ v_apart.flatten(2, 3)
        whole["slope"] = own + between
    with torch.no_grad():
        square = k_apart.square()  # [B, Hc, P, C, E]
        own = (by_rank("variance", k.shape[-1]) * ranks).sum(2)
        whole["variance"] = own + (square * share.unsqueeze(-1)).sum((2, 3))
        between = (each * (square * metric[:, :, None, None]).sum(-1)).sum(2)
        sums = by_rank("spreads", count).sum(2) + between  # [B, Hc, C]
        mean = sums.sum(-1, keepdim=True) / sizes.sum(-1, keepdim=True).clamp(min=1)
        whole["spreads"] = torch.where(mean > 0, sums / sizes.clamp(min=1) / torch.where(mean > 0, mean, 1), 0)
    return whole


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
    request = _request(shards, settings, mask)._replace(warm_codebook=warm)
    return execute(pipeline.cluster, q.detach(), k, v, request)


def _request(shards: Shards, settings: Clusters, mask: Tensor | None) -> Request:
    """To cluster keys with this mask."""
    return shards.request._replace(
        search=None, tail=settings, key_mask=public_mask(mask), extra=None, dropout_p=0.0, warm=None, matches=None
    )
