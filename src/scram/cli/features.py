"""Photographs: files, and the samples that come with SCRAM and scikit-image."""

from importlib.resources import as_file, files
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from ..images.features import PatchFeatures
from ..images.reading import read
from . import not_installed

__all__ = ["PatchFeatures", "photograph", "read_picture", "sample_pair", "stereo_sample"]


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
