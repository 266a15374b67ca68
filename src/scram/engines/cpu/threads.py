"""How Numba runs here: on torch's number of threads, and safe to call at once.

Numba's omp layer kills a forked child and its workqueue aborts when two Python threads call at once, so tbb is taken
where it can be had, else workqueue behind a lock.
"""

import ctypes
import importlib.metadata
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numba
import numpy as np
import torch
from numpy.typing import NDArray

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


@contextmanager
def threads() -> Iterator[int]:
    """Run what is inside on torch's number of threads, and say how many tasks to make: TASKS_PER_THREAD for each."""
    locked = _start()
    if locked:
        _serial.acquire()
    before = numba.get_num_threads()
    count = max(1, min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
    numba.set_num_threads(count)
    try:
        yield count * TASKS_PER_THREAD
    finally:
        numba.set_num_threads(before)
        if locked:
            _serial.release()


def workers_of(tasks: int, items: int) -> int:
    """Workers for items that are handed out one by one (`turn`): one for each thread, where there is work for it."""
    return max(1, min(tasks // TASKS_PER_THREAD, items))


def turns(workers: int) -> NDArray[np.int64]:
    """What `turn` counts in."""
    return np.zeros(workers, np.int64)
