"""What `scram.trust` says, and whether its intervals hold: `python benchmarks/trust.py --data FOLDER`.

The default tail, 256 clusters, where no other is named. The truth is the same measurement on all queries, with the same
matches and clusters; an interval counts when it encloses it. Samples of 512 queries, 100 seeds, the head with the
fewest. Results: results/trust.json; `python benchmarks/trust.py table` prints them.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from sets import gmflow, minisam, projected, stereo, unnormalised
from store import Store
from table_cells import shown as shown_name
from torch import Tensor

import scram
from scram.core.resolve import Request
from scram.quality.trust import Figures, Trust, _Run, _summary
from scram.quality.truth import Truth
from scram.results import Matches

SEEDS = 100
COVERED = ("GMFlow", "GMFlow, radius 2", "MobileSAM")
INTERVALS = ("mass", "recall", "median_error", "p95_error", "tail_median_error", "tail_p95_error")


def coverage(
    q: Tensor, k: Tensor, v: Tensor, trust: Trust, matches: Matches, radius: int, scale: float | None = None
) -> dict[str, float]:
    """The least share of seeds, over the heads, in which each interval encloses the value of all queries.

    What single queries miss is computed once; a sample takes its part of it. `trust` is what seed 0 must give.
    """
    run = _Run(q, k, v, Request(radius=radius, scale=scale), seed=0)
    figures = run.figures(trust.setting, Truth.of(q, k, v, scale=scale, with_lse=True), matches)
    points = q.shape[2:-1].numel()
    names = ("cost", "setting", "arguments", "error", "better", "split")
    same = {name: getattr(trust, name) for name in names}

    def of(at: Tensor) -> Trust:
        return _summary(Figures(*(x[..., at] for x in figures)), points, **same)

    truth, held = of(torch.arange(points)), dict.fromkeys(INTERVALS, 0)
    for seed in range(SEEDS):
        found = of(scram.measure.sample_queries(q, trust.num_queries, seed))
        if not seed:
            torch.testing.assert_close(found.tail_p95_error.high, trust.tail_p95_error.high, atol=1e-6, rtol=1e-3)
        for name in INTERVALS:
            value, (_, low, high) = getattr(truth, name).value, getattr(found, name)
            held[name] = held[name] + ((low <= value) & (value <= high)).int()
    return {name: float(count.min()) / SEEDS for name, count in held.items()}


def main(folder: Path) -> None:
    store = Store("trust")
    pair, shared, photo = stereo(128), unnormalised(128), projected(128)
    sets: dict[str, tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]] = {
        "GMFlow": (gmflow(folder), {}),
        "GMFlow, radius 2": (gmflow(folder), {"radius": 2}),
        "MobileSAM": (minisam(folder), {}),
        "MobileSAM, 16 matches": (minisam(folder), {"search": scram.Search(matches=16, seed=0), "radius": 2}),
        "MobileSAM, 4 matches": (minisam(folder), {"search": scram.Search(matches=4, separation=2, seed=0)}),
        "stereo, scale 8": ((*pair, pair[1]), {"scale": 8.0}),
        "stereo, scale 100": ((*pair, pair[1]), {"scale": 100.0}),
        "projected": ((*photo, photo[1]), {"scale": 1.0}),
        "un-normalised": ((*shared, shared[1]), {}),
    }
    for name, (tensors, how) in sets.items():
        q, k, v = tensors
        settings, radius = how.pop("search", scram.Search(seed=0)), how.pop("radius", 1)
        found = scram.search(q, k, search=settings)
        clusters = replace(how.pop("tail", scram.Clusters()), seed=0)
        book = scram.cluster(q, k, v, clusters=clusters, **how)
        how.update(matches=found, search=settings, radius=radius, tail=book)
        trust = scram.trust(q, k, v, **how)
        shares = coverage(q, k, v, trust, found, radius, how.get("scale")) if name in COVERED else None
        print(f"\n{name}\n{trust}\nintervals that enclose the truth, least head: {shares}", flush=True)
        # Value, low and high of the worst head, each: the least mass and recall, the largest error.
        figures = {
            key: [float(x.max() if key.endswith("error") else x.min()) for x in getattr(trust, key)]
            for key in INTERVALS
        }
        store.put(
            name,
            verdict=trust.verdict,
            reason=trust.reason,
            coverage=shares,
            seeds=SEEDS,
            output_error=trust.output_error.flatten().tolist(),
            tail_output_error=trust.tail_output_error.flatten().tolist(),
            **figures,
        )


def table() -> str:
    """The stored results, the head with the least mass or the largest error."""
    head = ("tensors", "verdict", "mass", "windows: median error", "clusters: median, 95th percentile", "enclosed")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, row in Store("trust").data.items():
        held = (
            [str(round(100 * row["coverage"][key])) for key in INTERVALS if key != "recall"] if row["coverage"] else []
        )
        error, tail, far = (row[key] for key in ("median_error", "tail_median_error", "tail_p95_error"))
        shown = (f"{x[0]:.4f} [{x[1]:.4f}, {x[2]:.4f}]" for x in (tail, far))
        figures = (f"{row['mass'][0]:.3f}", f"{error[0]:.4f}", ", ".join(shown), ", ".join(held))
        lines.append("| " + " | ".join((shown_name(name), row["verdict"], *figures)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=["table"], help="print the stored results")
    parser.add_argument("--data", type=Path, help="folder with the trained tensors")
    given = parser.parse_args()
    if given.what:
        print(table())
    elif given.data is None:
        parser.error("--data is needed to measure")
    else:
        main(given.data)
