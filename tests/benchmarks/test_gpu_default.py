"""benchmarks/gpu_default.py: what it measures, that a failed row does not stop it, and that its figures are right."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import scram

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
gpu_default = pytest.importorskip("gpu_default")
from gpu_sets import Data  # noqa: E402

SMALL = gpu_default.Shape(24, 16, 2)


class Kept:
    """A store in memory."""

    def __init__(self):
        self.data = {}

    def put(self, name, commit, /, **row):
        self.data[name] = {**row, "commit": commit}


@pytest.fixture
def bench(tmp_path):
    """On the CPU, with pictures of noise."""
    left, right, photo = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    np.savez(tmp_path / "pictures.npz", left=left, right=right, astronaut=photo)
    return gpu_default.Bench(Data(tmp_path, "cpu"), "auto", 1)


def test_the_matrix_holds_what_is_wanted_beside_cudnn():
    rows = list(gpu_default.matrix())
    assert len({row.name for row in rows}) == len(rows)
    for shape in gpu_default.LIMITS:
        engines = {row.engine for row in rows if row.shape == shape and row.part == "whole"}
        assert engines >= {"default", "none", "cudnn"}
    assert {row.part for row in rows} == {"whole", "clusters", "memory"}
    for row in rows:
        assert any(gpu_default.dense_name(gpu_default.fields(row, 1)) == other.name for other in rows)


def test_a_row_that_fails_says_why_and_the_next_one_runs(monkeypatch, bench):
    def measure(self, row):
        if row.backward:
            raise AssertionError("a kernel that does not exist")
        return {"ms": 2.0, "queued_ms": 2.0} if row.engine == "cudnn" else {"ms": 0.5, "graph_ms": 0.4}

    monkeypatch.setattr(gpu_default.Bench, "measure", measure)
    monkeypatch.setattr(gpu_default.Bench, "quality", lambda self, row: {"error_stereo_8": 0.5})
    store = Kept()
    gpu_default.run(bench.data, store, 60, "", "abc", "auto", 1)
    assert len(store.data) == len(list(gpu_default.matrix()))
    for row in store.data.values():
        assert ("failed" in row) == row["backward"]
    table = gpu_default.table(store.data)
    assert "AssertionError: a kernel that does not exist" in table
    line = next(line for line in table.splitlines() if line.startswith("| default 512 E64 h1 k1 |"))
    assert line.split(" | ")[1:7] == ["0.500", "-", "0.400", "1.500", "5.0", "0.500"]


def test_without_time_nothing_is_measured_and_every_row_says_so(bench):
    store = Kept()
    gpu_default.run(bench.data, store, -1, "", "abc", "auto", 1)
    assert all("the time was spent" in row["not_measured"] for row in store.data.values())


@pytest.mark.parametrize("engine", ["default", "none"])
def test_errors_are_those_of_the_whole_attention(bench, monkeypatch, engine):
    monkeypatch.setattr(gpu_default, "TRUTHS", (("stereo", 8.0),))
    row = gpu_default.Row(SMALL, engine)
    found = bench.quality(row)
    q, k, v = bench.tensors(SMALL)
    out = scram.attention(q, k, v, **bench.settings(row, 0), scale=8.0)
    exact = scram.exact_attention(q, k, v, scale=8.0).out
    error = (out - exact).flatten(2).norm(dim=-1) / exact.flatten(2).norm(dim=-1)
    assert found["error_stereo_8"] == pytest.approx(float(error.mean()), rel=0.2)  # on some of the queries
    paper = bench.quality(gpu_default.Row(SMALL, "paper"))
    assert found["error_stereo_8"] < paper["error_stereo_8"]


def test_every_kind_of_row_runs_on_a_cpu(bench):
    parts = [{}, {"engine": "none"}, {"engine": "cudnn"}, {"engine": "paper"}, {"backward": True}, {"part": "clusters"}]
    for more in parts:
        found = bench.measure(gpu_default.Row(SMALL, **more))
        assert found["ms"] > 0, more
        assert torch.tensor(found["ms"]).isfinite()
    memory = bench.measure(gpu_default.Row(SMALL, kappa=4, part="memory"))
    assert memory["limit_bytes"] == (64 * 4 + 32 + 16 + 2 * 16 * 4) * 24 * 24 * 2
