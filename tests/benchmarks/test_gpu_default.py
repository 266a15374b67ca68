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
        assert {(row.engine, row.kappa) for row in rows if row.shape == shape and row.part == "whole"} == {
            ("default", 1),
            ("default", 4),
            ("paper", 1),
            ("cudnn", 1),
        }
    assert {row.part for row in rows} == {"whole", "clusters", "warm", "memory"}
    for row in rows:
        assert any(gpu_default.dense_name(gpu_default.fields(row, 1)) == other.name for other in rows)


def test_a_row_that_fails_says_why_and_the_next_one_runs(monkeypatch, bench):
    def measure(self, row):
        if row.kappa == 4:
            raise AssertionError("a kernel that does not exist")
        return {"ms": 2.0 if row.engine == "cudnn" else 0.5}

    monkeypatch.setattr(gpu_default.Bench, "measure", measure)
    monkeypatch.setattr(gpu_default.Bench, "quality", lambda self, row: {"recall": 0.5})
    store = Kept()
    gpu_default.run(bench.data, store, 60, "", "abc", "auto", 1)
    assert len(store.data) == len(list(gpu_default.matrix()))
    for row in store.data.values():
        assert ("failed" in row) == (row["kappa"] == 4)
    table = gpu_default.table(store.data)
    assert "AssertionError: a kernel that does not exist" in table
    line = next(line for line in table.splitlines() if line.startswith("| default 512 E64 h1 k1 |"))
    assert line.split(" | ")[1:6] == ["0.500", "-", "2.200", "4.0", "0.500"]


def test_without_time_nothing_is_measured_and_every_row_says_so(bench):
    store = Kept()
    gpu_default.run(bench.data, store, -1, "", "abc", "auto", 1)
    assert all("the time was spent" in row["not_measured"] for row in store.data.values())


@pytest.mark.parametrize("kappa", [1, 4])
def test_errors_are_those_of_the_whole_attention(bench, monkeypatch, kappa):
    monkeypatch.setattr(gpu_default, "TRUTHS", (("stereo", 8.0),))
    row = gpu_default.Row(SMALL, kappa=kappa)
    found = bench.quality(row)
    q, k, v = bench.tensors(SMALL)
    settings = scram.Search(matches=kappa, separation=2 * (kappa > 1), seed=0)
    out = scram.attention(q, k, v, search=settings, scale=8.0)
    exact = scram.exact_attention(q, k, v, scale=8.0).out
    error = (out - exact).flatten(2).norm(dim=-1) / exact.flatten(2).norm(dim=-1)
    assert found["error_stereo_8"] == pytest.approx(float(error.mean()), rel=0.2)  # on some of the queries
    paper = bench.quality(gpu_default.Row(SMALL, "paper"))
    assert found["error_stereo_8"] < paper["error_stereo_8"]


def test_every_kind_of_row_runs_on_a_cpu(bench):
    parts = [{}, {"engine": "cudnn"}, {"engine": "paper"}, {"backward": True}, {"part": "clusters"}, {"part": "warm"}]
    for more in parts:
        found = bench.measure(gpu_default.Row(SMALL, **more))
        assert found["ms"] > 0 or more.get("part"), more  # a difference of two times may be anything
        assert torch.tensor(found["ms"]).isfinite()
    memory = bench.measure(gpu_default.Row(SMALL, kappa=4, part="memory"))
    assert memory["limit_bytes"] == (64 * 4 + 8) * 24 * 24 * 2
