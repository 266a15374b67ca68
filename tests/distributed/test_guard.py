"""A backward pass that fails on one rank fails on all."""

import pytest
import torch

from scram.distributed.guard import _Guarded
from support import failing_jobs
from support.sharded import on_ranks


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["gather", "heads", "ring"])
def test_a_rank_that_raises_in_the_backward_pass(mode):
    said = on_ranks(3, failing_jobs.raised, change="late gradient", mode=mode, who=1, backward=True)
    assert said[1] == "RuntimeError: no gradient"
    for rank in (0, 2):
        assert "scram.distributed.attention failed on rank 1: RuntimeError: no gradient" in said[rank]


def test_gradients_are_those_of_the_graph():
    class Alone:
        from contextlib import nullcontext as together

    a, b, c = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    fixed = torch.randn(3, dtype=torch.float64)

    def run(a, b, c, fixed):
        return a * b * fixed + 0 * a

    out = _Guarded.apply(Alone, run, a, b, c, fixed)
    for _ in range(2):
        grads = torch.autograd.grad(out.sum(), (a, b, c), retain_graph=True, allow_unused=True)
        torch.testing.assert_close(grads[:2], (b * fixed, a * fixed))
        assert grads[2] is None
