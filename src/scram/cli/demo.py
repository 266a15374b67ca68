"""`scram demo`: rebuild one photograph from the pixels of another by sparse cross-attention."""

import json
from dataclasses import asdict, dataclass
from math import log10
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.table import Table

from .. import Attended, Matches, Search, dispatch, measure
from . import pictures
from .console import console, counted, one_line_errors, progress, writable_folder
from .features import sample_pair
from .match import PATCH, RADIUS, SCALE, WIDTH, Pair, find, pair_of
from .pictures import Panel
from .provenance import made_with

SAMPLE = 500
DENSE_QUERIES = 1024


@dataclass(frozen=True)
class Run:
    """What one setting found, and how good it is on the sampled queries."""

    matches: Matches
    attended: Attended
    seconds: dict[str, float]
    quality: dict[str, float]


@dataclass(frozen=True)
class Dense:
    """The time of torch's dense attention for all queries, from the time of some of them."""

    seconds: float
    timed_queries: int
    extrapolated: bool


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pictures and demo.json.")] = Path("scram-demo"),
    size: Annotated[int, typer.Option(min=16, help="Height of the photographs in pixels.")] = 288,
    seed: Annotated[int, typer.Option(help="Seed of the search and of the sampled queries.")] = 0,
    impl: Annotated[str, typer.Option(help="Which implementation runs; `scram info` lists them.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON, not as a table.")] = False,
) -> None:
    """Rebuild photograph A from the pixels of photograph B, and measure it against exact attention."""
    with one_line_errors():
        writable_folder(out)
        with progress() as step:
            step("reading two photographs")
            pair = pair_of(*sample_pair(size))
            impl = dispatch.choose(impl, pair.q.device, pair.q.dtype).name
            settings = {"paper": Search.paper(seed=seed), "default": Search(seed=seed)}
            runs = {}
            for name, setting in settings.items():
                step(f"SCRAM, {name} setting, on {_grid(pair)} queries and keys")
                runs[name] = run(pair, setting, seed, impl)
            step("dense attention, to compare the time")
            dense = time_dense(pair)
            step("drawing")
            draw(pair, runs, dense, out)
        numbers = report(pair, runs, dense, seed, impl)
        text = json.dumps(numbers, indent=2, allow_nan=False)
        (out / "demo.json").write_text(text + "\n")
        if as_json:
            typer.echo(text)
            return
        console().print(table(pair, runs, dense, impl))
        typer.echo(f"pictures: {out / 'demo.png'} and its parts beside it; numbers: {out / 'demo.json'}")


def run(pair: Pair, setting: Search, seed: int, impl: str) -> Run:
    """Search and attend as `scram match` does, then measure the rebuilt colours."""
    found = find(pair, setting, impl=impl, timed=True)
    colours = Attended(found.attended.out[..., :3], found.attended.lse)
    quality = {
        "recall": measure.recall(pair.q, pair.k, found.matches, sample=SAMPLE, seed=seed),
        "captured_mass": measure.captured_mass(pair.q, pair.k, colours, scale=SCALE, sample=SAMPLE, seed=seed),
        "output_error": measure.output_error(
            pair.q, pair.k, pair.v[..., :3], colours, scale=SCALE, sample=SAMPLE, seed=seed
        ),
    }
    return Run(found.matches, colours, found.seconds, {name: float(value) for name, value in quality.items()})


def time_dense(pair: Pair) -> Dense:
    """Time `F.scaled_dot_product_attention` on some queries and all keys, and scale to all queries."""
    q, k, v = (x.flatten(2, -2) for x in (pair.q, pair.k, pair.v[..., :3]))
    v = F.pad(v, (0, WIDTH - v.shape[-1]))  # torch's fast kernel wants values as wide as keys
    queries = min(DENSE_QUERIES, q.shape[2])
    some = q[:, :, torch.linspace(0, q.shape[2] - 1, queries).long()]
    F.scaled_dot_product_attention(some, k, v, scale=SCALE)
    start = perf_counter()
    F.scaled_dot_product_attention(some, k, v, scale=SCALE)
    seconds = perf_counter() - start
    return Dense(seconds * q.shape[2] / queries, queries, queries < q.shape[2])


