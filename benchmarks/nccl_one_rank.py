"""What a mesh of one rank costs over the plain call: `scram.distributed.attention(mode="heads")` and DTensors.

    python benchmarks/nccl_one_rank.py                                        # a CUDA device, NCCL
    python benchmarks/nccl_one_rank.py --device cpu --backend gloo --size 64  # to try it

Calls alternate, so that all see the same machine; medians, and their ratios to the plain call, as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import scram
import scram.distributed
from scram.cli.provenance import made_with

MOST = 0.05  # of the plain call, that a mesh of one rank may cost


def calls(mesh: DeviceMesh, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Tensor]]:
    """The default call, in every way."""
    how = {"search": scram.Search()}  # a search, on a small grid too
    ways = {
        "plain": partial(scram.attention, q, k, v, **how),
        "heads": partial(scram.distributed.attention, q, k, v, mesh=mesh, mode="heads", **how),
    }
    for name, place in (("dtensor batch", Shard(0)), ("dtensor heads", Shard(1)), ("dtensor whole", Replicate())):
        own = [distribute_tensor(x.detach(), mesh, [place]).requires_grad_(x.requires_grad) for x in (q, k, v)]
        ways[name] = partial(scram.attention, *own, **how)
    return ways


def milliseconds(run: Callable[[], Tensor], backward: bool, device: torch.device) -> float:
    """Of one call, from the first launch to the last result."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    out = run()
    if backward:
        out.sum().backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def measured(mesh: DeviceMesh, asked: argparse.Namespace, backward: bool) -> dict[str, object]:
    device = torch.device(asked.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    make = torch.Generator().manual_seed(0)
    shape = (1, asked.heads, asked.size, asked.size, 64)
    q, k, v = (torch.randn(shape, generator=make).to(device, dtype).requires_grad_(backward) for _ in range(3))
    ways = calls(mesh, q, k, v)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(asked.warmup + asked.turns):
        names = list(ways)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:  # no way is always the first
            took = milliseconds(ways[name], backward, device)
            if turn >= asked.warmup:
                times[name].append(took)
    medians = {name: statistics.median(each) for name, each in times.items()}
    return {
        "ms": {name: round(median, 4) for name, median in medians.items()},
        "ratio": {name: round(median / medians["plain"], 4) for name, median in medians.items()},
        "within": all(median <= (1 + MOST) * medians["plain"] for median in medians.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--size", type=int, default=512, help="points along a side")
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=200, help="timed calls of each way")
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    asked = parser.parse_args()
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group(asked.backend, init_method=f"file://{file.name}.meet", rank=0, world_size=1)
        if asked.device == "cuda":
            torch.cuda.set_device(0)
        mesh = init_device_mesh(asked.device, (1,))
        rows = {name: measured(mesh, asked, name != "forward") for name in ("forward", "forward and backward")}
        dist.destroy_process_group()
    settings = {"size": asked.size, "heads": asked.heads, "turns": asked.turns, "backend": asked.backend}
    print(
        json.dumps(
            {
                **made_with(asked.device),
                **({"commit": asked.commit} if asked.commit else {}),
                **settings,
                "most": 1 + MOST,
                "rows": rows,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
