"""Clustering of keys on a CUDA device: whether it is right, and the time of the whole operator and of each kernel.

    python benchmarks/cluster_gpu.py build/cluster_gpu.json                        # checks, then times
    python benchmarks/cluster_gpu.py build/cluster_gpu.json --only times --clusters 256
    python benchmarks/cluster_gpu.py build/sweep.json --only sweep --shapes "256x256 x 24"

Checks: all outputs against the formulas of the specification for the labels that were returned, the k-means objective
against that of the reference, gradients against autograd of the formulas, bits of two calls. Times: medians of calls
one after the other, of replays of a CUDA graph, and of each kernel between two events while the host is far ahead.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from store import commit, machine
from torch import Tensor

from scram.core.calls import ClusterCall, Clustered
from scram.engines.gpu.cluster import forward
from scram.engines.gpu.engine import clear_caches, cluster, cluster_backward
from scram.engines.gpu.runtime import launch
from scram.spec import clustering
from scram.spec.grid import rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where nothing but the checks runs, in the interpreter
COUNTS = (256, 512, 1024)
AHEAD = 20_000_000  # clocks that the device waits while the host launches all kernels of a call
TARGETS = {("512x512", 256): 0.35, ("256x256 x 24", 256): 2.0}  # ms, in a CUDA graph
SWEPT = {
    "assign_kernel": [
        {"ASSIGN": (block, most, warps), "ASSIGN_WAVES": waves, "ASSIGN_AHEAD": ahead}
        for block, most, warps in ((64, 128, 4), (64, 64, 4), (128, 128, 8))
        for waves in (1, 2, 4)
        for ahead in (512, 0)
    ],
    "segments_kernel": [
        {"SEGMENTS": (block, wide, narrow, registers), "SEGMENT_PROGRAMS": programs}
        for block, wide, narrow in ((64, 8, 4), (32, 8, 4), (32, 4, 4), (64, 4, 4))
        for registers in (128, 168, 255)
        for programs in (1, 2, 4)
    ],
    "order_kernel": [{"SORTED_KEYS": keys} for keys in (512, 1024, 2048)],
}


class Shape(NamedTuple):
    """Keys, as many queries; `grid` points a head."""

    name: str
    grid: tuple[int, ...]
    heads: int
    width: int


SHAPES = [
    Shape("512x512", (512, 512), 1, 64),
    Shape("1024x1024", (1024, 1024), 1, 64),
    Shape("256x256 x 8", (256, 256), 8, 64),
    Shape("256x256 x 24", (256, 256), 24, 128),
    Shape("30x48x80 x 24", (30, 48, 80), 24, 128),
]


def field(shape: Shape, generator: torch.Generator) -> Tensor:
    """Features that vary slowly over the grid, with noise, a mean of their own and unit variance: [1, H, *grid, E]."""
    rank = len(shape.grid)
    coarse = [max(2, n // 12) for n in shape.grid]
    low = torch.randn((shape.heads, shape.width, *coarse), generator=generator, device=DEVICE)
    smooth = F.interpolate(low, size=shape.grid, mode="trilinear" if rank == 3 else "bilinear")
    noise = torch.randn(smooth.shape, generator=generator, device=DEVICE)
    mean = torch.randn((1, shape.width, *[1] * rank), generator=generator, device=DEVICE)
    return (smooth + 0.3 * noise + mean).movedim(1, -1).unsqueeze(0).to(torch.bfloat16).contiguous()


def call_of(shape: Shape, count: int, seed: int = 0) -> ClusterCall:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    q, k, v = (field(shape, generator) for _ in range(3))
    return ClusterCall(
        q=q,
        k=k,
        v=v,
        key_mask=None,
        warm_centers=None,
        warm_values=None,
        seed=torch.tensor(seed, device=DEVICE),
        rows=None,
        count=count,
        steps=1,
        scale=shape.width**-0.5,
    )


def row_of(call: ClusterCall, row: int) -> ClusterCall:
    """The call of one head, with the noise that it has among all."""
    heads = slice(row, row + 1)
    number = torch.tensor([[row]], device=DEVICE)
    return call._replace(q=call.q[:, heads], k=call.k[:, heads], v=call.v[:, heads], rows=number)


def apart(found: Tensor, wanted: Tensor) -> float:
    found = found.double()
    wanted = wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))


def objective(call: ClusterCall, made: Clustered, space: clustering.Space) -> float:
    """Squared distances of the keys of one head from the means of their labels."""
    own = made.label.flatten().long()
    k = rows(call.k)[0].float() - made.centers.flatten(0, 1)[0][own]
    v = rows(call.v)[0].float() - made.values.flatten(0, 1)[0][own]
    return float(((k @ space.metric * k).sum() + space.value_weight * v.square().sum()).double())


def checked(call: ClusterCall, row: int, made: Clustered) -> dict[str, float]:
    """How far one head of the result is from the formulas for its labels; the objective to the reference's."""
    one = row_of(call, row)
    ours = Clustered(*(x[:, row : row + 1] for x in made))
    k = rows(one.k).double().requires_grad_()
    v = rows(one.v).double().requires_grad_()
    label = ours.label.flatten(2)[0].long()
    centers, values, sizes = clustering.means(k, v, label, call.clusters)
    usable = torch.ones_like(label[0], dtype=torch.bool)
    start = clustering.Start.of(one, 0, rows(one.k)[0].float(), rows(one.v)[0].float(), usable)
    metric = start.space.metric.diagonal().double().unsqueeze(0)
    slope, variance, spreads = clustering.moments(k, v, label, centers, values, sizes, metric)
    generator = torch.Generator(DEVICE).manual_seed(7)
    drawn = [torch.randn(x.shape[1:], generator=generator, device=DEVICE).double() for x in ours[:3]]
    drawn[2] *= label.numel() ** 0.5  # so that both parts of a gradient count
    total = sum((x * g.reshape(x.shape)).sum() for x, g in zip((centers, values, slope), drawn, strict=True))
    wanted = torch.autograd.grad(total, (k, v))
    above = [g.float().unsqueeze(0) for g in drawn]
    grads = cluster_backward(one, ours.centers, ours.values, ours.sizes, ours.label, *above)
    reference = clustering.cluster(one)
    return {
        "labels off": float((label < 0).sum() + (label >= call.clusters).sum()),
        "sizes off": float((ours.sizes.flatten() != sizes.flatten()).sum()),
        "order off": float((ours.order != clustering.order_of(ours.label)).sum()),
        "centers": apart(ours.centers, centers.unsqueeze(0)),
        "values": apart(ours.values, values.unsqueeze(0)),
        "slope": apart(ours.slope, slope.unsqueeze(0)),
        "variance": apart(ours.variance, variance.unsqueeze(0)),
        "spreads": apart(ours.spreads, spreads.unsqueeze(0)),
        "dk": apart(grads.k.flatten(), wanted[0].flatten()),
        "dv": apart(grads.v.flatten(), wanted[1].flatten()),
        "objective": objective(one, ours, start.space) / objective(one, reference, start.space),
        "empty": float((ours.sizes == 0).sum()),
        "largest": float(ours.sizes.max()),
    }


