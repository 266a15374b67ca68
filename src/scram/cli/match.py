"""`scram match`: where in photograph B each pixel of photograph A is. A shell around `scram.images.match`."""

from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from ..engines import dispatch
from ..images.colmap import save_colmap
from ..images.features import plain_share
from ..images.matching import SURE, Matching, Settings, match
from ..images.reading import Picture, read, shape_of
from ..results import MatchedPoints
from . import memory, pictures
from .console import Numbers, Printout, complain, counted, numbers_table, progress_line
from .features import sample_pair, stereo_sample
from .pictures import Panel, grid_of
from .provenance import made_with

PLAIN = 0.5  # share of one-color patches above which a warning is printed
LINES = 80  # matches drawn as lines
NEAR = 2.0  # pixels; an error up to this counts as a hit


def read_truth(path: Path, grid: tuple[int, int]) -> Tensor:
    """True flow (right, down) from A to B `[H, W, 2]`, NaN where unknown.

    A .npy file of a flow `[H, W, 2]`, or of disparities `[H, W]`: the pixel lies that far to the left in B.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)  # a shape that is wrong costs no memory
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a .npy file of numbers") from error
    if not isinstance(array, np.ndarray) or array.shape not in (grid, (*grid, 2)):
        got = array.shape if isinstance(array, np.ndarray) else "an .npz archive"
        raise ValueError(f"{path} must hold {grid} disparities or a {(*grid, 2)} flow, got {got}; save one .npy array")
    return true_flow(torch.from_numpy(array.astype(np.float32)))


def true_flow(truth: Tensor) -> Tensor:
    """Disparities `[H, W]` or a flow `[H, W, 2]` -> a flow, NaN where not finite."""
    field = torch.stack((-truth, torch.zeros_like(truth)), -1) if truth.ndim == 2 else truth
    return torch.where(field.isfinite().all(-1, keepdim=True), field, torch.nan)


def area_under_curve(certainty: Tensor, hit: Tensor) -> float | None:
    """The chance that a right match has the higher certainty than a wrong one; None where all are right or wrong.

    >>> area_under_curve(torch.tensor([0.9, 0.5, 0.5, 0.1]), torch.tensor([True, True, False, False]))
    0.875
    """
    right = certainty[hit].double().sort().values
    wrong = certainty[~hit].double().contiguous()
    if not len(right) or not len(wrong):
        return None
    above = len(right) - torch.searchsorted(right, wrong, right=True)
    equal = torch.searchsorted(right, wrong, right=True) - torch.searchsorted(right, wrong)
    return float((above + equal / 2).mean() / len(right))


def errors(flow: Tensor, truth: Tensor, certainty: Tensor) -> dict[str, float | None]:
    """How far a flow is from the truth, in pixels, where there is a truth; and what the certainty is worth."""
    known = truth.isfinite().all(-1)
    if not known.any():
        raise ValueError("the ground truth holds no finite value")
    difference = (flow - truth)[known].nan_to_num(torch.inf)
    error = difference.norm(dim=-1)
    sure = certainty[known]
    hit = error <= NEAR
    passed = sure >= SURE
    return {
        "valid_pixels": int(known.sum()),
        "median_error_px": float(error.median()),
        "median_horizontal_error_px": float(difference[:, 0].abs().median()),
        "within_2px": float(hit.float().mean()),
        "within_2px_surer_half": float(hit[sure >= sure.median()].float().mean()),
        "within_2px_sure": float(hit[passed].float().mean()) if passed.any() else None,
        "certainty_auc": area_under_curve(sure, hit),
    }


def run(
    a: Path | None,
    b: Path | None,
    sample: str | None,
    truth: Path | None,
    out: Path,
    size: int | None,
    settings: Settings,
    device: str,
    points: int,
    colmap: bool,
) -> Printout:
    """Match A with B, compare with the ground truth where there is one, and draw."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with progress_line(*columns, total=1) as (bar, task):
        bar.update(task, description="reading two photographs")
        if a is not None and b is not None:
            check_memory(a, b, size, settings, device)
        read_a, read_b, known = _inputs(a, b, sample, truth, size)
        if colmap:
            _check_upright(a, read_a)
            _check_upright(b, read_b)
        picture_a = read_a.rgb
        picture_b = read_b.rgb
        plain = {"a": plain_share(picture_a, settings.patch), "b": plain_share(picture_b, settings.patch)}
        settings = replace(settings, impl=dispatch.choose(settings.impl, torch.device(device), torch.float32).name)
        start = perf_counter()
        matching = match(
            picture_a.to(device),
            picture_b.to(device),
            **asdict(settings),
            progress=lambda share, what: bar.update(task, completed=share, description=what),
        )
        seconds = {**matching.seconds, "all": perf_counter() - start}
        matching = on_cpu(matching)
        quality = {} if known is None else errors(matching.flow, known, matching.certainty)
        sampled = matching.sample(points, seed=settings.seed)
        bar.update(task, completed=1, description="drawing")
        draw(picture_a, picture_b, matching, known, out)
    _warn(plain, matching)
    matching.save(out / "match.npz", sampled)
    if colmap and a is not None and b is not None:
        _save_colmap(a, b, picture_a, picture_b, sampled, out / "colmap")
    numbers = {
        **made_with(device),
        "impl": settings.impl,
        "device": device,
        "threads": torch.get_num_threads(),
        "grid_a": list(picture_a.shape[:2]),
        "grid_b": list(picture_b.shape[:2]),
        "read": {name: list(one.notes) for name, one in (("a", read_a), ("b", read_b))},
        "settings": asdict(settings),
        "seconds": seconds,
        "plain_share": plain,
        "sure_share": matching.sure,
        "median_certainty": float(matching.certainty.median()),
        "median_flow_px": [float(x) for x in matching.flow.flatten(0, 1).nanmedian(0).values],
        "sampled_points": len(sampled.a),
        "poses": [
            {"scale": scale, "rotation": turn, "share": float((matching.pose == n).float().mean())}
            for n, (scale, turn) in enumerate(matching.poses)
        ],
        "truth": quality,
    }
    files = f"pictures: {out / 'match.png'} and its parts; arrays: {out / 'match.npz'}; {out / 'match.json'}"
    files += f"; for COLMAP: {out / 'colmap'}" if colmap else ""
    return Printout(numbers, [_table(numbers)], files)


