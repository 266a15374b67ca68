"""Estimators over many seeds, small and fast: bias, variance, intervals, the walks' stationary distribution.

Rows of a batch draw independently, so a batch of equal rows is a batch of seeds. `benchmarks/estimators.py` does
the same on trained attention.
"""

import functools
import math

import numpy as np
import pytest
import torch

import scram
from scram.spec import draws

pytestmark = pytest.mark.slow

IMPL = "numba"  # the reference draws the same, which test_estimate.py checks
GRID = (16, 16)


def one_query(width=4, values=2, sharpness=1.5):
    """A query (1, 1) and the keys of a grid, float64."""
    generator = torch.Generator().manual_seed(3)
    q = sharpness * torch.randn(1, 1, 1, 1, width, generator=generator, dtype=torch.float64)
    k = torch.randn(1, 1, *GRID, width, generator=generator, dtype=torch.float64)
    v = torch.randn(1, 1, *GRID, values, generator=generator, dtype=torch.float64)
    v[..., 0] += k[..., 0]  # scores and values go together, or there is no bias
    found = scram.exact_search(q, k, matches=2, separation=2)
    return q, k, v, found


@functools.cache
def runs(method, seeds):
    """The estimates of many seeds: out and variance [seeds, F], and the truth [F]."""
    q, k, v, found = one_query()
    truth = scram.exact_attention(q, k, v).out.flatten()
    outs, variances = [], []
    for part in range(0, seeds, 4000):
        several = [x.expand(4000, *x.shape[1:]) for x in (q, k, v)]
        many = scram.Matches(*(x.expand(4000, *x.shape[1:]).contiguous() for x in (found.index, found.score)), GRID)
        made = scram.estimate(*several, many, method=method(part), impl=IMPL)
        outs.append(made.out.flatten(1))
        variances.append(made.variance.flatten(1))
    return torch.cat(outs), torch.cat(variances), truth


def snis(samples):
    return functools.cache(lambda seed: scram.Snis(samples, 0.3, 1.0, seed=seed))


def hybrid(samples):
    return functools.cache(lambda seed: scram.DrawnKeys(samples, seed=seed))


def bias_and_deviation(out, truth):
    """The size of the bias less what chance gives, and of one run's standard deviation."""
    mean, variance = out.mean(0), out.var(0)
    square = float(((mean - truth).square() - variance / len(out)).sum())
    return max(square, 0.0) ** 0.5, float(variance.sum()) ** 0.5


def slope(x, y):
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def test_snis_bias_and_variance_fall_as_one_over_samples():
    sizes = (16, 64, 256)
    seen = [
        bias_and_deviation(*runs(snis(n), seeds)[::2]) for n, seeds in zip(sizes, (8000, 16000, 32000), strict=True)
    ]
    assert slope(sizes, [bias for bias, _ in seen]) == pytest.approx(-1, abs=0.25)
    assert slope(sizes, [deviation**2 for _, deviation in seen]) == pytest.approx(-1, abs=0.1)
    assert seen[-1][0] < seen[-1][1] / 3


def test_hybrid_bias_falls_as_one_over_keys_drawn():
    sizes = (16, 32, 64)
    left = 256 - 18  # two windows of 9
    seen = [
        bias_and_deviation(*runs(hybrid(n), seeds)[::2]) for n, seeds in zip(sizes, (8000, 16000, 32000), strict=True)
    ]
    inverse = [1 / (1 / n - 1 / left) for n in sizes]  # drawn without replacement
    assert slope(inverse, [bias for bias, _ in seen]) == pytest.approx(-1, abs=0.25)
    assert slope(inverse, [deviation**2 for _, deviation in seen]) == pytest.approx(-1, abs=0.15)


@pytest.mark.parametrize("method", [snis(256), hybrid(64)], ids=["snis", "hybrid"])
def test_nominal_intervals_hold_the_truth_as_often_as_they_say(method):
    out, variance, truth = runs(method, 8000)
    inside = ((out - truth).abs() <= 1.96 * variance.sqrt()).double().mean()
    assert 0.9 <= inside <= 0.99


@pytest.mark.parametrize("method", [snis(64), hybrid(64)], ids=["snis", "hybrid"])
def test_the_reported_variance_is_that_of_the_estimates(method):
    out, variance, _ = runs(method, 8000)
    torch.testing.assert_close(variance.mean(0), out.var(0), rtol=0.2, atol=0)


