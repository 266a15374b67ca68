"""Non-local means over several frames: a patch is a mean of patches like it in its own frame and in those around it."""

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
from ..spec.grid import coordinates
from .denoising import Basis, as_a_twin, check_picture, estimate_noise, fold, suited, unfold
from .resample import halved

REFIT = 32  # frames that share a PCA
COLD = Search(sweeps=4, gossip=2)
WARM = Search(sweeps=1, jumps=(2,), propagate="shift", gossip=0)


@dataclass(frozen=True)
class Settings:
    """How to denoise a film; `reach` frames on either side are searched, strength is in units of the noise."""

    patch: int
    width: int
    strength: float
    reach: int = 2
    radius: int = 3
    seed: int = 0

    @classmethod
    def of(cls, channels: int, changed: Mapping[str, Any] | None = None) -> Settings:
        return cls(**suited(channels, changed))


def denoise_frames(frames: Iterable[Tensor], sigma: float | None = None, **changed: Any) -> Iterator[Tensor]:
    """Remove white noise from a film, frame by frame as they come; memory does not grow with their number.

    Args:
        frames: [H, W, 1] or [H, W, 3] each, all of one size, values 0..1.
        sigma: standard deviation of the noise; None estimates it on the first frames.
        changed: `patch`, `strength`, `reach`, `radius`, `seed`, as in `Settings`.

    Yields:
        As many frames without noise [H, W, C].

    >>> film = [0.5 + 0.1 * torch.randn(24, 32, 1) for _ in range(3)]
    >>> [float((frame - 0.5).std()) < 0.03 for frame in denoise_frames(film, 0.1)]
    [True, True, True]
    """
    coming = iter(frames)
    first = list(islice(coming, 5))
    if not first:
        return
    check_picture(first[0])
    settings = Settings.of(first[0].shape[-1], changed)
    level = _median(estimate_noise(frame) for frame in first) if sigma is None else float(sigma)
    if not 0 < level < float("inf"):
        raise ValueError(f"the noise must be positive, got {level:g}; give a sigma to smooth all the same")
    yield from _Film(settings, level, first[0].shape)(chain(first, coming))


def _median(values: Iterable[float]) -> float:
    some = sorted(values)
    return some[len(some) // 2]


class _Film:
    """The frames around the one that is denoised, and the motion that leads to them.

    Frame n is kept in slot n % slots; its patches and features are written there once. Which slot a frame has does not
    matter, since windows are one frame deep.
    """

    def __init__(self, settings: Settings, sigma: float, shape: torch.Size) -> None:
        self.settings = settings
        self.sigma = sigma
        self.shape = shape
        self.slots = 2 * settings.reach + 1
        self.noisy: dict[int, Tensor] = {}  # by the number of the frame
        self.small: dict[int, Tensor] = {}
        self.motion: dict[int, Matches] = {}  # by distance in frames: of the frame before

    def __call__(self, frames: Iterable[Tensor]) -> Iterator[Tensor]:
        number = -1
        for number, noisy in enumerate(frames):
            if noisy.shape != self.shape:
                raise ValueError(f"frames must all be {tuple(self.shape)}, got {tuple(noisy.shape)}")
            self._take(number, noisy.float())
            if number >= self.settings.reach:
                yield self._denoised(number - self.settings.reach)
        for last in range(max(number - self.settings.reach + 1, 0), number + 1):
            yield self._denoised(last)

    def _take(self, number: int, noisy: Tensor) -> None:
        """Put a frame into its slot; every `REFIT` frames project all again by a PCA of this one."""
        for old in [n for n in self.noisy if n <= number - self.slots]:
            del self.noisy[old], self.small[old]
        self.noisy[number] = noisy
        again = [number]
        if number % REFIT == 0:
            self.fine = Basis.fit(noisy, self.sigma, self.settings.patch, self.settings.width)
            self.coarse = Basis.fit(halved(noisy), self.sigma / 2, 7, 12)
            again = list(self.noisy)
        if number == 0:
            size = (self.slots, *self.shape[:2])
            self.features = noisy.new_zeros(*size, len(self.fine.offset))
            self.patches = noisy.new_zeros(*size, self.shape[-1] * self.settings.patch**2)
        for n in again:
            self.features[n % self.slots] = self.fine(self.noisy[n])[0, 0]
            self.small[n] = self.coarse(halved(self.noisy[n]))
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
        """For every second pixel of a frame its match in each frame at hand: [1, 1, 1, h, w, frames].

        Motion is searched on frames of half the size, from the frame at this one's place or from the motion before.
        """
        height, width = self.shape[:2]
        device = self.noisy[number].device
        small = self.small[number]
        own = Matches.identity(small.shape[2:-1], device=device)
        row, column = coordinates(own.index.flatten(), own.key_grid)
        large = 2 * row * width + 2 * column  # where each point of the small frame lies on the large one
        moved = {}
        parts = []
        for n in range(number - self.settings.reach, number + self.settings.reach + 1):
            if n not in self.small:
                continue
            match = own
            distance = n - number
            if distance:
                before = self.motion.get(distance)
                search_settings = replace(COLD if before is None else WARM, seed=self.settings.seed + distance)
                match = search(
                    small, self.small[n], search=search_settings, score="l2", warm=own if before is None else before
                )
                moved[distance] = match
            # Every point has a match: no key is masked.
            parts.append(large[match.index.flatten()].reshape(match.index.shape) + n % self.slots * height * width)
        self.motion = moved
        index = torch.cat(parts, -1).unsqueeze(2)
        return Matches(index, torch.zeros(index.shape, dtype=torch.float32, device=device), (self.slots, height, width))
