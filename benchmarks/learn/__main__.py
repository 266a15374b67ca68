"""The command: see the package."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from store import RESULTS

from . import __doc__ as about
from .attentions import NAMES
from .data import TESTS, Set, load, made_up, noise_only, prepare
from .loop import Run, stored
from .plans import QUESTIONS
from .profile import profile
from .report import curves, samples, sheet, table
from .speed import speed
from .swap import swap
from .tasks import Task, tasks, tiny
from .work import command_of, one_run, wanted, work, workers


def main() -> None:
    options = _parser().parse_args()
    options.run(options)


def _prepare(options: argparse.Namespace) -> None:
    prepare(options.cifar, options.mnist, options.folder, options.train, options.test)


def _train(options: argparse.Namespace) -> None:
    run = Run(options.task, options.attention, options.seed, options.pictures)
    if run.name in stored(options.results):
        print(f"{run.name}: stored already")
        return
    places = options.results, options.checkpoints
    one_run(run, _tasks(options), *places, options.commit, options.jobs, options.until)


def _plan(options: argparse.Namespace) -> None:
    """Several runs at a time; what time does not allow is left for the next call."""
    waiting = wanted(options.questions, options.only, options.results)
    if options.claims is not None:  # a worker
        places = options.claims, options.results, options.checkpoints
        work(waiting, _tasks(options), *places, options.commit, options.jobs, options.until)
        return
    until = time.time() + options.seconds
    with tempfile.TemporaryDirectory() as claims:
        workers(command_of(sys.argv[1:], Path(claims), until), min(options.jobs, len(waiting)), until)
    print(f"{len(wanted(options.questions, options.only, options.results))} runs are left", flush=True)


def _speed(options: argparse.Namespace) -> None:
    sets = load(options.data) if options.data else noise_only()
    speed(_made(sets, options), options.results, options.commit, options.steps, options.only)


def _table(options: argparse.Namespace) -> None:
    table(options.results)


def _curves(options: argparse.Namespace) -> None:
    curves(options.results, options.folder)
    if options.samples is not None:
        real = load(options.data)["mnist"].test_x[:24].numpy()
        sheet(options.samples, real, options.folder)


def _profile(options: argparse.Namespace) -> None:
    profile(options.results, options.commit, options.device, options.sizes, options.batch)


def _samples(options: argparse.Namespace) -> None:
    samples(_tasks(options), options.checkpoints / "weights", options.folder, options.count, options.only)


def _swap(options: argparse.Namespace) -> None:
    weights = options.checkpoints / "weights"
    swap(_tasks(options)[options.task], options.seed, weights, options.count, options.results, options.commit)


def _tasks(options: argparse.Namespace) -> dict[str, Task]:
    return _made(load(options.data) if options.data else made_up(), options)


def _made(sets: dict[str, Set], options: argparse.Namespace) -> dict[str, Task]:
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
    one.add_argument("--train", type=int, help="pictures of each set; all without it")
    one.add_argument("--test", type=int, default=TESTS)
    one.set_defaults(run=_prepare)
    one = commands.add_parser("train", parents=[common], help="one run")
    one.add_argument("task")
    one.add_argument("--attention", choices=NAMES, default="tail")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--pictures", type=int)
    one.add_argument("--until", type=float, help="the time at which to stop, in seconds of time.time()")
    one.set_defaults(run=_train)
    one = commands.add_parser("plan", parents=[common], help="all runs of a question that are not stored yet")
    one.add_argument("questions", nargs="+", choices=QUESTIONS)
    one.add_argument("--seconds", type=float, default=1e9)
    one.add_argument("--only", nargs="*", help="tasks")
    one.add_argument("--claims", type=Path, help="of a worker: a folder of the runs that are taken")
    one.add_argument("--until", type=float, help="of a worker")
    one.set_defaults(run=_plan)
    one = commands.add_parser("speed", parents=[common], help="time and memory of a step, for each attention")
    one.add_argument("--steps", type=int, default=20)
    one.add_argument("--only", nargs="*", help="tasks")
    one.set_defaults(run=_speed)
    one = commands.add_parser("profile", parents=[common], help="one layer: time of the host and of the device")
    one.add_argument("--sizes", type=int, nargs="*", default=[32, 64, 128])
    one.add_argument("--batch", type=int, default=64)
    one.set_defaults(run=_profile)
    one = commands.add_parser("samples", parents=[common], help="new pictures by the trained generators")
    one.add_argument("folder", type=Path)
    one.add_argument("--count", type=int, default=24)
    one.add_argument("--only", nargs="*", help="tasks")
    one.set_defaults(run=_samples)
    one = commands.add_parser("swap", parents=[common], help="trained generators with other attentions")
    one.add_argument("task")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--count", type=int, default=16)
    one.set_defaults(run=_swap)
    one = commands.add_parser("table", parents=[common], help="what is stored")
    one.set_defaults(run=_table)
    one = commands.add_parser("curves", parents=[common], help="learning curves as pictures")
    one.add_argument("folder", type=Path)
    one.add_argument("--samples", type=Path, help="a folder of `samples`: they are shown too, beside those of --data")
    one.set_defaults(run=_curves)
    return parser


if __name__ == "__main__":
    main()
