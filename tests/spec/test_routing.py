"""Which clusters tiles route, and the best routed key of a query, beside plain Python."""

import itertools
import math

import pytest
import torch

from scram.core.calls import RouteCall, RoutedStartCall
from scram.spec import routing
from scram.spec.clustering import order_of
from scram.spec.schedule import members
from support import plain_routing as plain
from support.cluster_tails import run

APART = 1e-4  # importances of two clusters differ at least so much, relatively: no rounding decides


def route_call(grid=(9, 11), batch=1, heads=1, cluster_heads=1, count=9, width=3, keys=12, dtype=torch.float64, seed=0):
    """Clusters of any sizes, some of them empty."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    rows = (batch, cluster_heads)
    sizes = torch.randint(0, 8, (*rows, count), generator=generator, dtype=torch.int32)
    sizes[..., 0] += 1
    sizes[..., 2:3] = 0
    return RouteCall(
        q=drawn(batch, heads, *grid, width),
        centers=drawn(*rows, count, width),
        sizes=sizes,
        variance=drawn(*rows, width).square(),
        spreads=2 * drawn(*rows, count).abs(),
        keys=keys,
        scale=0.9,
    )


def in_words(call, routed):
    """Routes of plain Python as the operator returns them, and the numbers of their keys."""
    count, heads = call.sizes.shape[-1], call.q.shape[1]
    shape = (*call.q.shape[:2], len(plain.tiles(call.q.shape[2:-1])))
    bits = torch.tensor([plain.words(taken, count) for taken in routed.values()], dtype=torch.int32)
    number = [
        sum(call.sizes[b, plain.source(h, heads, call.sizes.shape[1])][taken].tolist())
        for (b, h, _), taken in routed.items()
    ]
    return bits.reshape(*shape, call.words), torch.tensor(number, dtype=torch.int32).reshape(shape)


def assert_routes(call, impl):
    """As plain Python has them, where roundings decide nothing."""
    for b, h, n in plain.routes(call):
        each = sorted(x for x in plain.importances(call, b, h, plain.tiles(call.q.shape[2:-1])[n]) if x > 0)
        gaps = [(y - x) / y for x, y in itertools.pairwise(each)]
        assert all(gap == 0 or gap > APART for gap in gaps)
    bits, number = in_words(call, plain.routes(call))
    made = run("route", call, impl)
    assert torch.equal(made.routes, bits)
    assert torch.equal(made.number, number)
    assert made.lse.dtype == call.centers.dtype
    lse = [plain.cluster_lse(call, *at) for at in itertools.product(*map(range, made.lse.flatten(2).shape))]
    torch.testing.assert_close(made.lse.flatten(), torch.tensor(lse, dtype=call.centers.dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "how",
    [
        {"grid": (150,)},
        {"grid": (9, 11)},
        {"grid": (5, 3, 9)},
        {"grid": (9, 3), "batch": 2, "heads": 4, "cluster_heads": 2},
        {"grid": (4, 4), "heads": 3, "cluster_heads": 3},
        {"grid": (9, 9), "count": 70, "keys": 90},
        {"grid": (8, 8), "count": 1, "keys": 99},
    ],
    ids=str,
)
def test_routes_are_those_of_plain_python(impl, how, dtype):
    call = route_call(dtype=dtype, **how)
    assert any(plain.routes(call).values())
    assert_routes(call, impl)


def test_importance_is_that_of_plain_python():
    call = route_call(batch=2, heads=4, cluster_heads=2, width=5)
    for batch, head in ((0, 1), (1, 2)):
        member = members(call.q.shape[2:-1], call.q.device)
        found, _ = routing.importance(call, call.q[batch, head].flatten(0, 1), member, 2 * batch + head // 2)
        want = [plain.importances(call, batch, head, tile) for tile in plain.tiles(call.q.shape[2:-1])]
        torch.testing.assert_close(found, torch.tensor(want, dtype=found.dtype))


def test_a_tile_looks_at_the_wrongest_centers_first():
    """Equal weights: of clusters as large, the one whose scores are farther apart; of those alike, the smaller."""
    call = route_call(grid=(4, 4), count=4, keys=3)._replace(
        centers=torch.zeros(1, 1, 4, 3, dtype=torch.float64),
        sizes=torch.tensor([[[3, 3, 6, 3]]], dtype=torch.int32),
        spreads=torch.tensor([[[1.0, 2.0, 1.0, 1.5]]], dtype=torch.float64),
    )
    order = [plain.chosen(plain.importances(call, 0, 0, range(16)), [3, 3, 6, 3], keys) for keys in (3, 6, 9, 15)]
    assert order == [[1], [1, 3], [1, 3, 0], [1, 3, 0, 2]]
    assert run("route", call, "reference").routes.tolist() == [[[[0b10]]]]


@pytest.mark.interpreted
def test_of_equally_important_clusters_the_lower_comes_first(impl):
    call = route_call(grid=(8, 8), count=6, keys=10, dtype=torch.float32)
    call = call._replace(
        centers=torch.ones_like(call.centers),
        sizes=torch.full_like(call.sizes, 4),
        spreads=torch.ones_like(call.spreads),
    )
    assert len(set(plain.importances(call, 0, 0, range(64)))) == 1
    made = run("route", call, impl)
    assert made.routes.tolist() == [[[[0b11]]]]
    assert made.number.tolist() == [[[8]]]


@pytest.mark.interpreted
def test_a_cluster_that_does_not_fit_is_passed_over(impl):
    """The most important fits, the second does not; the third does where there is room."""
    call = route_call(grid=(8, 8), count=4, keys=10, dtype=torch.float32)
    call = call._replace(
        centers=torch.zeros_like(call.centers),
        variance=torch.full_like(call.variance, 0.01),
        sizes=torch.tensor([[[5, 9, 4, 7]]], dtype=torch.int32),
        spreads=torch.tensor([[[0.0, 3.0, 0.5, 40.0]]]),
        q=call.q.abs(),
    )
    sizes = call.sizes.flatten().tolist()
    each = plain.importances(call, 0, 0, range(64))
    assert sorted(range(4), key=lambda c: -each[c])[:2] == [3, 1]
    assert_routes(call, impl)
    assert plain.chosen(each, sizes, 10) == [3]
    assert plain.chosen(each, sizes, 11) == [3, 2]
    made = run("route", call._replace(keys=11), impl)
    assert made.routes.tolist() == [[[[0b1100]]]]


# Triton's interpreter is NumPy, which warns of what a device does without a word.
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered", "ignore:invalid value encountered")
@pytest.mark.interpreted
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_queries_that_are_not_finite_take_no_part(impl, bad):
    call = route_call(grid=(8, 16), dtype=torch.float32, heads=2)
    call.q[0, 0, 3, 2, 1] = bad
    call.q[0, 0, :, 8:] = bad  # a whole tile
    assert_routes(call, impl)
    made = run("route", call, impl)
    assert made.number[0, 0, 1] == 0
    assert not made.routes[0, 0, 1].any()


@pytest.mark.interpreted
def test_clusters_without_keys_are_never_routed(impl):
    call = route_call(grid=(8, 8), dtype=torch.float32, keys=10**6)
    made = run("route", call, impl)
    some = {c for c, size in enumerate(call.sizes.flatten().tolist()) if size}
    assert plain.clusters_in(made.routes.flatten().tolist()) == some
    assert made.number.item() == call.sizes.sum()
    empty = run("route", call._replace(sizes=torch.zeros_like(call.sizes)), impl)
    assert not empty.routes.any()
    assert not empty.number.any()
    assert (empty.lse == -torch.inf).all()


def test_clusters_of_no_importance_are_never_routed(impl):
    """Their weight is less than the smallest number."""
    call = route_call(grid=(8, 8), dtype=torch.float32, keys=10**6, count=3)
    call = call._replace(
        q=torch.ones_like(call.q),
        centers=torch.tensor([[[[0.0] * 3, [1000.0] * 3, [-1000.0] * 3]]]),
        sizes=torch.ones_like(call.sizes),
    )
    assert run("route", call, impl).routes.tolist() == [[[[0b10]]]]


def test_nothing_is_routed_without_a_budget_or_a_batch(impl):
    assert not run("route", route_call(keys=0, dtype=torch.float32), impl).routes.any()
    empty = run("route", route_call(batch=0, dtype=torch.float32), impl)
    assert empty.routes.shape == (0, 1, 4, 1)
    assert empty.number.shape == (0, 1, 4)
    assert empty.lse.shape == (0, 1, 9, 11)


def test_every_part_of_the_tiles_is_the_whole(monkeypatch):
    call = route_call(grid=(40, 9))
    want = routing.route(call)
    monkeypatch.setattr(routing, "CHUNK_ELEMENTS", 64 * 9 * 2)
    found = routing.route(call)
    assert torch.equal(found.routes, want.routes)
    assert torch.equal(found.number, want.number)
    assert torch.equal(found.lse, want.lse)


def start_call(
    grid=(9, 10), key_grid=(7, 6), heads=2, key_heads=1, cluster_heads=1, count=40, dtype=torch.float64, keys=14, seed=0
):
    """Labels of any keys, some in no cluster, and routes of any clusters."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(-1, count, (2, cluster_heads, *key_grid), generator=generator, dtype=torch.int32)
    sizes = (label.flatten(2).unsqueeze(-1) == torch.arange(count)).sum(2).int()
    features = [
        torch.randint(-3, 4, (2, h, *g, 3), generator=generator) for h, g in ((heads, grid), (key_heads, key_grid))
    ]
    q, k = (x.to(dtype) for x in features)
    routed = plain.drawn_routes(sizes, heads, grid, keys, generator)
    return RoutedStartCall(q=q, k=k, order=order_of(label), sizes=sizes, routes=routed, keys=keys)


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"grid": (70,), "key_grid": (40,), "heads": 4, "key_heads": 2, "cluster_heads": 4},
        {"grid": (3, 4, 5), "key_grid": (2, 3, 4), "cluster_heads": 2},
        {"keys": 1, "count": 4},
    ],
    ids=str,
)
def test_the_best_routed_key_is_that_of_plain_python(impl, how, dtype):
    """Whole numbers: many scores are equal, and the lower key counts."""
    call = start_call(dtype=dtype, **how)
    index, score = (x.flatten(2) for x in run("routed_start", call, impl))
    assert (index.dtype, score.dtype) == (torch.int32, torch.float32)
    for b, h, query in torch.cartesian_prod(*map(torch.arange, index.shape)).tolist():
        assert (int(index[b, h, query]), float(score[b, h, query])) == plain.best_routed(call, b, h, query)


