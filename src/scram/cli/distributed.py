"""`scram bench --distributed`: time, memory and bytes sent of each process against the number of processes."""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from .console import console, explained, numbers_table, progress_line
from .features import sample_pair
from .measuring import Case, Pictures, Results, Row
from .ranks import Ranks

LONGEST = 600.0  # seconds until a rank that says nothing is given up
PASSES = {False: "forward", True: "forward and backward"}


@dataclass(frozen=True)
class Split(Case):
    """A picture cut into so many shards; the contender is the mode."""

    ranks: int = 1
    heads: int = 4

    @property
    def name(self) -> str:
        return f"{self.contender} {self.size} E{self.width} h{self.heads} P{self.ranks}" + " backward" * self.backward


def run(
    out: Path,
    device: str,
    sizes: tuple[int, ...],
    widths: tuple[int, ...],
    ranks: tuple[int, ...],
    modes: tuple[str, ...],
    heads: int,
    as_json: bool,
) -> None:
    """Measure every case, store each row at once, print a table for each width and pass."""
    if device == "cuda" and ranks[-1] > torch.cuda.device_count():
        raise ValueError(f"{ranks[-1]} ranks need as many GPUs, torch finds {torch.cuda.device_count()}")
    results = Results(out / "distributed.json", False, "city", device)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    grids = list(product(sizes, widths))
    total = len(ranks) * len(grids) * len(modes) * len(PASSES)
    with tempfile.TemporaryDirectory() as folder, progress_line(*columns, total=total) as (bar, task):
        pictures = Pictures(*sample_pair(), "cpu")
        for size, width in grids:
            np.save(_file(folder, size, width), _tensors(pictures, size, width, heads))
        for number in ranks:
            with Ranks(number, device, LONGEST) as pool:
                for case in _cases(number, grids, modes, heads):
                    bar.update(task, description=case.name)
                    results.put(case, _measure(case, pool, _file(folder, case.size, case.width)))
                    bar.advance(task)
    if as_json:
        typer.echo(json.dumps({"rows": results.rows}, indent=1))
        return
    for table in tables(list(results.rows.values())):
        console().print(table)
    typer.echo(f"rows: {results.path}")


def _file(folder: str, size: int, width: int) -> str:
    return f"{folder}/{size}_{width}.npy"


def _cases(ranks: int, grids: list[tuple[int, int]], modes: tuple[str, ...], heads: int) -> Iterator[Split]:
    for (size, width), mode, backward in product(grids, modes, PASSES):
        yield Split("distributed", mode, size, width, backward, ranks, heads)


def _tensors(
    pictures: Pictures, size: int, width: int, heads: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Queries, keys and values [3, 1, heads, size, size, width]: each head has the pictures turned another way."""

    def turned(x: Tensor, head: int) -> Tensor:
        x = torch.rot90(x, head % 4, (2, 3))
        return x.flip(2) if head % 8 > 3 else x

    three = pictures.tensors(size, width)
    return np.stack([torch.cat([turned(x, head) for head in range(heads)], 1).numpy() for x in three])


def _measure(case: Split, pool: Ranks, file: str) -> Row:
    if case.contender == "heads" and case.heads % case.ranks:
        return {"skipped": f"{case.heads} heads are no multiple of {case.ranks} ranks"}
    answers = pool.measure(file=file, mode=case.contender, backward=case.backward)
    calls = [max(times) for times in zip(*(one["seconds"] for one in answers), strict=True)]  # the slowest rank's
    peaks = [one["peak_bytes"] for one in answers]
    error, norm = (sum(one[key] for one in answers) for key in ("error", "norm"))
    return {
        "seconds": statistics.median(calls),
        "least": min(calls),
        "most": max(calls),
        "calls": len(calls),
        "waited": max(one["waited"] for one in answers),
        "sent": max(one["sent"] for one in answers),
        "received": max(one["received"] for one in answers),
        "sent_by_rank": [one["sent"] for one in answers],
        "peak_bytes": None if None in peaks else max(peaks),
        "output_error": math.sqrt(error / norm),
    }


def tables(rows: list[Row]) -> list[Table]:
    """One for each width and pass."""
    result = []
    headings = ("mode", "picture", "processes", "ms", "of it waiting", "MiB, peak", "MB sent", "output error")
    for width, backward in product(sorted({row["width"] for row in rows}), PASSES):
        some = [row for row in rows if (row["width"], row["backward"]) == (width, backward)]
        some.sort(key=lambda row: (row["size"], row["contender"], row["ranks"]))
        title = f"width {width}, {some[0]['heads']} heads, {PASSES[backward]}; median call of the slowest process"
        note = "memory and bytes: of the process that has most, its shards included\n" + explained("output error")
        result.append(numbers_table(headings, [_line(row) for row in some], title, note))
    return result


def _line(row: Row) -> tuple[str, ...]:
    first = (row["contender"], f"{row['size']}x{row['size']}", str(row["ranks"]))
    if "skipped" in row:
        return (*first, "-", "", "", "", row["skipped"])
    peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}"
    times = f"{1e3 * row['seconds']:.4g}", f"{1e3 * row['waited']:.3g}"
    return (*first, *times, peak, f"{row['sent'] / 1e6:.3g}", f"{row['output_error']:.3f}")
