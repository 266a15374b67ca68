"""The reference in chunks: every transform of torch.func goes through it, and plain autograd keeps no gathered keys."""

import sys

import pytest
import torch
from torch import func

import scram
from scram import _compat

GRID = (3, 3)
WITHOUT_VMAP = {"MetropolisHastings"}  # its walks write in place
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # func.jvp's own
CALLS = {
    "attend": lambda q, k, v, found: scram.attend(q, k, v, found, impl="reference").out,
    "exact": lambda q, k, v, found: scram.exact_attention(q, k, v).out,
}
for method in (scram.DrawnKeys(5, seed=0), scram.Snis(5, seed=0), scram.MetropolisHastings(5, seed=0)):
    CALLS[type(method).__name__] = lambda q, k, v, found, method=method: (
        scram.estimate(q, k, v, found, method=method, impl="reference").out
    )


@pytest.fixture
def chunked(monkeypatch):
    """Call it to make every chunk as small as it can be."""

    def start():
        for name, module in list(sys.modules.items()):
            if name == "scram.core.exact" or name.startswith("scram.engines.reference"):
                monkeypatch.setattr(module, "CHUNK_ELEMENTS", 1, raising=False)

    return start


def problem(name):
    """A scalar function of q, through all gathered keys and values, and a q."""
    q, k, v = torch.randn(3, 1, 1, *GRID, 2, dtype=torch.float64).unbind()
    found = scram.exact_search(q, k, matches=2)

    def of(q):
        out = CALLS[name](q, k + q / 2, v * q, found)
        return (out.square() * torch.arange(out.numel()).reshape(out.shape)).sum()

    return of, q


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_torch_func_goes_through_chunks(chunked, name):
    of, q = problem(name)
    (want,) = torch.autograd.functional.jacobian(of, (q,))
    second = torch.autograd.functional.hessian(of, q) if name != "tile" else None
    chunked()
    torch.testing.assert_close(func.grad(of)(q), want)
    torch.testing.assert_close(func.jacrev(of)(q), want)
    if name not in WITHOUT_VMAP:
        torch.testing.assert_close(func.vmap(func.grad(of))(torch.stack([q, q / 2]))[0], want)
    torch.testing.assert_close(func.jvp(of, (q,), (q,))[1], (want * q).sum())
    if second is not None:
        torch.testing.assert_close(func.jacrev(func.grad(of))(q), second)
        if name not in WITHOUT_VMAP:
            torch.testing.assert_close(func.hessian(of)(q), second)


@pytest.mark.parametrize("name", CALLS)
def test_plain_autograd_goes_through_chunks(chunked, name):
    """Once and twice; and through vmap, whose tensors are gone when the backward pass begins."""
    of, q = problem(name)
    leaf = q.clone().requires_grad_()

    def twice():
        (first,) = torch.autograd.grad(of(leaf), leaf, create_graph=True)
        return first, torch.autograd.grad(first.square().sum(), leaf)[0]

    want = twice()
    chunked()
    torch.testing.assert_close(twice(), want)
    if name not in WITHOUT_VMAP:
        (mapped,) = torch.autograd.grad(func.vmap(of)(leaf.unsqueeze(0)).sum(), leaf)
        torch.testing.assert_close(mapped, want[0])


@pytest.mark.parametrize("name", CALLS)
def test_plain_autograd_keeps_no_gathered_keys(monkeypatch, chunked, name):
    """What is saved for the backward pass is less where chunks are computed again."""
    of, q = problem(name)

    def saved():
        kept = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: kept.update({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()}) or x, lambda x: x
        ):
            of(q.clone().requires_grad_())
        return sum(kept.values())

    chunked()
    few = saved()
    monkeypatch.setattr(_compat, "transforms_active", lambda: True)
    assert few < saved() / 2


@pytest.mark.parametrize("entry", [_compat._transforms_active, None], ids=["private", "public"])
def test_a_transform_is_seen(monkeypatch, entry):
    monkeypatch.setattr(_compat, "_transforms_active", entry)
    seen = []

    def of(x):
        seen.append(_compat.transforms_active())
        return x.sum()

    of(torch.ones(3))
    func.grad(of)(torch.ones(3))
    func.jacrev(func.grad(of))(torch.ones(3))
    assert seen == [False, True, True]
