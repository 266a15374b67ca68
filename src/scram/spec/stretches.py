"""Causal order cut into stretches: which positions belong together, and whose queries choose for a tile.

The positions of a grid, in row-major order, are cut into stretches of S, a whole number of tiles. The last one may be
shorter. A stretch that a later one follows is *complete*: its keys are clustered, by its own queries. A query attends
the earlier keys of its own stretch one by one, and the keys of every earlier stretch by their clusters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .schedule import TILE_QUERIES

PARTS = 8  # stretches of a grid, at least, where it has enough positions
MOST = 2048  # positions of a stretch that is not asked for


def default_stretch(positions: int) -> int:
    """Positions of a stretch of a grid with so many: at most an eighth of them, in whole tiles.

    >>> [default_stretch(n) for n in (100, 784, 3072, 16384, 65536)]
    [64, 64, 384, 2048, 2048]
    """
    return min(MOST, max(1, positions // PARTS // TILE_QUERIES) * TILE_QUERIES)


def stretch_count(positions: int, stretch: int) -> int:
    """Stretches of so many positions, the last one included.

    >>> stretch_count(129, 64), stretch_count(128, 64)
    (3, 2)
    """
    return -(-positions // stretch)


def complete_count(positions: int, stretch: int) -> int:
    """Stretches that another one follows.

    >>> complete_count(129, 64), complete_count(128, 64)
    (2, 1)
    """
    return max(0, positions - 1) // stretch


def look_back(grid: Sequence[int]) -> int:
    """How far before a query those lie whose tile chooses for its own: whole lines of the grid, at least a tile.

    >>> look_back((128, 100)), look_back((28, 28)), look_back((336, 8)), look_back((500,))
    (100, 84, 64, 64)
    """
    line = grid[-1] if len(grid) > 1 else 1
    return -(-TILE_QUERIES // line) * line


def fine_features(x: Tensor) -> Tensor:
    """Which vectors [..., E] have nothing that is not finite, or so large that products of it are not: bool [...].

    What overflows would reach the gradients of earlier positions as 0 times infinity. In float32 features up to 1e9
    count, values up to 1e18: a score of theirs times a variance fits.

    >>> fine_features(torch.tensor([[1.0, 1e9], [1.0, 2e9], [torch.nan, 1.0]]))
    tensor([ True, False, False])
    """
    return _largest(x, 2.0 ** (240 if x.dtype == torch.float64 else 30))


def fine_values(x: Tensor) -> Tensor:
    """The same of values [..., F]."""
    return _largest(x, 2.0 ** (480 if x.dtype == torch.float64 else 60))


def _largest(x: Tensor, most: float) -> Tensor:
    """Which vectors have nothing larger than `most`; beside float16 that bound would be infinite."""
    if not x.shape[-1]:
        return x.new_ones(x.shape[:-1], dtype=torch.bool)
    x = x.detach()
    largest = torch.maximum(x.amax(-1), -x.amin(-1))  # NaN where there is one; a norm takes eight times as long
    return largest <= min(most, torch.finfo(x.dtype).max)


def cut(x: Tensor, stretch: int, heads: int) -> Tensor:
    """The stretches of rows as heads of their own: [B, H, N, ...] -> [B, heads * n * (H / heads), S, ...].

    Head (h n + s) (H / heads) + g holds stretch s of row h (H / heads) + g. The last stretch is filled up with zeros.
    """
    missing = -x.shape[2] % stretch
    if missing:
        x = F.pad(x, (0, 0) * (x.ndim - 3) + (0, missing))
    batch, rows = x.shape[:2]
    number = x.shape[2] // stretch
    group = rows // heads if heads else 1
    each = x.reshape(batch, heads, group, number, stretch, *x.shape[3:])
    return each.movedim(3, 2).reshape(batch, heads * number * group, stretch, *x.shape[3:])


def joined(x: Tensor, positions: int, heads: int, rows: int) -> Tensor:
    """The inverse of `cut`: [B, heads * n * (rows / heads), S, ...] -> [B, rows, N, ...]."""
    batch, _, stretch, *rest = x.shape
    group = rows // heads if heads else 1
    number = stretch_count(positions, stretch)
    each = x.reshape(batch, heads, number, group, stretch, *rest).movedim(2, 3)
    return each.reshape(batch, rows, number * stretch, *rest)[:, :, :positions]


def row_numbers(rows: Tensor | None, batch: int, heads: int, device: torch.device) -> Tensor:
    """The numbers of rows, int64 [B, H], that noise is keyed by."""
    if rows is not None:
        return rows
    return torch.arange(batch * heads, device=device).reshape(batch, heads)


def earlier_queries(q: Tensor, back: int, stretch: int) -> Tensor:
    """The query `back` positions before each place of all stretches, q [B, H, N, E]; zeros where there is none.

    >>> earlier_queries(torch.arange(1.0, 4).reshape(1, 1, 3, 1), 2, 4).flatten()
    tensor([0., 0., 1., 2.])
    """
    return F.pad(q, (0, 0, back, 0))[:, :, : stretch_count(q.shape[2], stretch) * stretch]


def prefix_mean(x: Tensor, weight: Tensor) -> Tensor:
    """The mean over all earlier stretches, [B, Hc, m, ...] with weights [B, Hc, m] -> [B, Hc, m + 1, ...]; of none 0.

    >>> prefix_mean(torch.tensor([[[3.0, 6.0]]]), torch.tensor([[[1.0, 2.0]]]))
    tensor([[[0., 3., 5.]]])
    """
    each = weight.reshape(*weight.shape, *[1] * (x.ndim - 3))
    sums = F.pad((x * each).cumsum(2), (0, 0) * (x.ndim - 3) + (1, 0))
    total = F.pad(weight.cumsum(2), (1, 0)).clamp(min=1)
    return sums / total.reshape(*total.shape, *[1] * (x.ndim - 3))
