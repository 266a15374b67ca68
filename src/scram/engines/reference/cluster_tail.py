"""The clustered tail: every cluster stands for those of its keys that lie outside a query's windows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...core.calls import ClusterTailCall
from ...results import Attended
from ...spec.grid import grid_of, key_row, rows
from ...spec.noise import noise, numbered
from ...spec.scoring import accumulator, normalized_weights
from .attend import CHUNK_ELEMENTS, mix
from .chunks import in_chunks
from .windows import windows_of


def cluster_tail(call: ClusterTailCall) -> Attended:
    """Windows and tail together: the windows are one more key, its score their lse, its value their out."""
    q = call.q
    label = call.label
    key_grid = tuple(label.shape[2:])
    heads = q.shape[1]
    cluster_heads = label.shape[1]
    queries = math.prod(grid_of(q))
    keys = math.prod(key_grid)
    count = call.sizes.shape[-1]
    wide = accumulator(call.values.dtype)
    flat_label = label.reshape(-1, keys).long()
    sizes = call.sizes.flatten(0, 1)
    gains = torch.ones_like(call.centers[..., 0]) if call.gains is None else call.gains
    windows = windows_of(call.window, call.index, key_grid, call.radius)

    def points(
        at: Tensor, q: Tensor, centers: Tensor, values: Tensor, gains: Tensor, near_out: Tensor, near_lse: Tensor
    ) -> tuple[Tensor, Tensor]:
        row = at // queries  # [C]
        query = at % queries  # [C]
        source = key_row(row, heads, cluster_heads)  # [C]
        key, exists = windows.of(row.unsqueeze(-1), query.unsqueeze(-1))  # [C, keys of the windows]
        name = flat_label[source.unsqueeze(-1), key]
        counted = exists & (name >= 0) & (name < count)
        taken = torch.zeros(len(at), count + 1, dtype=torch.int64, device=q.device)  # the last: keys of no cluster
        taken = taken.scatter_add(1, torch.where(counted, name, count), torch.ones_like(name))
        factor = (sizes[source] - taken[:, :count]) * gains[source]  # [C, clusters]
        some = factor > 0
        # What a query has nothing left of is zero before it is multiplied: 0 * NaN is NaN.
        a = torch.where(some, call.scale * (centers[source] @ q[at].unsqueeze(-1)).squeeze(-1), 0)
        factor = torch.where(some, factor, 1)
        near_score = near_lse[at].unsqueeze(-1)  # [C, 1]
        p, lse = normalized_weights(
            torch.cat([a + factor.log(), near_score], 1), torch.cat([some, near_score != -torch.inf], 1), "softmax"
        )
        p_tail = p[:, :count]
        p_near = p[:, count:]
        if call.dropout_seed is not None:
            named = call.first_name + torch.arange(count, device=q.device)
            number = numbered(row, call.rows).unsqueeze(-1)
            bits = noise(call.dropout_seed, number, query.unsqueeze(-1), named)
            p_tail = torch.where(bits >= int(call.dropout_p * 2**32), p_tail / (1 - call.dropout_p), 0)
        joined = torch.where(near_score == -torch.inf, 0, p_near * near_out[at])
        return mix(p_tail, torch.where(some.unsqueeze(-1), values[source], 0)) + joined, lse

    q_points = rows(q).flatten(0, 1).to(wide)  # [P, E]
    near_out = rows(call.near_out).flatten(0, 1).to(wide)  # [P, F]
    near_lse = call.near_lse.flatten().to(wide)  # [P]
    clusters = (x.flatten(0, 1).to(wide) for x in (call.centers, call.values, gains))
    each = count * (q.shape[-1] + call.values.shape[-1])
    size = max(1, CHUNK_ELEMENTS // max(each, 1))
    tensors = (q_points, *clusters, near_out, near_lse)
    out, lse = in_chunks(points, q.shape[0] * heads * queries, size, tensors)
    return Attended(out.to(call.near_out.dtype).reshape(call.near_out.shape), lse.reshape(q.shape[:-1]))
