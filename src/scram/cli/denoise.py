"""`scram denoise`: non-local means over the whole picture, by SCRAM with the l2 score on patches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import exp
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from ..api import attend, search
from ..images.reading import read as read_file
from ..types import Matches, Search
from . import not_installed, pictures
from .console import Numbers, Report, counted, numbers_table, progress
from .features import padded, photograph
from .pca import principal_axes
from .pictures import Panel, psnr
from .provenance import made_with

LEAST_SIDE = 16  # pixels


@dataclass(frozen=True)
class Settings:
    """How to denoise; strength is the bandwidth of the weights in units of the noise."""

    patch: int
    width: int
    strength: float
    matches: int = 2
    radius: int = 5
    sweeps: int = 4
    seed: int = 0

    @classmethod
    def of(cls, channels: int, changed: Mapping[str, Any] | None = None) -> "Settings":
        """The defaults for grey (7 x 7 patches) or colour (5 x 5, which hold three times the numbers)."""
        patch, width, strength = (7, 24, 0.95) if channels == 1 else (5, 16, 1.2)
        given = {name: value for name, value in (changed or {}).items() if value is not None}
        return cls(**{"patch": patch, "width": width, "strength": strength, **given})


def read(path: Path) -> Tensor:
    """A picture in 0..1 `[H, W, 1]` or `[H, W, 3]`: grey stays grey."""
    return read_file(path).pixels


def estimate_noise(picture: Tensor) -> float:
    """The standard deviation of white noise in `[H, W, C]`, from the median of the finest diagonal details.

    What a picture itself holds at that scale counts as noise too: textures raise the estimate.
    """
    even = picture[: picture.shape[0] // 2 * 2, : picture.shape[1] // 2 * 2]
    a, b, c, d = even[::2, ::2], even[::2, 1::2], even[1::2, ::2], even[1::2, 1::2]
    return float(((a - b - c + d) / 2).abs().median() / 0.6745)


def denoise_picture(noisy: Tensor, sigma: float, settings: Settings) -> Tensor:
    """Non-local means `[H, W, C] -> [H, W, C]`: every patch becomes a mean of patches that look alike.

    Keys and queries are the noisy patches in a PCA of them, each direction damped by how much of it is noise. A query
    attends the window around itself and those around its best matches elsewhere; patches overlap and are averaged.
    """
    height, width, channels = noisy.shape
    features, left = _features(noisy, sigma, settings)
    itself = torch.arange(height * width, dtype=torch.int32, device=noisy.device).reshape(1, 1, height, width, 1)
    start = Matches(itself, torch.zeros_like(itself, dtype=torch.float32), (height, width))
    how = Search(
        matches=settings.matches, separation=settings.radius, sweeps=settings.sweeps, jumps=(4, 1),
        propagate="shift", gossip=2, seed=settings.seed,
    )  # fmt: skip
    # The start is the query's own place, which nothing beats; the other matches keep their distance from it.
    found = start if settings.matches == 1 else search(features, features, search=how, score="l2", warm=start)
    values = _unfold(noisy, settings.patch)
    scale = 1 / ((settings.strength * sigma) ** 2 * left)
    out, lse = attend(features, features, values[None, None], found, radius=settings.radius, scale=scale, score="l2")
    # A patch is at distance 0 of itself, a twin with other noise at 2 sigma^2: give it the weight of a twin.
    twin = exp(-2 / settings.strength**2)
    total = lse[0, 0].exp().unsqueeze(-1)
    mean = (out[0, 0] * total - (1 - twin) * values) / (total - 1 + twin)
    return _fold(mean, ((total - 1 + twin) / twin).sqrt(), settings.patch, channels)


def _features(noisy: Tensor, sigma: float, settings: Settings) -> tuple[Tensor, float]:
    """Damped PCA features `[1, 1, H, W, width]`, and the noise left in them in units of sigma^2."""
    whole = padded(noisy, settings.patch)
    mean, variances, axes = principal_axes(F.unfold(whole, settings.patch, stride=3)[0].T.double())
    width = min(settings.width, len(variances))
    signal = (1 - sigma**2 / variances[-width:].clamp(min=1e-12)).clamp(min=1e-3)
    basis = (axes[:, -width:] * signal.sqrt()).T.float()
    kernel = basis.reshape(width, noisy.shape[-1], settings.patch, settings.patch)
    features = F.conv2d(whole, kernel, -basis @ mean.float()).movedim(1, -1)[None].contiguous()
    return features, float(signal.sum())


def _unfold(picture: Tensor, patch: int) -> Tensor:
    """Every patch `[H, W, C * p * p]`."""
    return F.unfold(padded(picture, patch), patch)[0].T.reshape(*picture.shape[:2], -1)


def _fold(patches: Tensor, weight: Tensor, patch: int, channels: int) -> Tensor:
    """Overlapping patches `[H, W, C * p * p]`, averaged with their weight `[H, W, 1]` to `[H, W, C]`."""
    height, width = weight.shape[:2]
    size, rim = (height + patch - 1, width + patch - 1), patch // 2
    total = F.fold((patches * weight).flatten(0, 1).T[None], size, patch)
    weights = F.fold(weight.expand(-1, -1, patch * patch).flatten(0, 1).T[None], size, patch)
    return (total / weights)[0].movedim(0, -1)[rim : rim + height, rim : rim + width]


def _scikit_image(noisy: Tensor, sigma: float, patch: int, distance: int) -> Tensor:
    from skimage.restoration import denoise_nl_means

    array = noisy.numpy() if noisy.shape[-1] == 3 else noisy[..., 0].numpy()
    # Its documentation's advice for the exact mode with a known noise: h = 0.8 sigma.
    result = denoise_nl_means(
        array, patch_size=patch, patch_distance=distance, h=0.8 * sigma, sigma=sigma, fast_mode=False,
        channel_axis=-1 if noisy.shape[-1] == 3 else None,
    )  # fmt: skip
    return torch.from_numpy(np.asarray(result, dtype=np.float32)).reshape(noisy.shape)


def _opencv(noisy: Tensor, sigma: float) -> Tensor:
    import cv2

    eight = (noisy.clamp(0, 1) * 255).round().byte().numpy()  # it takes bytes only
    h = 255 * sigma
    if noisy.shape[-1] == 3:
        # In colour a smaller h is better for it: measured, 20 at sigma 25.
        result = cv2.fastNlMeansDenoisingColored(eight, None, 0.8 * h, 0.8 * h, 7, 21)
    else:
        result = cv2.fastNlMeansDenoising(eight[..., 0], None, h, 7, 21)
    return torch.from_numpy(np.asarray(result, dtype=np.float32) / 255).reshape(noisy.shape)


RIVALS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "scikit-image, patch 7, distance 11": lambda noisy, sigma: _scikit_image(noisy, sigma, 7, 11),
    "scikit-image, patch 5, distance 6": lambda noisy, sigma: _scikit_image(noisy, sigma, 5, 6),
    "OpenCV, patch 7, distance 10": _opencv,
}


def run(
    image: str, is_sample: bool, out: Path, sigma: float | None, add_noise: float | None, rivals: bool,
    changed: Mapping[str, Any], device: str,
) -> Report:  # fmt: skip
    """Denoise a file or a sample, and where noise was added compare with the rivals; draw all."""
    with progress() as step:
        step("reading")
        picture = photograph(image) if is_sample else read(Path(image))
        settings = Settings.of(picture.shape[-1], changed)
        (height, width), least = picture.shape[:2], max(LEAST_SIDE, 2 * settings.patch)
        if min(height, width) < least:
            raise ValueError(f"a {width} x {height} picture is too small; both sides must be {least} or more")
        noisy = picture
        if add_noise is not None:
            drawn = np.random.default_rng(settings.seed).normal(0, add_noise / 255, tuple(picture.shape))
            noisy = picture + torch.from_numpy(drawn.astype(np.float32))
        level = estimate_noise(noisy) if sigma is None else sigma / 255
        if level == 0:
            raise ValueError("the estimated noise is 0: nothing to remove; give --sigma to smooth all the same")
        step("SCRAM: first call, may compile")
        denoise_picture(noisy[:LEAST_SIDE, :LEAST_SIDE].to(device), level, settings)
        step("SCRAM")
        start = perf_counter()
        clean = denoise_picture(noisy.to(device), level, settings).cpu()
        results = {"SCRAM": (clean, perf_counter() - start)}
        skipped = {}
        for name, rival in RIVALS.items() if add_noise is not None and rivals else ():
            step(name)
            start = perf_counter()
            try:
                results[name] = (rival(noisy, level), perf_counter() - start)
            except ModuleNotFoundError as error:
                skipped[name] = str(error.name).split(".")[0]
        step("drawing")
        draw(picture, noisy, results, add_noise, out)
    numbers = {
        **made_with(device),
        "image": Path(image).name,
        "grid": list(picture.shape[:2]),
        "channels": picture.shape[-1],
        "device": device,
        "threads": torch.get_num_threads(),
        "sigma": 255 * level,
        "sigma_estimated": sigma is None,
        "added_noise": add_noise,
        "settings": settings.__dict__,
        "noisy_psnr_db": None if add_noise is None else psnr(noisy, picture),
        "results": {
            name: {"seconds": seconds, "psnr_db": None if add_noise is None else psnr(result, picture)}
            for name, (result, seconds) in results.items()
        },
        "not_run": {name: f"{package} is not installed" for name, package in skipped.items()},
    }
    files = f"picture: {out / 'denoised.png'}; all beside each other: {out / 'denoise.png'}"
    if skipped:
        files += "\n" + not_installed(", ".join(dict.fromkeys(skipped.values())), "cli", "bench")
    return Report(numbers, [_table(numbers)], files)


def draw(
    picture: Tensor, noisy: Tensor, results: dict[str, tuple[Tensor, float]], added: float | None, out: Path
) -> None:
    """The denoised picture, and a sheet of all with what was left out below."""

    def panel(title: str, x: Tensor, *notes: str, measured: bool = True) -> Panel:
        shown = [*notes, f"PSNR {psnr(x, picture):.2f} dB"] if measured and added is not None else notes
        return Panel(title, x.expand(-1, -1, 3), ", ".join(shown))

    panels = [panel("Noisy", noisy), *(panel(name, x, f"{t:.1f} s") for name, (x, t) in results.items())]
    pictures.save(panels[1].picture, out / "denoised.png")
    if added is not None:
        panels.insert(0, panel("Original", picture, f"before noise of {added:g} was added", measured=False))
    removed = (0.5 + 2 * (noisy - results["SCRAM"][0])).mean(-1, keepdim=True)
    panels.append(panel("Removed by SCRAM", removed, "times 2; ideally only noise", measured=False))
    title = "scram denoise: non-local means over the whole picture"
    pictures.sheet(panels, out / "denoise.png", title, columns=3 if len(panels) <= 3 else 4)


def _table(numbers: Numbers) -> Table:
    source = "estimated" if numbers["sigma_estimated"] else "given"
    title = f"{numbers['image']}, noise {numbers['sigma']:.1f} of 255 ({source})"
    known = numbers["noisy_psnr_db"] is not None
    rows = [("noisy", f"{numbers['noisy_psnr_db']:.2f} dB", "")] if known else []
    for name, row in numbers["results"].items():
        rows.append((name, f"{row['psnr_db']:.2f} dB" if known else "unknown", f"{row['seconds']:.2f} s"))
    rows += [(name, why, "") for name, why in numbers["not_run"].items()]
    ran = {name.split(",")[0] for name in numbers["results"]}
    threaded = " and ".join(name for name in ("SCRAM", "OpenCV") if name in ran)
    note = "PSNR: peak signal-to-noise ratio against the picture before noise\n" * known
    note += f"{counted(numbers['threads'], 'thread')} for {threaded}"
    note += "; scikit-image uses one" * ("scikit-image" in ran)
    return numbers_table(("method", "PSNR", "time"), rows, title, note)
