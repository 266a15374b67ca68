"""Tables of docs/learning: what was learned, how fast, and what became of the two questions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

import table_cells
from table_cells import BY, table

TASKS = {
    "classify": "1. classification, accuracy",
    "classify, 128x128": "1. classification on canvases, accuracy",
    "detect, 128x128": "2. detection, mAP@½",
    "detect, 256x256": "2. detection, mAP@½",
    "video": "3. video, accuracy",
    "generate, MNIST": "4. MNIST, bits per pixel",
    "generate, CIFAR-10": "4. CIFAR-10, bits per value",
}
TOKENS = {
    "classify": (32, 32),
    "classify, 128x128": (128, 128),
    "detect, 128x128": (64, 64),
    "detect, 256x256": (128, 128),
    "video": (16, 32, 32),
    "generate, MNIST": (28, 28),
    "generate, CIFAR-10": (32, 32, 3),
}
ATTENTIONS = {"dense": "dense", "tail": "SCRAM", "windows": "SCRAM, windows", "local": "local", "strided": "strided"}
WAYS = {"tail": "default", "tail, 4 matches": "4 matches", "tail, 4 matches, 2048 drawn": "4 matches, 2048 drawn"}
MOST = {"accuracy": 1.0, "mAP": 1.0, "bits": 0.02}  # how far from dense
MINUS = "\N{MINUS SIGN}"


def signed(value: float, places: int) -> str:
    return f"{value:+.{places}f}".replace("-", MINUS)


def spread(values: Iterable[float], places: int = 2) -> str:
    """Mean, and the standard deviation where there are several."""
    found = list(values)
    middle = f"{statistics.mean(found):.{places}f}".replace("-", MINUS)
    return f"{middle} ± {statistics.stdev(found):.{places}f}" if len(found) > 1 else middle


def pairs(task: str, others: str = "tail") -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Runs of a task with dense attention and with another, of the seeds that both have."""
    rows = [row for row in table_cells.load("learn").values() if row["task"] == task and row["pictures"] is None]
    by = {name: {row["seed"]: row for row in rows if row["attention"] == name} for name in ("dense", others)}
    seeds = sorted(set(by["dense"]) & set(by[others]))
    return [by["dense"][seed] for seed in seeds], [by[others][seed] for seed in seeds]


def tasks() -> str:
    """docs/learning: dense attention and SCRAM with its tail, seed by seed."""
    head = ("task", "tokens", "SCRAM", "dense, each seed", "SCRAM, each seed", "mean difference", "within target")
    return table(head, *(line for task in TASKS for way in WAYS for line in task_lines(task, way)))


def task_lines(task: str, way: str) -> list[tuple[str, ...]]:
    """The score, and those that it is made of."""
    dense, tail = pairs(task, way)
    lines: list[tuple[str, ...]] = []
    for score in ("accuracy", "mAP", "bits", "digits", "directions"):
        if not dense or score not in dense[0]["test"]:
            continue
        a, b = ([row["test"][score] for row in rows] for rows in (dense, tail))
        places = 3 if score == "bits" else 1
        each = (", ".join(f"{x:.{places}f}" for x in values) for values in (a, b))
        apart = statistics.mean(b) - statistics.mean(a)
        if lines:
            lines.append((f"of these {score}", "", "", *each, signed(apart, max(2, places)), ""))
        else:
            verdict = "yes" if (apart if score == "bits" else -apart) <= MOST[score] else "no"
            first = TASKS[task], BY.join(map(str, TOKENS[task])), WAYS[way]
            lines.append((*first, *each, signed(apart, max(2, places)), verdict))
    return lines


def others() -> str:
    """docs/learning: every attention on every task that all were trained on, mean and spread over the seeds."""
    lines = []
    for task, label in TASKS.items():
        by = grouped(task).get(None, {})
        if not set(ATTENTIONS) <= set(by):
            continue
        score = next(name for name in MOST if name in by["dense"][0]["test"])
        places = 3 if score == "bits" else 1
        cells = (spread((row["test"][score] for row in by[name]), places) for name in ATTENTIONS)
        lines.append((label, BY.join(map(str, TOKENS[task])), *cells))
    return table(("task", "tokens", *ATTENTIONS.values()), *lines)


