"""Any non-local mean: y_i = 1/C sum_j f(q_i, k_j) v_j, each form against a dense computation of that equation."""

import math

import pytest
import torch

import scram

SCORES = {
    "dot": lambda q, k: (q * k).sum(-1),
    "cosine": lambda q, k: (q * k).sum(-1) / (q.norm(dim=-1) * k.norm(dim=-1)),
    "l2": lambda q, k: -(q - k).square().sum(-1),
    "callable": lambda q, k: -(q - k).abs().sum(-1),
}


@pytest.fixture
def tensors(widest):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 1, 4, 5, e, generator=generator, dtype=torch.float64).to(widest) for e in (6, 6, 3)]


def whole_grid(q, k):
    """Matches whose windows, at radius 9, are the grid."""
    index = torch.zeros(*q.shape[:-1], 1, dtype=torch.int32)
    return scram.Matches(index, torch.zeros(index.shape), tuple(k.shape[2:-1]))


def equation(q, k, v, f, normalizer=None):
    """y [N, F] by the paper's equation; C = the sum of f, or given."""
    q, k, v = (x.reshape(-1, x.shape[-1]) for x in (q, k, v))
    table = torch.stack([torch.stack([f(a, b) for b in k]) for a in q])
    c = table.sum(-1, keepdim=True) if normalizer is None else normalizer
    return (table @ v) / c


def attended(q, k, v, impl, **how):
    return scram.attend(q, k, v, whole_grid(q, k), radius=9, impl=impl, **how)


@pytest.mark.parametrize("weight", ["softmax", "mean", "relu"])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_every_score_and_weight(tensors, impl, score, weight, scale):
    q, k, v = tensors
    named = SCORES[score] if score == "callable" else score
    factor = scale or (6**-0.5 if (score, weight) == ("dot", "softmax") else 1)
    f = {
        "softmax": lambda a, b: (factor * SCORES[score](a, b)).exp(),
        "mean": lambda a, b: factor * SCORES[score](a, b),
        "relu": lambda a, b: (factor * SCORES[score](a, b)).clamp(min=0),
    }[weight]
    impl = "reference" if score == "callable" else impl
    out, lse = attended(q, k, v, impl, score=named, weight=weight, scale=scale)
    torch.testing.assert_close(out.reshape(20, 3), equation(q, k, v, f, None if weight == "softmax" else 20))
    if weight == "softmax":
        c = equation(q, k, torch.ones_like(v), f, 1)[:, 0]
        torch.testing.assert_close(lse.flatten(), c.log())
    else:
        torch.testing.assert_close(lse.flatten(), torch.full((20,), math.log(20), dtype=v.dtype))
    exact = scram.exact_attention(q, k, v, score=named, weight=weight, scale=scale)
    torch.testing.assert_close(out, exact.out)
    torch.testing.assert_close(lse, exact.lse)


def test_gaussian_form(tensors, impl):
    x, _, v = tensors
    out = attended(x, x, v, impl, scale=1.0).out
    torch.testing.assert_close(out.reshape(20, 3), equation(x, x, v, lambda a, b: torch.exp(a @ b)))


def test_embedded_gaussian_form(tensors, impl):
    x, y, v = tensors
    theta, phi = torch.randn(2, 6, 6, dtype=x.dtype)
    out = attended(x @ theta, y @ phi, v, impl, scale=1.0).out
    torch.testing.assert_close(out.reshape(20, 3), equation(x, y, v, lambda a, b: torch.exp((a @ theta) @ (b @ phi))))


def test_dot_product_form(tensors, impl):
    x, y, v = tensors
    out = attended(x, y, v, impl, weight="mean").out
    torch.testing.assert_close(out.reshape(20, 3), equation(x, y, v, torch.dot, 20))


def test_concatenation_form(tensors, impl):
    x, y, v = tensors
    w = torch.randn(12, dtype=x.dtype)
    w_q, w_k = w[:6], w[6:]
    one = torch.ones(1, 1, 4, 5, 1, dtype=x.dtype)
    q = torch.cat([(x @ w_q).unsqueeze(-1), one], -1)
    k = torch.cat([one, (y @ w_k).unsqueeze(-1)], -1)
    out = attended(q, k, v, impl, weight="relu").out
    expected = equation(x, y, v, lambda a, b: (w @ torch.cat([a, b])).relu(), 20)
    torch.testing.assert_close(out.reshape(20, 3), expected)


def test_non_local_means_form(tensors, impl):
    x, _, v = tensors
    out = attended(x, x, v, impl, score="l2", scale=1 / 4.0).out
    expected = equation(x, x, v, lambda a, b: torch.exp(-(a - b).square().sum() / 4.0))
    torch.testing.assert_close(out.reshape(20, 3), expected)


@pytest.mark.parametrize("weight", ["mean", "relu"])
def test_the_normalizer_counts_the_keys_attended(tensors, impl, weight):
    q, k, v = tensors
    index = torch.full((1, 1, 4, 5, 1), 7, dtype=torch.int32)  # a window of 9
    extra = torch.randn(1, 1, 2, 6, dtype=q.dtype), torch.randn(1, 1, 2, 3, dtype=q.dtype)
    found = scram.Matches(index, torch.zeros(index.shape), (4, 5))
    lse = scram.attend(q, k, v, found, weight=weight, extra=extra, impl=impl).lse
    torch.testing.assert_close(lse.exp(), torch.full_like(lse, 11))


def test_callable_must_return_scores(tensors):
    q, k, v = tensors
    with pytest.raises(ValueError, match=r"score callable must return a tensor of shape .* got \(20, 9, 6\)"):
        scram.attend(q, k, v, whole_grid(q, k), score=lambda a, b: a * b, impl="reference")
    with pytest.raises(ValueError, match="got float"):
        scram.search(q, k, score=lambda a, b: 1.0, impl="reference")
