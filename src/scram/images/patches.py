"""Pictures to patches and back: every whole patch as a vector, its features, and overlapping patches averaged."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .pca import principal_axes


def unfold(picture: Tensor, side: int) -> Tensor:
    """Every whole patch of a picture [H, W, C] -> [H - side + 1, W - side + 1, C * side * side].

    >>> unfold(torch.rand(6, 8, 3), 3).shape
    torch.Size([4, 6, 27])
    """
    grid = patch_grid(picture, side)
    return F.unfold(picture.movedim(-1, 0)[None], side)[0].T.reshape(*grid, -1)


def vote(patches: Tensor, weight: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Overlapping patches [h, w, C * side * side] averaged with their weights [h, w]: patch voting.

    Returns:
        The picture [H, W, C], H = h + side - 1, and the sum of the weights of each pixel [H, W, 1]; a pixel without
        weight is 0.

    >>> picture = torch.rand(6, 8, 3)
    >>> torch.allclose(vote(unfold(picture, 3), torch.rand(4, 6), 3)[0], picture)
    True
    """
    size = (weight.shape[0] + side - 1, weight.shape[1] + side - 1)
    columns = weight.reshape(1, 1, -1)
    total = F.fold(columns.expand(-1, side * side, -1), size, side)[0].movedim(0, -1)
    summed = F.fold(patches.flatten(0, 1).T[None] * columns, size, side)[0].movedim(0, -1)
    return torch.where(total > 0, summed / torch.where(total > 0, total, 1), 0), total


def whole(mask: Tensor, side: int) -> Tensor:
    """Which patches lie in a mask with every pixel: bool [H, W] -> [H - side + 1, W - side + 1]."""
    return F.max_pool2d((~mask).float()[None, None], side, 1)[0, 0] == 0


def patch_grid(picture: Tensor, side: int) -> tuple[int, int]:
    """The grid of whole patches of a picture [H, W, ...]."""
    return picture.shape[0] - side + 1, picture.shape[1] - side + 1


@dataclass(frozen=True)
class Features:
    """Patches [C * side * side] in their principal axes: far fewer numbers, and nearly the same distances.

    >>> picture = torch.rand(20, 16, 3)
    >>> features = Features.fit(unfold(picture, 5), side=5, width=8)
    >>> features(picture).shape
    torch.Size([1, 1, 16, 12, 8])
    """

    basis: Tensor  # [width, C, side, side], rows orthonormal
    offset: Tensor  # [width]

    @classmethod
    def fit(cls, patches: Tensor, side: int, width: int, legal: Tensor | None = None, most: int = 8192) -> Features:
        """Of patches [h, w, C * side * side], at most that many; of the legal ones, bool [h, w], if given."""
        x = patches.flatten(0, 1) if legal is None else patches[legal]
        x = x[:: max(1, len(x) // most)].double()
        mean, _, axes = principal_axes(x)
        axes = axes[:, -width:].T.to(patches.dtype)
        return cls(axes.reshape(len(axes), -1, side, side), -(axes @ mean.to(patches.dtype)))

    def __call__(self, picture: Tensor) -> Tensor:
        """The features of every whole patch of a picture [H, W, C] -> [1, 1, H - side + 1, W - side + 1, width]."""
        # A convolution with the axes projects every patch without writing the patches out.
        return F.conv2d(picture.movedim(-1, 0)[None], self.basis, self.offset).movedim(1, -1)[None].contiguous()
