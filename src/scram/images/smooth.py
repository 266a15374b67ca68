"""Smooth fills of holes: the first guess of a synthesis, and all that a thin hole needs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def pull_push(picture: Tensor, hole: Tensor) -> Tensor:
    """A picture [H, W, C] with its hole, bool [H, W], filled by means over ever larger squares of what is known."""
    known = (~hole).to(picture.dtype)[None, None]
    colors = picture.movedim(-1, 0)[None] * known  # [1, C, H, W]
    levels = [(colors, known)]
    while min(levels[-1][1].shape[-2:]) > 1 and bool((levels[-1][1] == 0).any()):
        levels.append(tuple(F.avg_pool2d(x, 2, ceil_mode=True) for x in levels[-1]))  # type: ignore[arg-type]
    colors, known = levels.pop()
    mean = colors.sum((-2, -1), keepdim=True) / known.sum((-2, -1), keepdim=True).clamp(min=1e-12)
    filled = torch.where(known > 0, colors / known.clamp(min=1e-12), mean)
    for colors, known in reversed(levels):
        above = F.interpolate(filled, colors.shape[-2:], mode="bilinear", align_corners=False)
        filled = torch.where(known > 0, colors / known.clamp(min=1e-12), above)
    return filled[0].movedim(0, -1)


def smooth_fill(picture: Tensor, hole: Tensor, order: int = 2, steps: int = 200) -> Tensor:
    """A picture [H, W, C] with its hole, bool [H, W], filled by the smoothest surface, by conjugate gradients.

    Args:
        order: 1 for the least sum of squared differences (harmonic), 2 for that of squared Laplacians (biharmonic).
        steps: of conjugate gradients, at most.
    """
    inside = hole.to(picture.dtype)[None, None]
    start = pull_push(picture, hole).movedim(-1, 0)[None]

    def energy(x: Tensor) -> Tensor:  # its gradient at x
        for _ in range(order):
            x = _laplacian(x)
        return x if order == 2 else -x

    x = start
    residual = -energy(x) * inside
    direction = residual
    square = residual.square().sum((-2, -1), keepdim=True)
    first = square.clamp(min=1e-20)
    for _ in range(steps):
        if bool((square <= 1e-8 * first).all()):
            break
        product = energy(direction) * inside
        length = square / (direction * product).sum((-2, -1), keepdim=True).clamp(min=1e-30)
        x = x + length * direction
        residual = residual - length * product
        new = residual.square().sum((-2, -1), keepdim=True)
        direction = residual + new / square.clamp(min=1e-30) * direction
        square = new
    return x[0].movedim(0, -1)


def _laplacian(x: Tensor) -> Tensor:
    """Neighbors less the pixel itself [1, C, H, W], over the neighbors that are there: a symmetric operator."""
    down = x[..., 1:, :] - x[..., :-1, :]
    right = x[..., 1:] - x[..., :-1]
    return F.pad(down, (0, 0, 0, 1)) - F.pad(down, (0, 0, 1, 0)) + F.pad(right, (0, 1)) - F.pad(right, (1, 0))
