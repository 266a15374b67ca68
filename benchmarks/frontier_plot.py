"""Pictures of benchmarks/frontier.py: one for all pictures of trained models, and one of every kind of sets."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from tables_frontier import kinds, measured, sets_of, shape_of

from scram.cli import charts
from scram.cli.arguments import family_of
from scram.cli.console import counted

IMAGES = Path(__file__).parents[1] / "docs" / "images"
LEAST_TOKENS = 4096  # of the grids that the first picture joins
MAIN = ("scram", "scram-clusters", "best-blocks", "block-means", "local-blocks", "random-features")
WORST = 10.0  # errors beyond are drawn there
WIDTH, HEIGHT = 7.2, 6.6  # inches: text stays legible on a phone


def points_of(kind: str, rows: dict[str, Any]) -> list[charts.Point]:
    """The contenders of a kind: the geometric mean of the output errors of its sets."""
    return [
        charts.Point(name, *(family_of(name) or (name, 0)), of_dense, mean_of(errors))
        for name, (of_dense, errors) in measured(kind, rows).items()
    ]


def mean_of(errors: list[float]) -> float:
    """The geometric mean; what is below rounding counts as rounding."""
    return statistics.geometric_mean(min(max(error, charts.LEAST_ERROR), WORST) for error in errors)


def large_kinds(rows: dict[str, Any]) -> list[str]:
    """Kinds of pictures with many tokens and held-out sets."""
    return [
        kind
        for kind in kinds(rows)
        if len(rows[f"times {kind}"]["grid"]) == 2
        and rows[f"times {kind}"]["grid"][0] * rows[f"times {kind}"]["grid"][1] >= LEAST_TOKENS
        and sets_of(kind, rows)[1]
    ]


def joined(rows: dict[str, Any]) -> tuple[list[charts.Point], int]:
    """Geometric means over the large kinds of what attends all of them, and of how many sets."""
    each = {kind: {point.name: point for point in points_of(kind, rows)} for kind in large_kinds(rows)}
    shared = [name for name in next(iter(each.values())) if all(name in found for found in each.values())]
    points = []
    for name in shared:
        mine = [found[name] for found in each.values()]
        time = statistics.geometric_mean(point.of_dense for point in mine)
        points.append(mine[0]._replace(of_dense=time, error=mean_of([point.error for point in mine])))
    return points, sum(len(sets_of(kind, rows)[0]) for kind in each)


def legend(axes: Axes, below: float) -> None:
    axes.legend(fontsize=11.5, frameon=False, loc="upper center", bbox_to_anchor=(0.45, below), ncols=2)


def finish(axes: Axes) -> None:
    axes.tick_params(labelsize=12)
    axes.xaxis.label.set_size(12)
    axes.yaxis.label.set_size(12)


def draw(rows: dict[str, Any], folder: Path = IMAGES) -> None:
    """frontier.png and frontier_kinds.png."""
    points, sets = joined(rows)
    figure = charts.new_figure(WIDTH, HEIGHT, "Error against time, layers of trained models, CPU", fontsize=13)
    axes = figure.subplots()
    charts.error_against_time(axes, [point for point in points if point.family in MAIN], labels=False)
    axes.set_title(f"mean of {sets} held-out layers; lower left is better", loc="left", color=charts.INK, fontsize=12)
    axes.text(0.985, 0.55, "slower than dense,\nwhich is exact", transform=axes.transAxes, ha="right", fontsize=11)
    finish(axes)
    legend(axes, -0.13)
    figure.savefig(folder / "frontier.png")
    several = kinds(rows)
    figure = charts.new_figure(WIDTH, 4.6 * len(several) + 2, "Error against time, every kind of layers", fontsize=13)
    for axes, kind in zip(figure.subplots(len(several), 1, squeeze=False)[:, 0], several, strict=True):
        charts.error_against_time(axes, points_of(kind, rows), labels=False)
        about = f"{counted(len(sets_of(kind, rows)[0]), 'layer')}, heads: {rows[f'times {kind}']['heads']}"
        axes.set_title(f"{shape_of(kind)} tokens; {about}", loc="left", color=charts.INK, fontsize=12)
        finish(axes)
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=11.5, frameon=False
    )
    figure.savefig(folder / "frontier_kinds.png")
