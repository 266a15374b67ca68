"""Tables of docs on pictures and films."""

from __future__ import annotations

from typing import Any

import table_cells
from table_cells import table, time


def denoise() -> str:
    """docs/denoise: means over the photographs."""
    photographs = [row["results"] for row in table_cells.load("denoising").values()]
    if not photographs:
        return table_cells.NOT_MEASURED
    sigmas = list(photographs[0])

    def mean(way: str, what: str, sigma: str) -> float:
        return sum(found[sigma][way][what] for found in photographs) / len(photographs)

    lines = []
    for way in photographs[0][sigmas[0]]:
        cells = (f"{mean(way, 'psnr_db', s):.2f} / {mean(way, 'ssim', s):.3f}" for s in sigmas)
        seconds = sum(mean(way, "cpu_seconds", s) for s in sigmas) / len(sigmas)
        lines.append((way, *cells, time(seconds)))
    return table(("dB / SSIM", *(f"noise {s}" for s in sigmas), "CPU time a photograph"), *lines)


def denoise_photographs() -> str:
    """docs/denoise: each photograph at noise 25."""
    lines = []
    for name, row in table_cells.load("denoising").items():
        found = row["results"]["25"]
        lines.append((name, *(f"{found[way]['psnr_db']:.2f}" for way in found)))
    if not lines:
        return table_cells.NOT_MEASURED
    ways = next(iter(table_cells.load("denoising").values()))["results"]["25"]
    return table(("noise 25, dB", *ways), *lines)


def matching() -> str:
    """docs/match: each kind of pair, a figure for each photograph; the share of B's pixels that are right."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in table_cells.load("matching").values():
        kinds.setdefault(row["kind"], []).append(row)
    options = {"half size": " (`--scales`)", "quarter": " (`--rotations`)"}
    shares = ("within_2px", "within_3px", "right_of_sure")
    lines = []
    for kind, rows in kinds.items():
        ranks = [row["certainty_auc"] for row in rows]
        lines.append(
            (
                kind + options.get(kind, ""),
                ", ".join(row["photo"] for row in rows),
                ", ".join(f"{row['median_error_px']:.2f}" for row in rows) + " px",
                *(", ".join(f"{100 * row[name]:.1f}" for row in rows) + " %" for name in shares),
                ", ".join("all right" if x is None else f"{x:.3f}" for x in ranks),
                ", ".join(f"{row['cpu_seconds']:.3g}" for row in rows) + " s",
            )
        )
    return table(
        (
            "pair",
            "photographs",
            "median error",
            "within 2 px",
            "within 3 px",
            "right of those that pass",
            "AUC",
            "CPU time",
        ),
        *lines,
    )


def film() -> str:
    """docs/denoise: a film against its single frames and OpenCV."""
    lines = []
    for name, row in table_cells.load("film").items():
        for way, value in row["psnr_db"].items():
            shown = {"film": "`scram denoise`", "film, fast": "`scram denoise --fast`"}.get(way, way)
            lines.append((name, shown, f"{value:.2f}", f"{row['cpu_seconds'][way]:.2f}"))
    return table(("", "", "PSNR, dB", "CPU time a frame, s"), *lines)


def inpaint() -> str:
    """docs/inpaint: mean PSNR and SSIM inside the holes, and processor seconds, of every kind of hole."""
    kinds = table_cells.load("inpaint")
    names = dict.fromkeys(name for kind in kinds.values() for name in kind["means"])

    def cells(name: str) -> tuple[str, ...]:
        means = (kind["means"].get(name) for kind in kinds.values())
        return tuple(
            "" if mean is None else f"{mean['psnr_db']:.2f} / {mean['ssim']:.3f} / {mean['cpu_seconds']:.1f}"
            for mean in means
        )

    return table(("dB / SSIM / s", *kinds), *((name, *cells(name)) for name in names))


def retargeting() -> str:
    """docs/retarget: by how much the shape of what stands out changes."""
    rows = table_cells.load("retargeting")
    lines = []
    for name, row in rows.items():
        found = row["shape_error"]
        cells = (f"{100 * found[way][how]:.0f}%" for way in ("narrower", "wider") for how in ("resized", "retargeted"))
        lines.append((f"{name} (chosen on)" if row["chosen"] else name, *cells))
    return table(("", "71 %: resized", "retargeted", "133 %: resized", "retargeted"), *lines)


def textures() -> str:
    """docs/generate: how many textures pass and how many scenes are refused."""
    lines = []
    for part, row in table_cells.load("textures").items():
        above = {
            kind: {name: value > row["limit"] for name, value in found.items()}
            for kind, found in row["unevenness"].items()
        }
        passed = [name for name, refused in above["scene"].items() if not refused]
        textures, scenes = (list(above[kind].values()) for kind in ("texture", "scene"))
        lines.append(
            (
                "the limit was chosen on these" if part == "chosen" else "nothing was chosen on these",
                f"{100 * textures.count(False) / len(textures):.0f}% of {len(textures)}",
                f"{100 * scenes.count(True) / len(scenes):.0f}% of {len(scenes)}",
                ", ".join(passed) or "none",
            )
        )
    return table(("", "textures that pass", "scenes that are refused", "scenes that pass"), *lines)


def pictures() -> str:
    """docs/inpaint: seconds of every function of `scram.images`."""
    gpu, cpu = table_cells.load("pictures_gpu"), table_cells.load("pictures_cpu")
    lines = []
    for name, row in gpu.items():
        quality = f"{row['psnr_db']:.2f} dB" if "psnr_db" in row else ""
        quality = f"{100 * row['right']:.1f} % within 2 px" if "right" in row else quality
        there = time(cpu[name]["seconds"]) if name in cpu else ""
        lines.append((name, time(row["seconds"]), time(row["first"]), quality, there))
    return table(("", "H200", "first call, which compiles", "result", "two cores"), *lines)
