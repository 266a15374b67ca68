"""A grid cut into tiles, of which some are wanted. They become heads of queries that share one head of keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Tiles:
    """Some tiles of a grid.

    Args:
        grid: the grid that is cut, [h, w].
        side: extents of a tile.
        shift: how far the first tile begins before the grid.
        counts: tiles down and across.
        wanted: int64 [n], the tiles that are taken, row-major.

    >>> tiles = Tiles.of(torch.tensor([[True, False, False], [False, False, False]]), 2)
    >>> tiles.cut(torch.arange(6.0).reshape(2, 3, 1)).flatten()
    tensor([0., 1., 3., 4.])
    """

    grid: tuple[int, int]
    side: tuple[int, int]
    shift: tuple[int, int]
    counts: tuple[int, int]
    wanted: Tensor

    @classmethod
    def whole(cls, grid: tuple[int, int], device: torch.device) -> Tiles:
        """One tile, the grid itself."""
        return cls(grid, grid, (0, 0), (1, 1), torch.zeros(1, dtype=torch.int64, device=device))

    @classmethod
    def of(cls, wanted: Tensor, side: int, shift: int = 0) -> Tiles:
        """The tiles that hold a wanted point, bool [h, w]."""
        height, width = wanted.shape
        extent = (side, side)
        counts = (-(-(height + shift) // side), -(-(width + shift) // side))
        every = torch.arange(counts[0] * counts[1], device=wanted.device)
        tiles = cls((height, width), extent, (shift, shift), counts, every)
        some = tiles._split(wanted.unsqueeze(-1)).flatten(1).any(1)
        return cls((height, width), extent, (shift, shift), counts, some.nonzero()[:, 0])

    def cut(self, x: Tensor) -> Tensor:
        """[h, w, E] -> [n, side, side, E], 0 beyond the grid."""
        return self._split(x)[self.wanted]

    def put(self, x: Tensor, rest: float) -> Tensor:
        """[n, side, side, E] -> [h, w, E], `rest` where no tile is."""
        every = x.new_full((self.counts[0] * self.counts[1], *x.shape[1:]), rest)
        every[self.wanted] = x
        down, across = self.counts
        joined = every.reshape(down, across, *x.shape[1:]).movedim(2, 1).flatten(2, 3).flatten(0, 1)
        top, left = self.shift
        height, width = self.grid
        return joined[top : top + height, left : left + width]

    def add(self, x: Tensor, rim: int) -> Tensor:
        """Tiles with a rim that overlaps their neighbors [n, C, side + rim, side + rim], summed [C, h + rim, w + rim].

        The rim lies below and to the right.
        """
        down, across = self.counts
        every = x.new_zeros((down * across, x[0].numel()))  # [counts, C * (side + rim) ** 2]
        every[self.wanted] = x.flatten(1)
        size = (down * self.side[0] + rim, across * self.side[1] + rim)
        kernel = (self.side[0] + rim, self.side[1] + rim)
        joined = F.fold(every.T[None], size, kernel, stride=self.side)[0]  # [C, *size]
        top, left = self.shift
        height, width = self.grid
        return joined[:, top : top + height + rim, left : left + width + rim]

    def _split(self, x: Tensor) -> Tensor:
        """All tiles [counts, side, side, E] of [h, w, E]."""
        down, across = self.counts
        height, width = self.grid
        after = [n * s - f - g for n, s, f, g in zip(self.counts, self.side, self.shift, (height, width), strict=True)]
        x = F.pad(x, (0, 0, self.shift[1], after[1], self.shift[0], after[0]))
        return x.reshape(down, self.side[0], across, self.side[1], -1).movedim(2, 1).flatten(0, 1)
