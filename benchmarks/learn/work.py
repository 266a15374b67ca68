"""Several processes that make runs, each as many as time allows."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from .loop import Run, store, stored, train
from .plans import runs
from .tasks import Generate, Task

DECODED = 16  # pictures that are decoded position by position


def one_run(
    run: Run,
    tasks: dict[str, Task],
    results: Path,
    checkpoints: Path,
    commit: str | None,
    jobs: int,
    until: float | None,
) -> None:
    """Train, store, tell; where time is up, leave a checkpoint."""
    task = tasks[run.task]
    task = replace(task, data=task.data.first(run.pictures))
    start = time.perf_counter()
    weights = checkpoints / "weights" / run.file if run.task.startswith("generate") else None
    model, row = train(task, run, checkpoint=checkpoints / run.file, until=until, weights=weights)
    if row is None:
        print(f"{run.name}: stopped, goes on from {checkpoints / run.file}", flush=True)
        return
    store(results, run, task, row, commit, jobs)
    if run.attention.startswith("causal") and isinstance(task, Generate):
        row["decoded"] = task.decoded_by(model, DECODED)
        store(results, run, task, row, commit, jobs)
        print(f"{run.name}: {row['decoded']}", flush=True)
    told = " ".join(f"{name} {x:.2f}" for name, x in row["test"].items())
    print(f"{run.name}: {told}, {row['step_ms'] or 0:.1f} ms a step, {time.perf_counter() - start:.0f} s", flush=True)


def wanted(questions: Sequence[str], only: Sequence[str] | None, results: Path) -> list[Run]:
    """Runs of some questions that are not stored, each once."""
    every = dict.fromkeys(run for question in questions for run in runs(question))
    done = stored(results)
    return [run for run in every if run.name not in done and (not only or run.task in only)]


def work(
    waiting: list[Run],
    tasks: dict[str, Task],
    claims: Path,
    results: Path,
    checkpoints: Path,
    commit: str | None,
    jobs: int,
    until: float,
) -> None:
    """Take runs that no other process has taken, until time is up. After an error the process ends."""
    for run in waiting:
        if time.time() > until:
            break
        try:
            (claims / run.file).touch(exist_ok=False)
        except FileExistsError:
            continue
        try:
            one_run(run, tasks, results, checkpoints, commit, jobs, until)
        except Exception:
            print(f"{run.name}: failed\n{traceback.format_exc()[-1500:]}", flush=True)
            raise SystemExit(1) from None  # the device may be in any state
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def workers(command: Sequence[str], jobs: int, until: float) -> None:
    """Start so many processes, and others in the place of those that failed."""
    working = [subprocess.Popen(command) for _ in range(jobs)]
    while working:
        failed = [process for process in working if process.poll()]
        working = [process for process in working if process.poll() is None]
        if time.time() < until - 20:
            working += [subprocess.Popen(command) for _ in failed]
        time.sleep(0.2)


def command_of(argv: Sequence[str], claims: Path, until: float) -> list[str]:
    """The same command as a worker."""
    return [sys.executable, "-m", "learn", *argv, "--claims", str(claims), "--until", str(until)]
