"""What ranks are asked in tests of traffic and of the cost model."""

from dataclasses import asdict

import torch

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
    how = {"search": scram.Search(seed=0), "tail": None, "impl": "reference"}
    with scram.distributed.traffic() as forward:
        out = scram.distributed.attention(q, k, v, mesh=mesh, mode=mode, **how)
    with scram.distributed.traffic() as backward:
        out.sum().backward()
    return {"forward": asdict(forward), "backward": asdict(backward)}
