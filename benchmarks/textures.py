"""Textures and scenes told apart: `python benchmarks/textures.py FOLDER` stores results/textures.json.

FOLDER holds Debian's packages extremetuxracer-data, lomiri-wallpapers-16.04, gimp-data and mate-backgrounds, unpacked
into it (`dpkg-deb -x`). The limit of `scram.images.generation` was chosen on the first two and on scikit-image's
photographs. The last two and scikit-learn's photographs were measured once, after that; what they are called (texture
or scene) was written down before.
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import skimage.data
import sklearn.datasets
import torch
from PIL import Image
from store import Store
from torch import Tensor

from scram.images.generation import MOST_UNEVEN, unevenness

CHOSEN_SCENES = ("astronaut", "camera", "chelsea", "coffee", "rocket", "retina", "moon")
CHOSEN_TEXTURES = ("brick", "grass", "gravel", "coins", "hubble_deep_field", "immunohistochemistry")
# Of GIMP's patterns those that photographs are, 64 pixels at least.
PATTERNS = ("Animal", "Fabric", "Food", "Plant", "Stone", "Water", "Wood")
NATURE = ("Garden", "Dune", "Aqua", "TwoWings", "Storm", "FreshFlower", "LadyBird", "YellowFlower", "RainDrops")
NATURE_TEXTURES = ("GreenMeadow", "Wood", "Blinds")
LONGER = 512


def opened(path: Path) -> Tensor:
    """A file [H, W, C] in 0..1, at most 512 pixels long."""
    if path.suffix == ".pat":
        data = path.read_bytes()
        header, _, width, height, channels, magic = struct.unpack(">5I4s", data[:24])
        if magic != b"GPAT":
            raise ValueError(f"{path}: no pattern of GIMP")
        pixels = np.frombuffer(data, np.uint8, width * height * channels, header).reshape(height, width, channels)
        return torch.from_numpy(pixels.astype(np.float32) / 255)
    image = Image.open(path).convert("RGB")
    image.thumbnail((LONGER, LONGER))
    return torch.from_numpy(np.asarray(image, np.float32) / 255)


def pictures(folder: Path) -> Iterator[tuple[str, str, str, Tensor]]:
    """Part (chosen or report), kind (texture or scene), name, picture."""
    share = folder / "usr/share"
    for kind, names in (("scene", CHOSEN_SCENES), ("texture", CHOSEN_TEXTURES)):
        for name in names:
            pixels = np.atleast_3d(getattr(skimage.data, name)()).astype(np.float32) / 255
            yield "chosen", kind, name, torch.from_numpy(pixels)
    for path in sorted((share / "games/etr/terrains").glob("*.png")):
        yield "chosen", "texture", path.stem, opened(path)
    for path in sorted((share / "backgrounds").glob("*.jpg")):
        yield "chosen", "scene", path.stem.split("_by_")[0], opened(path)
    for part in PATTERNS:
        for path in sorted((share / "gimp/2.0/patterns" / part).glob("*.pat")):
            yield "report", "texture", path.stem, opened(path)
    for kind, names in (("scene", NATURE), ("texture", NATURE_TEXTURES)):
        for name in names:
            yield "report", kind, name, opened(share / "backgrounds/mate/nature" / f"{name}.jpg")
    for name in ("china.jpg", "flower.jpg"):
        pixels = sklearn.datasets.load_sample_image(name).astype(np.float32) / 255
        yield "report", "scene", name.removesuffix(".jpg"), torch.from_numpy(pixels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--store", default="textures")
    given = parser.parse_args()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for part, kind, name, picture in pictures(given.folder):
        value = unevenness(picture)
        if value is not None:
            found.setdefault(part, {}).setdefault(kind, {})[name] = value
    for part, kinds in found.items():
        wrong = {
            kind: [name for name, value in rows.items() if (value > MOST_UNEVEN) != (kind == "scene")]
            for kind, rows in kinds.items()
        }
        print(part, {kind: f"{len(rows) - len(wrong[kind])} of {len(rows)}" for kind, rows in kinds.items()}, wrong)
        Store(given.store).put(part, limit=MOST_UNEVEN, unevenness=kinds, wrong=wrong)


if __name__ == "__main__":
    main()
