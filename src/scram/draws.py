"""What the estimators draw from, in integers, the same for every implementation: steps, modes, shared tails."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from .grid import Grid, LegalKeys, coordinates, flat, grid_of, key_row, rows
from .noise import noise

UNIT = 1 << 30  # the table's weights add up to about this: `below` takes them, and int32 holds them


@lru_cache(maxsize=64)
def _steps(bandwidth: float, reach: int) -> tuple[int, ...]:
    weights = [math.exp(-0.5 * (d / bandwidth) ** 2) for d in range(-reach, reach + 1)]
    total, running = math.fsum(weights), [0]
    for weight in weights:
        running.append(running[-1] + round(UNIT * weight / total))
    return tuple(running)


def step_table(bandwidth: float, key_grid: Grid, device: torch.device) -> Tensor:
    """Running sums, int32 [2 R + 2], of the integer weights of the steps -R..R of a discrete Gaussian.

    R = ceil(4 bandwidth), cut to the steps that can stay on the grid. Step d weighs table[d+R+1] - table[d+R].

    >>> table = step_table(0.5, (9, 9), torch.device("cpu"))
    >>> (table.diff() / table[-1]).numpy().round(3).tolist()
    [0.0, 0.107, 0.786, 0.107, 0.0]
    """
    longest = max(key_grid) - 1
    reach = longest if 4 * bandwidth >= longest else math.ceil(4 * bandwidth)
    return torch.tensor(_steps(bandwidth, reach), dtype=torch.int32).to(device, non_blocking=True)


def modes(index: Tensor, key_grid: Grid, legal: LegalKeys | None) -> tuple[Tensor, Tensor]:
    """Matches [B, H, *G, kappa] -> the same with those that exist first, int32, and how many, int32 [B, H, *G].

    With `legal` only those that the query may attend count.
    """
    keys, flat_index = math.prod(key_grid), index.reshape(index.shape[0] * index.shape[1], -1, index.shape[-1])
    there = (flat_index >= 0) & (flat_index < keys)
    if legal is not None:
        row, query = _points(flat_index)
        there = there & legal.allows(row.unsqueeze(-1), query.unsqueeze(-1), torch.where(there, flat_index, 0).long())
    order = (~there).int().argsort(dim=-1, stable=True)
    return flat_index.gather(-1, order).reshape(index.shape), there.sum(-1, dtype=torch.int32).reshape(index.shape[:-1])


def _points(x: Tensor) -> tuple[Tensor, Tensor]:
    """Row [R, 1] and query [1, N] of a tensor [R, N, ..]."""
    row = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    return row, torch.arange(x.shape[1], device=x.device).unsqueeze(0)


def legal_counts(q: Tensor, legal: LegalKeys) -> Tensor:
    """M_i as int32 [B, H, *G]."""
    row, query = _points(rows(q))
    total = legal.total(row, query.expand(len(row), -1))
    return total.to(torch.int32).reshape(q.shape[:-1])


def shared_tail(
    q: Tensor, k: Tensor, legal: LegalKeys, seed: Tensor, samples: int, stratified: bool
) -> tuple[Tensor, Tensor | None]:
    """The keys that the queries of each row share: int32 [B, H, m], ascending, -1 last; and how many keys each is for.

    Plain: the unmasked keys of smallest noise(seed, row, key), each for as many as the query has left (None).
    Stratified: of each cell the one of smallest noise, for the unmasked keys of the cell, float32 [B, H, m].
    """
    count, keys, device = q.shape[0] * q.shape[1], legal.keys, q.device
    row, key = torch.arange(count, device=device).unsqueeze(1), torch.arange(keys, device=device)
    ranked = noise(seed.to(device), row, key) << 31 | key  # unique: ties go to the lower index
    ranked = ranked.reshape(count, keys)
    open_ = legal.allows(row, torch.full_like(key, keys), key.expand(count, -1))
    ranked = torch.where(open_, ranked, _LAST)
    shape = q.shape[:2]
    if not stratified:
        first = ranked if samples >= keys else ranked.topk(samples, dim=1, largest=False, sorted=False).values
        return _ascending(first)[0].reshape(*shape, first.shape[1]), None
    cell, cells = _cells(grid_of(k), samples, device)
    cell = cell.expand(count, -1)
    best = torch.full((count, cells), _LAST, device=device).scatter_reduce(1, cell, ranked, "amin")
    for_keys = torch.zeros(count, cells, device=device).scatter_add(1, cell, open_.float())
    names, order = _ascending(best)
    return names.reshape(*shape, cells), for_keys.gather(1, order).reshape(*shape, cells)


_LAST = 2**63 - 1


def _ascending(ranked: Tensor) -> tuple[Tensor, Tensor]:
    """Ranked keys [R, m] -> their names, int32, ascending with -1 last, and the order they were taken in."""
    name = torch.where(ranked == _LAST, 2**31 - 1, ranked & (2**31 - 1))
    name, order = name.sort(dim=1)
    return torch.where(name == 2**31 - 1, -1, name).to(torch.int32), order


def _cells(key_grid: Grid, most: int, device: torch.device) -> tuple[Tensor, int]:
    """The cell of every key, int64 [M], and their number: at most `most`, near to cubes, equal up to a key."""
    parts = cell_counts(key_grid, most)
    place = coordinates(torch.arange(math.prod(key_grid), device=device), key_grid)
    within = [c * n // extent for c, n, extent in zip(place, parts, key_grid, strict=True)]
    return flat(within, parts), math.prod(parts)


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


def tail_rows(x: Tensor, names: Tensor) -> Tensor:
    """Keys or values [B, Hk, *G', width] -> those of the names [B, H, m] for every query head: [B, H, m, width]."""
    count, keys = names.shape[0] * names.shape[1], math.prod(grid_of(x))
    source = key_row(torch.arange(count, device=x.device), names.shape[1], x.shape[1]).unsqueeze(1)
    at = (source * keys + names.flatten(0, 1).clamp(min=0)).flatten()
    found = rows(x).flatten(0, 1).index_select(0, at).reshape(*names.shape, x.shape[-1])
    return torch.where((names >= 0).unsqueeze(-1), found, 0)  # 0 * NaN is NaN
