"""`scram bench`: time and memory against the size of a picture, SCRAM beside its rivals."""

import json
from dataclasses import replace
from math import inf
from pathlib import Path
from time import perf_counter

import typer
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from . import INTERRUPTED, charts, measuring, not_installed
from .console import console, counted, explained, fail, numbers_table, progress_line
from .features import sample_pair
from .measuring import Case, Limits, Pictures, Results, Row

ROW = 240.0  # seconds; pynndescent compiles for two minutes
UNSTEADY = "?: repeated times differ by more than a third: the machine was busy; measure again"
BUDGET = {"cpu": 140.0, "cuda": inf}  # seconds


def run(
    out: Path,
    device: str,
    sizes: tuple[int, ...],
    widths: tuple[int, ...],
    parts: tuple[str, ...],
    longest: float,
    budget: float | None,
    resume: bool,
    draw_only: bool,
    as_json: bool,
) -> None:
    """Measure what bench.json lacks, store each row at once, and print the tables."""
    start = perf_counter()
    results = Results(out / "bench.json", resume or draw_only, "city", device)
    todo = list(measuring.cases(sizes, widths, device, parts))
    stopped = False
    if not draw_only:
        limits = Limits(longest, BUDGET[device] if budget is None else budget, ROW)
        stopped = _measure(todo, Pictures(*sample_pair(), device), results, limits, start)
    rows = list(results.rows.values())
    if rows:
        late = [row for row in rows if row.get("skipped") == measuring.LATE]
        if len(late) == len(rows) and not stopped:
            raise ValueError("there was no time to measure anything; give --budget more seconds")
        charts.performance(rows, out / "bench.png", out / "bench_more.png")
        _print(rows, results, out / "bench.png", late, as_json)
    if stopped:
        fail("interrupted" + "; what was measured is kept, --resume continues" * bool(rows), INTERRUPTED)
    if not rows:
        raise ValueError(f"nothing was measured: {results.path} has no rows")


def _print(rows: list[Row], results: Results, plot: Path, late: list[Row], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"slopes": slopes(rows), "rows": results.rows}, indent=1))
        return
    screen = console()
    for table in tables(rows):
        screen.print(table)
    typer.echo(f"rows: {results.path}; plots: {plot}, {plot.with_stem('bench_more')}")
    packages = {row["failed"].split()[0] for row in rows if row.get("failed", "").endswith("is not installed")}
    if packages:
        typer.echo(not_installed(", ".join(sorted(packages)), "cli", "bench"))
    if late:
        were = "was" if len(late) == 1 else "were"
        typer.echo(f"{counted(len(late), 'row')} {were} left for lack of time: {left_out(late)}")
        typer.echo("--resume measures them, --budget gives more")


def left_out(rows: list[Row]) -> str:
    """The parts of these rows and their sizes."""
    parts: dict[str, set[int]] = {}
    for row in rows:
        part = "search" if row["kind"] == "search" else "backward" if row["backward"] else "forward"
        parts.setdefault(part, set()).add(row["size"])
    return ", ".join(f"{part} ({', '.join(f'{n}x{n}' for n in sorted(sizes))})" for part, sizes in parts.items())


class TimeLeft(ProgressColumn):
    """The time left, estimated from the rows so far, at most what the budget leaves."""

    def __init__(self, budget: float) -> None:
        super().__init__()
        self.budget = budget

    def render(self, task: Task) -> Text:
        rows = inf if task.time_remaining is None else task.time_remaining
        left = min(rows, max(self.budget - (task.elapsed or 0.0), 0.0))
        return Text("-:--" if left == inf else f"{int(left) // 60}:{int(left) % 60:02}")


def _measure(todo: list[Case], pictures: Pictures, results: Results, limits: Limits, start: float) -> bool:
    """Measure what is not there yet; True when Ctrl-C ended it. The budget counts from `start`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeLeft(limits.budget),
    )
    with progress_line(*columns, total=len(todo)) as (bar, task):
        try:
            for number, case in enumerate(todo):
                name = f"{case.contender}, {case.size} x {case.size}, E={case.width}"
                bar.update(task, completed=number, description=name)
                if "seconds" in results.rows.get(case.name, {}):
                    continue
                left = limits.budget - (perf_counter() - start)
                row = measuring.run(case, pictures, results.rows, replace(limits, budget=left))
                if left > 0:
                    results.put(case, row)
                else:  # not measured, so there is nothing to lose: all these rows are written at once
                    results.add(case, row)
            results.write()
        except KeyboardInterrupt:
            return True
    return False


def slopes(rows: list[Row]) -> dict[str, float]:
    """Exponents of time against the number of pixels."""
    fitted = {" ".join(map(str, key)): measuring.slope(some) for key, some in charts.series(rows).items()}
    return {name: value for name, value in fitted.items() if value is not None}


def tables(rows: list[Row]) -> list[Table]:
    """One table for each width and pass, one for the search alone; what did not run says why."""
    result = []
    for width in sorted({row["width"] for row in rows}):
        for kind, backward in (("attention", False), ("attention", True), ("search", False)):
            some = [r for r in rows if (r["width"], r["kind"], r["backward"]) == (width, kind, backward)]
            if any("about" in row or row.get("skipped") != measuring.LATE for row in some):
                result.append(_table(some, width, kind, backward))
    return result


def _table(rows: list[Row], width: int, kind: str, backward: bool) -> Table:
    sizes = sorted({row["size"] for row in rows})
    part = "search alone, index building included" if kind == "search" else "forward" + " and backward" * backward
    title = f"width {width}, {part}, milliseconds, fastest call (MiB of peak memory)"
    note = "slope: exponent of time against pixels; ~: too long, or no time left; continued from smaller sizes\n"
    quality, name = ("recall", "recall@1") if kind == "search" else ("output_error", "output error")
    measured = () if backward else (name,)
    lines = []
    for contender in dict.fromkeys(row["contender"] for row in rows):
        by_size = {row["size"]: row for row in rows if row["contender"] == contender}
        slope = measuring.slope(list(by_size.values()))
        cells = [_cell(by_size.get(size)) for size in sizes]
        cells.append("" if slope is None else f"{slope:.2f}")
        if not backward:
            values = [row[quality] for _, row in sorted(by_size.items()) if row.get(quality) is not None]
            cells.append(f"{values[-1]:.3f}" if values else "-")
        lines.append((contender, *cells))
    if not all(row.get("steady", True) for row in rows):
        note += f"{UNSTEADY}\n"
    headings = ("contender", *(f"{size}x{size}" for size in sizes), "slope", *measured)
    return numbers_table(headings, lines, title, note + explained(*measured))


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if "failed" in row:
        return "no memory" if "memory" in row["failed"] else "failed"
    if "skipped" in row:
        return f"~{_milliseconds(row['about'])}" if "about" in row else "no time"
    peak = row.get("peak_bytes")
    doubt = "" if row.get("steady", True) else " ?"
    return _milliseconds(row["least"]) + doubt + ("" if peak is None else f" ({peak / 2**20:.0f})")


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"
