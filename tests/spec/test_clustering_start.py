"""Where k-means starts, and the space it measures in."""

import torch

from scram.core.calls import ClusterCall
from scram.spec import clustering
from scram.spec.noise import noise


def test_draws_are_in_proportion_to_the_rate_and_without_repetition():
    rate = torch.tensor([3.0, 0.0, 1.0])
    orders = torch.stack([clustering.drawn(noise(7, run, torch.arange(3)), rate) for run in range(2000)])
    assert (orders.sort(1).values == torch.arange(3)).all()
    assert (orders[:, 2] == 1).all()  # rate 0 comes last
    assert abs(float((orders[:, 0] == 0).float().mean()) - 0.75) < 0.04


def test_attention_paid_is_the_capped_mean_and_an_even_part():
    k = torch.randn(500, 8)
    even = clustering.START_EVEN / 500
    broad, sharp = torch.zeros(1, 8), 1000 * k[:1]
    torch.testing.assert_close(clustering.attention_paid(broad, k), torch.full((500,), 1 / 500 + even))
    best = int((sharp @ k.T).argmax())
    paid = clustering.attention_paid(torch.cat([sharp, sharp]), k)
    torch.testing.assert_close(paid[best], torch.tensor(clustering.START_MOST + even))
    torch.testing.assert_close(paid.sum(), torch.tensor(clustering.START_MOST + clustering.START_EVEN))
    torch.testing.assert_close(clustering.attention_paid(broad[:0], k), torch.full((500,), even))


def test_steps_start_where_queries_look():
    """All queries but those of one column look at 64 of 4096 keys: about a quarter of 32 clusters start there.

    Drawn evenly, half a cluster would.
    """
    q, k = torch.randn(1, 1, 64, 64, 8) / 10, torch.randn(1, 1, 64, 64, 8)
    looked_at = torch.zeros(64, 64, dtype=torch.bool)
    looked_at.view(-1)[torch.randperm(4096)[:64]] = True
    k[..., 0] = torch.where(looked_at, 20.0, 0.0)
    q[..., 0] = torch.where(torch.arange(64) > 0, 1.0, -1.0)
    call = ClusterCall(q, k, k, None, None, None, torch.tensor(3), None, 32, 0, 0.5)
    assert (clustering.cluster(call).centers[..., 0] > 19).sum() > 3


def test_the_values_spread_is_a_share_of_the_scores_spread():
    q, k, v = torch.randn(50, 8), 3 * torch.randn(200, 8), 5 * torch.randn(200, 4)
    space = clustering.Space.of(q, k, v)
    both, scores = space.spread(k, v).mean(), space.spread(k, v.mean(0).expand(200, 4)).mean()
    torch.testing.assert_close(both - scores, clustering.VALUE_WEIGHT * scores)
    centered = (k - k.mean(0)) @ q.T
    weight = (1 + centered.square().mean(0)).rsqrt()
    torch.testing.assert_close(scores, (centered * weight).square().mean())


def test_values_alone_are_grouped_where_all_scores_are_equal():
    """Queries of zero, or keys that are one key: what is left to tell keys apart is their values."""
    v = torch.randn(1, 1, 256, 3).round()
    for q, k in ((torch.zeros(1, 1, 256, 4), torch.randn(1, 1, 256, 4)), (torch.randn(1, 1, 256, 4), v[..., :1] * 0)):
        call = ClusterCall(q, k.expand(1, 1, 256, 4), v, None, None, None, torch.tensor(0), None, 20, 3, 1.0)
        assert (clustering.cluster(call).sizes > 0).sum() > 10
