"""Clustering on a CPU: the groups of the reference, the same bits on any number of threads, empty clusters."""

import pytest
import torch

from scram.core import ops
from scram.engines import dispatch
from support.cluster_calls import cluster_call
from support.on_threads import assert_same_bits_on_threads


def run(call, impl):
    return ops.cluster(dispatch.ENGINES[impl], call)


CALLS = {
    "several rows": {"batch": 2, "heads": 4, "key_heads": 2, "mask": "head"},
    "a sample of the keys": {"grid": (9001,), "count": 100},
    "warm": {"warm": True},
    "wide values": {"width": 3, "value_width": 60},
    "few keys": {"grid": (3, 4, 5), "count": 7},
    "one query": {"query_grid": (1,), "grid": (40,), "count": 9},
}


@pytest.mark.parametrize("name", CALLS)
def test_groups_are_those_of_the_reference(name):
    call = cluster_call(**CALLS[name])
    ours, theirs = run(call, "numba"), run(call, "reference")
    assert (ours.label == theirs.label).float().mean() > 0.99  # roundings may move a key between two centers
    for name in ("slope", "variance", "spreads"):
        x, y = getattr(ours, name), getattr(theirs, name)
        assert (x - y).norm() < 0.05 * y.norm()


@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits_on_any_number_of_threads(name):
    call = cluster_call(**CALLS[name])
    assert_same_bits_on_threads(lambda: run(call, "numba"))


def test_empty_clusters_are_placed_at_keys_that_are_far_from_their_centers():
    """All clusters start at one place, far from three groups of keys: all but the nearest are empty."""
    call = cluster_call(groups=3, noise=0.01, count=6, steps=4, warm=True)
    far = call._replace(
        warm_centers=torch.full_like(call.warm_centers, 9), warm_values=torch.full_like(call.warm_values, 9)
    )
    assert (run(far._replace(steps=0), "numba").sizes > 0).sum() == 1
    made = run(far, "numba")
    assert (made.sizes > 0).sum() >= 3
    apart = call.k - made.centers[0, 0][made.label.long()]
    assert apart.norm(dim=-1).max() < 0.2
