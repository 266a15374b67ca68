"""What `scram inpaint`, `scram generate` and `scram retarget` share: reading, a bar, before and after, the report."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from torch import Tensor

from ..images.reading import Picture, Shape, read
from . import memory, pictures
from .arguments import is_photograph
from .console import Numbers, Printout, numbers_table, progress_line
from .features import photograph
from .pictures import Panel
from .provenance import made_with

CHECKS = 0.25, 0.75  # colors of the squares behind what is transparent


def open_image(image: str) -> Picture:
    """A file, or a photograph of scikit-image by its name."""
    return Picture(photograph(image)) if is_photograph(image) else read(image)


def image_shape(image: str) -> Shape:
    """Of a file by its header; refuses one that would not fit into memory."""
    return Shape(*photograph(image).shape) if is_photograph(image) else memory.check_reading(image)


def check_memory(
    image: str, size: tuple[int | None, int | None], of_pixel: Callable[[int], int], what: str, device: str
) -> None:
    """Refuse a picture and a result of that (height, width), None as the picture's, that would not fit.

    `of_pixel` says how many bytes a pixel of so many channels takes.
    """
    shape = image_shape(image)
    pixels = shape.pixels + (size[0] or shape.height) * (size[1] or shape.width)
    if device == "cpu":
        needed = pixels * of_pixel(shape.channels)
        memory.check(needed, f"{image}: {what} needs", "give a smaller picture or size")


def channels_of(picture: Picture) -> Tensor:
    """What is worked on: [H, W, 1..4], colors times alpha, then alpha."""
    return picture.pixels if picture.alpha is None else torch.cat((picture.pixels * picture.alpha, picture.alpha), -1)


def with_channels(picture: Picture, channels: Tensor) -> Picture:
    """The picture with other contents, as `channels_of` has them; depth and profile are kept."""
    channels = channels.float().cpu().clamp(0, 1)
    if picture.alpha is None:
        return replace(picture, pixels=channels)
    colors = channels[..., :-1]
    alpha = channels[..., -1:]
    return replace(picture, pixels=torch.where(alpha > 0, colors / alpha.clamp(min=1e-6), 0).clamp(0, 1), alpha=alpha)


def shown(picture: Picture) -> Tensor:
    """[H, W, 3] to look at: what is transparent lies before a pattern of squares."""
    if picture.alpha is None:
        return picture.rgb
    rows, columns = (torch.arange(extent, device="cpu") // 8 for extent in picture.pixels.shape[:2])
    squares = torch.where((rows[:, None] + columns) % 2 == 0, *CHECKS).unsqueeze(-1)
    return picture.rgb * picture.alpha + squares * (1 - picture.alpha)


@contextmanager
def bar(title: str) -> Iterator[Callable[[float], None]]:
    """A bar with the time left; yields what is told the share that is done."""
    columns = TextColumn(title), BarColumn(), TextColumn("{task.percentage:.0f} %"), TimeRemainingColumn()
    with progress_line(*columns, total=1) as (line, task):
        yield lambda share: line.update(task, completed=share)


def timed(work: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """The result, and the seconds until it is there."""
    start = perf_counter()
    result = work().cpu()
    return result, perf_counter() - start


def report(
    command: str,
    image: str,
    picture: Picture,
    panels: Sequence[Panel],
    out: Path,
    device: str,
    rows: Sequence[tuple[str, str]],
    files: Sequence[str],
    **numbers: Any,
) -> Printout:
    """Draw before and after, and say what was done."""
    pictures.sheet(panels, out / f"{command}.png", f"scram {command}: {Path(image).name}", columns=min(len(panels), 3))
    height, width = picture.pixels.shape[:2]
    every: Numbers = {
        **made_with(device),
        "image": Path(image).name,
        "grid": [height, width],
        "kind": picture.kind,
        "notes": list(picture.notes),
        "device": device,
        "threads": torch.get_num_threads(),
        **numbers,
    }
    kind = "; ".join((f"{width} x {height}, {picture.kind}", *picture.notes))
    table = numbers_table(("", ""), [("picture", kind), *rows], f"{Path(image).name}")
    names = ", ".join(str(out / name) for name in files)
    return Printout(every, [table], f"result: {names}; before and after: {out / f'{command}.png'}")
