"""`scram bench`: time and memory against the size of a picture, SCRAM beside its rivals."""

import json
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from . import charts, measuring
from .console import chosen_device, console, one_line_errors, writable_folder
from .features import sample_pair
from .measuring import Case, Limits, Pictures, Results, Row

SIZES = {"cpu": (32, 64, 128, 256, 512), "cuda": (64, 128, 256, 512, 1024, 2048)}
PARTS = ("forward", "backward", "search", "flex")
MORE_PARTS = (*PARTS, "pynndescent", "natten")  # one compiles for minutes, one installs in few places: when asked for
ROW = 240.0  # seconds; pynndescent compiles for two minutes
BUDGET = {"cpu": 140.0, "cuda": inf}  # seconds
INTERRUPTED = 130  # the exit code of a program ended by Ctrl-C


def bench(
    out: Annotated[Path, typer.Option(help="Folder for bench.json and bench.png.")] = Path("scram-bench"),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    sizes: Annotated[
        str | None, typer.Option(help="Sides of the pictures, with commas; 32 to 512 on a CPU, 64 to 2048 on a GPU.")
    ] = None,
    widths: Annotated[str, typer.Option(help="Widths of queries and keys, with commas; the paper has 3.")] = "3,64",
    parts: Annotated[str, typer.Option(help=f"What to measure, with commas, of {', '.join(MORE_PARTS)}.")] = ",".join(
        PARTS
    ),
    longest: Annotated[float, typer.Option(min=0.0, help="Leave out calls that would take longer, in seconds.")] = 3.0,
    budget: Annotated[
        float | None,
        typer.Option(min=0.0, help="Stop measuring after so many seconds; 140 on a CPU, no limit on a GPU."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the times that bench.json holds and measure the rest.")
    ] = False,
    draw_only: Annotated[
        bool, typer.Option("--draw-only", help="Measure nothing; table and plot of bench.json.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON, not as a table.")] = False,
) -> None:
    """Measure SCRAM, dense attention, fixed sparse patterns, brute force and nearest-neighbour libraries."""
    with one_line_errors():
        writable_folder(out)
        chosen_device(device)
        wanted = SIZES[device] if sizes is None else _numbers("sizes", sizes, 16)
        kinds = tuple(part.strip() for part in parts.split(","))
        if not set(kinds) <= set(MORE_PARTS):
            raise ValueError(f"parts must be some of {', '.join(MORE_PARTS)}, got {parts}")
        results = Results(out / "bench.json", resume or draw_only, "city", device)
        numbers = _numbers("widths", widths, 1)
        most = 3 * measuring.PATCH**2  # the colours of a patch
        if numbers[-1] > most:
            raise ValueError(f"widths must be {most} or less, got {numbers[-1]}")
        todo = list(measuring.cases(wanted, numbers, device, kinds))
        stopped = False
        if not draw_only:
            limits = Limits(longest, BUDGET[device] if budget is None else budget, ROW)
            stopped = _measure(todo, Pictures(*sample_pair(), device), results, limits)
        if not results.rows:
            raise ValueError(f"nothing was measured: {results.path} has no rows")
        rows = list(results.rows.values())
        if all(row.get("skipped") == measuring.LATE for row in rows) and not stopped:
            raise ValueError("there was no time to measure anything; give --budget more seconds")
        charts.performance(rows, out / "bench.png")
        if as_json:
            typer.echo(json.dumps({"slopes": slopes(rows), "rows": results.rows}, indent=1))
        else:
            screen = console()
            for table in tables(rows):
                screen.print(table)
            typer.echo(f"rows: {results.path}; plot: {out / 'bench.png'}")
            late = sum(row.get("skipped") == measuring.LATE for row in rows)
            if late:
                typer.echo(f"{late} rows were left for lack of time; --resume measures them, --budget gives more")
        if stopped:
            typer.echo("stopped by Ctrl-C; what was measured is kept, --resume goes on", err=True)
            raise typer.Exit(INTERRUPTED)


def _numbers(name: str, text: str, least: int) -> tuple[int, ...]:
    try:
        values = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise ValueError(f"{name} must be whole numbers with commas, got {text}") from None
    if values[0] < least:
        raise ValueError(f"{name} must be {least} or more, got {values[0]}")
    return values


class TimeLeft(ProgressColumn):
    """The time that the rows so far let expect, at most what the budget leaves."""

    def __init__(self, budget: float) -> None:
        super().__init__()
        self.budget = budget

    def render(self, task: Task) -> Text:
        rows = inf if task.time_remaining is None else task.time_remaining
        left = min(rows, max(self.budget - (task.elapsed or 0.0), 0.0))
        return Text("-:--" if left == inf else f"{int(left) // 60}:{int(left) % 60:02}")


def _measure(todo: list[Case], pictures: Pictures, results: Results, limits: Limits) -> bool:
    """Measure what is not there yet; True when Ctrl-C ended it."""
    screen = console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeLeft(limits.budget),
    )  # fmt: skip
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("", total=len(todo))
        try:
            for number, case in enumerate(measuring.measure_all(todo, pictures, results, limits)):
                name = f"{case.contender}, {case.size} x {case.size}, E={case.width}"
                bar.update(task, completed=number, description=name)
        except KeyboardInterrupt:
            return True
    return False


def slopes(rows: list[Row]) -> dict[str, float]:
    """Exponents of time against the number of pixels."""
    found = {}
    for key, some in charts.series(rows).items():
        value = measuring.slope(some)
        if value is not None:
            found[" ".join(map(str, key))] = value
    return found


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
    title = {"search": "search alone, index building included"}.get(
        kind, "forward and backward" if backward else "forward"
    )
    result = Table(
        title=f"width {width}, {title}, milliseconds, fastest call (MiB of peak memory)",
        caption="slope: exponent of time against pixels; ~: too long, or no time left; continued from smaller sizes",
    )
    result.add_column("contender", no_wrap=True)
    for size in sizes:
        result.add_column(f"{size}x{size}", justify="right")
    result.add_column("slope", justify="right")
    quality = "recall" if kind == "search" else "output_error"
    if not backward:
        result.add_column("recall@1" if kind == "search" else "error", justify="right")
    for contender in dict.fromkeys(row["contender"] for row in rows):
        mine = {row["size"]: row for row in rows if row["contender"] == contender}
        slope = measuring.slope(list(mine.values()))
        cells = [_cell(mine.get(size)) for size in sizes]
        cells.append("" if slope is None else f"{slope:.2f}")
        if not backward:
            values = [row[quality] for _, row in sorted(mine.items()) if row.get(quality) is not None]
            cells.append(f"{values[-1]:.3f}" if values else "-")
        result.add_row(contender, *cells)
    return result


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if "failed" in row:
        return "no memory" if "memory" in row["failed"] else "failed"
    if "skipped" in row:
        return f"~{_milliseconds(row['about'])}" if "about" in row else "no time"
    peak: Any = row.get("peak_bytes")
    return _milliseconds(row["least"]) + ("" if peak is None else f" ({peak / 2**20:.0f})")


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"
