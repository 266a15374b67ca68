"""Charts: lines in colors that everyone can tell apart, with a marker each, and log-log plots with slopes."""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import measuring
from .console import counted
from .pictures import INK

# Okabe and Ito's colors; a marker of its own for each line, too.
STYLES = {
    "SCRAM": ("#D55E00", "o"),
    "SCRAM, paper": ("#E69F00", "D"),
    "SCRAM, no tail": ("#F0E442", "d"),
    "full attention": ("#000000", "s"),
    "torch SDPA": ("#0072B2", "^"),
    "strided": ("#009E73", "v"),
    "fixed": ("#56B4E9", "<"),
    "local blocks": ("#CC79A7", ">"),
    "brute-force top-1": ("#999999", "X"),
    "flex strided": ("#009E73", "P"),
    "flex fixed": ("#56B4E9", "*"),
    "flex local blocks": ("#CC79A7", "h"),
    "NATTEN": ("#882255", "p"),
    "faiss flat": ("#0072B2", "^"),
    "faiss HNSW": ("#009E73", "v"),
    "pynndescent": ("#CC79A7", ">"),
}
PALETTE = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
EXACT = ("full attention", "torch SDPA")  # their error is the rounding alone
MARKERS = ("o", "s", "^", "v", "D", "<", ">", "X")
Series = dict[tuple[str, int, bool, str], list[measuring.Row]]


def new_figure(width: float, height: float, title: str, **style: Any) -> Figure:
    """An empty white figure of that size in inches."""
    figure = Figure((width, height), dpi=110, layout="constrained", facecolor="white")
    figure.suptitle(title, fontweight="bold", color=INK, **style)
    return figure


def series(rows: Sequence[measuring.Row]) -> Series:
    """The rows of each kind, width, pass and contender, by size."""
    by_contender: Series = {}
    for row in sorted(rows, key=lambda row: row["size"]):
        by_contender.setdefault((row["kind"], row["width"], row["backward"], row["contender"]), []).append(row)
    return by_contender


def performance(rows: Sequence[measuring.Row], path: Path) -> None:
    """Time and peak memory against the number of pixels, log-log, one column for each width."""
    widths = sorted({row["width"] for row in rows})
    wanted = [
        ("attention", False, "least", "forward", "seconds"),
        ("attention", False, "output_error", "output error, forward; exact attention is left out", "relative error"),
        ("attention", True, "least", "forward and backward", "seconds"),
        ("attention", False, "peak_bytes", "peak memory, forward", "MiB"),
        ("attention", True, "peak_bytes", "peak memory, forward and backward", "MiB"),
        ("search", False, "least", "search alone, index building included", "seconds"),
    ]
    measured = {(row["kind"], row["backward"], quantity) for row in rows for quantity in row if _shown(row, quantity)}
    shown = [one for one in wanted if one[:3] in measured]
    down = max(1, len(shown))
    across = len(widths)
    machine = rows[0]["machine"]
    where = machine["gpu"] or f"{counted(machine['threads'], 'thread')} of {machine['cpu']}"
    continued = any("about" in row for row in rows)
    note = "fastest of several calls; hollow: continued from smaller sizes" if continued else "fastest call"
    title = f"Attention over pictures: {where}; {note}"
    figure = new_figure(8.4 * across, 4.0 * down + 0.4, title, fontsize=14)
    for place, ((kind, backward, quantity, name, unit), width) in enumerate(product(shown, widths), 1):
        panel = {contender: some for (*of, contender), some in series(rows).items() if of == [kind, width, backward]}
        if any(_shown(row, quantity) for some in panel.values() for row in some):
            axes = figure.add_subplot(down, across, place)
            _loglog(axes, panel, quantity)
            axes.set_title(f"{name}; width {width}", loc="left", color=INK)
            axes.set(xlabel="pixels = queries = keys", ylabel=unit)
    figure.savefig(path)


def _shown(row: measuring.Row, quantity: str) -> bool:
    return bool(row.get(quantity)) and not (quantity == "output_error" and row["contender"] in EXACT)


def _loglog(axes: Axes, lines: dict[str, list[measuring.Row]], quantity: str) -> None:
    unit = 2.0**20 if quantity == "peak_bytes" else 1.0
    error = quantity == "output_error"
    sizes = sorted({row["size"] for rows in lines.values() for row in rows})
    order = {contender: place for place, contender in enumerate(STYLES)}
    for contender, rows in sorted(lines.items(), key=lambda line: order.get(line[0], len(order))):
        points = [(row["size"], row[quantity] / unit) for row in rows if _shown(row, quantity)]
        if not points:
            continue
        slope = None if error else measuring.slope(rows, quantity)
        beyond = next((row for row in rows if row["size"] > points[-1][0]), {})
        label = contender + ("" if slope is None else f", slope {slope:.2f}")
        if not error and "memory" in beyond.get("failed", ""):
            label += f"\n(no memory for {beyond['size']}²)"
        color, marker = STYLES.get(contender, ("#999999", "."))
        dash = (0, (4, 1.5)) if contender.startswith("flex ") else "-"
        style: dict[str, Any] = {"color": color, "marker": marker, "markersize": 6, "linewidth": 1.6}
        axes.plot([n * n for n, _ in points], [y for _, y in points], label=label, linestyle=dash, **style)
        # Only the next size is continued: from there on it would be a guess from a guess.
        if "about" in beyond and quantity == "least":
            x, y = zip(points[-1], (beyond["size"], beyond["about"]), strict=True)
            hollow = {**style, "linewidth": 1.0, "markerfacecolor": "white"}
            axes.plot([n * n for n in x], y, linestyle=":", markevery=[1], **hollow)
    axes.set(xscale="log", yscale="log")
    axes.set_xticks([n * n for n in sizes], [f"{n}²" for n in sizes])
    if error:
        axes.set_ylim(0.01, 1.2)
        axes.set_yticks([0.01, 0.03, 0.1, 0.3, 1.0], [".01", ".03", ".1", ".3", "1"])
    axes.minorticks_off()
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.legend(fontsize=9, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.02))


def lines(
    axes: Axes,
    values: Mapping[str, Sequence[tuple[Any, float]]],
    title: str,
    xlabel: str,
    ylabel: str,
    pairs: bool = False,
) -> None:
    """Plain lines over categories or numbers; `pairs` gives every two the same color, the first of them dashed."""
    for number, (name, points) in enumerate(values.items()):
        kind = number // 2 if pairs else number
        style = {"color": PALETTE[kind % 8], "marker": MARKERS[kind % 8]}
        if pairs and number % 2 == 0:
            style["linestyle"] = "--"
        axes.plot(*zip(*points, strict=True), label=name, linewidth=1.6, markersize=5, **style)  # type: ignore[arg-type]
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(True, color="#dddddd", linewidth=0.6)
