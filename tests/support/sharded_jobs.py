"""What ranks are asked in tests/distributed: each compares its shard with the answer of one process."""

import contextlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numba
import torch
import torch.distributed as dist

import scram
import scram.distributed
from scram.core.pipeline import prepare
from scram.core.resolve import Request, resolve
from scram.distributed.clusters import samples
from scram.distributed.halo import exchanged
from scram.distributed.mesh import Ranks
from scram.distributed.shards import Shards, checked, shard_seed
from scram.spec.clustering import means, moments
from scram.spec.scoring import prepare_key
from support.photos import projected
from support.sharded import cut, mask_of, tensors

ENGINE = "reference"
SHORT = {"sweeps": 1, "gossip": 2}  # a search whose result is compared, however good it is


def own_part(mesh, x, rows, axis=2):
    return None if x is None else cut(x, rows, axis)[mesh.get_local_rank()]


def compare(mesh, rows, key_rows, found, want, shards, wanted_grads, atol):
    """out and gradients of this rank against those of one process."""
    torch.testing.assert_close(found, want, atol=atol, rtol=0)
    rank = mesh.get_local_rank()
    for name, x, of, all_rows in zip("qkv", shards, wanted_grads, (rows, key_rows, key_rows), strict=True):
        part = of.split(list(all_rows), 2)[rank]
        torch.testing.assert_close(x.grad, part, atol=atol, rtol=0, msg=lambda words, name=name: f"d{name}: {words}")


def own_mask_of(mask, legal, key_rows, rank):
    """This rank's mask; for "some" rank 0 has one of keys, rank 1 one of heads, others none."""
    if legal is None or (mask == "some" and rank > 1):
        return None
    own = legal.split(list(key_rows), 1 if mask == "keys" else 2)[rank]
    return own[:, 0] if mask == "some" and rank == 0 else own


def gather_equals_attend(
    mesh,
    rows,
    key_rows,
    extents=(3,),
    heads=2,
    key_heads=1,
    mask=None,
    tail=False,
    bits=64,
    score="dot",
    weight="softmax",
):
    dtype, atol = {64: (torch.float64, 1e-12), 16: (torch.bfloat16, 0.05)}[bits]
    grid, key_grid = (sum(rows), *extents), (sum(key_rows), *extents)
    whole, legal = tensors(grid, key_grid, heads, key_heads, dtype), mask_of(mask, key_grid, heads)
    if mask == "some":
        legal[:, :, : key_rows[0]] = legal[:, :1, : key_rows[0]]
        legal[:, :, key_rows[0] + key_rows[1] :] = True
    search = scram.Search(matches=2, seed=3, **SHORT)
    matches = scram.search(*whole[:2], search=search, key_mask=legal, impl=ENGINE, score=score)
    options = {"radius": 1, "score": score, "weight": weight, "impl": ENGINE}
    # As many clusters as keys: one for each, whoever makes them.
    clusters = scram.Clusters(count=10**6, seed=0) if tail else None
    book = scram.cluster(*whole, clusters=clusters, key_mask=legal, score=score, impl=ENGINE) if tail else None
    want = scram.attend(*whole, matches, key_mask=legal, tail=book, **options).out
    factor = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    (want * factor).sum().backward()
    rank = mesh.get_local_rank()
    q, k, v = (own_part(mesh, x, of) for x, of in zip(whole, (rows, key_rows, key_rows), strict=True))
    index, scores = (x.split(list(rows), 2)[rank] for x in (matches.index, matches.score))
    if rows[rank]:
        matches = scram.Matches(index, scores, key_grid)
    own_mask = own_mask_of(mask, legal, key_rows, rank)
    out = scram.distributed.attention(
        q, k, v, mesh=mesh, mode="gather", matches=matches, key_mask=own_mask, tail=clusters, **options
    )
    (out * factor.split(list(rows), 2)[rank]).sum().backward()
    compare(mesh, rows, key_rows, out, want.split(list(rows), 2)[rank], (q, k, v), [x.grad for x in whole], atol)
    return float(out.detach().abs().sum())


