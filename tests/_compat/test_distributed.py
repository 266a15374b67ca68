"""Collectives by the new name or the old one."""

import torch.distributed as dist

from scram._compat import distributed


def test_new_names_come_first(monkeypatch):
    monkeypatch.setattr(dist, "gather_new", "new", raising=False)
    monkeypatch.setattr(dist, "gather_old", "old", raising=False)
    assert distributed._either("gather_new", "gather_old") == "new"
    monkeypatch.delattr(dist, "gather_new")
    assert distributed._either("gather_new", "gather_old") == "old"


def test_they_are_torchs():
    for function in (distributed.all_gather_single, distributed.reduce_scatter_single):
        assert function.__module__.startswith("torch.distributed")
