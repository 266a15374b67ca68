"""What ranks are asked in tests of traffic, of the cost model and of the command line."""

import sys
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

import scram
import scram.distributed


def bytes_sent(mesh, mode, rows, shape):
    """What is counted in the forward and the backward pass; rows of 4 points, as many of keys as of queries."""
    batch, heads, key_heads, width, width_v = shape
    own = rows[mesh.get_local_rank()]
    q, k, v = (
        torch.randn(batch, h, own, 4, e).requires_grad_()
        for h, e in ((heads, width), (key_heads, width), (key_heads, width_v))
    )
    how = {"search": scram.Search(sweeps=1, jumps=(), seed=0), "tail": None, "impl": "reference"}
    with scram.distributed.traffic() as forward:
        out = scram.distributed.attention(q, k, v, mesh=mesh, mode=mode, **how)
    with scram.distributed.traffic() as backward:
        out.sum().backward()
    return {"forward": asdict(forward), "backward": asdict(backward)}


def measures(mesh, **asked):
    """What a rank of `scram bench --distributed` measures."""
    from scram.cli import ranks

    return ranks._measure(mesh, "cpu", **asked)


def simulates(mesh, folder, cases):
    """What a process of benchmarks/distributed_simulation.py does, in the group that is there."""
    benchmarks = str(Path(__file__).parents[2] / "benchmarks")
    with patch.object(sys, "path", [benchmarks, *sys.path]):
        import distributed_simulation as simulation

    with patch.object(dist, "init_process_group"), patch.object(dist, "destroy_process_group"):
        simulation.work(mesh.get_local_rank(), mesh.size(), folder, [simulation.Case(**case) for case in cases])
