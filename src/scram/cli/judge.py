"""`scram judge`: the error and the speed of any attention function on a user's tensors."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from importlib import import_module
from math import inf, prod
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import typer
from rich.table import Table
from torch import Tensor

from ..core.dense import dense_attention
from ..functional import attention
from ..options import JudgedLayout
from ..quality.judge import Attention, Judge, Judgment
from ..quality.tables import in_words
from ..quality.timing import memory_status
from ..settings import Search
from . import INTERRUPTED, baselines, charts, rivals
from .arguments import BACKENDS, FAMILIES, family_of
from .console import Numbers, console, fail, numbers_table, progress
from .measuring import alarm
from .pictures import INK
from .provenance import made_with
from .tensors import Layout, read

LINES_SHOWN = 24  # of the table; if all heads of all backends need more, the worst of each is shown
MOST_LISTED = 12  # backends whose heads are drawn one by one
MEASURES = (
    "output error: ||out - exact|| / ||exact|| over the sampled queries of a head; few queries dominate it",
    "95th percentile, median: of the error of a query, |out - exact| / RMS |exact| of the head, with 95 % intervals",
    "CPU: of all threads; x dense: times faster than torch's dense attention in the same run; MiB: peak memory",
)
UNSTEADY = "?: repeated times differ by more than a third: the machine was busy, judge again"


def run(
    path: Path,
    backends: list[str],
    names: tuple[str, str, str],
    tensor_layout: Layout,
    layout: JudgedLayout,
    causal: bool,
    dtype: str | None,
    device: str,
    num_queries: int,
    seed: int,
    longest: float,
    out: Path,
    as_json: bool,
) -> None:
    """Judge one backend after the other; what is done is stored and printed, also after Ctrl-C."""
    q, k, v, scale = prepared(path, names, tensor_layout, dtype, device)
    rows: dict[str, Judgment | str] = {}
    stopped = False
    with progress() as step:
        step(f"exact attention, {min(num_queries, prod(q.shape[2:-1]))} queries")
        judge = Judge(q, k, v, causal=causal, num_queries=num_queries, seed=seed)
        about = {
            **made_with(device),
            "file": path.name,
            "shapes": [list(x.shape) for x in (q, k, v)],
            "dtype": str(q.dtype).removeprefix("torch."),
            "scale": scale,
            "causal": causal,
            "seed": seed,
            "num_queries": len(judge.truth.queries),
            "queries": prod(q.shape[2:-1]),
        }
        try:
            for name in backends:
                step(name)
                rows[name] = judged(judge, name, layout, causal, seed, longest)
                _store(out / "judge.json", about, rows)
        except KeyboardInterrupt:
            stopped = True
    done = [one for one in rows.values() if isinstance(one, Judgment)]
    if done:
        draw(done, out / "judge.png", f"{path.name}: {_shape(q, k)}")
    if rows:
        _print(rows, about, out, bool(done), as_json)
    if stopped:
        fail("interrupted" + "; what was measured is kept" * bool(rows), INTERRUPTED)
    if not done:
        fail("no backend could be measured")


def prepared(
    path: Path, names: tuple[str, str, str], tensor_layout: Layout, dtype: str | None, device: str
) -> tuple[Tensor, Tensor, Tensor, float | None]:
    """The tensors of the file, ready: a scale of the scores is multiplied into q, so no backend has to know it."""
    q, k, v, scale = read(path, names, tensor_layout)
    kind = (
        getattr(torch, dtype) if dtype else q.dtype if device == "cuda" else torch.promote_types(q.dtype, torch.float)
    )
    if scale is not None:
        if not 0 < scale < inf:
            raise ValueError(f"scale must be positive and finite, got {scale}")
        q = q.to(torch.float64 if q.dtype == torch.float64 else torch.float32) * (scale * q.shape[-1] ** 0.5)
    q, k, v = (x.to(device, kind) for x in (q, k, v))
    return q, k, v, scale


def judged(judge: Judge, name: str, layout: JudgedLayout, causal: bool, seed: int, longest: float) -> Judgment | str:
    """What was found, or why nothing was."""
    try:
        with alarm(longest), warnings.catch_warnings(), redirect_stdout(sys.stderr):  # stdout is for the result
            warnings.simplefilter("ignore")  # of other packages
            torch.manual_seed(seed)
            call = backend(name, judge.q, judge.k, causal)
            return judge.judge(call, name=name, layout=layout if ":" in name else "grid")
    except TimeoutError:
        return f"not finished in {longest:g} s"
    except (torch.OutOfMemoryError, MemoryError) as error:
        return f"out of memory: {_first_line(error)}"
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:160]


def backend(name: str, q: Tensor, k: Tensor, causal: bool) -> Attention:
    """The function of that name for tensors of these shapes."""
    if ":" in name:
        module, _, function = name.partition(":")
        if "" not in sys.path:
            sys.path.insert(0, "")  # a file in this folder
        imported: Attention = attrgetter(function)(import_module(module))
        return imported
    found = family_of(name)
    if found is not None:
        family, number = found
        if causal and not family.startswith("scram"):
            raise ValueError("takes no causal order")
        return _SETTINGS[family](number, q, k, causal)
    return _OURS[name](q, k, causal)


def _scram(count: int, q: Tensor, k: Tensor, causal: bool, searches: bool = False) -> Attention:
    """SCRAM with so many clusters and twice as many routed keys; without a search, or with that of the default."""
    search, tail = rivals.default_setting(q.device.type, 0)
    clusters = replace(tail, count=count, keys=2 * count)
    return partial(attention, causal=causal, search=search if searches else None, tail=clusters)


def _blocks(call: Callable[..., Tensor], q: Tensor, k: Tensor, **settings: Any) -> Attention:
    """A baseline of blocks: for one grid of queries and keys."""
    if q.shape[1:-1] != k.shape[1:-1]:
        raise ValueError(f"takes equal grids and heads of queries and keys, got {_shape(q, k)}")
    there = len(baselines.blocks_of(q.shape[2:-1], q.device).points)
    if settings.get("count", 0) >= there:
        raise ValueError(f"there are {there} blocks, so it would be dense attention")
    return lambda q, k, v: call(q, k, v, q.shape[-1] ** -0.5, **settings)


def _over_all(call: Callable[..., Tensor], q: Tensor, k: Tensor, count: int) -> Attention:
    """A baseline that takes any grids."""
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"takes equal heads of queries and keys, got {_shape(q, k)}")
    return lambda q, k, v: call(q, k, v, q.shape[-1] ** -0.5, count=count)


def _rival(call: rivals.Attention, q: Tensor, k: Tensor, causal: bool, dense: bool = False) -> Attention:
    """A rival of the benchmarks: for one key of each head, no order of keys, and pictures of one size."""
    if causal:
        raise ValueError("takes no causal order")
    if q.ndim != 5 or q.shape[1:-1] != k.shape[1:-1]:
        raise ValueError(f"takes pictures with equal grids and heads of queries and keys, got {_shape(q, k)}")
    needed = 2 * 4 * q.shape[0] * q.shape[1] * prod(q.shape[2:-1]) ** 2 if dense and not q.is_cuda else 0
    free = memory_status("MemAvailable", "/proc/meminfo")
    if free is not None and needed > free:
        raise MemoryError(f"needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")
    return lambda q, k, v: call(q, k, v, q.shape[-1] ** -0.5)


def _flex(q: Tensor, k: Tensor, causal: bool) -> Attention:
    late: rivals.Attention = lambda *given: rivals.flex("local blocks", q.shape[3], q.device, q.shape[2])(*given)  # noqa: E731
    return _rival(late, q, k, causal, dense=True)


def _plain(call: rivals.Attention, dense: bool = False) -> Callable[[Tensor, Tensor, bool], Attention]:
    return lambda q, k, causal: _rival(call, q, k, causal, dense)


_OURS: dict[str, Callable[[Tensor, Tensor, bool], Attention]] = {
    "sdpa": lambda q, k, causal: partial(dense_attention, causal=causal),
    "scram": lambda q, k, causal: partial(attention, causal=causal),
    "scram-windows": lambda q, k, causal: partial(attention, causal=causal, search=Search(), tail=None),
    "scram-paper": lambda q, k, causal: partial(attention, causal=causal, search=Search.paper(), tail=None),
    "full": _plain(rivals.full, dense=True),
    "local": _plain(rivals.local),
    "flex-local": _flex,
    "natten": _plain(rivals.natten),
    "brute-force": _plain(rivals.brute_force),
}
assert tuple(_OURS) == BACKENDS
_SETTINGS: dict[str, Callable[[int, Tensor, Tensor, bool], Attention]] = {
    "scram-clusters": _scram,
    "scram-search": partial(_scram, searches=True),
    "local-blocks": lambda number, q, k, causal: _blocks(baselines.block_sparse, q, k, reach=number // 2),
    "best-blocks": lambda number, q, k, causal: _blocks(baselines.block_sparse, q, k, count=number),
    "flex-blocks": lambda number, q, k, causal: _blocks(baselines.flex_blocks, q, k, count=number),
    "block-means": lambda number, q, k, causal: _blocks(baselines.block_sparse, q, k, count=number, means=True),
    "random-features": lambda number, q, k, causal: _over_all(baselines.random_features, q, k, number),
    "top-k": lambda number, q, k, causal: _over_all(baselines.top_keys, q, k, number),
}
assert tuple(_SETTINGS) == tuple(FAMILIES)


def _shape(q: Tensor, k: Tensor) -> str:
    queries, keys = (" x ".join(map(str, x.shape[2:-1])) for x in (q, k))
    grids = f"{queries}" if queries == keys else f"{queries} queries, {keys} keys"
    heads = f"{q.shape[1]}" if q.shape[1] == k.shape[1] else f"{q.shape[1]} and {k.shape[1]}"
    return f"{grids}, width {q.shape[-1]}, batch {q.shape[0]}, heads {heads}"


def _numbers(about: Numbers, rows: dict[str, Judgment | str]) -> Numbers:
    listed = {name: {"failed": one} if isinstance(one, str) else one.numbers() for name, one in rows.items()}
    return {**about, "rows": listed}


def _store(path: Path, about: Numbers, rows: dict[str, Judgment | str]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(_numbers(about, rows), indent=1, allow_nan=False) + "\n")
    new.replace(path)  # Ctrl-C leaves the old file or the new one


def _print(rows: dict[str, Judgment | str], about: Numbers, out: Path, drawn: bool, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_numbers(about, rows), indent=1, allow_nan=False))
        return
    console().print(table(rows, about))
    for name, one in rows.items():
        if isinstance(one, str):
            typer.echo(f"{name} failed: {one}")
    typer.echo(f"figure: {out / 'judge.png'}; " * drawn + f"numbers: {out / 'judge.json'}")


def table(rows: dict[str, Judgment | str], about: Numbers) -> Table:
    """A line for each head of a backend, the time in its first."""
    headings = (
        "backend",
        "head",
        "output error",
        "95th percentile",
        "median",
        "time (spread)",
        "CPU",
        "x dense",
        "MiB",
    )
    lines: list[tuple[str, ...]] = []
    batches, heads = about["shapes"][0][:2]
    every = [(b, h) for b in range(batches) for h in range(heads)]
    all_heads = len(every) * len(rows) <= LINES_SHOWN
    for name, one in rows.items():
        if isinstance(one, str):
            lines.append((name, "", "failed"))
            continue
        for number, at in enumerate(every if all_heads else [one.worst]):
            head = f"{at[0]}, {at[1]}" if batches > 1 else str(at[1])
            errors = f"{float(one.output_error[at]):.4f}", one.p95_error.cell(*at), one.median_error.cell(*at)
            cells = (head, *(re.sub(r"\b0\.", ".", cell) for cell in errors))
            lines.append((name, *cells, *_time(one)) if number == 0 else ("", *cells))
    worst = "" if all_heads else f"; the worst of {len(every)} heads"
    title = f"{about['file']}, {about['dtype']}: {about['num_queries']} of {about['queries']} queries{worst}"
    busy = any(isinstance(one, Judgment) and not one.steady for one in rows.values())
    return numbers_table(headings, lines, title, "\n".join([*MEASURES, *[UNSTEADY] * busy]))


def _time(one: Judgment) -> tuple[str, ...]:
    time = one.timing
    faster = float(f"{one.ratio:.3g}")
    least, most = (f"{x / time.seconds - 1:+.0%}" for x in (time.least, time.most))
    spread = f" ({least}, {most})" if time.calls > 1 else ""
    peak = "" if time.peak_bytes is None else f"{time.peak_bytes / 2**20:.0f}"
    return (
        f"{in_words(time.seconds)}{spread}",
        in_words(time.cpu_seconds) if time.cpu_seconds else "",
        f"{'~' * one.dense_is_continued}{faster:g}{'' if one.steady else ' ?'}",
        peak,
    )


def draw(judgments: list[Judgment], path: Path, title: str) -> None:
    """Left: output error of the worst head against time. Right: errors of all heads, where backends are few."""
    many = len(judgments) > MOST_LISTED
    figure = charts.new_figure(9.5 if many else 13, 6.2 if many else 1.6 + max(4.4, 0.5 * len(judgments)), title)
    left, *right = figure.subplots(1, 1 if many else 2, squeeze=False, width_ratios=None if many else (1.25, 1))[0]
    points = [
        charts.Point(
            one.name, *(family_of(one.name) or (one.name, 0)), 1 / one.ratio, _finite(one.output_error[one.worst])
        )
        for one in judgments
    ]
    styles = charts.error_against_time(left, points)
    left.set_title("lower left is better", loc="left", color=INK, fontsize=10)
    for axes in right:
        _all_heads(axes, judgments, [styles[point.family] for point in points])
    figure.savefig(path)


def _all_heads(axes: Any, judgments: list[Judgment], styles: list[charts.Style]) -> None:
    for row, (one, (color, marker)) in enumerate(zip(judgments, styles, strict=True)):
        for value, face in ((one.p95_error.value, "white"), (one.output_error, color)):
            x = [max(_finite(each), charts.LEAST_ERROR) for each in value.flatten()]
            axes.plot(x, [row] * len(x), marker, color=color, markerfacecolor=face, markersize=6, alpha=0.8)
    axes.set_yticks(range(len(judgments)), [one.name for one in judgments], fontweight="bold")
    for label, (color, _) in zip(axes.get_yticklabels(), styles, strict=True):
        label.set_color(color)
    axes.set_ylim(len(judgments) - 0.5, -0.5)
    axes.set_xlabel("error")
    axes.set_title("every head: output error (filled), 95th percentile (hollow)", loc="left", color=INK, fontsize=10)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    charts.error_axis(axes, "x")


def _finite(x: Tensor) -> float:
    value = float(x)
    return value if value < 10 else 10.0  # also what is NaN
