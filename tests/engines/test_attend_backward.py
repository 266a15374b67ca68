"""Gradients of q, k, v and extra through out and through lse, in float64 with frozen matches."""

import itertools

import pytest
import torch

import scram

SCORES = ("dot", "cosine", "l2")
WEIGHTS = ("softmax", "mean", "relu")
# Both outputs at once for every score, and each without the other for one.
KINDS = [*itertools.product(SCORES, WEIGHTS, ["both"]), *itertools.product(["dot"], WEIGHTS, ["out", "lse"])]


def leaf(*shape, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def frozen():
    index = torch.tensor([[[[0, 5], [3, -1]], [[-1, -1], [4, 4]]]], dtype=torch.int32).reshape(1, 2, 2, 1, 2)
    return scram.Matches(index, torch.zeros(index.shape), (2, 3))


@pytest.mark.parametrize(("score", "weight", "through"), KINDS)
@pytest.mark.slow
def test_gradcheck(impl, score, weight, through):
    check(impl, score, weight, through)


@pytest.mark.parametrize("weight", WEIGHTS)
def test_gradcheck_of_a_callable_score(weight):
    check("reference", lambda q, k: torch.cos(q - k).sum(-1), weight, "both")


def check(impl, score, weight, through):
    leaves = [
        leaf(1, 2, 2, 1, 3, seed=0),
        leaf(1, 1, 2, 3, 3, seed=1),
        leaf(1, 1, 2, 3, 2, seed=2),
        leaf(1, 1, 1, 3, seed=3),
        leaf(1, 1, 1, 2, seed=4),
    ]
    mask = torch.tensor([[[True, True, False], [True, True, True]]])

    def function(q, k, v, k_extra, v_extra):
        attended = scram.attend(
            q,
            k,
            v,
            frozen(),
            radius=(1, 0),
            key_mask=mask,
            score=score,
            weight=weight,
            extra=(k_extra, v_extra),
            impl=impl,
        )
        return attended if through == "both" else getattr(attended, through)

    if through == "lse" and weight != "softmax":  # the log of a count, windows and extra key: no gradient
        lse = function(*leaves)
        torch.testing.assert_close(lse.flatten(), torch.tensor([4, 3, 1, 3], dtype=lse.dtype).log())
        total = lse.sum() + 0 * leaves[0].sum()  # of the reference it has no graph
        assert not any(grad.any() for grad in torch.autograd.grad(total, leaves, materialize_grads=True))
        return
    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck_with_dropout_and_an_empty_row(impl, causal):
    leaves = [leaf(1, 1, 3, 2, 2, seed=0), leaf(1, 1, 3, 2, 2, seed=1), leaf(1, 1, 3, 2, 2, seed=2)]
    index = torch.tensor([5, 1, -1, 4, 0, 2], dtype=torch.int32).reshape(1, 1, 3, 2, 1)
    found = scram.Matches(index, torch.zeros(index.shape), (3, 2))

    def function(q, k, v):
        torch.manual_seed(1)
        out, lse = scram.attend(q, k, v, found, causal=causal, dropout_p=0.4, impl=impl)
        assert (lse == -torch.inf).any()
        return out, torch.where(lse == -torch.inf, 0, lse)

    assert torch.autograd.gradcheck(function, leaves)


def test_gradcheck_of_the_exact_attention():
    leaves = [leaf(1, 2, 3, 2, seed=0), leaf(1, 1, 4, 2, seed=1), leaf(1, 1, 4, 3, seed=2)]
    assert torch.autograd.gradcheck(lambda q, k, v: scram.exact_attention(q, k, v), leaves)


def test_gradcheck_of_merge():
    leaves = [leaf(3, 2, seed=0), leaf(3, seed=1), leaf(3, 2, seed=2), leaf(3, seed=3)]
    assert torch.autograd.gradcheck(lambda a, b, c, d: scram.merge(scram.Attended(a, b), scram.Attended(c, d)), leaves)


@pytest.mark.slow
def test_gradients_reach_the_whole_call(impl, widest):
    q, k, v = (leaf(1, 2, 5, 5, 4, seed=s, dtype=widest) for s in range(3))
    scram.attention(q, k, v, search=scram.Search(seed=0), impl=impl).square().sum().backward()
    for x in (q, k, v):
        assert x.grad.isfinite().all()
        assert (x.grad != 0).any()


def test_gradients_of_broadcast_inputs(impl, widest):
    narrow = leaf(1, 1, 5, 5, 4, seed=0, dtype=widest)
    wide = narrow.detach().repeat(2, 2, 1, 1, 1).requires_grad_()
    found = scram.search(wide, wide, search=scram.Search(seed=0), impl=impl)
    expanded = narrow.expand(2, 2, -1, -1, -1)
    (one,) = torch.autograd.grad(
        scram.attend(expanded, expanded, expanded, found, impl=impl).out.square().sum(), narrow
    )
    (many,) = torch.autograd.grad(scram.attend(wide, wide, wide, found, impl=impl).out.square().sum(), wide)
    torch.testing.assert_close(one, many.sum((0, 1), keepdim=True))


def test_gradients_bear_scores_that_share_a_large_part(impl):
    k = torch.tensor([[[[1e4, 0.0], [1e4, 3.0], [1e4, 1.0]]]], requires_grad=True)
    q = torch.tensor([[[[1.0, 0.1]] * 3]], requires_grad=True)
    v = torch.tensor([[[[1.0], [2.0], [4.0]]]])
    found = scram.Matches(torch.ones(1, 1, 3, 1, dtype=torch.int32), torch.zeros(1, 1, 3, 1), (3,))
    out = scram.attend(q, k, v, found, scale=1.0, impl=impl).out
    (dq,) = torch.autograd.grad(out[..., 0, :].sum(), q)
    assert dq[0, 0, 0, 0].abs() < 0.01  # all keys have that part: it cancels


@pytest.mark.parametrize(
    "method",
    [None, scram.Snis(9, 0.0, seed=0), scram.MetropolisHastings(9, seed=0), scram.DrawnKeys(6, seed=0)],
    ids=str,
)
def test_many_small_gradients_are_summed_in_float32(impl, method):
    """600 queries share few keys: in bfloat16, whose 256 + 1 is 256, the sums would stop growing."""
    q, k, v = (leaf(1, 1, n, 2, seed=s).detach().to(torch.bfloat16) for s, n in enumerate((600, 8, 8)))
    found = scram.search(q, k, search=scram.Search(seed=0), impl="reference")

    def grads(dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        if method is None:
            out = scram.attend(*leaves, found, impl=impl).out
        else:
            out = scram.estimate(*leaves, found, method=method, impl=impl).out
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    for mine, exact in zip(grads(torch.bfloat16), grads(torch.float32), strict=True):
        # Rounded once, at the end; where q is bfloat16 for the engine too, once for the windows and once for the tail.
        times = 2 if impl == "triton" and isinstance(method, scram.DrawnKeys) else 1
        assert (mine - exact).norm() < times * 2**-8 * exact.norm()
