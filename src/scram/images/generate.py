"""New pictures that look like a given one: patches of a small, noisy version find patches of the source, and vote."""

from __future__ import annotations

import torch
from torch import Tensor

from .pyramid import resize, scaled, scales
from .synthesis import Progress, Settings, check_picture, coarse_to_fine

DEFAULT = Settings(iterations=5)
RATIO = 4 / 3  # of a level to the one above
COARSEST = 3  # patches along the shorter side at the coarsest level
ALPHA = 0.005  # completeness: less is more of it


@torch.no_grad()
def generate(
    picture: Tensor, size: tuple[int, int] | None = None, settings: Settings = DEFAULT, *, variety: float = 0.75,
    progress: Progress | None = None,
) -> Tensor:  # fmt: skip
    """A new picture of the same texture or scene.

    The start is the picture at its coarsest level, stretched to the size and with noise; `settings.seed` draws it.

    Args:
        picture: floats [H, W, C], values 0..1.
        size: (height, width) of the result; None for that of the picture.
        settings: how patches are found and how they vote.
        variety: noise of the start in units of the picture's own standard deviation; 0 gives back the picture, from 2
            on its layout is lost.
        progress: is called with the share of the work done, 0..1.

    Returns:
        The picture [height, width, C].

    >>> generate(torch.rand(32, 40, 3), (30, 50)).shape
    torch.Size([30, 50, 3])
    """
    old = (picture.shape[0], picture.shape[1])
    size = old if size is None else size
    check_picture(picture, size, settings.patch)
    if not 0 <= variety < float("inf"):
        raise ValueError(f"variety must be at least 0 and finite, got {variety}")
    levels = scales(min(*old, *size), COARSEST * settings.patch, RATIO)
    sources = [resize(picture, scaled(old, scale)) for scale in levels]
    sizes = [scaled(size, scale) for scale in levels]
    start = resize(sources[0], sizes[0])
    drawn = torch.randn(start.shape, generator=torch.Generator().manual_seed(settings.seed)).to(start)
    start = start + variety * sources[0].std() * drawn
    return coarse_to_fine(start, sources, sizes, settings, ALPHA, progress or (lambda share: None))
