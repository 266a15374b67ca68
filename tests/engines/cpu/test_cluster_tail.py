"""The clustered tail of the CPU engine: the same bits on any number of threads, and NaN that is out.

What nothing is left of, or what is dropped, is not multiplied.
"""

import pytest
import torch

from support.cases import named
from support.cluster_tails import CLUSTERED, everything, run_tail, tail_call
from support.on_threads import assert_same_bits_on_threads

SEVERAL = CLUSTERED[-1]


@pytest.mark.parametrize(("clusters", "keys"), [(11, 0), (11, 30), (300, 40)])
def test_the_same_bits_on_any_number_of_threads(clusters, keys):
    call = tail_call(SEVERAL, clusters, keys)
    assert_same_bits_on_threads(lambda: everything(call, "numba"))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_values_and_centers_of_clusters_that_are_not_left_may_be_anything(bad):
    call = tail_call(named("rank 2", kappa=1))
    clean = call._replace(sizes=call.sizes.clone(), centers=call.centers.clone(), values=call.values.clone())
    clean.sizes[..., 3] = 0
    label = torch.where(call.label == 3, -1, call.label)
    clean = clean._replace(label=label)
    dirty = clean._replace(centers=clean.centers.clone(), values=clean.values.clone())
    dirty.centers[..., 3, :], dirty.values[..., 3, :] = bad, bad
    for ours, theirs in zip(everything(dirty, "numba"), everything(clean, "numba"), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_query_that_is_not_finite_gives_nothing_to_clusters_that_it_has_not():
    call = tail_call(named("radius over the grid", kappa=1))._replace(near_lse=torch.zeros(1, 1, 6, 7))
    call.index.clamp_(0, 41)
    call.q[0, 0, 2, 3] = torch.nan
    call.index[0, 0, 4, 5] = -1  # one query has them all
    out, lse, *grads = everything(call, "numba")
    assert out.isfinite().all()
    assert lse.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads)
    assert grads[1].abs().sum() > 0


def test_a_value_that_is_not_finite_reaches_every_query_that_has_its_cluster():
    call = tail_call(named("radius 0, kappa 1"))._replace(slope=None)
    call.values[0, 0, 0, 1] = torch.nan
    out, lse = run_tail(call, "numba")
    assert out[..., 1].isnan().all()
    assert out[..., 0].isfinite().all()
    assert lse.isfinite().all()
