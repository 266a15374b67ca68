"""The constants of `distributed_cost.predict`, fitted to stored rows of an H200, and what it predicts.

python benchmarks/distributed_model.py           # prints the fit and the predictions
python benchmarks/distributed_model.py --store   # and stores them, for the tables of docs/distributed.md
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from typing import Any

import numpy as np
from distributed_cost import H200, predict
from store import RESULTS, Store

POINTS, GPUS = (1e8, 1e9, 1e10), (8, 64, 512)
HEADS, WIDTH = (1, 8), 64


def fit() -> dict[str, Any]:
    """Seconds of the parts of a call for one point of one head and one unit of width, and how far rows are from it."""
    rows = json.loads((RESULTS / "gpu_default.json").read_text())
    whole = {
        name: row
        for name, row in rows.items()
        if name.startswith("default") and row["part"] == "whole" and row["kappa"] == 1 and not row["backward"]
    }
    units = np.array([_units(row) for row in whole.values()])
    seconds = np.array([row["ms"] for row in whole.values()]) / 1e3
    a = np.stack([np.ones_like(units), units], 1)
    launch, unit = np.linalg.lstsq(a / seconds[:, None], np.ones_like(seconds), rcond=None)[0]
    off = a @ [launch, unit] / seconds - 1
    one, parts = rows["default 512 E64 h1 k1"], rows["default 512 E64 h1 k1 clusters"]
    shares = {"clusters": parts["cluster_ms"], "tail": parts["windows_and_tail_ms"] - parts["windows_ms"]}
    shares = {name: ms / one["ms"] for name, ms in shares.items()}
    both, paper, paper_both = (
        rows[f"{name} 512 E64 h1 k1{end}"]["ms"]
        for name, end in (("default", " fwd+bwd"), ("paper", ""), ("paper", " fwd+bwd"))
    )
    back = ((both - one["ms"]) / 1e3 - launch) / _units(one)
    windows = (paper_both - paper) / (both - one["ms"])  # gradients of windows alone, without a tail
    constants = {
        "launch": launch,
        "search": unit * (1 - sum(shares.values())),
        "clusters": unit * shares["clusters"],
        "tail": unit * shares["tail"],
        "back_windows": back * windows,
        "back_tail": back * (1 - windows),
    }
    return {
        "constants": {name: float(f"{value:.3g}") for name, value in constants.items()},
        "off": {name: round(float(value), 4) for name, value in zip(whole, off, strict=True)},
    }


def _units(row: dict[str, Any]) -> float:
    return float(row["size"] ** 2 * row["heads"] * row["width"])


def predictions(heads: int) -> dict[str, dict[str, dict[str, Any]]]:
    """By points and GPUs, then by mode and pass; bytes in units of 10^9."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for points, gpus, (name, backward) in product(POINTS, GPUS, {"forward": False, "both": True}.items()):
        for mode, one in predict(points, gpus, heads=heads, width=WIDTH, backward=backward).items():
            row = {key: getattr(one, key) for key in ("seconds", "compute", "transfer", "bottleneck")}
            row |= {"sent": one.sent / 1e9, "held": one.memory / 1e9}
            found.setdefault(f"{points:.0e} points, {gpus} GPUs", {}).setdefault(mode, {})[name] = row
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", action="store_true", help="store what is printed under results/")
    arguments = parser.parse_args()
    fitted = fit()
    print(json.dumps(fitted, indent=1))
    wrong = {n: x for n, x in fitted["constants"].items() if abs(getattr(H200, n) / x - 1) > 1e-3}
    print(f"constants in distributed_cost that differ: {wrong or 'none'}")
    for heads in HEADS:
        print(f"heads: {heads}, width {WIDTH}, bfloat16, forward and backward")
        for name, modes in predictions(heads).items():
            for mode, passes in modes.items():
                one = passes["both"]
                figures = f"{one['seconds']:10.3g} s {one['sent']:8.3g} GB sent {one['held']:8.3g} GB held"
                print(f"{name:22} {mode:7} {figures}  {one['bottleneck']}")
    if arguments.store:
        store = Store("distributed_model")
        store.put("fit", **fitted)
        for heads in HEADS:
            store.put(f"heads {heads}", width=WIDTH, rows=predictions(heads))


if __name__ == "__main__":
    main()
