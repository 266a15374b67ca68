"""Keys of all ranks come together: given the same matches it is `attend`."""

import pytest
import torch

import scram
from support import sharded_jobs as jobs
from support.sharded import on_ranks

pytestmark = pytest.mark.slow  # each spawns processes


@pytest.mark.parametrize("rows", [(7,), (3, 4), (4, 2, 1), (2, 1, 3, 1)], ids=str)
def test_equals_attend_of_one_process(rows):
    on_ranks(len(rows), jobs.gather_equals_attend, rows=rows, key_rows=rows)


@pytest.mark.parametrize(
    ("rows", "key_rows"),
    [((5, 0, 2), (1, 3, 2)), ((2, 3, 2), (0, 4, 1)), ((1, 0, 0), (0, 0, 1)), ((0, 1, 1), (1, 0, 1))],
    ids=str,
)
def test_empty_shards_and_more_ranks_than_rows(rows, key_rows):
    for tail in (False, True):
        on_ranks(3, jobs.gather_equals_attend, rows=rows, key_rows=key_rows, tail=tail)


@pytest.mark.parametrize("mask", ["keys", "heads", "some"])
@pytest.mark.parametrize("tail", [False, True], ids=["windows", "clusters"])
def test_masks_and_grouped_heads(mask, tail):
    on_ranks(
        3, jobs.gather_equals_attend, rows=(2, 3, 2), key_rows=(4, 1, 3), heads=4, key_heads=2, mask=mask, tail=tail
    )


@pytest.mark.parametrize("tail", [False, True], ids=["windows", "clusters"])
def test_bfloat16(tail):
    on_ranks(2, jobs.gather_equals_attend, rows=(2, 3), key_rows=(4, 3), bits=16, tail=tail)


def test_scores_weights_and_ranks():
    on_ranks(2, jobs.gather_equals_attend, rows=(9, 5), key_rows=(4, 8), extents=(), score="l2", tail=True)
    on_ranks(2, jobs.gather_equals_attend, rows=(2, 1), key_rows=(1, 3), extents=(2, 3), score="cosine")
    on_ranks(2, jobs.gather_equals_attend, rows=(2, 1), key_rows=(1, 3), weight="mean")


@pytest.mark.parametrize("search", [True, False], ids=["windows", "alone"])
@pytest.mark.parametrize("tail", ["all keys routed", "one cluster a key"])
def test_clusters_that_cover_every_key_are_exact_attention(tail, search):
    """Of all ranks together, where each has more keys than clusters, or of each."""
    on_ranks(2, jobs.covering_is_exact, rows=(9, 3), key_rows=(2, 5), mode="gather", tail=tail, search=search)
    rows, key_rows = (3, 0, 2), (0, 4, 3)
    on_ranks(
        3, jobs.covering_is_exact, rows=rows, key_rows=key_rows, mode="gather", tail=tail, search=search, mask="heads"
    )


@pytest.mark.parametrize("search", [scram.Search(sweeps=1, seed=0), None], ids=["windows", "alone"])
def test_clusters_are_as_near_to_exact_attention_as_of_one_process(search):
    alone, found = (
        jobs.smooth_error(x)
        for x in (
            scram.attention(*jobs.smooth(), search=search, **jobs.SMOOTH),
            torch.cat(on_ranks(2, jobs.smooth_rows, mode="gather", search=search), 2),
        )
    )
    assert found < 1.1 * alone, (found, alone)
