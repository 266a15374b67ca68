"""Patch synthesis: every patch of a guess becomes patches of a source that look alike, and overlapping patches vote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .._compat import ONE_THREAD
from ..core.exact import exact_search
from ..functional import attend, search
from ..options import ScoreName
from ..results import Matches
from ..settings import Search
from ..spec.scoring import prepare_key, prepare_query
from .checks import check_extents, check_finite, check_floats
from .patches import Features, unfold
from .pyramid import finer, resize
from .tiles import Tiles

MOST_SIDE = 31  # of a patch: larger ones are slow, and found nowhere else
DENSE = 2**20  # pairs of patches up to which brute force is as fast as a search
Progress = Callable[[float], None]  # is told the share of the work that is done


@dataclass(frozen=True)
class Settings:
    """How patches are found and how they vote.

    Args:
        patch: side of the patches, odd.
        width: features kept of each.
        matches: source patches that each patch of the guess becomes a mean of.
        sharpness: how fast their weights fall with the squared distance over its median; more is sharper.
        focus: how fast the votes of a patch fall from its center to its rim; more is sharper, with more seams.
        selective: how fast the vote of a patch falls with its squared distance over the upper quartile of all; more
            keeps textures: patches that fit are copied, and those that do not blur less.
        finish: focus of one last step that votes with single patches (inpainting of wide holes); None for no such step.
        sweeps: of each search.
        iterations: steps at each level.
        seed: of everything random.
    """

    patch: int = 7
    width: int = 24
    matches: int = 1
    sharpness: float = 1.0
    focus: float = 0.0
    selective: float = 0.0
    finish: float | None = None
    sweeps: int = 3
    iterations: int = 6
    seed: int = 0

    def __post_init__(self) -> None:
        if not 3 <= self.patch <= MOST_SIDE or self.patch % 2 == 0:
            raise ValueError(f"patch must be odd, at least 3 and at most {MOST_SIDE}, got {self.patch}")
        for name in ("width", "matches", "sweeps", "iterations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.sharpness < float("inf"):
            raise ValueError(f"sharpness must be positive and finite, got {self.sharpness}")
        for name in ("focus", "selective", "finish"):
            if (value := getattr(self, name)) is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be at least 0 and finite, got {value}")


@dataclass(frozen=True)
class Source:
    """Where patches are taken from, at one level.

    Args:
        picture: [H', W', C], sharp.
        features: fitted to its patches.
        values: its patches [h', w', C * p * p].
        allowed: the patches that may be taken, bool [h', w'], or None for all.
    """

    picture: Tensor
    features: Features
    values: Tensor
    allowed: Tensor | None = None

    @classmethod
    def of(cls, picture: Tensor, settings: Settings, allowed: Tensor | None = None) -> Source:
        values = unfold(picture, settings.patch)
        return cls(picture, Features.fit(values, settings.patch, settings.width, allowed), values, allowed)

    @property
    def key_mask(self) -> Tensor | None:
        return None if self.allowed is None else self.allowed[None]


def nearest(
    q: Tensor,
    k: Tensor,
    settings: Settings,
    step: int = 0,
    *,
    score: ScoreName = "l2",
    matches: int = 1,
    key_mask: Tensor | None = None,
    warm: Matches | None = None,
) -> Matches:
    """The best keys of every query, q [1, n, h, w, E], k [1, 1, h', w', E]; by brute force on small grids."""
    if q[..., 0].numel() * k[..., 0].numel() <= DENSE:
        return exact_search(q, k, matches=matches, key_mask=key_mask, score=score)
    search_settings = Search(
        matches=matches, sweeps=settings.sweeps, jumps=(4, 1), propagate="shift", gossip=2, seed=settings.seed + step
    )
    return search(q, k, search=search_settings, score=score, key_mask=key_mask, warm=warm)


def complete_keys(
    q: Tensor, k: Tensor, settings: Settings, alpha: float, step: int = 0, warm: Matches | None = None
) -> Tensor:
    """Prepared keys [1, 1, h', w', E + 2] whose dot product with prepared queries is -|q - k|^2 / (alpha + m).

    m is the least squared distance of the key to any query: keys that no query resembles are preferred, so that all
    of the source is shown somewhere.

    Args:
        q, k: [1, 1, h, w, E] and [1, 1, h', w', E].
        alpha: more is less of this; in units of squared features.
        warm: matches of the queries, whose inverse starts the search the other way round.
    """
    nearest_queries = nearest(k, q, settings, step, warm=None if warm is None else warm.inverse(1))
    return prepare_key(k, "l2") / (alpha - nearest_queries.score.clamp(max=0))


def update(
    guess: Tensor,
    source: Source,
    settings: Settings,
    step: int = 0,
    *,
    blurred: Tensor | None = None,
    weight: Tensor | None = None,
    tiles: Tiles | None = None,
    alpha: float | None = None,
    warm: Matches | None = None,
) -> tuple[Tensor, Matches]:
    """One step: patches of the guess [H, W, C] find patches of the source, and those vote for the next guess.

    Args:
        step: its number, for the seed of its searches.
        blurred: the source, as blurred as the guess [H', W', C], which is searched instead of the sharp one.
        weight: of each patch's vote [h, w]; equal if None.
        tiles: the part of the grid of patches [h, w] that votes; all if None.
        alpha: completeness, as in `complete_keys`, in units of the mean squared feature; None for none.
        warm: matches of the patches to start from.

    Returns:
        The new guess [H, W, C], 0 where nothing voted, and the matches.
    """
    features = source.features
    score: ScoreName = "l2"
    q = features(guess)  # [1, 1, h, w, E]
    k = features(source.picture if blurred is None else blurred)
    grid = (q.shape[2], q.shape[3])
    if alpha is not None:
        power = float(k.square().sum(-1).mean())
        keys = complete_keys(q, k, settings, max(alpha * power, 1e-6), step, warm)
        q = prepare_query(q, "l2")
        k = keys
        score = "dot"
    tiles = Tiles.whole(grid, q.device) if tiles is None else tiles
    q = tiles.cut(q[0, 0])[None]  # tiles are heads; all heads share the keys
    if warm is not None:
        warm = Matches(tiles.cut(warm.index[0, 0] + 1)[None] - 1, tiles.cut(warm.score[0, 0])[None], warm.key_grid)
    mask = source.key_mask
    matches = nearest(q, k, settings, step, score=score, matches=settings.matches, key_mask=mask, warm=warm)
    scale = settings.sharpness / max(-float(matches.score[..., 0].median()), 1e-6)
    values = source.values[None, None]  # [1, 1, h', w', C * p * p]
    patches = attend(q, k, values, matches, radius=0, scale=scale, score=score, key_mask=mask).out[0]
    weight = torch.ones(grid, device=q.device, dtype=q.dtype) if weight is None else weight
    index = tiles.put(matches.index[0], -1)
    best = tiles.put(matches.score[0], -torch.inf)
    each = tiles.cut(weight.unsqueeze(-1)) * _fitting(matches.score[0, ..., :1], settings.selective)
    votes = tile_vote(patches, each, tiles, settings.patch, settings.focus)
    return votes, Matches(index[None, None], best[None, None], matches.key_grid)


def _fitting(score: Tensor, selective: float) -> Tensor:
    """What the vote of a patch is worth, by the score of its match [...]: exp(-selective * d / upper quartile of d)."""
    if not selective or not score.numel():
        return torch.ones_like(score)
    distance = -score.clamp(-1e12, 0)  # a patch without a match has -inf
    some = distance.flatten()[:: max(1, distance.numel() // 2**20)]
    return (-selective * distance / some.quantile(0.75).clamp(min=1e-6)).exp().clamp(min=1e-12)


def tile_vote(patches: Tensor, weight: Tensor, tiles: Tiles, side: int, focus: float = 0.0) -> Tensor:
    """Patch voting: patches [n, th, tw, C * p * p] of tiles averaged with their weights [n, th, tw, 1] -> [H, W, C].

    With focus the pixels of a patch count for less by exp(-focus r^2) at the distance r from its center.
    """
    size = (tiles.side[0] + side - 1, tiles.side[1] + side - 1)
    line = torch.arange(side, device=patches.device, dtype=patches.dtype) - side // 2
    ring = (-focus * (line[:, None].square() + line.square())).exp().flatten()  # [p * p]
    each = weight * ring  # [n, th, tw, p * p]
    columns = torch.cat([patches * each.repeat(1, 1, 1, patches.shape[-1] // len(ring)), each], -1).flatten(1, 2).mT
    summed = tiles.add(F.fold(columns, size, side), side - 1)
    total = summed[-1:]  # [1, H, W]
    return torch.where(total > 0, summed[:-1] / torch.where(total > 0, total, 1), 0).movedim(0, -1)


@ONE_THREAD  # threads of torch's operators would spin where those of the searches run
def coarse_to_fine(
    guess: Tensor,
    sources: Sequence[Tensor],
    sizes: Sequence[tuple[int, int]],
    settings: Settings,
    alpha: float | None,
    progress: Progress,
) -> Tensor:
    """From a guess at the coarsest size to a picture at the finest, all of it made of patches of the source.

    Args:
        guess: [h, w, C], of the first size.
        sources: the source at every level [H', W', C].
        sizes: of the result at every level.
        alpha: completeness, as in `update`.
        progress: is called with the share of the work done, 0..1.
    """
    work = [height * width for height, width in sizes for _ in range(settings.iterations)]
    matches: Matches | None = None
    for level, (picture, size) in enumerate(zip(sources, sizes, strict=True)):
        source = Source.of(picture, settings)
        blurred = None
        if matches is not None:
            extent = (picture.shape[0], picture.shape[1])
            guess = resize(guess, size)
            blurred = resize(sources[level - 1], extent)
            matches = finer(matches, settings.patch, size, extent)
        for step in range(settings.iterations):
            number = level * settings.iterations + step
            guess, matches = update(guess, source, settings, number, blurred=blurred, alpha=alpha, warm=matches)
            blurred = None  # votes of sharp patches are as sharp as these
            progress(sum(work[: number + 1]) / sum(work))
    return guess


def check_picture(picture: Tensor, size: tuple[int, int], side: int) -> None:
    """A picture and a result that hold patches of that side."""
    check_floats(picture)
    check_finite(picture)
    for name, (height, width) in (("picture", check_extents(tuple(picture.shape[:2]), "picture")), ("size", size)):
        if min(height, width) < 2 * side:
            raise ValueError(f"{name} must be {2 * side} x {2 * side} pixels at least, got {width} x {height}")
