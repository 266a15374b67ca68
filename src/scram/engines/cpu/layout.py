"""Tensors as the arrays the kernels read, and the geometry they index with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...grid import Grid, grid_of
from .vectors import LANES

Array = NDArray[Any]


def array(x: Tensor) -> Array:
    """[B, H, *G, width] -> [B*H*prod(G), width], float32 or float64; shares memory where it can."""
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    result: Array = x.detach().reshape(-1, x.shape[-1]).contiguous().numpy()
    return result


def padded(x: Array) -> Array:
    """Narrow rows filled up with zeros to what `vectors.dot` takes at once."""
    missing = max(0, LANES - x.shape[1])
    return np.pad(x, ((0, 0), (0, missing))) if missing else x


def strides(grid: Grid) -> Grid:
    """Row-major strides of a grid, in points. Tuples tell the compiler the rank."""
    return tuple(math.prod(grid[axis + 1 :]) for axis in range(len(grid)))


def key_rows(q: Tensor, k: Tensor) -> Array:
    """For each row of q the row of k that serves it, int64 [B*H]."""
    row, heads = np.arange(q.shape[0] * q.shape[1]), max(q.shape[1], 1)
    return row // heads * k.shape[1] + row % heads // (heads // k.shape[1] if k.shape[1] else 1)


@dataclass(frozen=True)
class LegalArrays:
    """The key mask as the kernels read it; arrays of no element stand for "no mask"."""

    mask: Array  # bool [Rm, M]
    order: Array  # int32 [Rm, M]: the unmasked keys of a mask row, ascending
    count: Array  # int32 [Rm, M]: how many unmasked keys come up to each
    rows_per_mask: int

    @staticmethod
    def of(q: Tensor, k: Tensor, key_mask: Tensor | None, listed: bool) -> LegalArrays:
        """`listed`: with `order` and `count`, which only a search needs."""
        nothing = np.zeros((0, 0), np.int32)
        if key_mask is None:
            return LegalArrays(nothing.astype(np.bool_), nothing, nothing, 1)
        keys = math.prod(grid_of(k))
        mask: Array = key_mask.reshape(-1, keys).contiguous().numpy()
        shared = key_mask.ndim == k.ndim - 2
        if not listed:
            return LegalArrays(mask, nothing, nothing, q.shape[1] if shared else 1)
        order = np.zeros(mask.shape, np.int32)
        for row in range(len(mask)):
            legal = np.flatnonzero(mask[row])
            order[row, : len(legal)] = legal
        return LegalArrays(mask, order, mask.cumsum(1, dtype=np.int32), q.shape[1] if shared else 1)
