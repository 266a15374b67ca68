"""Denoising of photographs beside BM3D: `python benchmarks/denoising.py FOLDER`. Results: results/denoising.json.

FOLDER holds the photographs of Debian's package lomiri-wallpapers-16.04 (usr/share/backgrounds). The twelve below were
named before anything was measured on them; settings were chosen on parts of others (docs/denoise.md). Each is made
smaller by means of areas, the longer side 320 pixels. White noise of 15, 25 and 50 of 255 is added and not cut.
BM3D is PyPI's bm3d with its standard profile, in color `bm3d_rgb`; scikit-image's `denoise_nl_means` runs in its fast
mode with the h of its manual, OpenCV's with 0.8 of the noise. One thread; times are CPU seconds. A first call of each
is not counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from store import Store
from torch import Tensor

from scram.cli.pictures import psnr
from scram.cli.provenance import commit
from scram.images import denoise
from scram.images.reading import read

DEBIAN = (
    "Bridge_by_Sander_Klootwijk",
    "Dragonfly_by_Bolly",
    "Wine_by_Jakkub_Mede",
    "aitzgorri_by_Aitzol_Berasategi",
    "friends_by_Aitzol_Berasategi",
    "greentock_by_Peter_Nerlich",
    "life_by_Aitzol_Berasategi",
    "picosdeeuropa_by_Aitzol_Berasategi",
    "sunset_by_Aitzol_Berasategi",
    "umang_by_Abhishek_Mudgal",
)
SCIKIT_IMAGE = ("chelsea", "rocket")
LONGER = 320
SIGMAS = (15, 25, 50)


def photograph(folder: Path, file: str) -> Tensor:
    """[H, W, 3] in 0..1."""
    import skimage.data

    if file in SCIKIT_IMAGE:
        return smaller(torch.from_numpy(np.array(getattr(skimage.data, file)())).float() / 255)
    return smaller(read(folder / f"{file}.jpg").pixels)


def smaller(picture: Tensor) -> Tensor:
    factor = LONGER / max(picture.shape[:2])
    size = [round(n * factor) for n in picture.shape[:2]]
    return F.interpolate(picture.movedim(-1, 0)[None], size, mode="area")[0].movedim(0, -1).contiguous()


def bm3d(noisy: Tensor, sigma: float) -> Tensor:
    import bm3d

    profile = bm3d.BM3DProfile()
    profile.num_threads = 1
    return torch.from_numpy(bm3d.bm3d_rgb(noisy.double().numpy(), sigma, profile)).float()


def scikit_image(noisy: Tensor, sigma: float) -> Tensor:
    from skimage.restoration import denoise_nl_means

    how = {"patch_size": 5, "patch_distance": 6, "h": 0.6 * sigma, "sigma": sigma, "fast_mode": True}
    return torch.from_numpy(np.asarray(denoise_nl_means(noisy.numpy(), channel_axis=-1, **how))).float()


def opencv(noisy: Tensor, sigma: float) -> Tensor:
    import cv2

    cv2.setNumThreads(1)
    eight = (noisy.clamp(0, 1) * 255).round().byte().numpy()
    h = 0.8 * 255 * sigma
    return torch.from_numpy(cv2.fastNlMeansDenoisingColored(eight, None, h, h, 7, 21)).float() / 255


WAYS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "SCRAM": denoise,
    "SCRAM, fast": lambda noisy, sigma: denoise(noisy, sigma, fast=True),
    "BM3D": bm3d,
    "scikit-image": scikit_image,
    "OpenCV": opencv,
}


def main(folder: Path, only: list[str], ways: list[str]) -> None:
    from skimage.metrics import structural_similarity

    torch.set_num_threads(1)
    store = Store("denoising")
    for way in ways:
        WAYS[way](torch.rand(64, 64, 3), 0.1)
    for n, file in enumerate((*DEBIAN, *SCIKIT_IMAGE)):
        name = file.split("_by_")[0]
        if only and name not in only:
            continue
        picture = photograph(folder, file)
        before = store.data.get(name, {})
        row: dict[str, dict[str, dict[str, float]]] = before.get("results", {})
        for sigma in SIGMAS:
            drawn = np.random.default_rng(n).normal(0, sigma / 255, tuple(picture.shape))
            noisy = picture + torch.from_numpy(drawn.astype(np.float32))
            found = row.setdefault(str(sigma), {})
            for way in ways:
                start = time.process_time()
                clean = WAYS[way](noisy, sigma / 255)
                seconds = time.process_time() - start
                ssim = structural_similarity(picture.numpy(), clean.numpy(), data_range=1, channel_axis=-1)
                found[way] = {"psnr_db": psnr(clean, picture), "ssim": float(ssim), "cpu_seconds": seconds}
            print(name, sigma, {way: round(x["psnr_db"], 2) for way, x in found.items()}, flush=True)
        stamp = {"commit": commit(), "date": date.today().isoformat()}
        measured = {**before.get("measured", {}), **dict.fromkeys(ways, stamp)}
        store.put(name, size=list(picture.shape[:2]), results=row, measured=measured)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="names of photographs; all")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS, help="measured; others stay as stored")
    given = parser.parse_args()
    main(given.folder, given.only, given.ways)
