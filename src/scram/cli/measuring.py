"""Measure the contenders of `scram bench`, one row at a time. Needs torch and NumPy alone, so it runs anywhere."""

from __future__ import annotations

import gc
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..functional import search
from ..images.pca import principal_axes
from ..quality import measure
from ..quality.baseline import yardstick
from ..quality.timing import clock, memory_status, timed
from ..results import Attended, Matches
from . import rivals
from .arguments import BENCH_PATCH
from .provenance import made_with

SCALE = 100.0  # of unit features, so that a softmax has peaks; times do not depend on it
SAMPLE = 256  # queries that the error is measured on
RECALL_SAMPLE = 500  # queries that recall is measured on, on a GPU or small grids
SCORES = 1 << 25  # of that measurement on a CPU: large grids get fewer queries
# Side of the largest picture of each part: FlexAttention makes a mask from all pairs, several times to tune it, and
# nearest-neighbor libraries build an index.
LARGEST = {"forward": inf, "flex": 1024, "search": 256, "backward": inf}
LEAST_SIZE = {"cpu": 64, "cuda": 128}  # from which slopes are fitted
WARM_UP = 24  # side of the picture of a first call: more keys than clusters, or they would not be made
LATE = "the time for all rows was spent"
SAME = ("kind", "contender", "width", "backward")  # what rows of one line share
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
    """The paper's figure first, each part from small to large: a run that is cut short has the most important rows."""
    for part in (part for part in LARGEST if part in parts and (part != "flex" or device == "cuda")):
        kind = "search" if part == "search" else "attention"
        some = [size for size in sizes if size <= LARGEST[part]]
        for size, width, name in product(some, widths, contenders(part, parts)):
            yield Case(kind, name, size, width, part == "backward")


def contenders(part: str, parts: tuple[str, ...]) -> list[str]:
    """The contenders of a part; pynndescent and NATTEN only when named."""
    if part == "search":
        others = [n for n, (_, _, package) in rivals.SEARCHES.items() if package != "pynndescent" or package in parts]
        return [*rivals.SETTINGS, *others]
    if part == "flex":
        return [f"flex {name}" for name in rivals.PATTERNS]
    return [*rivals.ATTENTIONS, *(rivals.OPTIONAL if "natten" in parts else ())]


