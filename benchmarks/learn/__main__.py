"""The command: see the package."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from store import RESULTS

from . import __doc__ as about
from .attentions import NAMES
from .data import load, made_up, prepare
from .loop import Run, store, stored, train
from .plans import runs
from .report import curves, table
from .speed import speed
from .tasks import Task, tasks, tiny


def main() -> None:
    options = _parser().parse_args()
    options.run(options)


def _prepare(options: argparse.Namespace) -> None:
    prepare(options.cifar, options.mnist, options.folder)


def _train(options: argparse.Namespace) -> None:
    run = Run(options.task, options.attention, options.seed, options.pictures)
    if run.name in stored(options.results):
        print(f"{run.name}: stored already")
        return
    task = _tasks(options)[run.task]
    task = replace(task, data=task.data.first(run.pictures))
    file = options.checkpoints / (run.name.replace("; ", "_").replace(" ", "-").replace(",", "") + ".pt")
    start = time.perf_counter()
    _, row = train(task, run, checkpoint=file, until=options.until)
    if row is None:
        print(f"{run.name}: stopped, goes on from {file}")
        return
    store(options.results, run, task, row, options.commit, options.jobs)
    told = " ".join(f"{name} {x:.2f}" for name, x in row["test"].items())
    print(f"{run.name}: {told}, {row['step_ms'] or 0:.1f} ms a step, {time.perf_counter() - start:.0f} s", flush=True)


def _plan(options: argparse.Namespace) -> None:
    """Several runs at a time, each in a process of its own; what time does not allow is left for the next call."""
    until = time.time() + options.seconds
    waiting = [run for question in options.questions for run in runs(question)]
    waiting = [run for run in waiting if run.name not in stored(options.results)]
    if options.only:
        waiting = [run for run in waiting if run.task in options.only]
    working: list[subprocess.Popen[bytes]] = []
    while (waiting and time.time() < until) or working:
        working = [process for process in working if process.poll() is None]
        if waiting and time.time() < until and len(working) < options.jobs:
            working.append(subprocess.Popen(_command(waiting.pop(0), options, until)))
        time.sleep(0.2)
    print(f"{len(waiting)} runs are left", flush=True)


def _command(run: Run, options: argparse.Namespace, until: float) -> list[str]:
    more = [] if run.pictures is None else ["--pictures", str(run.pictures)]
    more += ["--commit", options.commit] if options.commit else []
    more += ["--data", str(options.data)] if options.data else []
    return [
        *(sys.executable, "-m", "learn", "train", run.task, "--attention", run.attention, "--seed", str(run.seed)),
        *("--results", str(options.results), "--checkpoints", str(options.checkpoints), "--until", str(until)),
        *("--jobs", str(options.jobs), "--device", options.device, *more, *(["--tiny"] if options.tiny else [])),
    ]


def _speed(options: argparse.Namespace) -> None:
    speed(_tasks(options), options.results, options.commit, options.steps, options.only)


def _table(options: argparse.Namespace) -> None:
    table(options.results)


def _curves(options: argparse.Namespace) -> None:
    curves(options.results, options.folder)


def _tasks(options: argparse.Namespace) -> dict[str, Task]:
    sets = load(options.data) if options.data else made_up()
    found = tasks({name: x.to(options.device) for name, x in sets.items()})
    return {name: tiny(task) for name, task in found.items()} if options.tiny else found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("learn", description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--results", type=Path, default=RESULTS, help="folder of learn.json")
    common.add_argument("--data", type=Path, help="what `prepare` wrote; without it a few digits of scikit-learn")
    common.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    common.add_argument("--checkpoints", type=Path, default=Path("../build/learn/checkpoints"))
    common.add_argument("--commit", help="what is measured, where git cannot be asked")
    common.add_argument("--tiny", action="store_true", help="the smallest form of each task")
    common.add_argument("--jobs", type=int, default=1, help="runs at a time: times of steps are told of one only")
    one = commands.add_parser("prepare", help="pack CIFAR-10 and MNIST")
    for name in ("cifar", "mnist", "folder"):
        one.add_argument(name, type=Path)
    one.set_defaults(run=_prepare)
    one = commands.add_parser("train", parents=[common], help="one run")
    one.add_argument("task")
    one.add_argument("--attention", choices=NAMES, default="tail")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--pictures", type=int)
    one.add_argument("--until", type=float, help="the time at which to stop, in seconds of time.time()")
    one.set_defaults(run=_train)
    one = commands.add_parser("plan", parents=[common], help="all runs of a question that are not stored yet")
    one.add_argument("questions", nargs="+", choices=["tasks", "noise", "bias"])
    one.add_argument("--seconds", type=float, default=1e9)
    one.add_argument("--only", nargs="*", help="tasks")
    one.set_defaults(run=_plan)
    one = commands.add_parser("speed", parents=[common], help="time and memory of a step, for each attention")
    one.add_argument("--steps", type=int, default=20)
    one.add_argument("--only", nargs="*", help="tasks")
    one.set_defaults(run=_speed)
    one = commands.add_parser("table", parents=[common], help="what is stored")
    one.set_defaults(run=_table)
    one = commands.add_parser("curves", parents=[common], help="learning curves as pictures")
    one.add_argument("folder", type=Path)
    one.set_defaults(run=_curves)
    return parser


if __name__ == "__main__":
    main()
