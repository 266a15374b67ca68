"""The library's default on a CUDA device, beside the paper's settings and cuDNN attention, in one run.

    python benchmarks/gpu.py default build/gpu_data --seconds 150 --commit COMMIT    # into results/gpu_default.json
    python benchmarks/gpu.py default-table

Whole `scram.attention(q, k, v, search=Search())`: search, windows, and clusters of keys for the rest. Every time stands
next to the output error on sampled queries, for photo features at scales from diffuse to sharp. A row that fails says
why, and the next one runs. `--device cpu --shrink 16` tries the whole of it in a minute, on small grids.
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

SCALE = 32.0  # of the timed calls; times do not depend on it
TRUTHS = (("stereo", 8.0), ("stereo", 32.0), ("projected", 1.0))  # sets and scales of the errors
SAMPLE = 1000  # queries that recall and errors are measured on, over all heads
MANY = 1.6  # times the limit of one match, for four
BYTES_PER_MATCH, BYTES_PER_KEY = 64, 8  # limit of the memory beyond inputs and outputs
ENGINES = ("default", "paper", "cudnn")


@dataclass(frozen=True)
class Shape:
    size: int
    width: int = 64
    heads: int = 1

    @property
    def name(self) -> str:
        return f"{self.size} E{self.width} h{self.heads}"


@dataclass(frozen=True)
class Row:
    """`part` is "whole" attention, "clusters" alone, cold or "warm", or its "memory"; `limit` is what is wanted, ms."""

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


LIMITS = {Shape(512): 2.2, Shape(1024): 7.5, Shape(256, heads=8): 3.8, Shape(256, 128, 24): 18.0}
BACKWARD_LIMIT = 5.0  # at 512
CLUSTER_LIMITS = {"clusters": 0.8, "warm": 0.6}  # at 512


def matrix() -> Iterator[Row]:
    """Shape by shape, so that tensors and truths are made once; what is asked about most comes first."""
    for shape, limit in LIMITS.items():
        yield Row(shape, limit=limit)
        yield Row(shape, "cudnn")
        yield Row(shape, kappa=4, limit=MANY * limit)
        yield Row(shape, "paper")
        if shape == Shape(512):
            yield from (Row(shape, part=part, limit=ms) for part, ms in CLUSTER_LIMITS.items())
            yield Row(shape, backward=True, limit=BACKWARD_LIMIT)
            yield Row(shape, "cudnn", backward=True)
            yield Row(shape, kappa=4, backward=True, limit=MANY * BACKWARD_LIMIT)
            yield Row(shape, "paper", backward=True)
        if shape == Shape(1024):
            yield Row(shape, kappa=4, part="memory")


class Bench:
    """The tensors, on the device, and the calls on them."""

    def __init__(self, data: Data, impl: str, shrink: int) -> None:
        self.data, self.device, self.impl, self.shrink = data, data.device, impl, shrink
        self.cuda = self.device == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32

    def tensors(self, shape: Shape, name: str = "stereo") -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, _ = self.data.tensors(name, shape.size // self.shrink, shape.width, shape.heads, self.dtype)
        return q, k, v

    def search(self, row: Row, seed: int | None = None) -> scram.Search:
        if row.engine == "paper":
            return scram.Search.paper(row.kappa, seed=seed)
        return scram.Search(matches=row.kappa, separation=2 if row.kappa > 1 else 0, seed=seed)

    def whole(self, row: Row, leaves: list[Tensor]) -> Callable[[], Tensor]:
        q, k, v = leaves
        if row.engine == "cudnn":
            flat = [x.flatten(2, 3) for x in leaves]

            def dense() -> Tensor:
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if self.cuda else nullcontext():
                    return F.scaled_dot_product_attention(*flat, scale=SCALE)

            return dense
        how, tail = self.search(row), None if row.engine == "paper" else "auto"
        return lambda: scram.attention(q, k, v, search=how, tail=tail, radius=1, scale=SCALE, impl=self.impl)

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
        """Clustering, and what it adds to the windows; "warm" starts from a codebook and makes one step."""
        found = scram.search(q, k, search=self.search(row, 0), impl=self.impl)
        how: dict[str, Any] = {"scale": SCALE, "impl": self.impl}
        codebook = scram.cluster(q, k, v, **how)
        warm = {"warm": codebook, "clusters": scram.Clusters(steps=1)} if row.part == "warm" else {}
        calls: dict[str, Callable[[], Any]] = {
            "cluster": lambda: scram.cluster(q, k, v, **how, **warm),
            "windows": lambda: scram.attend(q, k, v, found, **how),
            "windows_and_tail": lambda: scram.attend(q, k, v, found, tail=codebook, **how),
        }
        each = {name: self.timed(call) for name, call in calls.items()}
        parts = {f"{name}_{key}": times[key] for name, times in each.items() for key in ("ms", "queued_ms")}
        both = {
            key: parts[f"cluster_{key}"] + parts[f"windows_and_tail_{key}"] - parts[f"windows_{key}"]
            for key in ("ms", "queued_ms")
        }
        return {**both, **parts}

    def memory(self, row: Row, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
        """Peak beyond inputs and outputs, of the forward pass."""
        call = self.whole(row, [q, k, v])
        limit = BYTES_PER_MATCH * row.kappa * q[..., 0].numel() + BYTES_PER_KEY * k[..., 0].numel()
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
        return {"ms": ms, **spread, "queued_ms": queued, "calls": len(times), "first_call_s": first}

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
        """Recall@1 on the stereo pair, and the output error on each of TRUTHS: the mean over heads, and the worst."""
        sample = max(64, SAMPLE // row.shape.heads)
        result: dict[str, Any] = {}
        for name, scale in TRUTHS:
            q, k, v = self.tensors(row.shape, name)
            found = scram.search(q, k, search=self.search(row, 0), impl=self.impl)
            how: dict[str, Any] = {"scale": scale, "impl": self.impl}
            tail = None if row.engine == "paper" else scram.cluster(q, k, v, clusters=scram.Clusters(seed=0), **how)
            attended = scram.attend(q, k, v, found, radius=1, tail=tail, **how)
            error = scram.measure.output_error(q, k, v, attended, scale=scale, num_queries=sample)
            result[f"error_{name}_{scale:g}"] = float(error.mean())
            result[f"worst_{name}_{scale:g}"] = float(error.max())
            if "recall" not in result:
                best = scram.Matches(
                    found.index[..., :1].contiguous(), found.score[..., :1].contiguous(), found.key_grid
                )
                result["recall"] = float(scram.measure.recall(q, k, best, num_queries=sample).mean())
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
        "wanted ms",
        "times faster than cuDNN",
        "recall",
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
        ratio = f"{dense['ms'] / row['ms']:.1f}" if {"ms"} <= dense.keys() & row.keys() and dense is not row else "-"
        shown = (f"{row[key]:.3f}" if row.get(key) is not None else "-" for key in ("ms", "queued_ms", "limit"))
        errors = (f"{row[key]:.3f}" if key in row else "-" for key in ("recall", *kinds))
        memory = "-"
        if "peak_bytes" in row:
            memory = f"{row['peak_bytes'] / 2**20:.0f} MiB of {row['limit_bytes'] / 2**20:.0f} wanted"
        lines.append(f"| {name} | {' | '.join(shown)} | {ratio} | {' | '.join(errors)} | {memory} |")
    return "\n".join(lines)


def dense_name(row: dict[str, Any]) -> str:
    """The row of cuDNN attention that a row is compared with."""
    shape = Shape(row["size"], row["width"], row["heads"])
    return replace(Row(shape, "cudnn"), backward=row["backward"]).name
