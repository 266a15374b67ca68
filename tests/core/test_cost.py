"""Keys visited: what a search really scores, windows on small grids, tails, and calls without a search."""

import pytest
import torch

import scram
from scram.core.cost import keys_visited
from scram.core.tails.base import NO_TAIL


@pytest.mark.parametrize("limits", [{}, {"reach": 9, "random": False}], ids=["", "no random search"])
@pytest.mark.parametrize(("method", "causal"), [("query", False), ("query", True), ("tile", False)])
def test_the_cost_is_what_the_search_scores(method, causal, limits):
    """Counted in the reference with a score that counts; no more, and, since some offers fail, not much less."""
    grid, sweeps, scored = (16, 16), 3, 0

    def score(q, k):
        nonlocal scored
        pairs = torch.broadcast_tensors(q, k)[0]
        scored += pairs[..., 0].numel()
        return (q * k).sum(-1)

    q, k = torch.randn(1, 1, *grid, 4), torch.randn(1, 1, *grid, 4)
    search = scram.Search(method, matches=2, sweeps=sweeps, jumps=(2, 1), gossip=2, seed=0, **limits)
    tail = scram.DrawnKeys(samples=40) if causal else scram.Clusters(count=40, keys=0)
    scram.search(q, k, search=search, score=score, causal=causal)
    made = scored / 256
    found = keys_visited(q, k, search, (0, 0), tail, causal=causal)
    looked = found.sparse - 2  # without the windows
    assert 0.9 * looked < made <= looked
    assert found == (looked + 2, looked + 42, 256)
    told = scram.explain(q, k, k, search=search, radius=0, tail=tail, causal=causal)
    assert (told.scores, told.dense_scores) == (found.tail, found.dense)
    assert scram.trust(q, k, k, search=search, radius=0, tail=tail, causal=causal).cost == found


def test_windows_and_tails():
    q, k, search = torch.zeros(1, 1, 10, 10, 4), torch.zeros(1, 1, 3, 50, 4), scram.Search(sweeps=0, matches=2)
    assert keys_visited(q, k, search, (2, 1), NO_TAIL) == (2 + 2 * 3 * 3, 2 + 2 * 3 * 3, 150)  # an axis has 3 keys
    assert keys_visited(q, k, search, (0, 0), NO_TAIL, matches=5).sparse == 10
    assert keys_visited(q, k, search, (9, 99), NO_TAIL, matches=5).sparse == 5 + 150  # windows hold every key once
    assert keys_visited(q, k, search, (0, 0), scram.Clusters(count=1000)).tail == 4 + 150
    assert keys_visited(q, k, search, (0, 0), scram.Clusters(count=10, keys=7)).tail == 4 + 10 + 7
    assert keys_visited(q, k, None, (0, 0), scram.Clusters(count=10, keys=7)) == (0, 17, 150)
    book = scram.cluster(q, q, q, clusters=scram.Clusters(count=7, keys=5, seed=0))
    assert (book.samples, NO_TAIL.samples) == (7, 0)
    assert keys_visited(q, q, search, (0, 0), book).tail == 4 + 7 + 5
