"""What ranks must agree on, and what each may have of its own."""

import pytest
import torch

import scram
from scram.distributed.shards import shard_seed
from support import failing_jobs
from support.sharded import on_ranks

WARM = scram.Matches(torch.zeros(2, 4, 2, 3, 1, dtype=torch.int32), torch.zeros(2, 4, 2, 3, 1), (4, 3))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("batch", "all ranks must call with the same batch: rank 1 has 1, rank 0 2"),
        ("grad", "all ranks must call with the same requires_grad of k: rank 1 has 0, rank 0 1"),
        ({"radius": 2}, "all ranks must call with the same settings: rank 1 has other settings"),
        ({"tail": scram.Clusters(keys=8)}, "all ranks must call with the same settings: rank 1 has other settings"),
        ({"search": scram.Search(start="routed")}, "needs clusters with keys to start from"),
        ({"search": None, "warm": WARM}, "warm needs a search that starts from it, got search=None"),
        ({"search": None, "tail": scram.DrawnKeys()}, "search=None takes tail=None, clusters or a codebook, got Drawn"),
    ],
    ids=["batch", "grad", "settings", "tail", "start", "warm", "alone"],
)
def test_ranks_must_agree(change, words):
    said = on_ranks(2, failing_jobs.raised, change=change, who=1)
    assert all(words in one for one in said), said


def test_some_rank_has_keys():
    assert all("all shards are empty" in words for words in on_ranks(2, failing_jobs.raised, change="no keys"))


def test_seeds_of_shards_differ():
    seeds = [
        int(shard_seed(seed, *first))
        for seed in (0, -5, 2**62)
        for first in ((0, 0), (0, 64), (64, 0), (2**40, 0), (2**41, 0))
    ]
    assert len(set(seeds)) == len(seeds)
    assert seeds[0] == 0
    assert seeds[5] == -5
