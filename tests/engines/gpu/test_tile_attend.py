"""The Triton engine's attention of whole tiles: its kernels, pieces and blocks; digits and NaN."""

from dataclasses import replace

import pytest
import torch

import scram
from support.cases import (
    CASES,
    INTERPRETED,
    assert_as_near_float64,
    assert_attended_as_near_float64,
    gradients,
    make_tensors,
    named,
    run_attend,
    size,
)

pytestmark = pytest.mark.gpu


def both_orders():
    """Every case with sums in any order and in a fixed one; in the interpreter by turns."""
    for number, case in enumerate(CASES):
        here = case.name in INTERPRETED["tile attend"]
        for fixed_order in (False, True):
            marks = [pytest.mark.interpreted] * (here and number % 2 == fixed_order)
            yield pytest.param(replace(case, window="tile"), fixed_order, marks=marks, id=f"{case}-{fixed_order}")


@pytest.mark.parametrize(("case", "fixed_order"), list(both_orders()))
def test_attends_as_near_float64_as_the_reference(case, fixed_order, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: fixed_order)
    assert_attended_as_near_float64(case, make_tensors(case), "triton")


@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["rank 1", "empty batch"])
@pytest.mark.parametrize("fixed_order", [False, True])
def test_kernels_of_both_passes(name, fixed_order, launched, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: fixed_order)
    case = named(name, window="tile")
    tensors = make_tensors(case)
    leaves = tensors.leaves(case.dtype)
    gradients(run_attend(case, tensors, leaves, "triton"), leaves)
    kernels = ["cells_kernel", "tile_attend_kernel", "cells_kernel", "tile_backward_kernel"]
    assert launched == ([*kernels, *["tile_collect_kernel"] * fixed_order] if case.batch else [])


@pytest.mark.interpreted
@pytest.mark.parametrize("repeatable", [False, True])
@pytest.mark.parametrize(
    ("width", "value_width", "dtype"),
    [(3, 70, "float32"), (64, 128, "float32"), (66, 64, "float32"), (16, 130, "float16"), (130, 16, "float16")],
)
def test_tiles_with_features_and_values_in_unlike_numbers_of_pieces(width, value_width, dtype, repeatable, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: repeatable)
    changes = {"width": width, "value_width": value_width, "dtype": getattr(torch, dtype), "extra": 2}
    case = named("rank 1", grid=(20,), kappa=1, window="tile", **changes)
    assert_attended_as_near_float64(case, make_tensors(case), "triton")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("width", "value_width"), [(33, 8), (16, 33), (100, 16), (64, 16), (20, 33), (8, 64)])
def test_halves_with_features_and_values_of_unlike_widths(width, value_width, causal):
    """The compiler's fault that `tile_pieces` goes around; rows of odd widths are not loaded ahead."""
    changes = {"width": width, "value_width": value_width, "dtype": torch.float16, "causal": causal, "extra": 0}
    case = named("rank 2", window="tile", **changes)
    assert_attended_as_near_float64(case, make_tensors(case), "triton")


@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_minus_infinity_and_near_it_in_a_tile(dtype, causal, device):
    if device == "cuda" and dtype == torch.bfloat16:
        pytest.skip("products are fused there: scores beyond 2e9 overflow, as README says under Limits")
    case = named("rank 1", grid=(6,), width=4, value_width=4, dtype=dtype, kappa=1, causal=causal, window="tile")
    tensors = make_tensors(case)
    tensors.k.abs_().add_(0.1)
    tensors.k[0, 0, 5] = 1e16
    tensors.q[0, 0, 1], tensors.q[0, 0, 2] = -torch.inf, -1e16
    ours, expected = (run_attend(case, tensors, tensors.leaves(dtype), impl) for impl in ("triton", "reference"))
    assert expected.out[0, 0, 1].isnan().all()
    torch.testing.assert_close(ours.out, expected.out, rtol=1e-2, atol=1e-2, equal_nan=True)
    torch.testing.assert_close(ours.lse, expected.lse, rtol=1e-2, atol=1e-2, equal_nan=True)


