"""Forward and backward of one `GridAttention`: what the host takes, what the device takes, and which kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from store import Store
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiled

import scram
from scram.nn import GridAttention

from .captured import seeds_on_device
from .speed import timed

WIDTH, HEADS = 128, 4
LAYERS: dict[str, dict[str, Any]] = {
    "tail": {"search": scram.Search()},
    "windows": {"search": scram.Search(), "tail": None},
    "dense": {"search": None},
}


def profile(folder: Path, commit: str | None, device: str, sizes: list[int], batch: int) -> None:
    """Each attention at each size, in bfloat16."""
    store = Store("learn_profile", folder)
    for size in sizes:
        for name, settings in LAYERS.items():
            row = _layer(GridAttention(WIDTH, HEADS, **settings).to(device, torch.bfloat16), size, batch, device)
            place = f"{size}x{size}, {name}"
            store.put(place, commit, size=size, attention=name, batch=batch, heads=HEADS, width=WIDTH, **row)
            short = {key: round(value, 2) for key, value in row.items() if not isinstance(value, dict)}
            print(place, short, row.get("kernels", {}), flush=True)


def _layer(layer: GridAttention, size: int, batch: int, device: str) -> dict[str, Any]:
    x = torch.randn(batch, size, size, WIDTH, device=device, dtype=torch.bfloat16).requires_grad_()
    gradient = torch.randn_like(x)

    def forward() -> None:
        layer(x)

    def both() -> None:
        layer(x).backward(gradient)

    whole, host, peak = timed(both, 10, torch.device(device))
    row: dict[str, Any] = {"call_ms": whole, "host_ms": host, "peak_mib": peak}
    row["forward_ms"], row["forward_host_ms"], _ = timed(forward, 10, torch.device(device))
    if device == "cuda":
        seeds_on_device(layer)
        row["replay_ms"] = timed(_graph(both).replay, 10, torch.device(device))[0]
        with profiled(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            for _ in range(3):
                both()
            torch.cuda.synchronize()
        kernels = [one for one in found.key_averages() if one.device_type == torch.autograd.DeviceType.CUDA]
        row["launches"] = sum(one.count for one in kernels) / 3
        row["device_ms"] = sum(one.self_device_time_total for one in kernels) / 3e3
        longest = sorted(kernels, key=lambda one: -one.self_device_time_total)[:8]
        row["kernels"] = {one.key[:60]: round(one.self_device_time_total / 3e3, 3) for one in longest}
    return row


def _graph(call: Any) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph
