"""The work that the CPU engine's search saves."""

import sys

import torch

import scram
from scram.core.calls import SearchCall
from scram.engines.cpu.search import counted_search
from support.photos import stereo


def test_scores_are_counted_and_few():
    """At most one score for each candidate of Algorithm 1, whose number grows with the log of the extent."""
    paper = scram.Search.paper()
    settings = {
        name: getattr(paper, name) for name in ("matches", "separation", "jumps", "propagate", "gossip", "random")
    }
    for size, radii in ((16, 5), (32, 6), (64, 7)):
        q, k = stereo(size)
        call = SearchCall(
            q, k, torch.tensor(0), None, None, None, None, "query", **settings, sweeps=8, reach=(), causal=False
        )
        count = counted_search(call)[1]
        random_search = 8 * radii * size**2
        assert 0.8 * random_search < count < size**2 * (1 + 8 * (16 + radii))


def test_runs_end_when_every_key_is_a_match(monkeypatch):
    module, calls = sys.modules[counted_search.__module__], []
    sweep = module._sweep

    def counting(*arguments):
        calls.append(1)
        sweep(*arguments)

    monkeypatch.setattr(module, "_sweep", counting)
    q, k = torch.randn(1, 1, 20, 4), torch.randn(1, 1, 3, 4)
    found = scram.search(q, k, search=scram.Search(matches=50, sweeps=6, seed=0), impl="numba").index
    assert (found[..., :3].sort(-1).values == torch.arange(3)).all()
    assert (found[..., 3:] == -1).all()
    assert len(calls) < 10 * 7
