"""Processes that measure: a rank that fails is named, and nobody waits for it."""

from types import SimpleNamespace

import numpy as np
import pytest

from scram.cli.ranks import Ranks, serve

pytestmark = pytest.mark.slow


def test_ranks_measure_and_say_who_failed(tmp_path):
    tensors = np.random.default_rng(0).standard_normal((3, 1, 2, 8, 8, 4), dtype=np.float32)
    np.save(tmp_path / "some.npy", tensors)
    with Ranks(2, "cpu", 120) as ranks:
        said = ranks.measure(file=str(tmp_path / "some.npy"), mode="ring", backward=False)
        with pytest.raises(ValueError, match=r"rank 0 of 2: FileNotFoundError: .*none.npy"):
            ranks.measure(file=str(tmp_path / "none.npy"), mode="ring", backward=False)
    assert not any(process.is_alive() for process in ranks.processes)
    with pytest.raises(ValueError, match="rank 0 of 2: its process ended"):
        ranks.measure(file="", mode="ring", backward=False)
    for one in said:
        assert len(one["seconds"]) == 3
        assert one["sent"] == one["received"] > 4 * 2 * 32 * 8  # float32 keys and values of 32 points, and clusters
        assert one["error"] < one["norm"]


def test_a_rank_that_cannot_begin_says_why():
    said = []
    serve(0, 1, "no such device", "", SimpleNamespace(send=said.append))
    assert len(said) == 1
    assert "failed" in said[0]
