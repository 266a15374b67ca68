"""New pictures that look like a given one: a small, shuffled version is mended with patches of the source."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import check_extents, check_floats, widened
from .pyramid import resize, scaled, scales
from .synthesis import Progress, Settings, check_picture, coarse_to_fine

DEFAULT = Settings(iterations=5)
RATIO = 4 / 3  # of a level to the one above
COARSEST = 3  # patches along the shorter side at the coarsest level
KNOTS = 5  # along each side, of the random distances by which parts of the start are moved
ALPHA = 0.05  # completeness: less is more of it


@torch.no_grad()
def generate(
    picture: Tensor,
    size: tuple[int, int] | None = None,
    settings: Settings = DEFAULT,
    *,
    variety: float = 0.3,
    progress: Progress | None = None,
) -> Tensor:
    """A new picture of the same texture or scene.

    The start is the picture at its coarsest level, its parts moved by random distances; `settings.seed` draws them.
    Patches of the source mend it, level by level, and all of them are shown somewhere, as in `retarget`.

    Args:
        picture: floats [H, W, C], values 0..1.
        size: (height, width) of the result; None for that of the picture.
        settings: how patches are found and how they vote.
        variety: how far parts of the start are moved, in halves of the picture; 0 gives back the picture, from 1 on
            its layout is lost.
        progress: is called with the share of the work done, 0..1.

    Returns:
        The picture [height, width, C].

    >>> generate(torch.rand(32, 40, 3), (30, 50)).shape
    torch.Size([30, 50, 3])
    """
    check_floats(picture)
    old = (picture.shape[0], picture.shape[1])
    size = check_extents(old if size is None else size)
    check_picture(picture, size, settings.patch)
    given = picture.dtype
    picture = widened(picture)
    if not 0 <= variety < float("inf"):
        raise ValueError(f"variety must be at least 0 and finite, got {variety}")
    levels = scales(min(*old, *size), COARSEST * settings.patch, RATIO)
    sources = [resize(picture, scaled(old, scale)) for scale in levels]
    sizes = [scaled(size, scale) for scale in levels]
    start = shuffled(sources[0], sizes[0], variety, settings.seed)
    return coarse_to_fine(start, sources, sizes, settings, ALPHA, progress or (lambda share: None)).to(given)


def shuffled(picture: Tensor, size: tuple[int, int], variety: float, seed: int) -> Tensor:
    """A picture [h, w, C] in another size whose parts were moved by random, smoothly varying distances."""
    generator = torch.Generator().manual_seed(seed)
    knots = torch.randn(1, 2, KNOTS, KNOTS, generator=generator, dtype=torch.float32, device="cpu")
    moved = F.interpolate(knots, size, mode="bicubic", align_corners=True)[0].movedim(0, -1)
    whole = [torch.arange(extent, dtype=torch.float32, device="cpu") for extent in size]
    rows, columns = ((2 * x + 1) / len(x) - 1 for x in whole)
    own = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1)
    places = (own + variety * moved).to(picture)[None]
    drawn = F.grid_sample(
        picture.movedim(-1, 0)[None], places, mode="nearest", padding_mode="reflection", align_corners=False
    )
    return drawn[0].movedim(0, -1)
