"""`scram denoise` of a picture: collaborative filtering, or with --fast non-local means, beside rivals."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from ..images.collaborative import collaborative
from ..images.denoising import LEAST_SIDE, Settings, check_fast, check_size, denoise_picture, estimate_noise
from ..images.reading import Picture, read, write
from . import memory, not_installed, pictures
from .console import Numbers, Printout, counted, numbers_table, progress
from .features import photograph
from .pictures import Panel, psnr
from .provenance import made_with


def _scikit_image(noisy: Tensor, sigma: float, patch: int, distance: int) -> Tensor:
    from skimage.restoration import denoise_nl_means

    array = noisy.numpy() if noisy.shape[-1] == 3 else noisy[..., 0].numpy()
    # Its documentation's advice for the exact mode with a known noise: h = 0.8 sigma.
    result = denoise_nl_means(
        array,
        patch_size=patch,
        patch_distance=distance,
        h=0.8 * sigma,
        sigma=sigma,
        fast_mode=False,
        channel_axis=-1 if noisy.shape[-1] == 3 else None,
    )
    return torch.from_numpy(np.asarray(result, dtype=np.float32)).reshape(noisy.shape)


def _opencv(noisy: Tensor, sigma: float) -> Tensor:
    import cv2

    eight = (noisy.clamp(0, 1) * 255).round().byte().numpy()  # it takes bytes only
    h = 255 * sigma
    if noisy.shape[-1] == 3:
        # In color a smaller h is better for it: measured, 20 at sigma 25.
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
    image: str,
    is_sample: bool,
    out: Path,
    *,
    sigma: float | None,
    add_noise: float | None,
    rivals: bool,
    fast: bool,
    changed: Mapping[str, Any],
    seed: int,
    device: str,
) -> Printout:
    """Denoise a file or a sample, and where noise was added compare with the rivals; draw all."""
    check_fast(fast, changed, "--fast")
    changed = {**changed, "seed": seed}
    with progress() as step:
        step("reading")
        if not is_sample:
            check_memory(image, changed, device, fast)
        whole = Picture(photograph(image)) if is_sample else read(Path(image))
        picture = whole.pixels
        settings = Settings.of(picture.shape[-1], changed)
        check_size(picture, settings)
        noisy = picture
        if add_noise is not None:
            drawn = np.random.default_rng(settings.seed).normal(0, add_noise / 255, tuple(picture.shape))
            noisy = picture + torch.from_numpy(drawn.astype(np.float32))
        level = estimate_noise(noisy) if sigma is None else sigma / 255
        if level == 0:
            raise ValueError("the estimated noise is 0: nothing to remove; give --sigma to smooth all the same")
        step("SCRAM: first call, may compile")
        run_scram(noisy[:LEAST_SIDE, :LEAST_SIDE].to(device), level, settings, fast)
        step("SCRAM")
        start = perf_counter()
        clean = run_scram(noisy.to(device), level, settings, fast).cpu()
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
        write(replace(whole, pixels=clean), out / "denoised.png")
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
        "kind": whole.kind,
        "read": list(whole.notes),
        "method": "non-local means" if fast else "collaborative",
        "settings": asdict(settings) if fast else {"seed": seed},
        "noisy_psnr_db": None if add_noise is None else psnr(noisy, picture),
        "results": {
            name: {"seconds": seconds, "psnr_db": None if add_noise is None else psnr(result, picture)}
            for name, (result, seconds) in results.items()
        },
        "not_run": {name: f"{package} is not installed" for name, package in skipped.items()},
    }
    files = f"picture: {out / 'denoised.png'} ({whole.kind}, as read); all beside each other: {out / 'denoise.png'}"
    if skipped:
        files += "\n" + not_installed(", ".join(dict.fromkeys(skipped.values())), "cli", "bench")
    return Printout(numbers, [_table(numbers)], files)


def run_scram(noisy: Tensor, sigma: float, settings: Settings, fast: bool) -> Tensor:
    return denoise_picture(noisy, sigma, settings) if fast else collaborative(noisy, sigma)


def check_memory(image: str, changed: Mapping[str, Any], device: str, fast: bool) -> None:
    """Refuse a picture that does not fit into memory, by its header."""
    shape = memory.check_reading(image)
    colors = 1 if shape.channels < 3 else 3
    if device == "cpu":
        patches = memory.of_patches(colors, Settings.of(colors, changed).patch)
        per_pixel = patches if fast else memory.of_blocks(colors)
        memory.check(shape.pixels * per_pixel, f"{image}: denoising needs", memory.SMALLER)


def draw(
    picture: Tensor, noisy: Tensor, results: dict[str, tuple[Tensor, float]], added: float | None, out: Path
) -> None:
    """The denoised picture, and a sheet of all with what was left out below."""

    def panel(title: str, x: Tensor, *notes: str, measured: bool = True) -> Panel:
        shown = [*notes, f"PSNR {psnr(x, picture):.2f} dB"] if measured and added is not None else notes
        return Panel(title, x.expand(-1, -1, 3), ", ".join(shown))

    panels = [panel("Noisy", noisy), *(panel(name, x, f"{t:.1f} s") for name, (x, t) in results.items())]
    if added is not None:
        panels.insert(0, panel("Original", picture, f"before noise of {added:g} was added", measured=False))
    removed = (0.5 + 2 * (noisy - results["SCRAM"][0])).mean(-1, keepdim=True)
    panels.append(panel("Removed by SCRAM", removed, "times 2; ideally only noise", measured=False))
    title = "scram denoise"
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
    note = "".join(f"of the file: {words}\n" for words in numbers["read"])
    note += "transparency is kept as it was\n" * numbers["kind"].endswith("alpha")
    note += "PSNR: peak signal-to-noise ratio against the picture before noise\n" * known
    note += f"{counted(numbers['threads'], 'thread')} for {threaded}"
    note += "; scikit-image uses one" * ("scikit-image" in ran)
    return numbers_table(("method", "PSNR", "time"), rows, title, note)
