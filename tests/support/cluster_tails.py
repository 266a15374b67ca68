"""Calls of the clustered tail for every implementation: a case of `cases`, and clusters drawn at random."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from scram import Attended
from scram.core import ops
from scram.core.calls import ClusterTailCall
from scram.engines import dispatch
from scram.spec.scoring import accumulator
from support.cases import Case, assert_as_near_float64, gradients, make_tensors, named, size
from support.in_interpreter import INTERPRETED
from support.on_device import to

LEAVES = ("q", "centers", "values", "near_out", "near_lse")
CLUSTERED = [
    *(named(name) for name in ("rank 1", "rank 2", "rank 3", "rank 4", "unequal grids", "unequal rank 3")),
    *(named(name) for name in ("one point", "one key", "more matches than keys", "extents of 1", "empty batch")),
    *(named(name) for name in ("mask of the batch", "mask of each head", "one row fully masked", "grouped heads")),
    *(named(name) for name in ("one key head", "width 1", "width 3, values 60", "width 60, values 1", "strided")),
    *(named(name) for name in ("radius per axis", "radius 0, kappa 1", "radius over the grid", "dropout")),
    *(named(name) for name in ("float64", "float16", "bfloat16", "large common scores")),
    Case("several blocks", batch=2, heads=2, key_heads=1, grid=(17, 19), key_grid=(9, 11), width=6, value_width=5),
]


def tail_call(case: Case, clusters: int = 11, gains: bool = False, seed: int = 0) -> ClusterTailCall:
    """Clusters of any keys, a head that some queries do not have, and keys in no cluster where they are masked."""
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
    factors = (2 * torch.rand(sizes.shape, generator=generator)).to(wide) if gains else None
    if factors is not None:
        factors[..., :2] = 0
    radius = case.radius if isinstance(case.radius, tuple) else (case.radius,) * len(case.grid)
    dropout_seed = torch.tensor(2**40 + 3) if case.dropout_p else None
    return ClusterTailCall(
        tensors.q,
        tensors.matches.index,
        label,
        means(tensors.k),
        means(tensors.v),
        sizes.to(torch.int32),
        factors,
        near_out,
        near_lse + case.offset,
        dropout_seed,
        None,
        radius,
        case.width**-0.5,
        case.dropout_p,
        2,
        "query",
    )


def run_tail(call: ClusterTailCall, impl: str) -> Attended:
    if impl == "triton" and call.centers.dtype == torch.float64:
        pytest.skip("the Triton engine takes no float64")
    if impl == "triton" and not INTERPRETED:
        return to(ops.cluster_tail(dispatch.ENGINES[impl], to(call, "cuda")), "cpu")
    return ops.cluster_tail(dispatch.ENGINES[impl], call)


def everything(call: ClusterTailCall, impl: str, double: bool = False) -> list[Tensor]:
    """out, lse and the gradients of all leaves."""
    given = {name: getattr(call, name).detach() for name in LEAVES}
    given = {name: (x.double() if double else x.clone()).requires_grad_() for name, x in given.items()}
    gains = call.gains.double() if double and call.gains is not None else call.gains
    made = run_tail(call._replace(**given, gains=gains), impl)
    return [x.detach() for x in (made.out, made.lse, *gradients(made, list(given.values())))]


def assert_tail_as_near_float64(call: ClusterTailCall, impl: str, by=size) -> None:
    """`impl` is as near float64 as the reference is in the same dtypes."""
    truth, same = everything(call, "reference", True), everything(call, "reference")
    assert_as_near_float64(truth, same, everything(call, impl), by)
