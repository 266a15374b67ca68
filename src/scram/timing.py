"""Time and peak memory of a call."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

ENOUGH = 0.25  # seconds of repeated calls
ONCE = 1.0  # seconds from which a call is made only once, if nothing else is said


class Timing(NamedTuple):
    """Seconds of a call, median, least and most of several, and the most bytes that it held."""

    seconds: float
    least: float
    most: float
    calls: int
    peak_bytes: int | None


def clock(call: Callable[[], Tensor], device: str, once: float = ONCE) -> tuple[Timing, Tensor]:
    """The time of a call, its first one left out, its peak memory, and what it returned.

    A call of more than `once` seconds is made once, on a GPU twice: there the first may compile.
    """
    before = reset_peak(device)
    out, first = timed(call, device)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else memory_status("VmHWM")
    times = [first]
    if first < once or device == "cuda":
        times = [timed(call, device)[1]]
        while times[0] < once and (len(times) < 3 or (sum(times) < ENOUGH and len(times) < 30)):
            times.append(timed(call, device)[1])
    held = None if peak is None else max(0, peak - before)
    return Timing(statistics.median(times), min(times), max(times), len(times), held), out


def now(device: str) -> float:
    """The clock, when the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
    return perf_counter()


def timed(call: Callable[[], Tensor], device: str) -> tuple[Tensor, float]:
    """What a call returned, and its seconds."""
    start = now(device)
    out = call()
    return out, now(device) - start


def reset_peak(device: str) -> int:
    """Start to watch the peak; the bytes in use now."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # memory freed before would otherwise serve the call and hide its need
        Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the peak of the resident memory
    except (OSError, AttributeError, TypeError):  # not Linux with glibc
        return 0
    return memory_status("VmRSS") or 0


def memory_status(field: str, path: str = "/proc/self/status") -> int | None:
    """A line of a status file in bytes, None where there is no such file."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), None)
