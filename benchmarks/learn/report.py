"""Stored runs as tables and as pictures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .loop import stored
from .plans import LARGE, MORE, TASKS
from .tasks import Generate, Task

Rows = list[dict[str, Any]]


def grouped(folder: Path) -> dict[tuple[str, str, int | None], Rows]:
    """Runs of one task, attention and number of pictures, over the seeds."""
    groups: dict[tuple[str, str, int | None], Rows] = {}
    lines = stored(folder, "learn_curves")
    for name, row in stored(folder).items():
        groups.setdefault((row["task"], row["attention"], row["pictures"]), []).append(row | lines[name])
    return groups


def spread(values: list[float]) -> str:
    """Mean, and the standard deviation where there are several."""
    middle = statistics.mean(values)
    return f"{middle:.2f} ± {statistics.stdev(values):.2f}" if len(values) > 1 else f"{middle:.2f}"


def table(folder: Path) -> None:
    print("| task | attention | pictures | seeds | test | training loss | test loss |\n|---|---|---|---|---|---|---|")
    for (task, attention, pictures), rows in sorted(grouped(folder).items(), key=str):
        score = next(iter(rows[0]["test"]))
        cells = [
            f"{score} {spread([row['test'][score] for row in rows])}",
            spread([row["train_loss"] for row in rows if row["train_loss"] is not None] or [math.nan]),
            spread([row["test"]["loss"] for row in rows]),
        ]
        print(f"| {task} | {attention} | {pictures or 'all'} | {len(rows)} | {' | '.join(cells)} |")


COLORS = {
    "dense": "#444444",
    "tail": "#d1495b",
    **dict.fromkeys(MORE.values(), "#8f5fbf"),
    "windows": "#edae49",
    "local": "#00798c",
    "strided": "#66a182",
}
LABELS = {
    "tail": "SCRAM with its tail",
    **dict.fromkeys(MORE.values(), "SCRAM, 4 matches"),
    "windows": "SCRAM, windows only",
}


def curves(folder: Path, out: Path) -> None:
    """learning.png: the training loss against the step, a panel for each task, a line for each run."""
    plt = _plots()
    by_task: dict[str, dict[str, Rows]] = {}
    for (task, attention, pictures), rows in grouped(folder).items():
        if pictures is None and attention in COLORS:
            by_task.setdefault(task, {})[attention] = rows
    shown = [task for task in sorted((*TASKS, *LARGE)) if task in by_task]
    rows_of_panels = math.ceil(len(shown) / 4)
    across = math.ceil(len(shown) / rows_of_panels)
    size = 3.3 * across, 3 * rows_of_panels + 0.4
    figure, grid = plt.subplots(rows_of_panels, across, figsize=size, layout="constrained", squeeze=False)
    panels = grid.ravel()
    for axes in panels[len(shown) :]:
        axes.set_axis_off()
    for axes, task in zip(panels, shown, strict=False):
        for attention, rows in by_task[task].items():
            style: dict[str, Any] = {"linewidth": 1, "color": COLORS[attention], "alpha": 0.8}
            if attention == "dense":  # over those that do the same
                style |= {"linestyle": (0, (4, 4)), "zorder": 3, "alpha": 1}
            for n, row in enumerate(rows):
                steps, losses = zip(*row["curve"], strict=True)
                label = LABELS.get(attention, attention) if n == 0 else None
                axes.plot(steps, _smooth(list(losses)), label=label, **style)
        last = [loss for rows in by_task[task].values() for row in rows for _, loss in row["curve"][3:]]
        axes.set(title=task, xlabel="step", ylim=(0.95 * min(last), max(last)))
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("training loss")
    labels = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=len(labels), frameon=False)
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "learning.png", dpi=100)
    plt.close(figure)


def sheet(pictures: Path, real: np.ndarray, out: Path) -> None:
    """learning_samples.png: a row of real pictures [n, height, width, colors], and a row of each generator's."""
    plt = _plots()
    rows = {"test pictures": real}
    for file in sorted(pictures.glob("*.npz")):
        rows[file.stem.split("_")[1].replace("tail", "SCRAM")] = np.load(file)["arr_0"]
    count = min(len(x) for x in rows.values())
    figure, panels = plt.subplots(len(rows), 1, figsize=(0.75 * count + 1.2, 0.85 * len(rows)), layout="constrained")
    for axes, (name, x) in zip(panels, rows.items(), strict=True):
        line = np.concatenate(list(np.pad(x[:count], ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=80)), 1)
        axes.imshow(line if line.shape[-1] == 3 else line[..., 0], cmap="gray", interpolation="nearest")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_ylabel(name, rotation=0, ha="right", va="center")
        axes.spines[:].set_visible(False)
    figure.savefig(out / "learning_samples.png", dpi=100, bbox_inches="tight")
    plt.close(figure)


def _plots() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def samples(tasks: dict[str, Task], weights: Path, out: Path, count: int, only: Sequence[str] | None) -> None:
    """Pictures of each trained generator, drawn pixel by pixel: an array [n, height, width, colors] in a file."""
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted(weights.glob("*.pt")):
        name, attention, _, _ = file.stem.split("_")
        task = next(x for x in tasks.values() if x.name.replace(" ", "-").replace(",", "") == name)
        if (only and task.name not in only) or not isinstance(task, Generate):
            continue
        model = task.model(attention.replace("-", " ")).to(task.data.x.device).eval()
        model.load_state_dict(torch.load(file, map_location=task.data.x.device, weights_only=True))
        torch.manual_seed(0)
        made = task.samples(model, count, torch.Generator(task.data.x.device).manual_seed(0))
        made = (made * (256 // task.levels)).view(count, *task.data.x.shape[1:]).byte().cpu()
        np.savez_compressed(out / f"{file.stem}.npz", made.numpy())
        print(f"{file.stem}: {count} pictures", flush=True)


def _smooth(values: list[float], width: int = 4) -> list[float]:
    return [statistics.mean(values[max(0, n - width) : n + 1]) for n in range(len(values))]
