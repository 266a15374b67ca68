"""Measure the contenders of `scram bench`, one row at a time. Needs torch and NumPy alone, so it runs anywhere."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .. import Matches, Search, __version__, measure, search
from . import rivals

SCALE = 100.0  # of unit features, so that a softmax has peaks; times do not depend on it
SAMPLE = 256  # queries that recall and error are measured on
PATCH = 7
LEAST_SIZE = {"cpu": 64, "cuda": 128}  # from which slopes are fitted
ENOUGH = 0.4  # seconds of repeated calls
SETTINGS = {"SCRAM, paper": Search.paper(seed=0), "SCRAM, default": Search(seed=0)}
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One measurement: a contender on a size x size picture with features of that width."""

    kind: str  # "attention" or "search"
    contender: str
    size: int
    width: int
    backward: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind} {self.contender} {self.size} E{self.width}" + " backward" * self.backward


def cases(sizes: tuple[int, ...], widths: tuple[int, ...], device: str, parts: tuple[str, ...]) -> Iterator[Case]:
    """Small sizes first, so that a run that is cut short has every contender."""
    for size in sizes:
        for width in widths:
            for backward in (False, True):
                if ("backward" if backward else "forward") in parts:
                    yield from (Case("attention", name, size, width, backward) for name in rivals.ATTENTIONS)
                    if device == "cuda" and not backward and "flex" in parts:
                        yield from (Case("attention", f"flex {name}", size, width) for name in rivals.PATTERNS)
    if "search" in parts:
        for size in (n for n in sizes if n <= 256):
            for width in widths:
                yield from (Case("search", name, size, width) for name in SETTINGS)
                for name, (_, _, package) in rivals.SEARCHES.items():
                    if package != "pynndescent" or "pynndescent" in parts:
                        yield Case("search", name, size, width)