@pytest.mark.interpreted
def test_a_query_that_is_not_finite_or_routes_nothing_has_no_best_key(impl):
    call = start_call(grid=(8, 16), dtype=torch.float32)
    call.q[0, 0, 3, 3, 0] = torch.nan
    call.routes[:, :, 1] = 0
    index, score = run("routed_start", call, impl)
    assert index[0, 0, 3, 3] == -1
    assert score[0, 0, 3, 3] == -torch.inf
    assert (index[..., 8:, :] == -1).all()
    assert (score[..., 8:, :] == -torch.inf).all()
    assert (index[0, 1, :, :8] >= 0).all()


def test_is_routed_asks_the_tile_of_the_query():
    """A label of no cluster, whatever it is, is not routed."""
    grid, label = (9, 10), torch.randint(-1, 64, (2, 1, 7, 6), dtype=torch.int32)
    label[0, 0, 0] = torch.tensor([64, 95, 2**31 - 1, -(2**31), -2, 63])
    routes = torch.randint(-(2**31), 2**31, (2, 2, 4, 2), dtype=torch.int32)
    row, query, key = (torch.randint(n, (300,)) for n in (4, 90, 42))
    found = routing.is_routed(routes, label, row, query, key, grid)
    for r, i, j, one in zip(row.tolist(), query.tolist(), key.tolist(), found.tolist(), strict=True):
        words = routes[r // 2, r % 2, plain.tile_of(grid, i)].tolist()
        assert one == (int(label[r // 2, 0].flatten()[j]) in plain.clusters_in(words))
