"""Charts: lines in colours that everyone can tell apart, with a marker each, and log-log plots with slopes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import measuring
from .pictures import INK

# Okabe and Ito's colours; a marker of its own for each line, too.
STYLES = {
    "SCRAM, paper": ("#D55E00", "o"),
    "SCRAM, default": ("#E69F00", "D"),
    "full attention": ("#000000", "s"),
    "torch SDPA": ("#0072B2", "^"),
    "strided": ("#009E73", "v"),
    "fixed": ("#56B4E9", "<"),
    "local blocks": ("#CC79A7", ">"),
    "brute-force top-1": ("#999999", "X"),
    "flex strided": ("#009E73", "1"),
    "flex fixed": ("#56B4E9", "2"),
    "flex local blocks": ("#CC79A7", "3"),
    "faiss flat": ("#0072B2", "^"),
    "faiss HNSW": ("#009E73", "v"),
    "pynndescent": ("#CC79A7", ">"),
}
PALETTE = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKERS = ("o", "s", "^", "v", "D", "<", ">", "X")
Series = dict[tuple[str, int, bool, str], list[measuring.Row]]


def series(rows: Sequence[measuring.Row]) -> Series:
    """The rows of each kind, width, pass and contender, by size."""
    found: Series = {}
    for row in sorted(rows, key=lambda row: row["size"]):
        found.setdefault((row["kind"], row["width"], row["backward"], row["contender"]), []).append(row)
    return found


def performance(rows: Sequence[measuring.Row], path: Path) -> None:
    """Time and peak memory against the number of pixels, log-log, one column for each width."""
    widths = sorted({row["width"] for row in rows})
    wanted = [
        ("attention", False, "least", "forward, seconds"),
        ("attention", True, "least", "forward and backward, seconds"),
        ("attention", True, "peak_bytes", "peak memory, forward and backward, bytes"),
        ("search", False, "least", "search alone, seconds"),
    ]
    panels = []
    for kind, backward, quantity, label in wanted:
        for width in widths:
            mine = {k[3]: v for k, v in series(rows).items() if k[:3] == (kind, width, backward)}
            if any(row.get(quantity) for some in mine.values() for row in some):
                panels.append((mine, quantity, f"{label.split(',')[0]}, width {width}", label))
    across = 1 if len(panels) < 2 else 2
    down = max(1, -(-len(panels) // across))
    figure = Figure((7.2 * across, 4.6 * down), dpi=110, layout="constrained", facecolor="white")
    for place, (mine, quantity, title, label) in enumerate(panels):
        axes = figure.add_subplot(down, across, place + 1)
        _loglog(axes, mine, quantity)
        axes.set_title(title, loc="left", color=INK)
        axes.set(xlabel="pixels = queries = keys", ylabel=label)
    machine = rows[0]["machine"]
    where = machine["gpu"] or f"{machine['threads']} threads of {machine['cpu']}"
    figure.suptitle(
        f"Attention over pictures: {where}; fastest of several calls", fontsize=14, fontweight="bold", color=INK
    )
    figure.savefig(path)


def _loglog(axes: Axes, lines: dict[str, list[measuring.Row]], quantity: str) -> None:
    for contender, rows in lines.items():
        points = [(row["size"] ** 2, row[quantity]) for row in rows if row.get(quantity)]
        if not points:
            continue
        slope = measuring.slope(rows, quantity)
        colour, marker = STYLES.get(contender, ("#999999", "."))
        label = contender + ("" if slope is None else f"  (slope {slope:.2f})")
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, label=label, linewidth=1.6, markersize=6)
        failed = [row for row in rows if "failed" in row and "memory" in row["failed"]]
        if failed:
            axes.annotate(
                "out of memory", points[-1], xytext=(6, 4), textcoords="offset points", fontsize=8, color=colour
            )
    axes.set(xscale="log", yscale="log")
    sizes = sorted({row["size"] for rows in lines.values() for row in rows})
    axes.set_xticks([n * n for n in sizes], [f"{n}²" for n in sizes])
    axes.minorticks_off()
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.legend(fontsize=8, framealpha=0.8, edgecolor="none")


def lines(
    axes: Axes,
    values: Mapping[str, Sequence[tuple[Any, float]]],
    title: str,
    xlabel: str,
    ylabel: str,
    legend: bool = True,
) -> None:
    """Plain lines over categories or numbers."""
    for number, (name, points) in enumerate(values.items()):
        style = {"color": PALETTE[number % 8], "marker": MARKERS[number % 8]}
        axes.plot(*zip(*points, strict=True), label=name, linewidth=1.6, markersize=5, **style)  # type: ignore[arg-type]
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    if legend:
        axes.legend(fontsize=8, framealpha=0.8, edgecolor="none")
