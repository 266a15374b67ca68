"""Calls of dense attention in causal order, and what they are in float64 by one masked softmax."""

from typing import NamedTuple

import torch

from scram.core.calls import EarlierCall


class Earlier(NamedTuple):
    name: str
    length: int
    heads: int = 2
    key_heads: int = 1
    width: int = 5
    value_width: int = 7
    batch: int = 1
    masked: bool = False
    dropout_p: float = 0.0
    offset: float = 0.0
    dtype: torch.dtype = torch.float32

    def __str__(self):
        return self.name


CASES = [
    Earlier("short", 9),
    Earlier("several blocks", 150),
    Earlier("grouped heads and a mask", 70, heads=4, key_heads=2, batch=2, masked=True),
    Earlier("dropout", 40, dropout_p=0.4),
    Earlier("wide", 35, heads=1, width=70, value_width=130),
    Earlier("large common scores", 40, offset=1e3),
    Earlier("empty batch", 8, batch=0),
]


def earlier_call(one, dtype=None):
    dtype = dtype or one.dtype
    chance = torch.Generator().manual_seed(7)

    def drawn(heads, width):
        return torch.randn(one.batch, heads, one.length, width, generator=chance).to(one.dtype).to(dtype)

    mask = None
    if one.masked:
        mask = torch.rand(one.batch, one.key_heads, one.length, generator=chance) < 0.7
        mask[:, 0, :3] = False  # the first queries have no key
    q = drawn(one.heads, one.width)
    k = drawn(one.key_heads, one.width)
    k[..., 0] += one.offset / max(1.0, float(q[..., 0].abs().max()) if q.numel() else 1.0)
    return EarlierCall(
        q=q,
        k=k,
        v=drawn(one.key_heads, one.value_width),
        usable=mask,
        dropout_seed=torch.tensor(5) if one.dropout_p else None,
        rows=None,
        scale=0.6,
        dropout_p=one.dropout_p,
    )


def drawn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def differentiated(call, attend):
    """out, lse and all gradients of what autograd sees through."""
    leaves = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
    out, lse = attend(call._replace(q=leaves[0], k=leaves[1], v=leaves[2]))
    finite = torch.where(lse == -torch.inf, 0, lse)
    total = (out * drawn(out.shape, 1).to(out)).sum(dtype=torch.float64) + (finite * drawn(lse.shape, 2)).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(total, leaves)]


def by_engine(call, attend, backward):
    """out, lse and all gradients of an engine with functions of its own."""
    out, lse = attend(call)
    grad_lse = torch.where(lse.cpu() == -torch.inf, 0, drawn(lse.shape, 2)).to(lse)
    return [out, lse, *backward(call, out, lse, drawn(out.shape, 1).to(out), grad_lse)]
