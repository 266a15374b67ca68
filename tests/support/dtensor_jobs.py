"""What ranks are asked in tests/distributed about DTensors: each compares the whole answer with that of one process."""

from dataclasses import fields, is_dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import scram
import scram.distributed
from scram.core import ops
from scram.spec import draws
from scram.spec.grid import AllowedKeys

PLACES = {"batch": Shard(0), "heads": Shard(1), "whole": Replicate()}
SEARCH = scram.Search("query", matches=2, sweeps=2, gossip=2, seed=3)
CLUSTERS = scram.Clusters(count=7, keys=8)
HOW = {
    "clusters": {"search": SEARCH, "tail": CLUSTERS},
    "clusters alone": {"search": None, "tail": scram.Clusters(count=7, keys=8, seed=3)},
    "drawn": {"search": SEARCH, "tail": scram.DrawnKeys(samples=6)},
    "nothing": {"search": SEARCH, "tail": None},
    "tile": {"search": scram.Search("tile", sweeps=2, seed=3), "tail": None},
    "causal": {"search": SEARCH, "causal": True},
    "causal, drawn": {"search": SEARCH, "tail": scram.DrawnKeys(samples=6), "causal": True},
    "causal clusters": {"search": None, "tail": scram.Clusters(count=7, keys=8, stretch=64, seed=3), "causal": True},
    "no seed": {"search": scram.Search("query", sweeps=2), "tail": CLUSTERS},
    "dense": {},
}


def whole_numbers(batch=2, heads=4, key_heads=4, grid=(4, 5), seed=0):
    """q, k, v of whole numbers, so that every score is exact; with gradients."""
    make = torch.Generator().manual_seed(seed)
    shapes = (batch, heads, *grid, 4), (batch, key_heads, *grid, 4), (batch, key_heads, *grid, 3)
    return [torch.randint(-3, 4, shape, generator=make).float().requires_grad_() for shape in shapes]


def mesh_of(mesh, shape):
    return init_device_mesh("cpu", shape) if shape else mesh


def placed(x, mesh, places):
    """A DTensor, a leaf of its own; nothing is sent, every rank has all of it."""
    if x is None:
        return None
    whole = DTensor.from_local(x.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=places).detach().requires_grad_(x.requires_grad)


