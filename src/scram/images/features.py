"""Picture -> dense patch features: RGB patches, projected by a PCA, unit norm."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from .pca import principal_axes

STRIP = 256  # lines


@dataclass(frozen=True)
class PatchFeatures:
    """A PCA of p x p RGB patches; call it with a picture `[H, W, 3]` to get features `[1, 1, H, W, width]`.

    >>> import torch
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
        kernel = self.basis.reshape(-1, 3, self.patch, self.patch)  # [width, 3, p, p]
        whole = padded(picture, self.patch)  # [1, 3, H + p - 1, W + p - 1]
        offset = -self.basis @ self.mean  # [width]
        out = picture.new_empty(1, 1, *picture.shape[:2], len(kernel))  # [1, 1, H, W, width]
        for top in range(0, len(picture), STRIP):  # strip by strip: large pictures need no second copy
            strip = whole[:, :, top : top + STRIP + self.patch - 1]  # [1, 3, lines + p - 1, W + p - 1]
            out[:, 0, top : top + STRIP] = F.normalize(F.conv2d(strip, kernel, offset), dim=1).movedim(1, -1)
        return out


def padded(picture: Tensor, patch: int) -> Tensor:
    """Reflect the borders so that every pixel has a whole patch: `[H, W, C] -> [1, C, H + p - 1, W + p - 1]`."""
    if min(picture.shape[:2]) <= patch // 2:
        height, width = picture.shape[:2]
        raise ValueError(f"a {width} x {height} picture is too small for {patch} x {patch} patches")
    return F.pad(picture.movedim(-1, 0)[None], [patch // 2] * 4, mode="reflect")


def plain_share(picture: Tensor, patch: int) -> float:
    """The share of pixels `[H, W, 3]` whose patch is all one color: nothing tells them apart."""
    x = padded(picture, patch)  # [1, 3, H + p - 1, W + p - 1]
    same = (F.max_pool2d(x, patch, 1) == -F.max_pool2d(-x, patch, 1)).all(1)
    return float(same.float().mean())
