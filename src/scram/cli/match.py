"""`scram match`: where in photograph B each pixel of photograph A is, by sparse cross-attention on patch features."""

from dataclasses import asdict, dataclass
from math import log
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from .. import dispatch
from ..api import attend, cluster, search
from ..estimators import Clusters
from ..images.files import replacing
from ..timing import now
from ..types import Attended, Matches, Search
from . import pictures
from .arguments import MATCH_PATCH, MATCH_RADIUS, MATCH_SCALE, MATCH_WIDTH
from .console import Numbers, Report, complain, counted, numbers_table, progress
from .features import PatchFeatures, plain_share, read_picture, sample_pair, stereo_sample
from .pictures import Panel, grid_of
from .provenance import made_with

PLAIN = 0.5  # share of one-colour patches above which a warning is printed
NEAR = 2.0  # pixels; an error up to this counts as a hit


@dataclass(frozen=True)
class Settings:
    """Side of the patches, width of their features, and how to search and attend."""

    patch: int = MATCH_PATCH
    width: int = MATCH_WIDTH
    matches: int = 1
    separation: int = 0
    radius: int = MATCH_RADIUS
    sweeps: int = 8
    scale: float = MATCH_SCALE
    seed: int = 0


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


def pair_of(a: Tensor, b: Tensor, patch: int = MATCH_PATCH, width: int = MATCH_WIDTH, device: str = "cpu") -> Pair:
    """Patch features of both photographs from one PCA, fitted on A."""
    a, b = a.to(device), b.to(device)
    features = PatchFeatures.fit(a, min(width, 3 * patch * patch), patch)
    places = own_places(*b.shape[:2]).to(device)
    return Pair(a, b, features(a), features(b), torch.cat((b, places), -1)[None, None])


def find(
    pair: Pair, setting: Search, radius: int = MATCH_RADIUS, scale: float = MATCH_SCALE, impl: str = "auto",
    tail: Clusters | None = None,
) -> Found:  # fmt: skip
    """Search and attend, with clusters for the keys outside the windows where a tail asks for them.

    The seconds of a first call hold what it compiles.
    """
    device, codebook, seconds = pair.q.device.type, None, {}
    start = now(device)
    matches = search(pair.q, pair.k, search=setting, impl=impl)
    seconds["search"] = now(device) - start
    if tail is not None:
        start = now(device)
        codebook = cluster(pair.q, pair.k, pair.v, clusters=tail, scale=scale, impl=impl)
        seconds["cluster"] = now(device) - start
    start = now(device)
    attended = attend(pair.q, pair.k, pair.v, matches, radius=radius, scale=scale, tail=codebook, impl=impl)
    seconds["attend"] = now(device) - start
    return Found(matches, attended, seconds)


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


def run(
    a: Path | None, b: Path | None, sample: str | None, truth: Path | None, out: Path, size: int | None,
    settings: Settings, device: str, impl: str,
) -> Report:  # fmt: skip
    """Match A with B, compare with the ground truth where there is one, and draw."""
    with progress() as step:
        step("reading two photographs")
        picture_a, picture_b, known = _inputs(a, b, sample, truth, size)
        start = perf_counter()
        step("patch features")
        pair = pair_of(picture_a, picture_b, settings.patch, settings.width, device)
        plain = {"a": plain_share(picture_a, settings.patch), "b": plain_share(picture_b, settings.patch)}
        impl = dispatch.choose(impl, pair.q.device, pair.q.dtype).name
        step(f"search and attend, {grid_of(pair.a)} pixels")
        how = Search(
            matches=settings.matches, separation=settings.separation, sweeps=settings.sweeps, seed=settings.seed
        )
        found = find(pair, how, settings.radius, settings.scale, impl)
        whole = perf_counter() - start
        seconds = {"features": whole - sum(found.seconds.values()), **found.seconds, "all": whole}
        offset = found.place - own_places(*picture_a.shape[:2])
        confidence = found.confidence(settings.radius, settings.scale)
        quality = {} if known is None else errors(offset, known, confidence)
        step("drawing")
        draw(pair, offset, found.warped, confidence, known, out)
    for name, share in plain.items():
        if share > PLAIN:
            complain(f"warning: {share:.0%} of photograph {name.upper()} is one colour: matches there say nothing")
    index, score, lse = (x[0, 0].cpu().numpy() for x in (found.matches.index, found.matches.score, found.attended.lse))
    with replacing(out / "match.npz") as temporary:
        np.savez_compressed(
            temporary, offset=offset.numpy(), index=index, score=score, lse=lse, confidence=confidence.numpy()
        )
    numbers = {
        **made_with(device),
        "impl": impl,
        "device": device,
        "threads": torch.get_num_threads(),
        "grid_a": list(pair.a.shape[:2]),
        "grid_b": list(pair.b.shape[:2]),
        "settings": {**asdict(settings), "width": pair.q.shape[-1]},
        "seconds": seconds,
        "plain_share": plain,
        "median_confidence": float(confidence.median()),
        "median_offset_px": [float(x) for x in offset.flatten(0, 1).nanmedian(0).values],
        "truth": quality,
    }
    files = f"pictures: {out / 'match.png'} and its parts; arrays: {out / 'match.npz'}; {out / 'match.json'}"
    return Report(numbers, [_table(numbers)], files)


def _inputs(
    a: Path | None, b: Path | None, sample: str | None, truth: Path | None, size: int | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Both photographs, and the true offsets where they are known."""
    if sample == "motorcycle":
        picture_a, picture_b, disparity = stereo_sample()
        return picture_a, picture_b, true_offsets(disparity)
    if a is None or b is None:
        picture_a, picture_b = sample_pair(size)
    else:
        picture_a, picture_b = read_picture(a, size), read_picture(b, size)
    height, width = picture_a.shape[:2]
    return picture_a, picture_b, None if truth is None else read_truth(truth, (height, width))


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
            "Matches as arrows", pictures.arrows(a, offset, confidence, limit), "the surer half, up to the wheel's rim",
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
            "Error against the ground truth", pictures.shades(error / 4), "grey: truth unknown",
            pictures.bar_legend(4.0, "error, px (4 and more: bright)"),
        )  # fmt: skip
    pictures.save_each(panels, out)
    first = [Panel("Photograph A", a, "its patches are the queries")]
    if truth is None:
        first.append(Panel("Photograph B", pair.b.cpu(), "its patches are the keys"))
    title = f"scram match: {grid_of(pair.a)} pixels of A, found in B"
    pictures.sheet([*first, *panels.values()], out / "match.png", title)


def _table(numbers: Numbers) -> Table:
    title = f"A found in B ({numbers['impl']} implementation, {counted(numbers['threads'], 'thread')})"
    note = "confidence: best cosine around the match, 0 to 1\na first search may compile, which its time includes"
    down, right = numbers["median_offset_px"]
    rows = {f"time, {name}": f"{value:.2f} s" for name, value in numbers["seconds"].items()}
    rows["median offset"] = f"{down:+.1f} px down, {right:+.1f} px right"
    rows["median confidence"] = f"{numbers['median_confidence']:.3f}"
    if truth := numbers["truth"]:
        rows["median error"] = f"{truth['median_error_px']:.3f} px"
        rows["median error, horizontal"] = f"{truth['median_horizontal_error_px']:.3f} px"
        rows["within 2 px"] = f"{truth['within_2px']:.1%}"
        rows["within 2 px, surer half"] = f"{truth['within_2px_surer_half']:.1%}"
    return numbers_table(("", ""), rows.items(), title, note)
