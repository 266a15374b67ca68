"""Error and time of routed clusters, with and without a search, on photo features and on trained tensors.

    python benchmarks/routed.py errors --data build/trained    # every set; without --data the photo sets alone
    python benchmarks/routed.py table                          # worst head, mean of the seeds
    python benchmarks/routed.py plot docs/images/routed.png

Settings are chosen on the sets of `trained.to_choose`; the others report. The error is |out - exact| / |exact| over
1000 queries of a head, of the worst head, the mean of four seeds. `ms` is the processor time of a call on one thread,
the least of the seeds. "before" is what the library did without routed keys, first and second order: one match of
five sweeps from drawn keys and 256 clusters. Results: results/routed.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from store import RESULTS, Store
from torch import Tensor
from trained import photo_sets, to_choose, trained_sets

import scram

QUERIES = 1000
SEEDS = 4
SIZES = ((128, 256), (256, 512), (384, 768), (512, 512), (512, 1152), (1024, 1024))  # clusters, keys
TERMS = {"zeroth": (False, False), "first": (True, False), "second": (False, True)}
Set = tuple[Tensor, Tensor, Tensor, float]
Setting = tuple[scram.Search | None, scram.Clusters]


def settings(seed: int) -> dict[str, Setting]:
    """Every setting by its name."""

    def search(sweeps: int, matches: int = 1) -> scram.Search:
        return scram.Search(matches=matches, separation=2 * (matches > 1), sweeps=sweeps, seed=seed)

    plain = scram.Clusters(count=256, keys=0, first_order=False, second_order=False, seed=seed)
    every: dict[str, Setting] = {"before": (scram.Search(seed=seed, start="drawn"), plain)}
    for count, keys in SIZES:
        tail = scram.Clusters(count=count, keys=keys, seed=seed)
        every[f"{count}+{keys}"] = (None, tail)
        for sweeps in (1, 2):
            every[f"{count}+{keys}, {sweeps} sweeps"] = (search(sweeps), tail)
    for count, keys in ((256, 512), (512, 1152)):
        every[f"{count}+{keys}, 4 matches"] = (search(2, 4), scram.Clusters(count=count, keys=keys, seed=seed))
    every["256+0"] = (None, scram.Clusters(count=256, keys=0, seed=seed))
    for size in ("256+0", "256+512", "512+1152, 2 sweeps"):
        searched, tail = every[size]
        for name, (first, second) in TERMS.items():
            every[f"{size}, {name}"] = (searched, replace(tail, first_order=first, second_order=second))
    return every


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Some queries [n], and their exact output [H, n, F]."""
    some = scram.measure.sample_queries(q, QUERIES)
    return some, scram.exact_attention(q, k, v, scale=scale, queries=some).out.flatten(2, -2)[0]


def measure(one: Set, only: list[str], impl: str) -> dict[str, dict[str, float]]:
    """Error and processor time of each setting."""
    q, k, v, scale = one
    some, truth = exact(*one)
    size = truth.flatten(1).norm(dim=1)
    rows: dict[str, dict[str, float]] = {}
    for name in only:
        errors, times = [], []
        for seed in range(SEEDS):
            search, tail = settings(seed)[name]
            start = time.process_time()
            out = scram.attention(q, k, v, search=search, tail=tail, scale=scale, impl=impl)
            times.append(time.process_time() - start)
            apart = out.flatten(2, -2)[0][:, some] - truth
            errors.append(float((apart.flatten(1).norm(dim=1) / size).max()))
        rows[name] = {"error": statistics.mean(errors), "most": max(errors), "ms": 1e3 * min(times)}
    return rows


def all_sets(data: Path | None) -> dict[str, Set]:
    sets: dict[str, Set] = dict(photo_sets(128))
    if data is not None:
        sets |= trained_sets(data)
    return sets


def errors(data: Path | None, only: list[str], names: list[str], impl: str) -> None:
    torch.set_num_threads(1)
    store = Store("routed")
    sets = {name: one for name, one in all_sets(data).items() if not names or any(part in name for part in names)}
    for name in track(sets, description="sets"):
        rows = measure(sets[name], only or list(settings(0)), impl)
        known = store.data.get(name, {}).get("settings", {})
        store.put(name, choose=to_choose(name), settings={**known, **rows})


def table(columns: list[str]) -> None:
    data = Store("routed").data
    columns = columns or list(settings(0))
    for choose in (True, False):
        shown = Table("to choose" if choose else "to report", *columns)
        for name, row in data.items():
            if row["choose"] is choose:
                cells = [row["settings"].get(column) for column in columns]
                shown.add_row(name, *("" if cell is None else f"{cell['error']:.4f}" for cell in cells))
        Console(width=240).print(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("errors", "table", "plot"))
    parser.add_argument("picture", nargs="?", type=Path, default=RESULTS.parents[1] / "docs/images/routed.png")
    parser.add_argument("--data", type=Path, help="folder that trained.py made")
    parser.add_argument("--settings", nargs="*", default=[], help="names; all without it")
    parser.add_argument("--sets", nargs="*", default=[], help="parts of their names; all without it")
    parser.add_argument("--impl", default="auto")
    arguments = parser.parse_args()
    if arguments.command == "errors":
        errors(arguments.data, arguments.settings, arguments.sets, arguments.impl)
    elif arguments.command == "table":
        table(arguments.settings)
    else:
        from routed_plot import plot

        plot(arguments.picture)


if __name__ == "__main__":
    main()
