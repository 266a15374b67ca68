"""`scram.explore`: what it says of itself, what it refuses, grids of every rank, and what it thins."""

import pytest
import torch

import scram
from scram.core.resolve import CLUSTERS, SEARCHES
from scram.explorer.api import MOST_POINTS, explore
from scram.explorer.page import read_back
from scram.quality.truth import Truth

Q = torch.randn(2, 4, 8, 10, 6, generator=torch.Generator().manual_seed(0))
K = torch.randn(2, 2, 9, 7, 6, generator=torch.Generator().manual_seed(1))


def test_the_figures_are_those_of_trust(known):
    trusted = scram.trust(
        known.q, known.k, known.v, search=known.search, tail=known.clusters, scale=1.5, num_queries=64, seed=0
    )
    quality = known.page.numbers["quality"]
    assert quality["mass"] == pytest.approx(float(trusted.mass.value.mean()), rel=1e-4)
    for head, one in enumerate(quality["heads"]):
        assert one["output"] == pytest.approx(float(trusted.tail_output_error[0, head]), rel=1e-3)
        assert one["median"] == pytest.approx(float(trusted.tail_median_error.value[0, head]), rel=1e-3)
        assert one["p95"] == pytest.approx(float(trusted.tail_p95_error.value[0, head]), rel=1e-3)
    grown = [sum(one) for one in quality["sweeps"]]
    assert len(grown) == 5
    assert grown[-1] > 2 * grown[0]


def test_the_share_attended_key_by_key(known, unsearched):
    """By windows and routes as masks over exact attention, written out."""
    q, k, v = known.q, known.k, known.v
    book = scram.cluster(q, k, v, clusters=known.clusters, scale=1.5)
    chosen = scram.route(q, k, book).chosen
    matches = scram.search(q, k, search=known.search, codebook=book, scale=1.5)
    weights = (1.5 * q.flatten(2, 3) @ k.flatten(2, 3).mT).softmax(-1)
    sampled = Truth.of(q, k, v, num_queries=64, seed=0).queries
    shares = torch.zeros(2, 2)
    for head in range(2):
        label = book.label[0, head].flatten().long()
        for at in sampled.tolist():
            row, column = divmod(at, 26)
            routed = chosen[0, head, row // 8 * 4 + column // 8][label]
            near = torch.zeros(20, 26, dtype=torch.bool)
            for found in matches.index[0, head, row, column].tolist():
                r, c = divmod(found, 26)
                near[max(r - 1, 0) : r + 2, max(c - 1, 0) : c + 2] = True
            shares[0, head] += weights[0, head, at][routed | near.flatten()].sum() / len(sampled)
            shares[1, head] += weights[0, head, at][routed].sum() / len(sampled)
    assert known.page.numbers["quality"]["attended"] == pytest.approx(float(shares[0].mean()), rel=1e-4)
    assert unsearched.page.numbers["quality"]["attended"] == pytest.approx(float(shares[1].mean()), rel=1e-4)


def test_without_a_search_there_are_no_matches(known, unsearched):
    about = unsearched.page.numbers
    assert (about["matches"], about["sweeps"], about["quality"]["mass"], about["quality"]["sweeps"]) == (0, 0, 0, [])
    assert "routed keys hold" in repr(unsearched.page)
    assert "windows" not in repr(unsearched.page)
    out = scram.attention(known.q, known.k, known.v, search=None, tail=known.clusters, scale=1.5)
    off = Truth.of(known.q, known.k, known.v, scale=1.5, num_queries=64).errors(out)
    assert about["quality"]["heads"][1]["p95"] == pytest.approx(float(off.p95.value[0, 1]), rel=1e-3)


def test_the_default_is_that_of_attention():
    about = explore(Q, Q, Q, num_queries=8).numbers
    assert about["sweeps"] == SEARCHES["cpu"].sweeps
    assert about["matches"] == SEARCHES["cpu"].matches
    assert about["clusters"] == min(CLUSTERS["cpu"].count, 80)
    assert about["routed_keys"] == CLUSTERS["cpu"].keys


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
    "search=None beside tail='auto' is dense attention; pass tail=scram.Clusters()": {"search": None},
    "search=None beside tail=None is dense attention": {"search": None, "tail": None},
    "most_points must be": {"most_points": 0},
}


@pytest.mark.parametrize("message", WRONG)
def test_refusals(message):
    with pytest.raises((ValueError, TypeError)) as caught:
        explore(Q, K, K, **{"search": scram.Search(sweeps=0, seed=0), **WRONG[message]})
    assert message in str(caught.value)
