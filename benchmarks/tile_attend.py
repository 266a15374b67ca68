"""Attention of whole tiles beside each query's own windows: `scram.attend(window="tile")` against `window="query"`.

    python benchmarks/tile_attend.py gpu build/gpu_data     # what `gpu.py prepare` has stored
    python benchmarks/tile_attend.py cpu
    python benchmarks/tile_attend.py table

Both attend the same matches of the default tile search, radius 1, in the same run. On a device the forward time is that
of a replayed CUDA graph, the backward time that of a call, `repeatable_ms` the same with repeatable bits, and
`step_ms` that of `scram.attention` forward and backward.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from store import Store
from tile import SAMPLE, SETS, SHARPNESS, call_ms, graph_ms, seeded
from torch import Tensor

import scram
from scram.spec.grid import grid_of

WINDOWS = ("tile", "query")


def measured(
    q: Tensor, k: Tensor, v: Tensor, found: scram.Matches, window: str, scale: float, impl: str
) -> dict[str, float]:
    """How near the output is to exact attention, and how much of it is captured."""
    attended = scram.attend(q, k, v, found, scale=scale, window=window, impl=impl)
    how: dict[str, Any] = {"scale": scale, "sample": max(100, SAMPLE // q.shape[1])}
    return {
        "output_error": float(scram.measure.output_error(q, k, v, attended, **how).mean()),
        "captured_mass": float(scram.measure.captured_mass(q, k, attended, **how).mean()),
    }


def backward_of(
    leaves: list[Tensor], found: scram.Matches, window: str, scale: float, impl: str
) -> Callable[[], tuple[Tensor, ...]]:
    """The gradient of one forward pass, again and again."""
    out = scram.attend(*leaves, found, scale=scale, window=window, impl=impl).out
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def gpu_row(data: Any, name: str, kappa: int, shape: dict[str, int]) -> dict[str, Any]:
    from scram.engines.gpu.attend.cells import cells_of
    from scram.engines.gpu.primitives import geometry

    how = {"size": 512, "width": 64, "heads": 1, **shape}
    q, k, v, _ = data.tensors(name, **how, dtype=torch.bfloat16)
    search = replace(seeded(scram.Search("tile"), "cuda"), matches=kappa)
    found = scram.search(q, k, search=search)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    geo = geometry(grid_of(q), grid_of(k))
    cells = cells_of(found.index, geo, (1, 1))
    row: dict[str, Any] = {"data": name, "kappa": kappa, "radius": 1, **how}
    row |= {"keys": float(cells.size * cells.count.float().mean()), "most_keys": int(cells.size * cells.count.max())}
    row["list_ms"] = graph_ms(lambda: cells_of(found.index, geo, (1, 1)))
    for window in WINDOWS:

        def forward(window: str = window) -> scram.Attended:
            return scram.attend(q, k, v, found, scale=SHARPNESS, window=window)

        def step(window: str = window) -> None:
            scram.attention(*leaves, search=search, tail=None, scale=SHARPNESS, window=window).backward(v)

        row[window] = measured(q, k, v, found, window, SHARPNESS, "triton")
        row[window] |= {"forward_ms": graph_ms(forward), "forward_ms_call": call_ms(forward)}
        row[window]["backward_ms"] = call_ms(backward_of(leaves, found, window, SHARPNESS, "triton"))
        row[window]["step_ms"] = call_ms(step)
        torch.use_deterministic_algorithms(True)
        row[window]["repeatable_ms"] = call_ms(backward_of(leaves, found, window, SHARPNESS, "triton"))
        torch.use_deterministic_algorithms(False)
    return row


def gpu(folder: Path, commit: str | None, out: Path) -> None:
    from gpu_sets import Data

    data, store = Data(folder), Store("tile_attend", out)
    rows: list[tuple[str, int, dict[str, int]]] = [(name, kappa, {}) for name in SETS for kappa in (1, 4)]
    rows += [("stereo", kappa, {"size": 256, "width": 128, "heads": 8}) for kappa in (1, 4)]
    for name, kappa, shape in rows:
        label = " ".join(["gpu", name, *(f"{key} {n}" for key, n in shape.items()), "kappa", str(kappa)])
        store.put(label, commit, **gpu_row(data, name, kappa, shape))
        print(label, store.data[label], flush=True)


def cpu(size: int) -> None:
    """The reference in tiles beside Numba's own windows, float32, in turn."""
    import sets

    store = Store("tile_attend")
    impls = {"tile": "reference", "query": "numba"}
    for name in SETS:
        q, k = getattr(sets, name)(size)
        found = scram.search(q, k, search=scram.Search(matches=4, seed=0))
        leaves = [x.clone().requires_grad_() for x in (q, k, k)]
        row: dict[str, Any] = {"data": name, "kappa": 4, "radius": 1, "size": size, "width": 64, "heads": 1}
        calls: dict[tuple[str, str], Callable[[], Any]] = {}
        for window, impl in impls.items():
            row[window] = {**measured(q, k, k, found, window, SHARPNESS, impl), "impl": impl}
            calls[window, "backward_ms"] = backward_of(leaves, found, window, SHARPNESS, impl)
            how: dict[str, Any] = {"scale": SHARPNESS, "window": window, "impl": impl}
            calls[window, "forward_ms"] = lambda how=how, at=(q, k, k, found): scram.attend(*at, **how)
        for _ in range(5):
            for (window, which), call in calls.items():
                begin = time.perf_counter()
                call()
                ms = 1e3 * (time.perf_counter() - begin)
                row[window][which] = min(ms, row[window].get(which, ms))
        store.put(f"cpu {name} kappa 4", **row)
        print(name, row, flush=True)


def table() -> str:
    columns = ("row", "keys of a tile", "error, tile and query", "forward ms", "backward ms", "repeatable", "step ms")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, row in Store("tile_attend").data.items():
        both = [
            ", ".join(f"{row[window][key]:.3f}" for window in WINDOWS if key in row[window])
            for key in ("output_error", "forward_ms", "backward_ms", "repeatable_ms", "step_ms")
        ]
        keys = f"{row['keys']:.0f}" if "keys" in row else ""
        lines.append(f"| {name} | {keys} | {' | '.join(both)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("gpu")
    one.add_argument("folder", type=Path)
    one.add_argument("--commit", help="where git is not there to ask")
    one.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    commands.add_parser("cpu").add_argument("--size", type=int, default=128)
    commands.add_parser("table")
    asked = parser.parse_args()
    if asked.command == "gpu":
        gpu(asked.folder, asked.commit, asked.out)
    elif asked.command == "cpu":
        cpu(asked.size)
    else:
        print(table())


if __name__ == "__main__":
    main()