def check_memory(a: Path, b: Path, size: int | None, settings: Settings, device: str) -> None:
    """Refuse pictures that do not fit into memory, by their headers."""
    shapes = {path: memory.check_reading(path, size) for path in (a, b)}
    enlarged = max(1.0, 1 / min(settings.scales)) ** 2  # B is brought to the size of A
    pixels = shapes[a].pixels + round(enlarged * shapes[b].pixels)
    if device == "cpu":
        needed = pixels * memory.of_matches(settings.width, settings.matches)
        memory.check(needed, f"{a}: matching needs", "give --size, for example --size 480")


def _check_upright(path: Path | None, picture: Picture) -> None:
    if "turned upright" in picture.notes:
        raise ValueError(f"{path}: COLMAP reads its pixels as they are stored, not upright; save the picture upright")


def _save_colmap(a: Path, b: Path, read_a: Tensor, read_b: Tensor, points: MatchedPoints, folder: Path) -> None:
    """The sampled matches in pixels of the files, which --size may have made smaller."""

    def in_file(path: Path, picture: Tensor, place: Tensor) -> Tensor:
        shape = shape_of(path)
        sides = [shape.width / picture.shape[1], shape.height / picture.shape[0]]
        ratio = torch.tensor(sides, dtype=torch.float32, device="cpu")
        return (place + 0.5) * ratio - 0.5

    own = MatchedPoints(in_file(a, read_a, points.a), in_file(b, read_b, points.b), points.certainty)
    save_colmap({(a.name, b.name): own}, folder)


def on_cpu(matching: Matching) -> Matching:
    """The same with its tensors on the CPU."""
    tensors = ("warp", "certainty", "rebuilt", "score", "pose")
    return replace(matching, **{name: getattr(matching, name).cpu() for name in tensors})


def _warn(plain: dict[str, float], matching: Matching) -> None:
    """Say on stderr where the matches mean little."""
    for name, share in plain.items():
        if share > PLAIN:
            complain(f"warning: {share:.0%} of photograph {name.upper()} is one color: matches there say nothing")
    if matching.sure < 0.5 and max(plain.values()) <= PLAIN:
        complain(
            f"warning: {1 - matching.sure:.0%} of the matches fail the check (certainty below {SURE:g}): the pictures "
            "may show different things, or differ in size or angle: try --scales 0.5,1,2 or --rotations 0,90,180,270"
        )


