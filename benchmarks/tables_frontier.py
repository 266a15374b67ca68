"""Tables of docs/frontier: output error and time on layers of trained models, and what else was measured on an H200."""

from __future__ import annotations

import statistics
from typing import Any

import table_cells
from table_cells import BY, share, table, time

BUDGETS = (0.1, 0.03)
ORACLE = "top-k"  # not a method: it knows all scores
SAME_OUTPUT = {"flex-blocks": "best-blocks"}  # timed only; its errors are those of the other


def kinds(rows: dict[str, Any]) -> list[str]:
    """Kinds of sets that were timed."""
    return [name.removeprefix("times ") for name in rows if name.startswith("times ")]


def sets_of(kind: str, rows: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """The held-out sets of a kind, or all where none is; and whether they are held out."""
    mine = [row for name, row in rows.items() if name.startswith("errors ") and row["kind"] == kind]
    held_out = [row for row in mine if not row["choose"]]
    return held_out or mine, bool(held_out)


def errors_of(kind: str, rows: dict[str, Any], name: str) -> list[float] | None:
    """The output errors of a contender, one for each set; None where it could not attend one."""
    for same, other in SAME_OUTPUT.items():
        name = name.replace(same, other)
    found = [row["errors"].get(name, {}) for row in sets_of(kind, rows)[0]]
    return [one["output_error"] for one in found] if found and all("output_error" in one for one in found) else None


def measured(kind: str, rows: dict[str, Any]) -> dict[str, tuple[float, list[float]]]:
    """Of each contender with a time and errors: its time over that of dense attention, and the errors."""
    found = {}
    for name, one in rows[f"times {kind}"]["times"].items():
        errors = errors_of(kind, rows, name)
        if "of_dense" in one and errors is not None:
            found[name] = one["of_dense"], errors
    return found


def fastest(kind: str, rows: dict[str, Any], budget: float, ours: bool) -> tuple[str, float] | None:
    """The fastest of SCRAM's settings, or of the others, whose worst output error is within the budget."""
    kept = [
        (of_dense, name)
        for name, (of_dense, errors) in measured(kind, rows).items()
        if name.startswith("scram") == ours
        and not name.startswith((ORACLE, "sdpa"))
        and max(errors) <= budget
        and of_dense < 1
    ]
    return min(kept)[::-1] if kept else None


def shape_of(kind: str) -> str:
    """A kind as tables show it.

    >>> shape_of("Moonshine, 1029"), shape_of("HTDemucs across grids")
    ('Moonshine, 1029', 'HTDemucs across grids')
    """
    model, comma, grid = kind.rpartition(", ")
    return f"{model}, {grid.replace('x', BY)}" if comma else kind


def frontier() -> str:
    """docs/frontier: the fastest within a budget, SCRAM and the others."""
    rows = table_cells.load("frontier")
    lines = []
    for kind in kinds(rows):
        cells = []
        for budget in BUDGETS:
            ours, others = (fastest(kind, rows, budget, which) for which in (True, False))
            best = min((x[1] for x in (ours, others) if x is not None), default=None)
            for one in (ours, others):
                mark = "**" if one is not None and one[1] == best else ""
                cells.append("none" if one is None else f"{mark}{one[0]}, {1 / one[1]:.3g}{mark}")
        held_out = sets_of(kind, rows)[1]
        dense = time(rows[f"times {kind}"]["dense_ms"] / 1e3)
        lines.append((shape_of(kind) + "*" * (not held_out), dense, *cells))
    head = ("model, tokens", "dense")
    columns = (f"{who}, error {100 * budget:g} %" for budget in BUDGETS for who in ("SCRAM", "others"))
    return table((*head, *columns), *lines)


def frontier_default() -> str:
    """docs/frontier: SCRAM's default."""
    rows = table_cells.load("frontier")
    lines = []
    for kind in kinds(rows):
        sets, held_out = sets_of(kind, rows)
        found = measured(kind, rows).get("scram")
        if found is not None:
            of_dense, errors = found
            p95 = max(row["errors"]["scram"]["p95_error"] for row in sets)
            figures = share(statistics.median(errors)), share(max(errors)), share(p95), f"{1 / of_dense:.3g}"
            lines.append((shape_of(kind) + "*" * (not held_out), str(len(sets)), *figures))
    head = ("model, tokens", "sets", "output error: median of sets", "worst set", "95th percentile, worst set")
    return table((*head, "times faster"), *lines)


def frontier_gpu() -> str:
    """docs/frontier: rows of other files, measured on an H200; output errors where they were measured."""
    lines: list[tuple[str, ...]] = []
    sam = table_cells.load("sam2")["cuda 4096 times"]
    dense = min(sam["dense"]["layers"])
    for way, name in (
        ("default", "SCRAM, default"),
        ("0.05", "SCRAM, tuned for 5 %"),
        ("0.02", "SCRAM, tuned for 2 %"),
    ):
        seconds = min(sam[way]["layers"])
        error = share(max(sam[way]["layer_errors"]))
        lines.append(
            (f"SAM 2, 256{BY}256", name, time(seconds), time(dense), f"{dense / seconds:.3g}", error, sam["commit"])
        )
    default = table_cells.load("routed_gpu")
    ours, exact = default["default 1024 E64 h1 k1"], default["cudnn 1024 E64 h1 k1"]
    lines.append(
        (
            f"stereo pair, scale 32, 1024{BY}1024",
            "SCRAM, default",
            time(ours["ms"] / 1e3),
            time(exact["ms"] / 1e3),
            f"{exact['ms'] / ours['ms']:.3g}",
            share(ours["error_stereo_32"]),
            ours["commit"],
        )
    )
    bench = [
        row
        for row in table_cells.load("bench_gpu")["rows"].values()
        if (row["kind"], row["size"], row["width"], row["backward"]) == ("attention", 1024, 64, False)
        and "least" in row
    ]
    full = next(row["least"] for row in bench if row["contender"] == "torch SDPA")
    for row in bench:
        if row["contender"] != "torch SDPA":
            error = share(row["output_error"]) if "output_error" in row else ""
            figures = time(row["least"]), time(full), f"{full / row['least']:.3g}", error, row["commit"]
            lines.append((f"two photographs, 1024{BY}1024", row["contender"], *figures))
    return table(("tensors, tokens", "", "time", "dense", "times faster", "output error", "commit"), *lines)
