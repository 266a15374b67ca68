"""Routed clusters in the Triton engine: lists, routes, starts, tails and windows, against the reference."""

from dataclasses import replace

import pytest
import torch

from scram.core import ops
from scram.engines import dispatch
from scram.engines.gpu.cluster_tail import keys_backward
from scram.engines.gpu.engine import attend, attend_backward, cluster_tail, cluster_tail_backward, route, routed_start
from scram.engines.gpu.route.lists import LIST_BLOCK, routed_keys
from scram.engines.reference.cluster_tail import cluster_tail as plain_tail
from scram.spec import routing
from scram.spec.bits import packed, unpacked
from support.cases import Case, assert_as_near_float64, named, size
from support.cluster_tails import assert_tail_as_near_float64
from support.routed_calls import PARTS, Parts, attend_call, route_call, start_call
from support.routed_calls import tail_call as routed_call

pytestmark = pytest.mark.gpu
interpreted = pytest.mark.interpreted

SEVERAL = Case("several tiles", batch=2, heads=2, key_heads=1, grid=(9, 10), key_grid=(5, 6), width=6, value_width=5)
GROUPED = replace(SEVERAL, name="grouped", heads=4, key_heads=2, batch=1, dropout_p=0.3)
RANK_1 = Case("rank 1", grid=(70,), key_grid=(30,), kappa=1)
RANK_3 = Case("rank 3", grid=(2, 5, 5), key_grid=(3, 2, 4), heads=2)
WIDE = Case("wide", grid=(4, 5), key_grid=(5, 6), width=70, value_width=130)


def on(device, call):
    return call.__class__(*(x.to(device) if isinstance(x, torch.Tensor) and x.ndim else x for x in call))


@interpreted
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_parts(parts):
    assert_tail_as_near_float64(routed_call(SEVERAL, parts), "triton")


@interpreted
@pytest.mark.parametrize("case", [GROUPED, RANK_1, RANK_3, WIDE, named("rank 4"), named("one key")], ids=str)
def test_shapes(case):
    assert_tail_as_near_float64(routed_call(case, clusters=40), "triton")


@interpreted
def test_heads_of_queries_with_their_own_clusters():
    assert_tail_as_near_float64(routed_call(GROUPED, own_heads=True), "triton")


@interpreted
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_no_cluster_and_every_cluster(share):
    assert_tail_as_near_float64(routed_call(SEVERAL, Parts(windows=False, near=False), share=share), "triton")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [SEVERAL, replace(WIDE, grid=(20, 21), key_grid=(20, 20))], ids=str)
def test_sixteen_bits(case, dtype):
    case = replace(case, dtype=dtype)
    assert_tail_as_near_float64(routed_call(case, Parts(windows=False, near=False), clusters=70), "triton")


@interpreted
@pytest.mark.parametrize("most", [1, 3, 100])
def test_shares_of_the_tiles_of_a_cluster(most, device, monkeypatch):
    """However many there are, dk and dv are the same. A cluster has more keys than a block."""
    case = replace(SEVERAL, grid=(17, 10), key_grid=(8, 9), batch=1)
    call = on(device, routed_call(case, Parts(windows=False), clusters=3, share=0.8))
    whole = cluster_tail_backward(call, *cluster_tail(call), *cluster_tail(call))
    monkeypatch.setattr(keys_backward, "FURTHER", most)
    monkeypatch.setattr(keys_backward, "LEAST_SHARE", 1)
    shared = cluster_tail_backward(call, *cluster_tail(call), *cluster_tail(call))
    for name in ("k", "v"):
        torch.testing.assert_close(getattr(shared, name), getattr(whole, name))


