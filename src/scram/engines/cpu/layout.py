"""Tensors as the arrays the kernels read, and the geometry they index with."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from ..._compat.numba import LANES, SIMD_WIDTH
from ...spec.grid import Grid, grid_of
from ...spec.schedule import tile_shape, tiles_across
from .compiled import compiled, launcher
from .noise import absorb, seeded

Array = NDArray[Any]
CACHE_LINE = 64


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
        return Geometry(
            grid=grid,
            strides=strides(grid),
            key_rows=source_rows(q, k.shape[1]),
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


class Routing(NamedTuple):
    """The clusters whose keys a tile of queries attends one by one."""

    words: Array  # int32 [R, T, W], one bit a cluster; without elements: none
    label: Array  # int32 [Rc*M], the clusters of the keys
    rows: Array  # int64 [R], the row of `label` that serves each row of q
    grids: Array  # int64 [3, rank], as in `tiles`

    @staticmethod
    def of(q: Tensor, label: Tensor | None, routes: Tensor | None) -> Routing:
        grid = grid_of(q)
        grids = np.array([grid, tile_shape(len(grid)), tiles_across(grid)], np.int64)
        if label is None or routes is None:
            nothing = np.zeros((0, 0, 0), np.int32)
            return Routing(nothing, nothing.reshape(0), np.zeros(0, np.int64), grids)
        return Routing(by_row(routes), flat(label), source_rows(q, label.shape[1]), grids)


class Windows(NamedTuple):
    """The windows around every point's matches, less the keys that its tile routes."""

    index: Array  # type: ignore[assignment]  # int32 [P, kappa]
    reach: Grid  # the radius, cut to the grid
    routing: Routing

    @staticmethod
    def of(index: Tensor, radius: Grid, key_grid: Grid, routing: Routing) -> Windows:
        matches = index.reshape(math.prod(index.shape[:-1]), index.shape[-1]).contiguous().numpy()
        reach = tuple(min(b, extent - 1) for b, extent in zip(radius, key_grid, strict=True))
        return Windows(matches, reach, routing)

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


def source_rows(q: Tensor, heads: int) -> Array:
    """int64 [R], the row of a tensor of `heads` heads that serves each row of q."""
    row = np.arange(q.shape[0] * q.shape[1])
    query_heads = max(q.shape[1], 1)
    return row // query_heads * heads + row % query_heads // (query_heads // heads if heads else 1)


def row_states(seed: Tensor, q: Tensor, rows: Tensor | None) -> Array:
    """The hash after the seed and the number of every row of q [B, H, ..]: uint32 [B * H]; `rows`: int [B, H] or None.

    >>> states = row_states(torch.tensor(-7), torch.zeros(1, 2, 3, 4), torch.tensor([[5, 3]]))
    >>> states.tolist() == scram.spec.noise.noise(-7, torch.tensor([5, 3])).tolist()
    True
    """
    count = q.shape[0] * q.shape[1]
    numbers = np.arange(count) if rows is None else np.ascontiguousarray(rows.reshape(count).long().numpy())
    states = np.empty(count, np.uint32)
    _row_states(int(seed), numbers, states)
    return states


@launcher
def _row_states(seed: int, numbers: Array, states: Array) -> None:
    state = seeded(seed)
    for row in range(len(numbers)):
        states[row] = absorb(state, numbers[row])


def aligned(shape: tuple[int, ...], dtype: DTypeLike, zeros: bool = False) -> Array:
    """An array whose first element lies where a line of the cache begins; of zeros, or not filled."""
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    raw = (np.zeros if zeros else np.empty)(size + CACHE_LINE, np.uint8)
    begin = -raw.ctypes.data % CACHE_LINE
    return raw[begin : begin + size].view(kind).reshape(shape)


def by_row(x: Tensor) -> Array:
    """[B, Hc, ...] -> [Rc, ...]"""
    result: Array = x.detach().reshape(x.shape[0] * x.shape[1], *x.shape[2:]).contiguous().numpy()
    return result


def whole_lanes(width: int) -> int:
    """The width to which rows of a matrix are padded."""
    return -(-width // LANES) * LANES


def padded(x: Array) -> Array:
    """Narrow rows filled up with zeros to what `vectors.dot` takes at once."""
    missing = max(0, SIMD_WIDTH - x.shape[1])
    return np.pad(x, ((0, 0), (0, missing))) if missing else x


def strides(grid: Grid) -> Grid:
    """Row-major strides of a grid, in points."""
    return tuple(math.prod(grid[axis + 1 :]) for axis in range(len(grid)))
