"""Time and peak memory of a call: one timer for reports, plans and benchmarks, which waits for every accelerator."""

from __future__ import annotations

import ctypes
import os
import statistics
from collections.abc import Callable
from math import inf
from pathlib import Path
from time import perf_counter, process_time
from typing import NamedTuple, TypeVar

import torch

Result = TypeVar("Result")
ENOUGH = 0.25  # seconds of repeated calls
ONCE = 1.0  # seconds from which a call is made only once, if nothing else is said
AGREE = 1.2  # two runs whose times differ by less confirm each other
MOST_RUNS = 5  # to wait for such two
NOTICEABLE = 0.002  # seconds of a run from which a busy machine shows in it
BUSY = 0.7  # share of the cores' time below which they were busy with something else
STEADY = 4 / 3  # times that differ by more than a third say little


class Timing(NamedTuple):
    """Seconds of a call, median, least and most of several, and the most bytes that it held.

    Args:
        steady: whether the times differ by a third at most, the slowest tenth of them left out.
        cpu_seconds: of all threads of the process, median; the wall time of a call that waits for a core is longer.
    """

    seconds: float
    least: float
    most: float
    calls: int
    peak_bytes: int | None
    steady: bool = True
    cpu_seconds: float = 0.0


def clock(
    call: Callable[[], Result], device: str | torch.device, once: float = ONCE, beside: Yardstick | None = None
) -> tuple[Timing, Result]:
    """The time of a call, its first one left out, its peak memory, and what it returned.

    A call of more than `once` seconds is made once, on an accelerator twice: there the first may compile. With a
    yardstick `beside` it, which is made in turn with it, the times are those as if the yardstick took what it took
    first: the median of ratios counts.
    """
    before = reset_peak(device)
    start = process_time()
    out, first = timed(call, device)
    cpu = [process_time() - start]
    peak = peak_bytes(device)
    raw = [first]
    ratios = [1.0]  # of what the yardstick took first to what it takes around each call
    if first < once or on_accelerator(device):
        raw, ratios, cpu = [], [], []
        noticed = beside if beside is not None and beside.seconds >= NOTICEABLE else None
        last = 0.0 if noticed is None else noticed()
        while not raw or (raw[0] < once and (len(raw) < 3 or (sum(raw) < ENOUGH and len(raw) < 30))):
            start = process_time()
            raw.append(timed(call, device)[1])
            cpu.append(process_time() - start)
            after = 0.0 if noticed is None else noticed()
            ratios.append(1.0 if noticed is None else 2 * noticed.seconds / (last + after))
            last = after
    held = None if peak is None else max(0, peak - before)
    times = [seconds * ratio for seconds, ratio in zip(raw, ratios, strict=True)]
    steady = agree(but_slowest(raw))
    timing = Timing(statistics.median(times), min(times), max(times), len(times), held, steady, statistics.median(cpu))
    return timing, out


def but_slowest(times: list[float]) -> list[float]:
    """Times in order, without the slowest tenth: one slow call of many is no sign of a busy machine.

    >>> but_slowest([1.0, 9.0, 2.0]), but_slowest([9.0] + 9 * [1.0]) == 9 * [1.0]
    ([1.0, 2.0, 9.0], True)
    """
    return sorted(times)[: len(times) - len(times) // 10]


def agree(times: list[float], ratio: float = STEADY) -> bool:
    """Whether times differ by no more than that ratio.

    >>> agree([3.0, 4.0]), agree([3.0, 4.1])
    (True, False)
    """
    return max(times) <= ratio * min(times)


class Yardstick:
    """A short call that is made before and after each run of others: other programs slow it down as they do those.

    Args:
        call: what is made.
        device: where.
    """

    def __init__(self, call: Callable[[], object], device: str | torch.device) -> None:
        self.call = call
        self.device = device
        self.wall = 0.0
        self.cpu = 0.0  # of all threads
        self.runs = 0
        call()
        self.seconds = min(self() for _ in range(3))  # that all times are continued to

    def __call__(self) -> float:
        """Seconds of one run."""
        start = process_time()
        seconds = timed(self.call, self.device)[1]
        self.cpu += process_time() - start
        self.wall += seconds
        self.runs += 1
        return seconds

    @property
    def busy(self) -> bool:
        """Whether its threads had to wait for cores: those of a CPU, where it takes long enough to see."""
        if on_accelerator(self.device) or self.wall < NOTICEABLE * self.runs:
            return False
        threads = min(torch.get_num_threads(), usable_cores())
        return self.cpu < BUSY * threads * self.wall


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Believed(NamedTuple):
    """Seconds of a call that two of its runs confirm; `steady` says whether these two agree."""

    seconds: float
    steady: bool


def believed(
    call: Callable[[], Result], device: str | torch.device, limit: float = inf, beside: Yardstick | None = None
) -> tuple[Believed, Result]:
    """The least time of a call, believed when a second run agrees, and what the call returned.

    A first run may compile and another program may run beside it, so a call is made until its two fastest runs agree.
    Where none do, the slower of these two counts. A call that takes far more than `limit` is made only twice.

    With a yardstick `beside` it, times are those as if the yardstick took what it took first: a busy minute counts for
    little. Where the machine is busy the median of `MOST_RUNS` runs counts.
    """
    times: list[float] = []
    while True:
        before = 0.0 if beside is None else beside()
        out, seconds = timed(call, device)
        if beside is not None:
            seconds *= 2 * beside.seconds / (before + beside())
        times.append(seconds)
        if len(times) < 2:
            continue
        fastest = sorted(times)[:2]
        slow = fastest[0] > 2 * limit
        busy = beside is not None and beside.busy
        if slow or (agree(fastest, AGREE) and not busy):
            return Believed(fastest[0], True), out
        if len(times) == MOST_RUNS:
            return Believed(statistics.median(times) if busy else fastest[1], False), out


def timed(call: Callable[[], Result], device: str | torch.device) -> tuple[Result, float]:
    """What a call returned, and its seconds."""
    start = now(device)
    out = call()
    return out, now(device) - start


def now(device: str | torch.device) -> float:
    """The clock, when the device has done what it was given."""
    if on_accelerator(device):
        torch.accelerator.synchronize(device)
    return perf_counter()


def on_accelerator(device: str | torch.device) -> bool:
    """Whether calls on the device return before their work is done: CUDA, ROCm, MPS, XPU and others, not the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == torch.device(device).type


def reset_peak(device: str | torch.device) -> int:
    """Start to watch the peak; the bytes in use now."""
    if on_accelerator(device):
        try:
            torch.accelerator.reset_peak_memory_stats(device)
            return torch.accelerator.memory_allocated(device)
        except (RuntimeError, NotImplementedError, AttributeError):  # MPS keeps no peak, torch before 2.9 tells none
            return 0
    try:
        ctypes.CDLL(None).malloc_trim(0)  # memory freed before would otherwise serve the call and hide its need
        Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the peak of the resident memory
    except (OSError, AttributeError, TypeError):  # not Linux with glibc
        return 0
    return memory_status("VmRSS") or 0


def peak_bytes(device: str | torch.device) -> int | None:
    """The most bytes in use since `reset_peak`; None where nobody counts them."""
    if not on_accelerator(device):
        return memory_status("VmHWM")
    try:
        return torch.accelerator.memory_stats(device).get("allocated_bytes.all.peak")
    except (RuntimeError, NotImplementedError, AttributeError):  # MPS keeps no peak, torch before 2.9 tells none
        return None


def memory_status(field: str, path: str = "/proc/self/status") -> int | None:
    """A line of a status file in bytes, None where there is no such file."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), None)
