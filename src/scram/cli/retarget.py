"""`scram retarget`: a picture in another format, its content kept."""

from dataclasses import asdict, replace
from pathlib import Path

from ..images.pyramid import resize
from ..images.reading import write
from ..images.retargeting import DEFAULT, retarget
from ..images.similarity import two_way
from .console import Printout
from .edits import bar, channels_of, check_memory, open_image, report, shown, timed, with_channels
from .pictures import Panel


def run(image: str, width: int | None, height: int | None, out: Path, changed: dict[str, int], device: str) -> Printout:
    """Retarget the picture, write it, and beside it the same resized."""
    settings = replace(DEFAULT, **changed)
    check_memory(image, (height, width), settings.patch, "retargeting", device)
    picture = open_image(image)
    size = (height or picture.pixels.shape[0], width or picture.pixels.shape[1])
    channels = channels_of(picture).to(device)
    with bar("retargeting") as told:
        retargeted, seconds = timed(lambda: retarget(channels, size, settings, progress=told))
    stretched = resize(channels, size)
    result = with_channels(picture, retargeted)
    plain = with_channels(picture, stretched)
    write(result, out / "retargeted.png")
    far = {
        name: two_way(x.to(device), channels, settings)
        for name, x in (("retargeted", retargeted), ("resized", stretched))
    }
    notes = {name: f"distance of patches {x:.4f} to the source, {y:.4f} back" for name, (x, y) in far.items()}
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
        settings=asdict(settings),
        patch_distance={name: {"to_source": x, "from_source": y} for name, (x, y) in far.items()},
    )
