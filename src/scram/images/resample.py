"""Pictures at other sizes and angles, and where their points come from."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, cos, radians, sin
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def own_places(height: int, width: int) -> Tensor:
    """(row, column) of each pixel `[H, W, 2]`."""
    rows, columns = (torch.arange(extent, dtype=torch.float32, device="cpu") for extent in (height, width))
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1)


def halved(picture: Tensor) -> Tensor:
    """[H, W, C] -> [ceil(H/2), ceil(W/2), C], each point the mean of those it covers."""
    size = [(extent + 1) // 2 for extent in picture.shape[:2]]
    return F.interpolate(picture.movedim(-1, 0)[None], size, mode="area")[0].movedim(0, -1).contiguous()


@dataclass(frozen=True)
class Turned:
    """A picture at another size and angle.

    Args:
        picture: [h, w, C], black where nothing of the original lies.
        inside: bool [h, w], where something lies; None for everywhere.
        matrix, shift: [2, 2] and [2]; a point (row, column) lies at `matrix @ point + shift` of the original.
    """

    picture: Tensor
    inside: Tensor | None
    matrix: Tensor
    shift: Tensor

    def origin(self, place: Tensor) -> Tensor:
        """Places [..., 2] of this picture as places of the original; NaN stays NaN."""
        return place @ self.matrix.T + self.shift


def turned(picture: Tensor, scale: float, degrees: float) -> Turned:
    """Scale a picture [H, W, C] by `scale` and turn it counter-clockwise about its center; the canvas holds all of it.

    >>> turned(torch.rand(4, 6, 3), 2.0, 90).picture.shape
    torch.Size([12, 8, 3])
    """
    height, width = picture.shape[:2]
    size = (max(round(height * scale), 1), max(round(width * scale), 1))
    x = picture.movedim(-1, 0)[None]  # [1, C, H, W]
    if size != (height, width):
        x = F.interpolate(x, size, mode="bicubic", antialias=True).clamp(0, 1)
    like: dict[str, Any] = {"dtype": torch.float32, "device": picture.device}
    ratio = torch.tensor([height / size[0], width / size[1]], **like)
    quarters, rest = divmod(degrees, 90)
    if rest == 0:  # whole pixels
        scaled = x.rot90(int(quarters), (2, 3))[0].movedim(0, -1).contiguous()
        canvas = (scaled.shape[0], scaled.shape[1])
    else:
        c = abs(cos(radians(degrees)))
        s = abs(sin(radians(degrees)))
        canvas = (ceil(size[0] * c + size[1] * s), ceil(size[0] * s + size[1] * c))
    # Counter-clockwise on the screen: a point that was to the right comes to lie above, at a smaller row.
    c = cos(radians(degrees))
    s = sin(radians(degrees))
    back = torch.tensor([[c, s], [-s, c]], **like)  # (row, column) of the canvas -> of the scaled one
    middle, center = ((torch.tensor(n, **like) - 1) / 2 for n in (canvas, size))
    matrix = ratio.unsqueeze(1) * back  # [2, 2]
    shift = ratio * (center - back @ middle + 0.5) - 0.5
    if rest == 0:
        return Turned(scaled, None, matrix, shift)
    rows, columns = (torch.arange(n, **like) for n in canvas)
    place = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1) @ back.T + (center - back @ middle)
    extent = torch.tensor(size, **like)
    grid = ((2 * place + 1) / extent - 1).flip(-1)[None]  # [1, h, w, 2]
    inside = ((place > -0.5) & (place < extent - 0.5)).all(-1)  # [h, w]
    sampled = F.grid_sample(x, grid, mode="bicubic", padding_mode="border", align_corners=False)[0].movedim(0, -1)
    return Turned(torch.where(inside.unsqueeze(-1), sampled.clamp(0, 1), 0).contiguous(), inside, matrix, shift)
