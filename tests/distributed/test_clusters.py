"""Clusters of keys that lie on many ranks are those of one k-means."""

import pytest
import torch

import scram
from scram.distributed.clusters import _places, are_joint
from support import sharded_jobs as jobs
from support.sharded import on_ranks, shards_of

pytestmark = pytest.mark.slow  # spawns processes


@pytest.mark.parametrize(
    ("rows", "key_rows"),
    [((3, 4), (4, 2)), ((0, 4, 1), (3, 0, 5)), ((1, 2, 1, 3), (2, 2, 3, 4))],
    ids=str,
)
def test_joint_clusters_are_the_moments_of_their_labels(rows, key_rows):
    on_ranks(len(rows), jobs.gather_of_joint_clusters, rows=rows, key_rows=key_rows)


@pytest.mark.parametrize("mask", ["keys", "heads"])
def test_masks(mask):
    on_ranks(2, jobs.gather_of_joint_clusters, rows=(3, 4), key_rows=(4, 3), mask=mask)


def test_without_the_first_order():
    on_ranks(2, jobs.gather_of_joint_clusters, rows=(3, 4), key_rows=(4, 3), first_order=False)


def test_scores():
    on_ranks(2, jobs.gather_of_joint_clusters, rows=(3, 4), key_rows=(4, 3), key_heads=2, score="l2")


def test_small_shards_are_not_joint():
    def joint(keys, size=2, tail=None):
        k = torch.empty(1, 1, 5, 4, 3)
        return are_joint(shards_of(k, keys, size=size, tail=tail or scram.Clusters(count=8)))

    assert joint((3, 4))
    assert joint((3, 0))
    assert not joint((3, 2))  # as many keys as clusters: each would be one of its own
    assert not joint((5,), size=1)
    assert not joint((2, 3), tail=scram.DrawnKeys())


def test_places_are_one_in_each_part():
    total = torch.tensor([[7], [100], [0]])
    found = _places(torch.tensor(3), 1, 7, total)
    assert found[0].tolist() == list(range(7))
    assert torch.equal(found[1] // (100 / 7), torch.arange(7.0))
    assert not found[2].any()