def ring_equals_merge(
    mesh,
    rows,
    key_rows,
    extents=(3,),
    heads=2,
    key_heads=1,
    mask=None,
    tail="clusters",
    bits=64,
    score="dot",
    weight="softmax",
    engine=ENGINE,
    halo=None,
    keys=12,
    first_order=True,
):
    dtype, atol = {64: (torch.float64, 1e-12), 16: (torch.bfloat16, 0.05)}[bits]
    grid, key_grid = (sum(rows), *extents), (sum(key_rows), *extents)
    whole, legal = tensors(grid, key_grid, heads, key_heads, dtype), mask_of(mask, key_grid, heads)
    masks = [None] * len(rows) if legal is None else legal.split(list(key_rows), 1 if mask == "keys" else 2)
    qs, ks, vs = (x.split(list(of), 2) for x, of in zip(whole, (rows, key_rows, key_rows), strict=True))
    common = {"score": score, "impl": engine}
    clusters = scram.Clusters(count=8, keys=keys, first_order=first_order, seed=11)

    def first(of, rank):
        return sum(of[:rank]) * torch.Size(extents).numel()

    def searched(rank, k, **how):
        """On this rank's rows and the halo, cut like the whole grid."""
        begin, end = sum(rows[:rank]), sum(rows[: rank + 1])
        reach = min(16, max(rows)) if halo is None else halo
        top = max(begin - reach, 0)
        found = scram.search(whole[0][:, :, top : end + reach].detach(), k, **how)
        index, score = (x[:, :, begin - top : end - top] for x in (found.index, found.score))
        return scram.Matches(index, score, found.key_grid)

    def tail_of(origin):
        share = -(-8 * key_rows[origin] // sum(key_rows))
        seed = shard_seed(11, first(key_rows, origin))
        if tail == "drawn":
            return scram.DrawnKeys(samples=share, seed=seed)
        root = (key_rows[origin] / sum(key_rows)) ** 0.5
        settings = replace(clusters, seed=seed, count=max(1, round(8 * root)), keys=round(clusters.keys * root))
        seen = qs[origin] if rows[origin] else torch.ones_like(whole[0][:, :, :1])
        given = seen.detach(), ks[origin], vs[origin]
        return scram.cluster(*given, clusters=settings, key_mask=masks[origin], **common) if tail else None

    tails = [tail_of(origin) if key_rows[origin] else None for origin in range(len(rows))]
    outs = []
    for rank, q in enumerate(qs):
        total = scram.Attended(q.new_zeros(*q.shape[:-1], 3), q.new_full(q.shape[:-1], -torch.inf))
        if bits == 16:
            total = scram.Attended(*(x.float() for x in total))
        for origin, (k, v, own) in enumerate(zip(ks, vs, masks, strict=True)):
            if rows[rank] and key_rows[origin]:
                seed = shard_seed(7, first(rows, rank), first(key_rows, origin))
                how = scram.Search(matches=2, seed=seed, **SHORT)
                book = tails[origin].detach() if tail == "clusters" else None
                start = {} if book is None else {"codebook": book, "scale": book.scale}
                found = searched(rank, k, search=how, key_mask=own, **start, **common)
                part = scram.attend(q, k, v, found, key_mask=own, weight=weight, tail=tails[origin], **common)
                total = scram.merge(total, part._replace(out=part.out.to(total.out.dtype)))
        outs.append(total.out)
    want = torch.cat(outs, 2)
    factor = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).to(want.dtype)
    (want * factor).sum().backward()
    rank = mesh.get_local_rank()
    q, k, v = (own_part(mesh, x, of) for x, of in zip(whole, (rows, key_rows, key_rows), strict=True))
    settings = {"clusters": clusters, "drawn": scram.DrawnKeys(samples=8, seed=11), None: None}
    seed = 7 if rank == 0 else 100 + rank  # rank 0's counts
    out = scram.distributed.attention(
        q,
        k,
        v,
        mesh=mesh,
        mode="ring",
        search=scram.Search(matches=2, seed=seed, **SHORT),
        tail=settings[tail],
        key_mask=masks[rank],
        weight=weight,
        halo=halo,
        **common,
    )
    assert out.dtype == dtype
    (out * factor.split(list(rows), 2)[rank]).sum().backward()
    wanted = want.split(list(rows), 2)[rank].to(dtype)
    compare(mesh, rows, key_rows, out, wanted, (q, k, v), [x.grad for x in whole], atol)