@interpreted
@pytest.mark.parametrize("keys", [7, 20, 1000])
def test_lists(keys, device):
    """The keys of a tile's clusters in their order, as many as fit; behind them one of theirs."""
    call = routed_call(GROUPED, clusters=40, share=0.5)
    given = (call.routes.to(device), call.order.to(device), call.sizes.to(device))
    listed = routed_keys(*given, keys)
    assert listed.most % LIST_BLOCK == 0
    chosen = unpacked(call.routes, 40).flatten(0, 1)  # [R, T, C]
    tile = 0
    for row in range(len(chosen)):
        order, label = (x.flatten(0, 1).flatten(1)[row // 2] for x in (call.order, call.label))
        for mine in chosen[row]:
            want = [key for key in order.tolist() if label[key] >= 0 and mine[label[key]]][:keys]
            number = int(listed.number[tile])
            assert listed.keys[tile, :number].tolist() == want
            behind = listed.keys[tile, number : -(-number // LIST_BLOCK) * LIST_BLOCK]
            assert set(behind.tolist()) <= set(want)
            tile += 1


@interpreted
def test_a_list_has_no_more_keys_than_the_budget(device):
    """So has the reference; the centers of those clusters are left out all the same."""
    call = routed_call(SEVERAL, share=0.7)._replace(keys=5)
    for found, want in zip(cluster_tail(on(device, call)), plain_tail(call), strict=True):
        torch.testing.assert_close(found.cpu(), want)


@interpreted
@pytest.mark.parametrize("case", [SEVERAL, GROUPED, RANK_1, RANK_3, WIDE, named("empty batch")], ids=str)
@pytest.mark.parametrize(("clusters", "keys"), [(5, 9), (70, 12)])
def test_routes(case, clusters, keys, device):
    call = route_call(case, clusters, keys)
    found, want = route(on(device, call)), routing.route(call)
    assert found.routes.cpu().equal(want.routes)
    assert found.number.cpu().equal(want.number)
    torch.testing.assert_close(found.lse.cpu(), want.lse)


@interpreted
def test_routes_of_equal_importance_are_the_first(device):
    call = route_call(SEVERAL, 6, 4)
    same = {name: torch.ones_like(getattr(call, name)) for name in ("centers", "variance", "spreads", "sizes")}
    found = route(on(device, call._replace(**same)))
    assert (found.routes == 0b1111).all()
    assert (found.number == 4).all()


@interpreted
def test_a_cluster_that_does_not_fit_is_passed_over(device):
    call = route_call(SEVERAL, 3, 7)
    sizes = torch.tensor([8, 5, 2]).int().expand_as(call.sizes)
    same = {name: torch.ones_like(getattr(call, name)) for name in ("centers", "variance", "spreads")}
    call = call._replace(sizes=sizes.contiguous(), **same)
    assert (route(on(device, call)).routes == 0b110).all()
    none = route(on(device, call._replace(keys=1)))
    assert not none.routes.any()
    assert not none.number.any()


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
def test_queries_that_are_not_finite_route_nothing(device):
    call = route_call(SEVERAL, 11, 9)
    want = route(on(device, call))
    q = call.q.clone()
    q[0, 0, 0, 0, 0] = torch.nan
    q[0, 1] = torch.inf
    found, plain = route(on(device, call._replace(q=q))), routing.route(call._replace(q=q))
    assert found.routes.cpu().equal(plain.routes)
    assert found.routes[1].equal(want.routes[1])
    assert not found.routes[0, 1].any()
    assert (found.lse[0, 1] == -torch.inf).all()


@interpreted
@pytest.mark.parametrize("case", [SEVERAL, GROUPED, RANK_1, RANK_3, WIDE, named("empty batch")], ids=str)
def test_starts(case, device):
    call = start_call(case, 40)
    found, want = routed_start(on(device, call)), routing.routed_start(call)
    assert found.index.cpu().equal(want.index)
    assert found.score.cpu().equal(want.score)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_start_is_never_a_key_that_is_not_finite(device):
    call = start_call(SEVERAL, 5, share=0.9)
    k = torch.zeros_like(call.k)
    k[0, 0, 1, 1] = torch.nan
    k[1] = -torch.inf
    q = torch.ones_like(call.q)
    found, want = (
        run(call._replace(q=q, k=k)) for run in (lambda x: routed_start(on(device, x)), routing.routed_start)
    )
    assert found.index.cpu().equal(want.index)
    assert found.score.cpu().equal(want.score)
    assert not (found.index[0] == 7).any()
    assert (found.index[1] == -1).all()


@interpreted
def test_no_route_no_start(device):
    call = start_call(SEVERAL)
    found = routed_start(on(device, call._replace(routes=call.routes * 0)))
    assert (found.index == -1).all()
    assert (found.score == -torch.inf).all()


def windows_and_gradients(call, attend, attend_backward, device="cpu"):
    call = on(device, call)
    out, lse = attend(call)
    generator = torch.Generator().manual_seed(4)
    grad_out, grad_lse = (torch.randn(x.shape, generator=generator).to(x) for x in (out, lse))
    grads = attend_backward(call, out, lse, grad_out, torch.where(lse == -torch.inf, 0, grad_lse))
    return [x.cpu() for x in (out, lse, *grads) if x is not None]


def by_autograd(call, out, lse, grad_out, grad_lse):
    names = [name for name in ("q", "k", "v", "k_extra", "v_extra") if getattr(call, name) is not None]
    leaves = [getattr(call, name).detach().requires_grad_() for name in names]
    made = ops.attend(dispatch.ENGINES["reference"], call._replace(**dict(zip(names, leaves, strict=True))))
    total = (made.out * grad_out).sum() + (torch.where(lse == -torch.inf, 0, made.lse) * grad_lse).sum()
    return torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)


def wide(call):
    return call._replace(
        **{name: x.double() for name in ("q", "k", "v", "k_extra", "v_extra") if (x := getattr(call, name)) is not None}
    )


@interpreted
@pytest.mark.parametrize("repeatable", [False, True], ids=["", "repeatable"])
@pytest.mark.parametrize(
    "case", [SEVERAL, replace(GROUPED, mask="batch", extra=2), RANK_1, RANK_3, named("rank 4")], ids=str
)
def test_windows_without_routed_keys(case, repeatable, device, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: repeatable)
    call = attend_call(case, clusters=40, share=0.4)
    plainly = lambda x: ops.attend(dispatch.ENGINES["reference"], x)  # noqa: E731
    truth, same = (windows_and_gradients(x, plainly, by_autograd) for x in (wide(call), call))
    found = windows_and_gradients(call, attend, attend_backward, device)
    assert_as_near_float64(truth, same, found, size)
    everything = plainly(call._replace(routes=None, label=None))
    assert not everything.out.equal(same[0])


@interpreted
@pytest.mark.parametrize("repeatable", [False, True], ids=["", "repeatable"])
def test_extra_keys_alone(repeatable, device, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: repeatable)
    call = attend_call(replace(SEVERAL, extra=3))
    call = call._replace(index=call.index[..., :0], label=None, routes=None)
    found = windows_and_gradients(call, attend, attend_backward, device)
    q, k, v = (x.double().requires_grad_() for x in (call.q, call.k_extra, call.v_extra))
    s = call.scale * q.flatten(2, 3) @ k.mT
    out, lse = (s.softmax(-1) @ v).reshape(found[0].shape), s.logsumexp(-1).reshape(found[1].shape)
    generator = torch.Generator().manual_seed(4)
    total = sum((x * torch.randn(x.shape, generator=generator)).sum() for x in (out, lse))
    grads = torch.autograd.grad(total, (q, k, v))
    zeros = torch.zeros_like(call.k), torch.zeros_like(call.v)
    for ours, want in zip(found, (out, lse, grads[0], *zeros, *grads[1:]), strict=True):
        torch.testing.assert_close(ours, want.float())


@interpreted
def test_windows_of_no_matches_are_none(device):
    """Neither counts nor planes: the same as without an index."""
    call = on(device, routed_call(SEVERAL, Parts(windows=False)))
    empty = torch.zeros(*call.q.shape[:-1], 0, dtype=torch.int32, device=device)
    for x, y in zip(cluster_tail(call), cluster_tail(call._replace(index=empty)), strict=True):
        assert x.equal(y)


@interpreted
def test_one_cluster_a_key_routed_or_not_is_the_same(device):
    """Centers and values are the keys and values: exact attention, whatever is routed."""
    call = routed_call(replace(SEVERAL, heads=1), Parts(windows=False, near=False, slope=False, spreads=False))
    keys = call.label[0, 0].numel()
    label = torch.arange(keys).int().reshape(call.label.shape[2:]).expand_as(call.label).contiguous()
    one = {
        "label": label,
        "order": label.flatten(2),
        "sizes": torch.ones_like(label.flatten(2)),
        "centers": call.k.flatten(2, 3),
        "values": call.v.flatten(2, 3),
        "keys": keys,
    }
    tiles = call.routes.shape[2]
    some = torch.rand(2, 1, tiles, 32) < 0.5
    some[..., keys:] = False
    routes = [packed(x) for x in (some, some & False, some | (torch.arange(32) < keys))]
    made = [cluster_tail(on(device, call._replace(**one, routes=x))) for x in routes]
    for other in made[1:]:
        torch.testing.assert_close(other.out, made[0].out)
        torch.testing.assert_close(other.lse, made[0].lse)


@pytest.mark.parametrize("case", [SEVERAL, replace(WIDE, grid=(40, 41), key_grid=(30, 40))], ids=str)
def test_repeatable(case, device):
    call = on(device, routed_call(replace(case, dtype=torch.bfloat16), clusters=70))
    out, lse = cluster_tail(call)
    first, second = (cluster_tail_backward(call, out, lse, out, torch.zeros_like(lse)) for _ in range(2))
    assert all(x.equal(y) for x, y in zip(first, second, strict=True))
