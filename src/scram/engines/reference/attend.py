"""Algorithm 2 of the paper: expand each match to its window, weigh the keys in them, mix their values.

Works on points (point = row*N + query) in chunks; autograd differentiates it, recomputing chunk by chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.calls import AttendCall, DrawnTailCall
from ...results import Attended
from ...spec.grid import AllowedKeys, Grid, coordinates, flat, grid_of, inside, key_row, rows, window, within
from ...spec.noise import noise, numbered
from ...spec.routing import is_routed
from ...spec.scoring import accumulator, normalized_weights, pair_score, widened
from .chunks import in_chunks

CHUNK_ELEMENTS = 1 << 22  # of gathered keys and values at a time


def attend(call: AttendCall) -> Attended:
    """out [B, H, *G, F] and lse [B, H, *G] over the union of each query's windows and the extra keys."""
    q = call.q
    k = call.k
    v = call.v
    index = call.index
    heads = q.shape[1]
    key_heads = k.shape[1]
    key_grid = grid_of(k)
    queries = math.prod(grid_of(q))
    keys = math.prod(key_grid)
    allowed_keys = AllowedKeys.of(q, k, call.causal, call.key_mask)
    radius = [min(b, extent - 1) for b, extent in zip(call.radius, key_grid, strict=True)]
    flat_index = index.reshape(math.prod(index.shape[:-1]), index.shape[-1]).long()  # [P, kappa]
    extras = extra_of(call)[0].shape[2]
    wide = accumulator(v.dtype)

    def points(at: Tensor, q: Tensor, k: Tensor, v: Tensor, k_extra: Tensor, v_extra: Tensor) -> tuple[Tensor, Tensor]:
        row = (at // queries).unsqueeze(-1)  # [C, 1]
        query = (at % queries).unsqueeze(-1)  # [C, 1]
        source = key_row(row, heads, key_heads)
        key, new = expand(flat_index[at], key_grid, radius)  # [C, kappa * W]
        allowed = new & allowed_keys.allows(row, query, key)
        if call.routes is not None and call.label is not None:
            allowed = allowed & ~is_routed(call.routes, call.label, row, query, key, grid_of(call.q))
        # What is not allowed is zeroed before it is multiplied: 0 * NaN is NaN, forward and backward.
        k_gathered = torch.where(allowed.unsqueeze(-1), k[source * keys + key], 0)
        v_gathered = torch.where(allowed.unsqueeze(-1), v[source * keys + key], 0)
        k_gathered = torch.cat([k_gathered, k_extra[source.squeeze(-1)]], 1)  # [C, kappa * W + X, E]
        v_gathered = torch.cat([v_gathered, v_extra[source.squeeze(-1)]], 1)  # [C, kappa * W + X, F]
        allowed = torch.cat([allowed, allowed.new_ones(len(at), extras)], 1)
        a = call.scale * pair_score(q[at].unsqueeze(1), k_gathered, call.score).to(wide)
        p, lse = normalized_weights(a, allowed, call.weight)
        if call.dropout_seed is not None:
            named = torch.cat([key, (keys + torch.arange(extras, device=key.device)).expand(len(at), -1)], 1)
            # What is dropped is zero, NaN too.
            p = torch.where(kept(call, row, query, named), p / (1 - call.dropout_p), 0)
        return mix(p, v_gathered), lse

    tensors = flat_tensors(call)
    total = q.shape[0] * heads * queries
    each = (index.shape[-1] * math.prod(2 * b + 1 for b in radius) + extras) * (k.shape[-1] + v.shape[-1])
    size = max(1, CHUNK_ELEMENTS // max(each, 1))
    out, lse = in_chunks(points, total, size, tensors)
    return Attended(out.to(v.dtype).reshape(*q.shape[:-1], v.shape[-1]), lse.reshape(q.shape[:-1]))


def expand(match: Tensor, key_grid: Grid, radius: Sequence[int]) -> tuple[Tensor, Tensor]:
    """match [C, kappa] -> key [C, kappa * W], each a flat index on the grid, and whether it exists and is new.

    A key is new in a window exactly when it lies in none of the windows before.
    """
    keys = math.prod(key_grid)
    exists = (match >= 0) & (match < keys)
    center = [c.unsqueeze(-1) for c in coordinates(torch.where(exists, match, 0), key_grid)]  # each [C, kappa, 1]
    place = [c + offset for c, offset in zip(center, window(radius, match.device), strict=True)]  # [C, kappa, W]
    on_grid = exists.unsqueeze(-1) & inside(place, key_grid)
    fresh = []
    for e in range(match.shape[1]):
        new = on_grid[:, e]
        for before in range(e):
            covered = within([c[:, e] for c in place], [c[:, before] for c in center], radius)
            new = new & ~(covered & exists[:, before].unsqueeze(-1))
        fresh.append(new)
    key = torch.where(on_grid, flat(place, key_grid), 0)
    return key.flatten(1), (torch.stack(fresh, 1) if fresh else on_grid).flatten(1)


def extra_of(call: AttendCall) -> tuple[Tensor, Tensor]:
    """The extra keys and values; none of them where the call has none."""
    if call.k_extra is not None and call.v_extra is not None:
        return call.k_extra, call.v_extra
    k = call.k
    v = call.v
    return k.new_zeros(*k.shape[:2], 0, k.shape[-1]), v.new_zeros(*v.shape[:2], 0, v.shape[-1])


def flat_tensors(call: AttendCall) -> tuple[Tensor, ...]:
    """q, k, v as points [P, E|F], the extra keys and values as rows [R, X, E|F], in the accumulator's dtype."""
    _, *extra = widened(call.score, call.q, *extra_of(call))
    grids = tuple(rows(x).flatten(0, 1) for x in widened(call.score, call.q, call.k, call.v))
    return grids + tuple(x.flatten(0, 1) for x in extra)


def kept(call: AttendCall | DrawnTailCall, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Whether dropout keeps each (query, key)."""
    assert call.dropout_seed is not None
    return noise(call.dropout_seed, numbered(row, call.rows), query, key) >= int(call.dropout_p * 2**32)


def mix(p: Tensor, v: Tensor) -> Tensor:
    """Weights [C, S] and values [C, S, F] to outputs [C, F]."""
    return (p.unsqueeze(1) @ v.to(p.dtype)).squeeze(1)
