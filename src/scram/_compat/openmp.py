"""How many threads torch's own operators take, by Python thread: a private part of its builds with OpenMP and MKL.

The libraries are those that torch 2.11 to 2.13 has loaded. Fallback, where they or their functions are not found or do
not do what they should: operators keep their threads, which is right and, beside other programs, slower.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

import torch

LIBRARIES = {"linux": "libtorch_cpu.so", "darwin": "libtorch_cpu.dylib", "win32": "torch_cpu.dll"}


class _State(threading.local):
    """Of one Python thread."""

    depth = 0  # of contexts entered
    threads = 1  # of torch, outside
    mkl = 0  # MKL's own, outside; 0: as OpenMP's


_state = _State()


@cache
def _library() -> ctypes.CDLL | None:
    """What sets OpenMP's threads, where torch follows it."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / LIBRARIES.get(sys.platform, "")))
        set_threads = library.omp_set_num_threads
    except (OSError, AttributeError):
        return None
    before = torch.get_num_threads()
    other = 1 if before > 1 else 2
    set_threads(other)
    follows = torch.get_num_threads() == other
    set_threads(before)
    return library if follows else None


@cache
def _set_mkl_threads() -> Any:
    """MKL's function for this Python thread, which returns what was set before; None without MKL."""
    return getattr(_library(), "MKL_Set_Num_Threads_Local", None)


class _OneThread:
    """A context in which operators that this Python thread calls run on it alone.

    A parallel region of an operator ends when all its threads have run. Beside other programs one of them waits for a
    core, for milliseconds; and it goes on spinning when its work is done, where the engine's own threads would run.
    """

    def __enter__(self) -> None:
        if _state.depth == 0:
            _state.threads = torch.get_num_threads()
            library = _library() if _state.threads > 1 else None
            if library is not None:
                library.omp_set_num_threads(1)
                set_mkl_threads = _set_mkl_threads()
                _state.mkl = 0 if set_mkl_threads is None else set_mkl_threads(1)
        _state.depth += 1

    def __exit__(self, *exception: object) -> None:
        _state.depth -= 1
        if _state.depth == 0:
            library = _library() if _state.threads > 1 else None
            if library is not None:
                library.omp_set_num_threads(_state.threads)
                set_mkl_threads = _set_mkl_threads()
                if set_mkl_threads is not None:
                    set_mkl_threads(_state.mkl)


ONE_THREAD = _OneThread()


def num_threads() -> int:
    """Torch's number of threads, as it is outside of `ONE_THREAD`."""
    return _state.threads if _state.depth else torch.get_num_threads()
