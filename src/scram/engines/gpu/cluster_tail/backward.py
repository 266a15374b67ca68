"""Gradients of the clustered tail in Triton, through out and through lse.

With p the joint weights, r what dropout makes of them, the value of a cluster its own plus the first-order term t_i of
the query, and dp = <grad_out, value>, the gradient of a score is p (r dp - delta), where delta is the mean of r dp over
all less grad_lse. One kernel makes delta and the gradients of the queries and of near_out and near_lse, others those of
the clusters, of the slope and of the routed keys. There programs share the tiles, and their sums are added in order
afterwards, so the bits are the same every time.

The first kernel reads keys and clusters once. It begins with weights p0 from lse and with delta from out, both rounded,
and sums p0, e = p0 (r dp - delta) and p0 k besides e k. These sums say how far off both were.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....core.calls import ClusterTailCall, ClusterTailGrads
from ....results import Attended
from ....spec.schedule import TILE_QUERIES
from ..primitives import (
    LOG2E,
    fine_product,
    for_product,
    fp16_scale_of,
    is_finite,
    load_piece,
    load_pieces,
    power,
    product,
    store_pieces,
    zero_pieces,
)
from ..route.lists import load_listed
from ..runtime.block_sizes import (
    CLUSTER_BACKWARD,
    CLUSTER_BACKWARD_EXACT,
    CLUSTER_COLLECT,
    CLUSTER_COLLECT_EXACT,
    SLOPE,
    SLOPE_EXACT,
    SLOPE_NARROW,
)
from ..runtime.launch import Flags, Kernel, cached, kinds, on_device
from .keys_backward import keys_backward
from .pairs import (
    Totals,
    Upstream,
    add_pairs,
    after_dropout,
    load_totals,
    row_products,
    score_product,
    tile_places,
)
from .table import (
    RAISED,
    Inputs,
    chunks,
    cluster_scores,
    inputs_of,
    is_narrow,
    key_scores,
    keys_left,
    load_queries,
    load_slope,
    load_table,
    load_variance,
    open_clusters,
    query_spreads,
    row_of_keys,
    score_unit,
    slope_factor,
    slope_weights,
    tail_flags,
    tail_queries,
    tiles_at_a_time,
    tiles_of,
    used_of,
)

# Of programs that share the tiles in the gradients of clusters and slope: a few for every processor of a large device.
PROGRAMS = 512


class TailGrads(NamedTuple):
    """Where the gradients of the queries' own tensors are written."""

    q: Tensor
    near_out: Tensor | None
    near_lse: Tensor | None


def cluster_tail_backward(
    call: ClusterTailCall, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor
) -> ClusterTailGrads:
    """Gradients in the dtypes of their tensors; sizes, labels, variance, spreads and routes are constants."""
    q = call.q
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    grads = TailGrads(dq, _empty(call.near_out), _empty(call.near_lse))
    if not lse.numel():
        return ClusterTailGrads(
            q=grads.q,
            k=_zeros(call.k),
            v=_zeros(call.v),
            centers=torch.zeros_like(call.centers),
            values=torch.zeros_like(call.values),
            slope=_zeros(call.slope),
            near_out=grads.near_out,
            near_lse=grads.near_lse,
        )
    flags = tail_flags(call, CLUSTER_BACKWARD, CLUSTER_BACKWARD_EXACT)
    places = torch.empty((5, tiles_of(call), TILE_QUERIES), dtype=torch.float32, device=q.device)
    delta, base, factor, spread, first = places.unbind()
    tail = torch.empty_like(lse, memory_format=torch.contiguous_format)
    totals = Totals(delta=delta, base=base, factor=factor, spread=spread, first=first, tail=tail)
    with on_device(q):
        above = Upstream(grad_out.contiguous(), grad_lse.contiguous())
        forward = Attended(out.contiguous(), lse.contiguous())
        inputs = inputs_of(call, flags)
        sums = ClusterSums.of(call, flags)
        middle = mean_key(call)
        for chunk, tiles in chunks(call, inputs, flags):
            given = kinds(*chunk, *forward, *above, *grads)
            by_queries = _kernel(tail_queries_kernel, tiles, tuple(flags.items()), given)
            by_queries(chunk, forward, above, totals, grads, middle)
            sums.add(chunk, tiles, above, totals)
        d_centers, d_values = sums.total(call)
        d_slope = None if call.slope is None else slope_backward(call, inputs, above, totals)
        dk, dv = (None, None) if inputs.listed is None else keys_backward(call, inputs, above, totals)
    return ClusterTailGrads(grads.q, dk, dv, d_centers, d_values, d_slope, grads.near_out, grads.near_lse)


