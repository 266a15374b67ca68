"""Scores and weights: prepared features against the definitions, normalized weights against loops."""

import math

import pytest
import torch

import scram
from scram.spec import scoring

SCORES = {
    "dot": lambda q, k: q @ k,
    "cosine": lambda q, k: q @ k / (q.norm() * k.norm()),
    "l2": lambda q, k: -(q - k).square().sum(),
}


@pytest.mark.parametrize("score", SCORES)
def test_prepared_features_multiply_to_the_score(score):
    q, k = torch.randn(2, 5, 3, dtype=torch.float64).unbind()
    ours = scoring.pair_score(scoring.prepare_query(q, score), scoring.prepare_key(k, score), None)
    want = torch.stack([SCORES[score](a, b) for a, b in zip(q, k, strict=True)])
    torch.testing.assert_close(ours, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_sums_are_kept_in_float32_at_least(dtype):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x = torch.ones(2, 3, dtype=dtype)
    assert scoring.accumulator(dtype) == wide
    assert scoring.pair_score(x, x, None).dtype == wide
    assert scoring.prepare_query(x, "dot").dtype == dtype
    assert {scoring.prepare_key(x, score).dtype for score in ("cosine", "l2")} == {wide}
    assert [y.dtype for y in scoring.widened(None, x, x, x)] == [wide] * 3
    assert [y.dtype for y in scoring.widened(torch.dot, x, x, x)] == [dtype, dtype, wide]


def test_a_callable_gets_broadcast_pairs_and_must_return_their_shape():
    q, k = torch.randn(5, 1, 3), torch.randn(4, 3)
    assert scoring.pair_score(q, k, lambda a, b: (a - b).abs().sum(-1)).shape == (5, 4)
    with pytest.raises(ValueError, match=r"must return a tensor of shape .*\(5, 4\).*got \(5, 4, 3\)"):
        scoring.pair_score(q, k, lambda a, b: a * b)


def test_the_default_scale():
    assert scoring.default_scale(None, 16, "dot", "softmax") == 0.25
    for score, weight in (("cosine", "softmax"), ("l2", "softmax"), ("dot", "mean"), ("dot", "relu")):
        assert scoring.default_scale(None, 16, score, weight) == 1
    assert scoring.default_scale(3, 16, "dot", "softmax") == 3


@pytest.mark.parametrize("weight", ["softmax", "mean", "relu"])
def test_weights_over_the_allowed_keys(weight):
    a, allowed = 3 * torch.randn(6, 5, dtype=torch.float64), torch.rand(6, 5) < 0.6
    allowed[0], allowed[1] = False, True
    a[2] += 1000  # exp would overflow
    allowed[2, 0] = True
    shares, log_sum = scoring.normalized_weights(a, allowed, weight)
    for row in range(6):
        some = a[row][allowed[row]]
        if weight == "softmax":
            want, total = some.softmax(0), some.logsumexp(0)
        else:
            count = len(some)
            want = (some.relu() if weight == "relu" else some) / max(count, 1)
            total = torch.tensor(math.log(count) if count else -math.inf, dtype=torch.float64)
        torch.testing.assert_close(shares[row][allowed[row]], want)
        assert (shares[row][~allowed[row]] == 0).all()
        torch.testing.assert_close(log_sum[row], total)


@pytest.mark.parametrize("impl", ["reference", "numba", "dense"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_vector_of_zeros_has_cosine_0_and_no_gradient(dtype, impl):
    """By its length, clamped to 1e-12, its gradient would be a trillion times that of others, and inf in float16."""
    q, k, v = (x.to(dtype) for x in torch.randn(3, 1, 1, 6, 6, 4).unbind())
    q[0, 0, 2, 3] = 0
    k[0, 0, 1, 1] = 0
    leaves = [x.requires_grad_() for x in (q, k, v)]
    how = {} if impl == "dense" else {"search": scram.Search(seed=0), "tail": scram.DrawnKeys(samples=9, seed=0)}
    out = scram.attention(*leaves, score="cosine", impl="auto" if impl == "dense" else impl, **how)
    dq, dk, dv = torch.autograd.grad((out * torch.randn_like(out)).sum(), leaves)
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))
    assert not dq[0, 0, 2, 3].any()
    assert not dk[0, 0, 1, 1].any()
    assert dq.any()
    assert dk.any()
    assert not scoring.prepare_query(q, "cosine")[0, 0, 2, 3].any()
    assert scoring.prepare_query(torch.tensor([0.0, torch.nan]), "cosine").isnan().all()
