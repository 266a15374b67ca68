"""Dense correspondence of two pictures: coarse to fine, with a certainty from ways back and second bests."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import isfinite
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .._compat import ONE_THREAD
from ..core import checks
from ..core.balanced import balanced
from ..core.files import save_tensors
from ..functional import attend, search
from ..options import Impl
from ..quality.timing import now
from ..results import MatchedPoints, Matches
from ..settings import Search
from .checks import check_finite, check_floats
from .features import PatchFeatures
from .files import replacing
from .refinement import refined
from .resample import halved, own_places, turned

PATCH = 11
WIDTH = 32
RADIUS = 1
SWEEPS = 8
SCALE = 100.0  # on unit features a score is a cosine; times 100 the softmax has clear peaks
COARSEST = 40  # a level has at least so many lines and columns, times two where there is a coarser one
NEAR = 2.0  # pixels; a way there and back that ends so far from its start counts half
AROUND = 5  # radius of the neighborhood whose ways back are averaged
SURE = 0.5  # a match of this certainty or more passes
SCREEN = 160  # lines of the pictures on which poses are compared
MOST_SECOND = 600_000  # points of both pictures at the level where second bests are sought
SECOND = Search(matches=2, sweeps=4)
Advance = Callable[[float, str], None]


@dataclass(frozen=True)
class Settings:
    """What `match` takes by keywords."""

    patch: int = PATCH
    width: int = WIDTH
    matches: int = 1
    separation: int = 0
    radius: int = RADIUS
    sweeps: int = SWEEPS
    scale: float = SCALE
    seed: int = 0
    scales: tuple[float, ...] = (1.0,)
    rotations: tuple[float, ...] = (0.0,)
    impl: Impl = "auto"


@dataclass(frozen=True)
class Matching:
    """Where in B each pixel of A lies. Places are (x, y), x to the right and y down.

    The center of the first pixel is (0, 0), as in OpenCV: `cv2.remap(b, warp[..., 0], warp[..., 1], ...)` is B warped
    onto A. COLMAP has it at (0.5, 0.5); `save_colmap` adds the half.

    Args:
        warp: float32 [H, W, 2], (x, y) in B, finer than a pixel; NaN where no key was found.
        certainty: float32 [H, W], 0..1; `SURE` or more passes the check.
        rebuilt: float32 [H, W, 3], A from B's colors: attention over the windows around the matches.
        score: float32 [H, W], the cosine of the two patches.
        pose: int64 [H, W], which of `poses` each match was found under.
        poses: (scale, rotation) of B against A that were tried at full size.
        seconds: of each stage.
    """

    warp: Tensor
    certainty: Tensor
    rebuilt: Tensor
    score: Tensor
    pose: Tensor
    poses: tuple[tuple[float, float], ...]
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def flow(self) -> Tensor:
        """(right, down) from each pixel of A to its place in B [H, W, 2]."""
        return self.warp - own_places(*self.warp.shape[:2]).to(self.warp.device).flip(-1)

    @property
    def sure(self) -> float:
        """The share of matches that pass the check."""
        return float((self.certainty >= SURE).float().mean())

    def sample(self, n: int, *, seed: int = 0) -> MatchedPoints:
        """At most n matches that pass the check, drawn by certainty and spread over the picture: (x, y) [n, 2] of each.

        Args:
            n: how many; fewer where fewer pass.
            seed: of the draw; the same on every device.

        >>> a = torch.rand(40, 50, 3)
        >>> points = match(a, a.roll(2, 1), patch=5).sample(100)
        >>> points.a.shape, (points.b - points.a).median(0).values.round()
        (torch.Size([100, 2]), tensor([2., 0.]))
        """
        checks.whole("n", n, 1)
        checks.count("seed", seed)
        passed = torch.where((self.certainty >= SURE) & self.warp.isfinite().all(-1), self.certainty, 0)
        taken = balanced(passed[None], min(n, passed.numel()), seed)[0]
        taken = taken[taken >= 0]
        own = own_places(*passed.shape).to(passed.device).flip(-1)
        return MatchedPoints(own.flatten(0, 1)[taken], self.warp.flatten(0, 1)[taken], passed.flatten()[taken])

    def save(self, path: str | os.PathLike[str], points: MatchedPoints | None = None) -> None:
        """Write the fields but for `rebuilt` and `seconds`, and points, to an .npz or a .safetensors file."""
        suffix = Path(path).suffix
        if suffix not in (".npz", ".safetensors"):
            raise ValueError(f"path must end in .npz or .safetensors, got {os.fspath(path)!r}")
        tensors = {name: getattr(self, name).detach().cpu() for name in ("warp", "certainty", "score", "pose")}
        tensors["poses"] = torch.tensor(self.poses, dtype=torch.float64, device="cpu")
        if points is not None:
            tensors |= {f"points_{name}": x.detach().cpu() for name, x in points._asdict().items()}
        if suffix == ".safetensors":
            save_tensors(tensors, {"format": "scram.images.Matching"}, path)
            return
        with replacing(path) as temporary:
            np.savez_compressed(temporary, allow_pickle=False, **{name: x.numpy() for name, x in tensors.items()})


@ONE_THREAD  # threads of torch's operators would spin where those of the searches run
def match(
    a: Tensor,
    b: Tensor,
    *,
    patch: int = PATCH,
    width: int = WIDTH,
    matches: int = 1,
    separation: int = 0,
    radius: int = RADIUS,
    sweeps: int = SWEEPS,
    scale: float = SCALE,
    scales: Sequence[float] = (1.0,),
    rotations: Sequence[float] = (0.0,),
    seed: int = 0,
    impl: Impl = "auto",
    progress: Advance | None = None,
) -> Matching:
    """Find every pixel of picture A in picture B.

    Every level of a pyramid is searched there and back; a finer level starts from the matches of the coarser one. At
    the end the flow is made locally affine and moved to where the colors fit best, finer than a pixel. The certainty
    is how well ways there and back end where they began, in the pixel and around it, less where a second place, at
    least half a patch away, looks as good as the first.

    Args:
        a, b: [H, W, C] and [H', W', C] with C 1 or 3, values 0..1, on one device.
        patch: side of the patches that are compared, odd.
        width: numbers kept of each patch by a PCA.
        matches, separation: matches per pixel that attention mixes, and how far they are apart.
        radius: of the window around each match whose softmax rebuilds A, and gives the place to start from.
        sweeps: of the search at the coarsest level; finer ones take two.
        scale: factor on the cosine before the softmax.
        scales: sizes at which B may show what A shows: 0.5 for a picture of half the size.
        rotations: angles in degrees, counter-clockwise, by which B may be turned against A.
        seed: of the search.
        impl: as in `scram.search`.
        progress: called with the share of the work that is done and what comes next.

    >>> a = torch.rand(48, 64, 3)
    >>> found = match(a, a.rot90(), patch=5, rotations=(0, 90))
    >>> found.warp.shape, found.poses
    (torch.Size([48, 64, 2]), ((1.0, 90.0),))
    """
    settings = Settings(
        patch=patch,
        width=min(width, 3 * patch * patch),
        matches=matches,
        separation=separation,
        radius=radius,
        sweeps=sweeps,
        scale=scale,
        seed=seed,
        scales=tuple(map(float, scales)),
        rotations=tuple(map(float, rotations)),
        impl=impl,
    )
    a = _as_rgb("a", a)
    b = _as_rgb("b", b)
    poses = _poses(settings)
    tell: Advance = progress or (lambda share, what: None)
    if len(poses) > 1:
        poses = _likely(a, b, poses, settings)
    matching: Matching | None = None
    for n, pose in enumerate(poses):
        words = "" if len(poses) == 1 else f"scale {pose[0]:g}, turned by {pose[1]:g}: "

        def part(share: float, what: str, n: int = n, words: str = words) -> None:
            tell((n + share) / len(poses), words + what)

        one = replace(_in_pose(a, b, pose, settings, part), poses=tuple(poses))
        matching = one if matching is None else _better(matching, one, n)
    assert matching is not None
    return matching


def _as_rgb(name: str, picture: Tensor) -> Tensor:
    check_floats(picture, (3, 1), name)
    check_finite(picture, name)
    return picture.float().expand(-1, -1, 3)


def _poses(settings: Settings) -> list[tuple[float, float]]:
    """Every scale with every rotation."""
    for name, values in (("scales", settings.scales), ("rotations", settings.rotations)):
        if not values or not all(map(isfinite, values)):
            raise ValueError(f"{name} must hold at least one finite number, got {values}")
    if min(settings.scales) < 0.1 or max(settings.scales) > 10:
        raise ValueError(f"scales must lie between 0.1 and 10, got {settings.scales}")
    return list(dict.fromkeys(product(settings.scales, (turn % 360 for turn in settings.rotations))))


def _likely(a: Tensor, b: Tensor, poses: list[tuple[float, float]], settings: Settings) -> list[tuple[float, float]]:
    """The poses that small copies of the pictures speak for, best first."""
    while min(a.shape[:2]) >= 2 * SCREEN:
        a = halved(a)
        b = halved(b)
    worth = {pose: float(_in_pose(a, b, pose, settings).certainty.mean()) for pose in poses}
    best = max(worth.values())
    return sorted((pose for pose in poses if worth[pose] >= 0.4 * best), key=lambda pose: -worth[pose])


def _better(one: Matching, other: Matching, number: int) -> Matching:
    """Per pixel the surer one of two matchings."""
    better = other.certainty > one.certainty
    picked = {
        name: torch.where(better if new.ndim == 2 else better.unsqueeze(-1), new, getattr(one, name))
        for name in ("warp", "certainty", "rebuilt", "score")
        for new in (getattr(other, name),)
    }
    seconds = {name: value + other.seconds[name] for name, value in one.seconds.items()}
    return Matching(**picked, pose=torch.where(better, number, one.pose), poses=one.poses, seconds=seconds)


def _in_pose(
    a: Tensor, b: Tensor, pose: tuple[float, float], settings: Settings, tell: Advance = lambda share, what: None
) -> Matching:
    """Match A with B, whose content is `scale` times as large and turned by so many degrees."""
    posed = turned(b, 1 / pose[0], -pose[1])
    key_mask = None if posed.inside is None else posed.inside[None]
    levels = [(a, posed.picture, key_mask)]
    while min(*levels[-1][0].shape[:2], *levels[-1][1].shape[:2]) >= 2 * COARSEST:
        x, y, mask = levels[-1]
        smaller = None if mask is None else halved(mask[0].unsqueeze(-1).float())[None, ..., 0] > 0.99
        levels.append((halved(x), halved(y), smaller))
    levels.reverse()
    work = [x.shape[0] * x.shape[1] + y.shape[0] * y.shape[1] for x, y, _ in levels]
    second = max(n for n, size in enumerate(work) if n == 0 or (n < len(work) - 1 and size <= MOST_SECOND))
    state = _Level()
    seconds = dict.fromkeys(("features", "search", "check", "attend", "refine"), 0.0)
    distinct = None
    done = 0
    start = perf_counter()
    for n, (x, y, mask) in enumerate(levels):
        passed = perf_counter() - start
        left = "" if n < 2 else f", about {passed * sum(work[n:]) / done:.0f} s left"
        tell(done / sum(work), f"{x.shape[1]} x {x.shape[0]} pixels{left}")
        clock = _Clock(seconds, a.device)
        q, k = _features(x, y, settings)  # [1, 1, h, w, width] each
        clock("features")
        state = _both_ways(q, k, mask, state, n, settings)
        clock("search")
        if n == second:
            distinct = _distinct(q, k, mask, state.forward, n, settings)
        clock("check")
        done += work[n]
    assert state.forward is not None
    assert state.backward is not None
    assert distinct is not None
    own = own_places(*posed.picture.shape[:2]).to(a.device)  # [h', w', 2]
    values = torch.cat((posed.picture, own), -1)[None, None]  # [1, 1, h', w', 5]
    out = attend(
        q, k, values, state.forward, radius=settings.radius, scale=settings.scale, key_mask=mask, impl=settings.impl
    ).out[0, 0]
    clock("attend")
    best = Matches(state.forward.index[..., :1], state.forward.score[..., :1], state.forward.key_grid)
    certainty = _agreement(best, state.backward) * _stretched(distinct, a)
    has_match = best.index[0, 0] >= 0  # [H, W, 1]
    clock("check")
    rough = torch.where(has_match, out[..., 3:], own_places(*a.shape[:2]).to(a.device))
    certainty = torch.where(has_match[..., 0], certainty, torch.zeros_like(certainty))
    place = refined(a, posed.picture, rough, certainty)
    clock("refine")
    return Matching(
        torch.where(has_match, posed.origin(place), torch.nan).flip(-1),
        certainty,
        out[..., :3],
        best.score[0, 0, ..., 0],
        torch.zeros_like(best.index[0, 0, ..., 0], dtype=torch.int64),
        (pose,),
        seconds,
    )


@dataclass(frozen=True)
class _Level:
    """The matches of a level from A to B and back."""

    forward: Matches | None = None
    backward: Matches | None = None


class _Clock:
    """Adds the seconds since the last call to a stage."""

    def __init__(self, seconds: dict[str, float], device: torch.device) -> None:
        self.seconds = seconds
        self.device = device
        self.last = now(device)

    def __call__(self, stage: str) -> None:
        before = self.last
        self.last = now(self.device)
        self.seconds[stage] += self.last - before


def _features(a: Tensor, b: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Patch features of both pictures from one PCA, fitted on A: [1, 1, H, W, width] each."""
    stride = max(5, round((a.shape[0] * a.shape[1] / 30_000) ** 0.5))  # some 30 thousand patches are enough
    features = PatchFeatures.fit(a, settings.width, settings.patch, stride)
    return features(a), features(b)


