"""The Triton engine's estimators: their kernels, and digits where scores are large."""

import pytest
import torch

import scram
from support.cases import Case, assert_as_near_float64
from support.estimates import (
    SMALL,
    Estimated,
    assert_estimated_as_near_float64,
    everything,
    size,
    tail_of_large_scores,
    tensors_of,
)

pytestmark = [pytest.mark.gpu, pytest.mark.interpreted]


def small(*names):
    rows = {str(one): one for one in SMALL}
    return [rows[name] for name in names]


KERNELS = {
    "DrawnKeys": [
        "draw_order_kernel",
        "gather_kernel",
        "tail_kernel",
        "gather_kernel",
        "queries_kernel",
        "keys_kernel",
    ],
    "Snis": ["draw_kernel", "visit_kernel", "draw_kernel", "visit_backward_kernel"],
    "MetropolisHastings": ["walk_kernel", "visit_kernel", "walk_kernel", "visit_backward_kernel"],
}


@pytest.mark.parametrize(
    "one",
    small(
        "DrawnKeys-rank-1",
        "DrawnKeys-empty-batch",
        "Snis-extra-and-a-masked-row",
        "MetropolisHastings-rank-3",
    ),
    ids=str,
)
def test_kernels_of_both_passes(one, launched):
    everything(one, tensors_of(one), "triton", one.case.dtype)
    windows = {"attend_kernel", "backward_kernel"}
    ours = [name for name in launched if name not in windows]
    assert ours == (KERNELS[type(one.method).__name__] if one.case.batch else [])


@pytest.mark.parametrize(
    "one", small("Snis-causal,-masked,-separated", "MetropolisHastings-one-row-fully-masked"), ids=str
)
def test_repeatable_gradients_are_as_near_float64_as_the_reference(one, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert_estimated_as_near_float64(one, "triton")


def test_a_large_part_that_all_scores_share_costs_no_digits(device):
    truth, same = (tail_of_large_scores("reference", dtype) for dtype in (torch.float64, torch.float32))
    assert_as_near_float64(truth, same, tail_of_large_scores("triton", torch.float32, device), size)


def test_products_of_bfloat16():
    """Triton's interpreter would multiply its bits. Where a device rounds, it cuts digits off: twice the error."""
    case = Case("bfloat16", grid=(9, 19), kappa=1, causal=True, dtype=torch.bfloat16)
    one = Estimated(case, scram.DrawnKeys(samples=9, seed=11))
    tensors = tensors_of(one)
    truth, _ = everything(one, tensors, "reference", torch.float64)
    ours, _ = everything(one, tensors, "triton", torch.bfloat16)
    for exact, found in zip(truth, ours, strict=True):
        assert size(found.double() - exact) <= 4 * torch.finfo(torch.bfloat16).eps * size(exact)
