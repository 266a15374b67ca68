"""A picture in another format, its content kept: patches of the result are patches of the source, and all are shown."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .checks import check_extents, widened
from .pyramid import resize, scaled, scales
from .synthesis import Progress, Settings, Source, check_picture, coarse_to_fine, update

DEFAULT = Settings(iterations=4)
RATIO = 1.5  # of a level to the one above
COARSEST = 4.5  # patches along the shorter side at the coarsest level
ALPHA = 0.2  # completeness: less is more of it
STRETCH = 1.1  # at most, in one step at the coarsest level


@torch.no_grad()
def retarget(
    picture: Tensor, size: tuple[int, int], settings: Settings = DEFAULT, *, progress: Progress | None = None
) -> Tensor:
    """A picture in another height and width whose patches are those of the source, and which shows all of them.

    At the coarsest level the picture is stretched little by little, and after each stretch its patches are replaced by
    patches of the source. Finer levels only sharpen. Patches of the source that nothing resembles are preferred: the
    score is -|q - k|^2 / (alpha + m), with m the least squared distance of key k to any query.

    Args:
        picture: floats [H, W, C], values 0..1.
        size: (height, width) of the result.
        settings: how patches are found and how they vote.
        progress: is called with the share of the work done, 0..1.

    Returns:
        The picture [height, width, C].

    >>> retarget(torch.rand(32, 40, 3), (32, 30)).shape
    torch.Size([32, 30, 3])
    """
    size = check_extents(size)
    check_picture(picture, size, settings.patch)
    given = picture.dtype
    picture = widened(picture)
    old = (picture.shape[0], picture.shape[1])
    levels = scales(min(*old, *size), round(COARSEST * settings.patch), RATIO)
    sources = [resize(picture, scaled(old, scale)) for scale in levels]
    start = _stretched(sources[0], scaled(size, levels[0]), settings)
    sizes = [scaled(size, scale) for scale in levels]
    return coarse_to_fine(start, sources, sizes, settings, ALPHA, progress or (lambda share: None)).to(given)


def _stretched(picture: Tensor, size: tuple[int, int], settings: Settings) -> Tensor:
    """A small picture [h, w, C] in another size, in steps so small that patches follow."""
    factors = (size[0] / picture.shape[0], size[1] / picture.shape[1])
    steps = math.ceil(max(abs(math.log(factor)) for factor in factors) / math.log(STRETCH))
    source = Source.of(picture, settings)
    guess = picture
    for step in range(1, steps + 1):
        share = step / steps
        between = round(picture.shape[0] * factors[0] ** share), round(picture.shape[1] * factors[1] ** share)
        guess = resize(guess, between)
        for turn in range(settings.iterations):
            guess, _ = update(guess, source, settings, -1 - step * settings.iterations - turn, alpha=ALPHA)
    return guess
