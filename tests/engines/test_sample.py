"""Estimates from keys that every query visits on its own."""

import math

import torch

import scram


def features(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def problem(batch=1, heads=2, grid=(7, 8), width=4, kappa=2, causal=False, seed=0, dtype=torch.float64):
    q, k, v = (features(batch, heads, *grid, width, seed=seed + n).to(dtype) for n in range(3))
    found = scram.search(q, k, search=scram.Search(matches=kappa, seed=0), causal=causal, impl="numba")
    return q, k, v, found


def test_sampling_a_flat_distribution_loses_nothing(impl, widest):
    q, k, v, found = problem(dtype=widest)
    made = scram.estimate(q * 0, k, v, found, method=scram.Snis(32, 0.0, seed=0), impl=impl)
    torch.testing.assert_close(made.ess, torch.full_like(made.ess, 32))
    torch.testing.assert_close(made.lse, torch.full_like(made.lse, math.log(56)))


def test_effective_samples_are_at_most_the_samples(impl, widest):
    q, k, v, found = problem(dtype=widest)
    made = scram.estimate(3 * q, k, v, found, method=scram.Snis(40, 0.5, 0.7, seed=0), impl=impl)
    assert (made.ess <= 40 + 1e-9).all()
    assert (made.ess >= 1 - 1e-9).all()
    assert made.ess.median() < 30
