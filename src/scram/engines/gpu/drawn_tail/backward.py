"""Gradients of the hybrid's tail in Triton, through out and through lse.

With p the joint weights and dp_j = <grad_out, v_j> after dropout, the gradient of a score is p_j (dp_j - delta), where
delta is the mean of dp over head and tail less grad_lse. One kernel makes delta and dq, one the gradients of the shared
keys: there the queries are split among programs, whose sums are added in order afterwards, so the bits are the same
every time.
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
from ..attend.windows import zeros
from ..drawn_tail import shared_keys as sk
from ..drawn_tail.forward import block_queries, blocks_of_queries, row_blocks, tail_flags, tail_of, thinned
from ..primitives import points, put
from ..runtime.launch import Kernel, on_device

# Of programs that share the queries in the gradient of the shared keys: a few for every processor of a large device.
PROGRAMS = 512


class Upstream(NamedTuple):
    """What the backward pass begins with, contiguous."""

    grad_out: Tensor  # [B, H, *G, F]
    grad_lse: Tensor  # [B, H, *G]
    offset: Tensor  # [B, H, *G]
    to_head: Tensor  # [B, H, *G], <grad_out, head_out>


class Totals(NamedTuple):
    """What the gradients of all scores of a query need, float32 [B, H, *G]. A weight is factor * `powers` over top.

    The normaliser is computed again: from lse, rounded, the weights would not add up to 1 where scores are large.
    """

    share: Tensor  # of the head
    delta: Tensor
    top: Tensor
    factor: Tensor


def drawn_tail_backward(
    call: DrawnTailCall, offset: Tensor, names: Tensor, represents: Tensor, grad_out: Tensor, grad_lse: Tensor
) -> TailGrads:
    """offset, names, represents of the DrawnTail -> gradients in the dtypes of their tensors."""
    q, k, v = call.q, call.k, call.v
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    wide_grad = grad_out.float()
    to_head = torch.where(call.head_lse == -torch.inf, 0, (wide_grad * call.head_out).sum(-1))
    totals = Totals(*(torch.empty_like(to_head) for _ in range(4)))
    dk, dv = (torch.zeros(math.prod(x.shape[:-1]), x.shape[-1], device=q.device) for x in (k, v))
    if to_head.numel():
        (rows, drawn), flags = names.flatten(0, 1).shape, tail_flags(call, forward=False)
        blocks, key_blocks = blocks_of_queries(call, flags), -(-drawn // sk.BLOCK_K)
        splits = max(1, min(blocks // rows, PROGRAMS // max(rows * key_blocks, 1)))
        parts = [torch.empty((splits, rows * drawn, x.shape[-1]), device=q.device) for x in (k, v)]
        with on_device(q):
            tail = tail_of(call, sk.side_by_side(call, names, represents, False))
            above = Upstream(*(x.contiguous() for x in (grad_out, grad_lse, offset, to_head)))
            Kernel(queries_kernel, blocks, flags)(tail, above, totals, dq)
            Kernel(keys_kernel, rows * key_blocks * splits, flags)(tail, above, totals, *parts, splits)
            at = tail_rows(names.flatten(0, 1), q.shape[1], k.shape[1], math.prod(grid_of(k))).flatten()
            for sums, part in zip((dk, dv), parts, strict=True):
                sums.index_add_(0, at, part.sum(0))
    d_head = totals.share.unsqueeze(-1) * wide_grad
    d_head_lse = torch.where(totals.share == 0, 0, totals.share * (to_head - totals.delta))
    grads, like = (dq, dk, dv, d_head, d_head_lse), (q, k, v, call.head_out, call.head_lse)
    return TailGrads(*(d.to(x.dtype).reshape(x.shape) for d, x in zip(grads, like, strict=True)))


@triton.jit
def queries_kernel(t, above, totals, dq, MODE: tl.constexpr, ROW: tl.constexpr, VROW: tl.constexpr):
    """dq and the totals."""
    queries, blocks = points(t.geo.q), row_blocks(t, MODE)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    here = block_queries(row, tl.program_id(0) % blocks, t, MODE)
    query, valid, point = here.query, here.exists, row * queries + here.query
    shared = sk.shared_row(row, t, MODE, ROW, VROW)
    mine = sk.blocks_of(t.q + row * queries * ROW.E, query, valid, ROW)
    grad_out = sk.blocks_of(above.grad_out + row * queries * VROW.E, query, valid, VROW)

    low = sk.corners_of(here, t, MODE)
    top = tl.full([MODE.BLOCK_Q], sk.LOWEST, tl.float32)
    whole, mean = tl.zeros([MODE.BLOCK_Q], tl.float32), tl.zeros([MODE.BLOCK_Q], tl.float32)
    seen = tl.zeros([MODE.BLOCK_Q], tl.int32)
    for start in range(0, shared.padded, MODE.BLOCK_K):
        at, s, ok = sk.tail_scores(start, mine, low, shared, here, t, MODE, ROW)
        higher = tl.maximum(top, tl.max(s, 1))
        shrink, p = sk.powers(top, higher), sk.powers(s, higher[:, None])
        top = higher
        whole = whole * shrink + tl.sum(p, 1)
        dp = thinned(sk.products(grad_out, shared.v, at, MODE, VROW), at, shared, here, t, MODE)
        mean = mean * shrink + tl.sum(tl.where(ok, p * dp, 0.0), 1)
        seen += tl.sum(ok.to(tl.int32), 1)
    head = tl.load(t.head_lse + point, mask=valid, other=-float("inf")).to(tl.float32)
    add = tl.load(above.offset + point, mask=valid, other=0.0)
    factor, share, top, _ = sk.joined(top, whole, seen > 0, add, head)
    delta = mean * factor + tl.where(share == 0, 0.0, share * tl.load(above.to_head + point, mask=valid, other=0.0))
    delta -= tl.load(above.grad_lse + point, mask=valid, other=0.0)
    tl.store(totals.share + point, share, mask=valid)
    tl.store(totals.delta + point, delta, mask=valid)
    tl.store(totals.top + point, top, mask=valid)
    tl.store(totals.factor + point, factor, mask=valid)

    sums = zeros(MODE.BLOCK_Q, ROW)
    for start in range(0, shared.padded, MODE.BLOCK_K):
        at, s, ok = sk.tail_scores(start, mine, low, shared, here, t, MODE, ROW)
        p = sk.powers(s, top[:, None]) * factor[:, None]
        dp = thinned(sk.products(grad_out, shared.v, at, MODE, VROW), at, shared, here, t, MODE)
        ds = tl.where(ok, p * (dp - delta[:, None]) * t.scale, 0.0)
        more = ()
        for n in tl.static_range(len(sums)):
            # Where a slope is 0, what is not finite must not spoil the sum; elsewhere the slope is NaN.
            theirs = sk.finite(sk.whole_block(shared.k, at, n, ROW))
            more += (sk.product(ds.to(theirs.dtype), theirs, sums[n]),)
        sums = more
    put(dq + row * queries * ROW.E, query, sums, valid, ROW)


@triton.jit
def keys_kernel(t, above, totals, dk, dv, splits, MODE: tl.constexpr, ROW: tl.constexpr, VROW: tl.constexpr):
    """Program (row, block of keys, split) adds up its share of the row's queries: dk, dv [splits, B, H, m, width]."""
    queries, drawn = points(t.geo.q), t.shared.drawn
    blocks, key_blocks = row_blocks(t, MODE), (drawn + MODE.BLOCK_K - 1) // MODE.BLOCK_K
    split, block = tl.program_id(0) % splits, tl.program_id(0) // splits
    row = (block // key_blocks).to(tl.int64)
    rows = tl.num_programs(0) // (splits * key_blocks)
    first = (block % key_blocks) * MODE.BLOCK_K
    shared = sk.shared_row(row, t, MODE, ROW, VROW)
    k_sums, v_sums = zeros(MODE.BLOCK_K, ROW), zeros(MODE.BLOCK_K, VROW)
    for number in range(split, blocks, splits):
        here = block_queries(row, number, t, MODE)
        query, valid, point = here.query, here.exists, row * queries + here.query
        mine = sk.blocks_of(t.q + row * queries * ROW.E, query, valid, ROW)
        grad_out = sk.blocks_of(above.grad_out + row * queries * VROW.E, query, valid, VROW)
        top = tl.load(totals.top + point, mask=valid, other=0.0)
        factor = tl.load(totals.factor + point, mask=valid, other=0.0)
        delta = tl.load(totals.delta + point, mask=valid, other=0.0)
        at, s, ok = sk.tail_scores(first, mine, sk.corners_of(here, t, MODE), shared, here, t, MODE, ROW)
        p = sk.powers(s, top[:, None]) * factor[:, None]
        dp = thinned(sk.products(grad_out, shared.v, at, MODE, VROW), at, shared, here, t, MODE)
        ds = tl.trans(tl.where(ok, p * (dp - delta[:, None]) * t.scale, 0.0))
        p = thinned(p, at, shared, here, t, MODE)
        k_more, v_more = (), ()
        for n in tl.static_range(len(k_sums)):
            k_more += (sk.product(ds.to(mine[n].dtype), sk.finite(mine[n]), k_sums[n]),)
        for n in tl.static_range(len(v_sums)):
            v_more += (sk.product(tl.trans(p).to(grad_out[n].dtype), grad_out[n], v_sums[n]),)
        k_sums, v_sums = k_more, v_more
    at = first + tl.arange(0, MODE.BLOCK_K)
    slot = (split.to(tl.int64) * rows + row) * drawn + at
    put(dk, slot, k_sums, at < drawn, ROW)
    put(dv, slot, v_sums, at < drawn, VROW)
