"""The cost model has the constants of the stored rows, and calls over slow links take as long as it says."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from support import traffic_jobs
from support.sharded import on_ranks

FOLDER = Path(__file__).parents[2] / "benchmarks"
TOLERANCE = 0.15


@pytest.fixture(autouse=True)
def _from_their_folder(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def test_constants_are_those_of_the_stored_rows():
    import distributed_model

    fitted = distributed_model.fit()
    for name, value in fitted["constants"].items():
        assert getattr(distributed_model.H200, name) == pytest.approx(value, rel=1e-3), name
    assert max(map(abs, fitted["off"].values())) < 0.03


def test_predictions_that_are_stored_are_those_of_the_model(monkeypatch, capsys):
    import distributed_model

    stored = json.loads((FOLDER / "results" / "distributed_model.json").read_text())
    for heads in distributed_model.HEADS:
        made = json.loads(json.dumps(distributed_model.predictions(heads)))
        assert made == stored[f"heads {heads}"]["rows"], "python benchmarks/distributed_model.py --store"
    monkeypatch.setattr(sys, "argv", ["distributed_model.py"])
    distributed_model.main()
    printed = capsys.readouterr().out
    assert "that differ: none" in printed
    assert f"{distributed_model.predict(1e8, 64, heads=1, backward=True)['ring'].seconds:.3g} s" in printed


@pytest.mark.slow
def test_calls_over_slow_links_take_as_long_as_the_model_says(monkeypatch):
    import distributed_simulation as simulation

    def spawn(work, given, number):
        size, folder, cases = given
        assert (work, size) == (simulation.work, number)
        on_ranks(number, traffic_jobs.simulates, folder=folder, cases=list(map(asdict, cases)))

    monkeypatch.setattr(simulation, "mp", SimpleNamespace(spawn=spawn))  # processes that there are
    links = simulation.Case("ring", 3, True, 300, 75), simulation.Case("gather", 3, True, 400, 75)
    computes = simulation.Case("ring", 3, False, 300, 400)
    rows = simulation.simulate((*links, computes))
    assert len(rows) == 3
    for name, row in rows.items():
        assert row["model"] == pytest.approx(row["seconds"], rel=TOLERANCE), name
    # The cases tell a schedule that overlaps from one that does not, and one that waits for the link from one that
    # does not.
    one, step = rows[computes.name], 0.3
    assert 3 * one["visit"] + 2 * step > (1 + TOLERANCE) * one["seconds"]
    assert 6 * rows[links[0].name]["visit"] < (1 - TOLERANCE) * rows[links[0].name]["seconds"]
