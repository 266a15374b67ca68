"""The clustered tail: keys of routed clusters one by one, every other cluster for its keys outside the windows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...core.calls import ClusterTailCall
from ...results import Attended
from ...spec.bits import unpacked
from ...spec.grid import grid_of, key_row, rows
from ...spec.noise import noise, numbered
from ...spec.routing import MOST_RAISED
from ...spec.schedule import tile_of
from ...spec.scoring import accumulator, normalized_weights
from .attend import CHUNK_ELEMENTS, mix
from .chunks import in_chunks
from .windows import Windows


def cluster_tail(call: ClusterTailCall) -> Attended:
    """All together: the windows are one more key, its score their lse, its value their out."""
    q = call.q
    label = call.label
    key_grid = tuple(label.shape[2:])
    grid = grid_of(q)
    heads = q.shape[1]
    cluster_heads = label.shape[1]
    queries = math.prod(grid)
    keys = math.prod(key_grid)
    count = call.sizes.shape[-1]
    wide = accumulator(call.centers.dtype)
    flat_label = label.reshape(-1, keys).long()
    sizes = call.sizes.flatten(0, 1)
    variance = call.variance.flatten(0, 1)
    none = torch.zeros_like(call.centers[..., 0])
    spreads = (none if call.spreads is None else call.spreads).flatten(0, 1)
    slope_weights = (none + 1 if call.spreads is None else call.spreads).flatten(0, 1)
    key_heads = 1 if call.k is None else call.k.shape[1]
    chosen = None if call.routes is None else unpacked(call.routes.flatten(0, 1), count)  # [R, T, C]
    windows = None if call.index is None else Windows(call.index, key_grid, call.radius)

    def kept(row: Tensor, query: Tensor, named: Tensor, p: Tensor) -> Tensor:
        """What dropout makes of the weights p [n, S] of keys and clusters named [n, S]."""
        if call.dropout_seed is None:
            return p
        bits = noise(call.dropout_seed, numbered(row, call.rows).unsqueeze(-1), query.unsqueeze(-1), named)
        return torch.where(bits >= int(call.dropout_p * 2**32), p / (1 - call.dropout_p), 0)

    def points(
        at: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        centers: Tensor,
        values: Tensor,
        slope: Tensor,
        near_out: Tensor,
        near_lse: Tensor,
    ) -> tuple[Tensor, Tensor]:
        row = at // queries  # [n]
        query = at % queries  # [n]
        source = key_row(row, heads, cluster_heads)  # [n]
        left = sizes[source].expand(-1, count)  # [n, C]
        if windows is not None:
            key, counted = windows.of(row.unsqueeze(-1), query.unsqueeze(-1))  # [n, keys of the windows]
            name = flat_label[source.unsqueeze(-1), key]
            counted = counted & (name >= 0) & (name < count)
            taken = torch.zeros(len(at), count + 1, dtype=torch.int64, device=q.device)  # the last: no cluster
            left = left - taken.scatter_add(1, torch.where(counted, name, count), torch.ones_like(name))[:, :count]
        some = left > 0  # [n, C]
        if chosen is None:
            key = row.new_zeros(len(at), 0)
            exists = key > 0
        else:
            routed = chosen[row, tile_of(query, grid)]  # [n, C]
            some = some & ~routed
            key, exists = _routed_keys(call, routed, source)  # [n, K]
        key_source = key_row(row, heads, key_heads).unsqueeze(-1) * keys + key
        # What does not count is zero before it is multiplied: 0 * NaN is NaN.
        k_gathered = torch.where(exists.unsqueeze(-1), k[key_source], 0)  # [n, K, E]
        v_gathered = torch.where(exists.unsqueeze(-1), v[key_source], 0)  # [n, K, F]
        a_keys = call.scale * (k_gathered @ q[at].unsqueeze(-1)).squeeze(-1)  # [n, K]
        spread = call.scale**2 * (q[at].square() * variance[source]).sum(-1, keepdim=True)  # [n, 1]
        a = call.scale * (centers[source] @ q[at].unsqueeze(-1)).squeeze(-1)  # [n, C]
        a = a + torch.where(some, left, 1).to(wide).log() + (spread * spreads[source]).clamp(max=MOST_RAISED) / 2
        near_score = near_lse[at].unsqueeze(-1)  # [n, 1]
        p, lse = normalized_weights(
            torch.cat([a_keys, torch.where(some, a, 0), near_score], 1),
            torch.cat([exists, some, near_score != -torch.inf], 1),
            "softmax",
        )
        p_keys = p[:, : key.shape[1]]
        p_tail = p[:, key.shape[1] : -1]
        p_near = p[:, -1:]
        p_keys = kept(row, query, key, p_keys)
        p_tail = kept(row, query, call.first_name + torch.arange(count, device=q.device), p_tail)
        joined = torch.where(near_score == -torch.inf, 0, p_near * near_out[at])
        first = call.scale * (q[at].unsqueeze(1) @ slope[source]).squeeze(1) / (1 + spread)  # [n, F]
        share = (p_tail * slope_weights[source]).sum(1, keepdim=True)
        out = mix(p_keys, v_gathered) + mix(p_tail, torch.where(some.unsqueeze(-1), values[source], 0)) + joined
        return out + torch.where(share > 0, share * first, 0), lse

    width = q.shape[-1]
    value_width = call.values.shape[-1]
    q_points = rows(q).flatten(0, 1).to(wide)  # [P, E]
    total = len(q_points)
    k_points, v_points = (
        q_points.new_zeros(1, size) if x is None else rows(x).flatten(0, 1).to(wide)
        for x, size in ((call.k, width), (call.v, value_width))
    )
    no_slope = call.centers.new_zeros(*call.centers.shape[:2], width, value_width)
    slope = no_slope if call.slope is None else call.slope
    clusters = (x.flatten(0, 1).to(wide) for x in (call.centers, call.values, slope))
    if call.near_out is None or call.near_lse is None:
        near_out = q_points.new_zeros(total, value_width)
        near_lse = q_points.new_full((total,), -torch.inf)
    else:
        near_out = rows(call.near_out).flatten(0, 1).to(wide)
        near_lse = call.near_lse.flatten().to(wide)
    each = (
        (count + min(call.keys, keys)) * (width + value_width)
        + width * value_width
        + (keys if chosen is not None else 0)
    )
    size = max(1, CHUNK_ELEMENTS // max(each, 1))
    out, lse = in_chunks(points, total, size, (q_points, k_points, v_points, *clusters, near_out, near_lse))
    return Attended(out.to(call.out_dtype).reshape(*q.shape[:-1], value_width), lse.reshape(q.shape[:-1]))


def _routed_keys(call: ClusterTailCall, chosen: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """The keys of the chosen clusters [n, C], of rows `source` [n] of clusters: int64 [n, K], and which exist."""
    assert call.order is not None
    order = call.order.flatten(0, 1)[source].long()  # [n, M]
    name = call.label.flatten(0, 1).flatten(1)[source].long().gather(1, order)  # [n, M], ascending, then -1
    last = chosen.shape[1] - 1
    counts = (name >= 0) & (name <= last) & chosen.gather(1, name.clamp(min=0, max=last))  # [n, M]
    most = min(call.keys, order.shape[1])
    slot = torch.where(counts, counts.cumsum(1) - 1, most).clamp(max=most)
    key = torch.full((len(order), most + 1), -1, dtype=torch.int64, device=order.device)
    key = key.scatter(1, slot, torch.where(counts, order, -1))[:, :most]
    return key.clamp(min=0), key >= 0
