"""`scram match`: where in photograph B each pixel of photograph A is, by sparse cross-attention on patch features."""

import json
from dataclasses import dataclass
from math import inf, log
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.table import Table
from torch import Tensor

from .. import Attended, Matches, Search, attend, dispatch, search
from . import pictures
from .console import chosen_device, console, counted, one_line_errors, progress, warn, writable_folder
from .features import PatchFeatures, plain_share, read_picture, sample_pair, stereo_sample
from .pictures import Panel
from .provenance import made_with

PATCH = 11
WIDTH = 32
RADIUS = 1
# On unit features a score is a cosine; times 100 (CLIP's sharpest temperature) the softmax has clear peaks.
SCALE = 100.0
PLAIN = 0.5  # share of one-colour patches from which a warning is due
NEAR = 2.0  # pixels; an error up to this counts as a hit


@dataclass(frozen=True)
class Pair:
    """Photographs A and B `[H, W, 3]`; q from A, k from B `[1, 1, H, W, width]`; v holds B's colours and places.

    The last two channels of v are each key's own (row, column), so that attention returns an expected place in B,
    finer than a pixel.
    """

    a: Tensor
    b: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Found:
    """What a search and an attention over its windows say, and the seconds they took."""

    matches: Matches
    attended: Attended
    seconds: dict[str, float]

    @property
    def warped(self) -> Tensor:
        """B's colours at the places found `[H, W, 3]`: B warped onto A."""
        return self.attended.out[0, 0, ..., :3].cpu()

    @property
    def place(self) -> Tensor:
        """(row, column) in B of each pixel of A `[H, W, 2]`, NaN where no key was found."""
        place = self.attended.out[0, 0, ..., 3:].cpu()
        return torch.where((self.matches.index[0, 0, ..., :1] >= 0).cpu(), place, torch.nan)

    def confidence(self, radius: int, scale: float) -> Tensor:
        """A smooth maximum of the cosine over the windows, (lse - log of their size) / scale, cut to 0..1 `[H, W]`."""
        keys = self.matches.index.shape[-1] * (2 * radius + 1) ** 2
        return ((self.attended.lse[0, 0] - log(keys)) / scale).clamp(0, 1).cpu()


def pair_of(a: Tensor, b: Tensor, patch: int = PATCH, width: int = WIDTH, device: str = "cpu") -> Pair:
    """Patch features of both photographs from one PCA, fitted on A."""
    a, b = a.to(device), b.to(device)
    features = PatchFeatures.fit(a, min(width, 3 * patch * patch), patch)
    places = torch.stack(torch.meshgrid(*(torch.arange(n, device=device) for n in b.shape[:2]), indexing="ij"), -1)
    return Pair(a, b, features(a), features(b), torch.cat((b, places.float()), -1)[None, None])


def find(
    pair: Pair, setting: Search, radius: int = RADIUS, scale: float = SCALE, impl: str = "auto", timed: bool = False
) -> Found:
    """Search and attend; `timed` makes an untimed call first, which compiles and grows the memory pool."""
    if timed:
        find(pair, setting, radius, scale, impl)
    start = _now(pair)
    matches = search(pair.q, pair.k, search=setting, impl=impl)
    middle = _now(pair)
    attended = attend(pair.q, pair.k, pair.v, matches, radius=radius, scale=scale, impl=impl)
    return Found(matches, attended, {"search": middle - start, "attend": _now(pair) - middle})


def _now(pair: Pair) -> float:
    if pair.q.is_cuda:
        torch.cuda.synchronize()
    return perf_counter()


def own_places(height: int, width: int) -> Tensor:
    """(row, column) of each pixel `[H, W, 2]`."""
    return torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"), -1).float()


def read_truth(path: Path, grid: tuple[int, int]) -> Tensor:
    """True offsets (down, right) from A to B `[H, W, 2]`, NaN where unknown.

    A .npy file of offsets `[H, W, 2]`, or of disparities `[H, W]`: the pixel lies that far to the left in B.
    """
    try:
        array = np.load(path, allow_pickle=False)
    except ValueError as error:
        raise ValueError(f"{path} is not a .npy file of numbers") from error
    if not isinstance(array, np.ndarray) or array.shape not in (grid, (*grid, 2)):
        got = array.shape if isinstance(array, np.ndarray) else "an .npz archive"
        raise ValueError(f"{path} must hold {grid} disparities or {(*grid, 2)} offsets, got {got}; save one .npy array")
    return true_offsets(torch.from_numpy(array.astype(np.float32)))


def true_offsets(truth: Tensor) -> Tensor:
    """Disparities `[H, W]` or offsets `[H, W, 2]` -> offsets, NaN where not finite."""
    field = torch.stack((torch.zeros_like(truth), -truth), -1) if truth.ndim == 2 else truth
    return torch.where(field.isfinite().all(-1, keepdim=True), field, torch.nan)


