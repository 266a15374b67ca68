"""Attention of whole tiles: the queries of a tile attend together what the windows of all of them touch.

The key grid is cut into cells, twice the radius wide, and a tile attends every cell that holds a key of one of its
windows. Works on some tiles at a time; autograd differentiates it, recomputing tiles by tiles.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..._compat import transforms_active
from ...core.calls import AttendCall, ScoreFunction
from ...results import Attended
from ...spec.grid import AllowedKeys, Grid, cell_sides, coordinates, flat, grid_of, inside, key_row
from ...spec.schedule import TILE_QUERIES, members
from ...spec.scoring import accumulator, normalized_weights, pair_score
from .attend import extra_of, flat_tensors, kept
from .chunks import in_chunks

CHUNK_ELEMENTS = 1 << 22  # of scores, gathered keys and values at a time


def tile_attend(call: AttendCall) -> Attended:
    """out [B, H, *G, F] and lse [B, H, *G] over the cells that the windows of a query's tile touch."""
    q = call.q
    k = call.k
    v = call.v
    index = call.index
    causal = call.causal
    heads = q.shape[1]
    key_heads = k.shape[1]
    grid = grid_of(q)
    key_grid = grid_of(k)
    queries = math.prod(grid)
    keys = math.prod(key_grid)
    total = q.shape[0] * heads
    allowed_keys = AllowedKeys.of(q, k, causal, call.key_mask)
    sides = cell_sides(call.radius, key_grid)
    member = members(grid, q.device)  # [tiles of a row, TILE_QUERIES]
    # [tiles, cells of a tile]
    cells = touched(index.reshape(total, queries, index.shape[-1]).long(), member, key_grid, call.radius, sides)
    extras = extra_of(call)[0].shape[2]
    wide = accumulator(v.dtype)

    def tiles(at: Tensor, q: Tensor, k: Tensor, v: Tensor, k_extra: Tensor, v_extra: Tensor) -> tuple[Tensor, Tensor]:
        row = (at // len(member)).reshape(-1, 1, 1)  # [C, 1, 1]
        query = member[at % len(member)].unsqueeze(-1)  # [C, TILE_QUERIES, 1]
        source = key_row(row, heads, key_heads)
        key, exists = keys_of(cells[at], key_grid, sides)  # [C, K]
        key = key.unsqueeze(1)  # [C, 1, K]
        exists = exists.unsqueeze(1)  # [C, 1, K]
        unmasked = exists & allowed_keys.allows(row, torch.full_like(key, keys), key)
        allowed = (query >= 0) & unmasked  # [C, TILE_QUERIES, K]
        if causal:
            allowed = allowed & (key <= query)
        # What is allowed for no query of the tile is zeroed before it is multiplied: 0 * NaN is NaN.
        unmasked = unmasked.transpose(1, 2)  # [C, K, 1]
        k_gathered = torch.where(unmasked, k[source * keys + key].squeeze(1), 0)
        v_gathered = torch.where(unmasked, v[source * keys + key].squeeze(1), 0)
        k_gathered = torch.cat([k_gathered, k_extra[source.flatten()]], 1)  # [C, K + X, E]
        v_gathered = torch.cat([v_gathered, v_extra[source.flatten()]], 1)  # [C, K + X, F]
        allowed = torch.cat([allowed, (query >= 0).expand(-1, -1, extras)], 2)
        q_tile = torch.where(query >= 0, q[row.squeeze(-1) * queries + query.squeeze(-1).clamp(min=0)], 0)
        a = call.scale * scores(q_tile, k_gathered, allowed, call.score, causal).to(wide)
        p, lse = normalized_weights(a, allowed, call.weight)
        p = torch.where(allowed, p, 0)  # of a query of NaNs too
        if call.dropout_seed is not None:
            named = torch.cat([key, (keys + torch.arange(extras, device=key.device)).expand(len(at), 1, -1)], 2)
            # What is dropped is zero, NaN too.
            p = torch.where(kept(call, row, query, named), p / (1 - call.dropout_p), 0)
        return mix(p, v_gathered, allowed, causal), lse

    each = TILE_QUERIES * (k.shape[-1] if call.score else 1) + k.shape[-1] + v.shape[-1]
    each *= cells.shape[1] * math.prod(sides) + extras
    size = max(1, CHUNK_ELEMENTS // max(each, 1))
    out, lse = in_chunks(tiles, total * len(member), size, flat_tensors(call))
    slot = member.flatten().argsort()[-queries:]  # where each query stands in the tiles
    out = out.reshape(total, len(member) * TILE_QUERIES, v.shape[-1])[:, slot].to(v.dtype)
    lse = lse.reshape(total, len(member) * TILE_QUERIES)[:, slot]
    return Attended(out.reshape(*q.shape[:-1], v.shape[-1]), lse.reshape(q.shape[:-1]))


def touched(index: Tensor, member: Tensor, key_grid: Grid, radius: Sequence[int], sides: Grid) -> Tensor:
    """index [rows, N, kappa] -> the cells that hold a key of a window of a tile's queries, ascending, then -1:
    [rows * tiles, as many as the largest set]."""
    match = torch.where(member.unsqueeze(-1) < 0, -1, index[:, member.clamp(min=0)]).reshape(
        index.shape[0] * len(member), TILE_QUERIES * index.shape[-1]
    )
    exists = (match >= 0) & (match < math.prod(key_grid))
    center = coordinates(torch.where(exists, match, 0), key_grid)
    first = [(c - b).clamp(min=0) // side for c, b, side in zip(center, radius, sides, strict=True)]
    last = [
        (c + b).clamp(max=extent - 1) // side
        for c, b, extent, side in zip(center, radius, key_grid, sides, strict=True)
    ]
    number = cell_grid(key_grid, sides)
    none = math.prod(number)
    corners = []
    for corner in itertools.product((0, 1), repeat=len(sides)):
        cell = [c + more for c, more in zip(first, corner, strict=True)]
        within = exists
        for c, end in zip(cell, last, strict=True):
            within = within & (c <= end)
        corners.append(torch.where(within, flat(cell, number), none))
    cells = torch.cat(corners, 1).sort(1).values  # [tiles, TILE_QUERIES * kappa * 2^rank]
    new = (cells < none) & torch.cat([cells[:, :1] >= 0, cells[:, 1:] != cells[:, :-1]], 1)
    most = min(cells.shape[1], none)
    sets = torch.full((len(cells), most + 1), -1, dtype=torch.int64, device=cells.device)
    # Duplicates are written to an extra slot at the end.
    sets = sets.scatter(1, torch.where(new, new.cumsum(1) - 1, most), torch.where(new, cells, -1))
    traced = torch.compiler.is_compiling() or transforms_active() or cells.is_meta
    if not traced and len(cells):  # a graph must not depend on how many there are
        most = max(1, int(new.sum(1).max()))
    return sets[:, :most]


def cell_grid(key_grid: Grid, sides: Grid) -> Grid:
    """How many cells there are on each axis."""
    return tuple(-(-extent // side) for extent, side in zip(key_grid, sides, strict=True))


def keys_of(cells: Tensor, key_grid: Grid, sides: Grid) -> tuple[Tensor, Tensor]:
    """Cells [C, L], -1 for none -> their keys [C, L * keys of a cell], flat indices on the grid, and which exist."""
    corner = coordinates(cells.clamp(min=0).unsqueeze(-1), cell_grid(key_grid, sides))
    inner = coordinates(torch.arange(math.prod(sides), device=cells.device), sides)
    place = [c * side + of for c, side, of in zip(corner, sides, inner, strict=True)]
    exists = (cells >= 0).unsqueeze(-1) & inside(place, key_grid)  # [C, L, keys of a cell]
    return torch.where(exists, flat(place, key_grid), 0).flatten(1), exists.flatten(1)


def scores(q: Tensor, k: Tensor, allowed: Tensor, score: ScoreFunction | None, causal: bool) -> Tensor:
    """[C, TILE_QUERIES, E] and [C, K, E] -> [C, TILE_QUERIES, K]."""
    if score is not None:
        return pair_score(q.unsqueeze(2), torch.where(allowed.unsqueeze(-1), k.unsqueeze(1), 0), score)
    if not causal:
        return q @ k.transpose(1, 2)
    # A key is allowed for some queries of the tile: to the gradients of the others it must be nothing, NaN too.
    spoiled = ~q.isfinite().all(-1, keepdim=True) | ~k.isfinite().all(-1).unsqueeze(1)
    return torch.where(spoiled, (q @ k.transpose(1, 2)).detach(), _finite(q) @ _finite(k).transpose(1, 2))


def mix(p: Tensor, v: Tensor, allowed: Tensor, causal: bool) -> Tensor:
    """Weights [C, TILE_QUERIES, K] and values [C, K, F] to outputs [C, TILE_QUERIES, F]."""
    if not causal:
        return p @ v
    spoiled = allowed.to(v) @ (~v.isfinite()).to(v) > 0
    # Times the sum of the weights, which is no constant: the gradients of a spoiled query are spoiled too.
    spoils = torch.zeros_like(spoiled, dtype=v.dtype).masked_fill(spoiled, torch.nan)
    return p @ _finite(v) + p.sum(-1, keepdim=True) * spoils


def _finite(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0)
