"""Pictures to patches: every whole patch as a vector, and its features."""

from __future__ import annotations

from dataclasses import dataclass

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
    def fit(cls, patches: Tensor, side: int, width: int, allowed: Tensor | None = None, most: int = 8192) -> Features:
        """Of patches [h, w, C * side * side], at most that many; of the allowed ones, bool [h, w], if given."""
        x = patches.flatten(0, 1) if allowed is None else patches[allowed]  # [n, C * side * side]
        x = x[:: max(1, len(x) // most)].double()
        mean, _, axes = principal_axes(x)
        axes = axes[:, -width:].T.to(patches.dtype)
        return cls(axes.reshape(len(axes), -1, side, side), -(axes @ mean.to(patches.dtype)))

    def __call__(self, picture: Tensor) -> Tensor:
        """The features of every whole patch of a picture [H, W, C] -> [1, 1, H - side + 1, W - side + 1, width]."""
        # A convolution with the axes projects every patch without writing the patches out.
        return F.conv2d(picture.movedim(-1, 0)[None], self.basis, self.offset).movedim(1, -1)[None].contiguous()
