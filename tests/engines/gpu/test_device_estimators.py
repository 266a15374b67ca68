"""The Triton estimators on a CUDA device: large rows, repeatable gradients, a NaN that stays where it is."""

import pytest
import torch

import scram
from support.cases import Case, named
from support.estimates import Estimated, assert_estimated_as_near_float64

pytestmark = pytest.mark.gpu


WIDE = {"grid": (20, 20), "width": 64, "value_width": 64}
FAR = {**WIDE, "grid": (30, 30), "kappa": 1}
LARGE = [  # blocks as they are multiplied in practice, several of them
    Estimated(named("bfloat16", **WIDE, kappa=1), scram.DrawnKeys(300, seed=11)),
    Estimated(named("bfloat16", **WIDE, kappa=9, causal=True), scram.DrawnKeys(300, seed=11)),
    Estimated(named("float16", **WIDE), scram.DrawnKeys(300, stratified=True, seed=11)),
    Estimated(
        named("bfloat16", **{**WIDE, "width": 130, "value_width": 130}, mask="head"), scram.DrawnKeys(70, seed=11)
    ),
    Estimated(named("bfloat16 l2", **WIDE), scram.DrawnKeys(300, stratified=True, seed=11)),
    Estimated(named("rank 2", **WIDE), scram.DrawnKeys(300, seed=11)),
    Estimated(Case("dropout", **WIDE, causal=True, dropout_p=0.3, dtype=torch.bfloat16), scram.DrawnKeys(300, seed=11)),
    Estimated(
        Case("blocks", **FAR, causal=True, dropout_p=0.3, dtype=torch.bfloat16),
        scram.DrawnKeys(300, seed=11),
    ),
    Estimated(Case("blocks of float16", **FAR, dtype=torch.float16), scram.DrawnKeys(300, stratified=True, seed=11)),
    Estimated(Case("blocks of float32", **FAR, causal=True, mask="head"), scram.DrawnKeys(300, seed=11)),
]


@pytest.mark.parametrize("one", LARGE, ids=str)
def test_as_near_float64_as_the_reference(one):
    assert_estimated_as_near_float64(one, "triton")


METHODS = [
    scram.DrawnKeys(64, seed=0),
    scram.Snis(64, 0.3, seed=0),
    scram.MetropolisHastings(32, seed=0),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_repeatable_gradients_have_the_same_bits(method):
    torch.use_deterministic_algorithms(True)
    try:
        found = []
        for _ in range(2):
            torch.manual_seed(0)
            leaves = [x.requires_grad_() for x in torch.randn(3, 1, 2, 24, 24, 16, device="cuda").unbind()]
            matches = scram.search(*leaves[:2], search=scram.Search(matches=2, seed=1))
            made = scram.estimate(*leaves, matches, method=method, impl="triton")
            found.append(torch.autograd.grad(made.out.square().sum(), leaves))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_later_value_of_nan_reaches_no_earlier_query():
    q, k, v = torch.randn(3, 1, 1, 12, 12, 16, device="cuda").unbind()
    v[0, 0, 6, 0] = torch.nan
    found = scram.search(q, k, search=scram.Search(seed=1), causal=True)
    out = scram.estimate(q, k, v, found, method=scram.DrawnKeys(144, seed=0), causal=True, impl="triton").out.flatten(
        2, 3
    )
    assert out[0, 0, :72].isfinite().all()
    assert out[0, 0, 72:].isnan().all()
