"""Keys drawn for all queries of a row: the hybrid in plain Python."""

import pytest
import torch

import plain
import scram
from plain_estimators import assert_close, made_by


@pytest.mark.parametrize(
    "name", ["Hybrid-rank-2", "Hybrid-causal", "Hybrid-mask-of-each-head", "Hybrid-radius-per-axis"]
)
def test_hybrid_in_plain_python(impl, widest, name):
    made, rule = made_by(impl, widest, name)
    one, row = rule.one, rule.row
    open_keys = plain.allowed(one.case, rule.tensors, row)
    drawn = sorted(open_keys, key=lambda j: (rule.bits(j), j))[: one.method.samples]
    radius = one.case.radius if isinstance(one.case.radius, tuple) else (one.case.radius,) * len(one.case.grid)
    out, lse, variance = (x.detach().flatten(0, 1)[row] for x in (made.out, made.lse, made.variance))
    out, lse, variance = out.flatten(0, -2), lse.flatten(), variance.flatten(0, -2)
    variances = []
    for i in range(len(out)):
        legal = rule.legal(i)
        head = [
            j
            for j in legal
            if any(
                all(abs(x - y) <= b for x, y, b in zip(rule.places[j], rule.places[m], radius, strict=True))
                for m in rule.matches[i]
            )
        ]
        tail = [j for j in drawn if j in legal and j not in head]
        left = len(legal) - len(head)
        w = torch.cat([rule.a[i, head].exp(), rule.a[i, tail].exp() * left / max(len(tail), 1)])
        p = w / w.sum()
        mean = p @ rule.v[head + tail]
        assert_close(out[i], mean)
        assert_close(lse[i], w.sum().log())
        r = p[len(head) :, None] * (rule.v[tail] - mean)
        m = len(tail)
        expected = torch.zeros_like(mean)
        if m < left:
            spread = (r - r.mean(0)).square().sum(0)
            expected = (1 - m / left) * m / (m - 1) * spread if m >= 2 else expected + torch.inf
        variances.append(expected)
    expected = torch.stack(variances)
    if widest == torch.float64:
        assert_close(variance, expected)
    else:  # of all queries together, as in `estimates`: single ones are small and rounded
        known = expected.isfinite()
        assert torch.equal(variance.isfinite(), known)
        assert (variance - expected)[known].norm() <= 0.01 * expected[known].norm()


def features(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def problem(batch=1, heads=2, grid=(7, 8), width=4, kappa=2, causal=False, seed=0, dtype=torch.float64):
    q, k, v = (features(batch, heads, *grid, width, seed=seed + n).to(dtype) for n in range(3))
    found = scram.search(q, k, search=scram.Search(matches=kappa, seed=0), causal=causal, impl="numba")
    return q, k, v, found


@pytest.mark.parametrize("stratified", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_a_full_tail_is_exact_with_variance_0(impl, widest, stratified, causal, masked):
    q, k, v, found = problem(causal=causal, dtype=widest)
    mask = features(1, 7, 8, seed=9) < 0.4 if masked else None
    how = {"causal": causal, "key_mask": mask}
    made = scram.estimate(q, k, v, found, method=scram.Hybrid(56, stratified, seed=3), impl=impl, **how)
    truth = scram.exact_attention(q, k, v, **how)
    torch.testing.assert_close(made.out, truth.out)
    torch.testing.assert_close(made.lse, truth.lse)
    assert made.variance.eq(0).all()
