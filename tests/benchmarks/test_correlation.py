"""The script that measures the correlation lookup: its own rival is RAFT's lookup, and a rival may fail."""

import json
from pathlib import Path

import pytest
import torch


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import correlation

    threads, cudnn = torch.get_num_threads(), torch.backends.cudnn.enabled
    yield correlation
    torch.set_num_threads(threads)
    torch.backends.cudnn.enabled = cudnn


def test_it_runs_without_the_other_package(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "SAMPLES", 2**20)  # some lines at a time
    script.main(None, 16, 19, "cpu", 1, tmp_path)
    row = json.loads((tmp_path / "correlation.json").read_text())["cpu, 16x19"]
    assert row["gradient_error"] < 1e-5
    assert row["SCRAM"]["largest_error"] < 1e-5
    assert row["sampled"]["largest_error"] < 1e-4


def test_a_rival_that_fails_is_stored(script, tmp_path, monkeypatch):
    class Failing(script.Sampled):
        def __call__(self, coords):
            raise RuntimeError("too large\nmore")

    monkeypatch.setattr(script, "load", lambda folder: {"on demand": Failing})
    script.main(Path("somewhere"), 16, 16, "cpu", 1, tmp_path)
    row = json.loads((tmp_path / "correlation.json").read_text())["cpu, 16x16"]
    assert row["on demand"] == {"failed": "too large"}
    assert "median_ms" in row["SCRAM"]
