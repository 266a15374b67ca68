"""Error against time of every setting of `routed.py` on every set: `python benchmarks/routed.py plot FILE`.

A panel for each family of sets, a line for each set: the frontier of its settings, the lower left hull on logarithmic
axes. A setting off the line is no better than one on it, or than a mixture of two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import table_cells
from tables_routed import FAMILIES, family, member

Point = tuple[float, float]  # ms, error
KINDS = {  # Okabe and Ito's colors
    "no search": ("no search", "#0072B2", "o"),
    "1 match": ("1 match, sweeps from routed keys", "#D55E00", "s"),
    "4 matches": ("4 matches", "#CC79A7", "D"),
    "less": ("no search, without a term or without routed keys", "#999999", "x"),
    "before": ("before: 1 match, 256 clusters by their means", "#009E73", "*"),
}
LEAST = 1e-5  # an error below it is drawn as this
LINE = "#444444"
COLUMNS = 3


def kind(setting: str) -> str:
    """Of a setting, by its name.

    >>> [kind(x) for x in ("512+512", "512+512, 2 sweeps", "256+512, 4 matches", "256+0", "256+512, first", "before")]
    ['no search', '1 match', '4 matches', 'less', 'less', 'before']
    """
    size, _, rest = setting.partition(", ")
    if setting == "before" or rest == "4 matches":
        return rest or setting
    if "sweep" in rest:
        return "1 match"
    return "less" if rest or size.endswith("+0") else "no search"


def hull(points: Iterable[Point]) -> list[Point]:
    """The lower left hull of points on logarithmic axes, from the fastest to the most exact.

    >>> hull([(1, 1), (10, 0.1), (2, 0.9), (4, 0.2), (20, 0.3)])
    [(1, 1), (4, 0.2), (10, 0.1)]
    """
    best: list[Point] = []
    for point in sorted(set(points)):
        if best and point[1] >= best[-1][1]:
            continue
        while len(best) > 1 and _slope(best[-2], best[-1]) >= _slope(best[-2], point):
            best.pop()
        best.append(point)
    return best


def _slope(a: Point, b: Point) -> float:
    return math.log(b[1] / a[1]) / math.log(b[0] / a[0])


def plot(picture: Path, rows: dict[str, Any] | None = None) -> None:
    """Draws the rows of all settings, which are stored for the sets that defaults are chosen on, or the given ones."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = table_cells.load("routed_chosen") if rows is None else rows
    if not rows:
        raise SystemExit("no rows are stored: run `python benchmarks/routed.py errors` first")
    titles = [title for title in dict.fromkeys([*FAMILIES.values(), "others"]) if any(family(x) == title for x in rows)]
    across = min(COLUMNS, len(titles))
    deep = -(-len(titles) // across)
    size = (6.2 * across, 4.3 * deep + 1.2)
    figure, grid = pyplot.subplots(deep, across, figsize=size, sharey=True, squeeze=False, layout="constrained")
    panels = list(grid.flat)
    ends = [
        _panel(axes, {name: row for name, row in rows.items() if family(name) == title}, title)
        for axes, title in zip(panels, titles, strict=False)
    ]
    for axes, names in zip(panels, ends, strict=False):  # all panels have one height, known only now
        _labels(axes, names)
    for axes in panels[len(titles) :]:
        axes.axis("off")
    for axes in grid[:, 0]:
        axes.set_ylabel("output error, worst head")
    for axes in panels[: len(titles)]:
        axes.set_xlabel("processor time of a call")
    figure.suptitle(
        "How far attention is off against its time: the line is the frontier of each set", fontweight="bold"
    )
    figure.legend(handles=_handles(panels[0]), loc="outside lower center", ncols=min(across, 3), frameon=False)
    figure.savefig(picture, dpi=85)
    pyplot.close(figure)


def _panel(axes: Any, rows: dict[str, Any], title: str) -> list[tuple[Point, str]]:
    """Draws the sets of a family. Where their lines end, and their names."""
    axes.set_title(title, fontsize=12)
    axes.set(xscale="log", yscale="log")
    axes.set_axisbelow(True)
    axes.grid(color="#dddddd", linewidth=0.6)
    ends: list[tuple[Point, str]] = []
    for name, row in sorted(rows.items()):
        at = {setting: (one["ms"], max(one["error"], LEAST)) for setting, one in row["settings"].items()}
        if not at:
            continue
        line = hull(at.values())
        axes.plot(*zip(*line, strict=True), color=LINE, linewidth=1.1, zorder=2)
        for setting, (ms, error) in at.items():
            _, color, mark = KINDS[kind(setting)]
            on_line = (ms, error) in line
            axes.plot(ms, error, mark, color=color, markersize=_size(setting), alpha=1 if on_line else 0.35, zorder=3)
        ends.append((line[-1], member(name) + ("" if row["choose"] else " *")))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1e3:g} s" if x >= 1e3 else f"{x:g} ms")
    axes.yaxis.set_major_formatter(lambda x, _: f"{100 * x:g} %")
    axes.xaxis.set_minor_formatter(lambda x, _: "")
    axes.yaxis.set_minor_formatter(lambda x, _: "")
    return ends


