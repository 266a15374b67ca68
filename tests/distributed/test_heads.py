"""Heads for rows: every rank has the whole grid of some heads."""

import pytest

import sharded_jobs as jobs
from sharded import on_ranks

pytestmark = pytest.mark.slow  # each spawns processes


@pytest.mark.parametrize("rows", [(7,), (3, 4), (4, 0, 1), (2, 1, 0, 2)], ids=str)
@pytest.mark.parametrize("mask", [None, "keys", "heads"])
def test_equals_one_process(rows, mask):
    on_ranks(len(rows), jobs.heads_equal_one_process, rows=rows, key_rows=rows[::-1], mask=mask)


def test_causal_order():
    on_ranks(2, jobs.heads_equal_one_process, rows=(1, 3), key_rows=(3, 1), causal=True)


def test_bfloat16():
    on_ranks(2, jobs.heads_equal_one_process, rows=(1, 3), key_rows=(4, 1), bits=16)
