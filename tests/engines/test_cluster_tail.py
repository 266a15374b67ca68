"""The clustered tail: against the reference in float64, its gradients, and where nothing is left of a cluster."""

import math
from dataclasses import replace

import pytest
import torch

from support.cases import Case, named, parameter
from support.cluster_tails import CLUSTERED, LEAVES, assert_tail_as_near_float64, run_tail, tail_call


@pytest.mark.parametrize("keys", [0, 12], ids=["centers", "routed"])
@pytest.mark.parametrize("case", [parameter(case, case) for case in CLUSTERED])
def test_out_lse_and_gradients_are_as_near_float64_as_the_reference(engine, case, keys):
    if engine == "numba" and len(case.grid) > 2:
        pytest.skip("its loops over the axes are those of windows, which run on every rank; rank 3 is above")
    assert_tail_as_near_float64(tail_call(case, keys=keys), engine)


@pytest.mark.parametrize("keys", [0, 12], ids=["centers", "routed"])
@pytest.mark.parametrize("clusters", [1, 2, 200])
def test_any_number_of_clusters(engine, clusters, keys):
    assert_tail_as_near_float64(tail_call(named("rank 2"), clusters, keys), engine)


MISSING = {
    "no first order": {"slope": None},
    "no second order": {"spreads": None},
    "no windows": {"index": None, "near_out": None, "near_lse": None},
    "extra keys alone": {"index": None},
}


@pytest.mark.parametrize("keys", [0, 12], ids=["centers", "routed"])
@pytest.mark.parametrize("name", MISSING)
def test_each_part_may_be_missing(engine, name, keys):
    assert_tail_as_near_float64(tail_call(CLUSTERED[-1], keys=keys)._replace(**MISSING[name]), engine)


SMALL = Case("small", heads=2, key_heads=1, grid=(2, 3), key_grid=(3, 3), width=2, value_width=2, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["reference", "numba"])
@pytest.mark.parametrize("keys", [0, 5], ids=["centers", "routed"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4], ids=["", "dropout"])
def test_gradients_of_every_input(impl, keys, dropout_p):
    """Labels, routes, variance and spreads are constants. Some clusters are below the cap of the second order."""
    call = tail_call(replace(SMALL, dropout_p=dropout_p), clusters=4, keys=keys)
    near_lse = torch.where(call.near_lse == -torch.inf, 0.3, call.near_lse)  # steps from -inf lead nowhere
    given = {name: x.clone() for name in LEAVES if (x := getattr(call, name)) is not None} | {"near_lse": near_lse}
    assert set(given) == set(LEAVES) - ({"k", "v"} if not keys else set())

    def joined(*leaves):
        return tuple(run_tail(call._replace(**dict(zip(given, leaves, strict=True))), impl))

    assert torch.autograd.gradcheck(joined, [x.requires_grad_() for x in given.values()])


def test_a_query_above_the_cap_has_no_gradient_through_the_second_order(impl):
    """Its scores are far apart: the logit of a cluster grows with q by the center alone."""
    call = tail_call(SMALL, clusters=4)._replace(index=None, near_out=None, near_lse=None, slope=None)
    call = call._replace(centers=torch.zeros_like(call.centers), spreads=torch.ones_like(call.spreads))
    for factor, none in ((1e-3, False), (1e3, True)):
        q = (factor * call.q).requires_grad_()
        (grad,) = torch.autograd.grad(run_tail(call._replace(q=q), impl).lse.sum(), q)
        assert bool((grad == 0).all()) is none


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38])
def test_a_cluster_wholly_inside_the_windows_contributes_exactly_nothing(impl, bad):
    call = tail_call(named("radius over the grid", kappa=1, heads=2))
    centers, values = torch.full_like(call.centers, bad), torch.full_like(call.values, bad)
    call = call._replace(centers=centers, values=values, index=call.index.clamp(0, 41))
    out, lse = run_tail(call, impl)
    head = call.near_lse > -torch.inf
    assert torch.equal(lse, call.near_lse)
    assert torch.equal(out[head], call.near_out[head])
    assert out[~head].eq(0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38])
def test_the_center_of_a_routed_cluster_contributes_exactly_nothing(impl, bad):
    """All clusters are routed: the sum of their keys is all there is, and one key alone is its value."""
    call = tail_call(named("rank 2", heads=2), clusters=3, keys=42)
    label = torch.full_like(call.label, -1)
    label[..., 2, 3] = 0
    sizes = (label.flatten(2).unsqueeze(-1) == torch.arange(3)).sum(2).int()
    order = torch.cat([torch.tensor([17]), torch.arange(17), torch.arange(18, 42)]).int().expand(1, 2, 42).contiguous()
    call = call._replace(
        label=label,
        sizes=sizes,
        order=order,
        routes=torch.ones_like(call.routes),
        centers=torch.full_like(call.centers, bad),
        values=torch.full_like(call.values, bad),
        near_lse=torch.full_like(call.near_lse, -torch.inf),
    )
    out, lse = run_tail(call, impl)
    torch.testing.assert_close(out, call.v[..., 2:3, 3:4, :].expand_as(out))
    torch.testing.assert_close(lse, 0.5 * (call.q * call.k[..., 2:3, 3:4, :]).sum(-1))


def test_one_key_more_outside_the_windows_is_one_cluster(impl):
    """A row of keys, the first three in the window: of their cluster one key is left, of the other all."""
    call = tail_call(Case("a row", grid=(1,), key_grid=(9,), kappa=1, width=1, value_width=1), clusters=2)
    label = torch.tensor([0, 0, 0, 0, 1, 1, 1, -1, -1], dtype=torch.int32).reshape(1, 1, 9)
    call = call._replace(
        label=label,
        sizes=torch.tensor([[[4, 3]]], dtype=torch.int32),
        values=torch.tensor([[[[1.0], [2.0]]]]),
        centers=torch.zeros_like(call.centers),
        index=torch.ones_like(call.index),
        near_lse=torch.full_like(call.near_lse, math.log(6)),
        near_out=torch.full_like(call.near_out, 5),
        slope=None,
        spreads=None,
    )
    out, lse = run_tail(call, impl)
    torch.testing.assert_close(lse.flatten(), torch.tensor([math.log(6 + 1 + 3)]))
    torch.testing.assert_close(out.flatten(), torch.tensor([(6 * 5 + 1 + 3 * 2) / 10]))
    routed = call._replace(
        k=torch.zeros(1, 1, 9, 1),
        v=torch.arange(9.0).reshape(1, 1, 9, 1),
        order=torch.arange(9, dtype=torch.int32).reshape(1, 1, 9),
        routes=torch.ones(1, 1, 1, 1, dtype=torch.int32),
        keys=4,
    )
    out, lse = run_tail(routed, impl)  # all four keys of the first cluster, which windows leave to it
    torch.testing.assert_close(lse.flatten(), torch.tensor([math.log(6 + 4 + 3)]))
    torch.testing.assert_close(out.flatten(), torch.tensor([(6 * 5 + 0 + 1 + 2 + 3 + 3 * 2) / 13]))


def test_a_key_in_two_windows_is_taken_off_once(impl):
    call = tail_call(named("rank 2", heads=2, kappa=1))
    twice = call._replace(index=call.index.repeat_interleave(3, -1))
    for ours, theirs in zip(run_tail(twice, impl), run_tail(call, impl), strict=True):
        exactly = {} if impl == "triton" else {"rtol": 0, "atol": 0}  # another kernel there: other roundings
        torch.testing.assert_close(ours, theirs, **exactly)
