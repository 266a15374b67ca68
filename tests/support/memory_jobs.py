"""What picture tools hold at most, beside what their commands expect. As a program: the ratios of both."""

import json
from collections.abc import Callable

import torch
from torch import Tensor

from scram import images
from scram.cli import memory
from scram.cli.arguments import MATCH_WIDTH
from scram.images.synthesis import Settings
from scram.quality.timing import memory_status, reset_peak

NAMES = ("denoise", "inpaint", "generate", "match")


def job(name: str, picture: Tensor) -> tuple[Callable[[], object], int]:
    """A call on a picture [H, W, 3], and the bytes that its command expects of it."""
    pixels = picture.shape[0] * picture.shape[1]
    settings = Settings(iterations=1)
    if name == "denoise":
        return lambda: images.denoise(picture, 0.1), pixels * memory.of_blocks(3)
    if name == "match":
        return lambda: images.match(picture, picture), 2 * pixels * memory.of_matches(MATCH_WIDTH)
    if name == "inpaint":
        hole = torch.zeros(picture.shape[:2], dtype=torch.bool)
        hole[20:-20, 20:-20] = True
        hole_pixels = int(hole.sum())
        return lambda: images.inpaint(picture, hole, settings), memory.of_hole(pixels, hole_pixels, 3, settings.patch)
    size = (picture.shape[0], picture.shape[1] + 16)
    expected = (pixels + size[0] * size[1]) * memory.of_patches(3, settings.patch)
    return lambda: images.generate(picture, size, settings, scenes=True), expected


def ratio(name: str) -> float:
    """Growth of the estimate to that of the peak, between two sizes: what does not grow with pixels is left out."""
    peaks, estimates = [], []
    for side in (96, 96, 224):  # the first compiles
        picture = torch.rand(side, side, 3, generator=torch.Generator().manual_seed(0))
        work, estimate = job(name, picture)
        before = reset_peak("cpu")
        work()
        peaks.append((memory_status("VmHWM") or 0) - before)
        estimates.append(estimate)
    return (estimates[2] - estimates[1]) / (peaks[2] - peaks[1])


if __name__ == "__main__":
    print(json.dumps({name: ratio(name) for name in NAMES}))
