"""The public functions as a whole; the test of each stage is in a file of its own."""

import pytest
import torch

import scram
from scram import dispatch, draws, layout_hints, validate


class Keeps:
    """An engine that keeps something."""

    def __init__(self):
        self.kept = [1]

    def clear_caches(self):
        self.kept.clear()


def test_clear_caches_empties_every_cache(monkeypatch):
    engine = Keeps()
    monkeypatch.setitem(dispatch._loaded, "another", engine)
    q = torch.randn(1, 1, 64, 8)
    layout_hints.clear()
    with pytest.warns(layout_hints.LayoutWarning):
        scram.attention(q, q, q)
    draws.cell_counts((8, 8), 16)
    caches = (validate._valid, layout_hints._seen, engine.kept)
    assert all(caches)
    assert draws.cell_counts.cache_info().currsize
    scram.clear_caches()
    assert not any(caches)
    assert draws.cell_counts.cache_info().currsize == 0
    with pytest.warns(layout_hints.LayoutWarning):  # as on the first call
        scram.attention(q, q, q)
