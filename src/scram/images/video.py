"""Non-local means over several frames: a patch is a mean of patches like it in its own frame and in those around it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from math import exp
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..api import attend, search
from ..types import Matches, Search
from .denoise import _fold, _unfold, check_picture, estimate_noise
from .features import padded
from .pca import principal_axes

REFIT = 32  # frames that share a PCA
COLD = Search(sweeps=4, gossip=2)
WARM = Search(sweeps=1, jumps=(4, 1), gossip=0)


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
        """The defaults for grey or colour."""
        patch, width, strength = (7, 24, 0.95) if channels == 1 else (5, 16, 1.2)
        given = {name: value for name, value in (changed or {}).items() if value is not None}
        return cls(**{"patch": patch, "width": width, "strength": strength, **given})


@dataclass(frozen=True)
class _Basis:
    """A damped PCA of noisy patches: each direction counts by how little of it is noise."""

    kernel: Tensor  # [width, C, p, p]
    offset: Tensor  # [width]
    left: float  # the noise that is left in the features, in units of sigma^2

    @classmethod
    def fit(cls, frame: Tensor, sigma: float, patch: int, width: int) -> _Basis:
        mean, variances, axes = principal_axes(F.unfold(padded(frame, patch), patch, stride=3)[0].T.double())
        width = min(width, len(variances))
        signal = (1 - sigma**2 / variances[-width:].clamp(min=1e-12)).clamp(min=1e-3)
        basis = (axes[:, -width:] * signal.sqrt()).T.float()
        kernel = basis.reshape(width, frame.shape[-1], patch, patch)
        return cls(kernel, -basis @ mean.float(), float(signal.sum()))

    def __call__(self, frame: Tensor) -> Tensor:
        """[H, W, C] -> [1, 1, H, W, width]."""
        whole = padded(frame, self.kernel.shape[-1])
        return F.conv2d(whole, self.kernel, self.offset).movedim(1, -1)[None].contiguous()


@dataclass
class _Frame:
    """A noisy frame, its features to attend with and to find motion with, and its patches."""

    noisy: Tensor
    features: Tensor
    motion: Tensor
    patches: Tensor


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
    """The frames around the one that is denoised, and the motion that leads to them."""

    def __init__(self, settings: Settings, sigma: float, shape: torch.Size) -> None:
        self.settings, self.sigma, self.shape = settings, sigma, shape
        self.window: deque[_Frame] = deque()
        self.motion: dict[int, Matches] = {}  # by distance in frames: of the frame before

    def __call__(self, frames: Iterable[Tensor]) -> Iterator[Tensor]:
        reach, at, number = self.settings.reach, 0, 0  # the window's frame `at` comes next, it is the film's `number`
        for noisy in frames:
            if noisy.shape != self.shape:
                raise ValueError(f"frames must all be {tuple(self.shape)}, got {tuple(noisy.shape)}")
            if not self.window or (number % REFIT == 0 and len(self.window) == at + reach + 1):
                self._fit(noisy)
            self.window.append(self._frame(noisy.float()))
            if len(self.window) > at + reach:
                yield self._denoised(at)
                number += 1
                at, _ = (at + 1, None) if at < reach else (at, self.window.popleft())
        while at < len(self.window):
            yield self._denoised(at)
            at += 1

    def _fit(self, noisy: Tensor) -> None:
        """A new PCA, of the frame that comes; the frames at hand are projected again."""
        patch = self.settings.patch
        self.fine = _Basis.fit(noisy, self.sigma, patch, self.settings.width)
        self.coarse = _Basis.fit(noisy, self.sigma, 2 * patch + 1, 12)
        self.window = deque(self._frame(frame.noisy) for frame in self.window)

    def _frame(self, noisy: Tensor) -> _Frame:
        return _Frame(noisy, self.fine(noisy), self.coarse(noisy), _unfold(noisy, self.settings.patch))

    def _denoised(self, at: int) -> Tensor:
        settings, frames = self.settings, list(self.window)[max(at - self.settings.reach, 0) :]
        at = min(at, settings.reach)
        frames = frames[: at + settings.reach + 1]
        found = self._found(frames, at)
        q = frames[at].features.unsqueeze(2)
        k = torch.stack([frame.features[0, 0] for frame in frames])[None, None]
        v = torch.stack([frame.patches for frame in frames])[None, None]
        scale = 1 / ((settings.strength * self.sigma) ** 2 * self.fine.left)
        radius = (0, settings.radius, settings.radius)
        out, lse = attend(q, k, v, found, radius=radius, scale=scale, score="l2")
        # A patch is at distance 0 of itself, a twin with other noise at 2 sigma^2: give it the weight of a twin.
        twin, total = exp(-2 / settings.strength**2), lse[0, 0, 0].exp().unsqueeze(-1)
        mean = (out[0, 0, 0] * total - (1 - twin) * frames[at].patches) / (total - 1 + twin)
        return _fold(mean, ((total - 1 + twin) / twin).sqrt(), settings.patch, self.shape[-1])

    def _found(self, frames: list[_Frame], at: int) -> Matches:
        """For every pixel of the frame `at` its match in each frame: [1, 1, 1, H, W, frames], keys on their grid."""
        height, width = self.shape[:2]
        device = frames[at].noisy.device
        own = Matches.identity((height, width), device=device)
        moved, parts = {}, []
        for n, frame in enumerate(frames):
            distance, match = n - at, own
            if distance:
                before = self.motion.get(distance)
                how = COLD if before is None else WARM
                how = Search(sweeps=how.sweeps, jumps=how.jumps, gossip=how.gossip, seed=self.settings.seed + distance)
                start = own if before is None else before
                match = search(frames[at].motion, frame.motion, search=how, score="l2", warm=start)
                moved[distance] = match
            parts.append(torch.where(match.index >= 0, match.index + n * height * width, -1))
        self.motion = moved
        index = torch.cat(parts, -1).unsqueeze(2)
        return Matches(index, torch.zeros(index.shape, device=device), (len(frames), height, width))