def draw(pair: Pair, runs: dict[str, Run], dense: Dense, out: Path) -> None:
    """Write the single pictures and the sheet that holds them all."""
    fields = {name: pictures.offsets(one.matches) for name, one in runs.items()}
    limit = pictures.wheel_limit(*fields.values())
    rebuilt = runs["default"].attended.out[0, 0]
    error = (rebuilt - pair.a).square().mean(-1).sqrt()
    panels = {
        "photo_a": Panel("Photograph A", pair.a, "its patches ask: the queries"),
        "photo_b": Panel("Photograph B", pair.b, "its patches answer: the keys; its colours are the values"),
        "rebuilt": Panel("A rebuilt from B", rebuilt, f"default setting, PSNR {_psnr(pair, runs['default']):.1f} dB"),
    }
    for name, field in fields.items():
        panels[f"matches_{name}"] = Panel(
            f"Match field, {name} setting",
            pictures.wheel_colours(field, limit),
            f"where in B each pixel of A looks; recall {runs[name].quality['recall']:.2f}",
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
    times = ", ".join(f"{_time(one)} ({name})" for name, one in runs.items())
    pictures.sheet(
        list(panels.values()),
        out / "demo.png",
        f"SCRAM: cross-attention between photographs of {_grid(pair)} pixels",
        f"{PATCH} x {PATCH} patch features of width {WIDTH}, scale {SCALE:g}, windows of radius {RADIUS}; "
        f"SCRAM {times}; dense attention {_dense_time(dense)}",
    )


def report(pair: Pair, runs: dict[str, Run], dense: Dense, seed: int, impl: str) -> dict[str, Any]:
    """Every number of the demo, and what it was measured with."""
    return {
        **made_with("cpu"),
        "impl": impl,
        "threads": torch.get_num_threads(),
        "grid": list(pair.a.shape[:2]),
        "width": WIDTH,
        "patch": PATCH,
        "radius": RADIUS,
        "scale": SCALE,
        "seed": seed,
        "sampled_queries": min(SAMPLE, pair.a.shape[0] * pair.a.shape[1]),
        "settings": {
            name: {"seconds": one.seconds, **one.quality, "psnr_db": _psnr(pair, one)} for name, one in runs.items()
        },
        "dense": asdict(dense),
    }


def table(pair: Pair, runs: dict[str, Run], dense: Dense, impl: str) -> Table:
    """The numbers for people."""
    sample = min(SAMPLE, pair.a.shape[0] * pair.a.shape[1])
    measured = f"extrapolated from {dense.timed_queries} queries" if dense.extrapolated else "measured"
    threads = counted(torch.get_num_threads(), "thread")
    result = Table(
        title=f"A rebuilt from B by cross-attention ({impl} implementation, {threads})",
        caption=f"recall, mass and error are against exact attention on {sample} queries drawn by the seed; "
        f"patch features of width {WIDTH}, unit norm, scale {SCALE:g}, radius {RADIUS}; time of dense {measured}",
    )
    result.add_column("attention")
    for heading in ("grid", "time", "recall@1", "captured mass", "output error"):
        result.add_column(heading, justify="right")
    for name, one in runs.items():
        quality = [f"{one.quality[key]:.3f}" for key in ("recall", "captured_mass", "output_error")]
        result.add_row(f"SCRAM, {name}", _grid(pair), _time(one), *quality)
    result.add_row("dense, torch SDPA", _grid(pair), _dense_time(dense), "1", "1", "0")
    return result


def _grid(pair: Pair) -> str:
    return " x ".join(map(str, pair.a.shape[:2]))


def _time(one: Run) -> str:
    return f"{sum(one.seconds.values()):.2f} s"


def _dense_time(dense: Dense) -> str:
    return f"{'~' if dense.extrapolated else ''}{dense.seconds:.2f} s"


def _psnr(pair: Pair, one: Run) -> float:
    return -10 * log10(float((one.attended.out[0, 0] - pair.a).square().mean()))