def test_the_hybrids_normalizer_has_no_bias():
    """Plain and stratified, under a causal order that cuts through cells."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 6, 6, 3, dtype=torch.float64) for _ in range(3))
    truth = scram.exact_attention(q, k, v, causal=True).lse.exp()
    found = scram.search(q, k, search=scram.Search(seed=0), causal=True)
    many = scram.Matches(*(x.expand(6000, *x.shape[1:]).contiguous() for x in (found.index, found.score)), (6, 6))
    several = [x.expand(6000, *x.shape[1:]) for x in (q, k, v)]
    for stratified in (False, True):
        method = scram.DrawnKeys(9, stratified, seed=1)
        z = scram.estimate(*several, many, method=method, causal=True, radius=0, impl=IMPL).lse.exp()
        if not stratified:  # m_i = 0 leaves the head alone: queries with few keys before them
            z, exact = z[..., 3:, :], truth[..., 3:, :]
        else:
            exact = truth
        gap = (z.mean(0, keepdim=True) - exact) / (z.std(0, keepdim=True) / 6000**0.5).clamp(min=1e-9)
        assert gap.abs().max() < 5, stratified


CELLS = (3, 4)


def walk_problem(masked=False):
    torch.manual_seed(1)
    q = 1.2 * torch.randn(1, 1, *CELLS, 2, dtype=torch.float64)
    k = torch.randn(1, 1, *CELLS, 2, dtype=torch.float64)
    mask = torch.ones(1, *CELLS, dtype=torch.bool)
    if masked:
        mask[0, 0, 1] = mask[0, 2, 3] = mask[0, 1, 0] = False
    return q, k, mask


def transition(a, legal, bandwidth):
    """P [12, 12] of one query's walk from the table of steps and the rule of acceptance, over legal keys."""
    table = draws.step_table(bandwidth, CELLS, torch.device("cpu")).double()
    share, reach = table.diff() / table[-1], len(table) // 2 - 1
    P = torch.zeros(12, 12, dtype=torch.float64)
    for i in legal:
        for j in legal:
            dy, dx = j // 4 - i // 4, j % 4 - i % 4
            if i != j and max(abs(dy), abs(dx)) <= reach:
                P[i, j] = share[dy + reach] * share[dx + reach] * math.exp(min(float(a[j] - a[i]), 0.0))
        P[i, i] = 1 - P[i].sum()
    return P


@pytest.mark.parametrize(("masked", "causal", "query"), [(False, False, 5), (True, False, 5), (True, True, 9)])
def test_walks_keep_attention_and_move_as_the_matrix_says(masked, causal, query):
    q, k, mask = walk_problem(masked)
    a = (q.reshape(12, 2) @ k.reshape(12, 2).T / 2**0.5)[query]
    legal = [j for j in range(12) if mask.flatten()[j] and (not causal or j <= query)]
    P = transition(a, legal, 0.8)
    pi = torch.zeros(12, dtype=torch.float64)
    pi[legal] = a[legal].softmax(0)
    torch.testing.assert_close(pi @ P, pi, rtol=1e-12, atol=1e-14)
    # One step from each legal key, many times over.
    rows, v = 20000, torch.eye(12, dtype=torch.float64).reshape(1, 1, *CELLS, 12)
    for start in legal[:3] + legal[-1:]:
        index = torch.full((rows, 1, *CELLS, 1), start, dtype=torch.int32)
        found = scram.Matches(index, torch.zeros(index.shape), CELLS)
        several = [x.expand(rows, *x.shape[1:]) for x in (q, k, v)]
        method = scram.MetropolisHastings(1, 1, 0.8, seed=start)
        out = scram.estimate(
            *several, found, method=method, causal=causal, key_mask=mask.expand(rows, -1, -1), impl=IMPL
        ).out
        seen = out.reshape(rows, 12, 12)[:, query].mean(0)
        spread = (P[start] * (1 - P[start]) / rows).sqrt()
        assert ((seen - P[start]).abs() <= 5 * spread + 1e-12).all()


def test_long_walks_give_attention_back():
    q, k, _ = walk_problem()
    v = torch.eye(12, dtype=torch.float64).reshape(1, 1, *CELLS, 12)
    found = scram.exact_search(q, k, matches=2)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    made = scram.estimate(*leaves, found, method=scram.MetropolisHastings(40000, 1, 1.5, seed=0), impl=IMPL)
    truth = scram.exact_attention(*leaves)
    assert (made.out - truth.out).abs().sum(-1).max() / 2 < 0.05
    assert made.rhat.max() < 1.05
    assert made.warnings == []
    weight = torch.randn(made.out.shape, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((x.out * weight).sum(), leaves) for x in (made, truth))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0) > 0.9


def test_training_through_the_hybrid_learns_to_weigh_diffuse_keys():
    """Wq and Wk learn from a teacher's attention over all keys; the student sees 24 of 256, other ones each step."""
    torch.manual_seed(0)
    x = torch.randn(1, 1, 16, 16, 8)
    teacher = [torch.randn(8, 8) / 8**0.5 for _ in range(2)]
    target = scram.exact_attention(x @ teacher[0], x @ teacher[1], x).out
    student = [(torch.randn(8, 8) / 8**0.5).requires_grad_() for _ in range(2)]
    optimizer = torch.optim.Adam(student, lr=0.02)

    def loss(method):
        q, k = x @ student[0], x @ student[1]
        out = (
            scram.exact_attention(q, k, x).out
            if method is None
            else scram.estimate(q, k, x, scram.search(q, k, search=scram.Search(sweeps=2)), method=method).out
        )
        return (out - target).square().mean() / target.square().mean()

    with torch.no_grad():
        before = float(loss(None))
    for _ in range(150):
        optimizer.zero_grad()
        loss(scram.DrawnKeys(24)).backward()
        optimizer.step()
    with torch.no_grad():
        assert float(loss(None)) < 0.2 * before
