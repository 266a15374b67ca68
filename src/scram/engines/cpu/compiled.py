"""How Numba compiles here. Sums may be reordered and contracted; NaN and infinity are not assumed away."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

import numba

from ..._compat.numba import FASTMATH, PART, PRIVATE, cached, each_task
from .threads import running


def compiled(function: Callable[..., Any]) -> Any:
    """Machine code for one thread that becomes part of what calls it; Python cannot call it."""
    return numba.njit(fastmath=FASTMATH, error_model="numpy", **PART)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """As `compiled`, for what is called in one place: its many arguments are not passed, and arrays not counted."""
    return numba.njit(fastmath=FASTMATH, error_model="numpy", forceinline=PRIVATE, **PART)(function)


def plain(function: Callable[..., Any]) -> Any:
    """As `compiled`, with sums in the order in which they are written."""
    return numba.njit(fastmath={"contract"}, error_model="numpy", **PART)(function)


def launcher(function: Callable[..., Any]) -> Any:
    """Machine code that is called from Python. Numba does not keep the fallback of `each_task` on disk."""
    make = cached if PRIVATE else lambda function, **options: numba.njit(**options)(function)
    return make(function, fastmath=FASTMATH, error_model="numpy", nogil=True, no_cfunc_wrapper=True)


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
