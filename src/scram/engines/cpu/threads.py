"""How Numba runs here: on torch's number of threads, on cores that the process may use, and safe to call at once.

Numba's omp layer kills a forked child and its workqueue aborts when two Python threads call at once, so tbb is taken
where it can be had, else workqueue behind a lock.
"""

import ctypes
import importlib.metadata
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from math import ceil, inf
from pathlib import Path
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

from ..._compat import ONE_THREAD, num_threads
from ..._compat.numba import each_task
from .compiled import inlined, launcher

P = ParamSpec("P")
R = TypeVar("R")
TASKS_PER_THREAD = 16  # so that a thread that is late does not hold up the others for long

_lock = threading.Lock()
_serial = threading.RLock()


def _unlock() -> None:
    """In a forked child: no thread that held the locks exists."""
    global _lock, _serial
    _lock = threading.Lock()
    _serial = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


def _find_tbb() -> None:
    """Load the tbb of this Python environment, which lies where the loader does not look."""
    try:
        files = importlib.metadata.files("tbb") or []
        libraries = [file.locate() for file in files if file.name == "libtbb.so.12"]
        for path in libraries[:1]:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except (importlib.metadata.PackageNotFoundError, OSError):
        pass  # workqueue serves


def _start() -> bool:
    """Fix the threading layer, once; whether it needs the lock."""
    with _lock:
        try:
            layer = numba.threading_layer()
        except ValueError:  # none chosen yet in this process
            if numba.config.THREADING_LAYER in ("default", "tbb"):
                _find_tbb()
            if numba.config.THREADING_LAYER == "default":
                numba.config.THREADING_LAYER_PRIORITY = ["tbb", "workqueue", "omp"]
            numba.get_num_threads()  # launches them
            layer = numba.threading_layer()
    return bool(layer == "workqueue")


def in_one_pool(function: Callable[P, R]) -> Callable[P, R]:
    """A function of the engine in which no operator of torch starts threads of its own: Numba's are the only ones."""

    @wraps(function)
    def run(*arguments: P.args, **named: P.kwargs) -> R:
        with ONE_THREAD:
            return function(*arguments, **named)

    return run


def usable_cores() -> int:
    """Cores that this process may use, by its affinity and by the quota of its control groups."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, ceil(min(_quota(), allowed))))


@cache
def _quota() -> float:
    return quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))


def quota(membership: Path, root: Path) -> float:
    """Cores' worth of time that the control groups of a process grant it, inf without a limit.

    Args:
        membership: a file of lines number:controllers:path.
        root: where the groups are mounted; inside a container its own group may be there itself.
    """
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return inf
    least = inf
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "cpu" if controllers else root
        own = base / path.strip("/")
        folders = [own, *own.parents]
        for folder in folders[: folders.index(base) + 1] if base in folders else [base]:
            least = min(least, _granted(folder))
    return least


def _granted(folder: Path) -> float:
    """What one group grants: cpu.max of version 2, or the two files of version 1."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            words = " ".join((folder / name).read_text() for name in names).split()
            most, period = float(words[0]), float(words[1])  # "max" without a limit
        except (OSError, ValueError, IndexError):
            continue
        if most > 0 and period > 0:
            return most / period
    return inf


class _Running(threading.local):
    """Of one Python thread."""

    count = 1  # threads that its kernels take


_running = _Running()


@contextmanager
def threads() -> Iterator[int]:
    """Run what is inside on torch's number of threads, and say how many tasks to make: TASKS_PER_THREAD for each.

    There are no more threads than cores: one that waits for a core delays the others at the end.
    """
    count = max(1, min(num_threads(), usable_cores(), numba.config.NUMBA_NUM_THREADS))
    before = _running.count
    _running.count = count
    try:
        with _numba_threads(count):
            yield count * TASKS_PER_THREAD
    finally:
        _running.count = before


def running() -> int:
    """How many threads kernels take inside of `threads`."""
    return _running.count


@contextmanager
def _numba_threads(count: int) -> Iterator[None]:
    """Numba's threads, started for one too: code that is loaded from the disk is linked with what starts them."""
    locked = _start()
    if locked:
        _serial.acquire()
    before = numba.get_num_threads()
    numba.set_num_threads(count)
    try:
        yield
    finally:
        numba.set_num_threads(before)
        if locked:
            _serial.release()


KERNEL = None  # `parallel` gives each copy of `_run` its own


def _run(tasks, threads, *arguments):  # type: ignore[no-untyped-def]
    each_task(KERNEL, tasks, threads, (tasks, *arguments))


def parallel(function: Callable[..., Any]) -> Any:
    """A launcher run(tasks, *arguments) of function(task, tasks, *arguments) for 0 <= task < tasks, on all threads."""
    names = {"__name__": function.__module__, "each_task": each_task, "KERNEL": inlined(function)}
    run = FunctionType(_run.__code__, names, function.__name__)
    run.__qualname__ = f"{function.__module__}.{function.__name__}"  # names the file of Numba's cache
    launch = launcher(run)

    @wraps(function)
    def on_all_threads(tasks: int, *arguments: Any) -> None:
        launch(tasks, running(), *arguments)

    return on_all_threads


def tasks_of(tasks: int, blocks: int) -> int:
    """Tasks that share blocks of work, none without a block. A single one runs on the calling thread alone."""
    return max(1, min(tasks, blocks))


def workers_of(tasks: int, items: int) -> int:
    """Workers for items that are handed out one by one (`turn`): one for each thread, where there is work for it."""
    return max(1, min(tasks // TASKS_PER_THREAD, items))


def turns(workers: int) -> NDArray[np.int64]:
    """What `turn` counts in."""
    return np.zeros(workers, np.int64)
