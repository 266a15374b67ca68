"""Attention of the newest positions over a cache, in Triton: programs share the keys, a second kernel joins them.

One program takes some keys of the stretch, some routed keys or some clusters, for all queries of a row: each number of
the cache is read once for a row. What they find is over maxima of their own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.calls import DecodeCall
from ...results import Attended
from ...spec.routing import MOST_RAISED
from .primitives import LN2, LOG2E, for_product, power, product
from .runtime.block_sizes import DECODE, DECODE_EXACT, tile_pieces
from .runtime.launch import Kernel, cached, kinds, on_device

RAISED = tl.constexpr(MOST_RAISED)
# What counts as finite, as in `spec.stretches`.
LARGEST = tl.constexpr(2.0**30)


class Inputs(NamedTuple):
    """A DecodeCall as kernels take it. Rows of keys and of clusters lie `key_row` and `cluster_row` vectors apart."""

    q: Tensor  # [R, n, E]
    k: Tensor  # [Rk, L, E]
    v: Tensor  # [Rk, L, F]
    usable: Tensor  # bool [Rk, L]
    broken: Tensor  # bool [Rk, L]
    centers: Tensor | None  # [Rk, C, E]
    means: Tensor | None  # [Rk, C, F], values of clusters
    log_sizes: Tensor | None  # float32 [Rk, C]
    variance: Tensor | None  # float32 [Rk, E]
    spreads: Tensor | None  # float32 [Rk, C]
    slope: Tensor | None  # float32 [Rk, E, F]
    listed_k: Tensor | None  # [R, K, E]
    listed_v: Tensor | None  # [R, K, F]
    listed: Tensor | None  # bool [R, K], which exist
    chosen: Tensor | None  # bool [R, C]
    key_row: int
    cluster_row: int
    queries: int  # n
    keys: int  # L
    clusters: int  # C
    routed: int  # K
    group: int  # rows of queries that share a row of keys
    scale: float


class Parts(NamedTuple):
    """Sums of the P programs of a row; the last ones had clusters."""

    acc: Tensor  # float32 [R, P, n, F], weighted values
    top: Tensor  # float32 [R, P, n], largest score
    total: Tensor  # float32 [R, P, n], sum of the weights; NaN for a query that attends a key that is not finite
    tail: Tensor  # float32 [R, P, n], of clusters in the first-order term
    own: int  # programs with keys of the stretch
    near: int  # programs with these, or with routed keys
    parts: int  # P


class DecodeConfig(NamedTuple):
    """What the kernels are compiled for."""

    BLOCK_Q: int
    BLOCK_K: int  # keys or clusters of a program
    NARROW: bool  # features and values of 16 bits; scores are over log 2 then


def decode(call: DecodeCall) -> Attended:
    batch, heads, count, width = call.q.shape
    value_width = call.v.shape[-1]
    rows = batch * heads
    out = torch.empty((batch, heads, count, value_width), dtype=call.v.dtype, device=call.q.device)
    lse = torch.empty((batch, heads, count), dtype=torch.float32, device=call.q.device)
    if not out.numel():
        return Attended(out, lse)
    flags = _flags(width, value_width, count, call.q.dtype, call.v.dtype)
    inputs = inputs_of(call)
    block = flags["CONFIG"].BLOCK_K
    own = triton.cdiv(inputs.keys, block)
    near = own + triton.cdiv(inputs.routed, block)
    parts = near + triton.cdiv(inputs.clusters, block)
    size = (rows, parts, count)
    sums = Parts(
        acc=torch.empty((*size, value_width), dtype=torch.float32, device=out.device),
        top=torch.empty(size, dtype=torch.float32, device=out.device),
        total=torch.empty(size, dtype=torch.float32, device=out.device),
        tail=torch.empty(size, dtype=torch.float32, device=out.device),
        own=own,
        near=near,
        parts=parts,
    )
    with on_device(call.q):
        seen = kinds(*inputs)
        _share(rows * parts, tuple(flags.items()), seen)(inputs, sums)
        _join(rows * count, triton.next_power_of_2(parts), tuple(flags.items()), seen)(inputs, sums, out, lse)
    return Attended(out, lse)


def inputs_of(call: DecodeCall) -> Inputs:
    seen = call.seen
    listed = call.listed
    k, key_row = _rows(call.k)
    v, _ = _rows(call.v)
    usable, flag_row = _rows(call.usable.unsqueeze(-1))
    broken, _ = _rows(call.broken.unsqueeze(-1))
    # Slices of one cache lie equally far apart; anything else is copied.
    if not _rows(call.v)[1] == flag_row == key_row or _rows(call.broken.unsqueeze(-1))[1] != key_row:
        k, v, usable, broken = (x.contiguous() for x in (k, v, usable, broken))
        key_row = call.k.shape[2]
    centers = values = None
    cluster_row = 0
    if seen is not None:
        centers, cluster_row = _rows(seen.centers)
        values, value_row = _rows(seen.values)
        if value_row != cluster_row:
            centers, values = centers.contiguous(), values.contiguous()
            cluster_row = centers.shape[2]
    return Inputs(
        q=call.q.contiguous(),
        k=k,
        v=v,
        usable=usable,
        broken=broken,
        centers=centers,
        means=values,
        log_sizes=None if seen is None else seen.log_sizes.contiguous(),
        variance=None if seen is None else seen.variance.contiguous(),
        spreads=None if seen is None or seen.spreads is None else seen.spreads.contiguous(),
        slope=None if seen is None or seen.slope is None else seen.slope.contiguous(),
        listed_k=None if listed is None else listed.k.contiguous(),
        listed_v=None if listed is None else listed.v.contiguous(),
        listed=None if listed is None else listed.exists.contiguous(),
        chosen=None if listed is None else listed.chosen.contiguous(),
        key_row=key_row,
        cluster_row=cluster_row,
        queries=call.q.shape[2],
        keys=call.k.shape[2],
        clusters=0 if seen is None else seen.centers.shape[2],
        routed=0 if listed is None else listed.k.shape[2],
        group=call.q.shape[1] // call.k.shape[1],
        scale=call.scale,
    )


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """x [B, H, n, width], whose rows (b, h) lie together and equally far apart, and how far in vectors."""
    width = x.shape[-1]
    apart = x.stride(1)
    together = x.stride(3) == 1 and x.stride(2) == width
    if not (together and x.stride(0) == apart * x.shape[1] and apart % width == 0):
        x = x.contiguous()
        apart = x.stride(1)
    return x, apart // width


@cached
def _flags(width: int, value_width: int, count: int, dtype: torch.dtype, value_dtype: torch.dtype) -> dict[str, Any]:
    narrow = dtype.itemsize == value_dtype.itemsize == 2
    keys, warps, ahead = DECODE if narrow else DECODE_EXACT
    # As few queries as a product takes, or those of a tile.
    config = DecodeConfig(16 if count <= 16 else 64, keys, narrow)
    options = {"num_warps": warps, "num_stages": ahead, "enable_fp_fusion": True}
    return {"CONFIG": config, **tile_pieces(width, value_width, narrow), **options}


@cached
def _share(programs: int, flags: tuple[tuple[str, object], ...], given: tuple[object, ...]) -> Kernel:
    return Kernel(share_kernel, programs, dict(flags))


@cached
def _join(programs: int, block: int, flags: tuple[tuple[str, object], ...], given: tuple[object, ...]) -> Kernel:
    return Kernel(join_kernel, programs, {**dict(flags), "BLOCK_P": block})


@triton.jit
def load_vectors(base, at, exists, piece, E: tl.constexpr):
    """Piece number `piece` of the vectors base[at]: [len(at), E.BLOCK]; zeros where `exists` is False."""
    e = piece * E.BLOCK + tl.arange(0, E.BLOCK)[None, :]  # [1, E]
    return tl.load(base + at[:, None] * E.SIZE + e, mask=exists[:, None] & (e < E.SIZE), other=0.0)


@triton.jit
def load_fine(base, count, CONFIG: tl.constexpr, E: tl.constexpr):
    """The queries of a row in pieces [BQ, E], zeros for one that is not finite; and which are [BQ]."""
    i = tl.arange(0, CONFIG.BLOCK_Q)  # [BQ]
    fine = i < count  # [BQ]
    for n in tl.static_range(tl.constexpr(E.PIECES)):
        x = load_vectors(base, i, i < count, n, E)  # [BQ, E]
        fine = fine & (tl.min((tl.abs(x.to(tl.float32)) <= LARGEST).to(tl.int32), 1) > 0)
    pieces = ()
    for n in tl.static_range(tl.constexpr(E.PIECES)):
        pieces += (load_vectors(base, i, fine, n, E),)
    return pieces, fine


@triton.jit
def scores(q_block, base, at, exists, dtype: tl.constexpr, CONFIG: tl.constexpr, E: tl.constexpr):
    """Products of the queries with the vectors base[at]: [BQ, BK]."""
    s = tl.zeros([CONFIG.BLOCK_Q, CONFIG.BLOCK_K], tl.float32)  # [BQ, BK]
    for n in tl.static_range(len(q_block)):
        x = load_vectors(base, at, exists, n, E).to(dtype)  # [BK, E]
        s = product(q_block[n], tl.trans(for_product(x)), s)
    return s


@triton.jit
def store_values(p, base, at, exists, slot, sums, inputs, dtype: tl.constexpr, F: tl.constexpr, BLOCK_Q: tl.constexpr):
    """The weighted values p @ base[at] to the place `slot` of a program."""
    i = tl.arange(0, BLOCK_Q)  # [BQ]
    for n in tl.static_range(tl.constexpr(F.PIECES)):
        x = for_product(load_vectors(base, at, exists, n, F).to(dtype))  # [BK, F]
        acc = product(p.to(x.dtype), x, tl.zeros([BLOCK_Q, F.BLOCK], tl.float32))  # [BQ, F]
        f = n * F.BLOCK + tl.arange(0, F.BLOCK)[None, :]  # [1, F]
        place = sums.acc + (slot * inputs.queries + i)[:, None] * F.SIZE + f  # [BQ, F]
        tl.store(place, acc, mask=(i < inputs.queries)[:, None] & (f < F.SIZE))


@triton.jit
def weights(s, CONFIG: tl.constexpr):
    """The largest score of each query, LOWEST for none, and the weights over it."""
    POWER: tl.constexpr = "exp2" if CONFIG.NARROW else "powers"
    top = tl.maximum(tl.max(s, 1), -1e38)  # [BQ]
    return top, power(s, top[:, None], POWER)


@triton.jit
def share_kernel(inputs, sums, CONFIG: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    """Program (row of queries, some keys)."""
    part = tl.program_id(0) % sums.parts
    row = (tl.program_id(0) // sums.parts).to(tl.int64)
    source = row // inputs.group
    slot = row * sums.parts + part
    i = tl.arange(0, CONFIG.BLOCK_Q)  # [BQ]
    lane = tl.arange(0, CONFIG.BLOCK_K)  # [BK]
    q_block, _ = load_fine(inputs.q + row * inputs.queries * E.SIZE, inputs.queries, CONFIG, E)  # [BQ, E]
    dtype: tl.constexpr = q_block[0].dtype
    value_dtype: tl.constexpr = inputs.v.dtype.element_ty
    products = ()
    for n in tl.static_range(len(q_block)):
        products += (for_product(q_block[n]),)
    unit = LOG2E if CONFIG.NARROW else 1.0
    spoiled = i < 0  # [BQ]
    tail = tl.zeros([CONFIG.BLOCK_Q], tl.float32)  # [BQ]
    if part < sums.own:
        at = part * CONFIG.BLOCK_K + lane  # [BK]
        valid = at < inputs.keys  # [BK]
        place = inputs.keys - inputs.queries + i  # [BQ]
        before = at[None, :] <= place[:, None]  # [BQ, BK]
        first = source * inputs.key_row
        usable = tl.load(inputs.usable + first + at, mask=valid, other=0) != 0  # [BK]
        broken = tl.load(inputs.broken + first + at, mask=valid, other=0) != 0  # [BK]
        spoiled = tl.max((broken[None, :] & before).to(tl.int32), 1) > 0  # [BQ]
        s = scores(products, inputs.k + first * E.SIZE, at, usable, dtype, CONFIG, E) * (inputs.scale * unit)
        top, p = weights(tl.where(usable[None, :] & before, s, -float("inf")), CONFIG)
        store_values(p, inputs.v + first * F.SIZE, at, usable, slot, sums, inputs, value_dtype, F, CONFIG.BLOCK_Q)
        total = tl.sum(p, 1)  # [BQ]
    elif part < sums.near:
        at = (part - sums.own) * CONFIG.BLOCK_K + lane  # [BK]
        total = tl.zeros([CONFIG.BLOCK_Q], tl.float32)  # [BQ]
        top = total
        if inputs.listed is not None:
            first = row * inputs.routed
            valid = tl.load(inputs.listed + first + at, mask=at < inputs.routed, other=0) != 0  # [BK]
            s = scores(products, inputs.listed_k + first * E.SIZE, at, valid, dtype, CONFIG, E) * (inputs.scale * unit)
            top, p = weights(tl.where(valid[None, :], s, -float("inf")), CONFIG)
            routed_values = inputs.listed_v + first * F.SIZE
            store_values(p, routed_values, at, valid, slot, sums, inputs, value_dtype, F, CONFIG.BLOCK_Q)
            total = tl.sum(p, 1)  # [BQ]
    else:
        at = (part - sums.near) * CONFIG.BLOCK_K + lane  # [BK]
        total = tl.zeros([CONFIG.BLOCK_Q], tl.float32)  # [BQ]
        top = total
        if inputs.centers is not None:
            first = source * inputs.clusters
            inside = at < inputs.clusters  # [BK]
            log = tl.load(inputs.log_sizes + first + at, mask=inside, other=-float("inf"))  # [BK]
            if inputs.chosen is not None:
                taken = tl.load(inputs.chosen + row * inputs.clusters + at, mask=inside, other=0) != 0  # [BK]
                log = tl.where(taken, -float("inf"), log)
            valid = log > -float("inf")  # [BK]
            centers = inputs.centers + source * inputs.cluster_row * E.SIZE
            s = scores(products, centers, at, valid, dtype, CONFIG, E) * (inputs.scale * unit)
            if inputs.spreads is not None:
                raised = tl.load(inputs.spreads + first + at, mask=inside, other=0.0)  # [BK]
                spread = query_spreads(q_block, source, inputs, E)  # [BQ]
                s += tl.minimum(spread[:, None] * raised[None, :], RAISED) * (0.5 * unit)
            top, p = weights(tl.where(valid[None, :], s + (log * unit)[None, :], -float("inf")), CONFIG)
            own = tl.full([CONFIG.BLOCK_K], 1.0, tl.float32)  # [BK]
            if inputs.spreads is not None:
                own = tl.load(inputs.spreads + first + at, mask=inside, other=0.0)
            tail = tl.sum(p * own[None, :], 1)  # [BQ]
            cluster_values = inputs.means + source * inputs.cluster_row * F.SIZE
            store_values(p, cluster_values, at, valid, slot, sums, inputs, value_dtype, F, CONFIG.BLOCK_Q)
            total = tl.sum(p, 1)  # [BQ]
    point = slot * inputs.queries + i  # [BQ]
    tl.store(sums.top + point, top, mask=i < inputs.queries)
    tl.store(sums.total + point, tl.where(spoiled, float("nan"), total), mask=i < inputs.queries)
    tl.store(sums.tail + point, tail, mask=i < inputs.queries)


@triton.jit
def query_spreads(q_block, source, inputs, E: tl.constexpr):
    """scale^2 sum_e q_e^2 variance_e of each query: [BQ]."""
    total = tl.sum(q_block[0].to(tl.float32) * 0.0, 1)  # [BQ]
    for n in tl.static_range(len(q_block)):
        e = n * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
        variance = tl.load(inputs.variance + source * E.SIZE + e, mask=e < E.SIZE, other=0.0)  # [E]
        x = q_block[n].to(tl.float32)  # [BQ, E]
        total += tl.sum(x * x * variance[None, :], 1)
    return total * (inputs.scale * inputs.scale)


@triton.jit
def join_kernel(inputs, sums, out, lse, CONFIG: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BLOCK_P: tl.constexpr):
    """Program (row of queries, query)."""
    POWER: tl.constexpr = "exp2" if CONFIG.NARROW else "powers"
    row = (tl.program_id(0) // inputs.queries).to(tl.int64)
    i = tl.program_id(0) % inputs.queries
    part = tl.arange(0, BLOCK_P)  # [P]
    exists = part < sums.parts  # [P]
    point = (row * sums.parts + part) * inputs.queries + i  # [P]
    top = tl.load(sums.top + point, mask=exists, other=-1e38)  # [P]
    total = tl.load(sums.total + point, mask=exists, other=0.0)  # [P]
    some = exists & ~(total == 0)  # [P]
    base = tl.max(tl.where(some, top, -1e38), 0)
    weight = tl.where(some, power(top, base, POWER), 0.0)  # [P]
    each = tl.where(some, total, 0.0) * weight  # [P]
    norm = tl.sum(each, 0)
    tail = tl.load(sums.tail + point, mask=some, other=0.0)  # [P]
    far = tl.sum(tail * weight, 0)  # of clusters in the first-order term

    source = row // inputs.group
    q_row = inputs.q + (row * inputs.queries + i) * E.SIZE
    spread = 0.0
    fine = 1
    for n in tl.static_range(tl.constexpr(E.PIECES)):
        e = n * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
        x = tl.load(q_row + e, mask=e < E.SIZE, other=0.0).to(tl.float32)  # [E]
        fine = tl.minimum(fine, tl.min((tl.abs(x) <= LARGEST).to(tl.int32), 0))
        x = tl.where(tl.abs(x) <= LARGEST, x, 0.0)  # [E]
        if inputs.slope is not None:
            variance = tl.load(inputs.variance + source * E.SIZE + e, mask=e < E.SIZE, other=0.0)  # [E]
            spread += tl.sum(x * x * variance, 0)
    spread = spread * (inputs.scale * inputs.scale)
    inverse = 1.0 / tl.where(norm == 0, 1.0, norm)
    nothing = (fine == 0) | (norm != norm)
    for m in tl.static_range(tl.constexpr(F.PIECES)):
        f = m * F.BLOCK + tl.arange(0, F.BLOCK)  # [F]
        inside = some[:, None] & (f < F.SIZE)[None, :]  # [P, F]
        acc = tl.load(sums.acc + point[:, None] * F.SIZE + f[None, :], mask=inside, other=0.0)  # [P, F]
        mixed = tl.sum(acc * weight[:, None], 0) * inverse  # [F]
        if inputs.slope is not None:
            first = f * 0.0  # [F]
            for n in tl.static_range(tl.constexpr(E.PIECES)):
                e = n * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
                x = tl.load(q_row + e, mask=e < E.SIZE, other=0.0).to(tl.float32)  # [E]
                x = tl.where(tl.abs(x) <= LARGEST, x, 0.0)  # [E]
                place = inputs.slope + (source * E.SIZE + e[:, None]) * F.SIZE + f[None, :]  # [E, F]
                block = tl.load(place, mask=(e < E.SIZE)[:, None] & (f < F.SIZE)[None, :], other=0.0)  # [E, F]
                first += tl.sum(x[:, None] * block, 0)
            mixed += far * inverse * (inputs.scale / (1 + spread)) * first
        mixed = tl.where(nothing, float("nan"), mixed)  # [F]
        tl.store(out + (row * inputs.queries + i) * F.SIZE + f, mixed.to(out.dtype.element_ty), mask=f < F.SIZE)
    if CONFIG.NARROW:
        base = base * LN2
    log = base + tl.log2(tl.where(norm == 0, 1.0, norm)) * LN2
    log = tl.where(norm == 0, -float("inf"), log)
    tl.store(lse + row * inputs.queries + i, tl.where(nothing, float("nan"), log))
