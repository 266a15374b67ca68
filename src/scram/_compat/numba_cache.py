"""Numba's cache on disk, keyed by all sources of the kernels: Numba itself sees the file of a launcher only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

# Without nnan and ninf, which would break tests for NaN and -inf.
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}


def _hash_of_sources() -> str:
    digest, package = hashlib.sha256(), Path(__file__).parent.parent
    kernels = [*sorted((package / "engines" / "cpu").glob("*.py")), package / "schedule.py"]
    try:
        for path in (*kernels, *sorted(Path(__file__).parent.glob("numba*.py"))):
            digest.update(path.read_bytes())
    except OSError:  # not on disk: they do not change
        pass
    return digest.hexdigest()[:12]


SOURCES = _hash_of_sources()


def cached(function: Callable[..., Any], **options: Any) -> Any:
    """`numba.njit` with what it compiles kept on disk, in a file that is named after the function and the sources."""
    function.__qualname__ += f"_{SOURCES}"
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder for the cache can be written
        return numba.njit(**options)(function)
