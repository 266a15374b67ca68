"""What ranks are asked in tests/distributed where a call fails: each says its error, and that the group still works."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import scram
import scram.distributed
from scram.distributed.mesh import Ranks
from support.sharded import tensors
from support.sharded_jobs import ENGINE, SHORT, own_part


def raised(mesh, change, mode="ring", who=None, backward=False):
    """The error of this rank where `change` is made on rank `who`, on all where None; the group still works after."""
    rank = mesh.get_local_rank()
    size, heads = mesh.size(), mesh.size() if mode == "heads" and change else 1
    q, k, v = (own_part(mesh, x, [2] * size) for x in tensors((2 * size, 3), (2 * size, 3), 4 * heads, heads))
    how = {"mode": mode, "impl": ENGINE, "search": scram.Search(**SHORT), "tail": None, "mesh": mesh}
    mine = rank == who or who is None
    if change == "score" and mine:
        how["score"] = bad_score
    elif change == "score":
        how["score"] = good_score
    elif change == "late score":
        how["score"] = LateScore(mine)
    elif change == "late gradient":
        how["score"] = BrokenScore(mine)
    elif change == "width" and mine:
        k = k[..., :3]
    elif change == "batch" and mine:
        q, k, v = (x[:1] for x in (q, k, v))
    elif change == "grad" and mine:
        k = k.detach()
    elif change == "no keys":
        k, v = k[:, :, :0], v[:, :, :0]
    elif mine:
        how |= change
    message = None
    try:
        out = scram.distributed.attention(q, k, v, **how)
        if backward:
            out.sum().backward()
    except (ValueError, TypeError, RuntimeError) as error:
        message = f"{type(error).__name__}: {error}"
    one = torch.ones(())
    dist.all_reduce(one, group=mesh.get_group())
    assert one == mesh.size()
    return message


def good_score(q, k):
    return (q * k).sum(-1)


def bad_score(q, k):
    raise RuntimeError("no such score")


good_score.__qualname__ = bad_score.__qualname__ = "score"


class LateScore:
    """Fails in the backward pass, where the ring goes round again."""

    def __init__(self, fails):
        self.fails = fails

    def __call__(self, q, k):
        if self.fails and torch.is_grad_enabled():
            raise RuntimeError("too late")
        return (q * k).sum(-1)


class BrokenScore:
    """Its gradient cannot be computed."""

    def __init__(self, fails):
        self.fails = fails

    def __call__(self, q, k):
        return Broken.apply((q * k).sum(-1), self.fails)


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fails:
            raise RuntimeError("no gradient")
        return grad, None


def two_dimensions(mesh):
    both = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("a", "b"))
    message = ""
    try:
        scram.distributed.attention(*tensors((2, 3), (2, 3)), mesh=both)
    except ValueError as error:
        message = str(error)
    assert Ranks(both["b"]).size == mesh.size()
    return message
