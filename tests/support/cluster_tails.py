"""Calls of the clustered tail for every implementation: a case of `cases`, and clusters drawn at random."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from scram import Attended
from scram.core import ops
from scram.core.calls import ClusterTailCall
from scram.engines import dispatch
from scram.spec.clustering import order_of
from scram.spec.scoring import accumulator
from support.cases import Case, assert_as_near_float64, gradients, make_tensors, named, size
from support.in_interpreter import INTERPRETED
from support.on_device import to
from support.plain_routing import drawn_routes

LEAVES = ("q", "k", "v", "centers", "values", "slope", "near_out", "near_lse")
CONSTANTS = ("variance", "spreads")
CLUSTERED = [
    *(named(name) for name in ("rank 1", "rank 2", "rank 3", "rank 4", "unequal grids", "unequal rank 3")),
    *(named(name) for name in ("one point", "one key", "more matches than keys", "extents of 1", "empty batch")),
    *(named(name) for name in ("mask of the batch", "mask of each head", "one row fully masked", "grouped heads")),
    *(named(name) for name in ("one key head", "width 1", "width 3, values 60", "width 60, values 1", "strided")),
    *(named(name) for name in ("radius per axis", "radius 0, kappa 1", "radius over the grid", "dropout")),
    *(named(name) for name in ("float64", "float16", "bfloat16", "large common scores")),
    Case("several blocks", batch=2, heads=2, key_heads=1, grid=(17, 19), key_grid=(9, 11), width=6, value_width=5),
]


def tail_call(case: Case, clusters: int = 11, keys: int = 0, seed: int = 0) -> ClusterTailCall:
    """Clusters of any keys, a head that some queries do not have, and keys in no cluster where they are masked.

    Moments are drawn, as those of real keys are not: apart for every row. `keys`: of routed clusters, drawn too.
    """
    tensors, generator = make_tensors(case, seed), torch.Generator().manual_seed(seed + 1)
    wide, heads = accumulator(case.dtype), tensors.k.shape[1]
    mask = torch.ones(case.batch, heads, *case.keys_grid, dtype=torch.bool)
    if case.mask != "none":
        mask = tensors.key_mask.unsqueeze(1).expand_as(mask) if case.mask == "batch" else tensors.key_mask
    heads = mask.shape[1]
    label = torch.randint(-1, clusters - 1, mask.shape, generator=generator, dtype=torch.int32)  # the last is empty
    label[~mask] = -1
    one_hot = (label.flatten(2).unsqueeze(-1) == torch.arange(clusters)).to(wide)
    sizes = one_hot.sum(2)

    def means(x: Tensor) -> Tensor:
        x = x.repeat_interleave(heads // x.shape[1], 1).flatten(2, -2).to(wide)
        return one_hot.mT @ x / sizes.clamp(min=1).unsqueeze(-1)

    near_out = torch.randn(*tensors.q.shape[:-1], case.value_width, generator=generator).to(case.dtype)
    near_lse = 2 * torch.randn(tensors.q.shape[:-1], generator=generator, dtype=wide)
    near_lse[torch.rand(near_lse.shape, generator=generator) < 0.2] = -torch.inf
    rows = (case.batch, heads)
    slope = torch.randn(*rows, case.width, case.value_width, generator=generator).to(wide)
    variance = (torch.rand(*rows, case.width, generator=generator) / case.width**0.5).to(wide)
    spreads = (2 * torch.rand(*rows, clusters, generator=generator)).to(wide)
    routed = drawn_routes(sizes.int(), case.heads, case.grid, keys, generator) if keys else None
    return ClusterTailCall(
        q=tensors.q,
        k=tensors.k if keys else None,
        v=tensors.v if keys else None,
        index=tensors.matches.index,
        label=label,
        order=order_of(label) if keys else None,
        centers=means(tensors.k),
        values=means(tensors.v),
        slope=slope,
        sizes=sizes.to(torch.int32),
        variance=variance,
        spreads=spreads,
        routes=routed,
        near_out=near_out,
        near_lse=near_lse + case.offset,
        dropout_seed=torch.tensor(2**40 + 3) if case.dropout_p else None,
        rows=None,
        radius=case.radius if isinstance(case.radius, tuple) else (case.radius,) * len(case.grid),
        scale=case.width**-0.5,
        dropout_p=case.dropout_p,
        extras=2,
        keys=keys,
    )


def run(operator: str, call, impl: str):
    """The result of an operator on the CPU, whatever engine computes it where."""
    if impl == "triton" and any(x.dtype == torch.float64 for x in call if isinstance(x, Tensor)):
        pytest.skip("the Triton engine takes no float64")
    if impl == "triton" and not INTERPRETED:
        return to(getattr(ops, operator)(dispatch.ENGINES[impl], to(call, "cuda")), "cpu")
    return getattr(ops, operator)(dispatch.ENGINES[impl], call)


def run_tail(call: ClusterTailCall, impl: str) -> Attended:
    return run("cluster_tail", call, impl)


def everything(call: ClusterTailCall, impl: str, double: bool = False) -> list[Tensor]:
    """out, lse and the gradients of all leaves that the call has."""
    given = {name: x.detach() for name in LEAVES if (x := getattr(call, name)) is not None}
    given = {name: (x.double() if double else x.clone()).requires_grad_() for name, x in given.items()}
    constants = {name: x.double() for name in CONSTANTS if double and (x := getattr(call, name)) is not None}
    made = run_tail(call._replace(**given, **constants), impl)
    return [x.detach() for x in (made.out, made.lse, *gradients(made, list(given.values())))]


def assert_tail_as_near_float64(call: ClusterTailCall, impl: str, by=size) -> None:
    """`impl` is as near float64 as the reference is in the same dtypes.

    The Triton engine keeps 16 bits of centers and values beside features and values of 16 bits.
    """
    if impl == "triton" and call.q.element_size() == call.out_dtype.itemsize == 2:
        kept = {
            name: x.to(call.q.dtype).to(x.dtype)
            for name in ("centers", "values")
            if (x := getattr(call, name)) is not None
        }
        call = call._replace(**kept)
    truth, same = everything(call, "reference", True), everything(call, "reference")
    assert_as_near_float64(truth, same, everything(call, impl), by)
