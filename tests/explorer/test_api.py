"""`scram.explore`: what it says of itself, what it refuses, grids of every rank, and what it thins."""

import pytest
import torch

import scram
from scram.explorer.api import MOST_POINTS, explore
from scram.explorer.page import read_back

Q = torch.randn(2, 4, 8, 10, 6, generator=torch.Generator().manual_seed(0))
K = torch.randn(2, 2, 9, 7, 6, generator=torch.Generator().manual_seed(1))


def test_the_figures_are_those_of_trust(known):
    trusted = scram.trust(
        known.q, known.k, known.v, search=known.search, tail=known.clusters, scale=1.5, num_queries=64, seed=0
    )
    quality = known.page.numbers["quality"]
    assert quality["mass"] == pytest.approx(float(trusted.mass.value.mean()), rel=1e-4)
    for head, one in enumerate(quality["heads"]):
        assert one["median"] == pytest.approx(float(trusted.tail_median_error.value[0, head]), rel=1e-3)
        assert one["p95"] == pytest.approx(float(trusted.tail_p95_error.value[0, head]), rel=1e-3)
    grown = [sum(one) for one in quality["sweeps"]]
    assert len(grown) == 7
    assert grown[-1] > 2 * grown[0]


def test_a_page_is_saved_whole_and_prints_itself(known, tmp_path):
    assert repr(known.page).startswith("Explorer(20 x 26 queries, 20 x 26 keys, 2 heads, 0.")
    assert known.path.read_text(encoding="utf-8") == known.page.html
    assert known.page.size == known.path.stat().st_size
    known.page.save(tmp_path / "a.html")
    with pytest.raises(FileNotFoundError, match="none"):
        known.page.save(tmp_path / "none" / "a.html")
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]
    assert known.page._repr_html_().startswith("<iframe")


def test_unequal_grids_grouped_heads_and_a_sample_of_the_batch():
    made = explore(Q, K, K, batch=1, search=scram.Search(matches=2, sweeps=2, seed=0), radius=(1, 2), score="cosine")
    about = made.numbers
    assert (about["panes"], about["group"], len(about["heads"]), about["radius"]) == (2, 2, 4, [1, 2])
    alone = explore(
        Q[1:], K[1:], K[1:], search=scram.Search(matches=2, sweeps=2, seed=0), radius=(1, 2), score="cosine"
    )
    assert read_back(made.html)[1] == read_back(alone.html)[1]
    assert made.numbers["notes"] == ["Sample 1 of a batch of 2."]


@pytest.mark.parametrize("grid", [(40,), (4, 5, 6)], ids=str)
def test_grids_of_other_ranks(grid):
    k = torch.randn(1, 1, *grid, 4)
    made = explore(k, k, k, search=scram.Search(sweeps=1, seed=0), tail=None, score="l2", impl="reference")
    assert made.numbers["panes"] == 1
    assert made.numbers["clusters"] == 0
    assert made.numbers["keys"]["grid"] == list(grid)


def test_large_grids_are_thinned_and_say_so():
    k = torch.randn(1, 2, 30, 40, 4)
    made = explore(k, k, k, pictures=torch.rand(30, 40, 1), most_points=700, search=scram.Search(sweeps=1, seed=0))
    about = made.numbers
    assert about["thinned"] == {"stride": 2, "queries": [30, 40], "keys": [30, 40]}
    assert about["keys"]["grid"] == [15, 20]
    assert about["queries"]["stride"] == 1
    stored = {entry["name"]: entry["shape"] for entry in read_back(made.html)[0]["arrays"]}
    assert stored["picture_queries"] == [3, 15 * 20]
    assert explore(k, k, k, search=scram.Search(sweeps=0, seed=0)).numbers["thinned"] is None
    assert MOST_POINTS == 4 * 256 * 256


def test_queries_are_thinned_before_features_get_too_coarse():
    k = torch.randn(1, 1, 48, 48, 32)
    wide = explore(3 * k, k, k, search=scram.Search(sweeps=1, seed=0))
    small = explore(3 * k, k, k, search=scram.Search(sweeps=1, seed=0), budget=wide.size // 2)
    assert small.size <= wide.size // 2
    assert small.numbers["queries"]["stride"] > wide.numbers["queries"]["stride"] == 1
    assert small.numbers["keys"]["grid"] == [48, 48]
    assert small.numbers["map_error"] < 0.2


PICTURE = torch.rand(8, 10, 3)
WRONG = {
    "batch must be below the 2 samples of q, got 2": {"batch": 2},
    "panes must be one of 'auto', 'one', 'two', got 'three'": {"panes": "three"},
    'panes="one" needs equal grids of queries and keys, got (8, 10) and (9, 7)': {"panes": "one"},
    'score must be "dot", "cosine" or "l2": a page cannot hold a callable score': {"score": lambda q, k: q.sum(-1)},
    "pictures must be two, as the grids (8, 10) and (9, 7) differ": {"pictures": PICTURE},
    "pictures must be [*G, 3] or [*G, 1] of grid (8, 10), then one of (9, 7), got [(8, 10, 3), (8, 10, 3)]": {
        "pictures": (PICTURE, PICTURE)
    },
    "budget must be at least about": {"budget": 50_000},
    "tail must be a scram.Clusters": {"tail": scram.DrawnKeys()},
    "most_points must be": {"most_points": 0},
}


@pytest.mark.parametrize("message", WRONG)
def test_refusals(message):
    with pytest.raises((ValueError, TypeError)) as caught:
        explore(Q, K, K, **{"search": scram.Search(sweeps=0, seed=0), **WRONG[message]})
    assert message in str(caught.value)
