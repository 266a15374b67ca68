"""The private parts of Numba are what they were, and the fallbacks give the same results."""

import inspect
import textwrap

import pytest
import torch

import scram
from processes import run_python
from scram._compat import numba as compat

pytestmark = pytest.mark.slow


def test_the_private_parts_of_numba_are_what_they_were():
    assert compat.PRIVATE


FALLBACK = """
    import sys, torch, numba, numba.core.codegen
    sys.modules["numba.core.codegen"] = None
    import scram
    from scram._compat import numba as compat
    assert not compat.PRIVATE
    """


def results():
    """Searches of integer features, attention and its gradients, in Numba."""
    found = []
    for width in (3, 6):
        torch.manual_seed(3)
        q, k = (torch.randint(-4, 5, (1, 2, 90, width)).float() for _ in range(2))
        matches = scram.search(q, k, search=scram.Search(matches=2, sweeps=2, seed=1), impl="numba")
        leaves = [x.requires_grad_() for x in (q, k, torch.randn(1, 2, 90, 5))]
        out, lse = scram.attend(*leaves, matches, scale=0.1, dropout_p=0.2, impl="numba")
        grads = torch.autograd.grad(out.square().sum() + lse.sum(), leaves)
        found += [matches.index, matches.score, out.detach(), lse.detach(), *grads]
    return found


@pytest.mark.timeout(600)
def test_without_the_private_parts_of_numba_the_results_are_the_same(tmp_path):
    code = textwrap.dedent(FALLBACK) + textwrap.dedent(inspect.getsource(results))
    code += f"torch.save(results(), {str(tmp_path / 'results.pt')!r})"
    run_python(code, NUMBA_OPT="1")  # what it computes, not how fast
    for n, (ours, theirs) in enumerate(zip(results(), torch.load(tmp_path / "results.pt"), strict=True)):
        if n % 7 < 2:  # matches and their scores
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
