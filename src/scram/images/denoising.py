"""Pictures without noise: collaborative filtering, or the quicker non-local means, by SCRAM with the l2 score."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..functional import attend, search
from ..results import Matches
from ..settings import Search
from .checks import check_finite, check_floats
from .collaborative import collaborative
from .features import padded
from .pca import principal_axes

LEAST_SIDE = 16  # pixels


@dataclass(frozen=True)
class Settings:
    """How to denoise; strength is the bandwidth of the weights in units of the noise."""

    patch: int
    width: int
    strength: float
    matches: int = 2
    radius: int = 5
    sweeps: int = 4
    seed: int = 0

    @classmethod
    def of(cls, channels: int, changed: Mapping[str, Any] | None = None) -> Settings:
        return cls(**suited(channels, changed))


def suited(channels: int, changed: Mapping[str, Any] | None) -> dict[str, Any]:
    """Patch, width and strength for gray (7 x 7) or color (5 x 5, which hold three times the numbers), and changes."""
    patch, width, strength = (7, 24, 0.95) if channels == 1 else (5, 16, 1.2)
    given = {name: value for name, value in (changed or {}).items() if value is not None}
    return {"patch": patch, "width": width, "strength": strength, **given}


def denoise(
    picture: Tensor,
    sigma: float | None = None,
    *,
    fast: bool = False,
    patch: int | None = None,
    strength: float | None = None,
    matches: int | None = None,
    radius: int | None = None,
    seed: int | None = None,
) -> Tensor:
    """Remove white noise from a picture: groups of blocks that look alike are shrunk together, twice.

    Args:
        picture: [H, W, 1] or [H, W, 3], values 0..1.
        sigma: standard deviation of the noise, in the same units; None estimates it.
        fast: non-local means instead, in one pass: every patch becomes a mean of patches that look alike. The other
            arguments are its own.
        patch: side of the patches, odd; 7 for gray, 5 for color.
        strength: bandwidth of the weights in units of the noise; 0.95 for gray, 1.2 for color.
        matches: windows per pixel: its own, and those of its best matches elsewhere; 2.
        radius: of the windows; 5.
        seed: of the search; 0.

    Returns:
        The picture without noise [H, W, C].

    >>> import torch
    >>> noisy = 0.5 + 0.1 * torch.randn(24, 32, 1)
    >>> float((denoise(noisy, 0.1) - 0.5).std() / (noisy - 0.5).std()) < 0.3
    True
    """
    check_picture(picture)
    changed = {"patch": patch, "strength": strength, "matches": matches, "radius": radius, "seed": seed}
    check_fast(fast, changed)
    settings = Settings.of(picture.shape[-1], changed)
    check_size(picture, settings)
    level = estimate_noise(picture) if sigma is None else float(sigma)
    if not 0 < level < float("inf"):
        if sigma is not None:
            raise ValueError(f"sigma must be positive and finite, got {sigma}")
        raise ValueError("the estimated noise is 0: nothing to remove; give a sigma to smooth all the same")
    return denoise_picture(picture.float(), level, settings) if fast else collaborative(picture.float(), level)


def check_fast(fast: bool, changed: Mapping[str, Any], name: str = "fast=True") -> None:
    """Settings of the fast method are for it alone."""
    given = [key for key, value in changed.items() if value is not None]
    if given and not fast:
        raise ValueError(f"{given[0]} is a setting of the fast method; give {name} too, or leave it out")


def check_picture(picture: Tensor) -> None:
    check_floats(picture, (1, 3))
    check_finite(picture)


def check_size(picture: Tensor, settings: Settings) -> None:
    height, width = picture.shape[:2]
    least = max(LEAST_SIDE, 2 * settings.patch)
    if min(height, width) < least:
        raise ValueError(f"a {width} x {height} picture is too small; both sides must be {least} or more")


def estimate_noise(picture: Tensor) -> float:
    """The standard deviation of white noise in `[H, W, C]`, from the median of the finest diagonal details.

    What a picture itself holds at that scale counts as noise too: textures raise the estimate.
    """
    even = picture[: picture.shape[0] // 2 * 2, : picture.shape[1] // 2 * 2]
    a = even[::2, ::2]
    b = even[::2, 1::2]
    c = even[1::2, ::2]
    d = even[1::2, 1::2]
    return float(((a - b - c + d) / 2).abs().median() / 0.6745)


def denoise_picture(noisy: Tensor, sigma: float, settings: Settings) -> Tensor:
    """Non-local means `[H, W, C] -> [H, W, C]`: every patch becomes a mean of patches that look alike.

    Keys and queries are the noisy patches in a PCA of them, each direction damped by how much of it is noise. A query
    attends the window around itself and those around its best matches elsewhere; patches overlap and are averaged.
    """
    basis = Basis.fit(noisy, sigma, settings.patch, settings.width)
    features = basis(noisy)  # [1, 1, H, W, width]
    start = Matches.identity(noisy.shape[:2], device=noisy.device)
    search_settings = Search(
        matches=settings.matches,
        separation=settings.radius,
        sweeps=settings.sweeps,
        jumps=(4, 1),
        propagate="shift",
        gossip=2,
        seed=settings.seed,
    )
    # The start is the query's own place, which nothing beats; the other matches keep their distance from it.
    matches = (
        start if settings.matches == 1 else search(features, features, search=search_settings, score="l2", warm=start)
    )
    values = unfold(noisy, settings.patch)  # [H, W, C * p * p]
    scale = 1 / ((settings.strength * sigma) ** 2 * basis.left)
    out, lse = attend(features, features, values[None, None], matches, radius=settings.radius, scale=scale, score="l2")
    mean, weight = as_a_twin(out[0, 0], lse[0, 0], values, settings.strength)
    return fold(mean, weight, noisy.shape, settings.patch)


@dataclass(frozen=True)
class Basis:
    """A damped PCA of noisy patches: each direction counts by how little of it is noise."""

    kernel: Tensor  # [width, C, p, p]
    offset: Tensor  # [width]
    left: float  # the noise that is left in the features, in units of sigma^2

    @classmethod
    def fit(cls, picture: Tensor, sigma: float, patch: int, width: int) -> Basis:
        """Of every third patch per axis of a picture [H, W, C]."""
        mean, variances, axes = principal_axes(F.unfold(padded(picture, patch), patch, stride=3)[0].T.double())
        width = min(width, len(variances))
        signal = (1 - sigma**2 / variances[-width:].clamp(min=1e-12)).clamp(min=1e-3)
        basis = (axes[:, -width:] * signal.sqrt()).T.float()
        kernel = basis.reshape(width, picture.shape[-1], patch, patch)
        return cls(kernel, -basis @ mean.float(), float(signal.sum()))

    def __call__(self, picture: Tensor) -> Tensor:
        """[H, W, C] -> [1, 1, H, W, width]."""
        whole = padded(picture, self.kernel.shape[-1])
        return F.conv2d(whole, self.kernel, self.offset).movedim(1, -1)[None].contiguous()


def as_a_twin(out: Tensor, lse: Tensor, own: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    """Means in which a patch counts as another one like it would [..., C * p * p], and their weights [..., 1].

    A patch is at distance 0 of itself, a twin with other noise at 2 sigma^2: it is given the weight of a twin.

    Args:
        out, lse: attention [..., C * p * p] over patches, the patch itself among them, and the log of its sum [...].
        own: the patches themselves.
    """
    twin = exp(-2 / strength**2)
    lse = lse.clamp(0, 80).unsqueeze(-1)  # its own weight is 1, but for rounding
    own_share = (1 - twin) * (-lse).exp()  # [..., 1]
    return (out - own_share * own) / (1 - own_share), (lse.exp() * (1 - own_share) / twin).sqrt()


def unfold(picture: Tensor, patch: int) -> Tensor:
    """The patch around every pixel [H, W, C * p * p]."""
    return F.unfold(padded(picture, patch), patch)[0].T.reshape(*picture.shape[:2], -1)


def fold(patches: Tensor, weight: Tensor, shape: torch.Size, patch: int, stride: int = 1) -> Tensor:
    """Patches [h, w, C * p * p] of every stride-th pixel, averaged with their weight [h, w, 1] to [H, W, C]."""
    height, width = shape[:2]
    rim = patch // 2
    size = (height + patch - 1, width + patch - 1)
    total = F.fold((patches * weight).flatten(0, 1).T[None], size, patch, stride=stride)
    weights = F.fold(weight.expand(-1, -1, patch * patch).flatten(0, 1).T[None], size, patch, stride=stride)
    return (total / weights)[0].movedim(0, -1)[rim : rim + height, rim : rim + width]
