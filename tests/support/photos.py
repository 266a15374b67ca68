"""Features of the photographs that come with scikit-image: RGB patches, projected by a PCA, unit norm.

A test that wants one is skipped where scikit-image is not installed.
"""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


@cache
def patches(name: str, size: int, patch: int = 5, width: int = 16) -> Tensor:
    """[1, 1, size, size, width] of a photo shrunk to size x size; [2, 1, ..] for the two views of the stereo pair."""
    data = pytest.importorskip("skimage.data")
    views = data.stereo_motorcycle()[:2] if name == "stereo_motorcycle" else (getattr(data, name)(),)
    pictures = torch.stack([torch.from_numpy(view.copy()) for view in views]).movedim(-1, 1).double() / 255
    pictures = F.interpolate(pictures, (size, size), mode="area")
    columns = F.unfold(F.pad(pictures, [patch // 2] * 4, mode="reflect"), patch).movedim(1, -1)
    mean = columns[0].mean(0)
    # eigh sorts ascending; the sign of a vector is free and the same for queries and keys.
    basis = torch.linalg.eigh((columns[0] - mean).T @ (columns[0] - mean)).eigenvectors[:, -width:]
    return F.normalize((columns - mean) @ basis, dim=-1).float().reshape(len(views), 1, size, size, width)


def stereo(size: int) -> tuple[Tensor, Tensor]:
    """Queries of the left view, keys of the right."""
    both = patches("stereo_motorcycle", size)
    return both[:1], both[1:]


def projected(name: str, size: int, width: int = 16) -> tuple[Tensor, Tensor]:
    """One photo through random Wq and Wk: many queries share few keys, as in attention."""
    generator = torch.Generator().manual_seed(0)
    w_q, w_k = torch.randn(2, width, width, generator=generator) / width**0.5
    x = patches(name, size)
    return x @ w_q, x @ w_k
