"""One table of estimates for every implementation: a case of `cases`, and how it is estimated."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import scram
from scram.core import ops
from scram.core.calls import DrawnTailCall
from scram.engines import dispatch
from support.cases import Case, Tensors, assert_as_near_float64, gradients, make_tensors, named, size

HYBRID = scram.DrawnKeys(samples=9, seed=11)
CELLS = scram.DrawnKeys(samples=12, stratified=True, seed=11)
SNIS = scram.Snis(samples=17, alpha=0.4, bandwidth=0.8, seed=11)
DROPOUT_SEED = 3  # of torch's generator
WALKS = scram.MetropolisHastings(samples=17, chains_per_mode=2, bandwidth=0.8, seed=11)


@dataclass(frozen=True)
class Estimated:
    case: Case
    method: scram.core.tails.base.Tail

    def __str__(self) -> str:
        return f"{type(self.method).__name__}-{self.case}"


FAR = {"grid": (9, 19), "kappa": 1, "radius": 1}
ESTIMATES = [
    Estimated(named("rank 1"), HYBRID),
    Estimated(named("rank 2"), replace(HYBRID, samples=1)),
    Estimated(named("rank 3"), HYBRID),
    Estimated(named("rank 4"), CELLS),
    Estimated(named("unequal grids"), replace(HYBRID, samples=1000)),
    Estimated(named("one key"), HYBRID),
    Estimated(named("causal", mask="batch"), HYBRID),
    Estimated(named("causal, masked, separated"), CELLS),
    Estimated(named("mask of the batch"), CELLS),
    Estimated(named("mask of each head"), HYBRID),
    Estimated(named("one row fully masked"), HYBRID),
    Estimated(named("grouped heads"), HYBRID),
    Estimated(named("one key head"), CELLS),
    Estimated(named("width 3, values 60"), CELLS),
    Estimated(named("radius per axis"), HYBRID),
    Estimated(named("radius over the grid"), HYBRID),
    Estimated(named("strided"), HYBRID),
    Estimated(named("empty batch"), HYBRID),
    Estimated(named("float64"), CELLS),
    Estimated(named("float16"), HYBRID),
    Estimated(named("bfloat16"), HYBRID),
    Estimated(named("bfloat16 l2"), CELLS),
    Estimated(named("cosine"), HYBRID),
    Estimated(named("extra and a masked row"), HYBRID),
    Estimated(named("dropout"), HYBRID),
    Estimated(Case("dropout in causal order", heads=2, key_heads=1, causal=True, mask="head", dropout_p=0.3), CELLS),
    Estimated(Case("dropout of bfloat16", dropout_p=0.3, dtype=torch.bfloat16), HYBRID),
    Estimated(Case("several blocks", **FAR, heads=2, key_heads=1), replace(HYBRID, samples=40)),
    Estimated(Case("blocks in order", **FAR, causal=True, mask="batch", dropout_p=0.3), replace(HYBRID, samples=40)),
    Estimated(named("rank 1"), replace(SNIS, samples=1)),
    Estimated(named("rank 2"), replace(SNIS, alpha=0.0)),
    Estimated(named("rank 3"), replace(SNIS, bandwidth=100.0)),
    Estimated(named("unequal grids"), SNIS),
    Estimated(named("one key"), SNIS),
    Estimated(named("causal, masked, separated"), SNIS),
    Estimated(named("mask of the batch"), SNIS),
    Estimated(named("one row fully masked"), SNIS),
    Estimated(named("one key head"), SNIS),
    Estimated(named("strided"), SNIS),
    Estimated(named("empty batch"), SNIS),
    Estimated(named("float64"), SNIS),
    Estimated(named("float16"), SNIS),
    Estimated(named("bfloat16 l2"), SNIS),
    Estimated(named("extra and a masked row"), SNIS),
    Estimated(named("rank 2"), replace(WALKS, samples=3, burn_in=2)),
    Estimated(named("rank 4"), WALKS),
    Estimated(named("unequal grids"), replace(WALKS, burn_in=4)),
    Estimated(named("radius 0, kappa 1"), replace(WALKS, chains_per_mode=1)),
    Estimated(named("one key"), WALKS),
    Estimated(named("causal, masked, separated"), WALKS),
    Estimated(named("one row fully masked"), WALKS),
    Estimated(named("one key head"), WALKS),
    Estimated(named("empty batch"), WALKS),
    Estimated(named("float64"), WALKS),
    Estimated(named("bfloat16 l2", extra=0), WALKS),
]
FEW = {"grid": (3, 4), "kappa": 2}
SMALL = [  # that run in Triton's interpreter, too
    Estimated(named("causal, masked, separated", **FEW), CELLS),
    Estimated(named("rank 1", grid=(9,), extra=1), HYBRID),
    Estimated(named("one key head", grid=(2, 3), width=70, value_width=70), HYBRID),
    Estimated(named("empty batch"), HYBRID),
    Estimated(Case("dropout", **FEW, causal=True, dropout_p=0.4), HYBRID),
    Estimated(named("causal, masked, separated", **FEW), replace(SNIS, samples=7)),
    Estimated(named("extra and a masked row", **FEW), replace(SNIS, samples=7)),
    Estimated(named("rank 3", grid=(2, 2, 3)), replace(WALKS, samples=7, burn_in=1)),
    Estimated(named("one row fully masked", grid=(3, 3)), replace(WALKS, samples=6, chains_per_mode=1)),
]


def estimated(name: str) -> Estimated:
    """The row that prints so."""
    return next(one for one in ESTIMATES if str(one) == name)


def run_estimate(one: Estimated, tensors: Tensors, leaves: list[Tensor], impl: str) -> scram.Estimate:
    q, k, v, *extra = leaves
    how = {
        "radius": one.case.radius,
        "causal": one.case.causal,
        "key_mask": tensors.key_mask,
        "score": one.case.score,
        "extra": tuple(extra) if extra else None,
        "impl": impl,
    }
    if not one.case.dropout_p:
        return scram.estimate(q, k, v, tensors.matches, method=one.method, **how)
    torch.manual_seed(DROPOUT_SEED)
    more = {"dropout_p": one.case.dropout_p}
    made = scram.attend(q, k, v, tensors.matches, tail=one.method, **more, **how)
    return scram.Estimate(made.out, made.lse, None, None, None, None, one.method)


def everything(one: Estimated, tensors: Tensors, impl: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """out, lse and all gradients; and the diagnostics."""
    leaves = tensors.leaves(dtype)
    made = run_estimate(one, tensors, leaves, impl)
    lse = torch.zeros(made.out.shape[:-1], device=made.out.device) if made.lse is None else made.lse
    exact = [made.out.detach().cpu(), lse.detach().cpu()]
    grads = gradients(scram.Attended(made.out.cpu(), lse.cpu()), leaves)
    told = [made.variance, made.ess, made.acceptance, made.rhat]
    return exact + [x.cpu() for x in grads], [x.cpu() for x in told if x is not None]


def assert_told(truth: list[Tensor], told: list[Tensor]) -> None:
    """Diagnostics to a percent: they are estimates themselves."""
    for exact, ours in zip(truth, told, strict=True):
        assert ours.shape == exact.shape
        assert (ours.isfinite() == exact.isfinite()).all()
        assert size(torch.where(exact.isfinite(), ours.double() - exact, 0)) <= 0.01 * size(exact) + 1e-9


def tensors_of(one: Estimated, seed: int = 0) -> Tensors:
    return make_tensors(one.case, seed)


def assert_estimated_as_near_float64(one: Estimated, impl: str) -> None:
    """`impl` estimates as near float64 as the reference does in the same dtype; its diagnostics agree."""
    if impl == "numba" and len(one.case.grid) == 4:
        pytest.skip("its loops over the axes run on rank 3, those of windows on every rank")
    tensors = tensors_of(one)
    truth, told_truth = everything(one, tensors, "reference", torch.float64)
    same, _ = everything(one, tensors, "reference", one.case.dtype)
    ours, told = everything(one, tensors, impl, one.case.dtype)
    assert_as_near_float64(truth, same, ours, size)
    assert_told(told_truth, told)


def tail_of_large_scores(impl: str, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """A hybrid's tail joined with a head where all scores share 10000: out, lse and the gradients of both."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(1, 2, 7, 8, 4)] * 4 + [(1, 2, 7, 8)]
    leaves = [torch.randn(shape, generator=generator) for shape in shapes]
    leaves[0][..., 0], leaves[1][..., 0] = 100, 200
    leaves[4] += 10001
    leaves = [x.to(device, dtype).requires_grad_() for x in leaves]
    q, k, v, *head = leaves
    index = torch.arange(2 * 56, dtype=torch.int32, device=device).reshape(1, 2, 7, 8, 1) % 56
    call = DrawnTailCall(
        q, k, v, index, None, *head, torch.tensor(11), None, None, 20, False, (1, 1), False, 0.5, 0.0, "query"
    )
    out, lse, *_ = ops.drawn_tail(dispatch.ENGINES[impl], call)
    wish = torch.randn(out.shape, generator=generator).to(device, dtype)
    grads = torch.autograd.grad((out * wish).sum() + lse.sum(), leaves)
    return [x.detach().cpu() for x in (out, lse, *grads)]
