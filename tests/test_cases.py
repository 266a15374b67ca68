"""The table of cases: every implementation against plain Python and against the reference."""

from dataclasses import replace

import pytest
import torch

import plain
import scram
from cases import CASES, EXACT, assert_attended_as_near_float64, gradients, make_tensors, run_attend, run_search
from scram.noise import draw_seed


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_field_is_that_of_the_plain_loop(case, impl):
    tensors = make_tensors(case, integer=True)
    found = run_search(case, tensors, impl)
    index, score = plain.search(case, tensors, seed=7)
    assert torch.equal(found.index, index)
    assert torch.equal(found.score, score)
    assert found.key_grid == case.keys_grid


@pytest.mark.parametrize("window", ["query", "tile"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_attends_what_plain_python_attends(case, window):
    case = replace(case, window=window)
    tensors = make_tensors(case)
    leaves, plain_leaves = tensors.leaves(torch.float64), tensors.leaves(torch.float64)
    attended = run_attend(case, tensors, leaves, "reference", dropout_seed=3)
    torch.manual_seed(3)
    expected = scram.Attended(*plain.attend(case, tensors, plain_leaves, int(draw_seed())))
    torch.testing.assert_close(attended.out, expected.out)
    torch.testing.assert_close(attended.lse, expected.lse)
    if case.batch:
        for ours, theirs in zip(gradients(attended, leaves), gradients(expected, plain_leaves), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attend_is_as_near_float64_as_the_reference(case, impl):
    assert_attended_as_near_float64(case, make_tensors(case), impl, by=_largest)


def _largest(x):
    finite = torch.where(x.isfinite(), x, 0).abs()
    return float(finite.max()) if x.numel() else 0.0
