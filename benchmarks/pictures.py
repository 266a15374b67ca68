"""Seconds of each function of `scram.images` on a device, after one call that compiles.

    python benchmarks/pictures.py --store pictures_gpu

Inpainting is told with its PSNR inside the hole, denoising with that of the picture: a fast wrong answer would show.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import skimage.data
import torch
import torch.nn.functional as F
from store import Store
from torch import Tensor

from scram import images
from scram.images.video import denoise_frames

Row = tuple[Callable[[], Any], Callable[[Any], dict[str, float]]]


def photograph(name: str, height: int, width: int, device: str) -> Tensor:
    """One of scikit-image's photographs [height, width, 3] in 0..1, resized."""
    picture = torch.from_numpy(np.array(getattr(skimage.data, name)())).to(device).float() / 255
    return F.interpolate(picture.movedim(-1, 0)[None], (height, width), mode="area")[0].movedim(0, -1).contiguous()


def blocks(side: int, device: str) -> Tensor:
    """Four holes of 64 x 64."""
    hole = torch.zeros(side, side, dtype=torch.bool, device=device)
    for top, left in ((60, 70), (90, 330), (300, 120), (370, 380)):
        hole[top : top + 64, left : left + 64] = True
    return hole


def blobs(side: int, device: str) -> Tensor:
    """A fifth of the area, in smooth shapes."""
    rough = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    smooth = F.interpolate(rough, (side, side), mode="bicubic")[0, 0].to(device)
    return smooth > smooth.flatten().sort().values[int(0.8 * side * side)]


def psnr(x: Tensor, y: Tensor) -> float:
    return -10 * float((x - y).square().mean().log10())


def rows(device: str) -> dict[str, Row]:
    """What is timed, and what is told of the result."""
    large = photograph("astronaut", 1024, 1024, device)
    made: dict[str, Row] = {}
    for name, shape in (("blocks", blocks), ("large", blobs)):
        picture, hole = photograph("astronaut", 512, 512, device), shape(512, device)
        made[f"inpaint 512x512, {name}"] = (
            lambda picture=picture, hole=hole: images.inpaint(picture, hole),
            lambda out, picture=picture, hole=hole: {"psnr_db": psnr(out[hole], picture[hole])},
        )
    made["generate 1024x1024"] = lambda: images.generate(large, scenes=True), lambda out: {}
    made["retarget 1024x1024 to 1024x720"] = lambda: images.retarget(large, (1024, 720)), lambda out: {}
    a, b = (photograph("coffee", 3000, 4000, device).roll(x, 1) for x in (0, 40))
    moved = torch.tensor([40.0, 0.0], device=device)
    made["match 4000x3000"] = (
        lambda: images.match(a, b),
        lambda found: {"right": float(((found.flow - moved).norm(dim=-1) < 2).float().mean())},
    )
    noisy = large + 25 / 255 * torch.randn(large.shape, generator=torch.Generator().manual_seed(0)).to(device)
    for name, fast in (("denoise 1024x1024", False), ("denoise 1024x1024, fast", True)):
        made[name] = (
            lambda fast=fast: images.denoise(noisy, 25 / 255, fast=fast),
            lambda out: {"psnr_db": psnr(out, large)},
        )
    frames = [noisy[:272, n : n + 640] for n in range(12)]
    for name, fast in (("denoise a film", False), ("denoise a film, fast", True)):
        made[f"{name}, 12 frames 640x272"] = (
            lambda fast=fast: list(denoise_frames(frames, 25 / 255, fast=fast)),
            lambda out: {"psnr_db": psnr(out[6], large[:272, 6:646])},
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--only", help="names that begin so")
    parser.add_argument("--store", help="name of the stored file")
    parser.add_argument("--commit", help="what is measured, where git cannot be asked")
    options = parser.parse_args()
    for name, (run, told) in rows(options.device).items():
        if options.only and not name.startswith(options.only):
            continue
        times = []
        for _ in range(1 + options.calls):
            start = time.perf_counter()
            out = run()
            if options.device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        row = {"seconds": statistics.median(times[1:]), "first": times[0], **told(out)}
        if options.store:
            Store(options.store).put(name, options.commit, **row)
        print(name, {key: round(value, 3) for key, value in row.items()}, flush=True)


if __name__ == "__main__":
    main()