def errors(offset: Tensor, truth: Tensor, confidence: Tensor) -> dict[str, float]:
    """How far the offsets are from the truth, in pixels, where there is a truth; and what the confidence is worth."""
    known = truth.isfinite().all(-1)
    if not known.any():
        raise ValueError("the ground truth holds no finite value")
    difference = (offset - truth)[known].nan_to_num(torch.inf)
    error, sure = difference.norm(dim=-1), confidence[known]
    hit = error <= NEAR
    return {
        "valid_pixels": int(known.sum()),
        "median_error_px": float(error.median()),
        "median_horizontal_error_px": float(difference[:, 1].abs().median()),
        "within_2px": float(hit.float().mean()),
        "within_2px_surer_half": float(hit[sure >= sure.median()].float().mean()),
    }


def match(
    a: Annotated[Path | None, typer.Argument(help="Photograph A: each of its pixels asks.", show_default=False)] = None,
    b: Annotated[Path | None, typer.Argument(help="Photograph B: where the answers are.", show_default=False)] = None,
    sample: Annotated[
        str | None, typer.Option(help="Instead of files: city (comes with SCRAM) or motorcycle (scikit-image's).")
    ] = None,
    truth: Annotated[
        Path | None, typer.Option(help="A .npy of disparities [H, W] or offsets (down, right) [H, W, 2] to compare.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for pictures, match.npz and match.json.")] = Path("scram-match"),
    size: Annotated[int | None, typer.Option(min=16, help="Resize both to this height in pixels.")] = None,
    patch: Annotated[int, typer.Option(min=1, help="Side of the patches, odd.")] = PATCH,
    width: Annotated[int, typer.Option(min=1, help="Width of the features kept by the PCA.")] = WIDTH,
    matches: Annotated[int, typer.Option(min=1, max=64, help="Matches per pixel (kappa).")] = 1,
    separation: Annotated[int, typer.Option(min=0, help="Distance between matches of a pixel (L).")] = 0,
    radius: Annotated[int, typer.Option(min=0, max=64, help="Radius of the windows around matches (b).")] = RADIUS,
    sweeps: Annotated[int, typer.Option(min=0, max=1000, help="Sweeps of the search (T).")] = 8,
    scale: Annotated[float, typer.Option(help="Factor on the cosine before the softmax.")] = SCALE,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of the search.")] = 0,
    impl: Annotated[str, typer.Option(help="Which implementation runs; `scram info` lists them.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON, not as a table.")] = False,
) -> None:
    """Find every pixel of A in B: a colour-coded match field, B warped onto A, arrows, a confidence, numbers."""
    with one_line_errors():
        writable_folder(out)
        chosen_device(device)
        if not 0 < scale < inf:
            raise ValueError(f"scale must be positive and finite, got {scale}")
        with progress() as step:
            step("reading two photographs")
            picture_a, picture_b, known = _inputs(a, b, sample, truth, size)
            start = perf_counter()
            step("patch features")
            pair = pair_of(picture_a, picture_b, patch, width, device)
            plain = {"a": plain_share(picture_a, patch), "b": plain_share(picture_b, patch)}
            impl = dispatch.choose(impl, pair.q.device, pair.q.dtype).name
            step(f"searching and attending, {_grid(pair.a)} pixels")
            setting = Search(matches=matches, separation=separation, sweeps=sweeps, seed=seed)
            found = find(pair, setting, radius, scale, impl)
            seconds = {"features": 0.0, **found.seconds, "all": perf_counter() - start}
            seconds["features"] = seconds["all"] - found.seconds["search"] - found.seconds["attend"]
            offset = found.place - own_places(*picture_a.shape[:2])
            confidence = found.confidence(radius, scale)
            quality = {} if known is None else errors(offset, known, confidence)
            step("drawing")
            draw(pair, offset, found.warped, confidence, known, out)
        for name, share in plain.items():
            if share > PLAIN:
                warn(f"{share:.0%} of photograph {name.upper()} is one colour: matches there say nothing")
        _save_arrays(out / "match.npz", found, offset, confidence)
        numbers: dict[str, Any] = {
            **made_with(device),
            "impl": impl,
            "device": device,
            "threads": torch.get_num_threads(),
            "grid_a": list(pair.a.shape[:2]),
            "grid_b": list(pair.b.shape[:2]),
            "settings": {
                "patch": patch, "width": pair.q.shape[-1], "matches": matches, "separation": separation,
                "radius": radius, "sweeps": sweeps, "scale": scale, "seed": seed,
            },
            "seconds": seconds,
            "plain_share": plain,
            "median_confidence": float(confidence.median()),
            "median_offset_px": [float(x) for x in offset.flatten(0, 1).nanmedian(0).values],
            "truth": quality,
        }  # fmt: skip
        text = json.dumps(numbers, indent=2, allow_nan=False)
        (out / "match.json").write_text(text + "\n")
        if as_json:
            typer.echo(text)
            return
        console().print(_table(numbers))
        typer.echo(f"pictures: {out / 'match.png'} and its parts; arrays: {out / 'match.npz'}; {out / 'match.json'}")


