"""`scram explore`: attention of two pictures, of one picture with itself, or of stored tensors, as one HTML page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ..core.tails.clusters import Clusters
from ..engines import dispatch
from ..explorer import Explorer, explore
from ..images.features import PatchFeatures
from ..images.reading import Picture, read
from ..settings import Search
from . import memory
from .arguments import IMPLS, MATCH_SCALE, PANES, PHOTOGRAPHS, TENSORS, one_of
from .console import Numbers, Printout, complain, numbers_table, progress
from .features import photograph, sample_pair, stereo_sample
from .provenance import made_with
from .tensors import Layout
from .tensors import read as read_tensors

MOST_PIXELS = 1 << 16  # of a picture; larger ones are scaled down, --size takes others


@dataclass(frozen=True)
class Settings:
    """What is run, beside what is read."""

    patch: int
    width: int
    matches: int  # 0: no search
    separation: int
    sweeps: int
    radius: int
    clusters: int  # 0: none
    keys: int  # routed
    scale: float | None
    panes: str
    size: int | None
    megabytes: float
    seed: int
    device: str
    impl: str


def run(
    a: str,
    b: str | None,
    sample: str | None,
    names: tuple[str, str, str],
    axes: str | None,
    grid: tuple[int, ...] | None,
    out: Path,
    settings: Settings,
) -> Printout:
    """Read, run, and write the page."""
    with progress() as step:
        start = perf_counter()
        step("reading")
        tensors, more = (
            from_file(Path(a), names, Layout(axes, grid, settings.scale))
            if a.endswith(TENSORS)
            else from_pictures(a, b, sample, settings)
        )
        q, k, v = (x.to(settings.device) for x in tensors)
        impl = dispatch.choose(one_of("impl", settings.impl, IMPLS), q.device, q.dtype).name
        search, tail = searching(settings)
        step("clusters, search, exact attention of a sample, page")
        page = explore(
            q,
            k,
            v,
            search=search,
            radius=settings.radius,
            seed=settings.seed,
            panes=one_of("panes", settings.panes, PANES),
            tail=tail,
            budget=int(settings.megabytes * 1e6),
            impl=impl,
            **more,
        )
        page.save(out / "explore.html")
        seconds = perf_counter() - start
    for note in (*page.numbers["notes"], *_thinned(page)):
        complain(note)
    numbers = {**made_with(settings.device), "impl": impl, "seconds": seconds, "bytes": page.size, **page.numbers}
    return Printout(numbers, [table(numbers)], f"page: {out / 'explore.html'}; numbers: {out / 'explore.json'}")


def searching(settings: Settings) -> tuple[Search | None, Clusters | None]:
    """Search and tail, None where they are left out."""
    matches = settings.matches
    search = Search(matches=max(matches, 1), separation=settings.separation, sweeps=settings.sweeps, seed=settings.seed)
    tail = Clusters(count=max(settings.clusters, 1), keys=settings.keys, seed=settings.seed)
    return search if matches else None, tail if settings.clusters else None


def from_file(
    path: Path, names: tuple[str, str, str], tensor_layout: Layout
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """q, k, v of a file, and the other arguments of `explore`."""
    *tensors, scale = read_tensors(path, names, tensor_layout)
    kind = torch.promote_types(tensors[0].dtype, torch.float32)
    return tuple(x.to(kind) for x in tensors), {"scale": scale, "title": path.name}


def from_pictures(
    a: str, b: str | None, sample: str | None, settings: Settings
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Patch features as queries and keys, colors as values."""
    names, whole = _read(a, b, sample, settings)
    small = [_small(picture, settings.size) for picture in whole]
    notes = [
        f"{name} is scaled from {_size(old)} to {_size(new)} pixels."
        for name, old, new in zip(names, whole, small, strict=True)
        if old.pixels.shape != new.pixels.shape
    ]
    rgb = [picture.rgb for picture in small]
    features = PatchFeatures.fit(rgb[0], min(settings.width, 3 * settings.patch**2), settings.patch)
    q = features(rgb[0])
    k = features(rgb[-1])
    title = " and ".join(dict.fromkeys(names))
    scale = MATCH_SCALE if settings.scale is None else settings.scale
    return (q, k, rgb[-1][None, None].contiguous()), {"pictures": rgb, "scale": scale, "notes": notes, "title": title}


def _read(a: str, b: str | None, sample: str | None, settings: Settings) -> tuple[list[str], list[Picture]]:
    if sample is not None:
        pair = sample_pair() if sample == "city" else stereo_sample()[:2]
        return [f"{sample} A", f"{sample} B"], [Picture(x) for x in pair]
    given = [a] if b is None else [a, b]
    check_memory(given, settings)
    are_samples = [one in PHOTOGRAPHS and not Path(one).exists() for one in given]
    opened = [Picture(photograph(one)) if known else read(one) for one, known in zip(given, are_samples, strict=True)]
    return [Path(one).name for one in given], opened


def check_memory(images: list[str], settings: Settings) -> None:
    """Refuse picture files that do not fit into memory, by their headers."""
    for image in images:
        if image in PHOTOGRAPHS and not Path(image).exists():
            continue
        shape = memory.check_reading(image, settings.size)
        if settings.size is not None and settings.device == "cpu":
            needed = shape.pixels * memory.of_features(settings.width, settings.matches)
            memory.check(needed, f"{image}: exploring needs", "give a smaller --size")


def _small(picture: Picture, height: int | None) -> Picture:
    """Scaled to that height; without one, only where it has too many pixels."""
    rows, columns = picture.pixels.shape[:2]
    if height is None:
        height = rows if rows * columns <= MOST_PIXELS else max(1, math.isqrt(MOST_PIXELS * rows // columns))
    return picture.resized(height)


def _size(picture: Picture) -> str:
    return " x ".join(map(str, reversed(picture.pixels.shape[:2])))


def _thinned(page: Explorer) -> list[str]:
    """What the page leaves out, for the terminal."""
    about = page.numbers
    notes = []
    if about["thinned"]:
        notes.append(f"the grid is thinned, every {about['thinned']['stride']}th point of each axis; the page says so")
    if about["queries"]["stride"] > 1:
        notes.append(f"every {about['queries']['stride']}th query of each axis can be chosen, all keys are shown")
    return notes


def table(numbers: Numbers) -> Table:
    """The numbers for people."""
    quality = numbers["quality"]
    grids = (numbers["queries"]["whole"], numbers["keys"]["grid"])
    queries, keys = (" x ".join(map(str, grid)) for grid in grids)
    held = {"captured mass of the windows": f"{quality['mass']:.3f}"} if numbers["matches"] else {}
    if numbers["routed_keys"]:
        held |= {f"captured {'with' if held else 'by'} routed keys": f"{quality['attended']:.3f}"}
    rows = {
        "queries, keys": f"{queries}, {keys}",
        "heads": str(len(numbers["heads"])),
        **held,
        "output error": f"{quality['output']:.4f}",
        "error of a query, median": f"{quality['median']:.4f}",
        "error of a query, 95th percentile": f"{quality['p95']:.4f}",
        "weight that rounding misplaces": f"{numbers['map_error']:.4f}",
        "size of the page": f"{numbers['bytes'] / 1e6:.1f} MB",
        "time": f"{numbers['seconds']:.1f} s",
    }
    note = f"against exact attention of {quality['queries']} queries a head; a first call may compile"
    return numbers_table(("", ""), rows.items(), f"{numbers['title']} ({numbers['impl']} implementation)", note)
