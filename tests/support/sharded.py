"""Processes that hold shards, and what they compare: each makes the whole tensors, and keeps its rows of them."""

import atexit
import gc
import os
import pickle
import signal
import sys
import tempfile
import traceback
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numba
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

import scram
from scram.core.first_call import AccuracyWarning
from scram.core.layout_hints import LayoutWarning
from scram.core.resolve import Request
from scram.distributed.shards import Call, Shards

TIMEOUT = 240  # seconds, of a job
LOADED = (
    "scram.engines.cpu.engine",
    "support.sharded_jobs",
    "support.dtensor_jobs",
    "support.failing_jobs",
    "support.traffic_jobs",
    "support.training_jobs",
)
FORK = "fork" if sys.platform == "linux" else "spawn"


def on_ranks(size, job, **arguments):
    """What job(mesh, **arguments) returns on each of `size` ranks; `job` is a function of a module of `tests`."""
    home = started()
    try:
        home.send(size)
        home.send_bytes(pickle.dumps((job.__module__, job.__name__, arguments)))
        said = [pickle.loads(home.recv_bytes()) for _ in range(size)]
    except BaseException:  # what comes late is not the answer to the next question
        home.close()
        started.cache_clear()
        raise
    wrong = [f"rank {rank}:\n{words}" for rank, (ok, words) in enumerate(said) if not ok]
    assert not wrong, "\n".join(wrong)
    return [answer for _, answer in said]


@cache
def started():
    """The end of a pipe to a process that has imported what jobs need, and from which ranks are forked."""
    context = mp.get_context("spawn")
    mine, end = context.Pipe()
    process = context.Process(target=keep, args=(end,))
    with patch.dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"):  # no threads where it forks
        process.start()
    end.close()

    def stop():
        mine.close()
        process.join()

    atexit.register(stop)
    return mine


def keep(end):
    """Passes on what is asked, to ranks that wait for more: pools of them by their number."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with who asks
    torch.set_num_threads(1)
    for name in LOADED:
        import_module(name)
    numba.njit(lambda x: x)(1)  # loads what Numba needs for any function
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    pools = {}
    while True:
        try:
            size = end.recv()
        except EOFError:
            break
        if size not in pools or not all(process.is_alive() for process in pools[size].processes):
            if size in pools:
                pools[size].stop()
            pools[size] = Pool(size, end)
        for said in pools[size].run(end.recv_bytes()):
            end.send_bytes(said)
    for pool in pools.values():
        pool.stop()


class Pool:
    """Ranks that wait for jobs: to start one takes longer than what it is asked."""

    def __init__(self, size, *others):
        context = mp.get_context(FORK)
        file = Path(tempfile.mkdtemp()) / "meet"
        self.ends, self.processes = [], []
        for rank in range(size):
            mine, end = context.Pipe()
            self.ends.append(mine)
            inherited = (*others, *self.ends) if FORK == "fork" else ()
            process = context.Process(target=serve, args=(rank, size, str(file), end, inherited), daemon=True)
            process.start()
            self.processes.append(process)
            end.close()

    def run(self, asked):
        """The answers of all ranks, pickled; of some that do not come, why."""
        for end in self.ends:
            end.send_bytes(asked)
        said = []
        for end in self.ends:
            try:
                if not end.poll(TIMEOUT):
                    raise EOFError(f"no answer in {TIMEOUT} s")
                said.append(end.recv_bytes())
            except (EOFError, OSError) as error:
                self.stop()
                said.append(pickle.dumps((False, f"its process was ended: {error}")))
        return said

    def stop(self):
        for process in self.processes:
            process.kill()
            process.join()


def serve(rank, size, file, end, inherited):
    for other in inherited:  # or nobody would notice that a process has gone
        other.close()
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", LayoutWarning)
    warnings.simplefilter("ignore", AccuracyWarning)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    while True:
        try:
            module, name, arguments = pickle.loads(end.recv_bytes())
        except EOFError:
            return
        try:
            said = pickle.dumps((True, getattr(import_module(module), name)(mesh, **arguments)))
        except Exception:
            said = pickle.dumps((False, traceback.format_exc()))
        end.send_bytes(said)


def tensors(grid, key_grid, heads=2, key_heads=1, dtype=torch.float64, seed=0):
    """q, k, v of the whole grids, with gradients."""
    make = torch.Generator().manual_seed(seed)
    shapes = (2, heads, *grid, 4), (2, key_heads, *key_grid, 4), (2, key_heads, *key_grid, 3)
    return [torch.randn(shape, generator=make, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def shards_of(x, rows, size=2, halo=None, **options):
    """What a rank knows of a call, with x for its q, k and v, and `rows` of each rank; no process is started."""
    request = Request(**{"search": scram.Search(), "tail": None, **options})
    return Shards(
        ranks=SimpleNamespace(size=size),
        q=x,
        k=x,
        v=x,
        key_mask=None,
        call=Call(request, request, halo),
        queries=rows,
        keys=rows,
        seed=0,
        tail_seed=0,
    )


def cut(x, rows, axis=2):
    """The shards of a tensor, as leaves of their own."""
    parts = x.detach().split(list(rows), axis)
    return [part.clone().requires_grad_(x.requires_grad) for part in parts]


def mask_of(kind, key_grid, heads=2):
    """bool [B, *G'] or [B, H, *G'] of the whole key grid, or None."""
    if kind is None:
        return None
    make = torch.Generator().manual_seed(5)
    shape = (2, *key_grid) if kind == "keys" else (2, heads, *key_grid)
    return torch.rand(shape, generator=make) < 0.6
