"""`scram inpaint`: fill holes of a picture with patches of the rest of it."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..images.doubts import LIMIT, Doubt, doubts
from ..images.inpainting import SHARP, inpaint, suited, surroundings
from ..images.reading import Picture, read, write
from . import memory
from .arguments import Rectangle
from .console import Printout
from .edits import bar, channels_of, image_shape, open_image, report, shown, timed, with_channels
from .pictures import Panel

MARK = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float32, device="cpu")  # the hole, in the picture before


def run(
    image: str,
    mask: Path | None,
    rectangles: Sequence[Rectangle],
    out: Path,
    sharp: bool,
    changed: dict[str, int],
    device: str,
) -> Printout:
    """Fill the hole, write the picture, and before and after."""
    image_shape(image)
    picture = open_image(image)
    hole = find_hole(picture, mask, rectangles)
    settings = replace(SHARP if sharp else suited(picture.pixels, hole), **changed)
    if mask is None and not rectangles:
        picture = replace(picture, alpha=torch.where(hole.unsqueeze(-1), 1.0, _alpha(picture)))
    before = picture
    channels = channels_of(picture).to(device)
    if device == "cpu":
        around = hole[surroundings(hole)]
        needed = memory.of_hole(around.numel(), int(around.sum()), channels.shape[-1], settings.patch)
        memory.check(needed, f"{image}: inpainting needs", "give a smaller picture or hole")
    with bar("inpainting") as told:
        filled, seconds = timed(lambda: inpaint(channels, hole.to(device), settings, progress=told))
    result = with_channels(picture, filled)
    # Known pixels keep their exact values, those that premultiplied alpha would lose too.
    kept = torch.where(hole.unsqueeze(-1), result.pixels, picture.pixels)
    result = replace(result, pixels=kept)
    write(result, out / "inpainted.png")
    share = float(hole.float().mean())
    part = surroundings(hole)
    found = doubts(channels_of(result)[part], hole[part])
    warning = _warning(found, (part[0].start, part[1].start))
    panels = [
        Panel(
            "Before", torch.where(hole.unsqueeze(-1), MARK, shown(before)), f"the hole is {share:.1%} of the picture"
        ),
        Panel("After", shown(result), "look at it: parts of it are unlike the rest" if found else f"{seconds:.1f} s"),
    ]
    rows = [("hole", f"{share:.1%}"), ("time", f"{seconds:.2f} s on {device}"), *warning]
    return report(
        "inpaint",
        image,
        picture,
        panels,
        out,
        device,
        rows,
        ["inpainted.png"],
        hole_share=share,
        seconds=seconds,
        settings=asdict(settings),
        doubts=[_moved(doubt, (part[0].start, part[1].start)) for doubt in found],
    )


def _moved(doubt: Doubt, first: tuple[int, int]) -> dict[str, Any]:
    """A doubt about a part of a picture that begins at (row, column), in words of `--rectangle`."""
    top, left, bottom, right = doubt.box
    return {"rectangle": [left + first[1], top + first[0], right - left, bottom - top], "distance": doubt.distance}


def _warning(found: Sequence[Doubt], first: tuple[int, int]) -> list[tuple[str, str]]:
    """A row for each part of the hole that looks like nothing else in the picture."""
    return [
        (
            "warning",
            "unlike the rest of the picture, look at it: {},{},{},{} ".format(*_moved(doubt, first)["rectangle"])
            + f"(left,top,width,height; {doubt.distance:.3f} from any patch, {LIMIT} at most elsewhere)",
        )
        for doubt in found
    ]


def find_hole(picture: Picture, mask: Path | None, rectangles: Sequence[Rectangle]) -> Tensor:
    """bool [H, W]: what is white in the mask (transparent, if it has an alpha), and in the rectangles.

    Without either it is what is transparent in the picture.
    """
    height, width = picture.pixels.shape[:2]
    hole = torch.zeros(height, width, dtype=torch.bool, device="cpu")
    if mask is not None:
        memory.check_reading(mask)
        drawn = read(mask)
        if drawn.pixels.shape[:2] != hole.shape:
            size = f"{drawn.pixels.shape[1]} x {drawn.pixels.shape[0]}"
            raise ValueError(f"{mask}: the mask is {size}, the picture {width} x {height}; both must be equal")
        opaque = drawn.alpha is None or bool((drawn.alpha > 0.5).all())
        hole |= drawn.pixels.mean(-1) > 0.5 if opaque or drawn.alpha is None else drawn.alpha[..., 0] < 0.5
    for left, top, wide, high in rectangles:
        if left >= width or top >= height:
            raise ValueError(f"rectangle {left},{top},{wide},{high} lies outside the picture of {width} x {height}")
        hole[top : top + high, left : left + wide] = True
    if mask is None and not rectangles:
        hole = _alpha(picture)[..., 0] < 0.5
        if not bool(hole.any()):
            raise ValueError("give --mask or --rectangle; without them the hole is what is transparent, and nothing is")
    if not bool(hole.any()):
        raise ValueError(
            "the hole is empty: white pixels of the mask (transparent ones, if it has an alpha) are filled"
        )
    return hole


def _alpha(picture: Picture) -> Tensor:
    return torch.ones_like(picture.pixels[..., :1]) if picture.alpha is None else picture.alpha
