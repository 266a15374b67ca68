"""Processes that hold shards, and what they compare: each makes the whole tensors, and keeps its rows of them."""

import atexit
import tempfile
import traceback
import warnings
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from scram.layout_hints import LayoutWarning

TIMEOUT = 240  # seconds, of a job
pools = {}


class Pool:
    """Ranks that wait for jobs: to start one takes longer than what it is asked."""

    def __init__(self, size):
        context = mp.get_context("spawn")
        file = Path(tempfile.mkdtemp()) / "meet"
        ends = [context.Pipe() for _ in range(size)]
        self.ends = [end for end, _ in ends]
        self.processes = [
            context.Process(target=serve, args=(rank, size, str(file), end), daemon=True)
            for rank, (_, end) in enumerate(ends)
        ]
        for process in self.processes:
            process.start()

    def run(self, job, **arguments):
        for end in self.ends:
            end.send((job.__module__, job.__name__, arguments))
        said = []
        for rank, end in enumerate(self.ends):
            if not end.poll(TIMEOUT):
                self.stop()
                raise TimeoutError(f"{job.__name__}: rank {rank} did not answer; {said}")
            said.append(end.recv())
        wrong = [f"rank {rank}:\n{words}" for rank, (ok, words) in enumerate(said) if not ok]
        assert not wrong, "\n".join(wrong)
        return [answer for _, answer in said]

    def stop(self):
        for process in self.processes:
            process.kill()
            process.join()


def on_ranks(size, job, **arguments):
    """What job(mesh, **arguments) returns on each of `size` ranks; `job` is a function of a module of `tests`."""
    if size not in pools or not all(process.is_alive() for process in pools[size].processes):
        pools[size] = Pool(size)
        atexit.register(pools[size].stop)
    return pools[size].run(job, **arguments)


def serve(rank, size, file, end):
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", LayoutWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    while True:
        try:
            module, name, arguments = end.recv()
        except EOFError:
            return
        try:
            end.send((True, getattr(import_module(module), name)(mesh, **arguments)))
        except Exception:
            end.send((False, traceback.format_exc()))


def tensors(grid, key_grid, heads=2, key_heads=1, dtype=torch.float64, seed=0):
    """q, k, v of the whole grids, with gradients."""
    make = torch.Generator().manual_seed(seed)
    shapes = (2, heads, *grid, 4), (2, key_heads, *key_grid, 4), (2, key_heads, *key_grid, 3)
    return [torch.randn(shape, generator=make, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


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
