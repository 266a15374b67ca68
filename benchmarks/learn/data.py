"""CIFAR-10 and MNIST in one file that travels, and pictures made of them."""

from __future__ import annotations

import bz2
import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from train import differences, sums

BITS = 5  # of each color of CIFAR-10 that are kept
TESTS = 10_000  # pictures of each set that are not trained on


@dataclass(frozen=True)
class Set:
    """Pictures [n, height, width, colors] in uint8, and their classes [n]; training ones and test ones."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor

    def to(self, device: torch.device | str) -> Set:
        return Set(*(x.to(device) for x in (self.x, self.y, self.test_x, self.test_y)))

    def first(self, count: int | None) -> Set:
        """The same with fewer training pictures."""
        return self if count is None else Set(self.x[:count], self.y[:count], self.test_x, self.test_y)

    def halved(self) -> Set:
        """Pictures of half the side, each pixel the mean of four."""

        def smaller(x: Tensor) -> Tensor:
            n, height, width, colors = x.shape
            return x.view(n, height // 2, 2, width // 2, 2, colors).float().mean((2, 4)).byte()

        return Set(smaller(self.x), self.y, smaller(self.test_x), self.test_y)

    def shuffled(self) -> Set:
        """Pixels in another order, the same for all pictures: no neighbors are left."""
        _, height, width, colors = self.x.shape
        order = torch.randperm(height * width, generator=torch.Generator().manual_seed(0)).to(self.x.device)

        def moved(x: Tensor) -> Tensor:
            return x.reshape(len(x), -1, colors)[:, order].reshape(x.shape)

        return Set(moved(self.x), self.y, moved(self.test_x), self.test_y)


def prepare(cifar: Path, mnist: Path, folder: Path, train: int | None = None, test: int = TESTS) -> None:
    """Pack both sets, CIFAR-10 with the high bits of each color: all of them, or so many pictures of each part."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    names = [f"data_batch_{n}.png" for n in range(1, 6)] + ["test_batch.png"]
    pictures = np.concatenate([np.asarray(Image.open(cifar / name)).reshape(-1, 32, 32, 3) for name in names])
    labels = [json.loads((cifar / f"{name}_lables.json").read_text()) for name in ("train", "test")]
    packed = {"cifar_x": pictures >> (8 - BITS), "cifar_y": np.concatenate(labels).astype(np.uint8)}
    parts = ("train", "t10k")
    packed["mnist_x"] = np.concatenate([_idx(mnist / f"{part}-images-idx3-ubyte") for part in parts])
    packed["mnist_y"] = np.concatenate([_idx(mnist / f"{part}-labels-idx1-ubyte") for part in parts])
    packed = {name: np.concatenate([x[:-TESTS][:train], x[-TESTS:][:test]]) for name, x in packed.items()}
    packed["cifar_x"] = differences(packed["cifar_x"])
    packed["tests"] = np.array([test], np.int64)
    folder.mkdir(parents=True, exist_ok=True)
    for name, x in packed.items():
        (folder / f"{name}.bz2").write_bytes(bz2.compress(x.tobytes()))


def _idx(file: Path) -> np.ndarray:
    raw = file.read_bytes()
    axes = raw[3]
    shape = struct.unpack(f">{axes}I", raw[4 : 4 + 4 * axes])
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape)


def load(folder: Path) -> dict[str, Set]:
    """CIFAR-10 as "cifar" and MNIST as "mnist"."""
    raw = {file.stem: _unpacked(file) for file in sorted(folder.glob("*.bz2"))}
    cifar = sums(raw["cifar_x"].reshape(3, -1, 32, 32)) << (8 - BITS)
    mnist = raw["mnist_x"].reshape(-1, 28, 28, 1)
    test = int(raw["tests"].view(np.int64)[0]) if "tests" in raw else TESTS
    return {"cifar": _split(cifar, raw["cifar_y"], test), "mnist": _split(mnist, raw["mnist_y"], test)}


def _unpacked(file: Path) -> np.ndarray:
    """What a file holds; kept beside it, since many processes read it."""
    plain = file.with_suffix(".raw")
    if not plain.exists():
        part = plain.with_suffix(f".{os.getpid()}")
        part.write_bytes(bz2.decompress(file.read_bytes()))
        part.replace(plain)
    return np.fromfile(plain, np.uint8)


def _split(x: np.ndarray, y: np.ndarray, test: int) -> Set:
    pictures, classes = torch.from_numpy(x.copy()), torch.from_numpy(y.astype(np.int64))
    return Set(pictures[:-test], classes[:-test], pictures[-test:], classes[-test:])


def made_up(count: int = 200, side: int = 12) -> dict[str, Set]:
    """Small pictures that a test can learn: scikit-learn's digits, as both sets."""
    from sklearn.datasets import load_digits

    found = load_digits()
    small = torch.from_numpy(found.images[:count]).float().unsqueeze(1) * 15.9
    classes = torch.from_numpy(found.target[:count])

    def sized(colors: int) -> Set:
        x = torch.nn.functional.interpolate(small, (side, side), mode="bilinear").byte().movedim(1, -1)
        x, cut = x.expand(-1, -1, -1, colors).contiguous(), count * 3 // 4
        return Set(x[:cut], classes[:cut], x[cut:], classes[cut:])

    return {"cifar": sized(3), "mnist": sized(1)}


def noise_only(count: int = 256) -> dict[str, Set]:
    """Random pictures of the true sizes, to take times with."""

    def sized(side: int, colors: int) -> Set:
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(256, (count, side, side, colors), generator=generator, dtype=torch.uint8)
        y = torch.randint(10, (count,), generator=generator)
        return Set(x, y, x, y)

    return {"cifar": sized(32, 3), "mnist": sized(28, 1)}


def unit(x: Tensor) -> Tensor:
    """uint8 -> about zero, from -1 to 1."""
    return x.float() / 127.5 - 1