def full(x):
    """The whole tensor, of a DTensor."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def assert_equal(found, want, places):
    """Bit for bit; what is found lies as `places` say."""
    if isinstance(want, torch.Tensor):
        assert isinstance(found, DTensor)
        assert list(found.placements) == list(places)
        assert found.shape == want.shape
        assert found.dtype == want.dtype
        assert torch.equal(full(found), want)
    elif is_dataclass(want):
        for field in fields(want):
            mine, theirs = getattr(found, field.name), getattr(want, field.name)
            if isinstance(theirs, torch.Tensor) and field.name != "key_mask":
                assert_equal(mine, theirs, places)
    else:
        for mine, theirs in zip(found, want, strict=True):
            assert_equal(mine, theirs, places)


def mask_of(kind, q, k):
    if kind is None:
        return None
    shape = (q.shape[0], *([] if kind == "keys" else [q.shape[1]]), *k.shape[2:-1])
    return torch.rand(shape, generator=torch.Generator().manual_seed(5)) < 0.6


def attention(
    mesh,
    place,
    how,
    shape=None,
    batch=2,
    heads=4,
    key_heads=4,
    keys_whole=False,
    mask=None,
    extra=False,
    dropout_p=0.0,
    impl="auto",
    grid=(4, 5),
):
    """The answer of one process, bit for bit, its gradients, and nothing sent but seeds."""
    mesh = mesh_of(mesh, shape)
    places = [PLACES[name] for name in place]
    whole = whole_numbers(batch, heads, key_heads, grid)
    legal = mask_of(mask, *whole[:2])
    options = {**HOW[how], "dropout_p": dropout_p, **({} if how == "dense" else {"impl": impl})}
    more = [x.detach()[:, :, :2, 0].clone().requires_grad_() for x in whole[1:]] if extra else []
    torch.manual_seed(7)
    want = scram.attention(*whole, key_mask=legal, extra=tuple(more) or None, **options)
    weights = torch.arange(want.numel()).reshape(want.shape) % 5 - 2.0
    grads = torch.autograd.grad((want * weights).sum(), [*whole, *more])
    key_places = [Replicate()] * mesh.ndim if keys_whole else places
    own = [placed(x, mesh, of) for x, of in zip(whole, (places, key_places, key_places), strict=True)]
    own_more = [placed(x, mesh, key_places) for x in more]
    torch.manual_seed(7 if dist.get_rank() == 0 else 8)
    with CommDebugMode() as sent:
        out = scram.attention(*own, key_mask=legal, extra=tuple(own_more) or None, **options)
        loss = out * placed(weights, mesh, places)
        own_grads = torch.autograd.grad(loss.to_local().sum(), [*own, *own_more])
    assert sent.get_total_counts() == 0, sent.get_comm_counts()
    if how == "dense":
        torch.testing.assert_close(full(out), want.detach())
    else:
        assert_equal(out, want.detach(), places)
    for found, grad in zip(own_grads, grads, strict=True):
        torch.testing.assert_close(full(found), grad, atol=1e-4, rtol=1e-4)


def later_positions(mesh, place, how, grid=(9, 10)):
    """Everything after a position is replaced: output and gradients up to it keep their bits, later inputs get none.

    By DTensors, and by rows of the grid that are exchanged for heads.
    """
    whole = [x.detach() for x in whole_numbers(grid=grid)]
    rank = dist.get_rank()
    lines = [list(range(grid[0]))[n :: mesh.size()] for n in range(mesh.size())]
    split = [len(x) for x in lines]
    for at, junk in ((20, torch.nan), (70, 1e30), (71, torch.inf)):
        later = (torch.arange(90) >= at).reshape(*grid, 1)
        found = []
        if how == "causal, drawn":  # through windows what is not finite reaches gradients
            junk = 5.0
        for tensors in (whole, [torch.where(later, junk, x) for x in whole]):
            torch.manual_seed(7)  # of all ranks
            own = [placed(x.clone().requires_grad_(), mesh, [PLACES[place]]) for x in tensors]
            out = scram.attention(*own, **HOW[how]).to_local().flatten(2, 3)[:, :, :at]
            grads = torch.autograd.grad(out.sin().sum(), own)
            grads = [x.to_local().flatten(2, 3) for x in grads]
            assert not any(x[:, :, at:].any() for x in grads)
            rows = [x.split(split, 2)[rank].contiguous() for x in tensors]
            torch.manual_seed(7)
            line = scram.distributed.attention(*rows, mesh=mesh, mode="heads", **HOW[how]).flatten(2, 3)
            begin = sum(split[:rank]) * grid[1]
            found.append([out, *(x[:, :, :at] for x in grads), line[:, :, : max(0, at - begin)]])
        for one, two in zip(*found, strict=True):
            assert torch.equal(one, two), (at, junk)


def stages(mesh, place, shape=None, batch=2, heads=4, key_heads=2, mask="keys", impl="auto"):
    """All stages on DTensors that come from each other; masks, matches and routes may be plain."""
    mesh = mesh_of(mesh, shape)
    places = [PLACES[name] for name in place]
    q, k, _ = whole = [x.detach() for x in whole_numbers(batch, heads, key_heads)]
    legal = mask_of(mask, q, k)
    mask_places = [Replicate() if mask == "keys" and x == Shard(1) else x for x in places]
    own, own_mask = [placed(x, mesh, places) for x in whole], placed(legal, mesh, mask_places)
    for given in (legal, own_mask):
        here, there = {"key_mask": legal, "impl": impl}, {"key_mask": given, "impl": impl}
        found, mine = (scram.search(*x[:2], search=SEARCH, **of) for x, of in ((whole, here), (own, there)))
        assert_equal(mine, found, places)
        assert "found ?" in repr(mine)
        again = scram.search(*own[:2], search=SEARCH, warm=mine, **there)
        assert_equal(again, scram.search(q, k, search=SEARCH, warm=found, **here), places)
        settings = scram.Clusters(count=5, keys=6, seed=1)
        book = scram.cluster(*whole, clusters=settings, **here)
        own_book = scram.cluster(*own, clusters=settings, **there)
        assert_equal(own_book, book, places)
        routes = scram.route(q, k, book, impl=impl)
        assert routes.chosen.any()
        own_routes = scram.route(*own[:2], own_book, impl=impl)
        assert_equal(own_routes, routes, places)
        start = {"search": scram.Search(sweeps=0, seed=0), "scale": book.scale}
        routed = scram.search(*own[:2], codebook=own_book, **start, **there)
        assert_equal(routed, scram.search(q, k, codebook=book, **start, **here), places)
        for tail, own_tail in ((book, own_book), (book, book), (None, None)):
            for chosen, own_chosen in ((None, None), (routes, own_routes), (routes, routes))[
                : 1 if tail is None else 3
            ]:
                want = scram.attend(*whole, found, tail=tail, routes=chosen, **here)
                if own_tail is None or own_tail.key_mask is given:
                    own_want = scram.attend(*own, mine, tail=own_tail, routes=own_chosen, **there)
                    assert_equal(own_want, want, places)
                assert_equal(scram.attend(*own, found, tail=tail, routes=chosen, **here), want, places)
        for method in (scram.Snis(samples=5, seed=2), scram.DrawnKeys(samples=5, seed=2)):
            want = scram.estimate(*whole, found, method=method, **here)
            assert_equal(scram.estimate(*own, mine, method=method, **there), want, places)


def dropout(mesh):
    """One seed of dropout for all ranks, that of rank 0."""
    whole = [x.detach() for x in whole_numbers()]
    for place in (Shard(0), Shard(1), Replicate()):
        own = [placed(x, mesh, [place]) for x in whole]
        for how in ("clusters", "drawn", "nothing"):
            torch.manual_seed(11 + dist.get_rank())
            out = scram.attention(*own, dropout_p=0.4, **HOW[how])
            torch.manual_seed(11)
            assert_equal(out, scram.attention(*whole, dropout_p=0.4, **HOW[how]), [place])


def one_seed(mesh):
    """Without a seed one is sent, that of rank 0."""
    whole = [x.detach() for x in whole_numbers()]
    own = [placed(x, mesh, [Shard(1)]) for x in whole]
    how = {"search": scram.Search(sweeps=0), "tail": None, "radius": 0}
    torch.manual_seed(11 + dist.get_rank())
    with CommDebugMode() as sent:
        out = scram.attention(*own, **how)
    assert sent.get_total_counts() == (mesh.size() > 1), sent.get_comm_counts()
    torch.manual_seed(11)
    assert torch.equal(full(out), scram.attention(*whole, **how))


def module(mesh, how, keep=False):
    """A GridAttention whose parameters are everywhere, of a batch that is cut."""
    torch.manual_seed(0)
    layer = scram.nn.GridAttention(8, 2, radius=1, keep_matches=keep, **how)
    layer.train(not keep)
    x = torch.randn(4, 5, 6, 8, requires_grad=True)
    want = [layer(x) for _ in range(2)][-1]
    want.square().sum().backward()
    grads = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    layer.reset()
    layer = distribute_module(layer, mesh)
    own = distribute_tensor(x.detach(), mesh, [Shard(0)]).requires_grad_()
    out = [layer(own) for _ in range(2)][-1]
    assert list(out.placements) == [Shard(0)]
    out.square().sum().backward()
    torch.testing.assert_close(full(out), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(full(own.grad), x.grad, atol=1e-4, rtol=1e-4)
    for p, grad in zip(layer.parameters(), grads, strict=True):
        torch.testing.assert_close(full(p.grad), grad, atol=1e-4, rtol=1e-4)


def refused(mesh, change):
    """The words of the error."""
    q, k, v = (x.detach() for x in whole_numbers())
    places = {"q": [Shard(1)], "k": [Shard(1)], "v": [Shard(1)]}
    how = {"search": SEARCH, "tail": None}
    if change == "grid":
        places = {name: [Shard(2)] for name in "qkv"}
    elif change == "others":
        places["k"] = [Shard(0)]
    elif change == "q whole":
        places["q"] = [Replicate()]
    elif change in ("split keys", "clusters"):
        k, v = k[:, :1], v[:, :1]
    if change == "clusters":
        places["k"] = places["v"] = [Replicate()]
        how = {"search": SEARCH}
    own = [distribute_tensor(x, mesh, places[name]) for name, x in (("q", q), ("k", k), ("v", v))]
    if change == "partial":
        own[0] = DTensor.from_local(q, mesh, [Partial()])
    elif change == "plain":
        own[1] = k
    elif change == "plain with gradients":
        how["extra"] = tuple(x[:, :, 0].clone().requires_grad_() for x in (k, v))
    elif change == "mask":
        how["key_mask"] = distribute_tensor(torch.ones(2, 4, 5, dtype=torch.bool), mesh, [Shard(1)])
    elif change == "argument":
        how["attn_mask"] = None
    try:
        scram.attention(*own, **how)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def compiled(mesh):
    """torch.compile leaves the call out of the graph: it runs as it is."""
    whole = [x.detach() for x in whole_numbers()]
    own = [placed(x, mesh, [Shard(1)]) for x in whole]
    run = torch.compile(lambda q, k, v: 2 * scram.attention(q, k, v, search=SEARCH, tail=None), backend="eager")
    assert torch.equal(full(run(*own)), 2 * scram.attention(*whole, search=SEARCH, tail=None))


# --- raw operators ---


def operators(mesh, place, shape=None, with_rows=True, heads=4, key_heads=4, impl="numba"):
    """Every operator and its gradient on DTensors: what one process gets; with rows nothing is sent."""
    mesh = mesh_of(mesh, shape)
    places = [PLACES[name] for name in place]
    tested = set()
    for operator, call in calls(heads, key_heads, impl):
        draws = "rows" in call._fields
        if draws and with_rows:
            call = call._replace(rows=torch.arange(2 * heads).reshape(2, heads) + 10)
        sends = (draws and not with_rows) or key_heads % mesh.size() > 0
        want = ops._several(operator.op(*operator._fields(call), impl))
        given = [
            _argument(name, x, mesh, places) for name, x in zip(operator.names, operator._fields(call), strict=True)
        ]
        with CommDebugMode() as sent:
            found = ops._several(operator.op(*given, impl))
        if not sends:
            assert sent.get_total_counts() == 0, (operator.name, sent.get_comm_counts())
            assert all(list(x.placements) == places for x in found), operator.name
        assert all(torch.equal(full(a), b) for a, b in zip(found, want, strict=True)), operator.name
        tested.add(operator.name)
        if operator.grads_type is None:
            continue
        above = [torch.ones_like(x) for x in want[: len(operator.grad_names)]]
        kept = [getattr(operator.result_type(*want), name) for name in operator.keep]
        want = operator.backward_op(*operator._fields(call), *kept, *above, impl)
        kept, above = ([_argument("", x, mesh, places) for x in of] for of in (kept, above))
        with CommDebugMode() as sent:
            found = operator.backward_op(*given, *kept, *above, impl)
        if not sends:
            assert sent.get_total_counts() == 0, (operator.name, sent.get_comm_counts())
        for mine, theirs in zip(found, want, strict=True):
            torch.testing.assert_close(full(mine), theirs, atol=1e-4, rtol=1e-4)
    return sorted(tested)


def _argument(name, x, mesh, places):
    if not isinstance(x, torch.Tensor):
        return x
    if name in ("seed", "dropout_seed", "table"):
        return placed(x, mesh, [Replicate()] * mesh.ndim)
    headless = (name == "key_mask" and x.ndim == 3) or (name == "order" and x.ndim == 2)
    return placed(x, mesh, [Replicate() if headless and place == Shard(1) else place for place in places])


def calls(heads, key_heads, impl):
    """A call of every operator, with everything that it may be given."""
    q, k, v = (x.detach() for x in whole_numbers(heads=heads, key_heads=key_heads))
    seed, grid, of = torch.tensor(3), (4, 5), scram.core.calls

    def run(operator, call):
        return operator.result_type(*operator.op(*operator._fields(call), impl))

    yield ops.window_scores, window_call(q, k)
    for mask in (None, mask_of("keys", q, k), mask_of("heads", q, k)):
        search = {"method": "query", "matches": 2, "separation": 0, "sweeps": 2, "jumps": (2, 1)}
        search |= {"propagate": "both", "gossip": 2, "reach": (), "random": True, "causal": False}
        call = of.SearchCall(q, k, seed, mask, None, None, None, **search)
        index = run(ops.search, call).index
        yield ops.search, call._replace(warm=index)
        attend = {"radius": (1, 1), "causal": False, "scale": 0.3, "weight": "softmax", "dropout_p": 0.2}
        extra = k[:, :, 0, :2].clone(), v[:, :, 0, :2].clone()
        call = of.AttendCall(q, k, v, index, mask, *extra, None, None, seed, None, **attend)
        yield ops.attend, call
        windows = call
        out, lse = run(ops.attend, call)
        yield ops.attend, call._replace(k_extra=None, v_extra=None, dropout_seed=None, dropout_p=0.0)
        drawn = {"radius": (1, 1), "causal": False, "scale": 0.3, "dropout_p": 0.2}
        for stratified in (False, True):
            tail = of.DrawnTailCall(q, k, v, index, mask, out, lse, seed, seed, None, 6, stratified, **drawn)
            yield ops.drawn_tail, tail
        legal = AllowedKeys.of(q, k, False, mask)
        order = None if mask is None else legal.order.reshape(*mask.shape[:-2], -1)
        lists = (*draws.modes(index, grid, legal), draws.allowed_counts(q, legal), order, mask)
        table = draws.step_table(1.5, grid, q.device)
        sample = {"samples": 6, "alpha": 0.5, "chains_per_mode": 1, "burn_in": 1, "causal": False, "scale": 0.3}
        for method, head in (("snis", (out, lse)), ("metropolis", (None, None))):
            yield ops.sample, of.SampleCall(q, k, v, *lists, *head, seed, table, None, method, **sample)
        group = heads // key_heads if mask is not None and mask.ndim == 4 else 1
        wide_k, wide_v = (x.repeat_interleave(group, 1) for x in (k, v))
        call = of.ClusterCall(q, wide_k, wide_v, mask, None, None, seed, None, 6, 2, 0.3)
        yield ops.cluster, call
        yield from routed_calls(q, k, v, windows, run(ops.cluster, call), out, lse, run)


def window_call(q, k):
    corner = torch.randint(-2, 4, (*q.shape[:-1], 2), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    return scram.core.calls.WindowScoresCall(q, k, corner, (2, 3), 0.3)


def routed_calls(q, k, v, windows, made, out, lse, run):
    """Calls of the operators that read clusters, with routes and without."""
    of = scram.core.calls
    call = of.RouteCall(q, made.centers, made.sizes, made.variance, made.spreads, keys=7, scale=0.3)
    yield ops.route, call
    routes = run(ops.route, call).routes
    yield ops.routed_start, of.RoutedStartCall(q, k, made.order, made.sizes, routes, keys=7)
    yield ops.attend, windows._replace(label=made.label, routes=routes)
    call = of.ClusterTailCall(
        q=q,
        k=k,
        v=v,
        index=windows.index,
        label=made.label,
        order=made.order,
        centers=made.centers,
        values=made.values,
        slope=made.slope,
        sizes=made.sizes,
        variance=made.variance,
        spreads=made.spreads,
        routes=routes,
        near_out=out,
        near_lse=lse,
        dropout_seed=windows.dropout_seed,
        rows=None,
        radius=(1, 1),
        scale=0.3,
        dropout_p=0.2,
        extras=2,
        keys=7,
    )
    yield ops.cluster_tail, call
    yield ops.cluster_tail, call._replace(k=None, v=None, order=None, routes=None, keys=0, slope=None, spreads=None)
    yield ops.cluster_tail, call._replace(index=None, near_out=None, near_lse=None)
    flat = (x.flatten(2, 3) for x in (q, k, v))
    yield ops.earlier, of.EarlierCall(*flat, None, windows.dropout_seed, None, 0.3, 0.2)


# --- heads for rows ---


def heads_mode(mesh, how, rows, heads, key_heads, mask=None, batch=2, impl="numba"):
    """scram.distributed.attention(mode="heads"): the answer of one process, bit for bit, and its gradients."""
    whole = whole_numbers(batch, heads, key_heads, (sum(rows), 4))
    legal, rank = mask_of(mask, *whole[:2]), mesh.get_local_rank()
    options = {**HOW[how], **({} if how in ("dense", "tile") else {"impl": impl})}
    torch.manual_seed(5)
    want = scram.attention(*whole, key_mask=legal, **options)
    weights = torch.arange(want.numel()).reshape(want.shape) % 5 - 2.0
    (want * weights).sum().backward()
    own = [x.detach().split(list(rows), 2)[rank].clone().requires_grad_() for x in whole]
    own_mask = None if legal is None else legal.split(list(rows), 1 if mask == "keys" else 2)[rank]
    torch.manual_seed(5 if rank == 0 else 6)
    out = scram.distributed.attention(*own, mesh=mesh, mode="heads", key_mask=own_mask, **options)
    if how == "dense":
        torch.testing.assert_close(out, want.split(list(rows), 2)[rank])
    else:
        assert torch.equal(out, want.split(list(rows), 2)[rank])
    (out * weights.split(list(rows), 2)[rank]).sum().backward()
    for x, of in zip(own, whole, strict=True):
        torch.testing.assert_close(x.grad, of.grad.split(list(rows), 2)[rank], atol=1e-4, rtol=1e-4)