def _inputs(
    a: Path | None, b: Path | None, sample: str | None, truth: Path | None, size: int | None
) -> tuple[Picture, Picture, Tensor | None]:
    """Both photographs, and the true flow where they are known."""
    if sample == "motorcycle":
        left, right, disparity = stereo_sample()
        return Picture(left), Picture(right), true_flow(disparity)
    if a is None or b is None:
        picture_a, picture_b = map(Picture, sample_pair(size))
    else:
        picture_a = read(a, size)
        picture_b = read(b, size)
    height, width = picture_a.pixels.shape[:2]
    return picture_a, picture_b, None if truth is None else read_truth(truth, (height, width))


def draw(a: Tensor, b: Tensor, matching: Matching, truth: Tensor | None, out: Path) -> None:
    """Write the single pictures and the sheet that holds them all."""
    flow = matching.flow
    limit = pictures.wheel_limit(flow, share=0.8)
    lines = Panel(
        "Some matches",
        pictures.lines(a, b, matching.sample(LINES)),
        f"A on the left, B on the right; {LINES} at most, drawn by certainty and spread over the picture",
    )
    panels = {
        "field": Panel(
            "Match field",
            pictures.wheel_colors(flow, limit),
            "where in B each pixel lies",
            pictures.wheel_legend(limit),
        ),
        "rebuilt": Panel("A rebuilt from B", matching.rebuilt, "B's colors at the places found"),
        "certainty": Panel(
            "Certainty",
            pictures.shades(matching.certainty, "cividis"),
            f"{matching.sure:.0%} pass with {SURE:g} or more",
            pictures.bar_legend(1.0, "certainty", "cividis"),
        ),
    }
    if truth is not None:
        panels["error"] = Panel(
            "Error against the ground truth",
            pictures.shades((flow - truth).norm(dim=-1) / 4),
            "gray: truth unknown",
            pictures.bar_legend(4.0, "error, px (4 and more: bright)"),
        )
    pictures.save_each({"lines": lines, **panels}, out)
    title = f"scram match: {grid_of(a)} pixels of A, found in B"
    columns = 2 if len(panels) == 4 else 3
    pictures.sheet(list(panels.values()), out / "match.png", title, columns=columns, first=lines)


def _table(numbers: Numbers) -> Table:
    title = f"A found in B ({numbers['impl']} implementation, {counted(numbers['threads'], 'thread')})"
    note = "certainty: do ways there and back end where they began, is no second place as good; 0 to 1\n"
    note += "a first search may compile, which its time includes"
    right, down = numbers["median_flow_px"]
    rows = {f"of photograph {name.upper()}": ", ".join(notes) for name, notes in numbers["read"].items() if notes}
    rows |= {f"time, {name}": f"{value:.2f} s" for name, value in numbers["seconds"].items()}
    rows["median flow"] = f"{right:+.1f} px right, {down:+.1f} px down"
    rows["median certainty"] = f"{numbers['median_certainty']:.3f}"
    rows["matches that pass"] = f"{numbers['sure_share']:.1%}"
    rows["points that were sampled"] = str(numbers["sampled_points"])
    if len(numbers["settings"]["scales"]) * len(numbers["settings"]["rotations"]) > 1:
        for pose in numbers["poses"]:
            rows[f"B at scale {pose['scale']:g}, turned by {pose['rotation']:g}"] = f"{pose['share']:.1%} of A"
    if truth := numbers["truth"]:
        rows["median error"] = f"{truth['median_error_px']:.3f} px"
        rows["median error, horizontal"] = f"{truth['median_horizontal_error_px']:.3f} px"
        rows["within 2 px"] = f"{truth['within_2px']:.1%}"
        rows["within 2 px, surer half"] = f"{truth['within_2px_surer_half']:.1%}"
        if truth["certainty_auc"] is not None:
            rows["AUC of the certainty"] = f"{truth['certainty_auc']:.3f}"
    return numbers_table(("", ""), rows.items(), title, note)
