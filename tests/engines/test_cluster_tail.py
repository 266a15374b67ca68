"""The clustered tail: in plain Python, against the reference in float64, and where nothing is left of a cluster."""

import pytest

from cases import named
from cluster_tails import CLUSTERED, assert_tail_as_near_float64, tail_call


@pytest.mark.parametrize("gains", [False, True], ids=["", "gains"])
@pytest.mark.parametrize("case", CLUSTERED, ids=str)
def test_out_lse_and_gradients_are_as_near_float64_as_the_reference(engine, case, gains):
    assert_tail_as_near_float64(tail_call(case, gains=gains), engine)


@pytest.mark.parametrize("clusters", [1, 2, 200])
def test_any_number_of_clusters(engine, clusters):
    assert_tail_as_near_float64(tail_call(named("rank 2"), clusters), engine)
