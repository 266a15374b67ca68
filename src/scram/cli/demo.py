"""`scram demo`: rebuild one photograph from the pixels of another by cross-attention."""

from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from ..engines import dispatch
from ..functional import attend
from ..options import Impl
from ..quality import measure
from ..quality.baseline import dense_baseline
from ..quality.timing import believed
from ..results import Attended
from ..settings import Search
from . import pictures
from .arguments import MATCH_PATCH, MATCH_RADIUS, MATCH_SCALE, MATCH_WIDTH
from .console import Numbers, Printout, counted, explained, numbers_table, progress
from .features import sample_pair
from .pair import Pair, PairResult, find, pair_of
from .pictures import Panel, grid_of
from .provenance import made_with
from .rivals import default_setting

SAMPLE = 500
KINDS = (
    "SCRAM, default: windows of best keys, routed keys, clusters for all others\n"
    "SCRAM, paper: the published search, and its windows alone"
)
FEATURES = f"features of width {MATCH_WIDTH}, unit norm; scale {MATCH_SCALE:g}; windows of radius {MATCH_RADIUS}"


def run(out: Path, size: int, seed: int, impl: Impl) -> Printout:
    """Run both settings and dense attention on the sample pair, and draw what they find."""
    with progress() as step:
        step("reading two photographs")
        photographs = sample_pair(size)
        step("patch features")
        pair = pair_of(*photographs)
        impl = dispatch.choose(impl, pair.q.device, pair.q.dtype).name
        sampled = min(SAMPLE, pair.a.shape[0] * pair.a.shape[1])
        runs = {}
        rows = {}
        default = default_setting(pair.q.device.type, seed)
        paper = (Search.paper(seed=seed), None)
        for name, (setting, tail) in {"default": default, "paper": paper}.items():
            step(f"{name} setting: first call, may compile")
            find(pair, setting, impl=impl, tail=tail)
            step(f"{name} setting: search and attend, {grid_of(pair.a)} queries and keys")
            runs[name] = find(pair, setting, impl=impl, tail=tail)
            step(f"{name} setting: exact attention of {sampled} queries, to measure the result")
            rows[name] = measured(pair, runs[name], seed)
        step("dense attention, to compare the time")
        numbers: Numbers = {
            **made_with("cpu"),
            "impl": impl,
            "threads": torch.get_num_threads(),
            "grid": list(pair.a.shape[:2]),
            "width": MATCH_WIDTH,
            "patch": MATCH_PATCH,
            "radius": MATCH_RADIUS,
            "scale": MATCH_SCALE,
            "seed": seed,
            "sampled_queries": sampled,
            "settings": rows,
            "dense": time_dense(pair),
        }
        step("drawing")
        draw(pair, runs, numbers, out)
    files = f"pictures: {out / 'demo.png'} and its parts beside it; numbers: {out / 'demo.json'}"
    return Printout(numbers, [table(numbers)], files)


def measured(pair: Pair, result: PairResult, seed: int) -> Numbers:
    """The seconds of a search and attention, and how good the rebuilt colors are on the sampled queries."""
    colors = Attended(result.attended.out[..., :3], result.attended.lse)
    q = pair.q
    k = pair.k
    v = pair.v[..., :3]
    windows = attend(q, k, v, result.matches, radius=MATCH_RADIUS, scale=MATCH_SCALE)
    quality: dict[str, Tensor | float] = {
        "recall": measure.recall(q, k, result.matches, num_queries=SAMPLE, seed=seed),
        "captured_mass": measure.captured_mass(q, k, windows, scale=MATCH_SCALE, num_queries=SAMPLE, seed=seed),
        "output_error": measure.output_error(q, k, v, colors, scale=MATCH_SCALE, num_queries=SAMPLE, seed=seed),
        "psnr_db": pictures.psnr(result.rebuilt, pair.a),
    }
    return {"seconds": result.seconds, **{name: float(value) for name, value in quality.items()}}


