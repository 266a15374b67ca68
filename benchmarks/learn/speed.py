"""Time and memory of a training step, each attention alone on the machine, in turn."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from store import Store

from .attentions import NAMES
from .captured import Captured, called, seeds_on_device
from .loop import State, batch_of, one_step
from .plans import MORE
from .tasks import Task

MEASURED = ("dense", "tail", "windows", "local", "strided", "natten")
LARGER = {"detect": (64, 128, 256, 512), "video": (32, 64, 128), "classify": (32, 64, 128, 256)}


def speed(tasks: dict[str, Task], folder: Path, commit: str | None, steps: int, only: Sequence[str] | None) -> None:
    """Each task at several sizes, with every attention; too large for the memory is stored as such."""
    store = Store("learn_speed", folder)
    for base, task in _sizes(tasks):
        if only and base not in only:
            continue
        for name in (*MEASURED, *(more for known, more in MORE.items() if known.startswith(base))):
            assert name in NAMES
            try:
                row = _measured(task, name, steps)
            except (torch.cuda.OutOfMemoryError, ImportError) as error:
                row = {"failed": type(error).__name__}
                gc.collect()
            place = f"{base}, {task.size}, {name}"
            store.put(place, commit, task=base, size=task.size, attention=name, batch=task.batch, **row)
            print(
                place,
                {key: value if isinstance(value, str) else round(value, 1) for key, value in row.items()},
                flush=True,
            )
            if task.data.x.is_cuda:
                torch.cuda.empty_cache()


def _sizes(tasks: dict[str, Task]) -> list[tuple[str, Task]]:
    """With the batch of the task while tokens grow to those of its largest form, then smaller."""
    made = []
    for base, sizes in LARGER.items():
        task = next(x for name, x in tasks.items() if name.startswith(base))
        for size in sizes:
            batch = max(1, task.batch * task.size**2 // size**2)
            made.append((base, replace(task, size=size, batch=batch)))
    generated = [("generate", x) for name, x in tasks.items() if name.startswith("generate")]
    return made + [(base, replace(x, size=x.data.x.shape[1])) for base, x in generated]


def _measured(task: Task, name: str, steps: int) -> dict[str, Any]:
    """A step by plain calls: its time, that of the host alone, the memory; and with forward and backward captured."""
    device = task.data.x.device
    model = task.model(name).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    state = State(model, optimizer, schedule, 0, [], torch.zeros((), device=device))
    batch = batch_of(task, 0, 0)  # pictures are made before the clock runs
    plain = called(task, model)
    times, host, peak = timed(lambda: one_step(state, plain, *batch), steps, device)
    row = {"step_ms": times, "host_ms": host, "peak_mib": peak}
    if device.type == "cuda":
        seeds_on_device(model)
        model.zero_grad()
        graph = Captured(task, model, *batch)
        row["captured_ms"] = timed(lambda: one_step(state, graph, *batch), steps, device)[0]
    return row


def timed(call: Callable[[], None], steps: int, device: torch.device) -> tuple[float, float, float]:
    """Medians in milliseconds: until the device is done, until the host is; and the most memory in MiB."""
    times, host = [], []
    for n in range(2 + steps):
        if n == 2 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        call()
        host.append(time.perf_counter() - start)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        if n > 4 and sum(times[2:]) > 4:
            break
    peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else 0.0
    return 1e3 * statistics.median(times[2:]), 1e3 * statistics.median(host[2:]), peak
