"""Geometry of grids of any rank: flat row-major indices, coordinates, windows, and which keys a query may attend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Grid = tuple[int, ...]


def grid_of(x: Tensor) -> Grid:
    """The grid of a tensor [B, H, *G, width]."""
    return tuple(x.shape[2:-1])


def rows(x: Tensor) -> Tensor:
    """[B, H, *G, width] -> [B*H, prod(G), width]."""
    return x.reshape(x.shape[0] * x.shape[1], math.prod(grid_of(x)), x.shape[-1])


def coordinates(index: Tensor, grid: Sequence[int]) -> list[Tensor]:
    """Flat row-major indices to one coordinate tensor per axis.

    >>> coordinates(torch.tensor([0, 5]), (2, 4))
    [tensor([0, 1]), tensor([0, 1])]
    """
    coords = []
    for extent in reversed(grid):
        coords.append(index % extent)
        index = index // extent
    return coords[::-1]


def flat(coords: Sequence[Tensor], grid: Sequence[int]) -> Tensor:
    """The inverse of `coordinates`.

    >>> flat([torch.tensor([0, 1]), torch.tensor([0, 1])], (2, 4))
    tensor([0, 5])
    """
    index = torch.zeros_like(coords[0])
    for coord, extent in zip(coords, grid, strict=True):
        index = index * extent + coord
    return index


def inside(coords: Sequence[Tensor], grid: Sequence[int]) -> Tensor:
    """Which points lie on the grid."""
    ok = torch.ones_like(coords[0], dtype=torch.bool)
    for coord, extent in zip(coords, grid, strict=True):
        ok = ok & (coord >= 0) & (coord < extent)
    return ok


def within(a: Sequence[Tensor], b: Sequence[Tensor], reach: int | Sequence[int]) -> Tensor:
    """Which points of a are at most `reach` from those of b on every axis (Chebyshev for one int)."""
    each = [reach] * len(a) if isinstance(reach, int) else reach
    ok = (a[0] - b[0]).abs() <= each[0]
    for one, other, limit in zip(a[1:], b[1:], each[1:], strict=True):
        ok = ok & ((one - other).abs() <= limit)
    return ok


def window(radius: Sequence[int], device: torch.device) -> list[Tensor]:
    """Offsets of a window, row-major: one [prod(2b+1)] tensor per axis.

    >>> window((0, 1), torch.device("cpu"))
    [tensor([0, 0, 0]), tensor([-1,  0,  1])]
    """
    steps = [torch.arange(-b, b + 1, device=device) for b in radius]
    return [mesh.reshape(-1) for mesh in torch.meshgrid(*steps, indexing="ij")]


def key_row(row: Tensor, heads: int, key_heads: int) -> Tensor:
    """The row of k that serves each row of q (grouped heads: query head h reads key head h // (H / Hk))."""
    return (row // heads) * key_heads + (row % heads) // (heads // key_heads)


@dataclass(frozen=True)
class AllowedKeys:
    """Which keys a query may attend: those of `key_mask`, and under `causal` those up to itself, in row-major order.

    A row of the mask serves one row of q, or all heads of a batch entry.
    """

    keys: int  # M
    causal: bool
    heads_per_row: int  # rows of q that read one row of the mask
    mask: Tensor | None  # bool [R or B, M]
    order: Tensor | None  # int64 [R or B, M], the unmasked keys ascending
    count: Tensor | None  # int64 [R or B, M], how many unmasked keys come up to each key

    @staticmethod
    def of(q: Tensor, k: Tensor, causal: bool, key_mask: Tensor | None) -> AllowedKeys:
        keys = math.prod(grid_of(k))
        if key_mask is None:
            return AllowedKeys(keys, causal, 1, None, None, None)
        shared = key_mask.ndim == k.ndim - 2
        mask = key_mask.reshape(-1, keys)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and mask.is_inference():
            mask = mask.clone()  # autograd keeps no tensor made under `torch.inference_mode`
        count = mask.cumsum(1)
        order = torch.zeros(mask.shape[0], keys + 1, dtype=torch.int64, device=mask.device)
        # All masked keys are written to one extra slot at the end: nonzero() would synchronize with the device.
        key = torch.arange(keys, device=mask.device).expand_as(count)
        order = order.scatter(1, torch.where(mask, count - 1, keys), key)
        return AllowedKeys(keys, causal, q.shape[1] if shared else 1, mask, order[:, :keys], count)

    def allows(self, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Whether `query` of `row` may attend `key`, a flat index on the grid. All broadcast."""
        ok = torch.ones_like(key, dtype=torch.bool) if self.mask is None else self.mask[row // self.heads_per_row, key]
        return ok & (key <= query) if self.causal else ok

    def total(self, row: Tensor, query: Tensor) -> Tensor:
        """M_i, the number of allowed keys of each query."""
        last = query if self.causal else torch.full_like(query, self.keys - 1)
        return last + 1 if self.count is None else self.count[row // self.heads_per_row, last]

    def nth(self, row: Tensor, n: Tensor) -> Tensor:
        """The n-th allowed key of a row, ascending."""
        return n if self.order is None else self.order[row // self.heads_per_row, n]
