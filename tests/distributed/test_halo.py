"""A rank's search runs on rows of its neighbours too."""

from types import SimpleNamespace

import pytest

import scram
import sharded_jobs as jobs
from scram.distributed.halo import halo_rows
from sharded import on_ranks

pytestmark = pytest.mark.slow  # spawns processes


@pytest.mark.parametrize("rows", [(3, 4), (4, 2, 1), (5, 0, 2), (0, 3, 0), (2, 1, 1, 3)], ids=str)
def test_rows_come_from_as_many_ranks_as_hold_them(rows):
    for reach in (0, 1, 3, 20):
        on_ranks(len(rows), jobs.halo_is_what_neighbours_hold, rows=rows, reach=reach)


def test_width_follows_the_jumps():
    def width(queries=(40, 50), halo=None, matches=None, **how):
        call = SimpleNamespace(matches=matches, halo=halo, search=scram.Search(**how))
        return halo_rows(SimpleNamespace(call=call, queries=queries))

    assert width() == 16
    assert width(jumps=(3, 1)) == 6
    assert width(queries=(4, 5)) == 5  # at most as many as the longest shard has
    assert width(sweeps=0) == width(matches=1) == 0
    assert width(halo=3) == 3
    assert width(halo=200) == 90


@pytest.mark.parametrize("halo", [0, 2])
def test_ring_with_a_given_halo(halo):
    on_ranks(3, jobs.ring_equals_merge, rows=(4, 2, 1), key_rows=(1, 2, 4), tail=None, halo=halo)