class Pictures:
    """Queries, keys and values of any size and width, from two photographs `[H, W, 3]`."""

    def __init__(self, a: Tensor, b: Tensor, device: str) -> None:
        self.a = a.to(device)
        self.b = b.to(device)
        self.device = device
        self.last: tuple[tuple[int, int], tuple[Tensor, Tensor, Tensor]] | None = None
        self.warm: set[tuple[str, int, bool]] = set()

    def tensors(self, size: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """7 x 7 color patches, PCA to that width, unit norm `[1, 1, S, S, width]`; the values are the keys.

        bfloat16 on a GPU, float32 for widths that its tensor cores do not take, and on a CPU.
        """
        if self.last is None or self.last[0] != (size, width):
            self.last = None
            patches = self._patches(self.a, size)
            mean, _, axes = principal_axes(patches[:: max(1, len(patches) // 10000)])
            kind = torch.bfloat16 if self.device == "cuda" and width % 8 == 0 else torch.float32
            q, k = (
                F.normalize((x - mean) @ axes[:, -width:], dim=-1).to(kind).reshape(1, 1, size, size, width)
                for x in (patches, self._patches(self.b, size))
            )
            self.last = (size, width), (q, k, k.clone())
        return self.last[1]

    def _patches(self, picture: Tensor, size: int) -> Tensor:
        x = F.interpolate(picture.movedim(-1, 0)[None], (size, size), mode="bilinear", antialias=True)
        return F.unfold(F.pad(x, [BENCH_PATCH // 2] * 4, mode="reflect"), BENCH_PATCH)[0].T


class Results:
    """Rows by name in a JSON file, written whenever one is added."""

    def __init__(self, path: Path, resume: bool, data: str, device: str = "cpu") -> None:
        self.path = path
        self.about = {"device": device, **made_with(device), "data": data}
        self.rows: dict[str, Row] = {}
        if resume and path.exists():
            try:
                self.rows = dict(json.loads(path.read_text())["rows"])
            except (ValueError, TypeError, KeyError):
                raise ValueError(f"{path} holds no rows of this program; remove it or give another --out") from None

    def add(self, case: Case, row: Row) -> None:
        """Hold a row, not yet in the file."""
        self.rows[case.name] = {**asdict(case), **row, **self.about}

    def put(self, case: Case, row: Row) -> None:
        """Hold a row and write the file."""
        self.add(case, row)
        self.write()

    def write(self) -> None:
        """Write what is held, if anything."""
        if not self.rows:
            return
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"rows": self.rows}, indent=1, allow_nan=False) + "\n")
        new.replace(self.path)  # Ctrl-C leaves the old file or the new one


@dataclass(frozen=True)
class Limits:
    """Seconds: of one call, of all rows that are left, and of one row with what it compiles and builds."""

    longest: float
    budget: float = inf
    row: float = inf


def run(case: Case, pictures: Pictures, known: dict[str, Row], limits: Limits) -> Row:
    """Measure a case; what cannot run is a row too: `skipped` (would take too long), `failed` (memory, package)."""
    if full := [row["size"] for row in smaller(case, known) if "memory" in row.get("failed", "")]:
        return {"failed": f"out of memory: already at {full[0]} x {full[0]}"}
    expected = forecast(case, known)
    needed = forecast(case, known, "took") or 0.0
    if expected is not None and expected > limits.longest:
        why = f"a call would take about {expected:.3g} s, more than the limit of {limits.longest:g} s"
        return {"skipped": why, "about": expected}
    late = {"skipped": LATE, **({} if expected is None else {"about": expected})}
    if needed >= limits.budget:
        return late
    start = perf_counter()
    try:
        # What compiles or was never measured has no forecast: the budget ends it too.
        with alarm(min(limits.row, limits.budget)):
            return _search(case, pictures, known) if case.kind == "search" else _attention(case, pictures)
    except TimeoutError:
        return late if limits.budget <= limits.row else {"failed": f"not finished in {limits.row:g} s"}
    except (torch.OutOfMemoryError, MemoryError) as error:
        gc.collect()
        return {"failed": f"out of memory: {str(error).splitlines()[0][:120]}"}
    except ModuleNotFoundError as error:
        return {"failed": f"{error.name} is not installed"}
    except RuntimeError as error:  # torch's CPU allocator, and kernels that cannot run on this device
        if perf_counter() - start >= limits.budget:  # a compiler may wrap the alarm in an error of its own
            return late
        return {"failed": str(error).splitlines()[0][:160]}
    finally:
        if pictures.device == "cuda":
            torch.cuda.empty_cache()


def smaller(case: Case, known: dict[str, Row]) -> list[Row]:
    """The rows of the same contender, width and pass at smaller sizes, ascending."""
    same = [row for row in known.values() if all(row[key] == getattr(case, key) for key in SAME)]
    return sorted((row for row in same if row["size"] < case.size), key=lambda row: int(row["size"]))


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after so many seconds, where signals can: in the main thread, not on Windows."""
    if seconds == inf or not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def forecast(case: Case, known: dict[str, Row], quantity: str = "seconds") -> float | None:
    """Seconds, continued from the largest smaller sizes by the growth between them; None without one."""
    rows = [row for row in smaller(case, known) if quantity in row or "about" in row]
    timed = [(row["size"], row.get(quantity) or row["about"]) for row in rows]
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
    wanted = rivals.peak_bytes(case.contender, case.size**2)
    free = memory_status("MemAvailable", "/proc/meminfo") or 1 << 62
    if pictures.device == "cuda":
        free = torch.cuda.mem_get_info()[0]
    if wanted > free:
        raise MemoryError(f"needs {wanted / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")
    start = perf_counter()
    ready = {}
    if case.contender.startswith("flex "):
        attention = rivals.flex(case.contender.removeprefix("flex "), case.size, q.device)
        timed(lambda: attention(q, k, v, SCALE), pictures.device)  # compiles for this size
        ready["prepared"] = perf_counter() - start
    else:
        attention = {**rivals.ATTENTIONS, **rivals.OPTIONAL}[case.contender]
    if (case.contender, case.width, case.backward) not in pictures.warm and not ready:
        _call(attention, pictures.tensors(WARM_UP, case.width), case.backward)  # compiles for every size
        pictures.warm.add((case.contender, case.width, case.backward))
        q, k, v = pictures.tensors(case.size, case.width)
        start = perf_counter()
    beside = yardstick(q, k, v, scale=SCALE) if pictures.device == "cpu" else None
    timing, out = clock(lambda: _call(attention, (q, k, v), case.backward), pictures.device, beside=beside)
    row: Row = timing._asdict()
    if not case.backward and case.contender not in ("strided", "fixed", "flex strided", "flex fixed"):
        attended = Attended(out, out.new_zeros(out.shape[:-1]))
        error = measure.output_error(q, k, v, attended, scale=SCALE, num_queries=_sample(q, SAMPLE))
        row["output_error"] = float(error)  # of causal patterns it would compare different things
    if not case.backward and case.contender in rivals.SETTINGS:
        row["recall"] = _recall(q, k, rivals.matches_of(case.contender, q, k, v, SCALE))
    return {**row, **ready, "took": perf_counter() - start}


def _call(attention: rivals.Attention, tensors: tuple[Tensor, Tensor, Tensor], backward: bool) -> Tensor:
    q, k, v = (x.detach().requires_grad_(backward) for x in tensors)
    out = attention(q, k, v, SCALE)
    if backward:
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    return out.detach()


def _search(case: Case, pictures: Pictures, known: dict[str, Row]) -> Row:
    q, k, _ = pictures.tensors(case.size, case.width)
    start = perf_counter()
    if case.contender in rivals.SETTINGS:
        timing, index = clock(lambda: search(q, k, search=rivals.SETTINGS[case.contender]).index, pictures.device)
        return {**timing._asdict(), "recall": _recall(q, k, index), "took": perf_counter() - start}
    call, efforts, package = rivals.SEARCHES[case.contender]
    ready = {}
    if package == "pynndescent":  # compiles one program for few points and another for many, in every process
        timed(lambda: call(q, k, efforts[0]), pictures.device)
        ready["prepared"] = perf_counter() - start
    asked = known.get(Case("search", "SCRAM", case.size, case.width).name, {}).get("recall", 1.0)
    for effort in efforts:
        timing, index = clock(lambda effort=effort: call(q, k, effort), pictures.device)  # type: ignore[misc]
        recall = _recall(q, k, index.reshape(1, 1, case.size, case.size, 1))
        row = {**timing._asdict(), "recall": recall, "effort": effort}
        if row["recall"] >= asked:
            break
    return {**row, **ready, "recall_asked": asked, "took": perf_counter() - start}


def _sample(q: Tensor, most: int) -> int:
    return most if q.is_cuda else max(64, min(most, SCORES // (q.shape[2] * q.shape[3])))


def _recall(q: Tensor, k: Tensor, index: Tensor) -> float:
    index = index.to(torch.int32).to(q.device)
    score = torch.zeros(index.shape, dtype=torch.float32, device=q.device)
    matches = Matches(index, score, (q.shape[2], q.shape[3]))
    return float(measure.recall(q, k, matches, num_queries=_sample(q, RECALL_SAMPLE)))


def slope(rows: list[Row], quantity: str = "least") -> float | None:
    """The exponent of a quantity against the number of pixels, fitted in log-log; None with fewer than two sizes.

    The smallest sizes are left out: there a call costs what it costs to be made, not what its work costs.
    """
    points = [(r["size"] ** 2, r[quantity]) for r in rows if r.get(quantity) and r["size"] >= LEAST_SIZE[r["device"]]]
    if len({n for n, _ in points}) < 2:
        return None
    x, y = np.log(np.array(points, dtype=float)).T
    return float(np.polyfit(x, y, 1)[0])
