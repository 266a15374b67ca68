"""`scram retarget`: a picture in another format, what stands out in it kept in shape."""

from pathlib import Path

import torch

from ..images.pyramid import resize
from ..images.reading import write
from ..images.retargeting import retarget, shape_error, strips
from ..images.saliency import saliency
from . import memory
from .console import Printout
from .edits import channels_of, check_memory, open_image, report, shown, timed, with_channels
from .pictures import Panel


def run(image: str, width: int | None, height: int | None, out: Path, device: str) -> Printout:
    """Retarget the picture, write it, and beside it the same resized."""
    check_memory(image, (height, width), memory.of_resized, "retargeting", device)
    picture = open_image(image)
    old = (picture.pixels.shape[0], picture.pixels.shape[1])
    size = (height or old[0], width or old[1])
    channels = channels_of(picture).to(device)
    retargeted, seconds = timed(lambda: retarget(channels, size))
    result = with_channels(picture, retargeted)
    plain = with_channels(picture, resize(channels, size))
    write(result, out / "retargeted.png")
    importance = saliency(channels)
    one = torch.ones(1, dtype=importance.dtype, device=importance.device)
    changed = {
        "retargeted": shape_error(importance, *strips(importance, old, size)),
        "resized": shape_error(importance, one * size[0] / old[0], one * size[1] / old[1]),
    }
    notes = {name: f"what stands out changes its shape by {error:.0%}" for name, error in changed.items()}
    panels = [
        Panel("Source", shown(picture)),
        Panel("Resized", shown(plain), notes["resized"]),
        Panel("Retargeted", shown(result), notes["retargeted"]),
    ]
    rows = [("result", f"{size[1]} x {size[0]}"), *notes.items(), ("time", f"{seconds:.2f} s on {device}")]
    return report(
        "retarget",
        image,
        picture,
        panels,
        out,
        device,
        rows,
        ["retargeted.png"],
        result=list(size),
        seconds=seconds,
        shape_error=changed,
    )