def speeds() -> list[tuple[str, list[dict[str, Any]]]]:
    """Rows of times by task and size."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in table_cells.load("learn_speed").values():
        groups.setdefault(f"{row['task']} {row['size']}", []).append(row)
    return list(groups.items())


def tokens(row: dict[str, Any]) -> str:
    size = row["size"]
    shapes = {"detect": (size // 2,) * 2, "video": (16, size // 2, size // 2), "classify": (size,) * 2}
    generated = (size,) * 2 if size == 28 else (size, size, 3)
    return BY.join(map(str, shapes.get(row["task"], generated)))


def times() -> str:
    """docs/learning: a step of training as a CUDA graph, by plain calls in brackets."""
    head = ("task", "tokens", "batch", *ATTENTIONS.values(), "dense over SCRAM")
    lines = []
    for _, rows in speeds():
        by = {row["attention"]: row for row in rows}
        cells = [f"{by[name]['captured_ms']:.1f} ({by[name]['step_ms']:.1f}) ms" for name in ATTENTIONS]
        dense, tail = by["dense"], by["tail"]
        ratios = (dense[key] / tail[key] for key in ("captured_ms", "step_ms"))
        lines.append((dense["task"], tokens(dense), str(dense["batch"]), *cells, "{:.2f} ({:.2f})".format(*ratios)))
    return table(head, *lines)


def memory() -> str:
    """docs/learning: the most memory of a step."""
    lines = []
    for _, rows in speeds():
        by = {row["attention"]: row for row in rows}
        cells = (f"{by[name]['peak_mib'] / 1024:.2f} GiB" for name in ATTENTIONS)
        lines.append((by["dense"]["task"], tokens(by["dense"]), str(by["dense"]["batch"]), *cells))
    return table(("task", "tokens", "batch", *ATTENTIONS.values()), *lines)


def profile() -> str:
    """docs/learning: forward and backward of one layer."""
    head = ("grid", "attention", "plain call", "of it the host", "as a CUDA graph", "launches", "memory")
    lines = []
    for row in table_cells.load("learn_profile").values():
        figures = (f"{row[key]:.2f} ms" for key in ("call_ms", "host_ms", "replay_ms"))
        first = BY.join([str(row["size"])] * 2), ATTENTIONS[row["attention"]]
        lines.append((*first, *figures, f"{row['launches']:.0f}", f"{row['peak_mib'] / 1024:.2f} GiB"))
    return table(head, *lines)


NOISE = {
    "dense": "dense",
    "dense, dropout": "dense, dropout of a tenth",
    "tail": "SCRAM, fresh seeds",
    "tail, fixed seed": "SCRAM, one seed",
    "tail, few sweeps": "SCRAM, fresh seeds, few sweeps",
}
FEWER = "32 clusters"  # of digits: they have 196 keys
SETS = {"plain": "CIFAR-10", "digits": "MNIST, halved"}


def grouped(task: str) -> dict[int | None, dict[str, list[dict[str, Any]]]]:
    """Runs by the number of training pictures and the attention."""
    groups: dict[int | None, dict[str, list[dict[str, Any]]]] = {}
    for row in table_cells.load("learn").values():
        if row["task"] == task:
            groups.setdefault(row["pictures"], {}).setdefault(row["attention"], []).append(row)
    return groups


def noise() -> str:
    """docs/learning: losses on training and on test pictures."""
    head = (
        "pictures",
        "attention",
        "seeds",
        "training loss",
        "test loss",
        "gap",
        "gap less that of dense, same seeds",
        "test accuracy",
    )
    lines = []
    for task, label in SETS.items():
        for count, by in grouped(task).items():
            named = f"{label}, {count or 'all'}"
            dense = {row["seed"]: gap(row) for row in by["dense"]}
            for name, told in NOISE.items():
                rows = by.get(name if task == "plain" else name.replace("tail", FEWER), [])
                if rows:
                    both = ([row["test"][key] for row in rows] for key in ("training loss", "loss"))
                    figures = [spread(values, 3) for values in (*both, [gap(row) for row in rows])]
                    apart = [gap(row) - dense[row["seed"]] for row in rows if row["seed"] in dense]
                    less = "" if name == "dense" else spread(apart, 3)
                    accuracy = spread((row["test"]["accuracy"] for row in rows), 1)
                    lines.append((named, told, str(len(rows)), *figures, less, accuracy))
                    named = ""
    return table(head, *lines)


def gap(row: dict[str, Any]) -> float:
    return float(row["test"]["loss"] - row["test"]["training loss"])


BIAS = {
    "plain": {"dense": "dense", "tail": "SCRAM", "windows": "SCRAM, windows", "local": "local"},
    "digits": {
        "dense": "dense",
        FEWER: "SCRAM, 32 clusters",
        "windows": "SCRAM, windows",
        "local, 64 keys": "local, 8x8 keys",
    },
}
ORDERS = {"": "in order", ", shuffled": "shuffled"}
PICTURES = (1000, 5000, None)


def bias() -> str:
    """docs/learning: test accuracy against the number of pictures, pixels in order and shuffled, of seeds all have."""
    head = ("pictures", "attention", *(f"{order}, {count or 'all'}" for order in ORDERS.values() for count in PICTURES))
    lines = []
    for task, names in BIAS.items():
        columns = []
        for order in ORDERS:
            groups = grouped(task + order)
            columns += [of_common_seeds(groups.get(count, {}), list(names)) for count in PICTURES]
        for name, label in names.items():
            cells = (spread(column[name], 1) if column else "" for column in columns)
            lines.append((SETS[task] if name == "dense" else "", label, *cells))
    return table(head, *lines)


def of_common_seeds(by: dict[str, list[dict[str, Any]]], names: list[str]) -> dict[str, list[float]]:
    """Test accuracies of the seeds that every attention has; empty where they share none."""
    mine = {name: {row["seed"]: row["test"]["accuracy"] for row in by.get(name, [])} for name in names}
    seeds = sorted(set.intersection(*(set(one) for one in mine.values())))
    return {name: [one[seed] for seed in seeds] for name, one in mine.items()} if seeds else {}


def swaps() -> str:
    """docs/learning: trained generators of CIFAR-10 with other attentions in their place."""
    rows = table_cells.load("learn_swap")
    names = list(dict.fromkeys(row["attention"] for row in rows.values()))
    trained = list(dict.fromkeys(row["trained"] for row in rows.values()))
    lines = [(name, *(f"{rows[f'{one}; {name}']['bits']:.3f}" for one in trained)) for name in names]
    return table(("tested with", *(f"trained with {ATTENTIONS[one]}" for one in trained)), *lines)
