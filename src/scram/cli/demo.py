"""`scram demo`: rebuild one photograph from the pixels of another by sparse cross-attention."""

from dataclasses import asdict, dataclass
from math import log10
from pathlib import Path
from time import perf_counter

import torch
import torch.nn.functional as F
from rich.table import Table

from .. import dispatch, measure
from ..types import Attended, Matches, Search
from . import pictures
from .arguments import MATCH_PATCH, MATCH_RADIUS, MATCH_SCALE, MATCH_WIDTH
from .console import Numbers, Report, Step, counted, explained, progress
from .features import sample_pair
from .match import Pair, find, pair_of
from .pictures import Panel, grid_of
from .provenance import made_with

SAMPLE = 500
DENSE_QUERIES = 1024


@dataclass(frozen=True)
class Run:
    """What one setting found, the seconds it took, and how good it is on the sampled queries."""

    matches: Matches
    attended: Attended
    seconds: dict[str, float]
    quality: dict[str, float]

    @property
    def time(self) -> str:
        return f"{sum(self.seconds.values()):.2f} s"


@dataclass(frozen=True)
class Dense:
    """The time of torch's dense attention for all queries, from the time of some of them."""

    seconds: float
    timed_queries: int
    extrapolated: bool

    @property
    def time(self) -> str:
        return f"{'~' if self.extrapolated else ''}{self.seconds:.2f} s"


def run(out: Path, size: int, seed: int, impl: str) -> Report:
    """Run both settings and dense attention on the sample pair, and draw what they find."""
    with progress() as step:
        step("reading two photographs")
        photographs = sample_pair(size)
        step("patch features")
        pair = pair_of(*photographs)
        impl = dispatch.choose(impl, pair.q.device, pair.q.dtype).name
        settings = {"paper": Search.paper(seed=seed), "default": Search(seed=seed)}
        runs = {name: run_setting(pair, name, setting, seed, impl, step) for name, setting in settings.items()}
        step("dense attention, to compare the time")
        dense = time_dense(pair)
        step("drawing")
        draw(pair, runs, dense, out)
    files = f"pictures: {out / 'demo.png'} and its parts beside it; numbers: {out / 'demo.json'}"
    return Report(numbers_of(pair, runs, dense, seed, impl), [table(pair, runs, dense, impl)], files)


def run_setting(pair: Pair, name: str, setting: Search, seed: int, impl: str, step: Step) -> Run:
    """Search and attend as `scram match` does, then measure the rebuilt colours."""
    step(f"{name} setting: first call, may compile")
    find(pair, setting, impl=impl)
    step(f"{name} setting: search and attend, {grid_of(pair.a)} queries and keys")
    found = find(pair, setting, impl=impl)
    step(f"{name} setting: exact attention of {_sampled(pair)} queries, to measure the result")
    colours = Attended(found.attended.out[..., :3], found.attended.lse)
    q, k, v = pair.q, pair.k, pair.v[..., :3]
    quality = {
        "recall": measure.recall(q, k, found.matches, sample=SAMPLE, seed=seed),
        "captured_mass": measure.captured_mass(q, k, colours, scale=MATCH_SCALE, sample=SAMPLE, seed=seed),
        "output_error": measure.output_error(q, k, v, colours, scale=MATCH_SCALE, sample=SAMPLE, seed=seed),
    }
    return Run(found.matches, colours, found.seconds, {name: float(value) for name, value in quality.items()})


def time_dense(pair: Pair) -> Dense:
    """Time `F.scaled_dot_product_attention` on some queries and all keys, and scale to all queries."""
    q, k, v = (x.flatten(2, -2) for x in (pair.q, pair.k, pair.v[..., :3]))
    v = F.pad(v, (0, MATCH_WIDTH - v.shape[-1]))  # torch's fast kernel needs values as wide as keys
    queries = min(DENSE_QUERIES, q.shape[2])
    some = q[:, :, torch.linspace(0, q.shape[2] - 1, queries).long()]
    F.scaled_dot_product_attention(some, k, v, scale=MATCH_SCALE)
    start = perf_counter()
    F.scaled_dot_product_attention(some, k, v, scale=MATCH_SCALE)
    seconds = perf_counter() - start
    return Dense(seconds * q.shape[2] / queries, queries, queries < q.shape[2])


