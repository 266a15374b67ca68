"""Fill holes of a picture with patches of the rest of it, coarse to fine."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .._compat import ONE_THREAD
from ..results import Matches
from .checks import check_extents, check_finite, check_floats, widened
from .patches import whole
from .pyramid import depth, finer, resize, scaled, scales, shrink_known
from .smooth import smooth_fill
from .structure import Structure, continued, parts
from .synthesis import Progress, Settings, Source, update
from .tiles import Tiles

THIN = Settings(matches=4)
WIDE = Settings(patch=9, matches=4, sharpness=2.0, finish=0.5)
SHARP = Settings(selective=4.0)  # single patches, those that fit: irregular textures are kept, errors grow
RATIO = 2.0  # of a level to the one above
REACH = 1.5  # side of a patch over the width of the hole at the coarsest level
TRUST = 1.2  # a vote counts for less by this factor with each pixel deeper in the hole
TEXTURE = 6.0  # weight of the roughness around a pixel beside its colors
TILE = 32  # side of the squares of patches that are searched together
AROUND = 32  # pixels around a hole whose texture is looked at
# Of an irregular texture, see `irregular`.
EVEN_MEANS = 0.6
EVEN_ROUGHNESS = 0.4
LARGE = 2**21  # pixels around a hole that are enough to fill it
STRUCTURE = 80  # pixels of the shorter side at which the structure of a hole is looked for, at least
FARTHER = 1.4  # it is taken where the mean distance of patches to their matches is below so many times that without
COSTLY = 0.025  # and where its pixels cost less: above its seams show
LEAST_PATCHES = 16  # whole patches of the source without which a hole is filled smoothly


@torch.no_grad()
def inpaint(
    picture: Tensor, hole: Tensor, settings: Settings | None = None, *, progress: Progress | None = None
) -> Tensor:
    """Fill a hole of any shape with patches from elsewhere in the picture.

    At each level, from coarse to fine, patches that touch the hole find the most similar whole patches outside it, and
    those vote for the pixels of the hole. What they leave of the known pixels around the hole is carried into it
    smoothly, so that no seam is left. Patches know how rough their surroundings are: else blurred guesses would find
    smooth patches alone. A thin hole needs one level, and starts from a smooth surface. Of a large picture the part
    around the hole is looked at, two million pixels or more.

    Args:
        picture: floats [H, W, C], values 0..1; what lies in the hole is never read.
        hole: bool [H, W], True = to be filled.
        settings: how patches are found and how they vote; None for `suited(picture, hole)`.
        progress: is called with the share of the work done, 0..1.

    Returns:
        The picture [H, W, C]; outside the hole it is unchanged, inside no channel leaves the range that it has outside.

    >>> stripes = torch.linspace(0, 24, 48).sin().expand(32, 48).unsqueeze(-1) / 2 + 0.5
    >>> hole = torch.zeros(32, 48, dtype=torch.bool)
    >>> hole[10:20, 20:30] = True
    >>> filled = inpaint(torch.where(hole.unsqueeze(-1), 0, stripes), hole)
    >>> bool((filled - stripes).abs().max() < 0.1)
    True
    """
    _check(picture, hole)
    picture = torch.where(hole.unsqueeze(-1), 0, picture)  # a NaN in the hole stays there
    check_finite(picture)
    given = picture.dtype
    picture = widened(picture)
    lowest = picture[~hole].amin(0)
    highest = picture[~hole].amax(0)
    if not bool(hole.any()):
        return picture.to(given)
    region = surroundings(hole)
    filled = picture.clone()
    with ONE_THREAD:  # threads of torch's operators would spin where those of the searches run
        filled[region] = _filled(picture[region], hole[region], settings, progress or (lambda share: None))
    return filled.clamp(lowest, highest).to(given)


def surroundings(hole: Tensor) -> tuple[slice, slice]:
    """The rows and columns of a picture that are looked at: all of them, of large ones those around the hole [H, W]."""
    ends = [(int(lines[0]), int(lines[-1]) + 1) for lines in (hole.any(1).nonzero(), hole.any(0).nonzero())]
    margin = 64
    while True:
        parts = [
            slice(max(low - margin, 0), min(high + margin, size))
            for (low, high), size in zip(ends, hole.shape, strict=True)
        ]
        shape = [part.stop - part.start for part in parts]
        if shape == list(hole.shape) or shape[0] * shape[1] >= LARGE:
            return parts[0], parts[1]
        margin *= 2


def _filled(picture: Tensor, hole: Tensor, settings: Settings | None, told: Progress) -> Tensor:
    """The picture [H, W, C], 0 in the hole [H, W], with the hole filled."""
    settings = settings or suited(picture, hole)
    fitting = [side for side in range(settings.patch, 1, -2) if side <= min(hole.shape)]
    fitting = [side for side in fitting if int(whole(~hole, side).sum()) >= LEAST_PATCHES]
    if not fitting:
        return smooth_fill(picture, hole, order=1)
    settings = replace(settings, patch=fitting[0])
    side = settings.patch
    sizes = _levels(hole, settings.patch)
    channels = picture.shape[-1]
    if len(sizes) > 1:
        picture = torch.cat((picture, TEXTURE * activity(picture, hole, settings.patch)), -1)
    plan = [(size, [settings] * settings.iterations) for size in sizes]
    if len(sizes) > 1:  # the finest level costs most and changes least
        plan[-1] = (sizes[-1], [settings] * -(-settings.iterations // 2))
    if len(sizes) > 1 and settings.finish is not None:  # the whole result is matched anew, by single patches
        plan.append((sizes[-1], [replace(settings, matches=1, focus=settings.finish)]))
    work = [height * width * len(steps) for (height, width), steps in plan]
    above: Level | None = None
    structural = next((n for n, size in enumerate(sizes) if len(sizes) > 1 and min(size) >= STRUCTURE), None)
    for level, (size, steps) in enumerate(plan):
        known, missing = shrink_known(picture, hole, size)
        done = sum(work[:level]) / sum(work)
        share = work[level] / sum(work)
        level_told = lambda x, done=done, share=share: told(done + share * x)  # noqa: E731
        first = level * settings.iterations
        found = _fill(known, missing, above, steps, first, level_told)
        if level == structural and (structure := continued(known, missing, channels)) is not None:
            other = _fill(known, missing, above, steps, first, lambda share: None, structure)
            found = _better(found, other, structure, missing, side)
        above = found
    assert above is not None
    return torch.where(hole.unsqueeze(-1), above[0], picture)[..., :channels]


Level = tuple[Tensor, Matches]


def _better(plain: Level, other: Level, structure: Structure, hole: Tensor, side: int) -> Level:
    """Of two fills of a level the one or the other for each connected part of a hole, bool [H, W].

    The other one started from the structure. It is taken where that has no costly seams and where its patches are not
    much farther from their matches: joints that fade away have near ones too.
    """
    part = parts(hole)
    count = int(part.max()) + 1
    rim = side // 2
    inner = (slice(rim, hole.shape[0] - rim), slice(rim, hole.shape[1] - rim))

    def means(x: Tensor, number: Tensor) -> Tensor:
        fits = (number >= 0) & x.isfinite()
        total = x.new_zeros(count).index_add(0, number[fits], x[fits])
        return total / fits.new_zeros(count, dtype=x.dtype).index_add(0, number[fits], fits[fits].to(x)).clamp(min=1)

    far = [means(-found.score[0, 0, ..., 0], part[inner]) for _, found in (plain, other)]
    better = (far[1] < FARTHER * far[0]) & (means(structure.cost, part) < COSTLY)
    taken = F.pad(better, (1, 0))[part + 1]  # [H, W]
    patches = taken[inner][None, None, ..., None]
    matches = Matches(
        torch.where(patches, other[1].index, plain[1].index),
        torch.where(patches, other[1].score, plain[1].score),
        plain[1].key_grid,
    )
    return torch.where(taken[..., None], other[0], plain[0]), matches


def suited(picture: Tensor, hole: Tensor) -> Settings:
    """Settings for a hole, bool [H, W], of a picture [H, W, C]: of three kinds.

    A thin hole takes means of four patches. A wide one takes larger patches, sharper means, and a last step with single
    ones. A wide hole in an irregular texture takes single patches throughout: a mean of different grass is no grass.
    """
    if len(_levels(hole, THIN.patch)) == 1:
        return THIN
    return SHARP if irregular(picture, hole, THIN.patch) else WIDE


def irregular(picture: Tensor, hole: Tensor, side: int) -> bool:
    """Whether a picture [H, W, C] is one irregular texture around its hole, such as grass or gravel.

    There the means of patches differ by less than `EVEN_MEANS` of what pixels do, and the roughness of patches by less
    than `EVEN_ROUGHNESS` of its mean: everywhere it looks the same, and no two places are equal.
    """
    near = F.max_pool2d(hole.to(picture.dtype)[None, None], 2 * AROUND + 1, 1, AROUND)[0, 0] > 0
    known = (~hole).to(picture.dtype)[None, None]
    near = near & ~hole
    gray = torch.where(hole, 0, picture.mean(-1))[None, None]
    wide = (2 * side - 1, 1, side - 1)
    means = (F.avg_pool2d(gray, *wide) / F.avg_pool2d(known, *wide).clamp(min=1e-6))[0, 0][near]
    rough = activity(picture, hole, side).mean(-1)[near]
    pixels = gray[0, 0][near]
    spread = [float(x.std(correction=0)) if len(x) else 0.0 for x in (means, pixels, rough)]
    return spread[0] < EVEN_MEANS * spread[1] and spread[2] < EVEN_ROUGHNESS * float(rough.mean())


def activity(picture: Tensor, hole: Tensor, side: int) -> Tensor:
    """How rough a picture [H, W, C] is around each pixel [H, W, 2]: mean differences down and across, known ones."""
    gray = picture.mean(-1)[None, None]
    known = (~hole).to(picture.dtype)[None, None]
    means = []
    for axis in (-2, -1):
        length = gray.shape[axis] - 1
        both = known.narrow(axis, 0, length) * known.narrow(axis, 1, length)
        rough = (gray.narrow(axis, 1, length) - gray.narrow(axis, 0, length)).abs() * both
        pad = (0, 0, 0, 1) if axis == -2 else (0, 1, 0, 0)
        summed, count = (F.avg_pool2d(F.pad(x, pad), 2 * side - 1, 1, side - 1) for x in (rough, both))
        means.append(torch.where(count > 1e-6, summed / count.clamp(min=1e-6), 0)[0, 0])
    return torch.stack(means, -1)


def _check(picture: Tensor, hole: Tensor) -> None:
    check_floats(picture)
    check_extents(tuple(picture.shape[:2]), "picture")
    if not isinstance(hole, Tensor):
        raise ValueError(f"hole must be a tensor bool [H, W], got {type(hole).__name__}")
    if hole.dtype != torch.bool or hole.shape != picture.shape[:2]:
        want = tuple(picture.shape[:2])
        raise ValueError(f"hole must be bool [H, W] = {want}, got {hole.dtype} {tuple(hole.shape)}")
    if bool(hole.all()):
        raise ValueError("the hole covers the whole picture: nothing is left to fill it with")


def _levels(hole: Tensor, side: int) -> list[tuple[int, int]]:
    """Sizes from coarse to fine: at the coarsest a patch reaches across the hole, and whole patches are left."""
    height, width = hole.shape
    reach = REACH * side / 2 / max(float(depth(hole).max()), 1)
    shorter = min(height, width)
    least = max(2 * side, int(shorter * min(1.0, reach)))
    sizes = [scaled((height, width), scale) for scale in scales(shorter, least, RATIO)]
    blank = hole.new_zeros((*hole.shape, 1), dtype=torch.float32)
    while len(sizes) > 1 and int(whole(~shrink_known(blank, hole, sizes[0])[1], side).sum()) < LEAST_PATCHES:
        sizes = sizes[1:]
    return sizes


def _fill(
    known: Tensor,
    hole: Tensor,
    above: tuple[Tensor, Matches] | None,
    steps: list[Settings],
    first_step: int,
    told: Progress,
    structure: Structure | None = None,
) -> tuple[Tensor, Matches]:
    """One level: from the guess and the matches of the level above to those of this one.

    Args:
        known: [H, W, C], 0 in the hole, bool [H, W].
        steps: the settings of each step.
        first_step: number of its first step, for the seeds.
    """
    settings = steps[0]
    side = settings.patch
    size = (hole.shape[0], hole.shape[1])
    inside = hole.unsqueeze(-1)
    deep = depth(hole)
    order = 2 if float(deep.max()) <= side else 1  # across a wide hole the smoothest surface swings too far
    source = Source.of(known, settings, whole(~hole, side))
    touched = ~whole(~hole, side)
    weight = F.avg_pool2d(TRUST ** -deep[None, None], side, 1)[0, 0] * touched
    near = F.max_pool2d(hole.float()[None, None], 2 * side - 1, 1, side - 1)[0, 0] > 0  # pixels with a vote
    blurred = warm = None
    if structure is not None:
        guess = structure.picture
    elif above is None:
        guess = smooth_fill(known, hole, order)
    else:
        guess = torch.where(inside, resize(above[0], size), known)
    if above is not None and above[0].shape[:2] != size:
        blurred = resize(resize(guess, (above[0].shape[0], above[0].shape[1])), size)
        warm = finer(above[1], side, size, size)
    if structure is not None:
        warm = structure.matches(side)
    for step, settings in enumerate(steps):
        tiles = Tiles.of(touched, TILE, step % 2 * TILE // 2)  # matches cross the borders of tiles in the next step
        seen, blurred_source = (guess, None) if step or blurred is None else (blurred, blurred)
        votes, warm = update(
            seen, source, settings, first_step + step, blurred=blurred_source, weight=weight, tiles=tiles, warm=warm
        )
        told((step + 1) / len(steps))
        guess = torch.where(inside, votes, known)
    assert warm is not None
    left = torch.where((near & ~hole).unsqueeze(-1), known - votes, 0)
    return torch.where(inside, votes + smooth_fill(left, hole, order), known), warm
