"""Statistics: intervals hold as often as they say, on laws and finite populations that are known."""

import math

import pytest
import torch

from scram.core.statistics import Interval, mean, quantile, queries_needed, ranks, root_share, shared

ENDLESS = 10**9


def held(interval: Interval, truth) -> float:
    return float(((interval.low <= truth) & (truth <= interval.high)).float().mean())


def test_intervals_of_small_samples():
    """Drawn from laws whose mean and quantiles are known, without end."""
    x = torch.rand(1, 2000, 100, generator=torch.Generator().manual_seed(0))
    shares = {
        "share": held(mean((x < 0.98).float(), ENDLESS), 0.98),
        "mean": held(mean(x.square(), ENDLESS), 1 / 3),
        "median": held(quantile(x, 0.5, ENDLESS), 0.5),
        "p95": held(quantile(x, 0.95, ENDLESS), 0.95),
    }
    assert all(0.93 < share < 0.99 for share in shares.values()), shares
    whole = mean(torch.ones(1, 1, 512), ENDLESS)
    assert 0.99 < whole.low < whole.value == whole.high == 1


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
@pytest.mark.parametrize("points", [300, 1000])
def test_quantiles_of_a_finite_population(points, confidence):
    """200 of all queries drawn without repetition, often; ties are no matter."""
    generator = torch.Generator().manual_seed(1)
    population = torch.randn(points, generator=generator).abs().mul(20).round()
    order = torch.rand(1, 4000, points, generator=generator).argsort(-1)[..., :200]
    found = quantile(population[order], 0.95, points, confidence)
    truth = population.quantile(0.95)
    assert held(found, truth) >= confidence - 0.01
    above = float((truth <= found.high).float().mean())
    assert confidence + (1 - confidence) / 2 - 0.01 <= above
    strict = torch.arange(points).float()[order]  # without ties the interval is no wider than it must be
    share = held(quantile(strict, 0.95, points, confidence), (points - 1) * 0.95)
    assert share < confidence + 0.8 * (1 - confidence)


def test_more_confidence_is_wider_and_more_queries_are_narrower():
    x = torch.rand(1, 1, 512, generator=torch.Generator().manual_seed(0))
    ends = [quantile(x, 0.95, ENDLESS, confidence).high for confidence in (0.5, 0.95, shared(8))]
    assert ends == sorted(ends)
    assert len(set(ends)) == 3
    assert quantile(x, 0.95, 600).high < quantile(x, 0.95, ENDLESS).high
    assert mean(x, ENDLESS, 0.5).high < mean(x, ENDLESS, 0.99).high


def test_everything_leaves_nothing_open():
    x = torch.rand(2, 3, 41)
    x[1, 2, 4] = torch.nan
    for found, want in ((quantile(x, 0.95, 41), x.nanquantile(0.95, -1)), (mean(x, 41), x.nanmean(-1))):
        torch.testing.assert_close(found.value, want)
        torch.testing.assert_close(found.low, want)
        torch.testing.assert_close(found.high, want)


def test_too_few_queries_promise_nothing():
    found = quantile(torch.ones(1, 1, 20), 0.95, ENDLESS)
    assert found.value == 1
    assert found.high == math.inf
    assert quantile(torch.ones(1, 1, 1), 0.5, ENDLESS).low == 0
    assert quantile(torch.ones(1, 1, 100), 0.95, ENDLESS).high == 1
    assert "inf" in found.cell(0, 0)


def test_what_is_missing_is_left_out():
    x = torch.rand(1, 1, 600)
    x[..., ::2] = torch.nan
    few = quantile(x, 0.95, 700)
    torch.testing.assert_close(few, quantile(x[..., 1::2], 0.95, 400))
    assert few.high < quantile(x[..., 1::2], 0.95, 4000).high
    nothing = torch.full((1, 2, 5), torch.nan)
    for found in (quantile(nothing, 0.95, 1000), mean(nothing, 1000)):
        assert all(part.isnan().all() for part in found)


def test_what_is_infinite_counts():
    x = torch.cat([torch.rand(1, 1, 90), torch.full((1, 1, 10), torch.inf)], -1)
    assert quantile(x, 0.95, ENDLESS).value == torch.inf
    assert quantile(x, 0.5, ENDLESS).high < 1


def test_ranks_do_not_miss_more_often_than_they_say():
    """By the binomial law, summed exactly."""
    for n, share, confidence in ((512, 0.95, 0.95), (100, 0.5, 0.9), (59, 0.95, 0.9), (1024, 0.95, shared(8))):
        low, high = ranks(n, share, ENDLESS, confidence)
        law = [math.comb(n, j) * share**j * (1 - share) ** (n - j) for j in range(n + 1)]
        miss = (1 - confidence) / 2
        assert sum(law[: low + 1]) <= miss * (1 + 1e-6)
        assert high == n or sum(law[: high + 1]) >= 1 - miss * (1 + 1e-6)
        assert sum(law[: low + 2]) > miss or low == n - 1
        assert sum(law[:high]) < 1 - miss


def test_queries_that_are_needed():
    assert queries_needed(0.95, 8) == 512
    assert queries_needed(0.95, 8, spread=0.02) == 1024
    n = queries_needed(0.95, 100)
    assert ranks(n, 0.95, ENDLESS, shared(100))[1] <= 0.975 * n


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_quantiles_over_a_root_mean_square(confidence):
    """Both are of the sample; the root alone would be missed far more often where the numbers hardly vary."""
    generator = torch.Generator().manual_seed(2)
    size = torch.randn(1000, generator=generator).exp()
    error = 1 + 0.001 * torch.rand(1000, generator=generator)
    at = torch.rand(1, 4000, 1000, generator=generator).argsort(-1)[..., :200]
    truth = error.quantile(0.95) / size.mean().sqrt()
    plain = quantile(error[at] / size[at].mean(-1, keepdim=True).sqrt(), 0.95, 1000, confidence)
    share = root_share(size[at], 1000, confidence)
    assert held(plain, truth) < 0.5
    assert abs(held(plain.widened(share), truth) - confidence) < 0.06
    assert (root_share(size[at], 200) == 0).all()
    assert (root_share(torch.zeros(1, 1, 5), 10) == 0).all()


def test_widening_keeps_what_is_infinite():
    value, low, high = (
        torch.tensor([[1.0, torch.inf, 0.0]]),
        torch.tensor([[0.5, 1.0, 0.0]]),
        torch.full((1, 3), torch.inf),
    )
    found = Interval(value, low, high).widened(torch.full((1, 3), 0.1))
    assert (found.high == torch.inf).all()
    assert found.low[0, 0] < 0.5
    assert found.low[0, 1:].tolist() == [1.0, 0.0]
