"""A rank's search runs on rows of its neighbors too."""

import pytest
import torch

import scram
from scram.distributed.halo import halo_rows
from support import sharded_jobs as jobs
from support.photos import projected
from support.sharded import on_ranks, shards_of

pytestmark = pytest.mark.slow  # spawns processes


@pytest.mark.parametrize("rows", [(3, 4), (5, 0, 2), (0, 3, 0), (2, 1, 1, 3)], ids=str)
def test_rows_come_from_as_many_ranks_as_hold_them(rows):
    for reach in (0, 1, 3, 20):
        on_ranks(len(rows), jobs.halo_is_what_neighbors_hold, rows=rows, reach=reach)


def test_width_follows_the_jumps():
    def width(queries=(40, 50), halo=None, matches=None, **settings):
        q = torch.empty(1, 1, 1, 1, 3)
        return halo_rows(shards_of(q, queries, halo=halo, matches=matches, search=scram.Search(**settings)))

    assert width() == 16
    assert width(jumps=(3, 1)) == 6
    assert width(queries=(4, 5)) == 5  # at most as many as the longest shard has
    assert width(sweeps=0) == width(matches=1) == 0
    assert width(halo=3) == 3
    assert width(halo=200) == 90


@pytest.mark.parametrize("halo", [0, 2])
def test_ring_with_a_given_halo(halo):
    on_ranks(3, jobs.ring_equals_merge, rows=(4, 2, 1), key_rows=(1, 2, 4), tail=None, halo=halo)


def test_the_field_has_no_seam():
    """Recall in rows near a border: with a halo that of one process, without less."""
    q, k = projected("astronaut", 64)
    best = (q.flatten(2, 3)[0, 0] @ k.flatten(2, 3)[0, 0].T).max(-1).values.reshape(64, 64)
    near = slice(32 - 8, 32 + 8)

    def recall(key):
        return float(((q[0, 0] * key).sum(-1) >= best - 1e-5)[:, near].float().mean())

    def found(way):
        return torch.cat(on_ranks(2, jobs.photo_rows, way=way, seeds=3), 1)

    one = torch.stack(
        [scram.attention(q, k, k, search=scram.Search(seed=seed), radius=0, tail=None)[0, 0] for seed in range(3)]
    )
    alone, halo, without = recall(one), recall(found("gather")), recall(found("no halo"))
    assert halo > alone - 0.01, (alone, halo, without)
    assert without < halo - 0.01, (alone, halo, without)
