"""Random choices of the estimators, in integers and equal in every engine: steps, modes, keys that queries share."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from .grid import AllowedKeys, Grid, coordinates, flat, grid_of, key_row, rows
from .noise import noise, numbered

NONE = 2**31 - 1  # the name of a shared key that is missing: after all others
LAST = 2**63 - 1  # comes after every key that may be drawn; its name is NONE
UNIT = 1 << 30  # the table's weights add up to about this: `below` takes them, and int32 holds them


def step_table(bandwidth: float, key_grid: Grid, device: torch.device) -> Tensor:
    """Running sums, int32 [2 R + 2], of the integer weights of the steps -R..R of a discrete Gaussian.

    R = ceil(4 bandwidth), cut to the steps that can stay on the grid. Step d weighs table[d+R+1] - table[d+R].

    >>> table = step_table(0.5, (9, 9), torch.device("cpu"))
    >>> [round(share, 3) for share in (table.diff() / table[-1]).tolist()]
    [0.0, 0.106, 0.787, 0.106, 0.0]
    """
    longest = max(key_grid) - 1
    reach = longest if 4 * bandwidth >= longest else math.ceil(4 * bandwidth)
    # In torch: a graph for any size takes the bandwidth and the extents for symbols.
    step = torch.arange(-reach, reach + 1, dtype=torch.float64, device="cpu")
    weight = (-0.5 * (step / bandwidth).square()).exp()
    share = (UNIT * weight / weight.sum()).round().to(torch.int32)
    return F.pad(share.cumsum(0, dtype=torch.int32), (1, 0)).to(device, non_blocking=True)


def modes(index: Tensor, key_grid: Grid, allowed: AllowedKeys | None) -> tuple[Tensor, Tensor]:
    """Matches [B, H, *G, kappa] -> the same with those that exist first, int32, and how many, int32 [B, H, *G].

    With `allowed` only those that the query may attend count.
    """
    keys = math.prod(key_grid)
    flat_index = rows(index)  # [R, N, kappa]
    exists = (flat_index >= 0) & (flat_index < keys)
    if allowed is not None:
        row, query = _points(flat_index)
        key = torch.where(exists, flat_index, 0).long()
        exists = exists & allowed.allows(row.unsqueeze(-1), query.unsqueeze(-1), key)
    order = (~exists).int().argsort(dim=-1, stable=True)
    ordered = flat_index.gather(-1, order).reshape(index.shape)
    count = exists.sum(-1, dtype=torch.int32).reshape(index.shape[:-1])
    return ordered, count


def _points(x: Tensor) -> tuple[Tensor, Tensor]:
    """Row [R, 1] and query [1, N] of a tensor [R, N, ..]."""
    row = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    return row, torch.arange(x.shape[1], device=x.device).unsqueeze(0)


def allowed_counts(q: Tensor, allowed: AllowedKeys) -> Tensor:
    """M_i as int32 [B, H, *G]."""
    row, query = _points(rows(q))
    total = allowed.total(row, query.expand(len(row), -1))
    return total.to(torch.int32).reshape(q.shape[:-1])


def ranked_keys(q: Tensor, allowed: AllowedKeys, seed: Tensor, numbers: Tensor | None = None) -> Tensor:
    """noise(seed, row, key) << 31 | key, int64 [rows, M]: unique, ties go to the lower key; LAST for a masked one.

    Under causal order masked keys are ranked too: what is drawn must not depend on the masks of later keys.

    `numbers`: int [B, H], those of the rows.
    """
    count = q.shape[0] * q.shape[1]
    row = torch.arange(count, device=q.device).unsqueeze(1)
    key = torch.arange(allowed.keys, device=q.device)
    # [R, M]
    ranked = noise(seed, numbered(row, numbers), key) << 31 | key
    if allowed.causal:
        return ranked
    unmasked = allowed.allows(row, torch.full_like(key, allowed.keys), key.expand(count, -1))
    return torch.where(unmasked, ranked, LAST)


def unmasked_later(allowed: AllowedKeys) -> Tensor | None:
    """Which of the keys that `ranked_keys` ranks are not masked, bool [rows, M]; None: all of them."""
    if not allowed.causal or allowed.mask is None:
        return None
    return allowed.mask.repeat_interleave(allowed.heads_per_row, 0)


def shared_tail(
    ranked: Tensor,
    key_grid: Grid,
    samples: int,
    stratified: bool,
    unmasked: Tensor | None = None,
    ascending: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The keys that the queries of a row share: int32 [rows, m], NONE where one is missing; and how many each is for.

    Plain: the m keys ranked first, each for as many as the query has left (None). Stratified: the first of each cell,
    for the ranked keys of the cell, float32 [rows, m]. Of the keys drawn those that are not `unmasked` (bool [rows, M])
    are missing. Ascending: by key.
    """
    count, keys = ranked.shape
    for_keys = None
    if stratified:
        cell, cells = _cells(key_grid, samples, ranked.device)
        cell = cell.expand(count, -1)  # [R, M]
        last = torch.full((count, cells), LAST, dtype=torch.int64, device=ranked.device)
        first = last.scatter_reduce(1, cell, ranked, "amin")  # [R, cells]
        none = torch.zeros(count, cells, dtype=torch.float32, device=ranked.device)
        for_keys = none.scatter_add(1, cell, (ranked != LAST).float())
    else:
        first = ranked if samples >= keys else ranked.topk(samples, dim=1, largest=False, sorted=False).values
    name = (first & NONE).to(torch.int32)  # [R, m]
    if unmasked is not None:
        name = torch.where(unmasked.gather(1, name.long().clamp(max=keys - 1)), name, NONE)
    if ascending:
        name, order = name.sort(dim=1)
        for_keys = None if for_keys is None else for_keys.gather(1, order)
    return name, for_keys


