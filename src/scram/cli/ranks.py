"""Processes of their own for `scram bench --distributed`: each holds a shard, and measures what it is asked."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from .. import distributed
from ..core.exact import exact_attention
from ..core.layout_hints import LayoutWarning
from ..options import Mode
from ..quality.timing import now, peak_bytes, reset_peak
from .measuring import SCALE
from .rivals import default_setting

CALLS = 3  # timed, after one that is not
SAMPLE = 64  # queries of each rank whose error is measured
Said = dict[str, Any]


class Ranks:
    """So many processes that wait for work; they end when this does."""

    def __init__(self, size: int, device: str, longest: float) -> None:
        context = mp.get_context("spawn")
        self.longest = longest
        self.folder = tempfile.TemporaryDirectory()
        pipes = [context.Pipe() for _ in range(size)]
        self.ends = [end for end, _ in pipes]
        meet = str(Path(self.folder.name) / "meet")
        self.processes = [
            context.Process(target=serve, args=(rank, size, device, meet, end), daemon=True)
            for rank, (_, end) in enumerate(pipes)
        ]
        for process, (_, end) in zip(self.processes, pipes, strict=True):
            process.start()
            end.close()  # the process has its own: where it is gone, nothing comes

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()

    def measure(self, **asked: Any) -> list[Said]:
        """What each rank measured; raises ValueError where one failed, is gone, or does not answer in time."""
        for process, end in zip(self.processes, self.ends, strict=True):
            with contextlib.suppress(OSError):  # it is gone: told below
                if process.is_alive():  # where a program takes SIGPIPE, writing to a dead one would end it
                    end.send(asked)
        answers = []
        for rank, end in enumerate(self.ends):
            try:
                answer = end.recv() if end.poll(self.longest) else {"failed": f"no answer in {self.longest:g} s"}
            except (EOFError, OSError):
                answer = {"failed": "its process ended"}
            if "failed" in answer:
                raise ValueError(f"rank {rank} of {len(self.ends)}: {answer['failed']}")
            answers.append(answer)
        return answers


def serve(rank: int, size: int, device: str, meet: str, end: Connection) -> None:
    """A rank: one thread, gloo on a CPU, NCCL on GPUs."""
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{meet}", rank=rank, world_size=size)
        mesh = init_device_mesh(device, (size,))
    except Exception as error:
        end.send({"failed": f"{type(error).__name__}: {error}"})
        return
    warnings.simplefilter("ignore", LayoutWarning)
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            asked = end.recv()
            try:
                end.send(_measure(mesh, device, **asked))
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                end.send({"failed": f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"})


def _measure(mesh: Any, device: str, file: str, mode: Mode, backward: bool) -> Said:
    """Seconds of calls, seconds waited in them, bytes, peak memory and the squared error of this rank's queries."""
    rank = mesh.get_local_rank()
    size = mesh.size()
    whole = np.load(file, mmap_mode="r")  # [3, 1, H, side, side, E]
    rows = np.linspace(0, whole.shape[3], size + 1).round().astype(int)[rank : rank + 2]
    kind = torch.bfloat16 if device == "cuda" and whole.shape[-1] % 8 == 0 else torch.float32

    counted: list[distributed.Traffic] = []
    times: list[float] = []

    def call(first: int, last: int) -> Tensor:
        q, k, v = (
            torch.from_numpy(x[:, :, first:last].copy()).to(device, kind).requires_grad_(backward) for x in whole
        )
        dist.barrier(mesh.get_group())
        with distributed.traffic() as moved:
            start = now(device)
            out = _call(mesh, q, k, v, mode, backward)
            times.append(now(device) - start)
        counted.append(moved)
        return out

    call(rank, rank + 2)  # compiles
    before = reset_peak(device)
    out = call(*rows)
    peak = peak_bytes(device)
    for _ in range(CALLS):
        call(*rows)
    return {
        "seconds": times[2:],
        "waited": statistics.median(one.waited for one in counted[2:]),
        "sent": counted[1].sent,
        "received": counted[1].received,
        "peak_bytes": None if peak is None else max(0, peak - before),
        **_squares(whole, rows, out, device, kind),
    }


def _call(mesh: Any, q: Tensor, k: Tensor, v: Tensor, mode: Mode, backward: bool) -> Tensor:
    """As the default, and searched on small grids too."""
    search, tail = default_setting(q.device.type, 0)
    out = distributed.attention(q, k, v, mesh=mesh, mode=mode, search=search, tail=tail, scale=SCALE)
    if backward:
        torch.autograd.backward(out, torch.ones_like(out))
    return out.detach()


def _squares(whole: Any, rows: Any, out: Tensor, device: str, kind: torch.dtype) -> Said:
    """Sums over sampled queries of |out - exact|^2 and |exact|^2."""
    if rows[0] == rows[1]:
        return {"error": 0.0, "norm": 0.0}
    q, k, v = (torch.from_numpy(np.array(x)).to(device, kind) for x in whole)
    begin, end = (int(row) * q.shape[3] for row in rows)
    at = torch.linspace(begin, end - 1, min(SAMPLE, end - begin), dtype=torch.float64, device=device).long()
    with torch.no_grad():
        exact = exact_attention(q, k, v, scale=SCALE, queries=at).out.float()
    sampled = out.float().flatten(2, 3)[:, :, at - begin]
    return {"error": float((sampled - exact).square().sum()), "norm": float(exact.square().sum())}
