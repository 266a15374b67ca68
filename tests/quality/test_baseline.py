"""The time of dense attention: of all queries, or continued from a part of them."""

import pytest
import torch

from scram.quality import baseline
from scram.quality.baseline import dense_baseline
from scram.quality.timing import Believed

Q = torch.randn(1, 2, 40, 40, 8)


class Timer:
    """A second for every 1000 pairs of a row."""

    def __init__(self):
        self.shapes = []

    def __call__(self, call, device):
        q, k, v = call.args
        self.shapes.append((tuple(q.shape), tuple(k.shape)))
        assert call().shape == (*q.shape[:-1], v.shape[-1])
        return Believed(q.shape[2:-1].numel() * k.shape[2:-1].numel() / 1000, len(self.shapes) == 1), None


@pytest.fixture
def timer(monkeypatch):
    monkeypatch.setattr(baseline, "DENSE_PAIRS", {"cpu": 2 * 1600 * 400})
    return Timer()


def test_few_pairs_are_timed_at_once(timer):
    found = dense_baseline(Q[:, :, :10], Q, Q, timer=timer)
    assert timer.shapes == [((1, 2, 10, 40, 8), (1, 2, 40, 40, 8))]
    assert found == (640.0, 400, 400, True)
    assert not found.continued


def test_a_part_of_the_queries_stands_for_all(timer):
    found = dense_baseline(Q, Q, Q, timer=timer)
    assert timer.shapes == [((1, 2, 400, 8), (1, 2, 1600, 8))]
    assert found == (2560.0, 400, 1600, True)
    assert found.continued


@pytest.mark.parametrize("mask", [None, torch.ones(1, 40, 40) > 0, torch.ones(1, 2, 40, 40) > 0], ids=str)
def test_causal_order_has_a_smaller_problem(timer, mask):
    found = dense_baseline(Q, Q, Q, timer=timer, causal=True, key_mask=mask)
    assert timer.shapes == [((1, 2, 1024, 8), (1, 2, 1024, 8))]
    assert found == (pytest.approx(2560.0), 1024, 1600, True)


def test_what_is_not_too_long_is_timed_as_a_whole(timer):
    found = dense_baseline(Q, Q, Q, timer=timer, longest=3000.0)
    assert [q for q, _ in timer.shapes] == [(1, 2, 400, 8), (1, 2, 40, 40, 8)]
    assert found == (2560.0, 1600, 1600, False)
    assert not found.continued


def test_a_part_that_is_all_is_timed_once(timer, monkeypatch):
    monkeypatch.setattr(baseline, "DENSE_PAIRS", {"cpu": 1})
    assert not dense_baseline(Q[:, :, :5], Q, Q, timer=timer).continued
    assert len(timer.shapes) == 1
