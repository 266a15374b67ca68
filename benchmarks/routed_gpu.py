"""Routed clusters on a CUDA device: errors against the reference, and the time of every stage and kernel.

    python benchmarks/routed_gpu.py check                 # forward and all gradients, small and medium, f32 and bf16
    python benchmarks/routed_gpu.py time --seconds 400    # stages and kernels at the shapes of SHAPES, beside cuDNN
    python benchmarks/routed_gpu.py tune --seconds 400    # block sizes, kernel by kernel
    python benchmarks/routed_gpu.py table

Tensors are smooth noise, clusters a short k-means in plain torch, so that nothing but the stages under test runs in the
engine. Times of stages are replays of a CUDA graph; those of kernels are events around every launch of one call, behind
a kernel that keeps the device busy meanwhile. Results: results/routed_gpu.json, or `--out FOLDER`.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from store import RESULTS, Store
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from scram.core import ops
from scram.core.calls import AttendCall, ClusterTailCall, ClusterTailGrads, RouteCall, RoutedStartCall
from scram.engines import dispatch
from scram.engines.gpu.runtime import launch
from scram.spec.clustering import means, moments, order_of
from scram.spec.grid import rows

BUSY = 40_000_000  # cycles that the device waits before timed launches: the host is ahead then
REPEATS = 5
ROUNDS = 20  # replays of a graph that are timed together


@dataclass(frozen=True)
class Shape:
    grid: tuple[int, ...]
    heads: int = 1
    width: int = 64
    settings: tuple[tuple[int, int], ...] = ((256, 512), (512, 512), (512, 1024), (1024, 1024))  # clusters, keys

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.grid))} h{self.heads} E{self.width}"


SHAPES = [
    Shape((256, 256), 24, 128),
    Shape((512, 512)),
    Shape((256, 256), 8),
    Shape((30, 48, 80), 24, 128, ((512, 512), (1024, 1024))),
]


# Tensors and calls.


def smooth(shape: tuple[int, ...], width: int, seed: int, device: str) -> Tensor:
    """[1, heads, *grid, width]: noise of two wavelengths and of none, of about unit variance."""
    heads, *grid = shape
    generator = torch.Generator(device).manual_seed(seed)

    def noise(extents: list[int]) -> Tensor:
        return torch.randn(heads, width, *extents, generator=generator, device=device)

    total = 0.3 * noise(grid)
    for step in (4, 16):
        coarse = noise([-(-extent // step) + 1 for extent in grid])
        for axis, extent in enumerate(grid):
            at = torch.arange(extent, device=device) / step
            low = at.long()
            part = (at - low).reshape(-1, *[1] * (len(grid) - axis - 1))
            first, second = (coarse.index_select(2 + axis, low + n) for n in (0, 1))
            coarse = first * (1 - part) + second * part
        total += coarse
    return total.movedim(1, -1).unsqueeze(0)


def labels(k: Tensor, count: int, steps: int = 2) -> Tensor:
    """A short k-means of every row [M, E]: int64 [R, M]."""
    made = []
    for row in k:
        x = row.float()
        center = x[torch.randperm(len(x), device=x.device)[:count]]
        for step in range(steps + 1):
            form = -0.5 * center.square().sum(1)
            near = torch.cat([(part @ center.T + form).argmax(1) for part in x.split(1 << 15)])
            if step < steps:
                total = torch.zeros_like(center).index_add_(0, near, x)
                number = torch.bincount(near, minlength=count).unsqueeze(1)
                center = torch.where(number > 0, total / number.clamp(min=1), center)
        made.append(near)
    return torch.stack(made)


@dataclass
class Case:
    """The tensors of a call of every operator."""

    q: Tensor
    k: Tensor
    v: Tensor
    label: Tensor
    centers: Tensor
    values: Tensor
    slope: Tensor
    sizes: Tensor
    variance: Tensor
    spreads: Tensor
    order: Tensor
    keys: int
    routes: Tensor | None = None

    @classmethod
    def of(cls, shape: Shape, clusters: int, keys: int, dtype: torch.dtype, device: str = "cuda") -> Case:
        given = (smooth((shape.heads, *shape.grid), shape.width, seed, device).to(dtype) for seed in range(3))
        q, k, v = (x.contiguous() for x in given)
        parts: dict[str, list[Tensor]] = {}
        label = labels(rows(k)[:], clusters)
        for row in range(len(label)):  # one at a time: the sums are float32
            one = slice(row, row + 1)
            k_row, v_row = rows(k)[one].float(), rows(v)[one].float()
            centers, values, sizes = means(k_row, v_row, label[one], clusters)
            ones = torch.ones(1, shape.width, device=device)
            slope, variance, spreads = moments(k_row, v_row, label[one], centers, values, sizes, ones)
            made = {"centers": centers, "values": values, "slope": slope, "sizes": sizes.int()}
            for name, x in {**made, "variance": variance, "spreads": spreads}.items():
                parts.setdefault(name, []).append(x)
        fields = {name: torch.cat(x).unsqueeze(0).contiguous() for name, x in parts.items()}
        int_label = label.int().reshape(k.shape[:-1])
        return cls(q, k, v, int_label, **fields, order=order_of(int_label), keys=keys)

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1]) ** -0.5

    def route_call(self) -> RouteCall:
        return RouteCall(self.q, self.centers, self.sizes, self.variance, self.spreads, self.keys, self.scale)

    def start_call(self) -> RoutedStartCall:
        assert self.routes is not None
        return RoutedStartCall(self.q, self.k, self.order, self.sizes, self.routes, self.keys)

    def tail_call(self, windows: bool = False, **changed: Any) -> ClusterTailCall:
        near: dict[str, Any] = {"index": None, "near_out": None, "near_lse": None}
        if windows:
            generator = torch.Generator(self.q.device).manual_seed(7)
            shape = self.q.shape[:-1]
            drawn = {"generator": generator, "device": self.q.device}
            near = {
                "index": torch.randint(self.label[0, 0].numel(), (*shape, 2), dtype=torch.int32, **drawn),
                "near_out": torch.randn(*shape, self.v.shape[-1], **drawn).to(self.v.dtype),
                "near_lse": torch.randn(shape, **drawn),
            }
        call = ClusterTailCall(
            q=self.q,
            k=self.k,
            v=self.v,
            label=self.label,
            order=self.order,
            centers=self.centers,
            values=self.values,
            slope=self.slope,
            sizes=self.sizes,
            variance=self.variance,
            spreads=self.spreads,
            routes=self.routes,
            dropout_seed=None,
            rows=None,
            radius=(1,) * (self.q.ndim - 3),
            scale=self.scale,
            dropout_p=0.0,
            extras=0,
            keys=self.keys,
            **near,
        )
        return call._replace(**changed)

    def attend_call(self) -> AttendCall:
        assert self.routes is not None
        index = self.tail_call(windows=True).index
        assert index is not None
        nothing = {"key_mask": None, "k_extra": None, "v_extra": None, "dropout_seed": None, "rows": None}
        return AttendCall(
            q=self.q,
            k=self.k,
            v=self.v,
            index=index,
            label=self.label,
            routes=self.routes,
            **nothing,
            radius=(1,) * (self.q.ndim - 3),
            causal=False,
            scale=self.scale,
            weight="softmax",
            dropout_p=0.0,
        )


# Errors.


def relative(x: Tensor, truth: Tensor) -> float:
    """|x - truth| / |truth|, in float64; inf where not the same numbers are finite."""
    if not bool((x.isfinite() == truth.isfinite()).all()):
        return math.inf
    x, truth = (torch.where(truth.isfinite(), y.double(), 0) for y in (x, truth))
    return float((x - truth).norm() / truth.norm().clamp(min=1e-30))


def with_gradients(operator: Any, call: Any, names: tuple[str, ...], impl: str, wide: bool) -> dict[str, Tensor]:
    """out, lse and all gradients of a call; `wide`: of the same numbers in float64."""

    def as_wide(x: Any) -> Any:
        return x.double() if wide and isinstance(x, Tensor) and x.is_floating_point() else x

    call = call._replace(**{name: as_wide(x) for name, x in call._asdict().items()})
    leaves = {name: x.detach().requires_grad_() for name in names if (x := getattr(call, name)) is not None}
    made = operator(dispatch.ENGINES[impl], call._replace(**leaves))
    generator = torch.Generator(call.q.device).manual_seed(9)
    drawn = [torch.randn(x.shape, generator=generator, device=x.device) for x in (made.out, made.lse)]
    lse = torch.where(made.lse.isfinite(), made.lse.double(), 0)  # without keys there is none
    total = (made.out.double() * drawn[0]).sum() + (lse * drawn[1]).sum()
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {"out": made.out.detach(), "lse": made.lse.detach(), **dict(zip(leaves, grads, strict=True))}


def check(store: Store, commit: str | None, device: str, only: str) -> None:
    """Errors of the engine, and of the reference in the same dtype, both against the reference in float64."""
    cases = {
        "small": (Shape((20, 21), 2, 32), 40, 60),
        "rank 3": (Shape((5, 9, 6), 2, 24), 20, 40),
        "medium": (Shape((64, 64), 2, 64), 128, 256),
        "wide": (Shape((32, 40), 1, 128), 100, 200),
    }
    for name, (shape, clusters, keys) in cases.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if only not in f"{name} {dtype}":
                continue
            case = Case.of(shape, clusters, keys, dtype, device)
            row: dict[str, Any] = {}
            engine = ops.route(dispatch.ENGINES["triton"], case.route_call())
            plain = ops.route(dispatch.ENGINES["reference"], case.route_call())
            row["same routes"] = float((engine.routes == plain.routes).float().mean())
            row["fits"] = bool((engine.number <= keys).all())
            case.routes = plain.routes
            found, best = (ops.routed_start(dispatch.ENGINES[x], case.start_call()) for x in ("triton", "reference"))
            row["same start"] = float((found.index == best.index).float().mean())
            for part, operator, call, names in (
                ("tail", ops.cluster_tail, case.tail_call(), ClusterTailGrads._fields),
                ("tail and windows", ops.cluster_tail, case.tail_call(windows=True), ClusterTailGrads._fields),
                ("windows", ops.attend, case.attend_call(), ("q", "k", "v")),
            ):
                truth = with_gradients(operator, call, names, "reference", True)
                same = with_gradients(operator, call, names, "reference", False)
                ours = with_gradients(operator, call, names, "triton", False)
                again = with_gradients(operator, call, names, "triton", False)
                row[part] = {x: (relative(ours[x], truth[x]), relative(same[x], truth[x])) for x in truth}
                row[f"{part}, repeats"] = all(bool((ours[x] == again[x]).all()) for x in ours)
            kind = str(dtype).removeprefix("torch.")
            store.put(f"check {name} {kind}", commit, **row)
            print(f"{name} {kind}: routes {row['same routes']:.3f}, start {row['same start']:.3f}, fits {row['fits']}")
            for part in ("tail", "tail and windows", "windows"):
                errors = ", ".join(f"{x} {a:.1e} ({b:.1e})" for x, (a, b) in row[part].items())
                print(f"    {part}: {errors}; repeats: {row[f'{part}, repeats']}", flush=True)


# Times.


def graph_ms(call: Callable[[], Any]) -> dict[str, float]:
    """Median of replays of a graph of the call, ms; of calls in a row where it cannot be captured."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    replay: Callable[[], Any] = call
    captured = 1.0
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        replay = graph.replay
    except RuntimeError:
        captured = 0.0
        torch.cuda.synchronize()
    for _ in range(2):
        replay()
    times = []
    for _ in range(REPEATS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(ROUNDS):
            replay()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) / ROUNDS)
    return {"ms": statistics.median(times), "least_ms": min(times), "most_ms": max(times), "graph": captured}