class Pictures:
    """Queries, keys and values of any size and width, from two photographs `[H, W, 3]`."""

    def __init__(self, a: Tensor, b: Tensor, device: str) -> None:
        self.a, self.b, self.device = a.to(device), b.to(device), device
        self.last: tuple[tuple[int, int], tuple[Tensor, Tensor, Tensor]] | None = None
        self.warm: set[tuple[str, int, bool]] = set()

    def tensors(self, size: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """7 x 7 colour patches, PCA to that width, unit norm `[1, 1, S, S, width]`; the values are the keys.

        bfloat16 on a GPU, float32 for widths that its tensor cores do not take, and on a CPU.
        """
        if self.last is None or self.last[0] != (size, width):
            self.last = None
            patches = self._patches(self.a, size)
            some = patches[:: max(1, len(patches) // 10000)]
            mean = some.mean(0)
            basis = torch.linalg.eigh((some - mean).T @ (some - mean)).eigenvectors[:, -width:]
            kind = torch.bfloat16 if self.device == "cuda" and width % 8 == 0 else torch.float32
            q, k = (
                F.normalize((x - mean) @ basis, dim=-1).to(kind).reshape(1, 1, size, size, width)
                for x in (patches, self._patches(self.b, size))
            )
            self.last = (size, width), (q, k, k.clone())
        return self.last[1]

    def _patches(self, picture: Tensor, size: int) -> Tensor:
        x = F.interpolate(picture.movedim(-1, 0)[None], (size, size), mode="bilinear", antialias=True)
        return F.unfold(F.pad(x, [PATCH // 2] * 4, mode="reflect"), PATCH)[0].T


class Results:
    """Rows by name in a JSON file, written whenever one is added."""

    def __init__(self, path: Path, resume: bool, data: str) -> None:
        self.path, self.data = path, data
        self.rows: dict[str, Row] = json.loads(path.read_text())["rows"] if resume and path.exists() else {}

    def put(self, case: Case, row: Row, device: str) -> None:
        about = {**made_with(device), "data": self.data}
        self.rows[case.name] = {**asdict(case), "device": device, **row, **about}
        self.path.write_text(json.dumps({"rows": self.rows}, indent=1, allow_nan=False) + "\n")


def run(case: Case, pictures: Pictures, known: dict[str, Row], longest: float) -> Row:
    """Measure a case; what cannot run is a row too: `skipped` (would take too long), `failed` (memory, package)."""
    expected = forecast(case, known)
    if expected is not None and expected > longest:
        return {
            "skipped": f"would take about {expected:.0f} s, more than the limit of {longest:g} s",
            "about": expected,
        }
    try:
        return _search(case, pictures, known) if case.kind == "search" else _attention(case, pictures)
    except (torch.OutOfMemoryError, MemoryError) as error:
        return {"failed": f"out of memory: {str(error).splitlines()[0][:120]}"}
    except ModuleNotFoundError as error:
        return {"failed": f"{error.name} is not installed"}
    except RuntimeError as error:  # torch's CPU allocator, and kernels that cannot run on this device
        return {"failed": str(error).splitlines()[0][:160]}
    finally:
        gc.collect()
        if pictures.device == "cuda":
            torch.cuda.empty_cache()


def forecast(case: Case, known: dict[str, Row]) -> float | None:
    """Seconds, continued from the largest smaller sizes by the growth between them; None without one."""
    same = ("kind", "contender", "width", "backward")
    timed = sorted(
        (row["size"], row.get("seconds") or row["about"])
        for row in known.values()
        if all(row[key] == getattr(case, key) for key in same)
        and row["size"] < case.size
        and ("seconds" in row or "about" in row)
    )
    if not timed:
        return None
    power = 1.5  # with one size only; a call's fixed cost hides the growth of small ones
    if len(timed) > 1:
        points = np.log([(n * n, t) for n, t in timed[-2:]])
        power = min(max(1.0, float((points[1, 1] - points[0, 1]) / (points[1, 0] - points[0, 0]))), 2.2)
    size, seconds = timed[-1]
    return float(seconds * (case.size / size) ** (2 * power))


def _attention(case: Case, pictures: Pictures) -> Row:
    q, k, v = pictures.tensors(case.size, case.width)
    wanted, free = rivals.peak_bytes(case.contender, case.size**2), available(pictures.device)
    if wanted > free:
        raise MemoryError(f"needs {wanted / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")
    if case.contender.startswith("flex "):
        allows = rivals.PATTERNS[case.contender.removeprefix("flex ")](case.size)
        attention = rivals.flex(allows, case.size, q.device)
    else:
        attention = rivals.ATTENTIONS[case.contender]
    if case.contender.startswith("flex "):
        attention(q, k, v, SCALE)  # compiles for this size
    elif (case.contender, case.width, case.backward) not in pictures.warm:
        _call(attention, pictures.tensors(16, case.width), case.backward)  # compiles for every size
        pictures.warm.add((case.contender, case.width, case.backward))
        q, k, v = pictures.tensors(case.size, case.width)
    row, out = clock(lambda: _call(attention, (q, k, v), case.backward), pictures.device)
    if not case.backward and case.contender not in ("strided", "fixed", "flex strided", "flex fixed"):
        error = measure.output_error(q, k, v, rivals.attended(out), scale=SCALE, sample=SAMPLE)
        row["output_error"] = float(error)  # of causal patterns it would compare different things
    if not case.backward and case.contender in SETTINGS:
        row["recall"] = _recall(q, k, search(q, k, search=SETTINGS[case.contender]).index)
    return row


def _call(attention: rivals.Attention, tensors: tuple[Tensor, Tensor, Tensor], backward: bool) -> Tensor:
    q, k, v = (x.detach().requires_grad_(backward) for x in tensors)
    out = attention(q, k, v, SCALE)
    if backward:
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    return out.detach()


def _search(case: Case, pictures: Pictures, known: dict[str, Row]) -> Row:
    q, k, _ = pictures.tensors(case.size, case.width)
    if case.contender in SETTINGS:
        row, index = clock(lambda: search(q, k, search=SETTINGS[case.contender]).index, pictures.device)
        return {**row, "recall": _recall(q, k, index)}
    call, efforts, _ = rivals.SEARCHES[case.contender]
    asked = known.get(Case("search", "SCRAM, default", case.size, case.width).name, {}).get("recall", 1.0)
    for effort in efforts:
        row, index = clock(lambda effort=effort: call(q, k, effort), pictures.device)  # type: ignore[misc]
        row |= {"recall": _recall(q, k, index.reshape(1, 1, case.size, case.size, 1)), "effort": effort}
        if row["recall"] >= asked:
            break
    return {**row, "recall_asked": asked}


def _recall(q: Tensor, k: Tensor, index: Tensor) -> float:
    index = index.to(torch.int32).to(q.device)
    found = Matches(index, torch.zeros(index.shape, device=q.device), (q.shape[2], q.shape[3]))
    return float(measure.recall(q, k, found, sample=1000))


def clock(call: Callable[[], Tensor], device: str) -> tuple[Row, Tensor]:
    """Median and spread of a call's seconds and its peak memory; calls of more than a second are made once."""
    before = _reset_peak(device)
    out, first = _timed(call, device)
    peak = _peak(device)
    times = [first]
    if first < 1.0:
        _timed(call, device)
        times = []
        while len(times) < 3 or (sum(times) < ENOUGH and len(times) < 30):
            times.append(_timed(call, device)[1])
    row = {"seconds": statistics.median(times), "least": min(times), "most": max(times), "calls": len(times)}
    return {**row, "peak_bytes": None if peak is None else max(0, peak - before)}, out


def _timed(call: Callable[[], Tensor], device: str) -> tuple[Tensor, float]:
    if device == "cuda":
        torch.cuda.synchronize()
    start = perf_counter()
    out = call()
    if device == "cuda":
        torch.cuda.synchronize()
    return out, perf_counter() - start


def _reset_peak(device: str) -> int:
    """Start to watch the peak; the bytes in use now."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # memory freed before would otherwise serve the call and hide its need
        Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the peak of the resident memory
    except (OSError, AttributeError, TypeError):  # not Linux with glibc
        return 0
    return _status("VmRSS") or 0


def _peak(device: str) -> int | None:
    return torch.cuda.max_memory_allocated() if device == "cuda" else _status("VmHWM")


def _status(field: str) -> int | None:
    """A line of /proc/self/status in bytes, None where there is no such file."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), None)


def available(device: str) -> int:
    """Bytes of memory that are free."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1 << 62
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def slope(rows: list[Row], quantity: str = "least") -> float | None:
    """The exponent of a quantity against the number of pixels, fitted in log-log; None with fewer than two sizes.

    The smallest sizes are left out: there a call costs what it costs to be made, not what its work costs.
    """
    points = [(r["size"] ** 2, r[quantity]) for r in rows if r.get(quantity) and r["size"] >= LEAST_SIZE[r["device"]]]
    if len({n for n, _ in points}) < 2:
        return None
    x, y = np.log(np.array(points, dtype=float)).T
    return float(np.polyfit(x, y, 1)[0])


def made_with(device: str) -> dict[str, Any]:
    """What a result is stored with."""
    return {"machine": machine(device), "commit": commit(), "date": date.today().isoformat()}


def machine(device: str) -> dict[str, Any]:
    """What was measured on."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = models[0].split(":")[1].strip() if models else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "versions": {"scram": __version__, "python": platform.python_version(), **_installed()},
    }


def _installed() -> dict[str, str]:
    found = {}
    for package in ("torch", "triton", "numba", "faiss-cpu", "pynndescent"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the sources, with a mark when they differ from it; "installed" outside a repository."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        tracked = [
            *git,
            "ls-files",
            "--error-unmatch",
            Path(__file__).name,
        ]  # a repository around an installation is not ours
        subprocess.run(tracked, capture_output=True, check=True)
        name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
        changed = subprocess.run([*git, "status", "--porcelain", "--", "."], capture_output=True, text=True).stdout
        return name.strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "installed"
