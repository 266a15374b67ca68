"""Inpainting beside OpenCV, scikit-image and PyPatchMatch: PSNR and SSIM inside holes of three kinds, with the time.

`python benchmarks/inpaint.py --size 384` stores a row for each kind of hole. With `--photographs` it measures these and
keeps the others' figures, if they are of the same commit; with `--methods` it keeps those of the other methods.
Needs the extra `bench`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import skimage.data
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from skimage.metrics import structural_similarity
from skimage.restoration import inpaint_biharmonic
from store import Store

from scram.cli.provenance import commit
from scram.images import inpaint

PHOTOGRAPHS = (
    "astronaut",
    "camera",
    "chelsea",
    "coffee",
    "rocket",
    "retina",
    "hubble_deep_field",
    "immunohistochemistry",
    "moon",
    "motorcycle",
    "brick",
    "grass",
    "gravel",
    "coins",
)
KINDS = ("thin", "blocks", "large")
TEXT = "sphinx of black quartz, judge my vow"
Bytes = NDArray[np.uint8]
Mask = NDArray[np.bool_]


def photograph(name: str, size: int) -> Bytes:
    """The square in the middle of one of scikit-image's photographs, resized [size, size, C]."""
    array = skimage.data.stereo_motorcycle()[0] if name == "motorcycle" else getattr(skimage.data, name)()
    image = Image.fromarray(array)
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = image.crop((left, top, left + side, top + side)).resize((size, size), Image.Resampling.LANCZOS)
    return np.atleast_3d(np.asarray(square))


def hole(kind: str, size: int, seed: int) -> Mask:
    """Lines of text and scratches; four blocks of 64 x 64; or smooth blobs on 15 to 25 % of the area [size, size]."""
    import cv2

    drawn = np.random.default_rng(seed)
    image = Image.new("L", (size, size))
    draw = ImageDraw.Draw(image)
    if kind == "thin":
        font = ImageFont.load_default(size=size // 16)
        for line, top in enumerate(range(size // 20, size - size // 16, size // 8)):
            draw.text((int(drawn.integers(0, size // 8)), top), TEXT[line:], fill=255, font=font)
        for _ in range(4):
            draw.line(drawn.integers(0, size, 4).tolist(), fill=255, width=3)
    elif kind == "blocks":
        for _ in range(4):
            left, top = drawn.integers(0, size - 64, 2).tolist()
            draw.rectangle((left, top, left + 63, top + 63), fill=255)
    else:
        blobs = cv2.GaussianBlur(drawn.normal(size=(size, size)), (0, 0), size / 14)
        return np.asarray(blobs > np.quantile(blobs, 1 - drawn.uniform(0.15, 0.25)))
    return np.asarray(image) > 127


def _scram(picture: Bytes, mask: Mask) -> NDArray[Any]:
    torch_picture = torch.from_numpy(picture.astype(np.float32) / 255)
    return inpaint(torch_picture, torch.from_numpy(mask)).clamp(0, 1).numpy()


def _opencv(method: str) -> Callable[[Bytes, Mask], NDArray[Any]]:
    def run(picture: Bytes, mask: Mask) -> NDArray[Any]:
        import cv2

        given = picture if picture.shape[-1] > 1 else picture[..., 0]
        return np.atleast_3d(cv2.inpaint(given, mask.astype(np.uint8) * 255, 5, getattr(cv2, method))) / 255

    return run


def _biharmonic(picture: Bytes, mask: Mask) -> NDArray[Any]:
    return np.asarray(inpaint_biharmonic(picture / 255, mask, channel_axis=-1))


def _patchmatch(picture: Bytes, mask: Mask) -> NDArray[Any]:
    from patchmatch import patch_match

    colors = np.ascontiguousarray(np.repeat(picture, 3 // picture.shape[-1], -1))
    return patch_match.inpaint(colors, mask.astype(np.uint8) * 255)[..., : picture.shape[-1]] / 255


def methods(kind: str) -> dict[str, Callable[[Bytes, Mask], NDArray[Any]]]:
    """What is compared on that kind of hole."""
    shared = {"SCRAM": _scram, "Telea": _opencv("INPAINT_TELEA"), "Navier-Stokes": _opencv("INPAINT_NS")}
    return {**shared, **({"biharmonic": _biharmonic} if kind == "thin" else {"PyPatchMatch": _patchmatch})}


def measures(result: NDArray[Any], truth: NDArray[Any], mask: Mask) -> tuple[float, float]:
    """PSNR of the pixels in the hole, and the mean there of the SSIM's map."""
    psnr = -10 * np.log10(max(float(((result - truth)[mask] ** 2).mean()), 1e-12))
    every = structural_similarity(result, truth, data_range=1, channel_axis=-1, full=True)[1]
    return psnr, float(every.mean(-1)[mask].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=384)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--photographs", default=",".join(PHOTOGRAPHS))
    parser.add_argument("--methods", default="SCRAM,Telea,Navier-Stokes,biharmonic,PyPatchMatch")
    parser.add_argument("--store", default="inpaint")
    parser.add_argument("--keep", help="folder for the pictures")
    given = parser.parse_args()
    store, names = Store(given.store), given.photographs.split(",")
    _scram(photograph("camera", 64), hole("thin", 64, 0))  # compiles
    for kind in given.kinds.split(","):
        old = store.data.get(kind, {})
        kept = old["rows"] if old and old["size"] == given.size else {}
        run = {name: method for name, method in methods(kind).items() if name in given.methods.split(",")}
        again = run if old.get("commit") != commit() else {}
        rows: dict[str, dict[str, Any]] = {name: {} if name in again else kept.get(name, {}) for name in methods(kind)}
        for photo in names:
            picture, mask = photograph(photo, given.size), hole(kind, given.size, PHOTOGRAPHS.index(photo))
            hidden = np.where(mask[..., None], 0, picture).astype(np.uint8)
            for name, method in run.items():
                start, cpu = time.perf_counter(), time.process_time()
                result = method(hidden, mask)
                seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
                psnr, ssim = measures(result, picture / 255, mask)
                rows[name][photo] = {"psnr_db": psnr, "ssim": ssim, "seconds": seconds, "cpu_seconds": cpu}
                if given.keep:
                    eight = (result * 255).round().astype(np.uint8)
                    Image.fromarray(eight.squeeze()).save(f"{given.keep}/{kind}-{photo}-{name}.png")
            means = {
                name: {key: float(np.mean([row[key] for row in per.values()])) for key in next(iter(per.values()))}
                for name, per in rows.items()
                if per
            }
            store.put(kind, size=given.size, photographs=list(rows["SCRAM"]), means=means, rows=rows)
        for name, mean in means.items():
            print(kind, name, " ".join(f"{key} {value:.3f}" for key, value in mean.items()), flush=True)


if __name__ == "__main__":
    main()
