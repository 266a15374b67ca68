"""benchmarks/tails.py: errors are those of the whole attention, and the picture and the table hold every method."""

import json
import sys
from pathlib import Path

import pytest
import torch

import scram

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
tails = pytest.importorskip("tails")
from store import Store  # noqa: E402


@pytest.fixture(scope="module")
def problem():
    q, k, v = torch.randn(3, 1, 2, 20, 20, 8, generator=torch.Generator().manual_seed(0)).unbind()
    return tails.Problem(q, k, v, 1.0, queries=60)


def error_of_all(problem, out):
    """On the queries that the problem has drawn, from an output of all queries."""
    exact = scram.exact_attention(problem.q, problem.k, problem.v, scale=problem.scale).out
    found, truth = (x.flatten(2, 3)[:, :, problem.some].flatten(2) for x in (out, exact))
    return float(((found - truth).norm(dim=-1) / truth.norm(dim=-1)).mean())


@pytest.mark.parametrize("tail", [None, scram.Clusters(32, keys=0, seed=0), scram.Clusters(32, keys=64, seed=0)])
def test_a_few_queries_have_the_error_of_the_whole_attention(problem, tail):
    found = problem.windows(tails.HEAD) if tail is None else problem.clusters(tail)
    q, k, v = problem.q, problem.k, problem.v
    out = scram.attention(q, k, v, search=tails.HEAD, tail=tail, scale=problem.scale)
    assert found == pytest.approx(error_of_all(problem, out), rel=1e-3)


def test_drawn_tails_and_the_oracle_are_exact_with_all_keys(problem):
    assert problem.drawn(scram.DrawnKeys(400, seed=0)) < 1e-5
    assert problem.oracle(400) < 1e-5
    assert problem.oracle(1) == pytest.approx(
        error_of_all(
            problem,
            scram.attend(
                problem.q, problem.k, problem.v, scram.exact_search(problem.q, problem.k), radius=0, scale=1.0
            ).out,
        ),
        rel=1e-3,
    )


def test_rows_become_a_table_and_a_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(tails, "SIZES", (64, 256))
    monkeypatch.setattr(tails, "PHOTOS", {"stereo": (8,)})
    monkeypatch.setattr("store.PAUSE", 0.0)
    monkeypatch.setattr(tails, "ROUNDS", 1)
    monkeypatch.setattr(tails, "SEEDS", 2)
    store = Store("tails", tmp_path)
    tails.errors(store, None, "", size=42)  # more keys than the default visits
    tails.times(store, size=36)
    rows = json.loads((tmp_path / "tails.json").read_text())
    assert {row["method"] for row in rows.values() if row["set"] == "stereo 8"} == set(tails.LABELS)
    assert {row["method"] for row in rows.values() if row["set"] == "times"} == {*tails.LABELS, "dense"} - {"oracle"}
    assert all(row["commit"] and row["machine"]["cpu"] for row in rows.values())
    assert rows["stereo 8 clusters 292"]["error"] < rows["stereo 8 windows 36"]["error"]
    assert tails.table(rows).count("\n") == 2
    tails.plot(rows, tmp_path / "tails.png")
    assert (tmp_path / "tails.png").stat().st_size > 10_000
