"""benchmarks/trust.py: its samples are those of `scram.trust`, and intervals enclose what all queries miss."""

import sys
from pathlib import Path

import pytest
import torch

import scram

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
trust = pytest.importorskip("trust")


def test_intervals_are_counted_over_seeds(monkeypatch):
    monkeypatch.setattr(trust, "SEEDS", 4)
    q, k, v = torch.randn(3, 1, 2, 12, 12, 8, generator=torch.Generator().manual_seed(0)).unbind()
    settings = scram.Search(seed=0)
    matches = scram.search(q, k, search=settings)
    tail = scram.cluster(q, k, v, clusters=scram.Clusters(16, seed=0), scale=0.5)
    found = scram.trust(q, k, v, matches=matches, search=settings, tail=tail, scale=0.5, num_queries=60)
    shares = trust.coverage(q, k, v, found, matches, radius=1, scale=0.5)
    assert set(shares) == set(trust.INTERVALS)
    assert all(share in (0.5, 0.75, 1) for share in shares.values())
