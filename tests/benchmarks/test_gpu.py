"""The matrix of benchmarks/gpu.py: what is measured, what is continued as n^2, and what is not measured again."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
gpu = pytest.importorskip("gpu")


class Kept:
    """A store in memory."""

    def __init__(self):
        self.data = {}

    def put(self, name, commit, /, **row):
        self.data[name] = {**row, "commit": commit}


@pytest.fixture
def measured(monkeypatch):
    """The rows that were measured, each taking as long as a dense call may."""
    rows = []

    def measure(row, data):
        rows.append(row)
        return {"ms": 1e-8 * row.size**4 * row.heads if row.engine in gpu.DENSE else 1.0, "calls": 3}

    monkeypatch.setattr(gpu, "measure", measure)
    return rows


def test_the_matrix_holds_every_combination():
    rows = list(dict.fromkeys(gpu.matrix()))
    assert len({row.name for row in rows}) == len(rows)
    forward = {
        (row.engine, row.width, row.heads, row.size) for row in rows if row.data == "stereo" and not row.backward
    }
    for engine in ("paper", "cudnn", "flash"):
        assert {(engine, width, heads, 512) for width in gpu.WIDTHS for heads in gpu.HEADS} <= forward
    assert {row.size for row in rows if row.engine == "flex local"} == {64, 128, 256, 512}


def test_a_dense_call_above_two_seconds_is_continued_and_marked(measured):
    store = Kept()
    gpu.run(None, store, 60, "cudnn stereo", False, "abc")
    for name, row in store.data.items():
        ms = 1e-8 * row["size"] ** 4 * row["heads"]
        assert row["ms"] == pytest.approx(ms)
        assert ("extrapolated_from" in row) == (ms > 2000), name
        assert ("calls" in row) == (ms <= 2000), name
    assert any("extrapolated_from" in row for row in store.data.values())
    assert all(1e-8 * row.size**4 * row.heads <= 2000 for row in measured)


def test_again_measures_what_the_code_changes_and_what_is_compared_with_it(measured):
    store = Kept()
    gpu.run(None, store, 60, "stereo 512 E64 h1 k1", False, "abc")
    before = len(measured)
    gpu.run(None, store, 60, "stereo 512 E64 h1 k1", False, "new")
    assert len(measured) == before
    gpu.run(None, store, 60, "stereo 512 E64 h1 k1", True, "new")
    again = {(row.engine, row.backward) for row in measured[before:]}
    assert again == {(engine, backward) for engine in ("paper", "cudnn") for backward in (False, True)} | {
        ("captured", False),
        ("no tail", False),
    }
    assert store.data[gpu.Row("flash").name]["commit"] == "abc"
