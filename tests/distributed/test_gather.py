"""Keys of all ranks come together: given the same matches it is `attend`."""

import pytest

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