def _inputs(
    a: Path | None, b: Path | None, sample: str | None, truth: Path | None, size: int | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Both photographs, and the true offsets where they are known."""
    if sample is not None:
        if a is not None or b is not None:
            raise ValueError("give two files or --sample, not both")
        if sample not in ("city", "motorcycle"):
            raise ValueError(f"sample must be city or motorcycle, got {sample}")
        if sample == "city":
            picture_a, picture_b = sample_pair(size)
        else:
            picture_a, picture_b, disparity = stereo_sample()
            if size is not None:
                raise ValueError("--size would make the ground truth of the sample motorcycle wrong; leave it out")
            return picture_a, picture_b, true_offsets(disparity)
    elif a is None or b is None:
        raise ValueError("give two photographs, A and B, or --sample city; `scram match --help` shows examples")
    else:
        picture_a, picture_b = read_picture(a, size), read_picture(b, size)
    return picture_a, picture_b, None if truth is None else read_truth(truth, tuple(picture_a.shape[:2]))  # type: ignore[arg-type]


def draw(pair: Pair, offset: Tensor, warped: Tensor, confidence: Tensor, truth: Tensor | None, out: Path) -> None:
    """Write the single pictures and the sheet that holds them all."""
    low = float(confidence.quantile(0.05))  # most are near 1: the colours show the rest
    a, limit = pair.a.cpu(), pictures.wheel_limit(offset, share=0.8)
    panels = {
        "field": Panel(
            "Match field", pictures.wheel_colours(offset, limit), "where in B each pixel of A lies",
            pictures.wheel_legend(limit),
        ),
        "warped": Panel("B warped onto A", warped, "B's colours, mixed by the attention"),
        "arrows": Panel(
            "Matches as arrows", pictures.arrows(a, offset, confidence, limit), "the surer half, up to the wheel's rim"
        ),
        "confidence": Panel(
            "Confidence", pictures.shades((confidence - low) / max(1 - low, 1e-6), "cividis"),
            "smooth maximum of the cosine, from lse",
            pictures.bar_legend(1.0, "confidence", "cividis", low),
        ),
    }  # fmt: skip
    if truth is not None:
        error = (offset - truth).norm(dim=-1)
        panels["error"] = Panel(
            "Error against the ground truth", pictures.error_map(error, 4.0), "grey: truth unknown",
            pictures.bar_legend(4.0, "error, px (4 and more: bright)"),
        )  # fmt: skip
    for name, panel in panels.items():
        pictures.save(panel.picture, out / f"{name}.png")
    first = [Panel("Photograph A", a, "its patches ask"), Panel("Photograph B", pair.b.cpu(), "its patches answer")]
    if truth is not None:
        first.pop()
    pictures.sheet(
        [*first, *panels.values()],
        out / "match.png",
        f"scram match: {_grid(pair.a)} pixels of A, found in B",
    )


def _save_arrays(path: Path, found: Found, offset: Tensor, confidence: Tensor) -> None:
    np.savez_compressed(
        path,
        offset=offset.numpy(),
        index=found.matches.index[0, 0].cpu().numpy(),
        score=found.matches.score[0, 0].cpu().numpy(),
        lse=found.attended.lse[0, 0].cpu().numpy(),
        confidence=confidence.numpy(),
    )


def _grid(picture: Tensor) -> str:
    return " x ".join(map(str, picture.shape[:2]))


def _table(numbers: dict[str, Any]) -> Table:
    result = Table(title=f"A found in B ({numbers['impl']} implementation, {counted(numbers['threads'], 'thread')})")
    result.add_column("")
    result.add_column("", justify="right")
    for name, value in numbers["seconds"].items():
        result.add_row(f"time, {name}", f"{value:.2f} s")
    down, right = numbers["median_offset_px"]
    result.add_row("median offset", f"{down:+.1f} px down, {right:+.1f} px right")
    result.add_row("median confidence", f"{numbers['median_confidence']:.3f}")
    if numbers["truth"]:
        truth = numbers["truth"]
        result.add_row("median error", f"{truth['median_error_px']:.3f} px")
        result.add_row("median error, horizontal", f"{truth['median_horizontal_error_px']:.3f} px")
        result.add_row("within 2 px", f"{100 * truth['within_2px']:.1f} %")
        result.add_row("within 2 px, surer half", f"{100 * truth['within_2px_surer_half']:.1f} %")
    return result
