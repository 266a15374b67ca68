"""The clustered tail in plain Python: routed keys, centers with both corrections, windows and dropout."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from scram.core.calls import AttendCall
from support import plain_routing as plain
from support.cases import Case, make_tensors, named
from support.cluster_tails import run, run_tail, tail_call

SEVERAL_TILES = Case("several tiles", heads=4, key_heads=2, grid=(9, 10), key_grid=(5, 4), width=3, value_width=2)
CASES = [
    named("rank 1"),
    named("rank 2", heads=2),
    named("rank 3", mask="head", heads=2, kappa=3),
    named("unequal grids", dropout_p=0.4),
    named("grouped heads", mask="batch"),
    named("one key head"),
    named("radius per axis"),
    named("radius over the grid"),
    named("one row fully masked", batch=1),
    SEVERAL_TILES,
    replace(SEVERAL_TILES, name="dropout over several tiles", dropout_p=0.3),
]


def points(x):
    """(batch, head, query) of everything in [B, H, *G]."""
    batch, heads, *grid = x.shape
    return itertools.product(range(batch), range(heads), range(math.prod(grid)))


def assert_as_plain(call, impl, only=None):
    """out and lse of every query are those of plain Python; of `only` some of them."""
    out, lse = run_tail(call, impl)
    flat_out, flat_lse = out.flatten(2, -2), lse.flatten(2)
    wanted = list(points(lse)) if only is None else only
    want = [plain.tail(call, *at) for at in wanted]
    near = {"rtol": 1e-9, "atol": 1e-9} if lse.dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    for found, one in ((flat_out, [out for out, _ in want]), (flat_lse, [lse for _, lse in want])):
        truth = torch.tensor(one, dtype=torch.float64).to(found.dtype)
        torch.testing.assert_close(torch.stack([found[at] for at in wanted]), truth, equal_nan=True, **near)


@pytest.mark.parametrize("keys", [0, 9], ids=["centers", "routed"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_out_and_lse(impl, widest, case, keys):
    assert_as_plain(tail_call(replace(case, dtype=widest), clusters=6, keys=keys), impl)


@pytest.mark.interpreted
@pytest.mark.parametrize("case", [named("rank 1"), SEVERAL_TILES], ids=str)
def test_out_and_lse_in_float32(impl, case):
    assert_as_plain(tail_call(case, clusters=40, keys=7), impl)


TERMS = {
    "no first order": {"slope": None},
    "no second order": {"spreads": None},
    "neither": {"slope": None, "spreads": None},
    "no windows": {"index": None, "near_out": None, "near_lse": None},
    "extra keys alone": {"index": None},
}


@pytest.mark.interpreted
@pytest.mark.parametrize("keys", [0, 9], ids=["centers", "routed"])
@pytest.mark.parametrize("name", TERMS)
def test_each_part_may_be_missing(impl, name, keys):
    call = tail_call(SEVERAL_TILES, clusters=6, keys=keys)._replace(**TERMS[name])
    out = run_tail(call, impl).out
    assert out.dtype == torch.float32
    assert_as_plain(call, impl)


def test_the_second_order_is_capped(impl):
    """Of a query with large scores: a raise of exp(MOST_RAISED / 2) at most."""
    call = tail_call(named("rank 2"), clusters=6, keys=9)
    assert_as_plain(call._replace(q=6 * call.q, variance=call.variance * 3), impl)


def test_rows_of_a_larger_call_drop_out_as_they_do_there(impl):
    call = tail_call(replace(SEVERAL_TILES, dropout_p=0.5), clusters=6, keys=9)
    assert_as_plain(call._replace(rows=torch.tensor([[7, 3, 2**20, 0]])), impl)


@pytest.mark.interpreted
@pytest.mark.parametrize("keys", [0, 9, 20], ids=["centers", "routed", "all routed"])
def test_what_is_left_of_each_cluster(impl, keys):
    """Queries of 0 weigh all keys alike; values name the clusters: out tells how many keys each one stands for."""
    case = replace(SEVERAL_TILES, value_width=6, mask="batch", kappa=3)
    call = tail_call(case, clusters=6, keys=keys)
    names = torch.eye(6).expand(1, 2, 6, 6).contiguous()
    call = call._replace(
        q=torch.zeros_like(call.q), values=names, slope=None, near_lse=torch.full_like(call.near_lse, -torch.inf)
    )
    if keys:
        call = call._replace(v=torch.zeros_like(call.v))
    out, lse = run_tail(call, impl)
    counts = (out * lse.exp().unsqueeze(-1)).flatten(2, 3)
    for at in points(lse):
        want = torch.tensor(plain.left(call, *at), dtype=torch.float32)
        torch.testing.assert_close(counts[at], want, rtol=1e-5, atol=1e-5)
        label = call.label[0, at[1] // 2].flatten().tolist()
        routed = plain.routed_clusters(call, *at)
        keys_routed = sum(name in routed for name in label)
        torch.testing.assert_close(lse.flatten(2)[at].exp(), want.sum() + keys_routed, rtol=1e-5, atol=1e-5)


@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in Triton's interpreter
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_query_that_is_not_finite_is_alone_with_it(impl, bad):
    call = tail_call(SEVERAL_TILES, clusters=6, keys=9)
    call.q[0, 1, 4, 4, 0] = bad
    out, _ = run_tail(call, impl)
    assert out[0, 1, 4, 4].isnan().any()
    mine = (0, 1, 44)
    assert_as_plain(call, impl, [at for at in points(call.near_lse) if at != mine])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_keys_that_are_not_routed_may_be_anything(impl, bad):
    """Also those of routed clusters of other tiles and heads; a key in no cluster is never routed."""
    call = tail_call(SEVERAL_TILES, clusters=6, keys=4)
    want = run_tail(call, impl)
    k, v = call.k.clone(), call.v.clone()
    skipped = call.label < 0
    assert skipped.any()
    k[skipped], v[skipped] = bad, bad
    for ours, theirs in zip(run_tail(call._replace(k=k, v=v), impl), want, strict=True):
        torch.testing.assert_close(ours, theirs)
    tile_0 = plain.clusters_in(call.routes[0, 0, 0].tolist()) | plain.clusters_in(call.routes[0, 1, 0].tolist())
    others = torch.tensor([name not in tile_0 for name in call.label[0, 0].flatten().tolist()]).reshape(5, 4)
    assert (others & ~skipped[0, 0]).any()
    k[0, 0][others], v[0, 0][others] = bad, bad
    ours = run_tail(call._replace(k=k, v=v), impl)
    torch.testing.assert_close(ours.out[0, :2, :8, :8], want.out[0, :2, :8, :8])


def attend_call(case, label, routes, extra=2):
    tensors = make_tensors(replace(case, extra=extra))
    return AttendCall(
        q=tensors.q,
        k=tensors.k,
        v=tensors.v,
        index=tensors.matches.index,
        key_mask=tensors.key_mask,
        k_extra=tensors.extra[0] if extra else None,
        v_extra=tensors.extra[1] if extra else None,
        label=label,
        routes=routes,
        dropout_seed=None,
        rows=None,
        radius=(case.radius,) * len(case.grid),
        causal=False,
        scale=0.6,
        weight="softmax",
        dropout_p=0.0,
    )


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("case", "extra"),
    [
        (SEVERAL_TILES, 0),
        (replace(SEVERAL_TILES, mask="batch"), 2),
        (named("rank 1", mask="head", heads=2, key_heads=1), 2),
        (named("rank 3"), 0),
    ],
    ids=str,
)
def test_windows_leave_out_the_keys_of_routed_clusters(impl, case, extra):
    routed = tail_call(case, clusters=40, keys=6)
    call = attend_call(case, routed.label, routed.routes, extra)
    out, lse = run("attend", call, impl)
    want = [plain.near(call, *at) for at in points(lse)]
    torch.testing.assert_close(out.flatten(0, -2), torch.tensor([x for x, _ in want]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.flatten(), torch.tensor([x for _, x in want]), rtol=1e-4, atol=1e-5)
    assert not torch.equal(out, run("attend", call._replace(routes=None, label=None), impl).out)