@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("repeatable", [False, True])
@pytest.mark.parametrize("limit", ["causal", "mask"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_of_nan_spoils_no_key_that_it_may_not_attend(dtype, limit, repeatable, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: repeatable)
    q, k, v = torch.randn(3, 1, 1, 4, 8, generator=torch.Generator().manual_seed(0)).to(dtype).unbind()
    q[0, 0, 1] = torch.nan
    found = scram.Matches(torch.arange(4, dtype=torch.int32).view(1, 1, 4, 1), torch.zeros(1, 1, 4, 1), (4,))
    mask = torch.tensor([[True, True, True, False]])
    how = {"causal": True} if limit == "causal" else {"key_mask": mask}
    spoiled = {}
    for window in ("query", "tile"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = scram.attend(*leaves, found, window=window, impl="triton", radius=3, **how).out
        spoiled[window] = [x.isnan().any(-1).flatten().tolist() for x in torch.autograd.grad(out.sum(), leaves)]
    may = [True, True, False, False] if limit == "causal" else mask[0].tolist()
    assert spoiled["tile"] == spoiled["query"] == [[False, True, False, False], may, may]


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "changes",
    [
        {"grid": (9, 8), "key_grid": (20, 27), "kappa": 3},  # several tiles; lists longer than a program takes at once
        {"grid": (8, 9), "key_grid": (10, 14), "radius": 3, "extra": 2},  # cells that do not divide a block
        {"grid": (70,), "key_grid": (300,), "radius": 40},  # cells larger than a block
        {"grid": (70,), "key_grid": (200,), "radius": 40, "repeatable": True},
        {"grid": (9, 9), "kappa": 17},  # more corners than one program sorts
        {"grid": (5, 6), "width": 70, "value_width": 130, "extra": 1},  # pieces of features
    ],
    ids=str,
)
def test_tiles_of_all_sizes(changes, monkeypatch):
    repeatable = changes.pop("repeatable", False)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: repeatable)
    case = named("rank 2", window="tile", **changes)
    assert_attended_as_near_float64(case, make_tensors(case), "triton")


@pytest.mark.interpreted
@pytest.mark.parametrize("repeatable", [False, True])
@pytest.mark.parametrize(("gradient", "value"), [(2**-14, 1), (1, 2**-7), (32, 2**9)])
def test_slopes_of_float16_keep_their_digits(gradient, value, repeatable, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: repeatable)
    case = named("float16", window="tile", extra=0)
    tensors = make_tensors(case)
    tensors.v.mul_(value)
    found = []
    for impl, dtype in (("reference", torch.float64), ("reference", case.dtype), ("triton", case.dtype)):
        leaves = tensors.leaves(dtype)
        out = run_attend(case, tensors, leaves, impl).out
        above = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)) * gradient
        found.append(torch.autograd.grad(out, leaves, above.half().to(dtype)))
    assert_as_near_float64(*found, size)


@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # NumPy's, whose maximum the interpreter takes
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_nan_reaches_no_pair_that_is_none_in_a_tile(causal):
    case = named("rank 1", grid=(70,), kappa=1, causal=causal, window="tile")
    for which in range(3):
        tensors = make_tensors(case)
        tensors.matches.index.copy_(torch.arange(70).reshape(1, 1, 70, 1))
        (tensors.q, tensors.k, tensors.v)[which][0, 0, 40, 1] = torch.nan
        ours, theirs = (
            run_attend(case, tensors, tensors.leaves(torch.float32), impl) for impl in ("triton", "reference")
        )
        assert torch.equal(ours.out.isnan(), theirs.out.isnan())
        assert torch.equal(ours.lse.isnan(), theirs.lse.isnan())
        leaves = tensors.leaves(torch.float32)
        dq, dk, dv = gradients(run_attend(case, tensors, leaves, "triton"), leaves)
        assert dq[0, 0, :40].isfinite().all() == (causal or which == 0)
        assert dq[0, 0, 64:].isfinite().all()
        if causal and which == 0:
            assert dk[0, 0, 41:].isfinite().all()
            assert dv[0, 0, 41:].isfinite().all()