@contextmanager
def timed_kernels() -> Iterator[list[tuple[str, Any, Any]]]:
    """The kernels that the engine launches, with events before and behind."""
    seen: list[tuple[str, Any, Any]] = []
    plain = launch.Kernel.__call__

    def timed(self: Any, *arguments: Any) -> None:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        plain(self, *arguments)
        last.record()
        seen.append((self.kernel.fn.__name__, first, last))

    launch.Kernel.__call__ = timed  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        launch.Kernel.__call__ = plain  # type: ignore[method-assign]


def kernel_ms(call: Callable[[], Any]) -> dict[str, float]:
    """Time of each kernel of a call, ms: the median of some calls, summed over launches of the same name."""
    for _ in range(2):
        call()
    totals: dict[str, list[float]] = {}
    for _ in range(REPEATS):
        with timed_kernels() as seen:
            torch.cuda.synchronize()
            torch.cuda._sleep(BUSY)
            call()
            torch.cuda.synchronize()
        one: dict[str, float] = {}
        for name, first, last in seen:
            one[name] = one.get(name, 0.0) + first.elapsed_time(last)
        for name, ms in one.items():
            totals.setdefault(name, []).append(ms)
    return {name: statistics.median(times) for name, times in totals.items()}


def peak_bytes(call: Callable[[], Any]) -> int:
    """Beyond what is held before; results included."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del kept
    return peak


def stages(case: Case) -> dict[str, Callable[[], Any]]:
    """The calls to time; routes are those of the engine."""
    engine = dispatch.engine("triton")
    case.routes = engine.route(case.route_call()).routes
    tail = case.tail_call()
    windows = case.tail_call(windows=True)
    out, lse = engine.cluster_tail(tail)
    return {
        "route": lambda: engine.route(case.route_call()),
        "start": lambda: engine.routed_start(case.start_call()),
        "tail": lambda: engine.cluster_tail(tail),
        "tail, no keys": lambda: engine.cluster_tail(tail._replace(routes=None, k=None, v=None, order=None, keys=0)),
        "tail, no slope": lambda: engine.cluster_tail(tail._replace(slope=None)),
        "tail, no slope, no spreads": lambda: engine.cluster_tail(tail._replace(slope=None, spreads=None)),
        "tail and windows": lambda: engine.cluster_tail(windows),
        "tail backward": lambda: engine.cluster_tail_backward(tail, out, lse, out, lse),
        "attend": lambda: engine.attend(case.attend_call()),
    }


def dense(case: Case) -> Callable[[], Any]:
    flat = [x.flatten(2, -2) for x in (case.q, case.k, case.v)]

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*flat, scale=case.scale)

    return call


def time_all(store: Store, commit: str | None, seconds: float, only: str) -> None:
    end = time.perf_counter() + seconds
    for shape in SHAPES:
        if only not in str(shape):
            continue
        for n, (clusters, keys) in enumerate(shape.settings):
            if time.perf_counter() > end:
                print("out of time")
                return
            name = f"{shape}, {clusters} clusters, {keys} keys"
            try:
                case = Case.of(shape, clusters, keys, torch.bfloat16)
                if n == 0:
                    call = dense(case)
                    store.put(f"cudnn {shape}", commit, **graph_ms(call), peak=peak_bytes(call))
                    print(f"cudnn {shape}: {store.data[f'cudnn {shape}']['ms']:.2f} ms", flush=True)
                measured: dict[str, Any] = {}
                for stage, call in stages(case).items():
                    measured[stage] = {**graph_ms(call), "peak": peak_bytes(call), "kernels": kernel_ms(call)}
                number = dispatch.engine("triton").route(case.route_call()).number.float()
                measured["keys of a tile"] = {"mean": float(number.mean()), "most": float(number.max())}
                store.put(name, commit, **measured)
                report(name, measured)
            except Exception:
                store.put(f"failed: {name}", commit, trace=traceback.format_exc())
                traceback.print_exc()
            gc.collect()
            torch.cuda.empty_cache()


def report(name: str, measured: dict[str, Any]) -> None:
    number = measured["keys of a tile"]
    print(f"{name} (of a tile {number['mean']:.0f}, most {number['most']:.0f})")
    for stage, row in measured.items():
        if "ms" in row:
            kernels = ", ".join(f"{kernel} {ms:.3f}" for kernel, ms in row["kernels"].items())
            print(f"    {stage:26s} {row['ms']:8.3f} ms  {row['peak'] / 2**20:8.0f} MiB  {kernels}", flush=True)


# Block sizes.


def candidates() -> list[tuple[str, str, str, list[Any]]]:
    """Kernel, the stage that launches it, where its block size or a number of programs stands, and what to try."""
    plain = [
        (64, 4, 2),
        (64, 4, 3),
        (64, 4, 4),
        (32, 4, 2),
        (32, 4, 3),
        (32, 4, 4),
        (128, 4, 2),
        (64, 8, 2),
        (128, 8, 2),
    ]
    limited = [(32, 4, 2, 168), (32, 4, 3, 168), (64, 4, 2, 168), (64, 4, 2, 200), (32, 4, 3, 128)]
    back = [
        (64, 4, 1),
        (64, 4, 2),
        (64, 4, 3),
        (32, 4, 2),
        (32, 4, 3),
        (64, 8, 1),
        (64, 8, 2),
        (32, 8, 2),
        (64, 4, 2, 168),
    ]
    collect = [(64, 4, 1), (64, 4, 2), (64, 4, 3), (64, 8, 1), (64, 8, 2), (128, 8, 1), (128, 8, 2), (32, 4, 2)]
    tail = "scram.engines.gpu.cluster_tail"
    gradients = "tail backward"
    return [
        ("cluster_tail_kernel", "tail", f"{tail}.forward.CLUSTER_TAIL", plain + limited),
        ("importance_kernel", "route", "scram.engines.gpu.route.route.ROUTE", plain),
        ("tail_queries_kernel", gradients, f"{tail}.backward.CLUSTER_BACKWARD", back),
        ("tail_clusters_kernel", gradients, f"{tail}.backward.CLUSTER_COLLECT", collect),
        ("tail_clusters_kernel", gradients, f"{tail}.backward.PROGRAMS", [264, 528, 1056, 2112, 4224]),
        ("tail_keys_kernel", gradients, f"{tail}.keys_backward.KEYS_COLLECT", collect[:5]),
        ("tail_keys_kernel", gradients, f"{tail}.keys_backward.FURTHER", [512, 1024, 2048, 4096]),
        ("tail_slope_kernel", gradients, f"{tail}.backward.SLOPE", collect[:7]),
        # Last: Triton 3.6 may abort the process where it is to load ahead here.
        ("routed_start_kernel", "start", "scram.engines.gpu.route.start.ROUTED_START", [(64, 4, 1), (128, 4, 1)]),
    ]


def tune(store: Store, commit: str | None, seconds: float, only: str) -> None:
    end = time.perf_counter() + seconds
    for place in ("cluster_tail.table", "route.route", "route.start"):  # larger blocks are tried as they are
        module = importlib.import_module(f"scram.engines.gpu.{place}")
        module.BLOCK_BYTES, module.TABLE_BLOCK = 1 << 20, 128
    for shape in SHAPES[:3]:
        if only not in str(shape):
            continue
        case = Case.of(shape, 512, 512, torch.bfloat16)
        calls = stages(case)
        for kernel, stage, place, sizes in candidates():
            path, name = place.rsplit(".", 1)
            module = importlib.import_module(path)
            kept = getattr(module, name)
            row: dict[str, Any] = {}
            for size in sizes:
                if time.perf_counter() > end:
                    break
                setattr(module, name, size)
                launch.clear_caches()
                try:
                    row[str(size)] = kernel_ms(calls[stage])[kernel]
                except Exception as problem:
                    row[str(size)] = f"{type(problem).__name__}: {str(problem)[:80]}"
            setattr(module, name, kept)
            launch.clear_caches()
            store.put(f"tune {kernel} {name} {shape}", commit, stands=str(kept), **row)
            fastest = sorted((ms, size) for size, ms in row.items() if isinstance(ms, float))
            print(
                f"{shape} {kernel} (now {kept}): " + ", ".join(f"{size} {ms:.3f}" for ms, size in fastest), flush=True
            )
        del case, calls
        gc.collect()
        torch.cuda.empty_cache()


def table(store: Store) -> None:
    for name, row in store.data.items():
        if "keys of a tile" in row:
            report(name, row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["check", "time", "tune", "table"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--only", default="", help="what has this in its name, such as h24 or bfloat16")
    parser.add_argument("--commit")
    parser.add_argument("--device", default="cuda", help="of `check`: cpu with TRITON_INTERPRET=1")
    given = parser.parse_args()
    store = Store("routed_gpu", given.out)
    torch.manual_seed(0)
    if given.part == "check":
        check(store, given.commit, given.device, given.only)
    elif given.part == "time":
        time_all(store, given.commit, given.seconds, given.only)
    elif given.part == "tune":
        tune(store, given.commit, given.seconds, given.only)
    else:
        table(store)


if __name__ == "__main__":
    main()
