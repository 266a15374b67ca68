"""Turned features give the same scores, need as few channels as scores do, and round to the error promised."""

import pytest
import torch

from scram.explorer.coordinates import Balanced, Principal


def pair(rank=6):
    """Queries and keys [n, 12] of unequal spreads, whose scores have a rank; keys are far from 0."""
    noise = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 3000, 12, generator=noise).double() * torch.logspace(1, -1, 12).double()
    k[:, rank:] = 0
    return q, k @ torch.linalg.qr(torch.randn(12, 12, generator=noise).double()).Q + 5


def test_scores_stay_and_second_moments_are_one_diagonal():
    q, k = pair()
    found = Balanced.of(q, k)
    turned = q @ found.to_queries
    assert found.keys.shape[1] == 6
    torch.testing.assert_close(turned @ found.keys.T, q @ (k - k.mean(0)).T)
    moments = [x.T @ x / len(x) for x in (turned, found.keys)]
    torch.testing.assert_close(moments[0], moments[1])
    assert float((moments[0] - moments[0].diag().diag()).abs().max()) < 1e-9 * float(moments[0].max())
    assert found.spread == pytest.approx(float(moments[0].trace()))
    torch.testing.assert_close((k - found.center) @ found.to_keys, found.keys)


@pytest.mark.parametrize("error", [0.02, 0.2])
def test_rounding_is_off_as_promised(error):
    q, k = pair()
    found = Balanced.of(q, k)
    step = found.step(error)
    near, exact = (
        x(q @ found.to_queries) @ x(found.keys).T for x in (lambda x: (x / step).round() * step, lambda x: x)
    )
    assert float((near - exact).square().mean().sqrt()) == pytest.approx(error, rel=0.1)


def test_equal_keys_and_empty_queries_have_no_scores():
    q = torch.randn(5, 3)
    same = Balanced.of(q, torch.ones(7, 3))
    assert float((q.double() @ same.to_queries @ same.keys.T).abs().max()) == 0
    assert same.step(0.1) == 1
    assert float(Balanced.of(torch.zeros(5, 3), torch.randn(7, 3)).keys.isfinite().all()) == 1


def test_values_by_principal_axes():
    v = torch.randn(2000, 5).double() * torch.tensor([1.0, 9, 3, 0.1, 2]) + 4
    found = Principal.of(v)
    torch.testing.assert_close(found.channels @ found.axes.T + found.center, v)
    spread = found.channels.square().mean(0)
    assert (spread.sort(descending=True).values == spread).all()
    step = found.step(0.05)
    off = (found.channels / step).round() * step - found.channels
    assert float(off.square().sum(-1).mean().sqrt()) == pytest.approx(0.05 * found.size, rel=0.1)
    assert Principal.of(torch.ones(4, 2)).step(0.1) == 1
