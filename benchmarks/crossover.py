"""Where a search with clusters becomes faster than dense attention: `python benchmarks/crossover.py [--device cuda]`.

Both of the same random tensors, in turn; beside them what `resolve.COSTS` chooses, and a call that goes dense beside
torch's own. On a CPU: CPU time of one thread, the least of several, which other programs hardly change.
`--table` prints what is stored. Results: results/crossover_cpu.json, results/crossover_cuda.json.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from store import RESULTS, Store

import scram
from scram.core.resolve import default_search, default_tail, dense_is_cheaper

SIDES = {"cpu": (16, 32, 40, 48, 56, 64, 80, 96), "cuda": (128, 160, 192, 256)}
PAUSE = 0.2  # seconds before the calls of a contender
LONG = {"cpu": 0.3, "cuda": 1.0}  # seconds of all calls of a contender
DTYPES = {"cpu": (torch.float32,), "cuda": (torch.bfloat16, torch.float32)}
SHAPES = ((1, 64), (8, 64), (1, 16))  # heads, width
MOST = {"cpu": 3e10, "cuda": 1e13}  # products of a dense call at most


def measured(side: int, heads: int, width: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Milliseconds of dense attention by torch, of a search with clusters, and of the default call."""
    shape = (1, heads, side, side, width)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    flat = [x.flatten(2, 3) for x in (q, k, v)]
    clock, choose = (time.process_time, min) if device == "cpu" else (time.perf_counter, statistics.median)

    def waiting(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            call()
            if device == "cuda":
                torch.cuda.synchronize()

        return run

    tail = default_tail(device, "softmax", False, "dot")
    calls = {
        "dense": waiting(lambda: F.scaled_dot_product_attention(*flat)),
        "searched": waiting(lambda: scram.attention(q, k, v, search=default_search(device, tail), tail=tail)),
        "default": waiting(lambda: scram.attention(q, k, v)),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(3):
        for name, call in calls.items():
            time.sleep(PAUSE)  # torch's threads go on spinning for a while
            call()
            begun = clock()
            for _ in range(20):
                start = clock()
                call()
                times[name].append(clock() - start)
                if clock() - begun > LONG[device]:
                    break
    chosen = {f"{name}_ms": 1e3 * choose(each) for name, each in times.items()}
    return {**chosen, "goes_dense": dense_is_cheaper(q, k, v)}


def table(rows: dict[str, Any]) -> str:
    lines = ["| grid, heads, width, dtype | dense ms | searched ms | default ms | it is |", "|---|---|---|---|---|"]
    for name, row in rows.items():
        times = " | ".join(f"{row[f'{what}_ms']:.3g}" for what in ("dense", "searched", "default"))
        lines.append(f"| {name} | {times} | {'dense' if row['goes_dense'] else 'searched'} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(SIDES), default="cpu")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--commit", help="the commit that is measured, where git is not there to ask")
    parser.add_argument("--heads", type=int, action="append", help="these only; may be repeated")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no row after this time")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if given.device == "cpu":
        torch.set_num_threads(1)
    store = Store(f"crossover_{given.device}", given.results)
    rows = list(itertools.product(DTYPES[given.device], SHAPES, SIDES[given.device]))
    end = time.monotonic() + given.seconds
    for dtype, (heads, width), side in [] if given.table else track(rows, description="crossover"):
        wanted = not given.heads or heads in given.heads
        if wanted and heads * side**4 * width < MOST[given.device] and time.monotonic() < end:
            name = f"{side}x{side}, {heads}, {width}, {str(dtype).removeprefix('torch.')}"
            store.put(name, given.commit, **measured(side, heads, width, dtype, given.device))
    print(table(store.data))


if __name__ == "__main__":
    main()
