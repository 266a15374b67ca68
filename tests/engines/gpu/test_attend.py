"""The Triton engine's attention, each query on its own: its kernels, and gradients with the same bits every time."""

from dataclasses import replace

import pytest
import torch

import scram
from scram.engines.gpu.attend import query_collect
from support.cases import CASES, assert_attended_as_near_float64, gradients, make_tensors, named, run_attend, table
from support.in_interpreter import INTERPRETED

pytestmark = pytest.mark.gpu


@pytest.fixture
def repeatable(monkeypatch):
    """As torch.use_deterministic_algorithms has it, for our kernels alone."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(query_collect, "LEAST_SHARE", 20)  # few, so that there may be shares beyond the first


@pytest.mark.parametrize("case", table(CASES, "repeatable gradients"))
def test_repeatable_gradients_are_as_near_float64_as_the_reference(case, repeatable):
    if INTERPRETED and len(case.grid) > 1:  # a program for each key
        case = replace(case, grid=(4, 4))
    assert_attended_as_near_float64(case, make_tensors(case), "triton")


@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["rank 1", "empty batch"])
@pytest.mark.parametrize("fixed_order", [False, True])
def test_kernels_of_both_passes(name, fixed_order, launched, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: fixed_order)
    monkeypatch.setattr(query_collect, "LEAST_SHARE", 20)
    case = named(name)
    tensors = make_tensors(case)
    leaves = tensors.leaves(case.dtype)
    gradients(run_attend(case, tensors, leaves, "triton"), leaves)
    kernels = ["share_kernel", "collect_kernel", "collect_kernel"] if fixed_order else []
    assert launched == (["attend_kernel", "backward_kernel", *kernels] if case.batch else [])


@pytest.mark.interpreted
def test_repeatable_gradients_of_a_key_that_all_queries_want(repeatable, monkeypatch):
    monkeypatch.setattr(query_collect, "LEAST_SHARE", 5)
    case = named("rank 2", grid=(8, 8), key_grid=(14, 14), kappa=2, sweeps=1)
    tensors = make_tensors(case)
    tensors.matches.index[..., 0] = 92
    tensors.matches.index[..., ::2, :, 1] = 119  # half of them another one, near enough that windows overlap
    assert_attended_as_near_float64(case, tensors, "triton")


@pytest.mark.interpreted
def test_repeatable_gradients_of_extra_keys_add_up_over_programs(repeatable):
    case = named("extra and a masked row", grid=(9, 9), key_grid=(4, 4), sweeps=1)
    assert_attended_as_near_float64(case, make_tensors(case), "triton")


@pytest.mark.interpreted
def test_no_extra_keys_at_all_with_repeatable_gradients(repeatable):
    q = torch.randn(1, 1, 140, 4, requires_grad=True)  # several programs
    found = scram.search(q, q, search=scram.Search(sweeps=0, seed=0), impl="triton")
    none = torch.zeros(1, 1, 0, 4, requires_grad=True)
    out = scram.attend(q, q, q, found, extra=(none, none), impl="triton").out
    assert torch.autograd.grad(out.sum(), none)[0].shape == none.shape
