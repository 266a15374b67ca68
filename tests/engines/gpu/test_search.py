"""The Triton engine's query search: its kernels, its tiles."""

import pytest
import torch

from support import in_interpreter
from support.cases import make_tensors, named, run_search

pytestmark = [pytest.mark.gpu, pytest.mark.interpreted]


@pytest.mark.parametrize("name", ["rank 1", "separated", "no sweeps", "empty batch"])
def test_each_match_starts_and_sweeps_on_its_own(name, launched):
    case = named(name)
    run_search(case, make_tensors(case, integer=True), "triton")
    assert launched.count("sweep_kernel") == (case.kappa * case.sweeps if case.batch else 0)
    assert launched.count("start_kernel") == (case.kappa if case.batch else 0)


def test_the_real_tiles_cover_a_grid_that_they_do_not_divide(monkeypatch):
    monkeypatch.setattr(in_interpreter, "LEAST_QUERIES", 1)
    case = named("rank 2", grid=(9, 17), kappa=1, sweeps=1, gossip=0, propagate="shift")
    tensors = make_tensors(case, integer=True)
    found, expected = (run_search(case, tensors, impl) for impl in ("triton", "reference"))
    assert torch.equal(found.index, expected.index)