def _both_ways(q: Tensor, k: Tensor, mask: Tensor | None, before: _Level, level: int, settings: Settings) -> _Level:
    """Search from A to B and from B to A, from the matches of the coarser level where there is one."""
    level_search = Search(
        matches=settings.matches, separation=settings.separation, sweeps=settings.sweeps, seed=settings.seed
    )
    forward = backward = None
    if before.forward is not None and before.backward is not None:
        grid = q.shape[2:-1]
        key_grid = k.shape[2:-1]
        forward = before.forward.upsample(grid, key_grid)
        backward = before.backward.upsample(key_grid, grid)
        level_search = replace(
            level_search, sweeps=min(2, settings.sweeps), jumps=(4, 1), gossip=0, seed=settings.seed + level
        )
    matches = search(q, k, search=level_search, key_mask=mask, warm=forward, impl=settings.impl)
    # Back: whoever was found starts from its finder, others from the coarser level.
    start = Matches(matches.index[..., :1], matches.score[..., :1], matches.key_grid).inverse()
    if backward is not None:
        start = Matches(torch.where(start.index >= 0, start.index, backward.index), start.score, start.key_grid)
    level_search = replace(
        level_search, matches=1, separation=0, sweeps=min(level_search.sweeps, 4 if backward is None else 1)
    )
    return _Level(matches, search(k, q, search=level_search, warm=start, impl=settings.impl))


