"""Gradients of the clustered tail in Triton, through out and through lse.

With p the joint weights, r what dropout makes of them and dp_c = <grad_out, value_c>, the gradient of a score is
p_c (r_c dp_c - delta), where delta is the mean of r dp over windows and tail less grad_lse. One kernel makes delta and
the gradients of the queries and of head_out and head_lse, one those of the clusters: there the tiles are split among
programs, whose sums are added in order afterwards, so the bits are the same every time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....calls import ClusterTailCall, ClusterTailGrads
from ..primitives import (
    LOWEST,
    dropout_factor,
    fine_product,
    finite,
    fp16_scale_of,
    join_lse,
    load_pieces,
    powers,
    product,
    softmax_step,
    store_pieces,
    zero_pieces,
)
from ..runtime.block_sizes import CLUSTER_BACKWARD, CLUSTER_BACKWARD_EXACT, CLUSTER_COLLECT, CLUSTER_COLLECT_EXACT
from ..runtime.launch import Kernel, cached, kinds, on_device
from .table import (
    chunks,
    cluster_scores,
    inputs_of,
    load_queries,
    load_table,
    table_products,
    tail_flags,
    tail_queries,
    tiles_at_a_time,
    tiles_of,
)

# Of programs that share the tiles in the gradient of the clusters: a few for every processor of a large device.
PROGRAMS = 512


class Upstream(NamedTuple):
    """What the backward pass begins with, contiguous."""

    grad_out: Tensor  # [B, H, *G, F]
    grad_lse: Tensor  # [B, H, *G]


class Totals(NamedTuple):
    """What the gradients of all scores of a query need, float32 [B, H, *G]. A weight is factor * `powers` over base.

    The normaliser is computed again: from lse, rounded, the weights would not add up to 1 where scores are large.
    """

    delta: Tensor
    base: Tensor
    factor: Tensor


def cluster_tail_backward(
    call: ClusterTailCall, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor
) -> ClusterTailGrads:
    """Gradients in the dtypes of their tensors; gains, sizes and labels are constants."""
    q = call.q
    centres = call.centres
    values = call.values
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    d_head_out = torch.empty_like(call.head_out, memory_format=torch.contiguous_format)
    d_head_lse = torch.empty_like(call.head_lse, memory_format=torch.contiguous_format)
    if not lse.numel():
        return ClusterTailGrads(dq, torch.zeros_like(centres), torch.zeros_like(values), d_head_out, d_head_lse)
    flags = tail_flags(call, CLUSTER_BACKWARD, CLUSTER_BACKWARD_EXACT)
    collect_flags = tail_flags(call, CLUSTER_COLLECT, CLUSTER_COLLECT_EXACT)
    rows = centres.shape[0] * centres.shape[1]
    count = centres.shape[2]
    blocks = -(-count // collect_flags["CONFIG"].BLOCK_C)
    tiles_of_row = tiles_of(call) // rows
    at_a_time = tiles_at_a_time(call, flags["CONFIG"])
    splits = PROGRAMS // (max(1, at_a_time // tiles_of_row) * blocks)
    splits = max(1, min(tiles_of_row, at_a_time, splits))
    parts = [torch.empty((splits, rows * count, x.shape[-1]), device=q.device) for x in (centres, values)]
    totals = Totals(*torch.empty((3, *lse.shape), dtype=torch.float32, device=q.device).unbind())
    with on_device(q):
        above = Upstream(grad_out.contiguous(), grad_lse.contiguous())
        for inputs, tiles in chunks(call, inputs_of(call, flags), flags):
            given = kinds(*inputs, *above, dq, d_head_out, d_head_lse, *totals)
            queries_kernel = _kernel(tail_queries_kernel, tiles, tuple(flags.items()), given)
            queries_kernel(inputs, above, totals, dq, d_head_out, d_head_lse)
            last = inputs.first + tiles
            key_rows = (last - 1) // tiles_of_row - inputs.first // tiles_of_row + 1
            programs = key_rows * blocks * splits
            clusters_kernel = _kernel(tail_clusters_kernel, programs, tuple(collect_flags.items()), given)
            clusters_kernel(inputs, above, totals, *parts, splits, tiles_of_row, last, rows)
    d_centres, d_values = (
        part.sum(0).to(x.dtype).reshape(x.shape) for part, x in zip(parts, (centres, values), strict=True)
    )
    return ClusterTailGrads(dq, d_centres, d_values, d_head_out, d_head_lse)


@cached
def _kernel(kernel: Any, programs: int, flags: tuple[tuple[str, object], ...], given: tuple[object, ...]) -> Kernel:
    return Kernel(kernel, programs, dict(flags))


@triton.jit
def slope_product(ds, block, acc, CONFIG: tl.constexpr):
    """acc + ds @ block, to more digits than 16 bits have; the smallest numbers of float16 have few, so it is lifted
    off them."""
    if CONFIG.FP16:
        lift = fp16_scale_of(tl.max(tl.abs(ds), 1), 1.0, CONFIG.FP16)
        acc += fine_product(ds * lift, block, acc * 0.0, CONFIG.NARROW) / lift
    else:
        acc = fine_product(ds, block, acc, CONFIG.NARROW)
    return acc


@triton.jit
def cluster_slopes(
    start, q_block, grad_out, queries, inputs, CONFIG: tl.constexpr, B: tl.constexpr, E: tl.constexpr, F: tl.constexpr
):
    """`cluster_scores`, <grad_out, value> [BQ, BC] and what dropout makes of a weight."""
    at, slot, s, share = cluster_scores(start, q_block, queries, inputs, CONFIG, B, E)
    dp = table_products(grad_out, inputs.table.v, inputs.table.v_rest, slot, CONFIG, B, F)  # [BQ, BC]
    if CONFIG.DROPOUT:
        r = dropout_factor((inputs.first_name + at)[None, :], queries.noise[:, None], inputs.dropout, CONFIG.DROPOUT)
        dp = tl.where(r == 0, 0.0, r * dp)
    else:
        r = 1.0
    return slot, s, share, dp, r


@triton.jit
def tail_queries_kernel(
    inputs,
    above,
    totals,
    dq,
    d_head_out,
    d_head_lse,
    CONFIG: tl.constexpr,
    B: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
):
    """The gradients of the queries, of head_out and head_lse, and the totals. Program: tile."""
    queries = tail_queries(inputs.first + tl.program_id(0), inputs, CONFIG, B)
    query = queries.block.query  # [BQ]
    exists = queries.block.exists  # [BQ]
    point = queries.start + query  # [BQ]
    q_block = load_queries(inputs.q, queries, E)  # [BQ, E]
    grad_out = load_queries(above.grad_out, queries, F)  # [BQ, F]
    running_max = tl.full([B.BLOCK_Q], LOWEST, tl.float32)  # [BQ]
    running_sum = tl.zeros([B.BLOCK_Q], tl.float32)  # [BQ]
    mean_dp = running_sum  # [BQ]
    head_dp = running_sum  # [BQ]
    for start in range(0, inputs.table.padded, CONFIG.BLOCK_C):
        _, s, share, dp, _ = cluster_slopes(start, q_block, grad_out, queries, inputs, CONFIG, B, E, F)
        running_max, rescale, p = softmax_step(running_max, s, None, "powers", False, 1)
        p = p * share  # [BQ, BC]
        running_sum = running_sum * rescale + tl.sum(p, 1)
        mean_dp = mean_dp * rescale + tl.sum(tl.where(share > 0, p * dp, 0.0), 1)
    head_lse = tl.load(inputs.head_lse + point, mask=exists, other=-float("inf")).to(tl.float32)  # [BQ]
    has_keys = exists & ~(running_sum == 0)  # [BQ]
    zero = tl.zeros([B.BLOCK_Q], tl.float32)  # [BQ]
    factor, head_factor, base, _norm = join_lse(running_max, running_sum, has_keys, zero, head_lse)
    head_out = load_queries(inputs.head_out, queries, F)  # [BQ, F]
    d_head = ()
    for n in tl.static_range(len(grad_out)):
        grad = grad_out[n].to(tl.float32)  # [BQ, F]
        head_dp += tl.sum(grad * head_out[n].to(tl.float32), 1)
        d_head += (tl.where((head_factor == 0)[:, None], 0.0, grad * head_factor[:, None]),)
    store_pieces(d_head_out + queries.start * F.SIZE, query, d_head, exists, F)
    delta = mean_dp * factor + tl.where(head_factor == 0, 0.0, head_factor * head_dp)  # [BQ]
    delta -= tl.load(above.grad_lse + point, mask=exists, other=0.0)
    tl.store(d_head_lse + point, tl.where(head_factor == 0, 0.0, head_factor * (head_dp - delta)), mask=exists)
    tl.store(totals.delta + point, delta, mask=exists)
    tl.store(totals.base + point, base, mask=exists)
    tl.store(totals.factor + point, factor, mask=exists)

    acc = zero_pieces(B.BLOCK_Q, E)  # [BQ, E]
    for start in range(0, inputs.table.padded, CONFIG.BLOCK_C):
        slot, s, share, dp, _ = cluster_slopes(start, q_block, grad_out, queries, inputs, CONFIG, B, E, F)
        p = powers(s, base[:, None]) * (share * factor[:, None])  # [BQ, BC]
        ds = tl.where(share > 0, p * (dp - delta[:, None]) * inputs.scale, 0.0)  # [BQ, BC]
        more = ()
        for n in tl.static_range(len(acc)):
            k_block = finite(load_table(inputs.table.k, slot, n, E))  # where no key is left the slope is 0, else NaN
            total = slope_product(ds, k_block, acc[n], CONFIG)  # [BQ, E]
            if inputs.table.k_rest is not None:
                total = product(ds.to(k_block.dtype), load_table(inputs.table.k_rest, slot, n, E), total)  # [BQ, E]
            more += (total,)
        acc = more
    store_pieces(dq + queries.start * E.SIZE, query, acc, exists, E)


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

    Of the tiles those before `last` that have counts; what others before them came to is added.
    """
    count = inputs.table.count
    blocks = (count + CONFIG.BLOCK_C - 1) // CONFIG.BLOCK_C
    split = tl.program_id(0) % splits
    block = tl.program_id(0) // splits
    key_row = inputs.first // tiles + block // blocks
    first = (block % blocks) * CONFIG.BLOCK_C
    at = first + tl.arange(0, CONFIG.BLOCK_C)  # [BC]
    slot = (split.to(tl.int64) * rows + key_row) * count + at  # [BC]
    begin = tl.maximum(key_row * tiles, inputs.first)
    continued = (at < count) & (at * 0 + begin > key_row * tiles)  # [BC]
    dk_acc = load_pieces(dk, slot, continued, E)  # [BC, E]
    dv_acc = load_pieces(dv, slot, continued, F)  # [BC, F]
    for tile in range(begin + split, tl.minimum((key_row + 1) * tiles, last), splits):
        queries = tail_queries(tile, inputs, CONFIG, B)
        exists = queries.block.exists  # [BQ]
        point = queries.start + queries.block.query  # [BQ]
        q_block = load_queries(inputs.q, queries, E)  # [BQ, E]
        grad_out = load_queries(above.grad_out, queries, F)  # [BQ, F]
        base = tl.load(totals.base + point, mask=exists, other=0.0)  # [BQ]
        factor = tl.load(totals.factor + point, mask=exists, other=0.0)  # [BQ]
        delta = tl.load(totals.delta + point, mask=exists, other=0.0)  # [BQ]
        _, s, share, dp, r = cluster_slopes(first, q_block, grad_out, queries, inputs, CONFIG, B, E, F)
        counts = (share > 0) & exists[:, None]  # [BQ, BC]
        p = tl.where(counts, powers(s, base[:, None]) * (share * factor[:, None]), 0.0)  # [BQ, BC]
        ds = tl.trans(tl.where(counts, p * (dp - delta[:, None]) * inputs.scale, 0.0))  # [BC, BQ]
        p = tl.where(r == 0, 0.0, p * r) if CONFIG.DROPOUT else p  # what is dropped is zero, NaN too
        p = tl.trans(p)  # [BC, BQ]
        dk_more = ()
        dv_more = ()
        for n in tl.static_range(len(dk_acc)):
            dk_more += (slope_product(ds, finite(q_block[n]), dk_acc[n], CONFIG),)
        for n in tl.static_range(len(dv_acc)):
            dv_more += (fine_product(p, grad_out[n], dv_acc[n], CONFIG.NARROW),)
        dk_acc = dk_more
        dv_acc = dv_more
    store_pieces(dk, slot, dk_acc, at < count, E)
    store_pieces(dv, slot, dv_acc, at < count, F)
