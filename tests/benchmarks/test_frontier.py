"""The frontier: which sets stand for a kind, who is the fastest within a budget, errors and times of a small set."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    frontier = importlib.import_module("frontier")
    plot = importlib.import_module("frontier_plot")
    tables = importlib.import_module("tables_frontier")


def errors(kind, choose, **of):
    rows = {name.replace("_", "-"): {"output_error": x, "p95_error": 2 * x} for name, x in of.items()}
    return {"kind": kind, "choose": choose, "errors": rows}


ROWS = {
    "errors a": errors("K, 64x64", False, scram=0.02, scram_clusters_128=0.08, best_blocks_4=0.05, top_k_16=0.01),
    "errors b": errors("K, 64x64", False, scram=0.04, scram_clusters_128=0.2, best_blocks_4=0.02, top_k_16=0.01),
    "errors c": errors("K, 64x64", True, scram=9.0, scram_clusters_128=9.0, best_blocks_4=9.0, top_k_16=9.0),
    "times K, 64x64": {
        "grid": [64, 64],
        "heads": 2,
        "dense_ms": 100.0,
        "times": {
            name: {"of_dense": x}
            for name, x in {
                "sdpa": 1.0,
                "scram": 0.5,
                "scram-clusters-128": 0.1,
                "best-blocks-4": 0.3,
                "flex-blocks-4": 0.2,
                "top-k-16": 0.01,
            }.items()
        },
    },
}


def test_the_fastest_keeps_the_budget_on_every_held_out_set():
    assert tables.fastest("K, 64x64", ROWS, 0.1, ours=True) == ("scram", 0.5)  # 128 clusters: .2 on one set
    assert tables.fastest("K, 64x64", ROWS, 0.1, ours=False) == ("flex-blocks-4", 0.2)  # errors of best-blocks-4
    assert tables.fastest("K, 64x64", ROWS, 0.03, ours=True) is None
    assert tables.fastest("K, 64x64", ROWS, 0.3, ours=True) == ("scram-clusters-128", 0.1)


def test_a_table_shows_losses(monkeypatch):
    monkeypatch.setattr(tables.table_cells, "load", lambda name: ROWS)
    assert tables.frontier().splitlines()[-1].endswith("| scram, 2 | **flex-blocks-4, 5** | none | none |")
    assert "| 2 | .030 | .040 | .080 | 2 |" in tables.frontier_default()


def test_the_picture_joins_sets_by_geometric_means(tmp_path):
    points = {point.name: point for point in plot.points_of("K, 64x64", ROWS)}
    assert points["scram"].error == pytest.approx((0.02 * 0.04) ** 0.5)
    assert points["scram-clusters-128"][1:4] == ("scram-clusters", 128, 0.1)
    assert plot.joined(ROWS)[1] == 2
    plot.draw(ROWS, tmp_path)
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("frontier.png", "frontier_kinds.png"))


def test_held_out_sets_come_first(tmp_path):
    for name in ("sam2_coffee_64x64_block5", "sam2_chelsea_64x64_block9", "qkv_sam2_coffee_block5", "moonshine_layer0"):
        np.savez(tmp_path / f"{name}.npz", q=np.zeros(1))
    found = frontier.sets_of("SAM 2, 64x64", tmp_path)
    assert found[0] == "sam2_chelsea_64x64_block9"
    assert set(found[1:]) == {"sam2_coffee_64x64_block5", "qkv_sam2_coffee_block5"}
    with pytest.raises(SystemExit, match="no set of the kind"):
        frontier.sets_of("MobileSAM, 64x64", tmp_path)


@pytest.mark.slow
def test_errors_and_times_of_a_small_set():
    q, k, v = torch.randn(3, 1, 2, 16, 24, 16, generator=torch.Generator().manual_seed(0)).unbind()
    names = ["sdpa", "top-k-64", "best-blocks-4", "best-blocks-16"]
    about, errors, times = frontier.measured((q, k, v, 0.5), "cpu", names, timed=True)
    exact = torch.nn.functional.scaled_dot_product_attention(*(x.flatten(2, 3) for x in (q, k, v)), scale=0.5)
    out = frontier.judge.baselines.top_keys(q, k, v, 0.5, 64).flatten(2, 3)
    off = (out - exact).norm(dim=(-1, -2)) / exact.norm(dim=(-1, -2))
    assert errors["top-k-64"]["output_error"] == pytest.approx(float(off.max()), rel=1e-3)
    assert errors["sdpa"]["output_error"] < 1e-5
    assert "there are 6 blocks" in errors["best-blocks-16"]["failed"]
    assert set(times) == {"sdpa", "top-k-64", "best-blocks-4"}
    assert about["grid"] == [16, 24]
    assert all(one["of_dense"] > 0 for one in times.values())