def halo_is_what_neighbors_hold(mesh, rows, reach):
    """x with its halo is a cut of the whole; a rank without rows has none."""
    whole = torch.arange(2.0 * sum(rows) * 3).reshape(1, 2, sum(rows), 3, 1)
    rank = mesh.get_local_rank()
    x = cut(whole, rows)[rank]
    halo = exchanged(SimpleNamespace(ranks=Ranks(mesh), queries=rows), x, reach)
    if sum(n > 0 for n in rows) < 2 or reach == 0:
        assert halo is None
        return
    begin, end = sum(rows[:rank]), sum(rows[: rank + 1])
    assert torch.equal(halo.around(x), whole[:, :, max(begin - reach, 0) : end + reach] if rows[rank] else x)
    assert torch.equal(halo.without(halo.around(x)), x)


def gather_of_joint_clusters(mesh, rows, key_rows, mask=None, key_heads=1, score="dot", count=4, first_order=True):
    """One k-means on the samples of all ranks; every rank labels its keys; moments are those of all keys of a label."""
    grid, key_grid = (sum(rows), 3), (sum(key_rows), 3)
    whole, legal = tensors(grid, key_grid, 2, key_heads), mask_of(mask, key_grid)
    size, rank = len(rows), mesh.get_local_rank()
    masks = [None] * size if legal is None else legal.split(list(key_rows), 1 if mask == "keys" else 2)
    wide = [None if x is None else x.unsqueeze(1) if mask == "keys" else x for x in masks]
    parts = list(
        zip(
            *(x.detach().split(list(of), 2) for x, of in zip(whole, (rows, key_rows, key_rows), strict=True)),
            strict=True,
        )
    )
    tail = scram.Clusters(count=count, keys=9, first_order=first_order, seed=5)
    how = scram.Search(seed=3, **SHORT)
    request = Request(search=how, tail=tail, key_mask=masks[0], score=score, impl=ENGINE)
    call = checked(*parts[0], request, None)
    some = [
        Shards(SimpleNamespace(rank=n, size=size), *part, own, call, rows, key_rows, 3, 5)
        for n, (part, own) in enumerate(zip(parts, wide, strict=True))
    ]
    q_some, k_some, v_some, *rest = (torch.cat(x, 2) for x in zip(*map(samples, some), strict=True))
    mask_some = rest[0].squeeze(-1).squeeze(1) if rest else None
    common = {"score": score, "impl": ENGINE}
    start = scram.cluster(q_some, k_some, v_some, clusters=tail, key_mask=mask_some, **common)
    resolved = resolve(q_some, k_some, v_some, request._replace(search=None, key_mask=mask_some))
    metric = tail.metric(prepare(resolved, q_some, k_some, v_some))
    assert_equal_moments(start, k_some, v_some, metric)
    assign = replace(tail, steps=0)
    books = [
        scram.cluster(q_some, k, v, clusters=assign, warm=start, key_mask=own, **common)
        for (_, k, v), own in zip(parts, masks, strict=True)
        if k.shape[2]
    ]
    label = torch.cat([book.label for book in books], 2)
    q, k, v = whole
    book = codebook_of_labels(label, k, v, metric, replace(books[0], key_mask=None))
    book = replace(book, key_mask=legal, slope=book.slope if first_order else None)
    index = scram.search(q, k, search=how, key_mask=legal, **common)
    found = [
        scram.Matches(*x, index.key_grid)
        for x in zip(*(x.split(list(rows), 2) for x in (index.index, index.score)), strict=True)
    ]
    outs = [
        scram.attend(part, k, v, near, tail=book, key_mask=legal, **common).out  # tiles are those of the shard
        for part, near in zip(q.split(list(rows), 2), found, strict=True)
        if part.shape[2]
    ]
    want = torch.cat(outs, 2)
    want.square().sum().backward()
    mine = [own_part(mesh, x, of) for x, of in zip(whole, (rows, key_rows, key_rows), strict=True)]
    out = scram.distributed.attention(
        *mine, mesh=mesh, mode="gather", tail=tail, search=how, key_mask=masks[rank], matches=found[rank], **common
    )
    out.square().sum().backward()
    compare(mesh, rows, key_rows, out, want.split(list(rows), 2)[rank], mine, [x.grad for x in whole], 1e-12)