def draw(pair: Pair, runs: dict[str, Run], dense: Dense, out: Path) -> None:
    """Write the single pictures and the sheet that holds them all."""
    fields = {name: pictures.offsets(one.matches) for name, one in runs.items()}
    limit = pictures.wheel_limit(*fields.values())
    rebuilt = runs["default"].attended.out[0, 0]
    error = (rebuilt - pair.a).square().mean(-1).sqrt()
    panels = {
        "photo_a": Panel("Photograph A", pair.a, "its patches are the queries"),
        "photo_b": Panel("Photograph B", pair.b, "its patches are the keys, its colours the values"),
        "rebuilt": Panel("A rebuilt from B", rebuilt, f"default setting, PSNR {_psnr(pair, runs['default']):.1f} dB"),
    }
    for name, field in fields.items():
        panels[f"matches_{name}"] = Panel(
            f"Match field, {name} setting",
            pictures.wheel_colours(field, limit),
            f"where in B each pixel of A finds its best key; recall {runs[name].quality['recall']:.2f}",
            pictures.wheel_legend(limit),
        )
    panels["error"] = Panel(
        "Difference to A",
        pictures.error_map(error, 0.3),
        "RMS over the colours of A rebuilt minus A",
        pictures.bar_legend(0.3, "RMS difference"),
    )
    for name, panel in panels.items():
        pictures.save(panel.picture, out / f"{name}.png")
    times = ", ".join(f"{one.time} ({name})" for name, one in runs.items())
    title = f"SCRAM: cross-attention between photographs of {grid_of(pair.a)} pixels"
    note = f"{MATCH_PATCH} x {MATCH_PATCH} patches; {_features()}; SCRAM {times}; dense attention {dense.time}"
    pictures.sheet(list(panels.values()), out / "demo.png", title, note)


def numbers_of(pair: Pair, runs: dict[str, Run], dense: Dense, seed: int, impl: str) -> Numbers:
    """Every number of the demo, and what it was measured with."""
    return {
        **made_with("cpu"),
        "impl": impl,
        "threads": torch.get_num_threads(),
        "grid": list(pair.a.shape[:2]),
        "width": MATCH_WIDTH,
        "patch": MATCH_PATCH,
        "radius": MATCH_RADIUS,
        "scale": MATCH_SCALE,
        "seed": seed,
        "sampled_queries": _sampled(pair),
        "settings": {
            name: {"seconds": one.seconds, **one.quality, "psnr_db": _psnr(pair, one)} for name, one in runs.items()
        },
        "dense": asdict(dense),
    }


def table(pair: Pair, runs: dict[str, Run], dense: Dense, impl: str) -> Table:
    """The numbers for people."""
    measured = f"extrapolated from {dense.timed_queries} queries" if dense.extrapolated else "measured"
    threads = counted(torch.get_num_threads(), "thread")
    measures = ("recall@1", "captured mass", "output error")
    result = Table(
        title=f"A rebuilt from B by cross-attention ({impl} implementation, {threads})",
        caption=f"{explained(*measures)}\n"
        f"all three against exact attention on {_sampled(pair)} queries drawn by the seed\n"
        f"time of dense {measured}; {_features()}",
    )
    result.add_column("attention")
    for heading in ("grid", "time", *measures):
        result.add_column(heading, justify="right")
    grid = grid_of(pair.a)
    for name, one in runs.items():
        quality = [f"{one.quality[key]:.3f}" for key in ("recall", "captured_mass", "output_error")]
        result.add_row(f"SCRAM, {name}", grid, one.time, *quality)
    result.add_row("dense, torch SDPA", grid, dense.time, "1", "1", "0")
    return result


def _features() -> str:
    return f"features of width {MATCH_WIDTH}, unit norm; scale {MATCH_SCALE:g}; windows of radius {MATCH_RADIUS}"


def _sampled(pair: Pair) -> int:
    return min(SAMPLE, pair.a.shape[0] * pair.a.shape[1])


def _psnr(pair: Pair, one: Run) -> float:
    return -10 * log10(float((one.attended.out[0, 0] - pair.a).square().mean()))
