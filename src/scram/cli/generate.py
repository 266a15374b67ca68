"""`scram generate`: new pictures of the same texture."""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from ..images.generation import DEFAULT, MOST_UNEVEN, generate, unevenness
from ..images.reading import write
from ..images.similarity import two_way
from . import memory
from .console import Printout
from .edits import bar, channels_of, check_memory, open_image, report, shown, timed, with_channels
from .pictures import Panel


def run(
    image: str,
    width: int | None,
    height: int | None,
    count: int,
    variety: float,
    out: Path,
    changed: dict[str, int],
    device: str,
    *,
    scenes: bool,
) -> Printout:
    """Generate `count` pictures with following seeds and write them."""
    settings = replace(DEFAULT, **changed)
    check_memory(image, (height, width), partial(memory.of_patches, patch=settings.patch), "generating", device)
    picture = open_image(image)
    size = (height or picture.pixels.shape[0], width or picture.pixels.shape[1])
    channels = channels_of(picture).to(device)
    uneven = unevenness(channels)
    if not scenes and uneven is not None and uneven > MOST_UNEVEN:
        raise ValueError(
            f"{image}: this is a scene, not a texture: edges in its windows differ by {uneven:.3f}, in a texture by at "
            f"most {MOST_UNEVEN}; cut out a part that looks alike everywhere, or give --scenes for a collage"
        )
    panels = [Panel("Source", shown(picture))]
    results = []
    files = []
    with bar("generating") as told:
        for number in range(count):
            own = replace(settings, seed=settings.seed + number)
            share_told = lambda share, number=number: told((number + share) / count)  # noqa: E731
            x, seconds = timed(
                lambda own=own, share_told=share_told: generate(  # type: ignore[misc]
                    channels, size, own, variety=variety, scenes=True, progress=share_told
                )
            )
            result = with_channels(picture, x)
            name = f"generated-{own.seed}.png"
            write(result, out / name)
            to_source, from_source = two_way(x.to(device), channels, settings)
            panels.append(Panel(f"Seed {own.seed}", shown(result), f"{seconds:.1f} s"))
            results.append(
                {"seed": own.seed, "file": name, "seconds": seconds, "to_source": to_source, "from_source": from_source}
            )
            files.append(name)
    rows = [("result", f"{size[1]} x {size[0]}"), ("pictures", str(count))]
    rows += [
        (str(row["file"]), f"{row['seconds']:.2f} s, distance of patches {row['to_source']:.4f} to the source")
        for row in results
    ]
    return report(
        "generate",
        image,
        picture,
        panels,
        out,
        device,
        rows,
        files,
        result=list(size),
        variety=variety,
        unevenness=uneven,
        settings=asdict(settings),
        pictures=results,
    )
