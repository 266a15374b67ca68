"""Gradients of the hybrid's tail in Triton, through out and through lse.

With p the joint weights and dp_j = <grad_out, v_j> after dropout, the gradient of a score is p_j (dp_j - delta), where
delta is the mean of dp over windows and tail less grad_lse. One kernel makes delta and dq, one the gradients of the
shared keys: there the queries are split among programs, whose sums are added in order afterwards, so the bits are the
same every time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....calls import DrawnTailCall, TailGrads
from ....draws import tail_rows
from ....grid import grid_of
from ..primitives import LOWEST, finite, join_lse, points, powers, product, softmax_step, store_pieces, zero_pieces
from ..runtime.launch import Kernel, on_device
from .forward import (
    block_queries,
    blocks_of_queries,
    inputs_of,
    load_queries,
    load_shared,
    row_blocks,
    shared_products,
    tail_flags,
    tail_scores,
    thinned,
    window_corners,
)
from .shared_keys import BLOCK_K, shared_row, side_by_side

# Of programs that share the queries in the gradient of the shared keys: a few for every processor of a large device.
PROGRAMS = 512


class Upstream(NamedTuple):
    """What the backward pass begins with, contiguous."""

    grad_out: Tensor  # [B, H, *G, F]
    grad_lse: Tensor  # [B, H, *G]
    offset: Tensor  # [B, H, *G]
    head_dp: Tensor  # [B, H, *G], <grad_out, head_out>


class Totals(NamedTuple):
    """What the gradients of all scores of a query need, float32 [B, H, *G]. A weight is factor * `powers` over base.

    The normaliser is computed again: from lse, rounded, the weights would not add up to 1 where scores are large.
    """

    head_factor: Tensor
    delta: Tensor
    base: Tensor
    factor: Tensor


def drawn_tail_backward(
    call: DrawnTailCall, offset: Tensor, names: Tensor, represents: Tensor, grad_out: Tensor, grad_lse: Tensor
) -> TailGrads:
    """offset, names, represents of the DrawnTail -> gradients in the dtypes of their tensors."""
    q = call.q
    k = call.k
    v = call.v
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    wide_grad = grad_out.float()
    head_dp = torch.where(call.head_lse == -torch.inf, 0, (wide_grad * call.head_out).sum(-1))
    totals = Totals(*(torch.empty_like(head_dp) for _ in range(4)))
    dk, dv = (torch.zeros(math.prod(x.shape[:-1]), x.shape[-1], device=q.device) for x in (k, v))
    if head_dp.numel():
        rows, drawn = names.flatten(0, 1).shape
        flags = tail_flags(call, forward=False)
        blocks = blocks_of_queries(call, flags)
        key_blocks = -(-drawn // BLOCK_K)
        splits = max(1, min(blocks // rows, PROGRAMS // max(rows * key_blocks, 1)))
        parts = [torch.empty((splits, rows * drawn, x.shape[-1]), device=q.device) for x in (k, v)]
        with on_device(q):
            inputs = inputs_of(call, side_by_side(call, names, represents, False))
            above = Upstream(*(x.contiguous() for x in (grad_out, grad_lse, offset, head_dp)))
            Kernel(queries_kernel, blocks, flags)(inputs, above, totals, dq)
            Kernel(keys_kernel, rows * key_blocks * splits, flags)(inputs, above, totals, *parts, splits)
            at = tail_rows(names.flatten(0, 1), q.shape[1], k.shape[1], math.prod(grid_of(k))).flatten()
            for sums, part in zip((dk, dv), parts, strict=True):
                sums.index_add_(0, at, part.sum(0))
    d_head_out = totals.head_factor.unsqueeze(-1) * wide_grad
    d_head_lse = torch.where(totals.head_factor == 0, 0, totals.head_factor * (head_dp - totals.delta))
    grads = (dq, dk, dv, d_head_out, d_head_lse)
    like = (q, k, v, call.head_out, call.head_lse)
    return TailGrads(*(d.to(x.dtype).reshape(x.shape) for d, x in zip(grads, like, strict=True)))


@triton.jit
def queries_kernel(inputs, above, totals, dq, CONFIG: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    """dq and the totals. Program: block of queries."""
    geo = inputs.windows.geo
    blocks = row_blocks(geo, CONFIG)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    queries = block_queries(row, tl.program_id(0) % blocks, inputs, CONFIG)
    query = queries.block.query  # [BQ]
    exists = queries.block.exists  # [BQ]
    first_point = row * points(geo.q)
    point = first_point + query  # [BQ]
    shared = shared_row(row, inputs.shared, geo, CONFIG.BLOCK_K, E, F)
    q_block = load_queries(inputs.q + first_point * E.SIZE, queries.block, E)  # [BQ, E]
    grad_out = load_queries(above.grad_out + first_point * F.SIZE, queries.block, F)  # [BQ, F]

    corners = window_corners(queries.block, inputs.windows, CONFIG)
    running_max = tl.full([CONFIG.BLOCK_Q], LOWEST, tl.float32)  # [BQ]
    running_sum = tl.zeros([CONFIG.BLOCK_Q], tl.float32)  # [BQ]
    mean_dp = tl.zeros([CONFIG.BLOCK_Q], tl.float32)  # [BQ]
    seen = tl.zeros([CONFIG.BLOCK_Q], tl.int32)  # [BQ]
    for start in range(0, shared.padded, CONFIG.BLOCK_K):
        at, s, ok = tail_scores(start, q_block, corners, shared, queries, inputs, CONFIG, E)
        running_max, rescale, p = softmax_step(running_max, s, None, "powers", False, 1)
        running_sum = running_sum * rescale + tl.sum(p, 1)
        dp = thinned(
            shared_products(grad_out, shared.v, at, CONFIG, F), at, shared, queries, inputs, CONFIG
        )  # [BQ, BK]
        mean_dp = mean_dp * rescale + tl.sum(tl.where(ok, p * dp, 0.0), 1)
        seen += tl.sum(ok.to(tl.int32), 1)
    head_lse = tl.load(inputs.head_lse + point, mask=exists, other=-float("inf")).to(tl.float32)  # [BQ]
    offset = tl.load(above.offset + point, mask=exists, other=0.0)  # [BQ]
    factor, head_factor, base, _ = join_lse(running_max, running_sum, seen > 0, offset, head_lse)
    head_dp = tl.load(above.head_dp + point, mask=exists, other=0.0)  # [BQ]
    delta = mean_dp * factor + tl.where(head_factor == 0, 0.0, head_factor * head_dp)  # [BQ]
    delta -= tl.load(above.grad_lse + point, mask=exists, other=0.0)
    tl.store(totals.head_factor + point, head_factor, mask=exists)
    tl.store(totals.delta + point, delta, mask=exists)
    tl.store(totals.base + point, base, mask=exists)
    tl.store(totals.factor + point, factor, mask=exists)

    acc = zero_pieces(CONFIG.BLOCK_Q, E)  # [BQ, E]
    for start in range(0, shared.padded, CONFIG.BLOCK_K):
        at, s, ok = tail_scores(start, q_block, corners, shared, queries, inputs, CONFIG, E)
        p = powers(s, base[:, None]) * factor[:, None]  # [BQ, BK]
        dp = thinned(
            shared_products(grad_out, shared.v, at, CONFIG, F), at, shared, queries, inputs, CONFIG
        )  # [BQ, BK]
        ds = tl.where(ok, p * (dp - delta[:, None]) * inputs.scale, 0.0)  # [BQ, BK]
        more = ()
        for n in tl.static_range(len(acc)):
            # Where a slope is 0, what is not finite must not spoil the sum; elsewhere the slope is NaN.
            k_block = finite(load_shared(shared.k, at, n, E))  # [BK, E]
            more += (product(ds.to(k_block.dtype), k_block, acc[n]),)
        acc = more
    store_pieces(dq + first_point * E.SIZE, query, acc, exists, E)


@triton.jit
def keys_kernel(inputs, above, totals, dk, dv, splits, CONFIG: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    """Program (row, block of keys, split) adds up its share of the row's queries: dk, dv [splits, B, H, m, width]."""
    geo = inputs.windows.geo
    drawn = inputs.shared.drawn
    blocks = row_blocks(geo, CONFIG)
    key_blocks = (drawn + CONFIG.BLOCK_K - 1) // CONFIG.BLOCK_K
    split = tl.program_id(0) % splits
    block = tl.program_id(0) // splits
    row = (block // key_blocks).to(tl.int64)
    rows = tl.num_programs(0) // (splits * key_blocks)
    first = (block % key_blocks) * CONFIG.BLOCK_K
    first_point = row * points(geo.q)
    shared = shared_row(row, inputs.shared, geo, CONFIG.BLOCK_K, E, F)
    dk_acc = zero_pieces(CONFIG.BLOCK_K, E)  # [BK, E]
    dv_acc = zero_pieces(CONFIG.BLOCK_K, F)  # [BK, F]
    for number in range(split, blocks, splits):
        queries = block_queries(row, number, inputs, CONFIG)
        exists = queries.block.exists  # [BQ]
        point = first_point + queries.block.query  # [BQ]
        q_block = load_queries(inputs.q + first_point * E.SIZE, queries.block, E)  # [BQ, E]
        grad_out = load_queries(above.grad_out + first_point * F.SIZE, queries.block, F)  # [BQ, F]
        base = tl.load(totals.base + point, mask=exists, other=0.0)  # [BQ]
        factor = tl.load(totals.factor + point, mask=exists, other=0.0)  # [BQ]
        delta = tl.load(totals.delta + point, mask=exists, other=0.0)  # [BQ]
        corners = window_corners(queries.block, inputs.windows, CONFIG)
        at, s, ok = tail_scores(first, q_block, corners, shared, queries, inputs, CONFIG, E)
        p = powers(s, base[:, None]) * factor[:, None]  # [BQ, BK]
        dp = thinned(
            shared_products(grad_out, shared.v, at, CONFIG, F), at, shared, queries, inputs, CONFIG
        )  # [BQ, BK]
        ds = tl.trans(tl.where(ok, p * (dp - delta[:, None]) * inputs.scale, 0.0))  # [BK, BQ]
        p = thinned(p, at, shared, queries, inputs, CONFIG)
        dk_more = ()
        dv_more = ()
        for n in tl.static_range(len(dk_acc)):
            dk_more += (product(ds.to(q_block[n].dtype), finite(q_block[n]), dk_acc[n]),)
        for n in tl.static_range(len(dv_acc)):
            dv_more += (product(tl.trans(p).to(grad_out[n].dtype), grad_out[n], dv_acc[n]),)
        dk_acc = dk_more
        dv_acc = dv_more
    at = first + tl.arange(0, CONFIG.BLOCK_K)  # [BK]
    slot = (split.to(tl.int64) * rows + row) * drawn + at  # [BK]
    store_pieces(dk, slot, dk_acc, at < drawn, E)
    store_pieces(dv, slot, dv_acc, at < drawn, F)