def by_heads(q: Tensor, names: Tensor, represents: Tensor | None) -> tuple[Tensor, Tensor]:
    """What `shared_tail` names, [rows, m], as [B, H, m]; [B, H, 0] for None."""
    shape = (*q.shape[:2], names.shape[1])
    if represents is None:
        return names.reshape(shape), q.new_empty((*shape[:2], 0), dtype=torch.float32)
    return names.reshape(shape), represents.reshape(shape)


def tail_size(key_grid: Grid, samples: int, stratified: bool) -> int:
    """How many keys `shared_tail` names."""
    return math.prod(cell_counts(key_grid, samples)) if stratified else min(samples, math.prod(key_grid))


def _cells(key_grid: Grid, most: int, device: torch.device) -> tuple[Tensor, int]:
    """The cell of every key, int64 [M], and their number: at most `most`, near to cubes, equal up to a key."""
    parts = cell_counts(key_grid, most)
    place = coordinates(torch.arange(math.prod(key_grid), device=device), key_grid)
    cell = [c * n // extent for c, n, extent in zip(place, parts, key_grid, strict=True)]
    return flat(cell, parts), math.prod(parts)


@lru_cache(maxsize=64)
def cell_counts(key_grid: Grid, most: int) -> Grid:
    """How many parts each axis is cut into, at most `most` cells in all: always the axis of the longest parts next.

    >>> cell_counts((64, 64), 512), cell_counts((4, 100), 30), cell_counts((3, 3), 50)
    ((22, 23), (1, 30), (3, 3))
    """
    parts = [1] * len(key_grid)
    while True:
        by_length = sorted(range(len(parts)), key=lambda axis: key_grid[axis] / parts[axis])
        for axis in reversed(by_length):
            if parts[axis] < key_grid[axis] and math.prod(parts) // parts[axis] * (parts[axis] + 1) <= most:
                parts[axis] += 1
                break
        else:
            return tuple(parts)


def tail_rows(names: Tensor, heads: int, key_heads: int, keys: int) -> Tensor:
    """Names [rows, m] -> their places in keys or values [B * Hk * M, width]; any place for NONE."""
    source = key_row(torch.arange(len(names), device=names.device), heads, key_heads).unsqueeze(1)
    return source * keys + names.clamp(max=keys - 1)


def tail_values(x: Tensor, names: Tensor, heads: int) -> Tensor:
    """Keys or values [B, Hk, *G', width] of the names [rows, m]: [rows, m, width], 0 for NONE."""
    at = tail_rows(names, heads, x.shape[1], math.prod(grid_of(x)))  # [R, m]
    selected = rows(x).flatten(0, 1).index_select(0, at.flatten()).reshape(*names.shape, x.shape[-1])
    return torch.where((names != NONE).unsqueeze(-1), selected, 0)  # 0 * NaN is NaN
