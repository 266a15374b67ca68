"""`scram denoise` of a film: `scram.images.video`, from file to file, frame by frame."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from ..images.denoising import estimate_noise
from ..images.films import Film, FolderWriter, Writer, open_film
from ..images.reading import Picture, Shape
from ..images.video import Settings, check_film, denoise_frames
from . import memory, pictures
from .console import Printout, complain, counted, numbers_table, progress_line
from .pictures import Panel, psnr
from .provenance import made_with

FIRST = 5  # frames on which the noise is estimated


def run(
    path: Path,
    out: Path,
    *,
    sigma: float | None,
    add_noise: float | None,
    fast: bool,
    changed: Mapping[str, Any],
    device: str,
) -> Printout:
    """Denoise a film or a folder of frames; with added noise, measure each frame."""
    check_film(fast, changed, "--fast")
    film = open_film(path)
    check_memory(path, film.shape, changed, device, fast)
    head = list(islice(film.frames, FIRST))
    if not head:
        raise ValueError(f"{path}: no frames")
    settings = Settings.of(head[0].pixels.shape[-1], changed)
    common = {"reach": settings.reach, "seed": settings.seed}
    source = _Source(film, head, add_noise, settings.seed)
    level = estimated(source.first) if sigma is None else sigma / 255
    if level == 0:
        raise ValueError("the estimated noise is 0: nothing to remove; give --sigma to smooth all the same")
    target = out / "denoised" if film.names else out / "denoised.mp4"
    writer: Writer | FolderWriter = FolderWriter(target, film.names) if film.names else Writer(target, film.rate)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    before = []
    after = []
    sheet = None
    start = perf_counter()
    try:
        with writer, progress_line(*columns, TimeRemainingColumn(), total=film.count) as (bar, task):
            bar.update(task, description="denoising")
            frames = (frame.to(device) for frame in source)
            denoised = denoise_frames(frames, level, fast=fast, **(asdict(settings) if fast else common))
            for clean in denoised:
                picture, noisy = source.seen.popleft()
                clean = clean.cpu().clamp(0, 1)
                writer.write(replace(picture, pixels=clean))
                bar.update(task, completed=writer.count)
                if add_noise is not None:
                    before.append(psnr(noisy, picture.pixels))
                    after.append(psnr(clean, picture.pixels))
                if sheet is None or writer.count == (film.count or 0) // 2:
                    sheet = (picture.pixels, noisy, clean)
    except KeyboardInterrupt:
        if writer.count:
            complain(f"{counted(writer.count, 'frame')} kept in {writer.path}")
        raise
    seconds = perf_counter() - start
    assert sheet is not None
    draw(*sheet, add_noise is not None, out)
    numbers = {
        **made_with(device),
        "film": path.name,
        "frames": writer.count,
        "grid": list(head[0].pixels.shape[:2]),
        "kind": head[0].kind,
        "device": device,
        "threads": torch.get_num_threads(),
        "sigma": 255 * level,
        "sigma_estimated": sigma is None,
        "added_noise": add_noise,
        "method": "non-local means" if fast else "collaborative",
        "settings": asdict(settings) if fast else common,
        "seconds": seconds,
        "noisy_psnr_db": sum(before) / len(before) if before else None,
        "psnr_db": sum(after) / len(after) if after else None,
    }
    rows = [("frames", str(writer.count)), ("time", f"{seconds:.1f} s, {seconds / writer.count:.2f} s a frame")]
    if after:
        rows.append(("PSNR, noisy", f"{numbers['noisy_psnr_db']:.2f} dB"))
        rows.append(("PSNR, denoised", f"{numbers['psnr_db']:.2f} dB"))
    title = f"{path.name}, noise {255 * level:.1f} of 255 ({'estimated' if sigma is None else 'given'})"
    note = "" if film.names else "pictures alone: sound is left out"
    files = f"film: {writer.path}; a frame before and after: {out / 'denoise.png'}; {out / 'denoise.json'}"
    return Printout(numbers, [numbers_table(("", ""), rows, title, note)], files)


def check_memory(path: Path, shape: Shape, changed: Mapping[str, Any], device: str, fast: bool) -> None:
    """Refuse frames that do not fit into memory."""
    colors = 1 if shape.channels < 3 else 3
    settings = Settings.of(colors, changed)
    frames = 2 * settings.reach + 1
    per_pixel = memory.READING * colors * (frames if fast else 4 * settings.reach + 1)
    if device == "cpu" and fast:
        per_pixel += memory.of_frames(colors, settings.patch, settings.width, frames)
    elif device == "cpu":
        per_pixel += memory.of_blocks(colors, frames)
    memory.check(shape.pixels * per_pixel, f"{path}: denoising needs", "give smaller frames or a smaller --reach")


def estimated(frames: list[Tensor]) -> float:
    """The median noise of some frames."""
    return sorted(map(estimate_noise, frames))[len(frames) // 2]


class _Source:
    """The noisy frames; those that were given out and not yet denoised are in `seen`, as (picture, noisy)."""

    def __init__(self, film: Film, head: list[Picture], added: float | None, seed: int) -> None:
        self.film = film
        self.added = added
        self.rng = np.random.default_rng(seed)
        self.head = [(picture, self._noisy(picture.pixels)) for picture in head]
        self.first = [noisy for _, noisy in self.head]
        self.seen: deque[tuple[Picture, Tensor]] = deque()

    def _noisy(self, pixels: Tensor) -> Tensor:
        if self.added is None:
            return pixels
        drawn = self.rng.normal(0, self.added / 255, tuple(pixels.shape)).astype(np.float32)
        return ((pixels + torch.from_numpy(drawn)).clamp(0, 1) * 255).round() / 255  # as a file would hold it

    def __iter__(self) -> Iterator[Tensor]:
        for both in self.head:
            self.seen.append(both)
            yield both[1]
        self.head = []
        self.first = []
        for picture in self.film.frames:
            both = (picture, self._noisy(picture.pixels))
            self.seen.append(both)
            yield both[1]


def draw(clean: Tensor, noisy: Tensor, result: Tensor, known: bool, out: Path) -> None:
    """A frame before and after, and what was removed."""
    panels = [
        Panel("Frame", noisy.expand(-1, -1, 3), f"PSNR {psnr(noisy, clean):.2f} dB" if known else ""),
        Panel("Denoised", result.expand(-1, -1, 3), f"PSNR {psnr(result, clean):.2f} dB" if known else ""),
        Panel("Removed", (0.5 + 2 * (noisy - result)).mean(-1, keepdim=True).expand(-1, -1, 3), "times 2"),
    ]
    pictures.sheet(panels, out / "denoise.png", "scram denoise: a film")