def mean_key(call: ClusterTailCall) -> Tensor:
    """Of each row of clusters, float32 [B, Hc, E]; about which its keys lie."""
    finite = call.centers.isfinite().all(-1)  # [B, Hc, C]
    sizes = torch.where(finite, call.sizes, 0).unsqueeze(-1).float()
    total = (torch.where(finite.unsqueeze(-1), call.centers.float(), 0) * sizes).sum(2)
    return (total / sizes.sum(2).clamp(min=1)).contiguous()


def _empty(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)


def _zeros(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.zeros_like(x)


@cached
def _kernel(kernel: Any, programs: int, flags: tuple[tuple[str, object], ...], given: tuple[object, ...]) -> Kernel:
    return Kernel(kernel, programs, dict(flags))


class ClusterSums(NamedTuple):
    """The gradients of centers and values while they are summed."""

    flags: Flags
    parts: list[Tensor]  # float32 [splits, rows of clusters, C, E], and of values
    splits: int
    blocks: int  # of clusters
    tiles_of_row: int  # that share a row of clusters

    @classmethod
    def of(cls, call: ClusterTailCall, flags: Flags) -> ClusterSums:
        """`flags`: of the kernel by queries, whose tiles come at a time."""
        collect_flags = tail_flags(call, CLUSTER_COLLECT, CLUSTER_COLLECT_EXACT)
        rows = call.centers.shape[0] * call.centers.shape[1]
        count = call.centers.shape[2]
        blocks = -(-count // collect_flags["CONFIG"].BLOCK_C)
        tiles_of_row = tiles_of(call) // rows
        at_a_time = tiles_at_a_time(call, flags["CONFIG"])
        splits = PROGRAMS // (max(1, at_a_time // tiles_of_row) * blocks)
        splits = max(1, min(tiles_of_row, at_a_time, splits))
        shapes = [(splits, rows * count, x.shape[-1]) for x in (call.centers, call.values)]
        parts = [torch.empty(shape, dtype=torch.float32, device=call.q.device) for shape in shapes]
        return cls(collect_flags, parts, splits, blocks, tiles_of_row)

    def add(self, inputs: Inputs, tiles: int, above: Upstream, totals: Totals) -> None:
        """What `tiles` tiles from `inputs.first` on add."""
        last = inputs.first + tiles
        key_rows = (last - 1) // self.tiles_of_row - inputs.first // self.tiles_of_row + 1
        programs = key_rows * self.blocks * self.splits
        rows = self.parts[0].shape[1] // inputs.table.count
        kernel = _kernel(tail_clusters_kernel, programs, tuple(self.flags.items()), kinds(*inputs, *above))
        kernel(inputs, above, totals, *self.parts, self.splits, self.tiles_of_row, last, rows)

    def total(self, call: ClusterTailCall) -> list[Tensor]:
        given = zip(self.parts, (call.centers, call.values), strict=True)
        return [part.sum(0).to(x.dtype).reshape(x.shape) for part, x in given]


def slope_backward(call: ClusterTailCall, inputs: Inputs, above: Upstream, totals: Totals) -> Tensor:
    """The gradient of the slope: the sum over the queries of a row of clusters of tail * q^T grad_out."""
    assert call.slope is not None
    flags = tail_flags(call, SLOPE_NARROW if is_narrow(call) else SLOPE, SLOPE_EXACT)
    features = flags["E"]
    values = flags["F"]
    rows = call.slope.shape[0] * call.slope.shape[1]
    queries = call.q.shape[:-1].numel() // rows
    blocks = features.PIECES * values.PIECES
    flags = {
        "BLOCK_Q": flags["CONFIG"].BLOCK_C,
        "FP16": flags["CONFIG"].FP16,
        "NARROW": flags["CONFIG"].NARROW,
        **{name: flags[name] for name in ("E", "F", "num_warps", "num_stages", "enable_fp_fusion")},
    }
    steps = -(-queries // flags["BLOCK_Q"])
    splits = max(1, min(steps, PROGRAMS // (rows * blocks)))
    parts = torch.empty((splits, *call.slope.shape), dtype=torch.float32, device=call.q.device)
    kernel = _kernel(tail_slope_kernel, splits * rows * blocks, tuple(flags.items()), kinds(*inputs, *above))
    kernel(inputs.q, above.grad_out, totals.tail, parts, splits, rows, queries)
    return parts.sum(0).to(call.slope.dtype)


@triton.jit
def value_products(grad_out, base, at, CONFIG: tl.constexpr, B: tl.constexpr, F: tl.constexpr, LISTED: tl.constexpr):
    """<grad_out, value> [BQ, BC] of clusters `at` of the table, or of LISTED keys."""
    dp = tl.zeros([B.BLOCK_Q, CONFIG.BLOCK_C], tl.float32)  # [BQ, BC]
    for n in tl.static_range(len(grad_out)):
        v_block = load_listed(base, at, n, F) if LISTED else load_table(base, at, n, F)  # [BC, F]
        dp = product(grad_out[n], tl.trans(v_block), dp)
    return dp


@triton.jit
def center_gradients(
    start,
    q_block,
    grad_out,
    spread,
    first,
    queries,
    inputs,
    CONFIG: tl.constexpr,
    B: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
):
    """`cluster_scores`, r dp [BQ, BC] with `first` [BQ] times `slope_weights` in every dp, and r."""
    at, s, share = cluster_scores(start, q_block, spread, queries, inputs, CONFIG, B, E)
    own = slope_weights(queries.slot + at, inputs.table, CONFIG.BLOCK_C)  # [BC]
    dp = value_products(grad_out, inputs.table.v, queries.slot + at, CONFIG, B, F, False)  # [BQ, BC]
    dp += first[:, None] * own[None, :]
    name = (inputs.first_name + at)[None, :]  # [1, BC]
    dp, r = after_dropout(dp, name, queries.noise[:, None], inputs.dropout, CONFIG.DROPOUT)
    return at, s, share, dp, r


@triton.jit
def key_gradients(
    begin,
    number,
    q_block,
    grad_out,
    queries,
    inputs,
    CONFIG: tl.constexpr,
    B: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
):
    """`key_scores` and r dp [BQ, BK]."""
    key, s = key_scores(begin, number, q_block, queries, inputs, CONFIG, B, E)
    dp = value_products(grad_out, row_of_keys(inputs.v, queries, inputs, F), key, CONFIG, B, F, True)  # [BQ, BK]
    dp, _r = after_dropout(dp, key[None, :], queries.noise[:, None], inputs.dropout, CONFIG.DROPOUT)
    return key, s, dp


class Sums(NamedTuple):
    """What the weights of a tile's queries come to, in a kernel. A weight p is over exp(lse), e is p (r dp - delta)."""

    weight: Any  # [BQ], of p
    excess: Any  # [BQ], of e
    tail: Any  # [BQ], of r p of the clusters in the first-order term
    raised: Any  # [BQ], of p times the slope of the second-order weight
    raised_excess: Any  # [BQ], of e times that
    mean: Any  # [BQ, E] in pieces, of p k; empty where features have 16 bits
    acc: Any  # [BQ, E] in pieces, of scale e k


@triton.jit
def add_products(sums, p, e, base, at, inputs, CONFIG: tl.constexpr, E: tl.constexpr, LISTED: tl.constexpr):
    """mean and acc with clusters `at` of the table, or LISTED keys, of weights p and e [BQ, BC].

    mean takes back what delta, of as many digits as `out`, is off. Of 16 bits the mean of all keys does: another sum
    would take the registers of a program and a fifth of the products.
    """
    mean = ()
    acc = ()
    for n in tl.static_range(len(sums.acc)):
        k_block = load_listed(base, at, n, E) if LISTED else load_table(base, at, n, E)  # [BC, E]
        if not CONFIG.NARROW:
            mean += (product(p.to(k_block.dtype), k_block, sums.mean[n]),)
        acc += (score_product(e * inputs.scale, k_block, sums.acc[n], CONFIG),)
    return mean, acc


@triton.jit
def query_sums(
    q_block,
    grad_out,
    spread,
    first,
    base,
    delta,
    queries,
    inputs,
    CONFIG: tl.constexpr,
    B: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
):
    """`Sums` over all clusters and routed keys, with weights over `base` [BQ]."""
    POWER: tl.constexpr = "exp2" if CONFIG.NARROW else "powers"
    zero = tl.zeros([B.BLOCK_Q], tl.float32)  # [BQ]
    acc = zero_pieces(B.BLOCK_Q, E)  # [BQ, E]
    mean = () if CONFIG.NARROW else zero_pieces(B.BLOCK_Q, E)  # [BQ, E]
    sums = Sums(zero, zero, zero, zero, zero, mean, acc)
    for start in range(0, used_of(inputs.table, queries.source), CONFIG.BLOCK_C):
        at, s, share, dp, r = center_gradients(
            start, q_block, grad_out, spread, first, queries, inputs, CONFIG, B, E, F
        )
        p = power(s, base[:, None], POWER)  # [BQ, BC]
        if CONFIG.BITS:
            p = p * share
        e = tl.where(p == 0, 0.0, p * (dp - delta[:, None]))  # [BQ, BC]
        raised = sums.raised  # [BQ]
        raised_excess = sums.raised_excess  # [BQ]
        if inputs.table.spreads is not None:
            rise = tl.load(inputs.table.spreads + queries.slot + at)[None, :]  # [1, BC]
            rise = tl.where(spread[:, None] * rise <= RAISED, rise * 0.5, 0.0)  # [BQ, BC]
            raised += tl.sum(p * rise, 1)
            raised_excess += tl.sum(e * rise, 1)
        weight = sums.weight + tl.sum(p, 1)
        excess = sums.excess + tl.sum(e, 1)
        own = slope_weights(queries.slot + at, inputs.table, CONFIG.BLOCK_C)  # [BC]
        tail = sums.tail + tl.sum(p * r * own[None, :], 1)
        mean, acc = add_products(sums, p, e, inputs.table.k, queries.slot + at, inputs, CONFIG, E, False)
        sums = Sums(weight, excess, tail, raised, raised_excess, mean, acc)
    if inputs.listed is not None:
        k_row = row_of_keys(inputs.k, queries, inputs, E)
        number = tl.load(inputs.listed.number + queries.tile)
        for begin in range(0, number, CONFIG.BLOCK_C):
            key, s, dp = key_gradients(begin, number, q_block, grad_out, queries, inputs, CONFIG, B, E, F)
            p = power(s, base[:, None], POWER)  # [BQ, BK]
            e = tl.where(p == 0, 0.0, p * (dp - delta[:, None]))  # [BQ, BK]
            weight = sums.weight + tl.sum(p, 1)
            excess = sums.excess + tl.sum(e, 1)
            mean, acc = add_products(sums, p, e, k_row, key, inputs, CONFIG, E, True)
            sums = Sums(weight, excess, sums.tail, sums.raised, sums.raised_excess, mean, acc)
    return sums


@triton.jit
def tail_queries_kernel(
    inputs,
    forward,
    above,
    totals,
    grads,
    middle,
    CONFIG: tl.constexpr,
    B: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
):
    """The gradients of the queries, of near_out and near_lse, and the totals. Program: tile."""
    queries = tail_queries(inputs.first + tl.program_id(0), inputs, CONFIG, B)
    query = queries.block.query  # [BQ]
    exists = queries.block.exists  # [BQ]
    point = queries.start + query  # [BQ]
    q_block = load_queries(inputs.q, queries, E)  # [BQ, E]
    grad_out = load_queries(above.grad_out, queries, F)  # [BQ, F]
    spread = query_spreads(q_block, queries, inputs, E)  # [BQ]
    zero = tl.zeros([B.BLOCK_Q], tl.float32)  # [BQ]
    inverse = 1 / (1 + spread)  # [BQ]
    first = zero  # [BQ]
    if inputs.table.slope is not None:
        along = slope_gradients(grad_out, queries, inputs, E, F)  # [BQ, E]
        for n in tl.static_range(len(along)):
            first += tl.sum(q_block[n].to(tl.float32) * along[n], 1)
        first = first * slope_factor(spread, queries, inputs)

    lse = tl.load(forward.lse + point, mask=exists, other=-float("inf"))  # [BQ]
    base = tl.where(lse == -float("inf"), 0.0, lse)  # [BQ], a query without keys has no weights
    scaled = base * LOG2E if CONFIG.NARROW else base  # [BQ]
    grad_lse = tl.load(above.grad_lse + point, mask=exists, other=0.0)  # [BQ]
    about = zero  # [BQ], delta to the digits of `out`
    for n in tl.static_range(len(grad_out)):
        out = load_piece(forward.out + queries.start * F.SIZE, query, exists, n, F).to(tl.float32)  # [BQ, F]
        about += tl.sum(grad_out[n].to(tl.float32) * out, 1)
    about = tl.where(is_finite(about), about - grad_lse, 0.0)
    near = zero  # [BQ], weight of the windows
    near_dp = zero  # [BQ]
    if inputs.near_out is not None:
        near_lse = tl.load(inputs.near_lse + point, mask=exists, other=-float("inf")).to(tl.float32)  # [BQ]
        near = tl.exp2((near_lse - base) * LOG2E)
        near_out = load_queries(inputs.near_out, queries, F)  # [BQ, F]
        for n in tl.static_range(len(grad_out)):
            near_dp += tl.sum(grad_out[n].to(tl.float32) * near_out[n].to(tl.float32), 1)
    sums = query_sums(q_block, grad_out, spread, first, scaled, about, queries, inputs, CONFIG, B, E, F)

    weight = sums.weight + near  # [BQ]
    excess = sums.excess + tl.where(near == 0, 0.0, near * (near_dp - about))  # [BQ]
    has_keys = exists & ~(weight == 0)  # [BQ]
    factor = tl.where(has_keys, 1 / tl.where(has_keys, weight, 1.0), 0.0)  # [BQ]
    off = tl.where(factor == 0, 0.0, excess * factor - grad_lse)  # [BQ], of `about`
    delta = about + off  # [BQ]
    tail = tl.where(sums.tail > 0, sums.tail * factor, 0.0)  # [BQ], share of all weight
    places = tile_places(queries.tile, B)  # [BQ]
    tl.store(totals.delta + places, tl.where(exists, delta, 0.0))
    tl.store(totals.base + places, tl.where(exists, scaled, 0.0))
    tl.store(totals.factor + places, factor)
    tl.store(totals.spread + places, tl.where(exists, spread, 0.0))
    tl.store(totals.first + places, tl.where(exists, first, 0.0))
    tl.store(totals.tail + point, tail * inverse * inputs.scale, mask=exists)

    # Read again behind a store: registers would hold them through all products.
    q_block = load_queries(inputs.q, queries, E)  # [BQ, E]
    grad_out = load_queries(above.grad_out, queries, F)  # [BQ, F]
    if inputs.near_out is not None:
        near = tl.where(near == 0, 0.0, near * factor)
        d_head = ()
        for n in tl.static_range(len(grad_out)):
            d_head += (tl.where((near == 0)[:, None], 0.0, grad_out[n].to(tl.float32) * near[:, None]),)
        store_pieces(grads.near_out + queries.start * F.SIZE, query, d_head, exists, F)
        tl.store(grads.near_lse + point, tl.where(near == 0, 0.0, near * (near_dp - delta)), mask=exists)
    d_spread = tl.where(tail > 0, -tail * first * inverse, 0.0)  # [BQ]
    d_spread += (sums.raised_excess - off * sums.raised) * factor
    d_square = (2 * inputs.scale * inputs.scale) * d_spread  # [BQ]
    acc = ()
    for n in tl.static_range(len(sums.acc)):
        variance = load_variance(n, queries, inputs, E)[None, :]  # [1, E]
        each = sums.acc[n]  # [BQ, E]
        if CONFIG.NARROW:
            each -= (off * inputs.scale * sums.weight)[:, None] * load_middle(n, queries, middle, E)[None, :]
        else:
            each -= sums.mean[n] * (off * inputs.scale)[:, None]
        acc += (each * factor[:, None] + d_square[:, None] * q_block[n].to(tl.float32) * variance,)
    if inputs.table.slope is not None:
        along = slope_gradients(grad_out, queries, inputs, E, F)  # [BQ, E]
        share = tl.where(tail > 0, tail * slope_factor(spread, queries, inputs), 0.0)  # [BQ]
        more = ()
        for n in tl.static_range(len(acc)):
            more += (acc[n] + tl.where((tail > 0)[:, None], along[n] * share[:, None], 0.0),)
        acc = more
    store_pieces(grads.q + queries.start * E.SIZE, query, acc, exists, E)


@triton.jit
def load_middle(piece, queries, middle, E: tl.constexpr):
    """A piece [E] of the mean of the row's keys."""
    e = piece * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
    return tl.load(middle + queries.source * E.SIZE + e, mask=e < E.SIZE, other=0.0)


@triton.jit
def slope_gradients(grad_out, queries, inputs, E: tl.constexpr, F: tl.constexpr):
    """grad_out @ slope^T of the table, [BQ, E] in pieces."""
    more = ()
    for n in tl.static_range(tl.constexpr(E.PIECES)):
        total = tl.zeros([grad_out[0].shape[0], E.BLOCK], tl.float32)  # [BQ, E]
        for m in tl.static_range(len(grad_out)):
            slope = load_slope(inputs.table.slope, queries.source, n, m, E, F)  # [E, F]
            total = product(grad_out[m].to(slope.dtype), tl.trans(slope), total)
        more += (total,)
    return more


@triton.jit
def tail_clusters_kernel(
    inputs,
    above,
    totals,
    dk,
    dv,
    splits,
    tiles,
    last,
    rows,
    CONFIG: tl.constexpr,
    B: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
):
    """Program (row, block of clusters, split) adds up its share of a row's `tiles`: dk, dv [splits, rows, C, width].

    Of the tiles those before `last` that have counts; what others before them came to is added. The clusters are rows
    of all products, so that no block is turned around.
    """
    POWER: tl.constexpr = "exp2" if CONFIG.NARROW else "powers"
    count = inputs.table.count
    blocks = (count + CONFIG.BLOCK_C - 1) // CONFIG.BLOCK_C
    split = tl.program_id(0) % splits
    block = tl.program_id(0) // splits
    key_row = inputs.first // tiles + block // blocks
    start = (block % blocks) * CONFIG.BLOCK_C
    at = start + tl.arange(0, CONFIG.BLOCK_C)  # [BC]
    in_table = key_row.to(tl.int64) * inputs.table.padded + at  # [BC]
    k_block = ()
    for n in tl.static_range(tl.constexpr(E.PIECES)):
        k_block += (load_table(inputs.table.k, in_table, n, E),)  # [BC, E]
    v_block = ()
    for n in tl.static_range(tl.constexpr(F.PIECES)):
        v_block += (load_table(inputs.table.v, in_table, n, F),)  # [BC, F]
    slot = (split.to(tl.int64) * rows + key_row) * count + at  # [BC]
    begin = tl.maximum(key_row * tiles, inputs.first)
    continued = (at < count) & (at * 0 + begin > key_row * tiles)  # [BC]
    dk_acc = load_pieces(dk, slot, continued, E)  # [BC, E]
    dv_acc = load_pieces(dv, slot, continued, F)  # [BC, F]
    used = start < used_of(inputs.table, key_row)
    end = tl.where(used, tl.minimum((key_row + 1) * tiles, last), begin)
    for tile in range(begin + split, end, splits):
        queries = tail_queries(tile, inputs, CONFIG, B)
        q_block = load_queries(inputs.q, queries, E)  # [BQ, E]
        grad_out = load_queries(above.grad_out, queries, F)  # [BQ, F]
        base, factor, delta, places = load_totals(tile, totals, B)  # [1, BQ]
        first = tl.load(totals.first + places)[None, :]  # [1, BQ]
        log = open_clusters(start, queries, inputs, CONFIG.BLOCK_C)  # [BC]
        counts = (log != -float("inf"))[:, None] & (factor != 0)  # [BC, BQ]
        s = row_products(k_block, q_block, CONFIG, B) * (inputs.scale * score_unit(CONFIG)) + log[:, None]  # [BC, BQ]
        if inputs.table.spreads is not None:
            spread = tl.load(totals.spread + places)[None, :]  # [1, BQ]
            raised = tl.load(inputs.table.spreads + in_table) * (score_unit(CONFIG) * 0.5)  # [BC]
            s += tl.minimum(spread * raised[:, None], score_unit(CONFIG) * 0.5 * RAISED)
        share = 1.0
        if CONFIG.BITS:
            left = tl.trans(keys_left(start, queries, inputs, CONFIG, B))  # [BC, BQ]
            counts = counts & (left > 0)
            share = left * tl.load(inputs.table.shares + in_table)[:, None]  # [BC, BQ]
        p = power(tl.where(counts, s, -float("inf")), base, POWER) * factor * share  # [BC, BQ]
        own = slope_weights(in_table, inputs.table, CONFIG.BLOCK_C)  # [BC]
        dp = row_products(v_block, grad_out, CONFIG, B) + own[:, None] * first  # [BC, BQ]
        name = (inputs.first_name + at)[:, None]  # [BC, 1]
        dk_acc, dv_acc = add_pairs(dk_acc, dv_acc, p, dp, delta, name, queries, q_block, grad_out, inputs, CONFIG)
    store_pieces(dk, slot, dk_acc, at < count, E)
    store_pieces(dv, slot, dv_acc, at < count, F)


@triton.jit
def tail_slope_kernel(
    q,
    grad_out,
    tail,
    parts,
    splits,
    rows,
    queries,
    BLOCK_Q: tl.constexpr,
    FP16: tl.constexpr,
    NARROW: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
):
    """Program (split, row, piece of the features, piece of the values): the sum over its queries, [splits, rows, E, F].

    `queries` follow one another in a row of clusters.
    """
    value_piece = tl.program_id(0) % F.PIECES
    piece = tl.program_id(0) // F.PIECES % E.PIECES
    row = tl.program_id(0) // (F.PIECES * E.PIECES) % rows
    split = (tl.program_id(0) // (F.PIECES * E.PIECES * rows)).to(tl.int64)
    start = row * tl.cast(queries, tl.int64)
    acc = tl.zeros([E.BLOCK, F.BLOCK], tl.float32)  # [E, F]
    for begin in range(split * BLOCK_Q, queries, splits * BLOCK_Q):
        at = begin + tl.arange(0, BLOCK_Q)  # [BQ]
        exists = at < queries  # [BQ]
        factor = tl.load(tail + start + at, mask=exists, other=0.0)  # [BQ]
        q_block = load_piece(q + start * E.SIZE, at, exists, piece, E).to(tl.float32)  # [BQ, E]
        grad = for_product(load_piece(grad_out + start * F.SIZE, at, exists, value_piece, F))  # [BQ, F]
        weighted = tl.trans(q_block * factor[:, None])  # [E, BQ]
        lift = fp16_scale_of(tl.max(tl.abs(weighted), 1), 1.0, FP16)
        acc += fine_product(weighted * lift, grad, tl.zeros([E.BLOCK, F.BLOCK], tl.float32), NARROW) / lift
    e = piece * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
    f = value_piece * F.BLOCK + tl.arange(0, F.BLOCK)  # [F]
    place = ((split * rows + row) * E.SIZE + e)[:, None] * F.SIZE + f[None, :]  # [E, F]
    tl.store(parts + place, acc, mask=(e < E.SIZE)[:, None] & (f < F.SIZE)[None, :])