MOST = {
    "labels off": 0,
    "sizes off": 0,
    "order off": 0,
    "centers": 1e-5,
    "values": 1e-5,
    "slope": 1e-2,
    "variance": 1e-4,
    "spreads": 1e-2,
    "dk": 1e-2,
    "dv": 1e-2,
    "objective": 1.03,
}


def check(shape: Shape, count: int) -> dict[str, Any]:
    call = call_of(shape, count)
    made = cluster(call)
    same = all(x.equal(y) for x, y in zip(made, cluster(call), strict=True))
    result: dict[str, Any] = {"same bits": same}
    for row in sorted({0, shape.heads - 1}):
        result[f"head {row}"] = checked(call, row, made)
    heads = [x for x in result.values() if isinstance(x, dict)]
    result["right"] = same and all(x[name] <= most for x in heads for name, most in MOST.items())
    return result


def median(call: Callable[[], Any], repeats: int) -> float:
    """Milliseconds."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def captured(call: Callable[[], Any]) -> Callable[[], None]:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@contextmanager
def watched(found: list[tuple[str, Any, Any]]) -> Iterator[None]:
    """Events around each launch of a kernel."""
    plain = launch.Kernel.__call__

    def timed(self: launch.Kernel, *arguments: Any) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        plain(self, *arguments)
        end.record()
        found.append((self.kernel.fn.__name__, begin, end))

    launch.Kernel.__call__ = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        launch.Kernel.__call__ = plain  # type: ignore[method-assign]


def kernels(call: Callable[[], Any], repeats: int = 7) -> list[tuple[str, float]]:
    """Names and microseconds of the kernels of a call, in their order."""
    runs = []
    for _ in range(repeats):
        found: list[tuple[str, Any, Any]] = []
        torch.cuda._sleep(AHEAD)
        with watched(found):
            call()
        torch.cuda.synchronize()
        runs.append([(name, 1000 * begin.elapsed_time(end)) for name, begin, end in found])
    return [(each[0][0], statistics.median(us for _, us in each)) for each in zip(*runs, strict=True)]


def code() -> dict[str, Any]:
    """Registers, spills, shared memory and loads of 2 and of 16 bytes of every kernel that was compiled."""
    result = {}
    for number, one in enumerate(launch._compiled.values()):
        ptx = one.asm["ptx"]
        result[f"{one.name} {number}"] = {
            "registers": one.n_regs,
            "spills": one.n_spills,
            "shared": one.metadata.shared,
            "warps": one.metadata.num_warps,
            "loads of 2 bytes": len(re.findall(r"ld\.global\S*\.[bu]16 ", ptx)),
            "loads of 16 bytes": len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)),
        }
    return result


def backward_of(call: ClusterCall, made: Clustered) -> Callable[[], Any]:
    above = [torch.randn_like(x) for x in made[:3]]
    return lambda: cluster_backward(call, made.centers, made.values, made.sizes, made.label, *above)


def times(shape: Shape, count: int, repeats: int) -> dict[str, Any]:
    call = call_of(shape, count)
    began = time.perf_counter()
    made = cluster(call)
    torch.cuda.synchronize()
    compiled = time.perf_counter() - began
    backward = backward_of(call, made)
    backward()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    cluster(call)
    torch.cuda.synchronize()
    beyond = torch.cuda.max_memory_allocated() - held
    result = {
        "first call, s": compiled,
        "eager, ms": median(lambda: cluster(call), repeats),
        "graph, ms": median(captured(lambda: cluster(call)), repeats),
        "backward eager, ms": median(backward, repeats),
        "backward graph, ms": median(captured(backward), repeats),
        "MiB with outputs": beyond / 2**20,
        "kernels, us": kernels(lambda: cluster(call)),
        "backward kernels, us": kernels(backward),
    }
    most = TARGETS.get((shape.name, count))
    return result if most is None else {**result, "target, ms": most, "met": result["graph, ms"] <= most}


def sweep(shape: Shape, count: int, names: list[str]) -> dict[str, Any]:
    """Microseconds of a kernel, the last of a call, and of the whole call in a graph, for other block sizes."""
    call = call_of(shape, count)
    result: dict[str, Any] = {}
    for name, choices in SWEPT.items():
        if names and name not in names:
            continue
        for choice in choices:
            before = {key: getattr(forward, key) for key in choice}
            for key, value in choice.items():
                setattr(forward, key, value)
            clear_caches()
            try:
                found = [us for kernel, us in kernels(lambda: cluster(call), 5) if kernel == name]
                result[f"{name} {choice}"] = {"us": found, "graph, ms": median(captured(lambda: cluster(call)), 9)}
                print(f"{shape.name} {count} {name} {choice}: {[round(x) for x in found]} us", flush=True)
            except Exception as problem:  # too large for the device
                result[f"{name} {choice}"] = {"failed": repr(problem)[:200]}
                print(f"{shape.name} {count} {name} {choice}: {repr(problem)[:200]}", flush=True)
            for key, value in before.items():
                setattr(forward, key, value)
    clear_caches()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--only", choices=["checks", "times", "sweep"])
    parser.add_argument("--shapes", nargs="*", default=[], help="names; all of them by default")
    parser.add_argument("--clusters", nargs="*", type=int, default=COUNTS)
    parser.add_argument("--kernels", nargs="*", default=[], help="of the sweep")
    parser.add_argument("--repeats", type=int, default=30)
    given = parser.parse_args()
    shapes = [shape for shape in SHAPES if not given.shapes or shape.name in given.shapes]
    data: dict[str, Any] = {"commit": commit(), "machine": machine(), "checks": {}, "times": {}, "sweep": {}}

    def put(kind: str, name: str, row: dict[str, Any]) -> None:
        data[kind][name] = row
        data["code"] = code()
        given.path.parent.mkdir(parents=True, exist_ok=True)
        given.path.write_text(json.dumps(data, indent=1) + "\n")

    with torch.no_grad():
        for shape, count in product(shapes, given.clusters):
            name = f"{shape.name}, {count}"
            if given.only in (None, "checks"):
                with torch.enable_grad():
                    row = check(shape, count)
                put("checks", name, row)
                print(f"{name}: right {row['right']}, {row}", flush=True)
            if given.only in (None, "times"):
                row = times(shape, count, given.repeats)
                put("times", name, row)
                print(f"{name}: {json.dumps(row)}", flush=True)
            if given.only == "sweep":
                put("sweep", name, sweep(shape, count, given.kernels))


if __name__ == "__main__":
    main()
