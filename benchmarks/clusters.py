"""Which constants the clustered tail should have: `python benchmarks/clusters.py --data FOLDER [--only steps,count]`.

Relative output errors on 1000 sampled queries, one match and four matches (separation 2), radius 1, mean of the seeds.
FOLDER holds the trained tensors. `--table` prints what is stored. Results: results/clusters_cpu.json.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cluster_errors import Head, Problem, Searches, constants, error, head_of, photo_problems, trained_problems
from rich.console import Console
from rich.progress import track
from rich.table import Table
from store import Store
from torch import Tensor

from scram.core.calls import Clustered
from scram.spec import clustering

SEEDS = (0, 1)
HEADS: dict[str, dict[str, Any]] = {"one match": {"matches": 1}, "four matches": {"matches": 4, "separation": 2}}
LARGE = ("stereo, 8", "stereo, 32", "projected, 1", "projected, 8")  # those measured at 256x256 too
LARGE_SWEEPS = (3, 4, 5, 8)
# Of all tables but "together", which has the library's own; every table has 256 clusters and 3 steps unless it says so.
BASE = {"SAMPLED_KEYS": 16384, "SAMPLED_QUERIES": 4096, "START_QUERIES": 64}


class Variant(NamedTuple):
    """What is changed: the search, its radius, the clusters' settings, and the code's constants for a while."""

    search: dict[str, Any]
    clusters: dict[str, Any] | None  # None: no clusters
    radius: int = 1
    patch: Callable[[], AbstractContextManager[Any]] = nullcontext


def space(q: Tensor, k: Tensor, v: Tensor, *, queries: str, weight: float, absolute: bool = False) -> clustering.Space:
    """As `Space.of`, in other metrics: of keys alone, plain queries, centered queries, or divided ones."""
    k_mean, v_mean = k.mean(0), v.mean(0)
    covariance = (k - k_mean).T @ (k - k_mean) / len(k)
    if queries == "divided":
        q = q / (1 + ((q @ covariance) * q).sum(-1, keepdim=True))
    metric = torch.cov(q.T) if queries == "centered" else q.T @ q / len(q)
    metric = torch.eye(len(metric)) if queries == "none" else metric
    spread, variance = (metric * covariance).sum(), (v - v_mean).square().sum(-1).mean()
    return clustering.Space(metric, weight * (1 if absolute else spread) / variance, k_mean, v_mean)


def of_metric(start: bool, **how: Any) -> Variant:
    """k-means in another metric, started by attention or at keys of equal strides."""

    def patch() -> AbstractContextManager[Any]:
        made = type("Space", (clustering.Space,), {"of": staticmethod(partial(space, **how))})
        return constants(Space=made, **({} if start else {"START_QUERIES": 0}))

    return Variant({}, {}, patch=patch)


def metric_variants() -> dict[str, Variant]:
    even = partial(of_metric, False)
    plain = {"queries": "plain"}
    made = {
        "keys alone": even(queries="none", weight=0),
        "centred q, 1": even(queries="centered", weight=1, absolute=True),
    }
    made |= {f"q, {w:g} in all": even(**plain, weight=w, absolute=True) for w in (0, 0.03, 0.1, 0.3, 1, 3)}
    made |= {f"q, {w:g} of spread": even(**plain, weight=w) for w in (0.1, 0.3, 1)}
    made |= {f"divided q, {w:g}": even(queries="divided", weight=w) for w in (0.1, 0.3, 1)}
    return made | {
        "q, .3, start": of_metric(True, **plain, weight=0.3),
        "chosen": of_metric(True, queries="divided", weight=clustering.VALUE_WEIGHT),
    }


def step_variants() -> dict[str, Variant]:
    return {f"{steps} steps": Variant({}, {"steps": steps}) for steps in (0, 1, 2, 3, 5, 8)}


def sample_variants() -> dict[str, Variant]:
    keys = {4096: "4096", 8192: "8192", 16384: "16384", 1 << 30: "all"}
    made = {f"{name} keys": Variant({}, {}, patch=partial(constants, SAMPLED_KEYS=n)) for n, name in keys.items()}
    made |= {f"{n} queries": Variant({}, {}, patch=partial(constants, SAMPLED_QUERIES=n)) for n in (512, 1024)}
    return made | {f"start {n}": Variant({}, {}, patch=partial(constants, START_QUERIES=n)) for n in (16, 32, 256)}


def count_variants() -> dict[str, Variant]:
    made = {"windows only": Variant({}, None)}
    return made | {f"{count} clusters": Variant({}, {"count": count}) for count in (64, 128, 256, 512)}


def sweep_variants(numbers: tuple[int, ...]) -> dict[str, Variant]:
    cases = [(method, n) for method in ("query", "tile") for n in numbers]
    return {f"{method}, {n} sweeps": Variant({"method": method, "sweeps": n}, {}) for method, n in cases}


def search_variants() -> dict[str, Variant]:
    made = sweep_variants((2, 3, 4, 5, 6, 8))
    for n in (3, 4, 8):
        made[f"query, {n} sweeps, radius 2"] = Variant({"method": "query", "sweeps": n}, {}, radius=2)
    for n in (0, 4, 16):
        made[f"query, 4 sweeps, gossip {n}"] = Variant({"method": "query", "sweeps": 4, "gossip": n}, {})
    return made


def together_variants() -> dict[str, Variant]:
    cases = [("query", 5, 1), ("query", 5, 2), ("tile", 3, 1), ("tile", 5, 1), ("tile", 5, 2)]
    return {
        f"{method}, {sweeps} sweeps, steps {steps}": Variant({"method": method, "sweeps": sweeps}, {"steps": steps})
        for method, sweeps, steps in cases
    }


VARIANTS = {
    "metric": metric_variants,
    "steps": step_variants,
    "sample": sample_variants,
    "count": count_variants,
    "search": search_variants,
    "together": together_variants,
}


class Bench:
    """Clusters of the variants on the problems, with what is shared among them kept."""

    def __init__(self, searches: Searches) -> None:
        self.searches = searches
        self.heads: dict[Any, Head] = {}
        self.made: dict[Any, Clustered] = {}

    def head(self, problem: Problem, seed: int, radius: int, settings: dict[str, Any]) -> Head:
        key = (problem.name, problem.group, seed, radius, *sorted(settings.items()))
        if key not in self.heads:
            found = self.searches.of(problem, seed, **settings)
            self.heads[key] = head_of(problem, problem.sample(seed), found, radius)
        return self.heads[key]

    def clusters(self, problem: Problem, seed: int, variant: Variant) -> Clustered | None:
        if variant.clusters is None:
            return None
        if variant.patch is not nullcontext:
            with variant.patch():
                return problem.cluster(seed, **variant.clusters)
        key = (problem.name, problem.group, seed, *sorted(variant.clusters.items()))
        if key not in self.made:
            self.made[key] = problem.cluster(seed, **variant.clusters)
        return self.made[key]

    def errors(self, problem: Problem, variant: Variant) -> dict[str, list[float]]:
        """Of each kind of head, one error a seed."""
        found: dict[str, list[float]] = {name: [] for name in HEADS}
        for seed in SEEDS:
            made = self.clusters(problem, seed, variant)
            for name, matches in HEADS.items():
                head = self.head(problem, seed, variant.radius, {**matches, **variant.search})
                found[name].append(round(error(problem, problem.sample(seed), head, made), 5))
        return found


def shown(rows: dict[str, Any], name: str, grid: str = "128x128") -> Table:
    """Mean of the seeds, one match and four matches; the last line is the geometric mean of the lines."""
    kept = {row["problem"]: row["errors"] for row in rows.values() if row["table"] == name and row["grid"] == grid}
    columns = list(next(iter(kept.values())))
    table = Table("set, scale", *columns, title=f"{name}, {grid}")
    means = {
        problem: [[statistics.mean(each[column][head]) for head in HEADS] for column in columns]
        for problem, each in kept.items()
    }
    for problem, cells in means.items():
        table.add_row(problem, *(" ".join(brief(x) for x in cell) for cell in cells))
    overall = [
        [math.exp(statistics.mean(math.log(c[n][h]) for c in means.values())) for h in (0, 1)]
        for n in range(len(columns))
    ]
    table.add_row("geometric mean", *(" ".join(brief(x) for x in cell) for cell in overall))
    return table


def brief(x: float) -> str:
    return (f"{x:.4f}" if x < 0.01 else f"{x:.3f}" if x < 1 else f"{x:.1f}").removeprefix("0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with the trained tensors")
    parser.add_argument("--only", default=",".join(VARIANTS), help="tables, with commas between")
    parser.add_argument("--large", action="store_true", help="256x256 instead, for steps, sample and search")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "clusters_cpu.json")
    parser.add_argument("--table", action="store_true", help="print what is stored")
    asked = parser.parse_args()
    store, names = Store(asked.json.stem, asked.json.parent), asked.only.split(",")
    grid = "256x256" if asked.large else "128x128"
    if not asked.table:
        torch.set_grad_enabled(False)
        if asked.large:
            problems = [x for x in photo_problems(256, ("stereo", "projected")) if x.name in LARGE]
        else:
            problems = photo_problems() + trained_problems(asked.data)
        searches = Searches()
        for name in names:
            bench = Bench(searches)
            variants = sweep_variants(LARGE_SWEEPS) if asked.large and name == "search" else VARIANTS[name]()
            for problem in track(problems, description=name):
                with nullcontext() if name == "together" else constants(**BASE):
                    errors = {label: bench.errors(problem, variant) for label, variant in variants.items()}
                store.put(f"{name} {problem.name} {grid}", table=name, problem=problem.name, grid=grid, errors=errors)
    for name in names:
        Console(width=240).print(shown(store.data, name, grid))


if __name__ == "__main__":
    main()
