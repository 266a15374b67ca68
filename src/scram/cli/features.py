"""Photographs, and photograph -> dense patch features: RGB patches, projected by a PCA, unit norm."""

from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..images.reading import read
from . import not_installed
from .pca import principal_axes


def read_picture(path: Path, height: int | None = None) -> Tensor:
    """Read a picture as RGB in 0..1 `[H, W, 3]`, upright, resized to `height` with its aspect kept."""
    return read(path, height).rgb


def sample_pair(height: int | None = None) -> tuple[Tensor, Tensor]:
    """The two photographs that come with SCRAM, frames of a camera pan."""
    with as_file(files(__package__) / "data") as folder:
        a, b = (read_picture(folder / f"city_{name}.jpg", height) for name in "ab")
    return a, b


def stereo_sample() -> tuple[Tensor, Tensor, Tensor]:
    """scikit-image's stereo pair `[500, 741, 3]` and the disparities `[500, 741]` of its left view."""
    left, right, disparity = scikit_image_data().stereo_motorcycle()
    a, b = (torch.from_numpy(view.astype(np.float32) / 255) for view in (left, right))
    return a, b, torch.from_numpy(disparity.astype(np.float32))


def photograph(name: str) -> Tensor:
    """A photograph that comes with scikit-image, in 0..1 `[H, W, 1]` or `[H, W, 3]`."""
    return torch.from_numpy(np.atleast_3d(getattr(scikit_image_data(), name)()).astype(np.float32) / 255)


def scikit_image_data() -> ModuleType:
    """`skimage.data`, or one line that says how to get it."""
    try:
        import skimage.data
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(not_installed("scikit-image", "cli", "bench")) from error
    return skimage.data


@dataclass(frozen=True)
class PatchFeatures:
    """A PCA of p x p RGB patches; call it with a picture `[H, W, 3]` to get features `[1, 1, H, W, width]`.

    >>> picture = torch.rand(16, 20, 3)
    >>> features = PatchFeatures.fit(picture, width=8, patch=5)
    >>> features(picture).shape
    torch.Size([1, 1, 16, 20, 8])
    """

    mean: Tensor  # [3 * p * p]
    basis: Tensor  # [width, 3 * p * p], rows orthonormal
    patch: int

    @classmethod
    def fit(cls, reference: Tensor, width: int = 32, patch: int = 7, stride: int = 5) -> "PatchFeatures":
        """Fit on every `stride`-th patch per axis of the reference picture `[H, W, 3]`."""
        if patch < 1 or patch % 2 == 0:
            raise ValueError(f"patch must be odd and positive, got {patch}")
        if not 1 <= width <= 3 * patch * patch:
            raise ValueError(f"width must be 1..{3 * patch * patch} for {patch} x {patch} RGB patches, got {width}")
        patches = F.unfold(padded(reference, patch), patch, stride=stride)[0].T.double()
        mean, _, axes = principal_axes(patches)
        return cls(mean.float(), axes[:, -width:].T.flip(0).float(), patch)

    def __call__(self, picture: Tensor) -> Tensor:
        """The features of every pixel, unit norm `[1, 1, H, W, width]`."""
        # A convolution with the basis is the projection of every patch, without writing the patches out.
        kernel = self.basis.reshape(-1, 3, self.patch, self.patch)
        projected = F.conv2d(padded(picture, self.patch), kernel, -self.basis @ self.mean)
        return F.normalize(projected.movedim(1, -1), dim=-1)[None].contiguous()


def padded(picture: Tensor, patch: int) -> Tensor:
    """Reflect the borders so that every pixel has a whole patch: `[H, W, C] -> [1, C, H + p - 1, W + p - 1]`."""
    if min(picture.shape[:2]) <= patch // 2:
        height, width = picture.shape[:2]
        raise ValueError(f"a {width} x {height} picture is too small for {patch} x {patch} patches")
    return F.pad(picture.movedim(-1, 0)[None], [patch // 2] * 4, mode="reflect")


def plain_share(picture: Tensor, patch: int) -> float:
    """The share of pixels `[H, W, 3]` whose patch is all one colour: nothing tells them apart."""
    x = padded(picture, patch)
    same = (F.max_pool2d(x, patch, 1) == -F.max_pool2d(-x, patch, 1)).all(1)
    return float(same.float().mean())
