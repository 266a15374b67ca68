"""Coarse to fine: the sizes of the levels, and pictures, holes and matches carried between them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..results import Matches


def scaled(size: tuple[int, int], scale: float) -> tuple[int, int]:
    """A size at another scale, whole pixels."""
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def scales(shorter: int, least: int, ratio: float) -> list[float]:
    """Scales from the coarsest, at which `shorter` pixels are still `least`, to 1, each `ratio` times the last.

    >>> scales(64, 16, 2.0)
    [0.25, 0.5, 1.0]
    """
    count = max(0, math.floor(math.log(max(shorter / least, 1.0), ratio) + 1e-9))
    return [ratio**-level for level in range(count, -1, -1)]


def resize(picture: Tensor, size: tuple[int, int]) -> Tensor:
    """A picture [H, W, C] at another size [h, w, C], bicubic, without aliases."""
    if tuple(picture.shape[:2]) == tuple(size):
        return picture
    x = F.interpolate(picture.movedim(-1, 0)[None], size, mode="bicubic", align_corners=False, antialias=True)
    return x[0].movedim(0, -1).contiguous()


def shrink_known(picture: Tensor, hole: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A picture [H, W, C] and its hole, bool [H, W], at a smaller size; means are over known pixels alone.

    A small pixel is in the hole where less than half of what it covers is known.
    """
    if tuple(hole.shape) == tuple(size):
        return picture, hole
    known = (~hole).to(picture.dtype)[None, None]
    colors = picture.movedim(-1, 0)[None] * known  # [1, C, H, W]
    colors, known = (
        F.interpolate(x, size, mode="bilinear", align_corners=False, antialias=True) for x in (colors, known)
    )
    small = torch.where(known > 0.01, colors / known.clamp(min=0.01), 0)
    return small[0].movedim(0, -1).contiguous(), known[0, 0] < 0.5


def depth(hole: Tensor) -> Tensor:
    """How deep each pixel lies in a hole, bool [H, W] -> [H, W]: 0 outside, 1 at its border, Chebyshev steps."""
    left = hole.float()[None, None]
    deep = torch.zeros(hole.shape, dtype=torch.float32, device=hole.device)
    while bool(left.any()) and deep.max() < max(hole.shape):
        deep = deep + left[0, 0]
        left = -F.max_pool2d(-left, 3, 1, 1)
    return deep


def finer(matches: Matches, side: int, size: tuple[int, int], key_size: tuple[int, int]) -> Matches:
    """Matches of patches of a coarser level, for pictures of a finer size: the start of a search there.

    Patches know each other by their centers, on the grids of the pixels.
    """
    rim = side // 2
    coords = matches.coords() + rim
    key_grid = tuple(extent + side - 1 for extent in matches.key_grid)
    index = F.pad(Matches.from_coords(coords, key_grid).index, (0, 0, rim, rim, rim, rim), value=-1)
    score = F.pad(matches.score, (0, 0, rim, rim, rim, rim), value=-torch.inf)
    moved = Matches(index, score, key_grid).upsample(size, key_size)
    inner = moved.coords()[:, :, rim : size[0] - rim, rim : size[1] - rim] - rim
    return Matches.from_coords(inner, (key_size[0] - side + 1, key_size[1] - side + 1))
