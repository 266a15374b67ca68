"""What the functions on pictures take, checked in one place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

MOST_PIXELS = 2**25  # of a picture that is made of patches: each of them takes some 600 bytes


def check_floats(picture: Any, channels: Sequence[int] = (), name: str = "picture") -> None:
    """A tensor of floats [H, W, C] that is not empty, with one of those numbers of channels, or any."""
    wanted = " or ".join(f"[H, W, {count}]" for count in channels or ("C",))
    if not isinstance(picture, Tensor):
        raise ValueError(f"{name} must be a tensor of floats {wanted} with values 0..1, got {type(picture).__name__}")
    fits = picture.ndim == 3 and picture.numel() and (not channels or picture.shape[-1] in channels)
    if not fits or not picture.is_floating_point():
        got = f"{picture.dtype} {tuple(picture.shape)}"
        raise ValueError(f"{name} must be a tensor of floats {wanted} with values 0..1, got {got}")


def check_finite(picture: Tensor, name: str = "picture") -> None:
    """No NaN, no infinity."""
    if bad := int((~picture.isfinite()).sum()):
        raise ValueError(f"{name} must be finite, {bad} of its {picture.numel()} values are not")


def check_extents(size: Any, name: str = "size") -> tuple[int, int]:
    """(height, width), whole numbers, of a picture that fits into memory."""
    whole = isinstance(size, Sequence) and len(size) == 2 and all(type(extent) is int for extent in size)
    if not whole or min(size) < 1:
        raise ValueError(f"{name} must be (height, width), whole numbers of pixels, got {size!r}")
    if size[0] * size[1] > MOST_PIXELS:
        raise ValueError(f"{name} must be {MOST_PIXELS} pixels at most, got {size[1]} x {size[0]}")
    return size[0], size[1]


def widened(picture: Tensor) -> Tensor:
    """The picture in float32 at least."""
    return picture.float() if picture.dtype.itemsize < 4 else picture
