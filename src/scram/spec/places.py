"""Where matches lie: coordinates and back, other resolutions, and which queries a key was found by."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .grid import Grid, coordinates, flat, inside


def coords_rank(coords: Tensor) -> int:
    """The rank of the key grid that coordinates [B, H, *G, kappa, rank] speak of."""
    if not isinstance(coords, Tensor):
        raise TypeError(f"coords must be a tensor [B, H, *G, kappa, rank], got {type(coords).__name__}")
    if coords.ndim < 5 or coords.shape[-1] != coords.ndim - 4:
        raise ValueError(
            f"coords must be [B, H, *G, kappa, rank] with one number for each axis of the grid, got "
            f"{tuple(coords.shape)}"
        )
    return coords.shape[-1]


def same_rank(name: str, grid: Grid, rank: int) -> None:
    """Query and key grids have as many axes."""
    if len(grid) != rank:
        raise ValueError(f"{name} must have {rank} extents like the query grid, got {grid}")


def coords_of(index: Tensor, key_grid: Grid) -> Tensor:
    """int [..., kappa] -> float32 [..., kappa, rank], NaN where the index is off the grid.

    >>> coords_of(torch.tensor([5, -1]), (2, 4))
    tensor([[1., 1.],
            [nan, nan]])
    """
    on_grid = (index >= 0) & (index < math.prod(key_grid))
    place = torch.stack(coordinates(index, key_grid), -1).float()  # [..., kappa, rank]
    return torch.where(on_grid.unsqueeze(-1), place, torch.nan)


def index_of(coords: Tensor, key_grid: Grid) -> Tensor:
    """[..., rank] -> int32 [...]: the nearest key (halves go up), -1 for what is not finite or off the grid.

    >>> index_of(torch.tensor([[0.6, 1.4], [2.0, 0.0]]), (2, 4))
    tensor([ 5, -1], dtype=torch.int32)
    """
    rounded = (coords.double() + 0.5).floor() if coords.is_floating_point() else coords.double()
    whole = [axis.long() for axis in rounded.nan_to_num(-1, -1, -1).clamp(-1, 2**31).unbind(-1)]
    return torch.where(inside(whole, key_grid), flat(whole, key_grid), -1).int()


def own_index(grid: Grid, key_grid: Grid, device: torch.device | str) -> Tensor:
    """int32 [*G]: the key at each query's own place; where the grids differ, the one that holds the query's center.

    >>> own_index((4,), (2,), "cpu")
    tensor([0, 0, 1, 1], dtype=torch.int32)
    """
    # No common divisor here: extents may be symbols, while a graph is made.
    axes = [(2 * torch.arange(n, device=device) + 1) * m // (2 * n) for n, m in zip(grid, key_grid, strict=True)]
    return flat(torch.meshgrid(*axes, indexing="ij"), key_grid).int()


def starts(q: Tensor, key_grid: Grid, warm: Tensor | None) -> Tensor:
    """int32 [B, H, *G, any number]: the keys that the matches of each query of q [B, H, *G, E] must be near.

    They are those of `warm` [B, H, *G, kappa] that lie on the grid, the first of them in the place of others; without
    any, the query's own place.
    """
    grid = tuple(q.shape[2:-1])
    own = own_index(grid, key_grid, q.device).unsqueeze(-1).expand(*q.shape[:-1], 1)
    if warm is None:
        return own.contiguous()
    on_grid = (warm >= 0) & (warm < math.prod(key_grid))
    first = warm.gather(-1, on_grid.int().argmax(-1, keepdim=True))  # [B, H, *G, 1]
    first = torch.where(on_grid.any(-1, keepdim=True), first, own)
    return torch.where(on_grid, warm, first).contiguous()


def _centers(new: int, old: int, device: torch.device | str) -> tuple[Tensor, Tensor, int]:
    """Points of a finer axis on a coarser one, or the reverse: the cell that holds each, and how far from its center.

    The distance is a fraction of the cell: a numerator [new] over the number that comes last. All are whole numbers,
    so no rounding depends on the device.
    """
    common = math.gcd(new, old)
    unit = 2 * (new // common)
    times = old // common
    scaled = (2 * torch.arange(new, device=device) + 1) * times
    cell = scaled // unit
    return cell, scaled - unit * cell - unit // 2, unit


def resampled(
    index: Tensor, score: Tensor, old_keys: Grid, grid: Sequence[int], key_grid: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Matches [B, H, *G, kappa] for queries on another grid, whose keys lie on another grid: index and score.

    A new query takes the matches of the old one that it lies in, moved by its distance to that one's center.
    """
    place = coordinates(index.long(), old_keys)  # one [B, H, *G, kappa] per axis
    on_grid = (index >= 0) & (index < math.prod(old_keys))
    moved: list[Tensor] = []
    for axis, (extent, keys, before) in enumerate(zip(grid, key_grid, old_keys, strict=True)):
        cell, rest, unit = _centers(extent, index.shape[2 + axis], index.device)
        on_grid = on_grid.index_select(2 + axis, cell)
        score = score.index_select(2 + axis, cell)
        place = [one.index_select(2 + axis, cell) for one in place]
        moved = [one.index_select(2 + axis, cell) for one in moved]
        rest = rest.reshape(-1, *[1] * (len(grid) - axis))
        common = math.gcd(keys, before)
        # (place + 1/2 + rest / unit) * keys / before, rounded down; never off the grid
        doubled = (2 * place[axis] + 1) * (unit // 2) + rest
        moved.append(doubled * (keys // common) // (unit * (before // common)))
    return torch.where(on_grid, flat(moved, key_grid), -1).int(), score


def inverted(index: Tensor, score: Tensor, key_grid: Grid, kept: int) -> tuple[Tensor, Tensor]:
    """Matches [B, H, *G, kappa] seen from the keys [B, H, *G', kept]: the queries that found each, best score first.

    Of equal scores the query that comes first in row-major order is the better one.
    """
    batch, heads, *_, kappa = index.shape
    keys = math.prod(key_grid)
    pairs = math.prod(index.shape[2:])
    key = index.reshape(-1, pairs).long()  # [R, pairs]
    value = score.reshape(-1, pairs)
    key = torch.where((key >= 0) & (key < keys), key, keys)
    # Two stable sorts: by score, then by key. The pairs of a key then stand together, best first.
    order = value.nan_to_num(nan=-torch.inf).argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, key.gather(1, order).argsort(dim=1, stable=True))
    key = key.gather(1, order)
    value = value.gather(1, order)
    position = torch.arange(pairs, device=index.device) - torch.searchsorted(key, key)  # among the pairs of its key
    slot = torch.where((position < kept) & (key < keys), key * kept + position, keys * kept)  # [R, pairs]
    query = torch.full((len(key), keys * kept + 1), -1, dtype=torch.int32, device=index.device)
    best = torch.full(query.shape, -torch.inf, dtype=torch.float32, device=index.device)
    query = query.scatter(1, slot, (order // kappa).int())
    best = best.scatter(1, slot, value)
    shape = (batch, heads, *key_grid, kept)
    return query[:, :-1].reshape(shape), best[:, :-1].reshape(shape)
