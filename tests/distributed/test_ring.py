"""Keys go from rank to rank: the result is that of `merge` in one process, with its gradients."""

import pytest

import sharded_jobs as jobs
from sharded import on_ranks

pytestmark = pytest.mark.slow  # each spawns processes


@pytest.mark.parametrize("rows", [(7,), (3, 4), (4, 2, 1), (2, 1, 3, 1)], ids=str)
@pytest.mark.parametrize("tail", [None, "clusters", "drawn"])
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


@pytest.mark.parametrize("rows", [(3, 4), (4, 0, 1)], ids=str)
def test_windows_over_every_key_are_exact_attention(rows):
    on_ranks(len(rows), jobs.ring_of_all_keys_is_exact, rows=rows, key_rows=rows[::-1])


def test_graph_keeps_no_keys_of_other_ranks():
    """What is kept depends on the rank's own shards, not on how many ranks there are."""
    alone, *_ = on_ranks(1, jobs.held_by_backward, rows=4)
    for size in (2, 3):
        assert on_ranks(size, jobs.held_by_backward, rows=4) == [alone] * size
