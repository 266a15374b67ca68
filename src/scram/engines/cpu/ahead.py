"""All kernels of a call, compiled by two processes at once before it runs.

The first call of a rank and dtype spends seconds in Numba, which compiles on one core. Another process takes a part of
the stages; what it compiles goes to Numba's cache on disk, from where the call loads it. Without a second core or such
a cache there is no other process, and each stage is compiled when it first runs.
"""

from __future__ import annotations

import atexit
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from ..._compat.numba import LOGGER, SOURCES, folder_of, tell
from ...core import calls
from ...spec.schedule import tile_shape
from .attend import attend
from .attend_backward import attend_backward
from .cluster import cluster
from .cluster_backward import cluster_backward
from .cluster_tail import cluster_tail
from .cluster_tail_backward import cluster_tail_backward
from .layout import _row_states
from .route import route, routed_start
from .search import search
from .threads import usable_cores

WIDTH = 8  # of the features that stages are compiled with
COUNT = 4  # clusters
Stage = tuple[str, Callable[[], object]]  # its name, and a call of it
PROGRAM = "import sys; sys.path[:] = {path!r}; from scram.engines.cpu.ahead import compile_for; compile_for({kind!r})"


class Kind(NamedTuple):
    """What kernels are compiled for."""

    rank: int
    dtype: str  # "float32" or "float64"
    gradients: bool

    @property
    def name(self) -> str:
        """Of files in the folder of the cache."""
        return f"ahead_{SOURCES}.{self.rank}.{self.dtype}{'.gradients' if self.gradients else ''}"


_known: set[Kind] = set()


def expect(rank: int, dtype: torch.dtype, gradients: bool) -> None:
    """A call with a search and routed keys begins: compile what it needs, where that was not done before.

    Args:
        rank: of its grids.
        dtype: that is computed with.
        gradients: whether a backward pass may follow.
    """
    kind = Kind(rank, str(dtype).removeprefix("torch."), gradients)
    if kind in _known:
        return
    _known.update({kind, kind._replace(gradients=False)})
    folder = folder_of(_row_states)
    if folder is None or usable_cores() < 2 or (folder / f"{kind.name}.done").exists() or not _begun(kind):
        return
    tell(f"compiling the CPU kernels for {kind.dtype}, rank {rank}; this happens once and takes about 10 s")
    start = time.monotonic()
    with torch.no_grad():
        _compile(_stages(kind)[0], kind, folder)
    LOGGER.info(f"compiled for {time.monotonic() - start:.1f} s")


def compile_for(given: tuple[int, str, bool]) -> None:
    """The other process."""
    torch.set_num_threads(1)
    parent = os.getppid()
    kind = Kind(*given)
    folder = folder_of(_row_states)
    assert folder is not None
    forward, backward = _stages(kind)
    _compile([*forward[1:], forward[0]], kind, folder, parent)  # the first process begins with the first
    if kind.gradients:
        _compile(backward[::-1], kind, folder, parent)
    (folder / f"{kind.name}.done").touch()


def _begun(kind: Kind) -> bool:
    """Start the other process, if it can be started."""
    if not Path(sys.executable or "").name.startswith("python"):
        return False
    try:
        other = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PROGRAM.format(path=sys.path, kind=tuple(kind))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )
    except OSError:
        return False
    atexit.register(_end, other, os.getpid())
    threading.Thread(target=other.wait, daemon=True).start()  # so that it leaves no zombie
    return True


def _end(other: subprocess.Popen[bytes], owner: int) -> None:
    """What nobody waits for any more need not be finished."""
    if os.getpid() == owner:
        other.kill()
        with suppress(subprocess.TimeoutExpired):
            other.wait(1)


def _compile(stages: Sequence[Stage], kind: Kind, folder: Path, parent: int | None = None) -> None:
    """Run stages once, but for those that another process is compiling; end where `parent` has ended."""
    for name, run in stages:
        if parent is not None and os.getppid() != parent:
            sys.exit("the process that waited for this code has ended")
        file = _claimed(folder / f"{kind.name}.{name}.lock")
        if file is None:
            continue
        with file:  # which ends the claim
            run()


def _claimed(path: Path) -> IO[str] | None:
    """A file with a lock that ends with its process; None where another process has it."""
    try:
        file = path.open("w")
    except OSError:
        return None
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except (ImportError, OSError):  # no locks here: both compile it
        pass
    return file