def codebook_of_labels(label, k, v, metric, like):
    """The clusters of all keys with these labels, in plain torch."""
    heads, count = label.shape[1], like.sizes.shape[-1]
    k_rows, v_rows = (
        x.repeat_interleave(heads // x.shape[1], 1).flatten(0, 1).flatten(1, -2)
        for x in (prepare_key(k, like.score), v)
    )
    flat = label.flatten(0, 1).flatten(1).long()
    centers, values, sizes = means(k_rows, v_rows, flat, count)
    slope, variance, spreads = moments(k_rows, v_rows, flat, centers, values, sizes, metric.flatten(0, 1))
    made = {"centers": centers, "values": values, "slope": slope, "variance": variance, "spreads": spreads}
    made = {name: x.reshape(*label.shape[:2], *x.shape[1:]) for name, x in made.items()}
    sizes = sizes.int().reshape(*label.shape[:2], count)
    return replace(like, **made, sizes=sizes, label=label, order=None)


def assert_equal_moments(book, k, v, metric):
    """The metric is that of these clusters."""
    made = codebook_of_labels(book.label, k, v, metric, replace(book, key_mask=None))
    assert book.spreads.any()
    torch.testing.assert_close(made.spreads, book.spreads, atol=1e-12, rtol=0)


def ring_of_all_keys_is_exact(mesh, rows, key_rows):
    """Windows over every shard, so that the union of all is every key."""
    grid, key_grid = (sum(rows), 3), (sum(key_rows), 3)
    whole = tensors(grid, key_grid)
    want = scram.exact_attention(*whole).out
    want.square().sum().backward()
    q, k, v = (own_part(mesh, x, of) for x, of in zip(whole, (rows, key_rows, key_rows), strict=True))
    out = scram.distributed.attention(
        q, k, v, mesh=mesh, mode="ring", search=scram.Search(**SHORT), radius=50, tail=None, impl=ENGINE
    )
    out.square().sum().backward()
    own = want.split(list(rows), 2)[mesh.get_local_rank()]
    compare(mesh, rows, key_rows, out, own, (q, k, v), [x.grad for x in whole], 1e-10)


COVERING = {
    "all keys routed": scram.Clusters(count=5, keys=10**6, seed=0),
    "one cluster a key": scram.Clusters(count=10**6, keys=0, seed=0),
    "no tail": None,  # beside search=None: dense attention
}


def covering_is_exact(mesh, rows, key_rows, mode, tail, search, mask=None):
    """Settings under which every key counts for itself: exact attention and its gradients."""
    grid, key_grid = (sum(rows), 9), (sum(key_rows), 9)
    whole, legal = tensors(grid, key_grid, 4, 2), mask_of(mask, key_grid, 4)
    want = scram.exact_attention(*whole, key_mask=legal).out
    want.square().sum().backward()
    rank = mesh.get_local_rank()
    q, k, v = (own_part(mesh, x, of) for x, of in zip(whole, (rows, key_rows, key_rows), strict=True))
    own = None if legal is None else legal.split(list(key_rows), 1 if mask == "keys" else 2)[rank]
    how = {"search": scram.Search(seed=0, **SHORT) if search else None, "tail": COVERING[tail], "impl": ENGINE}
    out = scram.distributed.attention(q, k, v, mesh=mesh, mode=mode, key_mask=own, **how)
    out.square().sum().backward()
    compare(mesh, rows, key_rows, out, want.split(list(rows), 2)[rank], (q, k, v), [x.grad for x in whole], 1e-10)


def smooth(points=24, width=8):
    """q, k, v [1, 1, points, points, width] of smooth fields, whose softmax is neither flat nor sharp."""
    make = torch.Generator().manual_seed(2)
    coarse = torch.randn(3, width, 6, 6, generator=make)
    fields = torch.nn.functional.interpolate(coarse, (points, points), mode="bicubic", align_corners=True)
    return [x.movedim(0, -1)[None, None].contiguous() for x in fields]


SMOOTH = {"tail": scram.Clusters(count=48, keys=64, seed=1), "impl": ENGINE}


def smooth_rows(mesh, mode, search):
    """out of this rank's rows of smooth fields."""
    rows = [24 // mesh.size()] * mesh.size()
    q, k, v = (own_part(mesh, x, rows) for x in smooth())
    return scram.distributed.attention(q, k, v, mesh=mesh, mode=mode, search=search, **SMOOTH)


def smooth_error(out):
    """|out - exact| / |exact| of smooth fields."""
    exact = scram.exact_attention(*smooth()).out
    return float((out - exact).norm() / exact.norm())


def heads_equal_one_process(mesh, rows, key_rows, mask=None, causal=False, bits=64):
    """Windows that hold every key: the answer does not depend on draws."""
    dtype, atol = {64: (torch.float64, 1e-10), 16: (torch.bfloat16, 0.05)}[bits]
    size = mesh.size()
    heads = 2 * size
    grid, key_grid = (sum(rows), 3), (sum(key_rows), 3)
    whole, legal = tensors(grid, key_grid, heads, size, dtype), mask_of(mask, key_grid, heads)
    want = scram.exact_attention(*whole, key_mask=legal, causal=causal).out
    want.square().sum().backward()
    rank = mesh.get_local_rank()
    q, k, v = (own_part(mesh, x, of) for x, of in zip(whole, (rows, key_rows, key_rows), strict=True))
    own = None if legal is None else legal.split(list(key_rows), 1 if mask == "keys" else 2)[rank]
    how = {"search": scram.Search(**SHORT), "radius": 50, "tail": None, "key_mask": own, "causal": causal}
    out = scram.distributed.attention(q, k, v, mesh=mesh, mode="heads", impl=ENGINE, **how)
    out.square().sum().backward()
    grads = [x.grad for x in whole]
    compare(mesh, rows, key_rows, out, want.split(list(rows), 2)[rank].to(dtype), (q, k, v), grads, atol)


def one_rank_is_scram_attention(mesh, mode, tail):
    """On a mesh of one rank the answer is that of the plain call, bit for bit."""
    q, k, v = tensors((5, 6), (5, 6), 2, 1, torch.float32)
    tails = {"clusters": scram.Clusters(count=7), "drawn": scram.DrawnKeys(samples=5), None: None}
    options = {"search": scram.Search(matches=2, sweeps=2, seed=3), "tail": tails[tail], "impl": ENGINE}
    want = scram.attention(q, k, v, **options)
    out = scram.distributed.attention(q, k, v, mesh=mesh, mode=mode, **options)
    assert torch.equal(out, want)


def one_seed_for_all(mesh, mode):
    """Without a seed rank 0's draw counts: two calls with the same generator on rank 0 agree, whatever others have."""
    rank, outs = mesh.get_local_rank(), []
    q, k, v = (own_part(mesh, x, (4, 4)) for x in tensors((8, 8), (8, 8), 2, 2))
    how = {"search": scram.Search(sweeps=0), "tail": None, "radius": 0, "impl": ENGINE}
    for other in (1, 2, 3):
        torch.manual_seed(other if rank else min(other, 2))
        outs.append(scram.distributed.attention(q, k, v, mesh=mesh, mode=mode, **how))
    assert not torch.equal(outs[0], outs[1])
    assert torch.equal(outs[1], outs[2])


def auto_works(mesh, heads):
    """Defaults: small tensors are attended densely, whichever mode is taken."""
    rows = [3] * mesh.size()
    whole = tensors((sum(rows), 4), (sum(rows), 4), heads, heads)
    want = own_part(mesh, scram.exact_attention(*whole).out, rows)
    q, k, v = (own_part(mesh, x, rows) for x in whole)
    out = scram.distributed.attention(q, k, v, mesh=mesh)
    torch.testing.assert_close(out, want, atol=1e-10, rtol=0)


def extra_keys_are_exact(mesh, rows, key_rows, mode):
    """Windows over every key, and keys beside the grid: exact attention over all; gradients of `extra` add up."""
    whole = tensors((sum(rows), 3), (sum(key_rows), 3))
    beside = tensors((5,), (5,), seed=1)[1:]
    want = joined_keys_attention(whole, beside)
    want.square().sum().backward()
    q, k, v = (own_part(mesh, x, of) for x, of in zip(whole, (rows, key_rows, key_rows), strict=True))
    extra = tuple(x.detach().clone().requires_grad_() for x in beside)
    out = scram.distributed.attention(
        q, k, v, mesh=mesh, mode=mode, search=scram.Search(**SHORT), radius=50, tail=None, extra=extra, impl=ENGINE
    )
    out.square().sum().backward()
    own = want.split(list(rows), 2)[mesh.get_local_rank()]
    compare(mesh, rows, key_rows, out, own, (q, k, v), [x.grad for x in whole], 1e-10)
    for x, of in zip(extra, beside, strict=True):
        dist.all_reduce(x.grad, group=mesh.get_group())
        torch.testing.assert_close(x.grad, of.grad, atol=1e-10, rtol=0)


def joined_keys_attention(whole, beside):
    q, k, v = whole
    keys, values = (torch.cat([x.flatten(2, 3), more], 2).unsqueeze(3) for x, more in zip((k, v), beside, strict=True))
    return scram.exact_attention(q.flatten(2, 3).unsqueeze(3), keys, values).out.reshape(*q.shape[:-1], 3)


def dropout_is_dropout(mesh, mode):
    """Half of the weights are gone and the rest is doubled: the mean over draws is the answer; gradients agree."""
    rows = (4, 3)
    q, k, v = (own_part(mesh, x, rows) for x in tensors((7, 3), (7, 3)))
    search = scram.Search(sweeps=0, jumps=(), seed=0)  # windows hold every key
    how = {"mesh": mesh, "mode": mode, "search": search, "radius": 50, "tail": None, "impl": ENGINE}
    want = scram.distributed.attention(q, k, v, **how)
    torch.manual_seed(3)
    outs = [scram.distributed.attention(q, k, v, dropout_p=0.5, **how) for _ in range(30)]
    assert not torch.equal(outs[0], outs[1])
    gap = (sum(outs) / 30 - want).abs().mean() / want.abs().mean()
    assert 0 < gap < 0.42, gap  # falls with the root of the draws
    state = torch.get_rng_state()

    def loss(v):
        torch.set_rng_state(state)
        return scram.distributed.attention(q, k, v, dropout_p=0.5, **how).square().sum()

    # Linear in v given the draws: a step of any size shows the gradient, if the backward pass draws the same.
    step = torch.zeros_like(v)
    step[0, 0, 0, 0, 0] = 1e-4 * (mesh.get_local_rank() == 0)
    loss(v).backward()
    with torch.no_grad():
        found = loss(v + step) - loss(v - step)
    dist.all_reduce(found, group=mesh.get_group())
    slope = (v.grad * step).sum()
    dist.all_reduce(slope, group=mesh.get_group())
    torch.testing.assert_close(found / 2, slope, rtol=1e-5, atol=1e-9)


def book_and_warm(mesh, rows):
    """A codebook of the whole grid is `attend`; good matches to start from are kept, in rows of the halo too."""
    whole, rank = tensors((sum(rows), 3), (5, 3)), mesh.get_local_rank()
    key_rows = (2, 3, 0)
    book = scram.cluster(*whole, clusters=scram.Clusters(count=4, seed=0), impl=ENGINE).detach()
    scores = whole[0].detach().flatten(2, 3) @ whole[1].detach().flatten(2, 3).mT
    score, index = (x.unflatten(2, (sum(rows), 3)).unsqueeze(-1) for x in scores.max(-1))
    best = scram.Matches(index.int(), score.float(), (5, 3))
    want = scram.attend(*whole, best, tail=book, impl=ENGINE).out.split(list(rows), 2)[rank]
    q, k, v = (own_part(mesh, x, of) for x, of in zip(whole, (rows, key_rows, key_rows), strict=True))
    warm = scram.Matches(*(x.split(list(rows), 2)[rank] for x in (best.index, best.score)), best.key_grid)
    for how in ({"matches": warm}, {"warm": warm, "search": scram.Search(sweeps=1, gossip=0, seed=1)}):
        out = scram.distributed.attention(q, k, v, mesh=mesh, tail=book, impl=ENGINE, mode="gather", **how)
        torch.testing.assert_close(out, want, atol=1e-12, rtol=0)


def photo_rows(mesh, way, seeds):
    """out of this rank's rows of a projected photo, seed after seed: float32 [seeds, rows, columns, width]."""
    how = {"gather": {"mode": "gather"}, "no halo": {"mode": "gather", "halo": 0}, "ring": {"mode": "ring"}}[way]
    q, k = projected("astronaut", 64)
    rows = [64 // mesh.size()] * mesh.size()
    q, k = (x.split(rows, 2)[mesh.get_local_rank()].contiguous() for x in (q, k))
    found = []
    for seed in range(seeds):
        search = scram.Search(seed=seed)
        if way == "ring":
            made = scram.distributed.attention(
                q, k, k, mesh=mesh, search=search, tail=scram.Clusters(64), scale=32.0, **how
            )
        else:  # windows of one key: the key itself
            made = scram.distributed.attention(q, k, k, mesh=mesh, search=search, radius=0, tail=None, **how)
        found.append(made[0, 0])
    return torch.stack(found)


def most_memory(mesh, points, backward):
    """Bytes of tensors that torch holds at most during a ring, this rank's own q, k, v and the output left out."""
    q, k, v = (torch.randn(1, 1, points // mesh.size(), 64, 32, requires_grad=backward) for _ in range(3))
    search = scram.Search(sweeps=1, gossip=0, seed=0)
    tail = scram.Clusters(8, steps=0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        out = scram.distributed.attention(q, k, v, mesh=mesh, mode="ring", search=search, tail=tail)
        if backward:
            out.sum().backward()
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def held_by_backward(mesh, rows):
    """Bytes of tensors that the graph of a ring keeps on this rank, in terms of its own q, k and v."""
    q, k, v = (
        own_part(mesh, x, [rows] * mesh.size()) for x in tensors((rows * mesh.size(), 8), (rows * mesh.size(), 8))
    )
    kept = {}

    def keep(x):
        kept[x.data_ptr()] = x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = scram.distributed.attention(
            q, k, v, mesh=mesh, mode="ring", search=scram.Search(seed=0, **SHORT), tail=None, impl=ENGINE
        )
    assert out.requires_grad
    return sum(kept.values())


def compiles(mesh, folder, fails=False, locks=True):
    """How often this rank compiled a function that all need at once; `fails`: rank 0 compiles what it cannot, first."""
    import fcntl

    from scram._compat import numba as compat

    def one(x):
        return x + 1

    with patch.object(numba.config, "CACHE_DIR", folder):
        function = compat.cached(one)
    kept = Path(function._cache.cache_path)
    if fails and mesh.get_local_rank() == 0:
        with contextlib.suppress(numba.TypingError):
            function("a")
    dist.barrier(mesh.get_group())
    with contextlib.nullcontext() if locks else patch.object(Path, "open", side_effect=OSError):
        assert function(1) == 2
    dist.barrier(mesh.get_group())
    assert any(kept.glob("*.lock")) == locks
    for lock in kept.glob("*.lock"):
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # nobody has it still
    return sum(function.stats.cache_misses.values())
