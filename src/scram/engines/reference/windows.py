"""Which keys the windows hold: those of each query's own, or those of its tile."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...spec.grid import Grid, cell_sides, coordinates, flat, grid_of, rows, within
from ...spec.schedule import members
from .attend import expand
from .tile_attend import cell_grid, keys_of, touched


class QueryWindows:
    """The keys in each query's own windows, allowed or not."""

    def __init__(self, index: Tensor, key_grid: Grid, radius: Sequence[int]) -> None:
        """index [B, H, *G, kappa]"""
        self.key_grid = key_grid
        self.queries = math.prod(grid_of(index))
        self.radius = [min(b, extent - 1) for b, extent in zip(radius, key_grid, strict=True)]
        self.match = index.reshape(-1, index.shape[-1]).long()  # [P, kappa]
        self.size = index.shape[-1] * math.prod(2 * b + 1 for b in self.radius)

    def _matches(self, row: Tensor, query: Tensor) -> Tensor:
        return self.match[(row * self.queries + query).squeeze(1)]

    def of(self, row: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Those of queries [C, 1]: [C, kappa * W], and which exist and are new."""
        return expand(self._matches(row, query), self.key_grid, self.radius)

    def hold(self, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Which of the keys [C, m] are among those of queries [C, 1]."""
        match = self._matches(row, query)
        place = [c.unsqueeze(-1) for c in coordinates(key, self.key_grid)]  # [C, m, 1] each
        exists = (match >= 0) & (match < math.prod(self.key_grid))  # [C, kappa]
        center = [
            c.unsqueeze(1) for c in coordinates(torch.where(exists, match, 0), self.key_grid)
        ]  # [C, 1, kappa] each
        return (within(place, center, self.radius) & exists.unsqueeze(1)).any(-1)


class TileWindows:
    """The keys that each query's tile attends, allowed or not."""

    def __init__(self, index: Tensor, key_grid: Grid, radius: Sequence[int]) -> None:
        """index [B, H, *G, kappa]"""
        self.key_grid = key_grid
        self.sides = cell_sides(radius, key_grid)
        grid = grid_of(index)
        member = members(grid, index.device)  # [tiles of a row, queries of a tile]
        self.cells = touched(rows(index).long(), member, key_grid, radius, self.sides)
        self.tiles = len(member)
        queries = math.prod(grid)
        slot = member.flatten().argsort()[-queries:] if queries else member.flatten()[:0]
        self.tile = slot // member.shape[1]  # of each query

    @property
    def size(self) -> int:
        """Keys of a tile, at most."""
        return int(self.cells.shape[1]) * math.prod(self.sides)

    def _listed(self, row: Tensor, query: Tensor) -> Tensor:
        """The cells of the tiles of queries [C, 1]: [C, L], -1 for none."""
        return self.cells[(row * self.tiles + self.tile[query]).squeeze(1)]

    def of(self, row: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Those of queries [C, 1]: [C, K], and which exist."""
        return keys_of(self._listed(row, query), self.key_grid, self.sides)

    def hold(self, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Which of the keys [C, m] are among those of queries [C, 1]."""
        number = cell_grid(self.key_grid, self.sides)
        place = coordinates(key, self.key_grid)
        cell = flat([c // side for c, side in zip(place, self.sides, strict=True)], number)
        listed = self._listed(row, query)
        listed = torch.where(listed < 0, math.prod(number), listed)  # ascending
        at = torch.searchsorted(listed, cell).clamp(max=listed.shape[1] - 1)
        return listed.gather(1, at) == cell


def windows_of(window: str, index: Tensor, key_grid: Grid, radius: Sequence[int]) -> QueryWindows | TileWindows:
    """The windows around matches [B, H, *G, kappa]."""
    return (TileWindows if window == "tile" else QueryWindows)(index, key_grid, radius)
