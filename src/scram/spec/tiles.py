"""Tiles: compact blocks of 64 queries, smaller at the borders of the grid; numbered in row-major order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .grid import coordinates, flat, inside
from .schedule import TILE_QUERIES, tile_shape


def tiles_across(grid: Sequence[int]) -> tuple[int, ...]:
    """Tiles along each axis.

    >>> tiles_across((3, 9))
    (1, 2)
    """
    return tuple(-(-extent // side) for extent, side in zip(grid, tile_shape(len(grid)), strict=True))


def tile_count(grid: Sequence[int]) -> int:
    """Tiles of a grid; none where it is empty."""
    return math.prod(tiles_across(grid))


def members(grid: Sequence[int], device: torch.device) -> Tensor:
    """The queries of every tile [tiles, TILE_QUERIES], -1 where it sticks out of the grid.

    >>> members((3, 9), torch.device("cpu"))[1, :9].tolist()
    [8, -1, -1, -1, -1, -1, -1, -1, 17]
    """
    shape = tile_shape(len(grid))
    across = tiles_across(grid)
    corner = [c.unsqueeze(1) for c in coordinates(torch.arange(math.prod(across), device=device), across)]
    lane = coordinates(torch.arange(TILE_QUERIES, device=device), shape)
    place = [at * side + of for at, side, of in zip(corner, shape, lane, strict=True)]
    return torch.where(inside(place, grid), flat(place, grid), -1)


def tile_of(query: Tensor, grid: Sequence[int]) -> Tensor:
    """The tile of each query, flat row-major indices of any shape.

    >>> tile_of(torch.tensor([0, 7, 8, 17]), (3, 9)).tolist()
    [0, 0, 1, 1]
    """
    shape = tile_shape(len(grid))
    place = [at // side for at, side in zip(coordinates(query, grid), shape, strict=True)]
    return flat(place, tiles_across(grid))
