"""Films as frames, one at a time: files that PyAV reads, and folders of pictures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .reading import Picture, Shape, read, shape_of, write

PICTURES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".webp", ".bmp")


@dataclass(frozen=True)
class Film:
    """A film that was opened.

    Args:
        frames: its frames, read as they are asked for; once.
        count: how many there are, None where the file does not say.
        rate: frames per second.
        shape: of a frame, by the header of the file.
        names: of a folder the names of its pictures.
    """

    frames: Iterator[Picture]
    count: int | None
    rate: Fraction
    shape: Shape
    names: list[str] = field(default_factory=list)


def open_film(path: str | os.PathLike[str]) -> Film:
    """Open a film, or a folder of pictures in the order of their names."""
    path = Path(path)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in PICTURES)
        if not files:
            raise ValueError(f"{path}: a folder without pictures ({', '.join(PICTURES)})")
        names = [file.stem for file in files]
        return Film(map(read, files), len(files), Fraction(25), shape_of(files[0]), names)
    path.open("rb").close()
    av = _av()
    try:
        container = av.open(str(path))
        stream = container.streams.video[0]
    except (av.error.FFmpegError, IndexError) as error:
        raise ValueError(f"{path}: not a film that FFmpeg reads ({error})") from error
    rate = Fraction(stream.average_rate or 25)
    return Film(_decoded(path, container, av), stream.frames or None, rate, Shape(stream.height, stream.width, 3))


def _decoded(path: Path, container: Any, av: ModuleType) -> Iterator[Picture]:
    with container:
        try:
            for frame in container.decode(video=0):
                array = frame.to_ndarray(format="rgb24")
                yield Picture(torch.from_numpy(array.astype(np.float32) / 255))
        except av.error.FFmpegError as error:
            raise ValueError(f"{path}: broken film ({error})") from error


def _av() -> ModuleType:
    try:
        import av
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("PyAV is not installed, which reads and writes films: pip install av") from error
    return av  # type: ignore[no-any-return]


class Writer:
    """Writes frames [H, W, C] to an .mp4; use it in a `with`.

    The film appears under its name when it is whole. After Ctrl-C what was written is kept, playable, under the name
    with "-interrupted", which `path` then tells; after an error nothing is kept.
    """

    def __init__(self, path: Path, rate: Fraction) -> None:
        self.path = path
        self.rate = rate
        self.count = 0
        self.av = _av()
        self.temporary = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")
        self.container: Any = None

    def write(self, picture: Picture) -> None:
        """Append a frame."""
        pixels: Tensor = picture.rgb.clamp(0, 1).mul(255).round().byte().cpu()
        if self.container is None:
            self.container = self.av.open(str(self.temporary), "w", format="mp4")
            self.stream = self.container.add_stream("libx264", rate=self.rate)
            self.stream.height, self.stream.width = pixels.shape[:2]
            even = pixels.shape[0] % 2 == 0 and pixels.shape[1] % 2 == 0
            self.stream.pix_fmt = "yuv420p" if even else "yuv444p"
            self.stream.options = {"crf": "14"}
        frame = self.av.VideoFrame.from_ndarray(pixels.contiguous().numpy(), format="rgb24")
        self.container.mux(self.stream.encode(frame))
        self.count += 1

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.container is None:
            return
        kept = kind is None or issubclass(kind, KeyboardInterrupt)
        try:
            if kept:
                self.container.mux(self.stream.encode())
            self.container.close()
            if kept:
                if kind is not None:
                    self.path = self.path.with_name(f"{self.path.stem}-interrupted{self.path.suffix}")
                os.replace(self.temporary, self.path)
        finally:
            self.temporary.unlink(missing_ok=True)


class FolderWriter:
    """Writes frames as pictures into a folder, each under the name it had, as a .png."""

    def __init__(self, path: Path, names: list[str]) -> None:
        self.path = path
        self.names = names
        self.count = 0
        path.mkdir(parents=True, exist_ok=True)

    def write(self, picture: Picture) -> None:
        """Write the next one."""
        write(picture, self.path / f"{self.names[self.count]}.png")
        self.count += 1

    def __enter__(self) -> FolderWriter:
        return self

    def __exit__(self, *_: object) -> None:
        return None
