"""How good `scram.images.match` and its certainty are: `python benchmarks/matching.py [--large]`.

Pairs with a known truth: scikit-image's stereo pair, and its photographs against their crop, turned by 15 degrees, at
half their size, turned by a quarter. A match is right within 2 px; a pixel whose place lies outside B has none. Times
are CPU seconds of all threads, features included. --large measures a mosaic of 4000 x 3000 pixels and the same moved.
Results: results/matching.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy import ndimage
from store import Store
from torch import Tensor

from scram.cli.features import photograph, stereo_sample
from scram.cli.match import area_under_curve, true_flow
from scram.images.matching import SURE, match
from scram.images.resample import own_places

PHOTOGRAPHS = ("astronaut", "coffee", "chelsea")
SCALES, ROTATIONS = (0.5, 1, 2), (0, 90, 180, 270)


@dataclass(frozen=True)
class Case:
    """Pictures [H, W, 3], the true places in B [H, W, 2], which pixels have one, and which are counted."""

    kind: str
    photo: str
    a: Tensor
    b: Tensor
    truth: Tensor
    there: Tensor
    known: Tensor
    options: dict[str, Any] = field(default_factory=dict)


def turned(a: Tensor, degrees: float, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """The picture about its center, clockwise in (row, column), on a canvas scaled like it; and the true places."""
    size, (c, s) = np.array(a.shape[:2]), (np.cos(np.radians(degrees)), np.sin(np.radians(degrees)))
    canvas = np.ceil(size * scale).astype(int)
    matrix = scale * np.array([[c, -s], [s, c]])
    blurred = ndimage.gaussian_filter(a.numpy(), (*[0.5 * (scale**-2 - 1) ** 0.5] * 2, 0)) if scale < 1 else a.numpy()
    inverse, middle, center = np.linalg.inv(matrix), (size - 1) / 2, (canvas - 1) / 2
    planes = [
        ndimage.affine_transform(plane, inverse, middle - inverse @ center, tuple(canvas), order=3)
        for plane in np.moveaxis(blurred, -1, 0)
    ]
    places = own_places(*a.shape[:2]).numpy()
    truth = (places - middle) @ matrix.T + center
    return torch.from_numpy(np.stack(planes, -1).clip(0, 1)).float(), torch.from_numpy(truth).float()


def inside(truth: Tensor, b: Tensor) -> Tensor:
    return ((truth >= -0.5) & (truth < torch.tensor(b.shape[:2]) - 0.5)).all(-1)


def cases() -> Iterator[Case]:
    a, b, disparity = stereo_sample()
    truth = own_places(*a.shape[:2]) + true_flow(disparity).flip(-1)
    known = truth.isfinite().all(-1)
    yield Case("stereo", "motorcycle", a, b, truth, known, known)
    for name in PHOTOGRAPHS:
        a = photograph(name)
        height, width = a.shape[:2]
        everywhere = torch.ones(height, width, dtype=torch.bool)
        top, left = height // 8, width // 6
        crop = a[top : top + height * 5 // 8, left : left + width * 5 // 8].contiguous()
        truth = own_places(height, width) - torch.tensor([top, left])
        yield Case("crop", name, a, crop, truth, inside(truth, crop), everywhere)
        b, truth = turned(a, 15)
        yield Case("15 degrees", name, a, b, truth, inside(truth, b), everywhere)
        b, truth = turned(a, 0, 0.5)
        yield Case("half size", name, a, b, truth, inside(truth, b), everywhere, {"scales": SCALES})
        own = own_places(height, width)
        truth = torch.stack((width - 1 - own[..., 1], own[..., 0]), -1)
        yield Case("quarter", name, a, a.rot90().contiguous(), truth, everywhere, everywhere, {"rotations": ROTATIONS})


def large() -> Case:
    """A mosaic of photographs, and the same moved by (23, -41)."""
    photos = [photograph(name).expand(-1, -1, 3) for name in ("astronaut", "coffee", "chelsea", "camera", "retina")]
    photos.append(photos[1].flip(1))  # a mirrored one is another picture
    tiles = [
        torch.nn.functional.interpolate(photo.movedim(-1, 0)[None], (1520, 1360), mode="bicubic")[0] for photo in photos
    ]
    rows = [torch.cat(tiles[:3], 2), torch.cat(tiles[3:], 2)]
    mosaic = torch.cat(rows, 1).movedim(0, -1).clamp(0, 1)
    a, b = mosaic[:3000, 41:4041].contiguous(), mosaic[23:3023, :4000].contiguous()
    truth = own_places(3000, 4000) + torch.tensor([-23.0, 41.0])
    there = inside(truth, b)
    return Case("4000 x 3000", "mosaic", a, b, truth, there, torch.ones_like(there))


def measured(case: Case) -> dict[str, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    found = match(case.a, case.b, **case.options)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    error = torch.where(case.there, (found.warp.flip(-1) - case.truth).norm(dim=-1).nan_to_num(torch.inf), torch.inf)
    hit, sure = (error <= 2)[case.known], found.certainty[case.known]
    return {
        "kind": case.kind,
        "photo": case.photo,
        "grid": list(case.a.shape[:2]),
        "median_error_px": float(error[case.there].median()),
        "within_2px": float((error[case.there] <= 2).float().mean()),
        "within_3px": float((error[case.there] <= 3).float().mean()),
        "certainty_auc": area_under_curve(sure, hit),
        "right_of_sure": float(hit[sure >= SURE].float().mean()),
        "sure_of_right": float((sure[hit] >= SURE).float().mean()),
        "cpu_seconds": cpu,
        "wall_seconds": wall,
    }


def main(with_large: bool) -> None:
    store = Store("matching")
    a, b, _ = stereo_sample()
    match(a[:100, :100], b[:100, :100])  # compiles
    for case in [large()] if with_large else cases():
        row = measured(case)
        print({name: round(x, 3) if isinstance(x, float) else x for name, x in row.items()}, flush=True)
        store.put(f"{case.kind}, {case.photo}", **row)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="4000 x 3000 pixels alone; takes 6 GB")
    main(parser.parse_args().large)
