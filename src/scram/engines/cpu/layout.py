"""Tensors as the arrays the kernels read, and the geometry they index with."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..._compat.numba import SIMD_WIDTH
from ...spec.grid import Grid, grid_of
from .compiled import compiled

Array = NDArray[Any]


class Geometry(NamedTuple):
    """The key grid, and which keys a query may attend. Tuples let the compiler know the rank."""

    grid: Grid  # of keys
    strides: Grid  # row-major, in keys
    key_rows: Array  # int64 [R], the row of k that serves each row of q
    mask: Array  # bool [R or B, M]; without elements: no mask
    rows_per_mask: int  # rows of q that read one row of the mask
    causal: bool
    queries: int  # N
    keys: int  # M

    @staticmethod
    def of(q: Tensor, k: Tensor, key_mask: Tensor | None, causal: bool) -> Geometry:
        grid = grid_of(k)
        keys = math.prod(grid)
        shared = key_mask is not None and key_mask.ndim == k.ndim - 2
        mask = np.zeros((0, 0), np.bool_) if key_mask is None else key_mask.reshape(-1, keys).contiguous().numpy()
        row = np.arange(q.shape[0] * q.shape[1])
        heads = max(q.shape[1], 1)
        key_rows = row // heads * k.shape[1] + row % heads // (heads // k.shape[1] if k.shape[1] else 1)
        return Geometry(
            grid=grid,
            strides=strides(grid),
            key_rows=key_rows,
            mask=mask,
            rows_per_mask=q.shape[1] if shared else 1,
            causal=causal,
            queries=math.prod(grid_of(q)),
            keys=keys,
        )


class Block(NamedTuple):
    """Points of one row that are taken together."""

    row: int
    begin: int  # the first as a query
    first: int  # and as a point
    first_key: int  # where the row's keys begin
    size: int


@compiled
def block_at(number: int, most: int, geometry: Geometry, row_keys: int) -> Block:
    """A block by its number, where each row is cut into blocks of `most` points and has `row_keys` keys."""
    in_row = -(-geometry.queries // most)
    row = number // in_row
    begin = (number - row * in_row) * most
    first = row * geometry.queries + begin
    first_key = geometry.key_rows[row] * row_keys
    size = min(most, geometry.queries - begin)
    return Block(row, begin, first, first_key, size)


class Windows(NamedTuple):
    """The windows around every point's matches."""

    index: Array  # type: ignore[assignment]  # int32 [P, kappa]
    reach: Grid  # the radius, cut to the grid

    @staticmethod
    def of(index: Tensor, radius: Grid, key_grid: Grid) -> Windows:
        matches = index.reshape(math.prod(index.shape[:-1]), index.shape[-1]).contiguous().numpy()
        return Windows(matches, tuple(min(b, extent - 1) for b, extent in zip(radius, key_grid, strict=True)))

    @property
    def slots(self) -> int:
        """Keys in all windows of a point."""
        return int(self.index.shape[1]) * math.prod(2 * b + 1 for b in self.reach)

    def places(self, tasks: int) -> Array:
        """Scratch for `expand`: int64 [tasks, kappa + 1, rank]."""
        return np.empty((tasks, self.index.shape[1] + 1, len(self.reach)), np.int64)


def array(x: Tensor) -> Array:
    """[B, H, *G, width] -> [B*H*prod(G), width], float32 or float64; shares memory where it can."""
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    result: Array = x.detach().reshape(-1, x.shape[-1]).contiguous().numpy()
    return result


def flat(x: Tensor) -> Array:
    """[B, H, *G] -> [B*H*prod(G)]; shares memory where it can."""
    result: Array = x.detach().reshape(-1).contiguous().numpy()
    return result


def tensor(result: Array, dtype: torch.dtype | None, q: Tensor) -> Tensor:
    """[P] or [P, width], a result for every query, as a tensor [B, H, *G] or [B, H, *G, width]."""
    return torch.from_numpy(result).to(dtype).reshape(*q.shape[:-1], *result.shape[1:])


def like(result: Array, x: Tensor) -> Tensor:
    """A result in the shape and dtype of a tensor."""
    return torch.from_numpy(result).to(x.dtype).reshape(x.shape).contiguous()


def padded(x: Array) -> Array:
    """Narrow rows filled up with zeros to what `vectors.dot` takes at once."""
    missing = max(0, SIMD_WIDTH - x.shape[1])
    return np.pad(x, ((0, 0), (0, missing))) if missing else x


def strides(grid: Grid) -> Grid:
    """Row-major strides of a grid, in points."""
    return tuple(math.prod(grid[axis + 1 :]) for axis in range(len(grid)))
