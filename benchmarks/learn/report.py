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


def curves(folder: Path, out: Path) -> None:
    """One picture for each task: the loss against the step, a line for each attention, the mean of its seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    out.mkdir(parents=True, exist_ok=True)
    by_task: dict[str, dict[str, Rows]] = {}
    for (task, attention, pictures), rows in grouped(folder).items():
        if pictures is None:
            by_task.setdefault(task, {})[attention] = rows
    for task, attentions in by_task.items():
        figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
        for attention, rows in attentions.items():
            steps = [step for step, _ in rows[0]["curve"]]
            lines = [[loss for _, loss in row["curve"]] for row in rows]
            mean = [statistics.mean(losses) for losses in zip(*lines, strict=True)]
            axes.plot(steps, _smooth(mean), label=attention, linewidth=1.4)
        axes.set(title=task, xlabel="step", ylabel="training loss")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        name = task.replace(", ", "_").replace(" ", "_").lower()
        figure.savefig(out / f"learn_{name}.png", dpi=110)
        plt.close(figure)


def samples(tasks: dict[str, Task], weights: Path, out: Path, count: int, only: Sequence[str] | None) -> None:
    """Pictures of each trained generator, drawn pixel by pixel: an array [n, height, width, colours] in a file."""
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
