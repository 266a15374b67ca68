"""The Triton estimators on the CPU, in Triton's interpreter; like test_gpu_interpreter.py in a process of its own."""

from dataclasses import replace

import pytest
import torch

from cases import assert_as_near_float64, named
from estimates import (
    CELLS,
    HYBRID,
    SNIS,
    WALKS,
    Estimated,
    assert_told,
    everything,
    size,
    tail_of_large_scores,
    tensors_of,
)
from in_interpreter import interpreted, passes_in_the_interpreter, starts

SMALL = {"grid": (3, 4), "kappa": 2}
ROWS = [
    (Estimated(named("causal, masked, separated", **SMALL), CELLS), False),
    (Estimated(named("rank 1", grid=(9,), extra=1), HYBRID), False),
    (Estimated(named("one key head", grid=(2, 3), width=70, value_width=70), HYBRID), False),
    (Estimated(named("empty batch"), HYBRID), False),
    (Estimated(named("causal, masked, separated", **SMALL), replace(SNIS, samples=7)), True),
    (Estimated(named("extra and a masked row", **SMALL), replace(SNIS, samples=7)), False),
    (Estimated(named("rank 3", grid=(2, 2, 3)), replace(WALKS, samples=7, burn_in=1)), False),
    (Estimated(named("one row fully masked", grid=(3, 3)), replace(WALKS, samples=6, chains_per_mode=1)), True),
]
KERNELS = {
    "Hybrid": ["rank_kernel", "gather_kernel", "tail_kernel", "gather_kernel", "queries_kernel", "keys_kernel"],
    "Snis": ["draw_kernel", "visit_kernel", "draw_kernel", "visit_backward_kernel"],
    "MetropolisHastings": ["walk_kernel", "visit_kernel", "walk_kernel", "visit_backward_kernel"],
}


@starts
def test_in_the_interpreter():
    assert passes_in_the_interpreter(__file__) == len(ROWS) + 1


@interpreted
@pytest.mark.parametrize(("one", "repeatable"), ROWS, ids=str)
def test_as_near_float64_as_the_reference(one, repeatable, launched, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: repeatable)
    tensors = tensors_of(one)
    truth, told_truth = everything(one, tensors, "reference", torch.float64)
    same, _ = everything(one, tensors, "reference", one.case.dtype)
    ours, told = everything(one, tensors, "triton", one.case.dtype)
    assert_as_near_float64(truth, same, ours, size)
    assert_told(told_truth, told)
    ours = [name for name in launched if name not in ("attend_kernel", "backward_kernel")]
    assert ours == (KERNELS[type(one.method).__name__] if one.case.batch else [])


@interpreted
def test_a_large_part_that_all_scores_share_costs_no_digits():
    truth, same = (tail_of_large_scores("reference", dtype) for dtype in (torch.float64, torch.float32))
    assert_as_near_float64(truth, same, tail_of_large_scores("triton", torch.float32), size)