def _size(setting: str) -> float:
    """Of a mark: it grows with the clusters."""
    count = setting.partition("+")[0]
    return 4.0 + 1.4 * math.log2(int(count) / 128) if count.isdigit() else 13.0


def _labels(axes: Any, ends: list[tuple[Point, str]]) -> None:
    """The names of sets at the right border, each at the height of its line's end, moved apart where they meet."""
    low, high = axes.get_ylim()
    right = axes.get_xlim()[1]
    axes.set_xlim(axes.get_xlim()[0], right * (right / axes.get_xlim()[0]) ** 0.55)  # room for them
    step = 0.055 * math.log(high / low)
    heights = _apart([math.log(point[1]) for point, _ in ends], step, math.log(high) - step)
    for (point, name), height in zip(ends, heights, strict=True):
        where = {"xytext": (right * 1.08, math.exp(height)), "textcoords": "data", "va": "center", "fontsize": 8.5}
        arrow = {"arrowstyle": "-", "color": "#aaaaaa", "linewidth": 0.7}
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # no line of the grid crosses a name
        axes.annotate(name, point, **where, arrowprops=arrow, bbox=box, zorder=1.5)


def _apart(wanted: list[float], step: float, most: float) -> list[float]:
    """Heights near the wanted ones, no two nearer than a step, and none above the most.

    >>> _apart([0.0, 0.0, 5.0], 1.0, 9.0), _apart([3.0, 3.0], 1.0, 3.5)
    ([0.0, 1.0, 5.0], [2.5, 3.5])
    """
    order = sorted(range(len(wanted)), key=lambda n: wanted[n])
    found = list(wanted)
    for before, after in itertools.pairwise(order):
        found[after] = max(found[after], found[before] + step)
    for number in reversed(order):
        found[number] = min(found[number], most)
        most = found[number] - step
    return found


def _handles(axes: Any) -> list[Any]:
    """Of the legend: kinds of settings, what the line is, and how large a mark is."""

    def handle(label: str, **how: Any) -> Any:
        return axes.plot([], [], label=label, **how)[0]

    made = [
        handle(label, color=color, marker=mark, linestyle="", markersize=13 if mark == "*" else 7)
        for label, color, mark in KINDS.values()
    ]
    made.append(handle("frontier of a set; settings off it are pale", color=LINE, linewidth=1.1))
    made.append(handle("name with *: held out, no default was chosen on it", linestyle=""))
    for count in (128, 512, 1024):
        size = _size(f"{count}+0")
        made.append(handle(f"{count} clusters", color=KINDS["no search"][1], marker="o", linestyle="", markersize=size))
    return made
