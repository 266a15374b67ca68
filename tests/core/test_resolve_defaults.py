"""What runs when nothing is said: dense attention on small grids, else a search with clusters; and its explanation."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import scram
from scram.core.resolve import CAUSAL_CLUSTERS, CLUSTERS, SEARCHES, default_search, default_tail
from scram.core.tails.base import NO_TAIL
from support.processes import run_python

SMALL = torch.randn(1, 2, 8, 8, 16)
LARGE = torch.zeros(1, 1, 256, 256, 64)


def test_a_small_grid_is_dense_and_exact():
    out = scram.attention(SMALL, SMALL, SMALL)
    flat = SMALL.flatten(2, 3)
    assert torch.equal(out.flatten(2, 3), F.scaled_dot_product_attention(flat, flat, flat))


@pytest.mark.parametrize(
    "said",
    [
        {"search": scram.Search(seed=0)},
        {"impl": "numba"},
        {"tail": None},
        {"tail": scram.Clusters(count=4)},
        {"tail": scram.DrawnKeys(samples=8)},
        {"warm": scram.search(SMALL, SMALL)},
    ],
    ids=lambda said: type(next(iter(said.values()))).__name__,
)
def test_whatever_is_said_makes_it_search(said):
    assert scram.explain(SMALL, SMALL, SMALL).dense
    assert not scram.explain(SMALL, SMALL, SMALL, **said).dense


def test_a_large_grid_is_searched_with_clusters():
    told = scram.explain(LARGE, LARGE, LARGE)
    assert not told.dense
    assert told.tail == CLUSTERS["cpu"]
    assert told.search == SEARCHES["cpu"]
    assert told.scores < told.dense_scores / 30
    assert f"Clusters(count={told.tail.count}, keys={told.tail.keys}" in str(told)
    assert "a search is cheaper" in str(told)


def test_the_tail_where_nothing_is_said():
    tails = {
        ("softmax", False, "dot"): CLUSTERS["cpu"],
        ("softmax", False, "l2"): CLUSTERS["cpu"],
        ("softmax", True, "dot"): CAUSAL_CLUSTERS["cpu"],
        ("mean", False, "dot"): None,
        ("relu", True, "dot"): None,
        ("softmax", False, max): None,
        ("softmax", True, max): None,
    }
    for call, tail in tails.items():
        assert default_tail("cpu", *call) == (NO_TAIL if tail is None else tail)


def test_few_sweeps_where_a_search_starts_from_routed_keys():
    assert default_search("cpu", scram.Clusters(keys=8)) == SEARCHES["cpu"]
    assert SEARCHES["cpu"].sweeps < scram.Search().sweeps
    for tail in (scram.Clusters(keys=0), scram.DrawnKeys(), NO_TAIL):
        assert default_search("cpu", tail) == scram.Search()
    assert scram.explain(SMALL, SMALL, SMALL, tail=scram.Clusters(keys=8)).search == SEARCHES["cpu"]
    assert scram.explain(SMALL, SMALL, SMALL, tail=None).search == scram.Search()
    assert scram.explain(SMALL, SMALL, SMALL, tail=scram.Clusters(keys=8), search=scram.Search()).search.sweeps == 5


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_clusters_of_stretches_stand_beside_a_search_under_causal_order(dropout_p):
    how = {"causal": True, "dropout_p": dropout_p, "radius": 0}
    tail = scram.explain(LARGE, LARGE, LARGE, **how).tail
    assert isinstance(tail, scram.Clusters)
    assert scram.explain(LARGE, LARGE, LARGE, search=scram.Search(), **how).tail == tail
    q, search = torch.randn(1, 2, 8, 24, 16), scram.Search(seed=3)  # three stretches
    found = scram.search(q, q, search=search, causal=True)
    tail = replace(CAUSAL_CLUSTERS["cpu"], seed=3)
    torch.manual_seed(5)
    out = scram.attention(q, q, q, search=search, **how)
    torch.manual_seed(5)
    book = scram.cluster(q, q, q, clusters=tail, causal=True)
    assert torch.equal(out, scram.attend(q, q, q, found, tail=book, **how).out)


def test_a_seed_of_the_search_governs_the_tail():
    search = scram.Search(seed=3)
    tail = scram.Clusters(count=4, keys=8)
    first, again = (scram.attention(SMALL, SMALL, SMALL, search=search, tail=tail) for _ in range(2))
    assert torch.equal(first, again)
    other = scram.attention(SMALL, SMALL, SMALL, search=search, tail=scram.Clusters(count=4, keys=8, seed=9))
    assert not torch.equal(first, other)


def test_a_codebook_as_the_tail():
    search, tail = scram.Search(seed=3), scram.Clusters(count=4, keys=8, seed=1)
    book = scram.cluster(SMALL, SMALL, SMALL, clusters=tail)
    out = scram.attention(SMALL, SMALL, SMALL, search=search, tail=book)
    assert torch.equal(out, scram.attention(SMALL, SMALL, SMALL, search=search, tail=tail))
    with pytest.raises(ValueError, match=r"the call has score='dot', scale=0\.5"):
        scram.attention(SMALL, SMALL, SMALL, tail=book, scale=0.5)


def test_without_a_tail_it_is_the_attention_of_the_windows():
    search = scram.Search(seed=3)
    found = scram.search(SMALL, SMALL, search=search)
    out = scram.attention(SMALL, SMALL, SMALL, search=search, tail=None)
    assert torch.equal(out, scram.attend(SMALL, SMALL, SMALL, found).out)


@pytest.mark.parametrize("causal", [False, True])
def test_with_enough_in_the_tail_a_search_is_exact(causal):
    out = scram.attention(SMALL, SMALL, SMALL, search=scram.Search(seed=0), causal=causal)
    torch.testing.assert_close(out, scram.exact_attention(SMALL, SMALL, SMALL, causal=causal).out)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"tail": "clusters"}, "tail must be"),
        ({"search": "best"}, "search must be one of 'auto'"),
        ({"tail": scram.DrawnKeys(), "weight": "mean"}, "needs weight='softmax'"),
        ({"tail": scram.Snis()}, "tail must be"),
    ],
)
def test_what_does_not_go_together_is_refused(said, message):
    with pytest.raises((ValueError, TypeError), match=message):
        scram.attention(SMALL, SMALL, SMALL, **said)


@pytest.mark.slow
def test_a_dense_call_compiles_nothing():
    """Not even Numba is loaded."""
    lines = "import sys, torch, scram; q = torch.randn(1, 1, 8, 8, 4); scram.attention(q, q, q)"
    lines += "; print('numba' in sys.modules)"
    assert run_python(lines).strip() == "False"


def test_a_device_without_an_engine_is_dense_for_that_reason():
    q = torch.empty(1, 1, 300, 300, 64, device="meta")
    assert scram.explain(q, q, q).reasons == ("meta has no engine that is faster than torch",)


def test_what_torch_cannot_do_is_searched_and_explained():
    told = scram.explain(SMALL, SMALL, SMALL, weight="relu")
    assert not told.dense
    assert "torch's attention has softmax" in str(told)


def test_what_is_no_tensor_is_refused_in_words():
    with pytest.raises(TypeError, match="q must be"):
        scram.attention(1, SMALL, SMALL)


def test_an_unknown_argument_is_explained():
    with pytest.raises(TypeError, match=r"explain\(\) has no argument attn_mask; use key_mask="):
        scram.explain(SMALL, SMALL, SMALL, attn_mask=None)
