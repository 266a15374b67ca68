"""Gradients of the CPU engine: the same bits in any chunks; what cannot be differentiated is refused."""

import pytest
import torch
from torch.autograd import forward_ad

import scram
from scram.engines.cpu import attend_backward
from support.cases import CASES, gradients, make_tensors, run_attend

SETTINGS = scram.Search(matches=2, seed=5, sweeps=3)


@pytest.mark.parametrize("name", ["all at once", "dropout", "extra", "rank 3", "bfloat16"])
def test_gradients_are_the_same_bits_in_any_chunks_and_threads(name, monkeypatch):
    case = next(case for case in CASES if case.name == name)
    tensors = make_tensors(case)

    def grads():
        leaves = tensors.leaves(case.dtype)
        return gradients(run_attend(case, tensors, leaves, "numba", dropout_seed=3), leaves)

    once, before = grads(), torch.get_num_threads()
    monkeypatch.setattr(attend_backward, "CHUNK_PAIRS", 100)
    try:
        torch.set_num_threads(2)
        for ours, theirs in zip(grads(), once, strict=True):
            assert torch.equal(ours, theirs)
    finally:
        torch.set_num_threads(before)


def three():
    return [x.requires_grad_() for x in torch.randn(3, 1, 2, 6, 6, 4).unbind()]


def test_a_graph_of_the_gradient_can_be_made_but_not_differentiated():
    leaves = three()
    out = scram.attention(*leaves, search=SETTINGS, impl="numba")
    plain = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    grads = torch.autograd.grad(out.sum(), leaves, create_graph=True)
    for ours, theirs in zip(grads, plain, strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(NotImplementedError, match=r"impl='numba' has no second derivative; use impl='reference'"):
        torch.autograd.grad(grads[0].sum(), leaves)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own forward mode
def test_forward_mode_is_refused_not_zero():
    q, k, v = (x.detach() for x in three())
    found = scram.search(q, k, search=SETTINGS)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        scram.attend(forward_ad.make_dual(q, q), k, v, found, impl="numba")


def test_matches_of_inference_mode_serve_training():
    q, k, v = three()
    with torch.inference_mode():
        found = scram.search(q, k, search=SETTINGS, impl="numba")
    scram.attend(q, k, v, found, impl="numba").out.sum().backward()
    assert q.grad.abs().sum() > 0
