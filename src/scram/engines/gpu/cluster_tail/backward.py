"""Gradients of the clustered tail in Triton, through out and through lse.

With p the joint weights, r what dropout makes of them and dp_c = <grad_out, value_c>, the gradient of a score is
p_c (r_c dp_c - delta), where delta is the mean of r dp over head and tail less grad_lse. One kernel makes delta and the
gradients of the queries and of the head, one those of the clusters: there the tiles are split among programs, whose
sums are added in order afterwards, so the bits are the same every time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....calls import ClusterTailCall, ClusterTailGrads
from ..attend.tile_pairs import fine_product, fp16_scale_of
from ..attend.windows import kept, zeros
from ..cluster_tail.table import (
    chunks,
    cluster_scores,
    own_rows,
    table_products,
    table_rows,
    tail_flags,
    tail_of,
    tail_queries,
    tiles_at_a_time,
    tiles_of,
)
from ..drawn_tail.shared_keys import LOWEST, blocks_of, finite, joined, powers, product
from ..primitives import put
from ..runtime.block_sizes import CLUSTER_BACKWARD, CLUSTER_BACKWARD_EXACT, CLUSTER_COLLECT, CLUSTER_COLLECT_EXACT
from ..runtime.launch import Kernel, cached, kinds, on_device

# Of programs that share the tiles in the gradient of the clusters: a few for every processor of a large device.
PROGRAMS = 512


class Upstream(NamedTuple):
    """What the backward pass begins with, contiguous."""

    grad_out: Tensor  # [B, H, *G, F]
    grad_lse: Tensor  # [B, H, *G]


class Totals(NamedTuple):
    """What the gradients of all scores of a query need, float32 [B, H, *G]. A weight is factor * `powers` over top.

    The normaliser is computed again: from lse, rounded, the weights would not add up to 1 where scores are large.
    """

    delta: Tensor
    top: Tensor
    factor: Tensor


def cluster_tail_backward(
    call: ClusterTailCall, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor
) -> ClusterTailGrads:
    """Gradients in the dtypes of their tensors; gains, sizes and labels are constants."""
    q, centres, values, head_out, head_lse = call.q, call.centres, call.values, call.head_out, call.head_lse
    mine = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, head_out, head_lse)]
    if not lse.numel():
        return ClusterTailGrads(mine[0], torch.zeros_like(centres), torch.zeros_like(values), mine[1], mine[2])
    flags = tail_flags(call, CLUSTER_BACKWARD, CLUSTER_BACKWARD_EXACT)
    collects = tail_flags(call, CLUSTER_COLLECT, CLUSTER_COLLECT_EXACT)
    every, rows, count = tiles_of(call), centres.shape[0] * centres.shape[1], centres.shape[2]
    blocks, each = -(-count // collects["MODE"].BLOCK_C), every // rows
    at_a_time = tiles_at_a_time(call, flags["MODE"])
    splits = max(1, min(each, at_a_time, PROGRAMS // (max(1, at_a_time // each) * blocks)))
    parts = [torch.empty((splits, rows * count, x.shape[-1]), device=q.device) for x in (centres, values)]
    totals = Totals(*torch.empty((3, *lse.shape), dtype=torch.float32, device=q.device).unbind())
    with on_device(q):
        above = Upstream(grad_out.contiguous(), grad_lse.contiguous())
        for tail, tiles in chunks(call, tail_of(call, flags), flags):
            given = kinds(*tail, *above, *mine, *totals)
            _kernel(tail_queries_kernel, tiles, tuple(flags.items()), given)(tail, above, totals, *mine)
            sources = (tail.first + tiles - 1) // each - tail.first // each + 1
            clusters = _kernel(tail_clusters_kernel, sources * blocks * splits, tuple(collects.items()), given)
            clusters(tail, above, totals, *parts, splits, each, tail.first + tiles, rows)
    sums = (part.sum(0).to(x.dtype) for part, x in zip(parts, (centres, values), strict=True))
    d_centres, d_values = (d.reshape(x.shape) for d, x in zip(sums, (centres, values), strict=True))
    return ClusterTailGrads(mine[0], d_centres, d_values, mine[1], mine[2])


@cached
def _kernel(kernel: Any, programs: int, flags: tuple[tuple[str, object], ...], given: tuple[object, ...]) -> Kernel:
    return Kernel(kernel, programs, dict(flags))


@triton.jit
def slope_product(ds, theirs, total, MODE: tl.constexpr):
    """total + ds @ theirs, to more digits than 16 bits have; the smallest numbers of float16 have few, so it is lifted
    off them."""
    if MODE.FP16:
        lift = fp16_scale_of(tl.max(tl.abs(ds), 1), 1.0, MODE.FP16)
        total += fine_product(ds * lift, theirs, total * 0.0, MODE.NARROW) / lift
    else:
        total = fine_product(ds, theirs, total, MODE.NARROW)
    return total


@triton.jit
def cluster_slopes(
    start, mine, grad_out, here, t, MODE: tl.constexpr, B: tl.constexpr, ROW: tl.constexpr, VROW: tl.constexpr
):  # fmt: skip
    """`cluster_scores`, <grad_out, value> and what dropout makes of a weight."""
    at, slot, s, share = cluster_scores(start, mine, here, t, MODE, B, ROW)
    dp = table_products(grad_out, t.table.v, t.table.v_rest, slot, MODE, B, VROW)
    if MODE.DROPOUT:
        r = kept((t.first_name + at)[None, :], here.noise[:, None], t, MODE.DROPOUT)
        dp = tl.where(r == 0, 0.0, r * dp)
    else:
        r = 1.0
    return at, slot, s, share, dp, r


@triton.jit
def tail_queries_kernel(
    t, above, totals, dq, d_head, d_head_lse, MODE: tl.constexpr, B: tl.constexpr, ROW: tl.constexpr, VROW: tl.constexpr
):  # fmt: skip
    """The gradients of the queries and of the head, and the totals. Program: tile."""
    here = tail_queries(t.first + tl.program_id(0), t, MODE, B)
    valid, point = here.exists, here.start + here.query
    mine, grad_out = own_rows(t.q, here, ROW), own_rows(above.grad_out, here, VROW)
    top, whole = tl.full([B.BLOCK_Q], LOWEST, tl.float32), tl.zeros([B.BLOCK_Q], tl.float32)
    mean, to_head = whole, whole
    for start in range(0, t.table.padded, MODE.BLOCK_C):
        _, _, s, share, dp, _ = cluster_slopes(start, mine, grad_out, here, t, MODE, B, ROW, VROW)
        higher = tl.maximum(top, tl.max(s, 1))
        shrink, p = powers(top, higher), powers(s, higher[:, None]) * share
        top, whole = higher, whole * shrink + tl.sum(p, 1)
        mean = mean * shrink + tl.sum(tl.where(share > 0, p * dp, 0.0), 1)
    head = tl.load(t.head_lse + point, mask=valid, other=-float("inf")).to(tl.float32)
    factor, own, top, _norm = joined(top, whole, valid & ~(whole == 0), tl.zeros([B.BLOCK_Q], tl.float32), head)
    theirs = own_rows(t.head_out, here, VROW)
    slopes = ()
    for n in tl.static_range(len(grad_out)):
        wide = grad_out[n].to(tl.float32)
        to_head += tl.sum(wide * theirs[n].to(tl.float32), 1)
        slopes += (tl.where((own == 0)[:, None], 0.0, wide * own[:, None]),)
    put(d_head + here.start * VROW.E, here.query, slopes, valid, VROW)
    delta = mean * factor + tl.where(own == 0, 0.0, own * to_head)
    delta -= tl.load(above.grad_lse + point, mask=valid, other=0.0)
    tl.store(d_head_lse + point, tl.where(own == 0, 0.0, own * (to_head - delta)), mask=valid)
    tl.store(totals.delta + point, delta, mask=valid)
    tl.store(totals.top + point, top, mask=valid)
    tl.store(totals.factor + point, factor, mask=valid)

    sums = zeros(B.BLOCK_Q, ROW)
    for start in range(0, t.table.padded, MODE.BLOCK_C):
        _, slot, s, share, dp, _ = cluster_slopes(start, mine, grad_out, here, t, MODE, B, ROW, VROW)
        p = powers(s, top[:, None]) * (share * factor[:, None])
        ds = tl.where(share > 0, p * (dp - delta[:, None]) * t.scale, 0.0)
        more = ()
        for n in tl.static_range(len(sums)):
            centre = finite(table_rows(t.table.k, slot, n, ROW))  # where no key is left the slope is 0, else NaN
            total = slope_product(ds, centre, sums[n], MODE)
            if t.table.k_rest is not None:
                total = product(ds.to(centre.dtype), table_rows(t.table.k_rest, slot, n, ROW), total)
            more += (total,)
        sums = more
    put(dq + here.start * ROW.E, here.query, sums, valid, ROW)


@triton.jit
def tail_clusters_kernel(
    t, above, totals, dk, dv, splits, tiles, last, rows, MODE: tl.constexpr, B: tl.constexpr, ROW: tl.constexpr,
    VROW: tl.constexpr,
):  # fmt: skip
    """Program (row, block of clusters, split) adds up its share of a row's `tiles`: dk, dv [splits, rows, C, width].

    Of the tiles those before `last` that have counts; what others before them came to is added.
    """
    count = t.table.count
    blocks = (count + MODE.BLOCK_C - 1) // MODE.BLOCK_C
    split, block = tl.program_id(0) % splits, tl.program_id(0) // splits
    source, first = t.first // tiles + block // blocks, (block % blocks) * MODE.BLOCK_C
    at = first + tl.arange(0, MODE.BLOCK_C)
    slot, begin = (split.to(tl.int64) * rows + source) * count + at, tl.maximum(source * tiles, t.first)
    again = (at < count) & (at * 0 + begin > source * tiles)
    k_sums, v_sums = blocks_of(dk, slot, again, ROW), blocks_of(dv, slot, again, VROW)
    for tile in range(begin + split, tl.minimum((source + 1) * tiles, last), splits):
        here = tail_queries(tile, t, MODE, B)
        valid, point = here.exists, here.start + here.query
        mine, grad_out = own_rows(t.q, here, ROW), own_rows(above.grad_out, here, VROW)
        top = tl.load(totals.top + point, mask=valid, other=0.0)
        factor = tl.load(totals.factor + point, mask=valid, other=0.0)
        delta = tl.load(totals.delta + point, mask=valid, other=0.0)
        _, _, s, share, dp, r = cluster_slopes(first, mine, grad_out, here, t, MODE, B, ROW, VROW)
        some = (share > 0) & valid[:, None]
        p = tl.where(some, powers(s, top[:, None]) * (share * factor[:, None]), 0.0)
        ds = tl.trans(tl.where(some, p * (dp - delta[:, None]) * t.scale, 0.0))
        p = tl.where(r == 0, 0.0, p * r) if MODE.DROPOUT else p  # what is dropped is zero, NaN too
        p = tl.trans(p)
        k_more, v_more = (), ()
        for n in tl.static_range(len(k_sums)):
            k_more += (slope_product(ds, finite(mine[n]), k_sums[n], MODE),)
        for n in tl.static_range(len(v_sums)):
            v_more += (fine_product(p, grad_out[n], v_sums[n], MODE.NARROW),)
        k_sums, v_sums = k_more, v_more
    put(dk, slot, k_sums, at < count, ROW)
    put(dv, slot, v_sums, at < count, VROW)