def _agreement(forward: Matches, backward: Matches) -> Tensor:
    """How well ways there and back end where they began [H, W], 0..1: of each pixel, and around it."""
    height, width = forward.index.shape[2:4]
    key = forward.index[0, 0, ..., 0].long()  # [H, W]
    home = backward.coords()[0, 0].flatten(0, -2)[key.clamp(min=0).flatten()].reshape(height, width, 2)
    missed = (home - own_places(height, width).to(key.device)).norm(dim=-1).nan_to_num(torch.inf)
    ends = 1 / (1 + (missed / NEAR).square())  # [H, W]
    ends = torch.where(key >= 0, ends, 0)
    around = F.avg_pool2d(ends[None, None], 2 * AROUND + 1, 1, AROUND, count_include_pad=False)[0, 0]
    return around * (1 + ends) / 2


def _distinct(
    q: Tensor, k: Tensor, mask: Tensor | None, matches: Matches | None, level: int, settings: Settings
) -> Tensor:
    """1 - r^24 [h, w], r the squared distance to the best key over that to the second best half a patch away."""
    search_settings = replace(SECOND, separation=max(settings.patch // 2, 1), seed=settings.seed + level)
    two = search(q, k, search=search_settings, key_mask=mask, warm=matches, impl=settings.impl)
    first, second = (2 - 2 * two.score[0, 0].clamp(max=1)).unbind(-1)
    return 1 - ((first + 1e-4) / (second + 1e-4)).clamp(max=1) ** 24


def _stretched(x: Tensor, like: Tensor) -> Tensor:
    """[h, w] -> [H, W]."""
    return F.interpolate(x[None, None], like.shape[:2], mode="bilinear", align_corners=False)[0, 0]