class _Tensors:
    """Of small calls of a rank and dtype: all keys in COUNT clusters, the only tile routes the first of them."""

    def __init__(self, kind: Kind) -> None:
        grid = tile_shape(kind.rank)
        keys = math.prod(grid)
        heads = (1, 1)
        dtype = getattr(torch, kind.dtype)
        generator = torch.Generator("cpu").manual_seed(0)

        def rows(*shape: int) -> Tensor:
            return torch.randn(*heads, *shape, generator=generator, dtype=dtype, device="cpu")

        def numbers(*shape: int) -> Tensor:
            return torch.arange(keys, dtype=torch.int32, device="cpu").reshape(*heads, *shape)

        self.keys = keys
        self.q, self.k, self.v, self.out = (rows(*grid, WIDTH) for _ in range(4))
        self.lse = rows(*grid)
        self.index = numbers(*grid, 1)
        self.order = numbers(keys)
        self.label = numbers(*grid) * COUNT // keys
        self.sizes = self.label.flatten().bincount(minlength=COUNT).int().reshape(*heads, COUNT)
        self.centers, self.values = rows(COUNT, WIDTH), rows(COUNT, WIDTH)
        self.slope = rows(WIDTH, WIDTH)
        self.variance = rows(WIDTH).square()
        self.spreads = torch.ones(*heads, COUNT, dtype=dtype, device="cpu")
        self.routes = torch.ones(*heads, 1, 1, dtype=torch.int32, device="cpu")
        self.seed = torch.zeros((), dtype=torch.int64, device="cpu")


def _stages(kind: Kind) -> tuple[list[Stage], list[Stage]]:
    """Small calls whose arrays have the types of all calls of the kind: stages without gradients, and backward ones.

    Those come first that take long to compile.
    """
    x = _Tensors(kind)
    clusters, field, routing, start, windows, tail = _calls(x, kind.rank)
    forward: list[Stage] = [
        ("cluster", lambda: cluster(clusters)),
        ("search", lambda: search(field)),
        ("attend", lambda: attend(windows)),
        ("tail", lambda: cluster_tail(tail)),
        ("route", lambda: (route(routing), routed_start(start))),
    ]
    made = (x.centers, x.values, x.sizes, x.label)
    backward: list[Stage] = [
        ("tail_backward", lambda: cluster_tail_backward(tail, x.out, x.lse, x.out, x.lse)),
        ("attend_backward", lambda: attend_backward(windows, x.out, x.lse, x.out, x.lse)),
        ("cluster_backward", lambda: cluster_backward(clusters, *made, x.centers, x.values, x.slope)),
    ]
    return forward, backward


def _calls(x: _Tensors, rank: int) -> tuple[Any, ...]:
    """One of each stage."""
    pair: dict[str, Any] = {"q": x.q, "k": x.k, "rows": None}
    near: dict[str, Any] = {"v": x.v, "index": x.index, "label": x.label, "routes": x.routes, "radius": (1,) * rank}
    plain: dict[str, Any] = {"scale": 1.0, "dropout_seed": None, "dropout_p": 0.0}
    names = ("order", "centers", "values", "slope", "sizes", "variance", "spreads")
    clusters: dict[str, Any] = {name: getattr(x, name) for name in names}
    every: dict[str, Any] = {"key_mask": None, "seed": x.seed}
    walk: dict[str, Any] = {"jumps": (1,), "propagate": "shift", "gossip": 0, "reach": (), "random": True}
    few: dict[str, Any] = {"method": "query", "matches": 1, "separation": 0, "sweeps": 1, "causal": False}
    return (
        calls.ClusterCall(**pair, **every, v=x.v, warm_centers=None, warm_values=None, count=COUNT, steps=1, scale=1.0),
        calls.SearchCall(**pair, **every, **walk, **few, warm=x.index, starts=None),
        calls.RouteCall(x.q, x.centers, x.sizes, x.variance, x.spreads, keys=x.keys, scale=1.0),
        calls.RoutedStartCall(x.q, x.k, x.order, x.sizes, x.routes, keys=x.keys),
        calls.AttendCall(
            **pair, **near, **plain, key_mask=None, k_extra=None, v_extra=None, causal=False, weight="softmax"
        ),
        calls.ClusterTailCall(
            **pair, **near, **plain, **clusters, near_out=x.out, near_lse=x.lse, extras=0, keys=x.keys
        ),
    )
