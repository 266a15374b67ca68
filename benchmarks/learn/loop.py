"""One training loop for all tasks. A run that was interrupted goes on, and ends as if it had not been."""

from __future__ import annotations

import fcntl
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from store import Store
from torch import nn

from .captured import Captured, called, seeds_on_device
from .tasks import Task


@dataclass(frozen=True)
class Run:
    """What is trained: a task, an attention, how many training pictures (None: all), a seed."""

    task: str
    attention: str
    seed: int
    pictures: int | None = None

    @property
    def name(self) -> str:
        return f"{self.task}; {self.attention}; {self.pictures or 'all'}; {self.seed}"

    @property
    def file(self) -> str:
        return self.name.replace("; ", "_").replace(" ", "-").replace(",", "") + ".pt"


@dataclass
class State:
    """What a checkpoint holds."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    step: int
    curve: list[tuple[int, float]]
    sum: torch.Tensor  # of the losses since the last point of the curve

    def save(self, file: Path) -> None:
        parts = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "schedule")}
        parts |= {"step": self.step, "curve": self.curve, "sum": self.sum, "random": torch.get_rng_state()}
        if torch.cuda.is_available():
            parts["cuda"] = torch.cuda.get_rng_state()
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(parts, file.with_suffix(".part"))
        os.replace(file.with_suffix(".part"), file)

    def load(self, file: Path) -> None:
        parts = torch.load(file, map_location="cpu", weights_only=True)
        for name in ("model", "optimizer", "schedule"):
            getattr(self, name).load_state_dict(parts[name])
        self.step, self.curve = parts["step"], [(int(n), float(x)) for n, x in parts["curve"]]
        self.sum = parts["sum"].to(self.sum.device)
        torch.set_rng_state(parts["random"])
        if "cuda" in parts and torch.cuda.is_available():
            torch.cuda.set_rng_state(parts["cuda"])


POINT = 25  # steps for each point of a curve


def train(
    task: Task,
    run: Run,
    *,
    checkpoint: Path | None = None,
    every: float = 30.0,
    until: float | None = None,
    stop: int | None = None,
    weights: Path | None = None,
) -> tuple[nn.Module, dict[str, Any] | None]:
    """The model, and what is stored of it; None where it was stopped, at a step or at a time, with a checkpoint.

    Args:
        checkpoint: a file that is read where it is there, and written every so many seconds.
        until: `time.time()` at which to stop.
        stop: a step at which to stop.
        weights: a file for the trained parameters.
    """
    torch.manual_seed(run.seed)
    device = task.data.x.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = task.model(run.attention).to(device)
    call = called(task, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, task.rate, total_steps=task.steps, pct_start=0.1)
    state = State(model, optimizer, schedule, 0, [], torch.zeros((), device=device))
    if checkpoint is not None and checkpoint.exists():
        state.load(checkpoint)
    if device.type == "cuda":
        seeds_on_device(model)
        try:
            call = Captured(task, model, *batch_of(task, run.seed, 0))
        except Exception as error:
            print(f"{run.name}: no graph, plain calls: {error}", flush=True)
    times: list[float] = []
    saved = since = time.perf_counter()
    while state.step < task.steps:
        one_step(state, call, *batch_of(task, run.seed, state.step))
        if state.step % POINT == 0:
            mean = float(state.sum) / POINT  # the device is done
            state.curve.append((state.step, mean))
            state.sum.zero_()
            now = time.perf_counter()
            times, since = [*times, (now - since) / POINT], now
            if stop == state.step or (until is not None and time.time() > until):
                if checkpoint is not None:
                    state.save(checkpoint)
                return model, None
            if checkpoint is not None and now - saved > every:
                state.save(checkpoint)
                saved = since = time.perf_counter()
    model.eval()
    result: dict[str, Any] = {"test": task.tested_by(model), "curve": state.curve}
    result["train_loss"] = statistics.mean(x for _, x in state.curve[-4:]) if state.curve else None
    result["step_ms"] = 1e3 * statistics.median(times[1:]) if len(times) > 1 else None  # the first holds compilation
    result["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else None
    if weights is not None:
        weights.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), weights)
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    return model, result


def batch_of(task: Task, seed: int, step: int) -> tuple[torch.Tensor, Any]:
    """Inputs and targets of a step: the same for every attention."""
    generator = torch.Generator(task.data.x.device).manual_seed(1_000_003 * (seed + 1) + step)
    return task.drawn(generator, task.batch, False)


def one_step(state: State, call: Callable[[torch.Tensor, Any], torch.Tensor], x: torch.Tensor, target: Any) -> None:
    """Forward and backward by `call`, and a step of the optimizer."""
    loss = call(x, target)
    nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
    state.optimizer.step()
    state.schedule.step()
    state.step += 1
    state.sum += loss


def stored(folder: Path, name: str = "learn") -> dict[str, Any]:
    """All runs that are done, or their curves."""
    file = folder / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def store(folder: Path, run: Run, task: Task, row: dict[str, Any], measured: str | None, jobs: int) -> None:
    """Add a run; several processes may do so at once."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = {name: getattr(task, name) for name in ("width", "heads", "depth", "batch", "steps", "rate", "size")}
    with (folder / "learn.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        curve = [[step, round(x, 5)] for step, x in row["curve"]]
        Store("learn_curves", folder).put(run.name, measured, curve=curve)
        told = {name: x for name, x in row.items() if name != "curve"}
        Store("learn", folder).put(run.name, measured, **asdict(run), **shape, **told, jobs=jobs)
