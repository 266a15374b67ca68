"""The library's default on a CUDA device, beside the paper's settings and cuDNN attention, in one run.

    python benchmarks/gpu.py default build/gpu_data --seconds 150 --commit COMMIT    # into results/routed_gpu.json
    python benchmarks/gpu.py default-table

Whole `scram.attention`: "default" is what runs when nothing is said, "none" the same clusters without a search. Every
time stands next to the output error on sampled queries, for photo features at scales from diffuse to sharp. A row that
fails says why, and the next one runs. `--device cpu --shrink 16` tries the whole of it in a minute, on small grids.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_sets import Data
from store import Store
from store import commit as current_commit
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import scram
from scram.core import resolve

SCALE = 32.0  # of the timed calls; times do not depend on it
TRUTHS = (("stereo", 8.0), ("stereo", 32.0), ("projected", 8.0))  # sets and scales of the errors
FILM = (30, 48, 80)  # frames, rows and columns
SAMPLE = 1000  # queries that recall and errors are measured on, over all heads
BYTES_PER_MATCH, BYTES_PER_QUERY, BYTES_PER_KEY = 64, 32, 16  # limit of the memory beyond inputs and outputs
ENGINES = ("default", "none", "paper", "cudnn")


@dataclass(frozen=True)
class Shape:
    """`size` 0 is a film."""

    size: int
    width: int = 64
    heads: int = 1

    @property
    def name(self) -> str:
        size = "x".join(map(str, FILM)) if self.size == 0 else self.size
        return f"{size} E{self.width} h{self.heads}"


@dataclass(frozen=True)
class Row:
    """`part` is "whole" attention, "clusters" alone, or "memory"; `limit` is what is wanted, ms."""

    shape: Shape
    engine: str = "default"
    kappa: int = 1
    backward: bool = False
    part: str = "whole"
    limit: float | None = None

    @property
    def name(self) -> str:
        more = ("" if self.part == "whole" else f" {self.part}") + " fwd+bwd" * self.backward
        return f"{self.engine} {self.shape.name} k{self.kappa}{more}"


# With a search and without.
LIMITS: dict[Shape, tuple[float | None, float | None]] = {
    Shape(512): (1.5, 0.9),
    Shape(256, heads=8): (2.2, 1.2),
    Shape(256, 128, 24): (9.0, 6.0),
    Shape(0, 128, 24): (None, 12.0),
    Shape(1024): (5.0, None),
}
BACKWARD_LIMITS = {Shape(512): ("default", 3.6), Shape(256, 128, 24): ("none", 25.0)}
CLUSTER_LIMIT = 2.0  # of 24 heads


def matrix() -> Iterator[Row]:
    """Shape by shape, so that tensors and truths are made once; what is asked about most comes first."""
    for shape, (limit, none_limit) in LIMITS.items():
        yield Row(shape, limit=limit)
        yield Row(shape, "none", limit=none_limit)
        yield Row(shape, "cudnn")
        if shape in BACKWARD_LIMITS:
            engine, backward_limit = BACKWARD_LIMITS[shape]
            for other in ("default", "none"):
                yield Row(shape, other, backward=True, limit=backward_limit if other == engine else None)
            yield Row(shape, "cudnn", backward=True)
            yield Row(shape, part="clusters", limit=CLUSTER_LIMIT if shape.heads == 24 else None)
            yield Row(shape, part="memory")
        if shape == Shape(512):
            yield Row(shape, "paper")


class Bench:
    """The tensors, on the device, and the calls on them."""

    def __init__(self, data: Data, impl: str, shrink: int) -> None:
        self.data, self.device, self.impl, self.shrink = data, data.device, impl, shrink
        self.cuda = self.device == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32

    def tensors(self, shape: Shape, name: str = "stereo") -> tuple[Tensor, Tensor, Tensor]:
        if shape.size == 0:
            return self.film(shape, name)
        q, k, v, _ = self.data.tensors(name, shape.size // self.shrink, shape.width, shape.heads, self.dtype)
        return q, k, v

    def film(self, shape: Shape, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """A slow pan over a picture."""
        frames, rows, columns = FILM
        q, k, v, _ = self.data.tensors(name, 160 // self.shrink, shape.width, shape.heads, self.dtype)

        def pan(x: Tensor) -> Tensor:
            cuts = [x[:, :, t : t + rows // self.shrink, t : t + columns // self.shrink] for t in range(frames)]
            return torch.stack([cut for cut in cuts if cut.shape == cuts[0].shape], 2).contiguous()

        return pan(q), pan(k), pan(v)

    def settings(self, row: Row, seed: int | None = None) -> dict[str, Any]:
        if row.engine == "paper":
            return {"search": scram.Search.paper(row.kappa, seed=seed), "tail": None}
        search = resolve.SEARCHES[self.device]
        tail = resolve.CLUSTERS[self.device]
        if row.engine == "none":
            return {"search": None, "tail": replace(tail, seed=seed)}
        return {"search": replace(search, matches=row.kappa, seed=seed), "tail": replace(tail, seed=seed)}

    def whole(self, row: Row, leaves: list[Tensor]) -> Callable[[], Tensor]:
        q, k, v = leaves
        if row.engine == "cudnn":
            flat = [x.flatten(2, -2) for x in leaves]

            def dense() -> Tensor:
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if self.cuda else nullcontext():
                    return F.scaled_dot_product_attention(*flat, scale=SCALE)

            return dense
        settings = self.settings(row, 0)
        return lambda: scram.attention(q, k, v, **settings, scale=SCALE, impl=self.impl)

    def measure(self, row: Row) -> dict[str, Any]:
        q, k, v = self.tensors(row.shape)
        if row.part == "memory":
            return self.memory(row, q, k, v)
        if row.part != "whole":
            return self.clusters(row, q, k, v)
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)] if row.backward else [q, k, v]
        call = self.whole(row, leaves)

        def once() -> None:
            out = call()
            if row.backward:
                torch.autograd.grad(out, leaves, torch.ones_like(out))

        return self.timed(once)

    def clusters(self, row: Row, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
        """The stages one by one."""
        settings = self.settings(row, 0)
        same: dict[str, Any] = {"scale": SCALE, "impl": self.impl}
        book = scram.cluster(q, k, v, clusters=settings["tail"], **same)
        found = scram.search(q, k, search=settings["search"], codebook=book, **same)
        routes = scram.route(q, k, book, impl=self.impl)
        calls: dict[str, Callable[[], Any]] = {
            "cluster": lambda: scram.cluster(q, k, v, clusters=settings["tail"], **same),
            "route": lambda: scram.route(q, k, book, impl=self.impl),
            "route_and_search": lambda: scram.search(q, k, search=settings["search"], codebook=book, **same),
            "windows": lambda: scram.attend(q, k, v, found, **same),
            "tail": lambda: scram.attend(q, k, v, None, tail=book, routes=routes, **same),
            "windows_and_tail": lambda: scram.attend(q, k, v, found, tail=book, routes=routes, **same),
        }
        each = {name: self.timed(call) for name, call in calls.items()}
        keys = ("ms", "queued_ms", "graph_ms")
        parts = {f"{name}_{key}": times[key] for name, times in each.items() for key in keys if key in times}
        return {**{key: each["cluster"][key] for key in keys if key in each["cluster"]}, **parts}

    def memory(self, row: Row, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
        """Peak beyond inputs and outputs, of the forward pass."""
        call = self.whole(row, [q, k, v])
        limit = (BYTES_PER_MATCH * row.kappa + BYTES_PER_QUERY) * q[..., 0].numel() + BYTES_PER_KEY * k[..., 0].numel()
        limit += sum(x.numel() * x.element_size() for x in (k, v))
        call()
        if not self.cuda:
            return {"limit_bytes": limit}
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = call()
        peak = torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()
        return {
            "peak_bytes": peak,
            "limit_bytes": limit,
            "bytes_per_query_and_match": peak / q[..., 0].numel() / row.kappa,
        }

    def timed(self, call: Callable[[], Any]) -> dict[str, Any]:
        """Milliseconds: median of single calls, and of each of several calls that are queued one behind the other."""
        begun = time.perf_counter()
        call()
        self.wait()
        first = time.perf_counter() - begun
        times = self.clock(call, first)
        ms, number = statistics.median(times), 10 if statistics.median(times) < 50 else 1
        begun = time.perf_counter()
        for _ in range(number):
            call()
        self.wait()
        queued = 1000 * (time.perf_counter() - begun) / number
        spread = {"ms_low": times[len(times) // 10], "ms_high": times[-1 - len(times) // 10]}
        replayed = attempted(lambda: {"graph_ms": self.replayed(call)}, "no_graph") if self.cuda else {}
        return {"ms": ms, **spread, "queued_ms": queued, **replayed, "calls": len(times), "first_call_s": first}

    def replayed(self, call: Callable[[], Any]) -> float:
        """Milliseconds of a call in a CUDA graph: median."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        times = []
        for _ in range(20):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        return statistics.median(times)

    def clock(self, call: Callable[[], Any], first: float) -> list[float]:
        if self.cuda:
            from gpu import clock

            return clock(call, first)
        times = []
        while len(times) < 2 or (sum(times) < 100 and len(times) < 9):
            begun = time.perf_counter()
            call()
            times.append(1000 * (time.perf_counter() - begun))
        return sorted(times)

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def quality(self, row: Row) -> dict[str, Any]:
        """The output error on each of TRUTHS: the mean over heads, and the worst."""
        sample = max(64, SAMPLE // row.shape.heads)
        result: dict[str, Any] = {}
        for name, scale in TRUTHS:
            q, k, v = self.tensors(row.shape, name)
            attended = scram.attention(q, k, v, **self.settings(row, 0), scale=scale, impl=self.impl, return_lse=True)
            error = scram.measure.output_error(q, k, v, attended, scale=scale, num_queries=sample)
            result[f"error_{name}_{scale:g}"] = float(error.mean())
            result[f"worst_{name}_{scale:g}"] = float(error.max())
        return result


def attempted(call: Callable[[], dict[str, Any]], name: str) -> dict[str, Any]:
    """What the call returns, or why it failed: one row must not take the others with it."""
    try:
        return call()
    except Exception as error:
        return {name: f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"}


def run(data: Data, store: Store, seconds: float, only: str, commit: str | None, impl: str, shrink: int) -> None:
    """Measure every row, its time first: a run that is cut short has the times before the errors."""
    end, bench = time.monotonic() + seconds, Bench(data, impl, shrink)
    rows = [row for row in matrix() if only in row.name]
    results: dict[Row, dict[str, Any]] = {}
    for measured, step in ((True, bench.measure), (False, bench.quality)):
        for row in rows:
            if not measured and (row.engine == "cudnn" or row.backward or row.part != "whole"):
                continue
            begun = time.monotonic()
            late = {"not_measured" if measured else "no_errors": "the time was spent"}
            found = late if begun > end else attempted(partial(step, row), "failed" if measured else "no_errors")
            results[row] = results.get(row, {}) | found
            store.put(row.name, commit or current_commit(), **fields(row, shrink), **results[row])
            shown = (f"{key}={x:.4g}" if isinstance(x, float) else f"{key}={x}" for key, x in found.items())
            print(row.name, *shown, f"in {time.monotonic() - begun:.1f} s", flush=True)


def fields(row: Row, shrink: int) -> dict[str, Any]:
    small = {} if shrink == 1 else {"shrink": shrink}
    return {key: x for key, x in asdict(row).items() if key != "shape"} | asdict(row.shape) | small


def table(rows: dict[str, Any]) -> str:
    """Every row beside cuDNN's of its run, with what was wanted."""
    kinds = [f"error_{name}_{scale:g}" for name, scale in TRUTHS]
    head = (
        "row",
        "ms",
        "queued ms",
        "in a graph",
        "wanted ms",
        "times faster than cuDNN",
        *(k[6:] for k in kinds),
        "memory",
    )
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, row in rows.items():
        why = row.get("failed") or row.get("not_measured")
        if why:
            lines.append(f"| {name} | {why[:80]} |" + " |" * (len(head) - 2))
            continue
        dense = rows.get(dense_name(row), {})
        best = row.get("graph_ms") or row.get("queued_ms")
        ratio = f"{dense['ms'] / best:.1f}" if "ms" in dense and best and dense is not row else "-"
        numbers = ("ms", "queued_ms", "graph_ms", "limit")
        shown = (f"{row[key]:.3f}" if row.get(key) is not None else "-" for key in numbers)
        errors = (f"{row[key]:.3f}" if key in row else "-" for key in kinds)
        memory = "-"
        if "peak_bytes" in row:
            memory = f"{row['peak_bytes'] / 2**20:.0f} MiB of {row['limit_bytes'] / 2**20:.0f} wanted"
        lines.append(f"| {name} | {' | '.join(shown)} | {ratio} | {' | '.join(errors)} | {memory} |")
    return "\n".join(lines)


def dense_name(row: dict[str, Any]) -> str:
    """The row of cuDNN attention that a row is compared with."""
    shape = Shape(row["size"], row["width"], row["heads"])
    return replace(Row(shape, "cudnn"), backward=row["backward"]).name
