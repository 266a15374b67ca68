"""Charts: lines that everyone can tell apart, with a color, a marker and a name each; log-log plots with slopes."""

from collections.abc import Mapping, Sequence
from math import log10
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
DARKER = {"#F0E442": "#9A8F00"}  # words in yellow cannot be read on white
PALETTE = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
EXACT = ("full attention", "torch SDPA")  # their error is the rounding alone
MARKERS = ("o", "s", "^", "v", "D", "<", ">", "X")
LABEL = 0.062  # of the height of a panel that a line of words takes
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
    """Time, error and peak memory against the number of pixels, log-log, one below the other.

    All of the largest width; of smaller ones the forward pass alone. The width of a phone is enough to read it.
    """
    widths = sorted({row["width"] for row in rows})
    largest = widths[-1]
    wanted = [
        *(("attention", False, "least", width, "Seconds, forward") for width in reversed(widths)),
        ("attention", True, "least", largest, "Seconds, forward and backward"),
        ("attention", False, "output_error", largest, "Relative error, forward"),
        ("attention", False, "peak_bytes", largest, "Memory in MiB, forward"),
        ("attention", True, "peak_bytes", largest, "Memory in MiB, forward and backward"),
        ("search", False, "least", largest, "Seconds, search alone with its index"),
    ]
    panels = [
        (panel, quantity, f"{name}; width {width}")
        for kind, backward, quantity, width, name in wanted
        if (panel := _panel(rows, (kind, width, backward), quantity))
    ]
    machine = rows[0]["machine"]
    where = machine["gpu"] or f"{counted(machine['threads'], 'thread')} of {machine['cpu']}"
    figure = new_figure(9.6, 5.4 * max(len(panels), 1) + 1.2, f"Attention over pictures\n{where}", fontsize=20)
    for place, (panel, quantity, title) in enumerate(panels, 1):
        axes = figure.add_subplot(len(panels), 1, place)
        _loglog(axes, panel, quantity)
        axes.set_title(title, loc="left", color=INK, fontsize=17)
    continued = "; hollow: continued from smaller sizes" if any("about" in row for row in rows) else ""
    figure.supxlabel(f"pixels = queries = keys; in brackets the slope{continued}", fontsize=14, color=INK)
    figure.savefig(path)


def _panel(
    rows: Sequence[measuring.Row], wanted: tuple[str, int, bool], quantity: str
) -> dict[str, list[measuring.Row]]:
    """The rows of each contender of that kind, width and pass; none if there is nothing to show."""
    panel = {contender: some for (*of, contender), some in series(rows).items() if tuple(of) == wanted}
    return panel if any(_shown(row, quantity) for some in panel.values() for row in some) else {}


def _shown(row: measuring.Row, quantity: str) -> bool:
    return bool(row.get(quantity)) and not (quantity == "output_error" and row["contender"] in EXACT)


def _loglog(axes: Axes, lines: dict[str, list[measuring.Row]], quantity: str) -> None:
    unit = 2.0**20 if quantity == "peak_bytes" else 1.0
    error = quantity == "output_error"
    sizes = sorted({row["size"] for rows in lines.values() for row in rows})
    ends: list[tuple[str, str, float]] = []
    order = {contender: place for place, contender in enumerate(STYLES)}
    for contender, rows in sorted(lines.items(), key=lambda line: order.get(line[0], len(order))):
        points = [(row["size"], row[quantity] / unit) for row in rows if _shown(row, quantity)]
        if not points:
            continue
        slope = None if error else measuring.slope(rows, quantity)
        beyond = next((row for row in rows if row["size"] > points[-1][0]), {})
        label = contender + ("" if slope is None else f" ({slope:.2f})")
        if not error and "memory" in beyond.get("failed", ""):
            label += f", no memory for {beyond['size']}²"
        color, marker = STYLES.get(contender, ("#999999", "."))
        dash = (0, (4, 1.5)) if contender.startswith("flex ") else "-"
        own = contender.startswith("SCRAM")
        style: dict[str, Any] = {"color": color, "marker": marker, "markersize": 8, "linewidth": 3.2 if own else 1.6}
        axes.plot([n * n for n, _ in points], [y for _, y in points], label=label, linestyle=dash, **style)
        # Only the next size is continued: from there on it would be a guess from a guess.
        last = points[-1][1]
        if "about" in beyond and quantity == "least":
            last = beyond["about"]
            x, y = zip(points[-1], (beyond["size"], beyond["about"]), strict=True)
            hollow = {**style, "linewidth": 1.0, "markerfacecolor": "white"}
            axes.plot([n * n for n in x], y, linestyle=":", markevery=[1], **hollow)
        ends.append((label, DARKER.get(color, color), last))
    axes.set(xscale="log", yscale="log")
    axes.set_xticks([n * n for n in sizes], [f"{n}²" for n in sizes])
    if error:
        axes.set_ylim(0.01, 1.2)
        axes.set_yticks([0.01, 0.03, 0.1, 0.3, 1.0], [".01", ".03", ".1", ".3", "1"])
    axes.minorticks_off()
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.tick_params(labelsize=14)
    low, high = (log10(y) for y in axes.get_ylim())
    heights = spread([(log10(end) - low) / (high - low) for *_, end in ends], LABEL)
    for (label, color, _), height in zip(ends, heights, strict=True):
        name = axes.text(1.02, height, label, transform=axes.transAxes, color=color, fontsize=14, va="center")
        name.set_in_layout(True)


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Places moved apart until neighbors have that gap, in the same order, about where they were, none above 1.

    >>> [round(place, 2) for place in spread([0.5, 0.5, 1.2], 0.1)]
    [0.45, 0.55, 1.0]
    """
    order = sorted(range(len(places)), key=lambda n: places[n])
    groups: list[tuple[float, list[int]]] = []  # the middle of each, and its members
    for n in order:
        groups.append((min(places[n], 1.0), [n]))
        while len(groups) > 1:
            (below, some), (above, more) = groups[-2:]
            if above - below >= gap * (len(some) + len(more)) / 2:
                break
            count = len(some) + len(more)
            middle = (below * len(some) + above * len(more)) / count
            groups[-2:] = [(min(middle, 1 - gap * (count - 1) / 2), some + more)]
    moved = list(places)
    for middle, members in groups:
        for rank, n in enumerate(members):
            moved[n] = middle + gap * (rank - (len(members) - 1) / 2)
    return moved


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
