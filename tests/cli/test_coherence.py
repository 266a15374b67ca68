"""`scram coherence`: the recall goes with the coherence of the keys."""

import json

import pytest
import torch

import scram
from scram.cli import coherence as coherence_module
from support.command import call

pytestmark = pytest.mark.slow


def test_shuffled_blocks_are_the_same_keys_elsewhere():
    x = torch.arange(64.0).reshape(1, 1, 8, 8, 1)
    shuffled = coherence_module.shuffle_blocks(x, 4, 0)
    assert sorted(shuffled.flatten().tolist()) == x.flatten().tolist()
    assert not torch.equal(shuffled, x)
    inside = shuffled[0, 0, :4, :4, 0]
    assert torch.equal(inside - inside[0, 0], x[0, 0, :4, :4, 0])


def test_coherence_decides_the_recall(tmp_path, monkeypatch):
    """Of the degrees of coherence the first and the last."""
    every = coherence_module.cases

    def ends(size, seed):
        return (one for one in every(size, seed) if one[1] in ((0, 16) if one[0] == "synthetic field" else (1, size)))

    monkeypatch.setattr(coherence_module, "cases", ends)
    code, printed, complaints = call("coherence", "--size", 32, "--out", tmp_path)
    assert (code, complaints) == (0, "")
    assert "photo pair" in printed
    rows = json.loads((tmp_path / "coherence.json").read_text())["rows"]
    assert len(rows) == 3 * 2 * len(coherence_module.settings(0))
    recall = {(row["kind"], row["degree"], row["search"]): row["recall"] for row in rows}
    assert recall["photo pair", 1, "shift"] < 0.3 < recall["photo pair", 32, "shift"]
    assert recall["projected photo", 32, "both, gossip"] > recall["projected photo", 32, "shift"] + 0.1
    assert (tmp_path / "coherence.png").stat().st_size > 10_000


def test_degrees_of_the_analysis():
    found = [case[:2] for case in coherence_module.cases(32, 0)]
    sides = (1, 2, 4, 8, 16, 32)
    wanted = [(kind, side) for kind in ("photo pair", "projected photo") for side in sides]
    assert found == [*wanted, *(("synthetic field", length) for length in (0, 1, 2, 4, 8, 16))]


def test_settings_of_the_analysis():
    """Every kind of propagation, alone and with gossip; and the tile search."""
    found = coherence_module.settings(3)
    assert found.pop("tile") == scram.Search("tile", seed=3)
    ways = {(name, one.method, one.propagate, one.gossip > 0, one.seed) for name, one in found.items()}
    kinds = [(way, gossip) for way in ("shift", "stay", "both") for gossip in (False, True)]
    assert ways == {(way + ", gossip" * gossip, "query", way, gossip, 3) for way, gossip in kinds}
