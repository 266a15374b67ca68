"""How Numba compiles here. Sums may be reordered and contracted; NaN and infinity are not assumed away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

from ..._compat.numba import FASTMATH, PART, PRIVATE, cached


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
