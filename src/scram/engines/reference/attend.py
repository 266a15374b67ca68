"""Algorithm 2 of the paper: expand each match to its window, weigh the keys found, mix their values.

Works on points (point = row*N + query) in chunks; autograd differentiates it, recomputing chunk by chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...grid import Grid, LegalKeys, coordinates, flat, grid_of, inside, key_row, rows, window, within
from ...noise import noise
from ...scoring import accumulator, pair_score, weigh, widened
from ...types import Attended, Score
from .chunks import in_chunks

CHUNK_ELEMENTS = 1 << 22  # of gathered keys and values at a time


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    *,
    radius: Sequence[int],
    causal: bool,
    key_mask: Tensor | None,
    scale: float,
    score: Score,
    weight: str,
    extra: tuple[Tensor, Tensor] | None,
    dropout_p: float,
    dropout_seed: Tensor | None,
) -> Attended:
    """q, k prepared for `score`, v [B, Hk, *G', F], index [B, H, *G, kappa] -> out [B, H, *G, F], lse [B, H, *G]."""
    heads, key_heads, key_grid = q.shape[1], k.shape[1], grid_of(k)
    queries, keys = math.prod(grid_of(q)), math.prod(key_grid)
    legal_keys = LegalKeys.of(q, k, causal, key_mask)
    radius = [min(b, extent - 1) for b, extent in zip(radius, key_grid, strict=True)]
    flat_index = index.reshape(-1, index.shape[-1]).long()
    if extra is None:
        extra = (k.new_zeros(*k.shape[:2], 0, k.shape[-1]), v.new_zeros(*v.shape[:2], 0, v.shape[-1]))
    extras = extra[0].shape[2]
    wide = accumulator(v.dtype)

    def points(at: Tensor, q: Tensor, k: Tensor, v: Tensor, k_extra: Tensor, v_extra: Tensor) -> tuple[Tensor, Tensor]:
        row, query = (at // queries).unsqueeze(-1), (at % queries).unsqueeze(-1)
        source = key_row(row, heads, key_heads)
        key, new = expand(flat_index[at], key_grid, radius)
        legal = new & legal_keys.allows(row, query, key)
        # What is not legal is zeroed before it is multiplied: 0 * NaN is NaN, forward and backward.
        k_found = torch.where(legal.unsqueeze(-1), k[source * keys + key], 0)
        v_found = torch.where(legal.unsqueeze(-1), v[source * keys + key], 0)
        k_found = torch.cat([k_found, k_extra[source.squeeze(-1)]], 1)
        v_found = torch.cat([v_found, v_extra[source.squeeze(-1)]], 1)
        legal = torch.cat([legal, legal.new_ones(len(at), extras)], 1)
        p, lse = weigh(scale * pair_score(q[at].unsqueeze(1), k_found, score).to(wide), legal, weight)
        if dropout_seed is not None:
            named = torch.cat([key, (keys + torch.arange(extras, device=key.device)).expand(len(at), -1)], 1)
            # What is dropped is zero, NaN too.
            p = torch.where(kept(dropout_seed, row, query, named, dropout_p), p / (1 - dropout_p), 0)
        return mix(p, v_found), lse

    _, *extra_wide = widened(score, q, *extra)
    tensors = tuple(rows(x).flatten(0, 1) for x in widened(score, q, k, v)) + tuple(x.flatten(0, 1) for x in extra_wide)
    total = q.shape[0] * heads * queries
    each = (index.shape[-1] * math.prod(2 * b + 1 for b in radius) + extras) * (k.shape[-1] + v.shape[-1])
    size = max(1, CHUNK_ELEMENTS // max(each, 1))
    out, lse = in_chunks(points, total, size, tensors)
    return Attended(out.to(v.dtype).reshape(*q.shape[:-1], v.shape[-1]), lse.reshape(q.shape[:-1]))


def expand(match: Tensor, key_grid: Grid, radius: Sequence[int]) -> tuple[Tensor, Tensor]:
    """match [C, kappa] -> key [C, kappa * W], each a flat index on the grid, and whether it is there and new.

    A key is new in a window exactly when it lies in none of the windows before.
    """
    keys = math.prod(key_grid)
    exists = (match >= 0) & (match < keys)
    centre = [c.unsqueeze(-1) for c in coordinates(torch.where(exists, match, 0), key_grid)]  # each [C, kappa, 1]
    place = [c + offset for c, offset in zip(centre, window(radius, match.device), strict=True)]  # [C, kappa, W]
    there = exists.unsqueeze(-1) & inside(place, key_grid)
    fresh = []
    for e in range(match.shape[1]):
        new = there[:, e]
        for before in range(e):
            covered = within([c[:, e] for c in place], [c[:, before] for c in centre], radius)
            new = new & ~(covered & exists[:, before].unsqueeze(-1))
        fresh.append(new)
    key = torch.where(there, flat(place, key_grid), 0)
    return key.flatten(1), torch.stack(fresh, 1).flatten(1)


def kept(seed: Tensor, row: Tensor, query: Tensor, key: Tensor, p: float) -> Tensor:
    """Whether dropout keeps each (query, key): not, with probability p."""
    return noise(seed, row, query, key) >= int(p * 2**32)


def mix(p: Tensor, v: Tensor) -> Tensor:
    """Weights [C, S] and values [C, S, F] to outputs [C, F]."""
    return (p.unsqueeze(1) @ v.to(p.dtype)).squeeze(1)
