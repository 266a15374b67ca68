"""Gradients of the clustered tail on a CPU: chunks of tiles, heads with clusters of their own, queries that are NaN."""

import pytest
import torch

from scram.engines.cpu import cluster_tail_backward
from support.cases import Case
from support.cluster_tails import assert_tail_as_near_float64, everything
from support.routed_calls import PARTS, tail_call

SEVERAL = Case("several tiles", batch=2, heads=4, key_heads=2, grid=(9, 17), key_grid=(9, 11), width=17, value_width=5)


def test_chunks_of_tiles_give_the_same_bits(monkeypatch):
    call = tail_call(SEVERAL)
    whole = everything(call, "numba")
    monkeypatch.setattr(cluster_tail_backward, "CHUNK_TILES", 1)
    monkeypatch.setattr(cluster_tail_backward, "TILES_PER_WORKER", 5)
    for ours, theirs in zip(everything(call, "numba"), whole, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize("own_heads", [False, True], ids=["", "own heads"])
def test_heads_that_share_keys_may_have_clusters_of_their_own(own_heads, parts):
    assert_tail_as_near_float64(tail_call(SEVERAL, parts, clusters=40, own_heads=own_heads), "numba")


def test_a_query_that_is_not_finite_reaches_what_its_tile_attends_and_nothing_else():
    call = tail_call(SEVERAL)
    clean = everything(call, "numba")
    call.q[0, 1, 8, 16] = torch.nan  # in the last tile of its row, alone
    dirty = dict(
        zip(("out", "lse", "q", "k", "v", "centers", "values", "slope"), everything(call, "numba")[:8], strict=True)
    )
    assert dirty["out"].isnan().any(-1).sum() == 1
    assert dirty["q"].isnan().any(-1).sum() == 1
    for name, ours, theirs in zip(dirty, dirty.values(), clean, strict=False):
        if name in ("k", "v", "centers", "values"):
            touched = ours.isnan().any(-1)
            assert touched.any()
            assert not touched[1].any()
            assert not touched[0, 1].any()  # of the other head of keys
            torch.testing.assert_close(ours[1], theirs[1])
            torch.testing.assert_close(ours[0, 1], theirs[0, 1])
    assert dirty["k"].isnan().any(-1).sum() < call.k[0, 0, ..., 0].numel()  # keys that the tile does not route
