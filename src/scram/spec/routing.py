"""Which clusters a tile of queries attends key by key, in plain torch.

A center is wrong where many scores differ from that of the center, and where the queries attend to it. Over the finite
queries of a tile, u their mean, with a_ic the softmax over clusters of scale <q_i, center_c> + log size_c and
s_c = spread_c * scale^2 sum_e u_e^2 variance_e, the importance of a key of cluster c is

    sqrt(mean_i a_ic^2) * (exp(min(s_c, MOST_SPREAD)) - 1 + EVEN) / size_c.

Clusters are taken by falling importance, the lower index first where it is equal, while their keys fit the budget; one
that does not fit is passed over. One of importance 0 or without keys is never taken.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core.calls import Found, RouteCall, Routed, RoutedStartCall
from .bits import packed, unpacked
from .grid import grid_of, key_row, rows
from .schedule import members, tile_of
from .scoring import accumulator

MOST_SPREAD = 4.0
MOST_RAISED = 2.0  # of the spread of a cluster's scores, that counts in its logit
EVEN = 0.01  # importance of a cluster all of whose keys score alike
LEAST_WINDOW = 0.01  # of a query's attention, that a window must hold by what the clusters say
CHUNK_ELEMENTS = 1 << 22  # of weights [tiles, queries, clusters] at a time


def route(call: RouteCall) -> Routed:
    """The clusters that each tile of a row routes."""
    q = call.q
    heads = q.shape[1]
    cluster_heads = call.sizes.shape[1]
    count = call.sizes.shape[-1]
    member = members(grid_of(q), q.device)  # [T, 64]
    q_rows = rows(q)  # [R, N, E]
    padding = call.words * 32 - count
    words = [torch.zeros(0, call.words, dtype=torch.int32, device=q.device)]
    numbers = [torch.zeros(0, dtype=torch.int32, device=q.device)]
    sums = [torch.zeros(0, member.shape[1], dtype=call.centers.dtype, device=q.device)]
    step = max(1, CHUNK_ELEMENTS // (member.shape[1] * max(count, 1)))
    for row, source in enumerate(_sources(len(q_rows), heads, cluster_heads)):
        sizes = call.sizes.flatten(0, 1)[source]
        for begin in range(0, len(member), step):
            each, lse = importance(call, q_rows[row], member[begin : begin + step], source)
            chosen, number = within_budget(each, sizes, call.keys)
            words.append(packed(torch.nn.functional.pad(chosen, (0, padding))))
            numbers.append(number)
            sums.append(lse)
    slot = member.flatten().argsort()[member.numel() - q_rows.shape[1] :]  # of each query
    return Routed(
        torch.cat(words).reshape(*q.shape[:2], len(member), call.words),
        torch.cat(numbers).reshape(*q.shape[:2], len(member)),
        torch.cat(sums).reshape(len(q_rows), member.numel())[:, slot].reshape(q.shape[:-1]),
    )


def _sources(number: int, heads: int, fewer: int) -> list[int]:
    """Of so many rows of queries, those of keys or clusters that they read."""
    sources: list[int] = key_row(torch.arange(number, device="cpu"), heads, fewer).tolist()
    return sources


def importance(call: RouteCall, q: Tensor, member: Tensor, source: int) -> tuple[Tensor, Tensor]:
    """Of a key of each cluster of row `source` to tiles [t, 64] of queries q [N, E]: [t, C]; and the lse [t, 64]."""
    wide = accumulator(call.centers.dtype)
    centers, sizes, variance, spreads = (
        x.flatten(0, 1)[source] for x in (call.centers, call.sizes, call.variance, call.spreads)
    )
    q_tile = q[member.clamp(min=0)].to(wide)  # [t, 64, E]
    counts = (member >= 0) & q_tile.isfinite().all(-1)  # [t, 64]
    q_tile = torch.where(counts.unsqueeze(-1), q_tile, 0)
    total = counts.sum(1, keepdim=True).clamp(min=1)  # [t, 1]
    a = call.scale * (q_tile @ centers.T) + sizes.to(wide).log()  # [t, 64, C]
    lse = torch.where(counts, a.logsumexp(-1), -math.inf)  # [t, 64]
    a = a.softmax(-1)
    a = torch.where(counts.unsqueeze(-1) & (sizes > 0), a, 0)
    weight = (a.square().sum(1) / total).sqrt()  # [t, C]
    mean = q_tile.sum(1) / total  # [t, E]
    spread = call.scale**2 * (mean.square() @ variance).unsqueeze(1) * spreads  # [t, C]
    return weight * (spread.clamp(max=MOST_SPREAD).exp() - 1 + EVEN) / sizes.clamp(min=1), lse


def within_budget(importance: Tensor, sizes: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """The chosen clusters, bool [t, C], of importance [t, C] and sizes [C]; and the number of their keys, [t]."""
    place = importance.argsort(dim=1, descending=True, stable=True)  # [t, C]
    left = torch.full_like(place[:, 0], keys) if place.shape[1] else place.new_full((len(place),), keys)
    taken = []
    for n in range(place.shape[1]):
        cluster = place[:, n]
        size = sizes[cluster]
        fits = (size <= left) & (size > 0) & (importance.gather(1, cluster.unsqueeze(1)).squeeze(1) > 0)
        left = left - torch.where(fits, size, 0)
        taken.append(fits)
    chosen = torch.zeros_like(importance, dtype=torch.bool)
    if taken:
        chosen = chosen.scatter(1, place, torch.stack(taken, 1))
    return chosen, (keys - left).to(torch.int32)


def is_routed(routes: Tensor, label: Tensor, row: Tensor, query: Tensor, key: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Whether the tile of a query routes the cluster of a key; row, query and key broadcast.

    Args:
        routes: int32 [B, H, T, W].
        label: int32 [B, Hc, *G'], -1 for a key in no cluster.
        grid: of the queries.
    """
    heads = routes.shape[1]
    name = label.flatten(0, 1).flatten(1)[key_row(row, heads, label.shape[1]), key].long()
    words = routes.flatten(0, 1)
    exists = (name >= 0) & (name < 32 * words.shape[-1])
    name = torch.where(exists, name, 0)
    word = words[row, tile_of(query, grid), name // 32]
    return exists & ((word >> (name % 32)) & 1).bool()


def routed_start(call: RoutedStartCall) -> Found:
    """The key of highest score that the tile of each query routes, the lower one where scores are equal; -1: none."""
    q = call.q
    heads = q.shape[1]
    queries = math.prod(grid_of(q))
    member = members(grid_of(q), q.device)  # [T, 64]
    lane = torch.where(member < 0, queries, member).flatten().argsort()[:queries]  # [N], the place of each query there
    q_rows = rows(q)
    k_rows = rows(call.k)
    wide = accumulator(q.dtype)
    place = torch.arange(k_rows.shape[1], device=q.device)
    chosen = unpacked(call.routes.flatten(0, 1), call.sizes.shape[-1])  # [R, T, C]
    indices = [torch.zeros(0, queries, dtype=torch.int32, device=q.device)]
    scores = [torch.zeros(0, queries, dtype=torch.float32, device=q.device)]
    key_sources = _sources(len(q_rows), heads, call.k.shape[1])
    for row, source in enumerate(_sources(len(q_rows), heads, call.sizes.shape[1])):
        k = k_rows[key_sources[row]].to(wide)
        end = call.sizes.flatten(0, 1)[source].long().cumsum(0)  # [C], of the run of each cluster
        ended = torch.zeros_like(place).scatter_add(0, end.clamp(max=len(place) - 1), (end < len(place)).long())
        cluster = ended.cumsum(0).clamp(max=len(end) - 1)  # [M], of each place in the order
        order = call.order.flatten(0, 1)[source].long()
        tiles = []
        for tile, some in enumerate(member):
            in_run = chosen[row, tile][cluster] & (place < end[-1])
            routed = torch.zeros_like(in_run).scatter(0, order, in_run)  # [M]
            s = q_rows[row, some.clamp(min=0)].to(wide) @ k.T  # [64, M]
            tiles.append(torch.where(routed & ~s.isnan(), s, -math.inf).max(1))
        score = torch.cat([best.values for best in tiles])  # [T * 64]
        index = torch.where(score > -math.inf, torch.cat([best.indices for best in tiles]), -1)
        indices.append(index[lane].to(torch.int32)[None])
        scores.append(score[lane].float()[None])
    shape = (*q.shape[:-1], 1)
    return Found(torch.cat(indices).reshape(shape), torch.cat(scores).reshape(shape))
