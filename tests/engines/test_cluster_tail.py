"""The clustered tail: in plain Python, against the reference in float64, and where nothing is left of a cluster."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from support.cases import Case, named, parameter
from support.cluster_tails import CLUSTERED, assert_tail_as_near_float64, run_tail, tail_call
from support.plain import noise


def plain_tail(call, row, query):
    """out and lse of one query, in plain Python."""
    heads, cluster_heads, grid = call.q.shape[1], call.label.shape[1], call.label.shape[2:]
    batch, head = divmod(row, heads)
    source = head // (heads // cluster_heads)
    places = list(itertools.product(*map(range, grid)))
    label = call.label[batch, source].flatten().tolist()
    matches = call.index[batch, head].flatten(0, -2)[query].tolist()
    left = call.sizes[batch, source].tolist()
    for key, place in enumerate(places):
        near = (
            all(abs(x - y) <= b for x, y, b in zip(place, places[match], call.radius, strict=True))
            for match in matches
            if 0 <= match < len(places)
        )
        if any(near) and label[key] >= 0:
            left[label[key]] -= 1
    q = call.q[batch, head].flatten(0, -2)[query].tolist()
    lse = float(call.near_lse[batch, head].flatten()[query])
    z = math.exp(lse)
    out = [z * float(x) if z else 0.0 for x in call.near_out[batch, head].flatten(0, -2)[query]]
    for c, number in enumerate(left):
        center, value = call.centers[batch, source, c].tolist(), call.values[batch, source, c].tolist()
        gain = 1.0 if call.gains is None else float(call.gains[batch, source, c])
        w = number * gain * math.exp(call.scale * sum(x * y for x, y in zip(q, center, strict=True)))
        z += w
        if call.dropout_seed is not None:
            kept = noise(int(call.dropout_seed), row, query, len(places) + call.extras + c) >= int(
                call.dropout_p * 2**32
            )
            w = w / (1 - call.dropout_p) if kept else 0.0
        out = [x + w * y for x, y in zip(out, value, strict=True)]
    return [x / z if z else 0.0 for x in out], math.log(z) if z else -math.inf


@pytest.mark.parametrize(
    "case",
    [
        named("rank 2"),
        named("rank 3", mask="head", heads=2, kappa=3),
        named("unequal grids", dropout_p=0.4),
        named("grouped heads", mask="batch"),
        named("radius per axis"),
        named("radius over the grid"),
    ],
    ids=str,
)
@pytest.mark.slow
@pytest.mark.parametrize("gains", [False, True], ids=["", "gains"])
def test_in_plain_python(impl, widest, case, gains):
    dtype = torch.float32 if impl == "numba" and len(case.grid) == 3 else widest  # float64 on one rank is enough
    call = tail_call(replace(case, dtype=dtype), clusters=6, gains=gains)
    out, lse = (x.flatten(0, 1) for x in run_tail(call, impl))
    out, lse = out.flatten(1, -2), lse.flatten(1)
    for row, query in itertools.product(range(len(lse)), range(lse.shape[1])):
        expected_out, expected_lse = plain_tail(call, row, query)
        torch.testing.assert_close(out[row, query], torch.tensor(expected_out, dtype=dtype))
        torch.testing.assert_close(lse[row, query], torch.tensor(expected_lse, dtype=dtype))


@pytest.mark.parametrize("gains", [False, True], ids=["", "gains"])
@pytest.mark.parametrize("case", [parameter(case, case) for case in CLUSTERED])
def test_out_lse_and_gradients_are_as_near_float64_as_the_reference(engine, case, gains):
    if engine == "numba" and len(case.grid) > 2:
        pytest.skip("its loops over the axes are those of windows, which run on every rank; rank 3 is above")
    assert_tail_as_near_float64(tail_call(case, gains=gains), engine)


@pytest.mark.parametrize("clusters", [1, 2, 200])
def test_any_number_of_clusters(engine, clusters):
    assert_tail_as_near_float64(tail_call(named("rank 2"), clusters), engine)


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
    )
    out, lse = run_tail(call, impl)
    torch.testing.assert_close(lse.flatten(), torch.tensor([math.log(6 + 1 + 3)]))
    torch.testing.assert_close(out.flatten(), torch.tensor([(6 * 5 + 1 + 3 * 2) / 10]))


def test_a_key_in_two_windows_is_taken_off_once(impl):
    call = tail_call(named("rank 2", heads=2, kappa=1))
    twice = call._replace(index=call.index.repeat_interleave(3, -1))
    for ours, theirs in zip(run_tail(twice, impl), run_tail(call, impl), strict=True):
        exactly = {} if impl == "triton" else {"rtol": 0, "atol": 0}  # another kernel there: other roundings
        torch.testing.assert_close(ours, theirs, **exactly)
