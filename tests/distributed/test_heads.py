"""Heads for rows: every rank has the whole grid of some heads."""

import pytest

from support import dtensor_jobs
from support import sharded_jobs as jobs
from support.sharded import on_ranks

pytestmark = pytest.mark.slow  # each spawns processes


@pytest.mark.parametrize("rows", [(7,), (3, 4), (4, 0, 1), (2, 1, 0, 2)], ids=str)
@pytest.mark.parametrize("mask", [None, "keys", "heads"])
def test_equals_one_process(rows, mask):
    on_ranks(len(rows), jobs.heads_equal_one_process, rows=rows, key_rows=rows[::-1], mask=mask)


def test_causal_order():
    on_ranks(2, jobs.heads_equal_one_process, rows=(1, 3), key_rows=(3, 1), causal=True)


def test_bfloat16():
    on_ranks(2, jobs.heads_equal_one_process, rows=(1, 3), key_rows=(4, 1), bits=16)


@pytest.mark.parametrize(
    ("rows", "heads", "key_heads"), [((5,), 3, 3), ((2, 3), 4, 2), ((3, 0, 2), 3, 3), ((1, 2, 1, 1), 8, 4)], ids=str
)
@pytest.mark.parametrize("how", ["clusters", "drawn", "tile", "causal", "no seed", "clusters alone"])
def test_equals_the_search_of_one_process(rows, heads, key_heads, how):
    """Noise is that of the rows of one process."""
    on_ranks(len(rows), dtensor_jobs.heads_mode, how=how, rows=rows, heads=heads, key_heads=key_heads)


def test_masks_and_small_grids():
    common = {"rows": (2, 3), "heads": 4, "key_heads": 2}
    on_ranks(2, dtensor_jobs.heads_mode, how="clusters", mask="keys", **common)
    on_ranks(2, dtensor_jobs.heads_mode, how="drawn", mask="heads", **common)
    on_ranks(2, dtensor_jobs.heads_mode, how="dense", mask="keys", **common)
