"""New pictures of a texture: a small, shuffled version is mended with patches of the source."""

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
SEEN = 128  # pixels of the shorter side at which it is told whether a picture is a texture
WINDOWS = 4  # along the shorter side
LEAST_WINDOW = 16  # pixels: smaller pictures are not judged, their windows differ by chance
MOST_UNEVEN = 0.165  # of a texture


@torch.no_grad()
def generate(
    picture: Tensor,
    size: tuple[int, int] | None = None,
    settings: Settings = DEFAULT,
    *,
    variety: float = 0.3,
    scenes: bool = False,
    progress: Progress | None = None,
) -> Tensor:
    """A new picture of the same texture.

    The start is the picture at its coarsest level, its parts moved by random distances; `settings.seed` draws them.
    Patches of the source mend it, level by level, and all of them are shown somewhere, as in `retarget`.

    Args:
        picture: floats [H, W, C], values 0..1.
        size: (height, width) of the result; None for that of the picture.
        settings: how patches are found and how they vote.
        variety: how far parts of the start are moved, in halves of the picture; 0 gives back the picture, from 1 on
            its layout is lost.
        scenes: take a picture that is no texture too, by `unevenness`; its objects are torn apart.
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
    if not scenes and (uneven := unevenness(picture)) is not None and uneven > MOST_UNEVEN:
        raise ValueError(
            f"picture must be a texture, got a scene: edges in its windows differ by {uneven:.3f}, in a texture by at "
            f"most {MOST_UNEVEN}; cut out a part that looks alike everywhere, or give scenes=True for a collage"
        )
    levels = scales(min(*old, *size), COARSEST * settings.patch, RATIO)
    sources = [resize(picture, scaled(old, scale)) for scale in levels]
    sizes = [scaled(size, scale) for scale in levels]
    start = shuffled(sources[0], sizes[0], variety, settings.seed)
    return coarse_to_fine(start, sources, sizes, settings, ALPHA, progress or (lambda share: None)).to(given)


def unevenness(picture: Tensor) -> float | None:
    """How far the windows of a picture [H, W, C] differ: little in a texture, much in a scene; None of a small one.

    The edges of a window are the mean length of its gradients and their mean direction, of which opposite ones count as
    one. Told is the standard deviation of these means between windows, over that of single pixels.
    """
    size = (picture.shape[0], picture.shape[1])
    small = resize(picture, scaled(size, min(1.0, SEEN / min(size))))
    side = min(small.shape[:2]) // WINDOWS
    if side < LEAST_WINDOW:
        return None
    gray = small.mean(-1)[None, None]
    down = F.pad(gray.diff(dim=-2), (0, 0, 0, 1))
    right = F.pad(gray.diff(dim=-1), (0, 1))
    length = (down.square() + right.square()).sqrt()
    twice = length.clamp(min=1e-3)  # gradients of twice the angle: opposite directions become one
    edges = torch.cat((length, (right.square() - down.square()) / twice, 2 * right * down / twice), 1)
    means = F.avg_pool2d(edges, side, side // 2).flatten(2)
    between, single = (x.var(-1, correction=0).sum() for x in (means, edges.flatten(2)))
    return float((between / single.clamp(min=1e-9)).sqrt())


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