def time_dense(pair: Pair) -> Numbers:
    """The time of torch's attention, continued from some of the queries where all would take long."""
    baseline = dense_baseline(pair.q, pair.k, pair.v[..., :3], timer=believed, scale=MATCH_SCALE)
    return {"seconds": baseline.seconds, "timed_queries": baseline.timed, "extrapolated": baseline.continued}


def times(numbers: Numbers) -> dict[str, str]:
    """The time of each setting and of dense attention, in words."""
    totals = {name: f"{sum(row['seconds'].values()):.2f} s" for name, row in numbers["settings"].items()}
    dense = numbers["dense"]
    return {**totals, "dense": f"{'~' if dense['extrapolated'] else ''}{dense['seconds']:.2f} s"}


def draw(pair: Pair, runs: dict[str, PairResult], numbers: Numbers, out: Path) -> None:
    """Write the single pictures and the sheet that holds them all."""
    fields = {name: pictures.flow_of(result.matches) for name, result in runs.items()}
    limit = pictures.wheel_limit(*fields.values())
    rows = numbers["settings"]
    time = times(numbers)
    rebuilt = runs["default"].rebuilt
    error = (rebuilt - pair.a).square().mean(-1).sqrt()
    panels = {
        "photo_a": Panel("Photograph A", pair.a, "its patches are the queries"),
        "photo_b": Panel("Photograph B", pair.b, "its patches are the keys, its colors the values"),
        "rebuilt": Panel("A rebuilt from B", rebuilt, f"default setting, PSNR {rows['default']['psnr_db']:.1f} dB"),
    }
    for name, field in fields.items():
        panels[f"matches_{name}"] = Panel(
            f"Match field, {name} setting",
            pictures.wheel_colors(field, limit),
            f"where in B each pixel of A finds its best key; recall {rows[name]['recall']:.2f}",
            pictures.wheel_legend(limit),
        )
    panels["error"] = Panel(
        "Difference to A",
        pictures.shades(error / 0.3),
        "RMS over the colors of A rebuilt minus A",
        pictures.bar_legend(0.3, "RMS difference"),
    )
    pictures.save_each(panels, out)
    title = f"SCRAM: cross-attention between photographs of {grid_of(pair.a)} pixels"
    scram = ", ".join(f"{time[name]} ({name})" for name in runs)
    note = f"{MATCH_PATCH} x {MATCH_PATCH} patches; {FEATURES}; SCRAM {scram}; dense attention {time['dense']}"
    pictures.sheet(list(panels.values()), out / "demo.png", title, note)


def table(numbers: Numbers) -> Table:
    """The numbers for people."""
    dense = numbers["dense"]
    time = times(numbers)
    grid = " x ".join(map(str, numbers["grid"]))
    source = f"extrapolated from {dense['timed_queries']} queries" if dense["extrapolated"] else "measured"
    measures = ("recall@1", "captured mass", "output error")
    time_means = "time: of search, clusters and attention, in a second call: nothing compiles"
    rows = [
        (f"SCRAM, {name}", grid, time[name], *(f"{row[k]:.3f}" for k in ("recall", "captured_mass", "output_error")))
        for name, row in numbers["settings"].items()
    ]
    threads = counted(numbers["threads"], "thread")
    title = f"A rebuilt from B by cross-attention ({numbers['impl']} implementation, {threads})"
    caption = (
        f"{KINDS}\n{time_means}\n{explained(*measures)}\n"
        f"captured mass is that of the windows alone, output error that of all keys\n"
        f"all three against exact attention on {numbers['sampled_queries']} queries drawn by the seed\n"
        f"time of dense {source}\n{FEATURES}"
    )
    rows.append(("dense, torch SDPA", grid, time["dense"], "1", "1", "0"))
    return numbers_table(("attention", "grid", "time", *measures), rows, title, caption)
