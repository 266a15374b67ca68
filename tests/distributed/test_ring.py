"""Keys go from rank to rank: the result is that of `merge` in one process, with its gradients."""

import pytest
import torch

import scram
from support import sharded_jobs as jobs
from support.photos import projected
from support.sharded import on_ranks

pytestmark = pytest.mark.slow  # each spawns processes


@pytest.mark.parametrize(
    ("rows", "tail"),
    [((7,), "drawn"), ((3, 4), "clusters"), ((3, 4), "drawn"), ((4, 2, 1), None), ((2, 1, 3, 1), "clusters")],
    ids=str,
)
def test_equals_merge_in_one_process(rows, tail):
    on_ranks(len(rows), jobs.ring_equals_merge, rows=rows, key_rows=rows[::-1], tail=tail)


@pytest.mark.parametrize(
    ("rows", "key_rows"),
    [((5, 0, 2), (1, 3, 2)), ((2, 3, 2), (0, 4, 1)), ((1, 0, 0), (0, 0, 1)), ((0, 1, 1), (1, 0, 1))],
    ids=str,
)
def test_empty_shards_and_more_ranks_than_rows(rows, key_rows):
    on_ranks(3, jobs.ring_equals_merge, rows=rows, key_rows=key_rows)


@pytest.mark.parametrize("mask", ["keys", "heads"])
@pytest.mark.parametrize("tail", [None, "clusters"])
def test_masks_and_grouped_heads(mask, tail):
    shards = {"rows": (2, 3, 2), "key_rows": (4, 0, 3)}
    on_ranks(3, jobs.ring_equals_merge, **shards, heads=4, key_heads=2, mask=mask, tail=tail)


@pytest.mark.parametrize("tail", [None, "clusters"])
def test_bfloat16(tail):
    on_ranks(2, jobs.ring_equals_merge, rows=(2, 3), key_rows=(4, 3), bits=16, tail=tail)


def test_default_engine():
    on_ranks(2, jobs.ring_equals_merge, rows=(2, 3), key_rows=(4, 3), engine="auto")


def test_scores_weights_and_ranks():
    on_ranks(2, jobs.ring_equals_merge, rows=(9, 5), key_rows=(4, 8), extents=(), score="l2")
    on_ranks(2, jobs.ring_equals_merge, rows=(2, 1), key_rows=(1, 3), extents=(2, 3), score="cosine", tail=None)
    on_ranks(2, jobs.ring_equals_merge, rows=(2, 1), key_rows=(1, 3), weight="mean", tail=None)


@pytest.mark.parametrize("change", [{}, {"keys": 0}, {"first_order": False}], ids=["", "no keys", "no slope"])
def test_clusters_of_several_tiles(change):
    """A tile attends its share of the keys of a shard one by one, and a search starts from them."""
    on_ranks(2, jobs.ring_equals_merge, rows=(9, 10), key_rows=(8, 4), extents=(9,), **{"keys": 40, **change})


@pytest.mark.parametrize("search", [True, False], ids=["windows", "alone"])
@pytest.mark.parametrize("tail", ["all keys routed", "one cluster a key"])
def test_clusters_that_cover_every_key_are_exact_attention(tail, search):
    on_ranks(2, jobs.covering_is_exact, rows=(9, 3), key_rows=(2, 5), mode="ring", tail=tail, search=search)
    on_ranks(
        3,
        jobs.covering_is_exact,
        rows=(3, 0, 2),
        key_rows=(0, 4, 3),
        mode="ring",
        tail=tail,
        search=search,
        mask="keys",
    )


@pytest.mark.parametrize("mode", ["ring", "gather", "heads"])
def test_neither_search_nor_tail_is_dense_attention(mode):
    on_ranks(2, jobs.covering_is_exact, rows=(3, 2), key_rows=(2, 4), mode=mode, tail="no tail", search=False)


@pytest.mark.parametrize("search", [scram.Search(sweeps=1, seed=0), None], ids=["windows", "alone"])
def test_clusters_are_no_further_from_exact_attention_than_of_one_process(search):
    alone, found = (
        jobs.smooth_error(x)
        for x in (
            scram.attention(*jobs.smooth(), search=search, **jobs.SMOOTH),
            torch.cat(on_ranks(2, jobs.smooth_rows, mode="ring", search=search), 2),
        )
    )
    assert found < alone, (found, alone)


@pytest.mark.parametrize("rows", [(3, 4), (4, 0, 1)], ids=str)
def test_windows_over_every_key_are_exact_attention(rows):
    on_ranks(len(rows), jobs.ring_of_all_keys_is_exact, rows=rows, key_rows=rows[::-1])


def test_graph_keeps_no_keys_of_other_ranks():
    """What is kept depends on the rank's own shards, not on how many ranks there are."""
    alone, *_ = on_ranks(1, jobs.held_by_backward, rows=4)
    for size in (2, 3):
        assert on_ranks(size, jobs.held_by_backward, rows=4) == [alone] * size


def test_a_ring_is_no_further_from_exact_attention():
    q, k = projected("astronaut", 64)
    exact = scram.exact_attention(q, k, k, scale=32.0).out[0, 0]

    def error(out):
        return float(((out - exact).norm(dim=-1) / exact.norm(dim=-1)).mean())

    how = [{"search": scram.Search(seed=seed), "tail": scram.Clusters(64), "scale": 32.0} for seed in range(3)]
    alone = error(torch.stack([scram.attention(q, k, k, **one)[0, 0] for one in how]))
    for ranks in (2, 4):
        assert error(torch.cat(on_ranks(ranks, jobs.photo_rows, way="ring", seeds=3), 1)) < alone


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_memory_falls_with_the_ranks(backward):
    """Two ranks hold messages that one does not; from then on twice the ranks have half the memory each.

    The least of three: a rank holds a message until its neighbor, on a busy machine late, has taken it.
    """
    two, four = (
        min(max(on_ranks(ranks, jobs.most_memory, points=256, backward=backward)) for _ in range(3)) for ranks in (2, 4)
    )
    assert 0.4 * two < four < 0.65 * two, (two, four)
