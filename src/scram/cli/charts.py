"""Charts: lines in colors that everyone can tell apart, with a marker each, and log-log plots with slopes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
LEAST_ERROR = 1e-4  # errors below are drawn there: rounding
DENSE = "sdpa"  # drawn as the line that others are compared with
Style = tuple[str, str]  # color, marker
Series = dict[tuple[str, int, bool, str], list[measuring.Row]]


class Point(NamedTuple):
    """One setting of an attention: its error and its time."""

    name: str
    family: str
    number: int  # of the setting within its family
    of_dense: float  # its time over that of dense attention
    error: float


# Of the families of `scram judge`; SCRAM is warm and thick, all others are cool or gray.
FAMILY_STYLES: dict[str, Style] = {
    "scram": ("#B03A00", "*"),
    "scram-clusters": ("#D55E00", "o"),
    "scram-search": ("#E69F00", "D"),
    "scram-windows": ("#C9A227", "d"),
    "scram-paper": ("#8F7A1E", "P"),
    "local-blocks": ("#CC79A7", ">"),
    "best-blocks": ("#0072B2", "^"),
    "flex-blocks": ("#56B4E9", "v"),
    "block-means": ("#009E73", "s"),
    "random-features": ("#7A7A7A", "X"),
    "top-k": ("#000000", "h"),
    "natten": ("#882255", "p"),
    DENSE: ("#555555", "o"),
}
# Of functions that have no family.
OTHERS = ("#332288", "#117733", "#AA4499", "#6699CC", "#661100", "#44AA99", "#888888", "#DDCC77")
FAMILY_NAMES = {
    "scram": "SCRAM, default",
    "scram-clusters": "SCRAM, clusters",
    "scram-search": "SCRAM, clusters and search",
    "scram-windows": "SCRAM, windows only",
    "scram-paper": "SCRAM, paper",
    "local-blocks": "local blocks",
    "best-blocks": "best blocks",
    "flex-blocks": "best blocks, FlexAttention",
    "block-means": "best blocks and means",
    "random-features": "random features",
    "top-k": "top-k, an oracle",
    "natten": "NATTEN",
    DENSE: "torch's dense attention",
}


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


def performance(rows: Sequence[measuring.Row], path: Path, more: Path) -> None:
    """Times of the forward pass of the widest features at `path`; everything else, a panel below the other, at `more`.

    All against the number of pixels, log-log.
    """
    wanted = [
        ("attention", False, "least", "Time, forward", "seconds"),
        ("attention", False, "output_error", "Output error, forward; exact attention is left out", "output error"),
        ("attention", True, "least", "Time, forward and backward", "seconds"),
        ("attention", False, "peak_bytes", "Peak memory, forward", "MiB"),
        ("attention", True, "peak_bytes", "Peak memory, forward and backward", "MiB"),
        ("search", False, "least", "Time of a search alone, index building included", "seconds"),
    ]
    panels: list[tuple[str, str, str, dict[str, list[measuring.Row]]]] = []
    for width in sorted({row["width"] for row in rows}, reverse=True):
        for kind, backward, quantity, name, unit in wanted:
            own = [kind, width, backward]
            panel = {contender: some for (*of, contender), some in series(rows).items() if of == own}
            if any(_shown(row, quantity) for some in panel.values() for row in some):
                panels.append((f"{name}; width {width}", quantity, unit, panel))
    machine = rows[0]["machine"]
    where = machine["gpu"] or f"{counted(machine['threads'], 'thread')} of {machine['cpu']}"
    continued = any("about" in row for row in rows)
    note = "fastest of several calls; hollow: continued from smaller sizes" if continued else "fastest call"
    for target, some in ((path, panels[:1]), (more, panels[1:])):
        if some:
            figure = new_figure(7.2, 6.4 * len(some) + 0.5, f"{where}\n{note}", fontsize=12)
            for place, (name, quantity, unit, panel) in enumerate(some, 1):
                axes = figure.add_subplot(len(some), 1, place)
                _loglog(axes, panel, quantity)
                axes.set_title(name, loc="left", color=INK, fontsize=13)
                axes.set_xlabel("pixels = queries = keys", fontsize=12)
                axes.set_ylabel(unit, fontsize=12)
            figure.savefig(target)


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
        thick = 2.6 if contender.startswith("SCRAM") else 1.4
        style: dict[str, Any] = {"color": color, "marker": marker, "markersize": 6, "linewidth": thick}
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
    axes.tick_params(labelsize=12)
    axes.legend(fontsize=11, frameon=False, loc="upper center", bbox_to_anchor=(0.45, -0.14), ncols=2)


def error_against_time(axes: Axes, points: Sequence[Point], labels: bool = True) -> dict[str, Style]:
    """Settings as points, those of a family joined: output error against time. Lower left is better.

    Dense attention is the line at 1; what is right of it takes longer than exact attention does.

    Returns:
        the color and marker of each family.
    """
    families: dict[str, list[Point]] = {}
    for point in points:
        families.setdefault(point.family, []).append(point)
    unknown = iter(zip(OTHERS, MARKERS, strict=True))
    styles = {name: FAMILY_STYLES.get(name) or next(unknown, ("#999999", ".")) for name in families}
    times = [point.of_dense for point in points] or [1.0]
    axes.set(xscale="log", yscale="log", xlim=(min(0.5, *times) / 1.5, max(2.5, *times) * 1.5))
    axes.axvspan(1.0, axes.get_xlim()[1], color="#eeeeee", zorder=0)
    axes.axvline(1.0, color="#555555", linewidth=1.2, zorder=1)
    for name, some in families.items():
        if name == DENSE:
            continue
        color, marker = styles[name]
        ours = name.startswith("scram")
        line = sorted(some, key=lambda point: point.number)
        axes.plot(
            [point.of_dense for point in line],
            [max(point.error, LEAST_ERROR) for point in line],
            color=color,
            marker=marker,
            markersize=15 if name == "scram" else 7,
            markeredgecolor="white",
            linewidth=2.6 if ours else 1.3,
            zorder=4 if ours else 3,
            label=FAMILY_NAMES.get(name, name),
        )
    axes.set_xlabel("time of a call, of that of dense attention")
    axes.set_ylabel("output error, worst head")
    every = (*(1 / n for n in (1000, 300, 100, 30, 10, 3)), 1, 3, 10, 30, 100)
    ticks = [x for x in every if _within(x, axes.get_xlim())]
    axes.set_xticks(ticks, [f"{x:g}" if x >= 1 else f"1/{round(1 / x)}" for x in ticks])
    error_axis(axes, "y")
    axes.grid(True, color="#dddddd", linewidth=0.6)
    if labels and set(families) - {DENSE}:
        axes.legend(fontsize=9, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return styles


def _within(x: float, ends: tuple[float, float]) -> bool:
    return ends[0] <= x <= ends[1]


def error_axis(axes: Axes, which: str) -> None:
    """From the least error that is drawn to one as large as the output, the same in all pictures where they fit."""
    low, high = axes.dataLim.intervaly if which == "y" else axes.dataLim.intervalx
    limits = (min(3e-3, max(low, LEAST_ERROR)) * 0.7, max(1.4, min(high * 1.2, 14.0)))
    ticks = {1e-4: f"≤ {LEAST_ERROR:g}", 1e-3: ".001", 0.01: ".01", 0.03: ".03", 0.1: ".1", 0.3: ".3", 1.0: "1"}
    shown = {x: text for x, text in ticks.items() if _within(x, limits)}
    if which == "y":
        axes.set_ylim(limits)
        axes.set_yticks(list(shown), list(shown.values()))
    else:
        axes.set_xscale("log")
        axes.set_xlim(limits)
        axes.set_xticks(list(shown), list(shown.values()))
    axes.minorticks_off()


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
