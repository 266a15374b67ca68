"""State shared by neighboring layers: what an error and what time it is worth, on the global layers of SAM 2.

    python benchmarks/neighbors.py run --sides 1024 2048     # on a CPU; some minutes
    python benchmarks/neighbors.py table

A layer takes over from the global layer before it which keys stand together (the labels of its clusters), or where its
search starts (matches). The keys and values of a cluster are its own. Beside it: the same by its own clusters and its
own search, and what clustering costs of the whole call.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from statistics import mean
from typing import Any
from unittest import mock

import table_cells
import torch
from store import Store
from torch import Tensor

import scram
from scram.quality.timing import clock
from scram.quality.truth import Truth
from scram.spec import clustering

sys.path.append(str(table_cells.ROOT / "examples"))  # where the model is rebuilt

QUERIES = 2048  # of a head, whose errors are measured
TAILS = ((256, 512), (512, 1024), (1024, 2048))
MIDDLE = (512, 1024)
SEARCHED, SHORT = scram.Search(sweeps=2, seed=0), scram.Search(sweeps=1, seed=0)
Layer = tuple[Tensor, Tensor, Tensor]  # q, k, v


def labeled(q: Tensor, k: Tensor, v: Tensor, book: scram.Codebook, clusters: scram.Clusters) -> scram.Codebook:
    """Clusters of keys and values whose groups are those of `book`."""

    def labels_of(call: Any, row: int, k: Tensor, v: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
        metric = clustering.Start.of(call, row, k, v, usable).space.metric.diagonal()
        return book.label.flatten(0, 1)[row].flatten().long(), metric

    with mock.patch.object(clustering, "labels_of", labels_of):
        return scram.cluster(q, k, v, clusters=clusters, impl="reference")


def rows_of(layers: dict[int, Layer]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A row for each two neighboring layers and each setting."""
    for (before, given), (number, (q, k, v)) in pairwise(layers.items()):
        truth = Truth.of(q, k, v, num_queries=QUERIES)

        def errors(out: Tensor, truth: Truth = truth) -> dict[str, float]:
            measured = truth.errors(out)
            return {"p95": measured.worst[0], "output": float(measured.output.max())}

        for count, keys in TAILS:
            clusters = scram.Clusters(count=count, keys=keys, seed=0)
            own = scram.cluster(q, k, v, clusters=clusters)
            theirs = labeled(q, k, v, scram.cluster(*given, clusters=clusters), clusters)
            whole, out = clock(partial(scram.attention, q, k, v, search=None, tail=clusters), "cpu")
            part = clock(partial(scram.cluster, q, k, v, clusters=clusters), "cpu")[0]
            yield (
                f"{before} to {number}, {count} + {keys}",
                {
                    "own": errors(out),
                    "own_codebook": errors(scram.attention(q, k, v, search=None, tail=own)),
                    "shared": errors(scram.attention(q, k, v, search=None, tail=theirs)),
                    "seconds": whole.seconds,
                    "clustering_seconds": part.seconds,
                },
            )
        clusters = scram.Clusters(*MIDDLE, seed=0)
        first = scram.search(*given[:2], search=SEARCHED)
        ways = {"cold": (SEARCHED, None), "warm": (SEARCHED, first), "warm, one sweep": (SHORT, first)}
        row: dict[str, Any] = {}
        for name, (search, warm) in ways.items():
            call = partial(scram.attention, q, k, v, search=search, tail=clusters, warm=warm)
            time, out = clock(call, "cpu")
            score = float(scram.search(q, k, search=search, warm=warm).score.mean())
            row[name] = {**errors(out), "seconds": time.seconds, "mean_score": score}
        yield f"{before} to {number}, matches", row


@torch.no_grad()
def run(sides: list[int], photographs: list[str]) -> None:
    import hiera
    from packages import CACHE, SAM2
    from sam2 import photograph

    encoder = hiera.Hiera(hiera.weights_of(SAM2.read(CACHE, hiera.FILE)))
    store = Store("neighbors")
    for side in sides:
        for name in photographs:
            layers: dict[int, Layer] = {}

            def keep(number: int, q: Tensor, k: Tensor, v: Tensor, into: dict[int, Layer] = layers) -> Tensor:
                into[number] = q.contiguous(), k.contiguous(), v.contiguous()
                return hiera.dense(number, q, k, v)

            encoder.trunk(photograph(name, side), keep)
            for pair, row in rows_of(layers):
                key = f"SAM 2, {side} pixels, {name}, blocks {pair}"
                store.put(key, side=side, photograph=name, **row)
                print(key, row, flush=True)


def table() -> str:
    """docs/your_model: a layer with the groups of its keys from the layer before, at the largest size; means."""
    head = ("blocks", "clusters + keys", "own groups", "groups of the layer before", "clustering, of the time")
    rows = {name: row for name, row in table_cells.load("neighbors").items() if "shared" in row}
    if not rows:
        return table_cells.NOT_MEASURED
    largest = max(row["side"] for row in rows.values())
    cells: dict[str, list[dict[str, Any]]] = {}
    for name, row in rows.items():
        if row["side"] == largest:
            cells.setdefault(name.split("blocks ")[1], []).append(row)
    lines = []
    for name, mine in cells.items():
        errors = (table_cells.share(mean(row[kind]["p95"] for row in mine)) for kind in ("own", "shared"))
        part = mean(row["clustering_seconds"] / row["seconds"] for row in mine)
        lines.append((*name.split(", "), *errors, f"{part:.0%}"))
    return table_cells.table(head, *lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--sides", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--photographs", nargs="+", default=["dogs", "astronaut"])
    given = parser.parse_args()
    if given.what == "run":
        run(given.sides, given.photographs)
    else:
        print(table())


if __name__ == "__main__":
    main()
