"""`scram bench --distributed`: rows, a table, JSON, and what it refuses."""

import json

import pytest
import torch

from scram.cli import distributed
from scram.cli.measuring import Pictures
from scram.cli.ranks import Ranks
from support import traffic_jobs
from support.command import call
from support.sharded import on_ranks

pytestmark = pytest.mark.slow


class Waiting(Ranks):
    """Processes that there are already, in place of new ones."""

    def __init__(self, size, device, longest):
        self.size = size
        assert device == "cpu"

    def __exit__(self, *_):
        pass

    def measure(self, **asked):
        return on_ranks(self.size, traffic_jobs.measures, **asked)


def test_rows_and_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "Ranks", Waiting)
    few = ("--sizes", 16, "--widths", 8, "--ranks", 2, "--modes", "heads,ring", "--heads", 3, "--out", tmp_path)
    code, printed, complaints = call("bench", "--distributed", *few)
    assert (code, complaints) == (0, "")
    rows = json.loads((tmp_path / "distributed.json").read_text())["rows"]
    assert len(rows) == 4
    assert rows["heads 16 E8 h3 P2"]["skipped"] == "3 heads are no multiple of 2 ranks"
    forward, both = (rows[f"ring 16 E8 h3 P2{end}"] for end in ("", " backward"))
    for row in (forward, both):
        assert row["most"] >= row["seconds"] >= row["least"] > 0
        assert 0 < row["output_error"] < 0.5
        assert len(row["sent_by_rank"]) == row["ranks"] == 2
        assert {"commit", "machine", "date", "peak_bytes", "waited"} <= set(row)
    assert both["sent"] > 3 * forward["sent"]  # keys again, and float32 gradients all the way home
    for word in ("ring", "16x16", "MB sent", "no multiple of 2"):
        assert word in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--modes tree", "modes must be some of heads, gather, ring, got tree"),
        ("--ranks 0", "ranks must be 1 or more"),
        ("--resume", "not for --distributed"),
    ],
)
def test_refusals(words, said, tmp_path):
    code, _, complaints = call("bench", "--distributed", *words.split(), "--out", tmp_path)
    assert code == 2
    assert said in complaints


def test_a_rank_that_fails_ends_it(tmp_path, monkeypatch):
    class Broken:
        def __init__(self, *_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def measure(self, **_):
            raise ValueError("rank 1 of 2: out of memory")

    monkeypatch.setattr(distributed, "Ranks", Broken)
    code, _, complaints = call("bench", "--distributed", "--sizes", 16, "--widths", 8, "--out", tmp_path)
    assert code == 2
    assert "rank 1 of 2: out of memory" in complaints


def test_more_ranks_than_gpus(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="2 ranks need as many GPUs, torch finds 1"):
        distributed.run(tmp_path, "cuda", (16,), (8,), (1, 2), ("ring",), 4, False)


def test_heads_differ():
    picture = torch.rand(8, 8, 3)
    q, k, v = distributed._tensors(Pictures(picture, picture, "cpu"), 16, 4, 8)
    assert q.shape == k.shape == v.shape == (1, 8, 16, 16, 4)
    assert all((q[0, a] != q[0, b]).any() for a in range(8) for b in range(a))
