"""Which keys the windows of queries hold."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...spec.grid import Grid, coordinates, grid_of, within
from .attend import expand


class Windows:
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
