"""Kernels of the clustered tail on a CUDA device, in one run: errors, then block sizes, kernel by kernel.

    python benchmarks/tail_gpu.py --seconds 190 --out "$OUT"

First forward and all gradients against the reference in float64. Then every variant is compiled in parallel processes,
by one call of it on a small grid, and timed at the shapes of SHAPES; a row is printed and stored as it comes. Results:
tail_gpu.json. `--device cpu` with TRITON_INTERPRET=1 tries the whole of it on small grids, without times.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from routed_gpu import Case, Shape, graph_ms, kernel_ms, relative, stages, with_gradients
from store import RESULTS, Store

from scram.core import ops
from scram.core.calls import ClusterTailGrads
from scram.engines import dispatch
from scram.engines.gpu.runtime import launch

CLUSTERS, KEYS = 384, 768  # of the default
SHAPES = [Shape((256, 256), 24, 128), Shape((512, 512)), Shape((256, 256), 8)]
CHECKS = {
    "small": (Shape((20, 21), 2, 32), 40, 60),
    "rank 3": (Shape((5, 9, 6), 2, 24), 20, 40),
    "medium": (Shape((64, 64), 2, 64), 128, 256),
    "wide": (Shape((32, 40), 1, 128), 100, 200),
}
TAIL = "scram.engines.gpu.cluster_tail"
Variant = tuple[str, str, str, tuple[int, ...]]  # kernel, stage that launches it, where its block size stands, the size


def variants(width: int) -> list[Variant]:
    """What stands comes first, then others."""
    narrow = width <= 64
    tail = f"{TAIL}.forward.CLUSTER_TAIL" + "_NARROW" * narrow
    back = f"{TAIL}.backward.CLUSTER_BACKWARD" + "_NARROW" * narrow
    kernels = [
        ("tail_queries_kernel", "tail backward", back, [(32, 4, 2), (64, 4, 2), (32, 4, 3), (32, 8, 2), (32, 4, 1)]),
        (
            "tail_keys_kernel",
            "tail backward",
            f"{TAIL}.keys_backward.KEYS_COLLECT",
            [(64, 4, 1), (64, 4, 2), (32, 4, 2), (64, 8, 1), (64, 8, 2)],
        ),
        (
            "tail_clusters_kernel",
            "tail backward",
            f"{TAIL}.backward.CLUSTER_COLLECT",
            [(64, 4, 1), (64, 4, 2), (32, 4, 2), (64, 8, 1), (64, 8, 2)],
        ),
        ("tail_slope_kernel", "tail backward", f"{TAIL}.backward.SLOPE", [(64, 4, 2), (64, 8, 2), (32, 4, 2)]),
        ("cluster_tail_kernel", "tail", tail, [(64, 4, 2), (32, 4, 2), (32, 4, 3), (64, 4, 3), (32, 4, 3, 168)]),
        ("cluster_tail_kernel", "tail and windows", tail, [(64, 4, 2), (32, 4, 2), (64, 4, 3)]),
    ]
    return [(kernel, stage, place, size) for kernel, stage, place, sizes in kernels for size in sizes]


class Chosen:
    """A block size in its place, while it is tried."""

    def __init__(self, place: str, size: tuple[int, ...]) -> None:
        path, self.name = place.rsplit(".", 1)
        self.module = importlib.import_module(path)
        self.size = size

    def __enter__(self) -> None:
        self.kept = getattr(self.module, self.name)
        setattr(self.module, self.name, self.size)
        launch.clear_caches()

    def __exit__(self, *_: object) -> None:
        setattr(self.module, self.name, self.kept)
        launch.clear_caches()


def check(store: Store, commit: str | None, device: str) -> None:
    """Errors of the engine, and of the reference in the same dtype, both against the reference in float64."""
    for name, (shape, clusters, keys) in CHECKS.items():
        case = Case.of(shape, clusters, keys, torch.bfloat16, device)
        # The engine keeps 16 bits of centers and values beside features of 16 bits.
        case.centers, case.values = (x.to(torch.bfloat16).float() for x in (case.centers, case.values))
        case.routes = ops.route(dispatch.ENGINES["reference"], case.route_call()).routes
        for windows in (False, True):
            call = case.tail_call(windows=windows)
            names = ClusterTailGrads._fields
            truth = with_gradients(ops.cluster_tail, call, names, "reference", True)
            same = with_gradients(ops.cluster_tail, call, names, "reference", False)
            ours = with_gradients(ops.cluster_tail, call, names, "triton", False)
            row = {x: (relative(ours[x], truth[x]), relative(same[x], truth[x])) for x in truth}
            title = f"check {name}{', windows' * windows}"
            store.put(title, commit, **row)
            print(f"{title}: " + ", ".join(f"{x} {a:.1e} ({b:.1e})" for x, (a, b) in row.items()), flush=True)


def compile_some(part: int, parts: int) -> None:
    """Every `parts`-th variant, once, on a small grid: Triton keeps the code on disk."""
    for width in sorted({shape.width for shape in SHAPES}):
        case = Case.of(Shape((64, 64), 2, width), CLUSTERS, KEYS, torch.bfloat16)
        calls = stages(case)
        for _kernel, stage, place, size in variants(width)[part::parts]:
            try:
                with Chosen(place, size):
                    calls[stage]()
                    torch.cuda.synchronize()
            except Exception as problem:
                print(f"{place} {size} {width}: {type(problem).__name__}", flush=True)


def compile_all() -> None:
    parts = max(1, (os.cpu_count() or 2) - 1)
    here = Path(__file__)
    jobs = [
        subprocess.Popen([sys.executable, here, "--compile", str(n), "--parts", str(parts)], cwd=here.parent.parent)
        for n in range(parts)
    ]
    for job in jobs:
        job.wait()


def sweep(store: Store, commit: str | None, end: float) -> None:
    for shape in SHAPES:
        case = Case.of(shape, CLUSTERS, KEYS, torch.bfloat16)
        calls = stages(case)
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        for stage in ("route", "start", "tail", "tail and windows", "tail backward"):
            row = {**graph_ms(calls[stage]), "kernels": kernel_ms(calls[stage])}
            store.put(f"{shape} {stage}", commit, **row)
            kernels = ", ".join(f"{kernel} {ms:.3f}" for kernel, ms in row["kernels"].items())
            print(f"{shape} {stage}: {row['ms']:.3f} ms; {kernels}", flush=True)
        for kernel, stage, place, size in variants(shape.width):
            if time.perf_counter() > end:
                print("out of time", flush=True)
                return
            try:
                with Chosen(place, size):
                    ms: Any = kernel_ms(calls[stage])[kernel]
            except Exception as problem:
                ms = f"{type(problem).__name__}: {str(problem)[:80]}"
            row = rows.setdefault((kernel, stage), {})
            row[str(size)] = ms
            store.put(f"{shape} {kernel}, {stage}", commit, **row)
        for (kernel, stage), row in rows.items():
            fastest = sorted((ms, size) for size, ms in row.items() if isinstance(ms, float))
            print(f"{shape} {kernel}, {stage}: " + ", ".join(f"{size} {ms:.3f}" for ms, size in fastest), flush=True)
        del case, calls
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=190)
    parser.add_argument("--commit")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", type=int, help="a part of the variants, alone")
    parser.add_argument("--parts", type=int, default=1)
    given = parser.parse_args()
    end = time.perf_counter() + given.seconds
    torch.manual_seed(0)
    if given.compile is not None:
        compile_some(given.compile, given.parts)
        return
    store = Store("tail_gpu", given.out)
    if given.device == "cuda":
        compile_all()
    check(store, given.commit, given.device)
    if given.device == "cuda":
        sweep(store, given.commit, end)


if __name__ == "__main__":
    main()
