"""Tables of correspondence: GMFlow's steps one by one, coarse starts, local windows, kept matches."""

from __future__ import annotations

from typing import Any

import table_cells
from table_cells import BY, mebibytes, share, table, time


def _flow(row: dict[str, Any]) -> tuple[str, str, str]:
    return share(row["epe"]), share(row["median"]), f"{100 * row['over_3']:.1f} %"


def _rows(group: str) -> dict[str, dict[str, Any]]:
    stored = table_cells.load("gmflow_matching")
    return {name.removeprefix(f"{group}, "): row for name, row in stored.items() if name.startswith(f"{group}, ")}


def gmflow_steps() -> str:
    """docs/gmflow_matching: each step of GMFlow replaced alone, then all."""
    steps = ("matching", "propagation", "refine")
    head = ("replaced by SCRAM", "EPE", "median", "over 3 px", *(x for step in steps for x in (step, "memory")))
    lines = []
    for name, row in _rows("own size").items():
        costs = (x for step in steps for x in (time(row[f"{step}_seconds"]), mebibytes(row[f"{step}_bytes"])))
        lines.append((name.replace("dense", "nothing: dense"), *_flow(row), *costs))
    return table(head, *lines)


def gmflow_coarse() -> str:
    """docs/gmflow_matching: coarse starts at twice the size, on three pairs."""
    head = (
        "pair",
        "matching by",
        "EPE",
        "median",
        "over 3 px",
        "final EPE",
        "median",
        "over 3 px",
        "CPU time",
        "memory",
    )
    lines = []
    for group, pair in (
        ("twice the size", "stereo"),
        ("homography, mild", "mild homography"),
        ("homography, strong", "strong homography"),
    ):
        for n, (name, row) in enumerate(_rows(group).items()):
            cost = (time(row["matching_seconds"]), mebibytes(row["matching_bytes"]))
            final = _flow(row["refined"]) if "refined" in row else ("", "", "")
            lines.append(("" if n else pair, name, *_flow(row), *final, *cost))
    return table(head, *lines)


def local() -> str:
    """docs/gmflow_matching: `scram.local` and its rivals."""
    head = (
        "grid",
        "heads",
        "E, F",
        "radius",
        "scram.local",
        "with gradients",
        "FlexAttention",
        "NATTEN",
        "GMFlow's own",
    )
    lines = []
    for row in table_cells.load("local").values():
        shape = (
            BY.join(map(str, row["grid"])),
            str(row["heads"]),
            f"{row['width']}, {row['values']}",
            str(row["radius"]),
        )
        own = row["scram_seconds"]
        rivals = []
        for name in ("flex", "natten", "gmflow"):
            seconds = row.get(f"{name}_seconds")
            rivals.append("" if seconds is None else f"{time(seconds)} ({seconds / own:.0f}{BY})")
        lines.append((*shape, time(own), time(row["scram_both_seconds"]), *rivals))
    return table(head, *lines)


def frames() -> str:
    """docs/gmflow_matching: kept matches over the frames of a film."""
    head = (
        "film",
        "grid",
        "cold",
        "kept",
        "times faster",
        "recall cold",
        "recall kept",
        "pair 10",
        "pair 30",
        "pair 50",
    )
    lines = []
    for name, row in table_cells.load("frames").items():
        drift = (
            f"{share(row['cold_recall_by_pair'][n - 1])}, {share(row['kept_recall_by_pair'][n - 1])}"
            for n in (10, 30, 50)
        )
        times = (time(row["cold_seconds"]), time(row["kept_seconds"]), f"{row['times_faster']:.1f}")
        recall = (share(row["cold_recall"]), share(row["kept_recall"]))
        lines.append((name, BY.join(map(str, row["grid"])), *times, *recall, *drift))
    return table(head, *lines)


def correlation() -> str:
    """docs/correlation: a lookup beside those of ptlflow."""
    lines = []
    for name, row in table_cells.load("correlation").items():
        device = "H200" if name.startswith("cuda") else "one CPU core"
        for way in ("SCRAM", "sampled", "on demand", "on demand, chunks", "volume"):
            of = row.get(way, {})
            if "failed" in of:
                lines.append((f"{device}, {BY.join(map(str, row['grid']))}", way, "fails", "", "", "", ""))
            elif of:
                memory = mebibytes(round(of["peak_mib"] * 2**20)) if "peak_mib" in of else ""
                lines.append(
                    (
                        f"{device}, {BY.join(map(str, row['grid']))}",
                        way,
                        time(of["make_ms"] / 1e3),
                        time(of["median_ms"] / 1e3),
                        "" if way == "SCRAM" else f"{of['median_ms'] / row['SCRAM']['median_ms']:.1f}",
                        memory,
                        f"{of['largest_error']:.0e}",
                    )
                )
    head = ("features", "", "made once", "a lookup", "times SCRAM's", "memory", "error")
    return table(head, *lines)


def half() -> str:
    """docs/measurements: half precision beside float32 on a CPU."""
    lines = []
    for name, row in table_cells.load("half_cpu").items():
        seconds = row["seconds"]
        others = (f"{time(seconds[x])} ({seconds[x] / seconds['float32']:.2f})" for x in ("bfloat16", "float16"))
        lines.append((name.replace("x", BY), time(seconds["float32"]), *others))
    return table(("grid", "float32", "bfloat16", "float16"), *lines)
