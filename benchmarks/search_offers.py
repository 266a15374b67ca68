"""Errors of the default's tail by what the sweeps of a tile search offer.

    python benchmarks/search_offers.py measure --data build/trained --sets stereo_motorcycle gmflow_60x92 --seeds 4
    python benchmarks/search_offers.py table

384 clusters and 768 routed keys; relative errors of the worst head as in `routed.py`, the mean of the seeds. What the
same searches cost on an H200 is in results/routed_gpu_kernels.json. Results: results/search_offers.json.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from routed import all_sets, exact
from store import Store

import scram

SEARCHES: dict[str, dict[str, Any] | None] = {
    "both, gossip 8": {},
    "both, gossip 8, one sweep": {"sweeps": 1},
    "both, gossip 2": {"gossip": 2},
    "both, gossip 0": {"gossip": 0},
    "turns, gossip 4": {"propagate": "turns", "gossip": 4},
    "shift, gossip 4": {"propagate": "shift", "gossip": 4},
    "both, jumps 4 1, gossip 4": {"jumps": (4, 1), "gossip": 4},
    "both, jumps 8 2, gossip 4": {"jumps": (8, 2), "gossip": 4},
    "both, jumps 2 1, gossip 2": {"jumps": (2, 1), "gossip": 2},
    "both, jumps 2 1, gossip 2, three sweeps": {"sweeps": 3, "jumps": (2, 1), "gossip": 2},
    "both, jumps 1, gossip 0": {"jumps": (1,), "gossip": 0},
    "no search": None,
}


def measure(data: Path | None, names: list[str], seeds: int) -> None:
    store = Store("search_offers")
    for name, (q, k, v, scale) in all_sets(data).items():
        if not any(part in name for part in names):
            continue
        some, truth = exact(q, k, v, scale)
        size = truth.flatten(1).norm(dim=1)
        errors: dict[str, float] = {}
        for setting, changes in SEARCHES.items():
            found = []
            for seed in range(seeds):
                search = None if changes is None else scram.Search("tile", **{"sweeps": 2, **changes, "seed": seed})
                tail = scram.Clusters(count=384, keys=768, seed=seed)
                out = scram.attention(q, k, v, search=search, tail=tail, scale=scale)
                apart = out.flatten(2, -2)[0][:, some] - truth
                found.append(float((apart.flatten(1).norm(dim=1) / size).max()))
            errors[setting] = statistics.mean(found)
        store.put(name, seeds=seeds, error=errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("measure", "table"))
    parser.add_argument("--data", type=Path, help="folder that trained.py made")
    parser.add_argument("--sets", nargs="*", default=[""], help="parts of their names")
    parser.add_argument("--seeds", type=int, default=4)
    arguments = parser.parse_args()
    if arguments.command == "measure":
        torch.set_num_threads(1)
        measure(arguments.data, arguments.sets, arguments.seeds)
    for name, row in Store("search_offers").data.items():
        print(name, ", ".join(f"{setting}: {error:.4f}" for setting, error in row["error"].items()))


if __name__ == "__main__":
    main()
